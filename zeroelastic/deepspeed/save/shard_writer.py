"""How a rank's files are written and digested during a save: in one pass wherever that is possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from zeroelastic.core.digest import stream_seed
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import LiveStreams, LocalDigests
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.elastic_state import digest_sums
from zeroelastic.deepspeed.save.engine_proxy import CheckpointEngineProxy, CopyingSave
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.save import write_torch_file
from zeroelastic.torch_file.skeleton import DigestRange

logger = logging.getLogger(__name__)

_TORCH_SAVE = TorchCheckpointEngine.save
"""As DeepSpeed defines it: somebody may put another in its place later."""


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
