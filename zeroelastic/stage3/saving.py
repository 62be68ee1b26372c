"""A save: DeepSpeed's own, into a hidden directory, then the commit record, the tag and ``latest``."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic.agree import gather, settle
from zeroelastic.errors import SaveError, UnsupportedError, UsageError, ZeroElasticError, printable
from zeroelastic.leftovers import remove_dead
from zeroelastic.notices import notice
from zeroelastic.patching import patched
from zeroelastic.record import RECORD_NAME, write_atomically
from zeroelastic.save_place import begin, making_of
from zeroelastic.stage3.background import (
    Background,
    BackgroundSave,
    background_of,
    refuse_background,
    wants_background,
    why_not,
)
from zeroelastic.stage3.client_state import checked_client_state, saved_step
from zeroelastic.stage3.contents import LocalDigests, of_every_tp_rank, whole_contents
from zeroelastic.stage3.decoupled import DecoupledSave, check_alive
from zeroelastic.stage3.lineage import lineage_of
from zeroelastic.stage3.live import LiveState, read_live, refuse_unsupported
from zeroelastic.stage3.load import accumulated_micro_batches
from zeroelastic.stage3.options import Options, parse_options
from zeroelastic.stage3.partners import agree_on, require_partners
from zeroelastic.stage3.pending import flush, hand_over
from zeroelastic.stage3.read_back import expected_of
from zeroelastic.stage3.replicated import difference, replicated_facts
from zeroelastic.stage3.residence import lost_in_stock_files
from zeroelastic.stage3.roll_call import RollCall
from zeroelastic.stage3.save import (
    Uncommitted,
    acts,
    commit,
    discarded_on_failure,
    met_after_writing,
    new_save_id,
    offloaded_save,
    written_files,
)
from zeroelastic.stage3.shard_writer import DigestedShard, ShardWriter, shard_writer
from zeroelastic.stage3.snapshot import Snapshot
from zeroelastic.stage3.storage_rules import directory_heads, refuse_unwritable
from zeroelastic.stage3.topology import tensor_parallel
from zeroelastic.stage3.trained import listed_by_optimizer, param_names
from zeroelastic.storage import absolute
from zeroelastic.tag_names import normal, stock_saves, why_not_saved

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Saving:
    """A save in progress: what ``state_dict`` needs to make the elastic file of this rank."""

    save_id: str
    live: LiveState
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
    def directory(self) -> Path:
        return Path(self.save_dir)

    def of(self, original: Method, engine: Any, *, save_latest: bool | None = None) -> Any:
        """The same call of DeepSpeed's own method; with ``save_latest`` as said here, where it is said."""
        latest = self.save_latest if save_latest is None else save_latest
        return original(engine, self.save_dir, self.tag, self.client_state, latest, self.exclude_frozen_parameters)


def stage3_optimizer(engine: Any) -> DeepSpeedZeroOptimizer_Stage3 | None:
    """The engine's ZeRO-3 optimizer, or None when there is nothing for us to do."""
    optimizer = getattr(engine, "optimizer", None)
    return optimizer if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else None


def options_of(engine: Any) -> Options:
    """The engine's "zeroelastic" block; strict while a caller loads strictly. Raises ConfigError."""
    options = parse_options(engine._config._param_dict)
    return options.model_copy(update={"strict": True}) if getattr(engine, "_zeroelastic_strict", False) else options


def saves_elastic(engine: Any) -> bool:
    """Whether the configuration asks for elastic saves."""
    return bool(engine._config.zero_config.elastic_checkpoint)


def facts_of(engine: Any) -> dict[str, object]:
    """What has to be the same on every rank. Raises ConfigError. ``verify`` may differ: the least of it holds."""
    options = parse_options(engine._config._param_dict).model_dump(exclude={"verify", "executor"})
    named = {f'"{name}" in the "zeroelastic" block': value for name, value in options.items()}
    return {'"elastic_checkpoint"': saves_elastic(engine), **named}


def live_of(engine: Any, optimizer: DeepSpeedZeroOptimizer_Stage3) -> LiveState:
    """The engine's state, by the names of its parameters."""
    return read_live(optimizer, param_names(engine))


