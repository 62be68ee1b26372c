"""What a rank writes, and how: the elastic optimizer state, files digested while they are written, and snapshots.

A snapshot is taken while training waits, and written later. The pickled part of each file is on the disk when ``save``
returns (``torch_file.skeleton``). Only storages are copied, each once, to their places in memory images of the files
(``torch_file.image``). The memory is kept for the next save: the size of this rank's two files, which hold its part of
the optimizer state and of frozen parameters, and the buffers. Where any of it is on a GPU, the memory is pinned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from zeroelastic.checkpoint.elastic_table import elastic_table
from zeroelastic.core.digest import combine, stream_seed
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import LiveStreams, LocalDigests, digest_pieces
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import class_path
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.engine_proxy import CheckpointEngineProxy, CopyingSave, not_written
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.image import FileImage, host_memory
from zeroelastic.torch_file.save import write_torch_file
from zeroelastic.torch_file.skeleton import DigestRange, write_skeleton

logger = logging.getLogger(__name__)

_SLACK = 64 << 10
_TORCH_SAVE = TorchCheckpointEngine.save
"""As DeepSpeed defines it: somebody may put another in its place later."""


def elastic_state_dict(
    live: LiveOptimizer,
    *,
    save_id: str,
    train_batch_size: int,
    alias: bool,
    share_storage: bool = True,
    digests: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The optimizer's state in the elastic format (docs/concepts/format.md); its tensors are views of the live ones.

    ``alias`` adds the stock nested ``optimizer_state_dict`` over the same storages, which makes the file loadable by
    stock DeepSpeed. Without ``share_storage`` (an engine that writes every tensor on its own) unpadded tensors are
    contiguous clones and there is no alias. ``digests`` (see ``digest_sums``) go into the file so that damage can be
    traced to it. Padding of the live buffers is set to zero, here and on disk.
    """
    live.zero_padding()
    state = live.state_dict()
    nested = state.pop("optimizer_state_dict")
    owned = live.layout.owned(live.rank)[1]
    base: list[dict[str, Any]] = []
    for i in range(live.layout.num_sub_groups):
        members = np.flatnonzero(live.layout.sub_group == i).tolist()
        tensors, scalars = live.split_state(i)
        entry: dict[str, Any] = {}
        for key, value in live.state(i).items():
            if key in tensors:
                unpadded = [
                    tensors[key][int(live.layout.offset[p]) : int(live.layout.offset[p] + owned[p])] for p in members
                ]
                entry[key] = unpadded if share_storage else [tensor.clone() for tensor in unpadded]
            else:
                assert key in scalars
                entry[key] = value
        base.append(entry)
    rest: dict[str, object] = {
        "param_groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(live.base.param_groups, live.groups, strict=True)
        ],
        "optimizer": class_path(live.base),
    }
    if live.grad_scaler is not None:
        rest["grad_scaler"] = live.grad_scaler.state_dict()
    if live.tp.size > 1:
        rest |= {"tp_rank": live.tp.rank, "tp_size": live.tp.size}
    if digests is not None:
        rest["digests"] = digests
    state["base_optimizer_state"] = base
    state["zeroelastic"] = elastic_table(
        live.layout, live.rank, save_id=save_id, train_batch_size=train_batch_size, rest=rest
    )
    if alias and share_storage:
        state["optimizer_state_dict"] = nested
    return state


def digest_sums(live: LiveOptimizer, digests: LocalDigests) -> torch.Tensor:
    """The sum over state keys of each trained parameter's partial digests: int64, shape ``(num_params,)``."""
    sums = dict.fromkeys((param.name for param in live.layout.params), 0)
    for (name, _), digest in zip(digests.streams, digests.partial, strict=True):
        if name in sums:
            sums[name] = combine(sums[name], digest)
    return torch.from_numpy(np.array(list(sums.values()), dtype=np.uint64).view(np.int64))


