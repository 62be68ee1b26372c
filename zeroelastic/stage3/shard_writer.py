"""How a rank's files are written and digested while a save of ours runs: in one pass wherever that is possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from zeroelastic.agree import settle
from zeroelastic.digest import stream_seed
from zeroelastic.errors import UnsupportedError
from zeroelastic.laid_out import Run
from zeroelastic.patching import patched
from zeroelastic.stage3.contents import LiveStreams, LocalDigests, live_streams
from zeroelastic.stage3.hand_over import EngineGuard, HandOver
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.save import digest_sums
from zeroelastic.writer import write_torch_file

logger = logging.getLogger(__name__)

_TORCH_SAVE = TorchCheckpointEngine.save
"""As DeepSpeed defines it: somebody may put another in its place later."""


@contextmanager
def shard_writer(
    engine: Any,
    live: LiveState,
    *,
    tag_dir: Path,
    making: Path,
    with_frozen: bool,
    options: Options,
    writer: Callable[[Any, LiveState, LiveStreams, Options], ShardWriter],
) -> Iterator[ShardWriter | DigestedShard]:
    """While it lasts, the engine's files are written by a ``writer``, if its checkpoint engine is torch's.

    What another checkpoint engine is going to write is digested at once. Files of ``tag_dir`` are written in
    ``making``. Collective; an error of one rank is raised on
    all of them, at the end where it came while a file was written: DeepSpeed's own barriers are passed by all.
    """
    original = engine.checkpoint_engine
    streams = settle(lambda: live_streams(live, with_frozen=with_frozen))
    shard: ShardWriter | DigestedShard
    if writes_with_torch(original):
        shard = writer(original, live, streams, options)
    else:
        digests = settle(streams.digest)
        sharing = getattr(original, "preserves_storage_sharing", None)
        shares = bool(sharing()) if callable(sharing) else True
        hand_over = (
            HandOver(original, streams.pieces, shares_storage=shares) if original.is_decoupled() else original.save
        )
        shard = DigestedShard(digest_sums(live, digests), shares, digests, hand_over)
    guard = EngineGuard(original, shard.save, tag_dir=tag_dir, making=making)
    copy = guard.guarded(engine._copy_recovery_script)  # called on rank 0 only
    with patched(engine, checkpoint_engine=guard, _copy_recovery_script=copy):
        yield shard
    settle(guard.raise_failure)


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

    def __init__(self, original: Any, live: LiveState, streams: LiveStreams, options: Options) -> None:
        self.table = torch.zeros(live.layout.num_params, dtype=torch.int64)
        self._original, self._live, self._streams, self._options = original, live, streams, options
        self._known: list[int | None] = [None] * len(streams.streams)
        self._runs = runs_of(streams)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; a layout of torch that is not known here is left to torch, with the digests made apart."""
        try:
            found = write_torch_file(
                state_dict,
                Path(path),
                runs=self._runs,
                last=[self.table],
                before_last=self._fill_table,
                sync=self._options.fsync,
                executor=self._options.host_executor,
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


def runs_of(streams: LiveStreams) -> list[Run]:
    """What is digested while it is written."""
    return [
        Run(piece, stream_seed(*stream), start)
        for stream, piece, start in zip(streams.streams, streams.pieces, streams.starts, strict=True)
    ]
