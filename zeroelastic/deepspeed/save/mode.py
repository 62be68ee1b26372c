"""A save from the first file to the commit: what all modes share, and what a destination of checkpoints has to do.

A mode says who writes the files and who waits for the commit: ``plain``, ``background``, ``decoupled``, ``store``. A
destination says where the files are written and how they become a tag: ``plain.Directory``, ``store.StoreTarget``.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.deepspeed.client_state import saved_step
from zeroelastic.deepspeed.engine import Engine, accumulated_micro_batches
from zeroelastic.deepspeed.engine_state import lineage_of, link, state_of
from zeroelastic.deepspeed.live.digests import LiveStreams, gather_over_tp, live_streams, whole_contents
from zeroelastic.deepspeed.live.kinds import listed_by_optimizer
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.notices import notice
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.after_save import AfterSave, removal_note
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import Expected, PendingCommit, written_files
from zeroelastic.deepspeed.save.shard_writer import DigestedShard, HostMemory, ShardWriter, Snapshot, shard_writer
from zeroelastic.deepspeed.storage_rules import one_module_writer
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.monitoring.spans import span

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What ``save_checkpoint`` was called with, and when, on the monotonic clock.

    ``save_dir`` is absolute; ``named`` is the tag directory in the caller's own words, the same on all ranks.
    """

    save_dir: str
    tag: str
    named: str
    client_state: Any
    save_latest: bool
    exclude_frozen_parameters: bool
    began: float

    @property
    def directory(self) -> FilePath:
        return as_path(self.save_dir)

    @property
    def tag_dir(self) -> FilePath:
        return self.directory / self.tag

    def call_deepspeed(self, original: Method, engine: Engine) -> Any:
        """The same call of DeepSpeed's own method."""
        args = (self.save_dir, self.tag, self.client_state, self.save_latest, self.exclude_frozen_parameters)
        return original(engine, *args)


@dataclass(frozen=True, slots=True)
class Saving:
    """A save in progress: what ``state_dict`` needs to make the elastic file of this rank."""

    save_id: str
    live: LiveOptimizer
    shard: ShardWriter | DigestedShard