@contextmanager
def shard_writer(
    engine: Engine,
    live: LiveOptimizer,
    *,
    tag_dir: Path,
    staging_dir: Path,
    streams: LiveStreams,
    options: Options,
    writer: Callable[[Any, LiveOptimizer, LiveStreams, Options], ShardWriter],
) -> Iterator[tuple[ShardWriter | DigestedShard, Callable[[], None]]]:
    """While it lasts, the engine's files are written by a ``writer``, if its checkpoint engine is torch's.

    What another checkpoint engine is going to write is digested at once. ``streams`` are what is digested. Files of
    ``tag_dir`` are written in ``staging_dir``. Collective. Gives the writer, and what raises the error of this rank if
    one came while a file was written: then DeepSpeed's own barriers have been passed by all.
    """
    original = engine.checkpoint_engine
    shard: ShardWriter | DigestedShard
    if writes_with_torch(original):
        shard = writer(original, live, streams, options)
    else:
        digests = all_or_raise(streams.digest)
        sharing = getattr(original, "preserves_storage_sharing", None)
        shares = bool(sharing()) if callable(sharing) else True
        copying_save = (
            CopyingSave(original, (piece.tensor for piece in streams.pieces), shares_storage=shares)
            if original.is_decoupled()
            else original.save
        )
        shard = DigestedShard(digest_sums(live, digests), shares, digests, copying_save)
    proxy = CheckpointEngineProxy(original, shard.save, tag_dir=tag_dir, staging_dir=staging_dir)
    copy = proxy.guarded(engine._copy_recovery_script)  # called on rank 0 only
    with patched(engine, checkpoint_engine=proxy, _copy_recovery_script=copy):
        yield shard, proxy.raise_failure


def writes_with_torch(checkpoint_engine: Any) -> bool:
    """Whether an engine does nothing but ``torch.save`` into a zip archive, so that its files can be written by us."""
    return (
        type(checkpoint_engine) is TorchCheckpointEngine
        and TorchCheckpointEngine.save is _TORCH_SAVE
        and "save" not in vars(checkpoint_engine)
        and bool(checkpoint_engine.zipfile_serialization)
    )


@dataclass(frozen=True, slots=True)
class DigestedShard:
    """A shard that is digested already: what a ``ShardWriter`` is asked for, where another engine writes."""

    table: torch.Tensor
    shares_storage: bool
    made: LocalDigests
    save: Callable[[Any, str], None]

    def complete(self) -> None:
        """Nothing is left to be digested."""

    def digests(self) -> LocalDigests:
        """The partial digests of this rank."""
        return self.made