def save_checkpoint(original: Method) -> Method:
    """DeepSpeed's save, the commit record, the tag, ``latest``: in that order, each durable before the next."""

    def save_checkpoint(
        self: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = {},  # noqa: B006  DeepSpeed's own default, passed on unchanged
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        optimizer = stage3_optimizer(self)
        if optimizer is None or not save_dir:
            return original(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        tag = normal(f"global_step{self.global_steps}" if tag is None else str(tag))
        began = time.monotonic()
        named = str(Path(save_dir) / tag)
        save_dir = absolute(save_dir)
        require_partners()
        agree_on(self, partial(facts_of, self))
        flush(self, before=f"the save of {tag}")
        roll_call = RollCall(Path(save_dir) / tag, timeout_s=options_of(self).save_timeout_s)
        roll_call.meet("it was about to be saved")
        with roll_call.naming_the_lost():
            asked = _Asked(save_dir, tag, named, client_state, save_latest, exclude_frozen_parameters, began)
            return _save(self, optimizer, original, asked, roll_call)

    return save_checkpoint


def _save(
    engine: Any, optimizer: DeepSpeedZeroOptimizer_Stage3, original: Method, asked: _Asked, roll_call: RollCall
) -> Any:
    """The save itself, when all ranks have come to it. Collective."""
    options = options_of(engine)
    tag_dir = asked.directory / asked.tag
    decoupled = engine.checkpoint_engine.is_decoupled()
    if decoupled:
        engine._commit_decoupled_checkpoint()  # a save before this one that is not ours
    elastic = saves_elastic(engine)
    reason, client_state = _cannot_commit(engine, optimizer, asked, elastic=elastic)
    if reason is not None:
        if elastic or not stock_saves(asked.tag):
            raise reason
        if dist.get_rank() == 0:
            notice(logger, f"{tag_dir}: saved by DeepSpeed alone; no commit record is written: {reason}")
        done = asked.of(original, engine)
        settle(lambda: (tag_dir / RECORD_NAME).unlink(missing_ok=True))  # of a save that this one has overwritten
        return done
    asked = replace(asked, client_state=client_state)
    if decoupled:
        check_alive(engine)
    background = _background(engine, optimizer, options)
    save_id = new_save_id()
    # Where symbolic links lead now: they may lead somewhere else when the save is put in place.
    root, place = Path(os.path.realpath(asked.directory)), Path(os.path.realpath(tag_dir))
    making = making_of(place, save_id)
    heads = directory_heads(tag_dir) if engine.use_node_local_storage() else (0,) * dist.get_world_size()
    with discarded_on_failure(making, acts=acts(heads)):
        settle(lambda: _begin(root, place, save_id) if acts(heads) else None)
        live = live_of(engine, optimizer)
        optimizer._zeroelastic_engine = engine
        with shard_writer(
            engine,
            live,
            tag_dir=tag_dir,
            making=making,
            with_frozen=not asked.exclude_frozen_parameters,
            options=options,
            writer=ShardWriter if background is None else partial(Snapshot, memory=background.memory),
        ) as shard:
            # A decoupled engine keeps the wish for ``latest`` until it commits; others would write it too early.
            latest = asked.save_latest and decoupled
            with (
                patched(optimizer, _zeroelastic_saving=Saving(save_id, live, shard)),
                listed_by_optimizer(engine),
                offloaded_save(engine, live, elastic=elastic),
                met_after_writing(optimizer, roll_call),
            ):
                done = asked.of(original, engine, save_latest=latest)
            commit_info = engine.checkpoint_engine.commit_info
        described = partial(
            Uncommitted,
            tag_dir=tag_dir,
            place=place,
            tag=asked.tag,
            save_id=save_id,
            checkpoint_format="elastic" if elastic else "rigid",
            world_size=live.layout.world_size,
            tp_size=live.tp.size,
            expected=expected_of(
                live,
                global_steps=saved_step(engine, client_state),
                with_frozen=not asked.exclude_frozen_parameters,
                allow_globals=options.allow_globals,
            ),
            train_batch_size=engine.train_batch_size(),
            lost_micro_batches=_warn_of_lost_micro_batches(engine, tag_dir),
            written=written_files(engine, asked.directory, asked.tag),
            making=making,
            heads=heads,
            lineage=lineage_of(engine),
        )
        finish = partial(_point_latest, root, asked.tag, acts=acts(heads))
        point_latest = finish if asked.save_latest else None
        if background is not None:
            assert isinstance(shard, Snapshot)
            settle(shard.complete)
            work = partial(_finish, live, shard, described, options, background, point_latest, roll_call, acts(heads))
            hand_over(engine, BackgroundSave(tag_dir, work, background.group, roll_call, began=asked.began))
            return done
        save = described(**_contents(live, shard.digests(), device=engine.device))
        settle(live.residence.sync)
    if decoupled:
        hand_over(engine, DecoupledSave(engine, save, commit_info, options=options, point_latest=point_latest))
        roll_call.end()
        return done
    commit(save, roll_call, fsync=options.fsync)
    if point_latest is not None:
        roll_call.settle(point_latest, "`latest` was written")
    roll_call.end()
    if dist.get_rank() == 0:
        notice(logger, f"{tag_dir}: saved in {time.monotonic() - asked.began:.2f} s")
    return done


def _background(engine: Any, optimizer: DeepSpeedZeroOptimizer_Stage3, options: Options) -> Background | None:
    """What a save in the background needs, or None for one that is waited for. Collective.

    Raises UnsupportedError where a checkpoint engine writes that has a background of its own.
    """
    if not wants_background(engine, options.background_save):
        return None
    settle(lambda: refuse_background(engine))
    return background_of(engine) if why_not(engine, live_of(engine, optimizer)) is None else None


def _contents(
    live: LiveState, local: LocalDigests, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """What a commit record says of the state: the digests of all ranks. Collective."""
    trained = frozenset(param.name for param in live.layout.params)
    parts = of_every_tp_rank(live, (whole_contents(live, local, device=device, group=group), trained))
    return {
        "contents": tuple(content for contents, _ in parts for content in contents),
        "trained": frozenset().union(*(names for _, names in parts)),
    }


def _finish(
    live: LiveState,
    shard: Snapshot,
    described: partial[Uncommitted],
    options: Options,
    background: Background,
    point_latest: Callable[[], None] | None,
    roll_call: RollCall,
    acts: bool,
) -> None:
    """What is left of a save when its snapshot is taken. Collective, over the group that the thread agrees over."""
    with discarded_on_failure(described.keywords["making"], acts=acts), roll_call.naming_the_lost():
        roll_call.settle(shard.write, "its files were written")
        contents = _contents(live, shard.digests(), device=torch.device("cpu"), group=background.group)
    commit(described(**contents), roll_call, fsync=options.fsync)
    if point_latest is not None:
        roll_call.settle(point_latest, "`latest` was written")


def _cannot_commit(
    engine: Any, optimizer: DeepSpeedZeroOptimizer_Stage3, asked: _Asked, *, elastic: bool
) -> tuple[ZeroElasticError | None, dict[str, Any]]:
    """Why this save gets no commit record, the same everywhere, or None; and the client state to save. Collective."""
    client_state: dict[str, Any] = {}

    def look() -> dict[str, str]:
        problem = why_not_saved(asked.directory, asked.tag)
        if problem is not None:
            raise UsageError(
                f"{asked.directory}: nothing can be saved under the tag {printable(asked.tag)}: {problem}. Nothing was "
                "written; pass another tag."
            )
        refuse_unsupported(optimizer, engine)
        refuse_unwritable(engine, optimizer)
        facts = replicated_facts(live_of(engine, optimizer))
        with listed_by_optimizer(engine):
            client_state.update(checked_client_state(engine, asked.client_state))
        return facts | {"the step to save": str(saved_step(engine, client_state))}

    try:
        different = difference(settle(look), tensor_parallel(optimizer).rank)
    except (UnsupportedError, UsageError) as error:
        return error, client_state
    if different is not None:
        return different, client_state
    lost = None if elastic else lost_in_stock_files(optimizer)
    if lost is not None:
        lacking = UnsupportedError(
            f"DeepSpeed's own files lack {lost}. Save with elastic_checkpoint on to have all of it."
        )
        return lacking, client_state
    places = sorted(set(gather(asked.named)))
    if len(places) > 1:
        return UsageError(
            f"the ranks save to different places ({', '.join(places[:3])}{' ...' if len(places) > 3 else ''}). A "
            "checkpoint has one tag and one directory, which all ranks share: pass the same ones everywhere."
        ), client_state
    return None, client_state


def _warn_of_lost_micro_batches(engine: Any, tag_dir: Path) -> int:
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
        begin(tag_dir, save_id)
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        shutil.rmtree(making_of(tag_dir, save_id), ignore_errors=True)
        raise SaveError(
            f"{tag_dir}: cannot be written: {error.strerror} ({error.filename or tag_dir}). Nothing was saved, and "
            "`latest` is unchanged."
        ) from error


def _point_latest(save_dir: Path, tag: str, *, acts: bool) -> None:
    if not acts:
        return
    try:
        write_atomically(save_dir / "latest", tag.encode())
    except OSError as error:
        raise SaveError(
            f"{save_dir / 'latest'}: cannot be written: {error.strerror}. The checkpoint {tag} is complete; load it by "
            "its tag."
        ) from error
