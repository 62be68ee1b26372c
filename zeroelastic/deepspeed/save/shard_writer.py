"""A rank writes its files: the elastic optimizer state, digests made while files are written, and snapshots.

A snapshot is taken while training waits, and written later. The pickled part of each file is on the disk when ``save``
returns (``torch_file.save``). Only storages are copied, each once, to their places in memory images of the files
(``torch_file.image``). The memory is kept for the next save: the size of this rank's two files, which hold its part of
the optimizer state and of frozen parameters, and the buffers. It is pinned if any tensor is on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from zeroelastic.checkpoint.rank_layout import elastic_table
from zeroelastic.checkpoint.tag_files import SAVE_ID, parse_rank_file
from zeroelastic.core.digest import combine, stream_seed
from zeroelastic.deepspeed.client_state import checked_client_state
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import LiveStreams, LocalDigests, digest_pieces
from zeroelastic.deepspeed.live.kinds import listed_by_optimizer
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import class_path
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.patching import patched
from zeroelastic.errors import SaveError, UnsupportedError
from zeroelastic.torch_file.image import FileImage, host_memory
from zeroelastic.torch_file.save import DigestRange, write_skeleton, write_torch_file

logger = logging.getLogger(__name__)

_SLACK = 64 << 10
_TORCH_SAVE = TorchCheckpointEngine.save
"""DeepSpeed's own method: somebody may put another in its place later."""