class ShardWriter:
    """Writes what ``TorchCheckpointEngine.save`` is given, the same bytes, and digests it on the way.

    ``table``, the digest sums inside the elastic state dict, is filled when everything else of its file is written.
    """

    shares_storage = True

    def __init__(self, original: Any, live: LiveOptimizer, streams: LiveStreams, options: Options) -> None:
        self.table = torch.zeros(live.layout.num_params, dtype=torch.int64)
        self._original, self._live, self._streams, self._options = original, live, streams, options
        self._known: list[int | None] = [None] * len(streams.pieces)
        self._runs = runs_of(streams)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; a layout of torch that is not known here is left to torch, with the digests made apart."""
        try:
            found = write_torch_file(
                state_dict,
                Path(path),
                digest_ranges=self._runs,
                last=[self.table],
                before_last=self._fill_table,
                sync=self._options.fsync,
                executor=self._options.io_engine,
            )
        except UnsupportedError as error:
            logger.warning("saving through torch alone, which is slower: %s", error)
            self._fill_table([None] * len(self._runs))
            self._original.save(state_dict, path)
        else:
            self._learn(found)

    def complete(self) -> None:
        """Digest what no file held; from here on nothing of the live state is used."""
        self._known = list(self.digests().partial)

    def digests(self) -> LocalDigests:
        """The partial digests of this rank, complete: what no file held is digested now."""
        return self._streams.digest(self._known)

    def _learn(self, found: Sequence[int | None]) -> None:
        self._known = [old if old is not None else new for old, new in zip(self._known, found, strict=True)]

    def _fill_table(self, found: Sequence[int | None]) -> None:
        self._learn(found)
        made = self.digests()
        self._known = list(made.partial)
        self.table.copy_(digest_sums(self._live, made))


def runs_of(streams: LiveStreams) -> list[DigestRange]:
    """What is digested while it is written."""
    return [DigestRange(piece.tensor, stream_seed(piece.param, piece.key), piece.start) for piece in streams.pieces]


class HostMemory:
    """Host memory for images. The next snapshot uses it again; it is freed with this object."""

    def __init__(self) -> None:
        self._used: list[tuple[torch.Tensor, bool]] = []  # and whether it was to be pinned
        self._spare: list[tuple[torch.Tensor, bool]] = []

    @property
    def nbytes(self) -> int:
        """The bytes that the last snapshot used."""
        return sum(memory.numel() for memory, _ in self._used)

    def begin(self) -> None:
        """Begin a snapshot: nothing reads the images of the last one any more."""
        self._spare, self._used = self._used, []

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """At least ``nbytes``, from the beginning of a page: the smallest spare block that fits, or a new one."""
        fitting = [i for i, (memory, was) in enumerate(self._spare) if memory.numel() >= nbytes and was == pinned]
        if fitting:
            found = self._spare.pop(min(fitting, key=lambda i: self._spare[i][0].numel()))
        else:  # what is pickled may grow a little
            found = host_memory(nbytes + nbytes // 64 + _SLACK, pinned=pinned), pinned
        self._used.append(found)
        return found[0]

    def end(self) -> None:
        """Wait for copies from a GPU, and free what this snapshot did not need."""
        self._spare = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()


class Snapshot(ShardWriter):
    """Keeps what ``TorchCheckpointEngine.save`` is given as it is now; ``write`` writes it later, in any thread."""

    def __init__(
        self, original: Any, live: LiveOptimizer, streams: LiveStreams, options: Options, memory: HostMemory
    ) -> None:
        super().__init__(original, live, streams, options)
        self._memory, self._images = memory, list[FileImage]()
        self._pieces = list(streams.pieces)
        self._kept = [False] * len(self._pieces)
        memory.begin()

    def save(self, state_dict: Any, path: str) -> None:
        """Lay out one file and copy its payload; a layout of torch that is not known here is written by torch, now."""
        try:
            laid = write_skeleton(state_dict, Path(path))
        except UnsupportedError as error:
            logger.warning("saving through torch alone, and not in the background: %s", error)
            self._fill_table(self._known)
            self._original.save(state_dict, path)
            return
        memory = self._memory.take(laid.nbytes, pinned=laid.on_gpu)
        image = FileImage(laid, memory, digest_ranges=self._runs, last=[self.table])
        self._keep(image)
        self._images.append(image)

    def complete(self) -> None:
        """Digest what is in neither file; from here on nothing of the live state is used."""
        self._memory.end()
        lost = [i for i, found in enumerate(self._known) if found is None and not self._kept[i]]
        for i, digest in zip(lost, digest_pieces([self._streams.pieces[i] for i in lost]), strict=True):
            self._known[i] = digest
        self._streams = replace(self._streams, pieces=tuple(self._pieces))
        self._runs = runs_of(self._streams)

    def write(self) -> None:
        """Digest and write all files. Raises SaveError naming the file."""
        for image in self._images:
            try:
                self._learn(image.complete(before_last=self._fill_table, executor=self._options.host_io_engine))
                image.write(sync=self._options.fsync)
            except OSError as error:
                raise not_written(image.path, error) from error

    def _keep(self, image: FileImage) -> None:
        """Take the pieces that are digested from the copies."""
        for i, piece in enumerate(self._pieces):
            copy = None if self._kept[i] else image.view(piece.tensor)
            if copy is not None:
                self._pieces[i] = piece._replace(tensor=copy)
                self._kept[i] = True
