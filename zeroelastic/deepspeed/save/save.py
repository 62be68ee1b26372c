"""One save of an engine: DeepSpeed writes into a hidden directory, or a snapshot is taken; the commit makes the tag.

DeepSpeed's save is redirected by a checkpoint engine in the place of the run's own (``CheckpointEngineProxy``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.deepspeed.client_state import saved_step, saving_sampler
from zeroelastic.deepspeed.engine import Engine, accumulated_micro_batches, decides_boundaries
from zeroelastic.deepspeed.engine_state import last_save_of, link
from zeroelastic.deepspeed.live.digests import gather_over_tp, live_streams, whole_contents
from zeroelastic.deepspeed.live.kinds import listed_by_optimizer
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.own_weights import has_own_weights
from zeroelastic.deepspeed.options import Options, SaveRequest
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save import shard_writer
from zeroelastic.deepspeed.save.after_commit import remove_old_tags, uploads
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.checks import merged_weights
from zeroelastic.deepspeed.save.commit import PendingCommit, written_files
from zeroelastic.deepspeed.save.directory import SaveDirectory
from zeroelastic.distributed.collective import all_or_raise, broadcast
from zeroelastic.errors import SaveError, ZeroElasticError
from zeroelastic.observers import Saved, Tier, publish

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@dataclass(eq=False)
class Save:
    """One save: ``write`` has DeepSpeed write its files, or a snapshot of them; ``commit`` makes the tag of them.

    A snapshot goes into ``memory``; None: files are written at once. ``shard`` and ``pending`` are there when ``write``
    has returned. The call ``began`` at a monotonic time, at this ``step`` of the engine; ``stalled`` are the seconds
    that training has waited for a save that goes on behind it. ``removed`` are old tags that the commit has removed.
    The save has no reference to the engine, which may end before it does.
    """

    request: SaveRequest
    destination: SaveDirectory
    live: LiveOptimizer
    barrier: SaveBarrier
    options: Options
    save_id: str
    elastic: bool
    memory: shard_writer.HostMemory | None
    tier: Tier
    step: int
    began: float
    stalled: float | None = None
    removed: tuple[str, ...] = ()
    shard: shard_writer.ShardWriter = field(init=False)
    pending: PendingCommit = field(init=False)

    @property
    def seconds(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self.began

    @property
    def note(self) -> str:
        """The end of the line about the save: which tags are gone; mostly empty."""
        return f"; removed {', '.join(self.removed)}" if self.removed else ""

    def write(self, engine: Engine, original: Method) -> Any:
        """DeepSpeed's own save, by this save's writer; returns what it returns. Collective."""
        request, destination, live, options = self.request, self.destination, self.live, self.options
        checkpoint_engine = engine.checkpoint_engine

        def begin() -> shard_writer.ShardWriter:
            if destination.is_leader:
                destination.begin()
            # merged weights are not those of the base that a load compares
            is_base = not request.excludes_frozen or merged_weights(engine, live) is None
            streams = live_streams(live, with_frozen=is_base)
            if not shard_writer.writes_with_torch(checkpoint_engine):
                return shard_writer.OtherEngineWriter(checkpoint_engine, live, streams, options)
            if self.memory is not None:
                return shard_writer.Snapshot(checkpoint_engine, live, streams, options, self.memory)
            return shard_writer.ShardWriter(checkpoint_engine, live, streams, options)

        with destination.discarded_on_failure():
            self.shard = shard = all_or_raise(begin)
            link(engine.optimizer, engine)
            proxy = CheckpointEngineProxy(
                checkpoint_engine,
                shard.save,
                save_id=self.save_id,
                tag_dir=destination.deepspeed_dir / request.tag,
                staging_dir=destination.staging_dir,
            )
            state = (
                {"state_dict": shard_writer.elastic_state(engine, live, shard, self.save_id)} if self.elastic else {}
            )
            with (
                patched(
                    engine,
                    checkpoint_engine=proxy,
                    _copy_recovery_script=proxy.guarded(engine._copy_recovery_script),  # called on rank 0 only
                    _checkpoint_tag_validation=lambda tag: None,  # the tags have been compared
                ),
                patched(engine.optimizer, **state),
                listed_by_optimizer(engine, live.trained),
                saving_sampler(engine),
                one_module_writer(engine, live, destination.leaders),
                live.saving(engine, elastic=self.elastic, written=partial(self.barrier.wait, "write")),
            ):
                done = replace(request, save_dir=str(destination.deepspeed_dir), save_latest=False).call_deepspeed(
                    original, engine
                )
            last_save_of(engine).begun = self.save_id
            self.pending = self._pending_commit(engine, proxy.names)

            def complete() -> None:
                proxy.raise_failure()  # DeepSpeed's own barriers have been passed by all
                shard.complete()
                live.sync()

            all_or_raise(complete)
        return done

    def commit(self) -> None:
        """Write the files of a snapshot, and make the tag. Collective.

        Raises on every rank what any rank failed with.
        """
        destination, barrier, shard = self.destination, self.barrier, self.shard
        with destination.discarded_on_failure(), barrier.attribute_failures():
            if isinstance(shard, shard_writer.Snapshot):
                barrier.all_or_raise(lambda: destination.write_snapshot(shard), "write")
            self.add_contents()
        nbytes = destination.commit(self.pending, barrier)
        if destination.is_leader:
            self.removed = self.remove_old()
        if destination.rank == 0:
            seconds, tag_dir = self.seconds, str(self.request.tag_dir)
            publish(
                Saved(
                    tag=self.request.tag,
                    path=tag_dir,
                    step=self.step,
                    world_size=len(destination.leaders),
                    bytes=nbytes,
                    seconds=seconds,
                    stall_seconds=seconds if self.stalled is None else self.stalled,
                    background=self.stalled is not None,
                    tier=self.tier,
                )
            )
        if destination.is_leader:
            uploads.add(destination, self.options)

    def remove_old(self) -> tuple[str, ...]:
        """Remove the tags beyond the newest ``"keep"``, and return their names. Never raises."""
        destination = self.destination
        over_nodes = any(destination.leaders)
        return remove_old_tags(destination.run_dir, self.request.tag, self.options, over_nodes=over_nodes)

    def add_contents(self) -> None:
        """Add the digests of all parameters over all ranks to the pending commit. Collective."""
        live, trained = self.live, frozenset(param.name for param in self.live.whole.params)
        contents = whole_contents(live, self.shard.digests())
        parts = gather_over_tp(live, (contents, trained))
        self.pending = replace(
            self.pending,
            contents=tuple(content for contents, _ in parts for content in contents),
            trained=frozenset().union(*(names for _, names in parts)),
        )

    def _pending_commit(self, engine: Engine, names: Sequence[str]) -> PendingCommit:
        """Describe the save; ``names`` are of the files that this rank has written."""
        request, live = self.request, self.live
        file_names = written_files(engine, self.destination.deepspeed_dir, request.tag)
        return PendingCommit(
            request=request,
            live=live,
            save_id=self.save_id,
            checkpoint_format="elastic" if self.elastic else "rigid",
            allow_globals=tuple(self.options.allow_globals),
            global_steps=saved_step(engine, request.client_state),
            train_batch_size=engine.train_batch_size(),
            file_names=file_names,
            expert_files=tuple(name for name in names if name not in file_names),
            last_save=last_save_of(engine),
            lost_micro_batches=_warn_of_lost_micro_batches(engine, request.tag_dir),
            own_weights=has_own_weights(live),
        )


def _warn_of_lost_micro_batches(engine: Engine, tag_dir: Path) -> int:
    """Return how many micro batches are in gradients, which DeepSpeed does not save; warn if there are any."""
    lost = accumulated_micro_batches(engine)
    if lost and dist.get_rank() == 0:
        total = engine.gradient_accumulation_steps()
        number = f"at least {lost}" if decides_boundaries(engine) else f"{lost} of {total}"
        logger.warning(
            "%s: LOST on a resume: the gradients of %s micro batches, accumulated since the last optimizer step. "
            "No checkpoint of DeepSpeed holds gradients. Save at a gradient accumulation boundary to lose none.",
            tag_dir,
            number,
        )
    return lost


@contextmanager
def one_module_writer(engine: Engine, live: LiveOptimizer, leaders: Sequence[int]) -> Iterator[None]:
    """Within this context, one rank of each directory writes the file of the whole module of ZeRO stages 1 and 2.

    With tensor parallelism it is one of each tensor parallel rank, as each has its own file.

    DeepSpeed has local rank 0 do it under ``use_node_local_storage``. Where the launcher's local ranks are not those
    that share a disk, several ranks would write into one file, or none. Ranks that see one directory have the same one
    of ``leaders``. Every file lists tied parameters, which DeepSpeed does on rank 0 alone.
    Source: ``DeepSpeedEngine._configure_checkpointing``, ``_get_shared_params`` (0.19.8). Collective.
    """
    if live.per_param or not engine.use_node_local_storage():
        yield
        return
    rank = dist.get_rank()
    of_same_slices = (other for other in range(rank) if live.topology.place(other)[1] == live.topology.place(rank)[1])
    place_on_node = [leaders[other] for other in of_same_slices].count(leaders[rank])
    chooses = getattr(engine.checkpoint_engine, "is_data_parallel_writer", None)
    writes = bool(chooses(place_on_node)) if chooses is not None else place_on_node == 0
    tied = broadcast(all_or_raise(engine._get_shared_params))
    with live.saving_alone(engine, writes_module=writes, tied=tied):
        yield


class CheckpointEngineProxy:
    """The checkpoint engine of one save, in which an error of one rank leaves no other rank waiting.

    DeepSpeed's save has barriers between its parts. So the first error is kept, the rest of this rank's part is left
    out, and ``raise_failure`` raises the error when all ranks have finished. ``save`` writes one file; files for
    ``tag_dir`` go to ``staging_dir``, the directory that becomes it. Everything else is the original engine's.
    ``names`` are of the files that were written for the tag.
    """

    def __init__(
        self, original: Any, save: Callable[[Any, str], None], *, save_id: str, tag_dir: Path, staging_dir: Path
    ) -> None:
        self._original, self._save, self._save_id = original, save, save_id
        self._tag_dir, self._staging_dir = tag_dir, staging_dir
        self._failure: ZeroElasticError | None = None
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory, as DeepSpeed does on some ranks; that of the tag is made by one rename."""
        if Path(path) != self._tag_dir:
            self.guarded(self._original.makedirs)(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        wanted = Path(path)
        place = path
        if wanted.parent == self._tag_dir:
            self.names.append(wanted.name)
            place = os.fspath(self._staging_dir / wanted.name)
        self.guarded(self._save, path)(shard_writer.with_save_id(state_dict, wanted.name, self._save_id), place)

    def commit(self, info: Any) -> bool:
        self.guarded(self._original.commit, getattr(info, "tag", None))(info)
        return True

    def guarded(self, action: Callable[..., Any], where: object = None) -> Callable[..., None]:
        """The action, with its error kept for later; after an error it does nothing."""

        def attempt(*args: Any, **kwargs: Any) -> None:
            if self._failure is not None:
                return
            try:
                action(*args, **kwargs)
            except ZeroElasticError as error:
                self._failure = error
            except Exception as error:
                logger.debug("a save failed", exc_info=True)
                self._failure = shard_writer.not_written(where if where is not None else args[0], error)
                if not self._staging_dir.is_dir():
                    self._failure = SaveError(
                        f"{self._failure} This rank does not see the directory that another one made for the save: "
                        'the directory is not the same on all nodes, which "use_node_local_storage": true allows.'
                    )

        return attempt

    def raise_failure(self) -> None:
        """Raise the first error of this rank, if there was one."""
        if self._failure is not None:
            raise self._failure