def elastic_state_dict(
    live: LiveOptimizer,
    *,
    save_id: str,
    train_batch_size: int,
    alias: bool,
    share_storage: bool = True,
    digests: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state in the elastic format (docs/concepts/format.md): views of the live tensors.

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
    _, tp = live.sharing.place
    if tp.size > 1:
        rest |= {"tp_rank": tp.rank, "tp_size": tp.size}
    if digests is not None:
        rest["digests"] = digests
    state["base_optimizer_state"] = base
    state["zeroelastic"] = elastic_table(
        live.layout, live.rank, save_id=save_id, train_batch_size=train_batch_size, rest=rest, topology=live.topology
    )
    if alias and share_storage:
        state["optimizer_state_dict"] = nested
    return state


def elastic_state(
    engine: Engine, live: LiveOptimizer, shard: ShardWriter, save_id: str
) -> Callable[[], dict[str, Any]]:
    """Return the ``state_dict`` of the optimizer for the time of a save in the elastic format."""
    return lambda: elastic_state_dict(
        live,
        save_id=save_id,
        train_batch_size=engine.train_batch_size(),
        alias=True,
        share_storage=shard.shares_storage,
        digests=shard.table,
    )


def digest_sums(live: LiveOptimizer, digests: LocalDigests) -> torch.Tensor:
    """Sum each trained parameter's partial digests over state keys: int64, shape ``(num_params,)``."""
    sums = dict.fromkeys((param.name for param in live.layout.params), 0)
    for stream, digest in digests.sums().items():
        if stream.param in sums:
            sums[stream.param] = combine(sums[stream.param], digest)
    return torch.from_numpy(np.array(list(sums.values()), dtype=np.uint64).view(np.int64))


def writes_with_torch(checkpoint_engine: Any) -> bool:
    """Return whether an engine only calls ``torch.save`` into a zip archive, so that its files can be written here."""
    return (
        type(checkpoint_engine) is TorchCheckpointEngine
        and TorchCheckpointEngine.save is _TORCH_SAVE
        and "save" not in vars(checkpoint_engine)
        and bool(checkpoint_engine.zipfile_serialization)
    )


class ShardWriter:
    """Writes what ``TorchCheckpointEngine.save`` is given, the same bytes, and digests it on the way.

    ``table``, the digest sums inside the elastic state dict, is filled when everything else of its file is written.
    """

    shares_storage = True
    """Whether views of one storage are views of one storage in the file."""

    def __init__(self, original: Any, live: LiveOptimizer, streams: LiveStreams, options: Options) -> None:
        self.table = torch.zeros(live.layout.num_params, dtype=torch.int64, device="cpu")
        self._save_by_torch, self._live, self._streams, self._options = original.save, live, streams, options
        self._known: list[int | None] = [None] * len(streams.pieces)
        self._runs = _runs_of(streams)
        """The pieces that are digested while they are written: each is one run of a tensor."""

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
            self._save_by_torch(state_dict, path)
        else:
            self.learn_of_runs(found)

    def complete(self) -> None:
        """Digest the state that no file held; from here on nothing of the live state is used."""
        self._known = [*self.digests().sums().values()]

    def digests(self) -> LocalDigests:
        """Return the partial digests of this rank, complete: the state that no file held is digested now."""
        return self._streams.digest(self._known)

    def learn_of_runs(self, found: Sequence[int | None]) -> None:
        """Take the partial digests of pieces that were digested while they were written; None for the others."""
        of_runs = iter(found)
        new = [next(of_runs) if piece.runs is None else None for piece in self._streams.pieces]
        self._known = [old if old is not None else own for old, own in zip(self._known, new, strict=True)]

    def _fill_table(self, found: Sequence[int | None]) -> None:
        self.learn_of_runs(found)
        made = self.digests()
        self._known = [*made.sums().values()]
        self.table.copy_(digest_sums(self._live, made))


class OtherEngineWriter(ShardWriter):
    """Has a checkpoint engine that is not torch's write; everything is digested at once."""

    def __init__(self, original: Any, live: LiveOptimizer, streams: LiveStreams, options: Options) -> None:
        super().__init__(original, live, streams, options)
        self._fill_table([None] * len(self._runs))
        sharing = getattr(original, "preserves_storage_sharing", None)
        self.shares_storage = bool(sharing()) if callable(sharing) else True
        self._save: Callable[[Any, str], None] = original.save

    def save(self, state_dict: Any, path: str) -> None:
        """Have the engine write one file."""
        self._save(state_dict, path)


def _runs_of(streams: LiveStreams) -> list[DigestRange]:
    """Return the pieces that are digested while they are written; the others are digested apart."""
    return [
        DigestRange(piece.tensor, stream_seed(piece.param, piece.key), piece.start)
        for piece in streams.pieces
        if piece.runs is None
    ]


class HostMemory:
    """Host memory for images. The next snapshot uses it again; it is freed with this object."""

    def __init__(self) -> None:
        self._used: list[tuple[torch.Tensor, bool]] = []  # and whether it was to be pinned
        self._spare: list[tuple[torch.Tensor, bool]] = []

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
        """Wait for copies from a GPU, and free the blocks that this snapshot did not need."""
        self._spare = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()


class Snapshot(ShardWriter):
    """Keeps the argument of ``TorchCheckpointEngine.save`` as it is now; ``write`` writes it later, in any thread."""

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
            self._fill_table([None] * len(self._runs))
            self._save_by_torch(state_dict, path)
            return
        memory = self._memory.take(laid.nbytes, pinned=laid.on_gpu)
        image = FileImage(laid, memory, digest_ranges=self._runs, last=[self.table])
        self._keep(image)
        self._images.append(image)

    def complete(self) -> None:
        """Digest the state that is in neither file; from here on nothing of the live state is used."""
        self._memory.end()
        lost = [i for i, found in enumerate(self._known) if found is None and not self._kept[i]]
        for i, digest in zip(lost, digest_pieces([self._streams.pieces[i] for i in lost]), strict=True):
            self._known[i] = digest
        self._streams = replace(self._streams, pieces=tuple(self._pieces))
        self._runs = _runs_of(self._streams)

    def write(self, put: Callable[[FileImage], None]) -> None:
        """Digest all files, and have ``put`` write each. Raises SaveError naming the file."""
        for image in self._images:
            try:
                found = image.complete(before_last=self._fill_table, executor=self._options.host_io_engine)
                self.learn_of_runs(found)
                put(image)
            except OSError as error:
                raise not_written(image.path, error) from error

    def _keep(self, image: FileImage) -> None:
        """Take the pieces that are digested from the copies."""
        for i, piece in enumerate(self._pieces):
            copy = None if self._kept[i] else image.view(piece.tensor)
            if copy is not None:
                self._pieces[i] = piece._replace(tensor=copy)
                self._kept[i] = True


def write_local_files(
    engine: Engine,
    live: LiveOptimizer,
    shard: ShardWriter,
    *,
    directory: Path,
    save_id: str,
    client_state: Mapping[str, Any],
    writes_module: bool,
    tied: Mapping[str, str],
) -> None:
    """Give ``shard.save`` the files that DeepSpeed would write into ``directory``, without a collective.

    ``DeepSpeedEngine.save_checkpoint`` (0.19.8) has barriers between its parts, and partitions and gathers persistent
    parameters, which takes collectives of all ranks. Its files do not need them: of a partitioned parameter a file has
    an empty tensor, which replaces one that is whole at the moment.

    The optimizer state is in the elastic format at stage 3, and DeepSpeed's own at stages 1 and 2, whatever the
    configuration says. ``writes_module`` and ``tied`` as of ``saving_alone``. Raises UnsupportedError for a client
    state that no load takes, and as ``shard.save``.
    """

    def save(state_dict: Any, path: str) -> None:
        name = Path(path).name
        shard.save(with_save_id(state_dict, name, save_id), str(directory / name))

    elastic = {"state_dict": elastic_state(engine, live, shard, save_id)} if live.has_elastic_form else {}
    with (
        patched(ds_engine, log_dist=lambda *args, **kwargs: None),  # a line at each step
        listed_by_optimizer(engine, live.trained),
        live.saving(engine, elastic=live.has_elastic_form, written=lambda: None),
        live.saving_alone(engine, writes_module=writes_module, tied=tied),
        patched(engine, _copy_recovery_script=lambda save_path: None),
        patched(engine.checkpoint_engine, save=save),
        patched(engine.optimizer, **elastic),
    ):
        kept = checked_client_state(engine, client_state)
        engine._save_checkpoint(str(directory.parent), directory.name, client_state=kept)
        engine._save_zero_checkpoint(str(directory.parent), directory.name)


def with_save_id(state_dict: Any, name: str, save_id: str) -> Any:
    """Add the id of the save to the content of a rank's file, other than a file of an expert."""
    return state_dict if parse_rank_file(name) is None else {**state_dict, SAVE_ID: save_id}


def not_written(path: object, error: Exception) -> SaveError:
    """The error for a file of a save that could not be written."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    return SaveError(f"{path}: cannot be written: {why}. The tag is not committed, and `latest` is unchanged.")