class Destination(ABC):
    """Where the files of a save are written, and how they become the tag ``tag_dir``.

    DeepSpeed saves to ``deepspeed_dir``; what it writes for the tag goes into ``staging_dir``. ``run_dir`` has the tags
    of the run. Ranks that see the same directory have the same one of ``leaders``, by rank: the first of them, which
    acts for all of them.
    """

    def __init__(
        self, tag_dir: FilePath, *, run_dir: FilePath, deepspeed_dir: Path, staging_dir: Path, leaders: tuple[int, ...]
    ) -> None:
        self.tag_dir, self.run_dir = tag_dir, run_dir
        self.deepspeed_dir, self.staging_dir, self.leaders = deepspeed_dir, staging_dir, leaders
        self.is_leader = leaders[dist.get_rank()] == dist.get_rank()

    @abstractmethod
    def begin(self) -> None:
        """Prepare the destination, on the leader. Raises SaveError."""

    @abstractmethod
    def commit(self, save: PendingCommit, barrier: SaveBarrier) -> int:
        """Make the tag of files that are all written, on all ranks or none; then ``latest``. Collective.

        Returns the bytes of all files on rank 0, and 0 on the others. Raises SaveError on every rank when a file is
        missing, is not what it has to be, or a rank does not arrive: then the tag is what it was before the save.
        """

    def snapshot_writer(self, memory: HostMemory) -> Callable[..., ShardWriter]:
        """What makes the writer of a snapshot in ``memory``."""
        return partial(Snapshot, memory=memory)

    @abstractmethod
    def discard(self) -> None:
        """Remove what this rank has made of a save that failed."""

    @contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Remove what was made of the save when it fails within this context."""
        try:
            yield
        except Exception:
            self.discard()
            raise


class SaveMode(ABC):
    """One save: ``write`` has DeepSpeed write its files, or a snapshot of them; ``finish`` commits it, or begins to.

    ``save`` and ``shard`` are there when the files are written. It has no reference to the engine, which may end before
    the save does.
    """

    asks_for_latest = False
    """Whether DeepSpeed gets the caller's wish for ``latest``, and keeps it until it commits."""

    def __init__(
        self,
        request: SaveRequest,
        destination: Destination,
        live: LiveOptimizer,
        options: Options,
        barrier: SaveBarrier,
        after: AfterSave,
        *,
        save_id: str,
        elastic: bool,
    ) -> None:
        self.request, self.destination, self.live, self.options = request, destination, live, options
        self.barrier, self.after, self.save_id, self.elastic = barrier, after, save_id, elastic
        self.save: PendingCommit
        self.shard: ShardWriter | DigestedShard

    def writer(self) -> Callable[..., ShardWriter]:
        """What makes the writer of this rank's files, where the checkpoint engine is torch's."""
        return ShardWriter

    @abstractmethod
    def finish(self, engine: Engine) -> None:
        """Commit the save, or have it committed later. Raises on every rank what any rank failed with. Collective."""

    def write(self, engine: Engine, original: Method) -> Any:
        """DeepSpeed's own save, by this save's writer; returns what it returns. Collective."""
        request, destination, live = self.request, self.destination, self.live
        with destination.discarded_on_failure(), span("save.write"):
            streams = all_or_raise(self._begin)
            link(engine.optimizer, engine)
            with shard_writer(
                engine,
                live,
                tag_dir=destination.deepspeed_dir / request.tag,
                staging_dir=destination.staging_dir,
                streams=streams,
                options=self.options,
                writer=self.writer(),
            ) as (self.shard, raise_failure):
                with (
                    patched(state_of(engine), saving=Saving(self.save_id, live, self.shard)),
                    listed_by_optimizer(engine, live.trained),
                    one_module_writer(engine, live, destination.leaders),
                    patched(engine, _checkpoint_tag_validation=lambda tag: None),  # the tags have been compared
                    live.saving(engine, elastic=self.elastic, written=partial(self.barrier.wait, "write")),
                ):
                    done = replace(
                        request,
                        save_dir=str(destination.deepspeed_dir),
                        save_latest=request.save_latest and self.asks_for_latest,
                    ).call_deepspeed(original, engine)
                self.commit_info = engine.checkpoint_engine.commit_info
            lineage_of(engine).begun = self.save_id
            self.save = self._pending_commit(engine)

            def complete() -> None:
                raise_failure()
                self.shard.complete()
                live.sync()

            all_or_raise(complete)
        return done

    def add_contents(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Add the digests of all parameters over all ranks to what is committed. Collective."""
        live, trained = self.live, frozenset(param.name for param in self.live.layout.params)
        local = self.shard.digests()
        parts = gather_over_tp(live, (whole_contents(live, local, device=device, group=group), trained))
        self.save = replace(
            self.save,
            contents=tuple(content for contents, _ in parts for content in contents),
            trained=frozenset().union(*(names for _, names in parts)),
        )

    def note_saved(self) -> None:
        """Log the end of a save that was waited for, on rank 0."""
        if dist.get_rank() == 0:
            seconds = time.monotonic() - self.request.began
            notice(logger, f"{self.request.tag_dir}: saved in {seconds:.2f} s{removal_note(self.after.removed)}")

    def _begin(self) -> LiveStreams:
        if self.destination.is_leader:
            self.destination.begin()
        return live_streams(self.live, with_frozen=not self.request.exclude_frozen_parameters)

    def _pending_commit(self, engine: Engine) -> PendingCommit:
        request, live = self.request, self.live
        return PendingCommit(
            tag=request.tag,
            save_id=self.save_id,
            checkpoint_format="elastic" if self.elastic else "rigid",
            expected=Expected(
                rank=live.rank,
                tp=live.tp,
                global_steps=saved_step(engine, request.client_state),
                layout=live.layout,
                groups=live.groups,
                frozen=None if request.exclude_frozen_parameters else live.frozen.params,
                allow_globals=tuple(self.options.allow_globals),
            ),
            train_batch_size=engine.train_batch_size(),
            file_names=written_files(engine, self.destination.deepspeed_dir, request.tag),
            lineage=lineage_of(engine),
            lost_micro_batches=_warn_of_lost_micro_batches(engine, request.tag_dir),
        )


def _warn_of_lost_micro_batches(engine: Engine, tag_dir: FilePath) -> int:
    """How many micro batches wait in gradients, which DeepSpeed does not save; loudly, where there are any."""
    lost = accumulated_micro_batches(engine)
    if lost and dist.get_rank() == 0:
        logger.warning(
            "%s: LOST on a resume: the gradients of %d of %d micro batches, accumulated since the last optimizer step. "
            "No checkpoint of DeepSpeed holds gradients. Save at a gradient accumulation boundary to lose none.",
            tag_dir,
            lost,
            engine.gradient_accumulation_steps(),
        )
    return lost
