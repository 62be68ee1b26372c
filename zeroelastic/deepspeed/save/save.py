"""A save: DeepSpeed's own, into a hidden directory, then the commit record, the tag and ``latest``."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_head
from zeroelastic.core.digest import ParamContent
from zeroelastic.deepspeed.client_state import checked_client_state, saved_step
from zeroelastic.deepspeed.engine import (
    Engine,
    accumulated_micro_batches,
    agree_on_options,
    options_of,
    saves_elastic,
)
from zeroelastic.deepspeed.engine_state import lineage_of, link, state_of
from zeroelastic.deepspeed.live.digests import (
    LiveStreams,
    LocalDigests,
    live_streams,
    of_every_tp_rank,
    whole_contents,
)
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import difference, replicated_facts, token_of
from zeroelastic.deepspeed.live.trained import listed_by_optimizer
from zeroelastic.deepspeed.notices import notice
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.after_save import AfterSave
from zeroelastic.deepspeed.save.background import (
    Background,
    BackgroundSave,
    background_of,
    refuse_background,
    wants_background,
    why_not,
)
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import (
    Expected,
    PendingCommit,
    acts,
    commit,
    discarded_on_failure,
    new_save_id,
    written_files,
)
from zeroelastic.deepspeed.save.decoupled import DecoupledSave, check_alive
from zeroelastic.deepspeed.save.pending import finish_pending, track, unfinished
from zeroelastic.deepspeed.save.retention import removal_note, remove_old_tags
from zeroelastic.deepspeed.save.shard_writer import DigestedShard, ShardWriter, shard_writer
from zeroelastic.deepspeed.save.snapshot import HostMemory, Snapshot
from zeroelastic.deepspeed.save.store import (
    StoreSnapshot,
    StoreTarget,
    commit_to_store,
    discarded,
    refuse_in_store,
    store_target,
)
from zeroelastic.deepspeed.storage_rules import directory_heads, one_module_writer, refuse_unwritable, saves_nothing
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise, collective_device
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import (
    CheckpointError,
    SaveError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    ZeroElasticError,
    printable,
)
from zeroelastic.io.paths import FilePath, RemotePath, absolute, as_path, is_url
from zeroelastic.monitoring.spans import span
from zeroelastic.tags.leftovers import remove_dead
from zeroelastic.tags.names import LATEST, normal, stock_saves, why_not_saved
from zeroelastic.tags.tag_directory import make_staging_dir, staging_dir_of

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Saving:
    """A save in progress: what ``state_dict`` needs to make the elastic file of this rank."""

    save_id: str
    live: LiveOptimizer
    shard: ShardWriter | DigestedShard


@dataclass(frozen=True, slots=True)
class _Asked:
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

    def of(self, original: Method, engine: Engine, *, save_latest: bool | None = None) -> Any:
        """The same call of DeepSpeed's own method; ``save_latest``, if given, replaces the caller's."""
        latest = self.save_latest if save_latest is None else save_latest
        return original(engine, self.save_dir, self.tag, self.client_state, latest, self.exclude_frozen_parameters)


def save_checkpoint(
    original: Method,
    self: Engine,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = {},  # noqa: B006  DeepSpeed's own default, passed on unchanged
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """DeepSpeed's save, the commit record, the tag, ``latest``: in that order, each durable before the next."""
    if kind_of(self.optimizer) is None or not save_dir:
        if is_url(save_dir):
            raise UnsupportedError(
                f"{save_dir}: this save would be DeepSpeed's own, which writes to no URLs. To object stores "
                "zeroelastic saves at ZeRO stages 1 to 3. Save to a directory, and copy it."
            )
        return original(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = normal(f"global_step{self.global_steps}" if tag is None else str(tag))
    began = time.monotonic()
    named = str(as_path(save_dir) / tag)
    save_dir = absolute(save_dir)
    require_partners()
    agree_on_options(self)
    _warn_without_memory(self)
    finish_pending(self, before=f"the save of {tag}")
    after = AfterSave(self, as_path(save_dir) / tag, tag, began=began)
    with span("save", tag=tag, step=int(self.global_steps), ranks=dist.get_world_size()), after.failures():
        barrier = SaveBarrier(as_path(save_dir) / tag, timeout_s=options_of(self).save_timeout_s)
        barrier.leave_note(new_save_id())
        with span("save.wait"):
            barrier.wait("it was about to be saved")
        with barrier.attribute_failures():
            asked = _Asked(save_dir, tag, named, client_state, save_latest, exclude_frozen_parameters, began)
            return _save(self, original, asked, barrier, after, save_id=barrier.note_of(0))


def _save(
    engine: Engine, original: Method, asked: _Asked, barrier: SaveBarrier, after: AfterSave, *, save_id: str
) -> Any:
    """The save itself, when all ranks have come to it. Collective."""
    options = options_of(engine)
    directory, tag_dir = asked.directory, asked.tag_dir
    decoupled = engine.checkpoint_engine.is_decoupled()
    if decoupled:
        engine._commit_decoupled_checkpoint()  # a save before this one that is not ours
    elastic = saves_elastic(engine)
    prepared = _prepare(engine, asked, elastic=elastic)
    if isinstance(prepared, ZeroElasticError):
        if elastic or not isinstance(tag_dir, Path) or not stock_saves(asked.tag):
            raise prepared
        if dist.get_rank() == 0:
            notice(logger, f"{tag_dir}: saved by DeepSpeed alone; no commit record is written: {prepared}")
        done = asked.of(original, engine)
        record = tag_dir / RECORD_NAME
        all_or_raise(lambda: record.unlink(missing_ok=True))  # of a save that this one has overwritten
        return done
    live, client_state = prepared
    elastic = elastic and live.per_param  # DeepSpeed's own files of stages 1 and 2 have all that another size needs
    asked = replace(asked, client_state=client_state)
    if decoupled:
        check_alive(engine)
    background = _background(engine, live, options)
    target = None
    if isinstance(directory, RemotePath):
        target = all_or_raise(lambda: store_target(directory, asked.tag, save_id, options))
        root = place = staging_dir = target.staging_dir
        heads: tuple[int, ...] = (0,) * dist.get_world_size()
        here = replace(asked, save_dir=str(target.scratch))
    else:
        # Where symbolic links lead now: they may lead somewhere else when the save is put in place.
        root, place = Path(os.path.realpath(directory)), Path(os.path.realpath(directory / asked.tag))
        staging_dir, here = staging_dir_of(place, save_id), asked
        heads = (0,) * dist.get_world_size()
        if engine.use_node_local_storage():
            heads = directory_heads(directory / asked.tag)
    head = acts(heads)
    if head:
        run = root if target is None else directory
        after.remove_old = partial(remove_old_tags, run, asked.tag, options, over_nodes=any(heads))
    with _discarded(target, staging_dir, head=head), span("save.write"):

        def begin() -> LiveStreams:
            if head and target is not None:
                target.begin()
            elif head:
                _begin(root, place, save_id)
            return live_streams(live, with_frozen=not asked.exclude_frozen_parameters)

        streams = all_or_raise(begin)
        link(engine.optimizer, engine)
        with shard_writer(
            engine,
            live,
            tag_dir=Path(here.save_dir) / asked.tag,
            staging_dir=staging_dir,
            streams=streams,
            options=options,
            writer=_writer(background, target),
        ) as (shard, raise_failure):
            # A decoupled engine keeps the wish for ``latest`` until it commits; others would write it too early.
            latest = asked.save_latest and decoupled
            with (
                patched(state_of(engine), saving=Saving(save_id, live, shard)),
                listed_by_optimizer(engine, live.trained),
                one_module_writer(engine, live, heads),
                patched(engine, _checkpoint_tag_validation=lambda tag: None),  # the tags have been compared
                live.saving(engine, elastic=elastic, written=partial(barrier.wait, "its files were written")),
            ):
                done = here.of(original, engine, save_latest=latest)
            commit_info = engine.checkpoint_engine.commit_info
        lineage_of(engine).begun = save_id
        save = PendingCommit(
            tag_dir=tag_dir,
            place=place,
            tag=asked.tag,
            save_id=save_id,
            checkpoint_format="elastic" if elastic else "rigid",
            expected=Expected(
                rank=live.rank,
                tp=live.tp,
                global_steps=saved_step(engine, client_state),
                layout=live.layout,
                groups=live.groups,
                frozen=None if asked.exclude_frozen_parameters else live.frozen.params,
                allow_globals=tuple(options.allow_globals),
            ),
            train_batch_size=engine.train_batch_size(),
            lost_micro_batches=_warn_of_lost_micro_batches(engine, tag_dir),
            written=written_files(engine, Path(here.save_dir), asked.tag),
            staging_dir=staging_dir,
            heads=heads,
            acts=head,
            lineage=lineage_of(engine),
            latest=None if not asked.save_latest else directory / LATEST if target is not None else root / LATEST,
            fsync=options.fsync,
        )

        def complete() -> LocalDigests | None:
            raise_failure()
            if isinstance(shard, Snapshot):
                shard.complete()
                return None
            digests = shard.digests()
            live.sync()
            return digests

        digests = all_or_raise(complete)
        if background is not None:
            assert isinstance(shard, Snapshot)
            after.returns()
            work = partial(_finish, live, shard, save, background.group, barrier, target, after)
            track(engine, BackgroundSave(tag_dir, work, background.group, barrier, began=asked.began))
            return done
    if target is not None:
        assert isinstance(shard, Snapshot)
        _finish(live, shard, save, None, barrier, target, after)
        barrier.close()
        _note_saved(asked, after)
        return done
    with _discarded(target, staging_dir, head=head):
        assert digests is not None
        contents, trained = _contents(live, digests, device=engine.device)
        save = replace(save, contents=contents, trained=trained)
    if decoupled:
        after.returns()
        track(engine, DecoupledSave(engine, save, commit_info, after, timeout_s=options.save_timeout_s))
        barrier.close()
        return done
    with span("save.commit"):
        nbytes = commit(save, barrier)
    barrier.close()
    after.committed(nbytes)
    _note_saved(asked, after)
    return done


def _note_saved(asked: _Asked, after: AfterSave) -> None:
    if dist.get_rank() == 0:
        seconds = time.monotonic() - asked.began
        notice(logger, f"{asked.tag_dir}: saved in {seconds:.2f} s{removal_note(after.removed)}")


def _writer(background: Background | None, target: StoreTarget | None) -> Callable[..., ShardWriter]:
    """What makes the writer of this rank's files."""
    memory = HostMemory() if background is None else background.memory
    if target is not None:
        return partial(StoreSnapshot, memory=memory, target=target)
    return ShardWriter if background is None else partial(Snapshot, memory=memory)


@contextmanager
def _discarded(target: StoreTarget | None, staging_dir: Path, *, head: bool) -> Iterator[None]:
    """Remove what was made of a save when it fails."""
    with discarded(target) if target is not None else discarded_on_failure(staging_dir, acts=head):
        yield


def _background(engine: Engine, live: LiveOptimizer, options: Options) -> Background | None:
    """What a save in the background needs, or None for a synchronous save. Collective.

    Raises UnsupportedError where a checkpoint engine writes that has a background of its own.
    """
    if not wants_background(engine, options.async_save):
        return None
    all_or_raise(lambda: refuse_background(engine))
    return background_of(engine) if why_not(engine, live) is None else None


def _contents(
    live: LiveOptimizer, local: LocalDigests, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[tuple[ParamContent, ...], frozenset[str]]:
    """The digests of all parameters over all ranks, and the names of the trained ones. Collective."""
    trained = frozenset(param.name for param in live.layout.params)
    parts = of_every_tp_rank(live, (whole_contents(live, local, device=device, group=group), trained))
    return (
        tuple(content for contents, _ in parts for content in contents),
        frozenset().union(*(names for _, names in parts)),
    )


def _finish(
    live: LiveOptimizer,
    shard: Snapshot,
    save: PendingCommit,
    group: dist.ProcessGroup | None,
    barrier: SaveBarrier,
    target: StoreTarget | None,
    after: AfterSave,
) -> None:
    """Write, verify and commit a save whose snapshot is taken. Collective, over ``group``, the default one if None."""
    with after.failures(), after.below_its_span(), span("save.background" if group else "save.finish", tag=save.tag):
        with (
            _discarded(target, save.staging_dir, head=save.acts),
            barrier.attribute_failures(),
            span("save.write"),
        ):
            barrier.all_or_raise(shard.write, "its files were written")
            device = torch.device("cpu") if group is not None else collective_device()
            contents, trained = _contents(live, shard.digests(), device=device, group=group)
        save = replace(save, contents=contents, trained=trained)
        with span("save.commit"):
            if target is None:
                nbytes = commit(save, barrier)
            else:
                assert isinstance(shard, StoreSnapshot)
                nbytes = commit_to_store(save, shard, target, barrier)
        after.committed(nbytes)
    if after.removed and group is not None:
        logger.info("%s: saved%s", save.tag_dir, removal_note(after.removed))


def _prepare(
    engine: Engine, asked: _Asked, *, elastic: bool
) -> tuple[LiveOptimizer, dict[str, Any]] | ZeroElasticError:
    """The live state of this rank, read once for the whole save, and the client state to save. Collective.

    Or the error that says why the save gets no commit record, the same on all ranks.
    """

    def look() -> tuple[LiveOptimizer, dict[str, Any], dict[str, str]]:
        local = isinstance(asked.directory, Path)  # in a store one rank asks for all
        with saves_nothing(asked.tag_dir):
            problem = why_not_saved(asked.directory, asked.tag) if local or dist.get_rank() == 0 else None
        if problem is not None:
            raise UsageError(
                f"{asked.directory}: nothing can be saved under the tag {printable(asked.tag)}: {problem}. Nothing was "
                "written; pass another tag."
            )
        if dist.get_rank() == 0:
            _refuse_tag_of_another(engine, asked.tag_dir)
        live = covered_live(engine, engine.optimizer)
        refuse_unwritable(engine, live)
        if not local:
            refuse_in_store(engine, live)
        facts = replicated_facts(live)
        with listed_by_optimizer(engine, live.trained):
            client_state = checked_client_state(engine, asked.client_state)
        return live, client_state, facts | {"the step to save": str(saved_step(engine, client_state))}

    try:
        (live, client_state, facts), outcomes = all_gather_of_or_raise(
            look, lambda found: (token_of(found[2], found[0].tp.rank), asked.named)
        )
        different = difference(facts, [token for token, _ in outcomes])
    except (UnsupportedError, UsageError) as error:
        return error
    if different is not None:
        return different
    lost = None if elastic else live.lost_in_stock_files()
    if lost is not None:
        return UnsupportedError(
            f"DeepSpeed's own files lack {lost}. Save with elastic_checkpoint on to have all of it."
        )
    places = sorted({named for _, named in outcomes})
    if len(places) > 1:
        return UsageError(
            f"the ranks save to different places ({', '.join(places[:3])}{' ...' if len(places) > 3 else ''}). A "
            "checkpoint has one tag and one directory, which all ranks share: pass the same ones everywhere."
        )
    return live, client_state


def _refuse_tag_of_another(engine: Engine, tag_dir: FilePath) -> None:
    """Raise SaveError where another engine saves under the same tag: one that is at work as long as this one is."""
    problem = "is being saved by another engine" if any(save.tag_dir == tag_dir for save in unfinished()) else None
    lineage = lineage_of(engine)
    try:
        head = read_head(tag_dir / RECORD_NAME)
    except (CheckpointError, UnreadableError):  # there is none, or it is damaged
        head = {}
    run, committed_at = head.get("run"), head.get("committed_at")
    if run not in (None, lineage.run) and isinstance(committed_at, float) and committed_at > lineage.made_at:
        problem = f"was saved by another engine at its step {head.get('global_steps')}, since this one was made"
    if problem is not None:
        raise SaveError(
            f"{tag_dir}: {problem}. Nothing was written. Two engines cannot save under one tag: give each tags, or a "
            "directory, of its own."
        )


def _warn_without_memory(engine: Engine) -> None:
    """Say once that ``"memory"`` has no effect in a loop that does not make checkpoints in memory."""
    state = state_of(engine)
    if state.memory is None and options_of(engine).memory is not None:
        state.memory = True
        if dist.get_rank() == 0:
            logger.warning(
                '"memory" is in the "zeroelastic" block, and no checkpoints in memory are made: the training loop is '
                "not within zeroelastic.elastic.preemption(). Put it there, or leave the option out."
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


def _begin(save_dir: Path, tag_dir: Path, save_id: str) -> None:
    """Make the directory in which this rank sees others' files appear, where ``latest`` can be written too."""
    try:
        save_dir.mkdir(parents=True, exist_ok=True)
        for directory in {save_dir, tag_dir.parent}:
            remove_dead(directory)
        make_staging_dir(tag_dir, save_id)
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        shutil.rmtree(staging_dir_of(tag_dir, save_id), ignore_errors=True)
        raise SaveError(
            f"{tag_dir}: cannot be written: {error.strerror} ({error.filename or tag_dir}). Nothing was saved, and "
            "`latest` is unchanged."
        ) from error
