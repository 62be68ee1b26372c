"""A save: DeepSpeed's own, into a hidden directory, then the commit record, the tag and ``latest``.

``save_checkpoint`` checks what is to be saved, chooses the destination, and who commits the save, and when: this call,
or a thread (``background``).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.deepspeed.client_state import checked_client_state, saved_step
from zeroelastic.deepspeed.engine import (
    Engine,
    accumulated_micro_batches,
    agree_on_options,
    decides_boundaries,
    options_of,
    ordinary_tensors,
    saves_elastic,
)
from zeroelastic.deepspeed.engine_state import last_save_of, link, refuse_to_save, state_of
from zeroelastic.deepspeed.live.digests import (
    copies_that_differ,
    gather_over_tp,
    live_streams,
    whole_contents,
)
from zeroelastic.deepspeed.live.kinds import (
    covered_live,
    in_rigid_form,
    is_without_optimizer,
    kind_of,
    listed_by_optimizer,
    trained_params,
)
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import difference, replicated_facts, token_of
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.run_objects import saving_sampler
from zeroelastic.deepspeed.save.after_save import AfterSave, remove_old_tags
from zeroelastic.deepspeed.save.background import BackgroundSave, background_for, finish_pending
from zeroelastic.deepspeed.save.barrier import SaveBarrier, store_request
from zeroelastic.deepspeed.save.changed_modules import merged_weights, refuse_changed_module
from zeroelastic.deepspeed.save.commit import PendingCommit, new_save_id, written_files
from zeroelastic.deepspeed.save.directory import Directory
from zeroelastic.deepspeed.save.engine_proxy import CheckpointEngineProxy
from zeroelastic.deepspeed.save.shard_writer import (
    HostMemory,
    OtherEngineWriter,
    ShardWriter,
    Snapshot,
    elastic_state,
    writes_with_torch,
)
from zeroelastic.deepspeed.save.upload import uploads
from zeroelastic.deepspeed.storage_rules import (
    directory_leaders,
    one_module_writer,
    refuse_experts_on_nodes,
    refuse_to_exclude_experts,
    refuse_unwritable,
    saves_nothing,
)
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise, broadcast, collective_device
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import (
    CheckpointError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    ZeroElasticError,
    printable,
    some,
)
from zeroelastic.io.paths import absolute
from zeroelastic.runs.names import normal, save_directory, stock_saves, why_not_saved

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What ``save_checkpoint`` was called with.

    ``save_dir`` is absolute; ``named`` is the tag directory in the caller's own words, the same on all ranks.
    """

    save_dir: str
    tag: str
    named: str
    client_state: Any
    save_latest: bool
    excluded_by: Literal["option", "argument"] | None

    @property
    def directory(self) -> Path:
        return Path(self.save_dir)

    @property
    def tag_dir(self) -> Path:
        return self.directory / self.tag

    @property
    def excludes_frozen(self) -> bool:
        """Whether frozen weights are left out of the files."""
        return self.excluded_by is not None

    def call_deepspeed(self, original: Method, engine: Engine) -> Any:
        """The same call of DeepSpeed's own method."""
        args = (self.save_dir, self.tag, self.client_state, self.save_latest, self.excludes_frozen)
        return original(engine, *args)


@dataclass(eq=False)
class Save:
    """One save: ``write`` has DeepSpeed write its files, or a snapshot of them; ``commit`` makes the tag of them.

    A snapshot goes into ``memory``; None: files are written at once. ``shard``, ``pending`` and ``commit_info``,
    which DeepSpeed announced, are there when ``write`` has returned. It has no reference to the engine, which may end
    before the save does.
    """

    request: SaveRequest
    destination: Directory
    live: LiveOptimizer
    barrier: SaveBarrier
    after: AfterSave
    save_id: str
    elastic: bool
    memory: HostMemory | None
    shard: ShardWriter = field(init=False)
    pending: PendingCommit = field(init=False)

    def write(self, engine: Engine, original: Method) -> Any:
        """DeepSpeed's own save, by this save's writer; returns what it returns. Collective."""
        request, destination, live, options = self.request, self.destination, self.live, options_of(engine)
        checkpoint_engine = engine.checkpoint_engine

        def begin() -> ShardWriter:
            if destination.is_leader:
                destination.begin()
            # merged weights are not those of the base that a load compares
            is_base = not request.excludes_frozen or merged_weights(engine, live) is None
            streams = live_streams(live, with_frozen=is_base)
            if not writes_with_torch(checkpoint_engine):
                return OtherEngineWriter(checkpoint_engine, live, streams, options)
            if self.memory is not None:
                return Snapshot(checkpoint_engine, live, streams, options, self.memory)
            return ShardWriter(checkpoint_engine, live, streams, options)

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
            state = {"state_dict": elastic_state(engine, live, shard, self.save_id)} if self.elastic else {}
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

    def commit(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the files of a snapshot, and make the tag. Collective, over ``group``, the default one if None.

        Raises on every rank what any rank failed with.
        """
        destination, barrier, shard = self.destination, self.barrier, self.shard
        with destination.discarded_on_failure(), barrier.attribute_failures():
            if isinstance(shard, Snapshot):
                barrier.all_or_raise(lambda: destination.write_snapshot(shard), "write")
            self.add_contents(group)
        self.after.committed(destination.commit(self.pending, barrier))

    def add_contents(self, group: dist.ProcessGroup | None = None) -> None:
        """Add the digests of all parameters over all ranks to what is committed. Collective."""
        live, trained = self.live, frozenset(param.name for param in self.live.whole.params)
        contents = whole_contents(live, self.shard.digests(), device=collective_device(group), group=group)
        parts = gather_over_tp(live, (contents, trained))
        self.pending = replace(
            self.pending,
            contents=tuple(content for contents, _ in parts for content in contents),
            trained=frozenset().union(*(names for _, names in parts)),
        )

    def _pending_commit(self, engine: Engine, names: Sequence[str]) -> PendingCommit:
        """``names`` are those of the files that this rank has written."""
        request, live, options = self.request, self.live, options_of(engine)
        file_names = written_files(engine, self.destination.deepspeed_dir, request.tag)
        frozen = None
        if not request.excludes_frozen:
            frozen = tuple(chain(*live.local_params(live.frozen)))
            if not live.per_param:  # the file of the module has no experts
                frozen = tuple(param for param in frozen if param.name not in live.sharing.expert_sizes)
        return PendingCommit(
            tag=request.tag,
            save_id=self.save_id,
            checkpoint_format="elastic" if self.elastic else "rigid",
            sharing=live.sharing,
            global_steps=saved_step(engine, request.client_state),
            layout=live.layout,
            sub_groups=live.local_params(live.layout),
            groups=live.groups,
            frozen=frozen,
            allow_globals=tuple(options.allow_globals),
            train_batch_size=engine.train_batch_size(),
            file_names=file_names,
            expert_files=tuple(name for name in names if name not in file_names),
            last_save=last_save_of(engine),
            lost_micro_batches=_warn_of_lost_micro_batches(engine, request.tag_dir),
            excluded_by=request.excluded_by,
            own_weights=live.has_own_weights(),
        )


@ordinary_tensors()
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
    directory = save_directory(save_dir) if save_dir else None
    if is_without_optimizer(self.optimizer):
        raise UnsupportedError(
            f"{save_dir}: a ZeRO-3 engine without an optimizer is not saved: DeepSpeed has no way to. Give "
            "deepspeed.initialize() an optimizer, or gather the weights with deepspeed.zero.GatheredParameters and "
            "save them."
        )
    if kind_of(self.optimizer) is None or directory is None or _is_left_to_its_engine(self):
        _warn_of_full_save(self, save_dir)
        _warn_of_damage(self, save_dir)
        with in_rigid_form(self.optimizer):
            save_dir = absolute(save_dir) if save_dir else save_dir
            return original(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
    tag = normal(f"global_step{self.global_steps}" if tag is None else str(tag))
    began = time.monotonic()
    named, save_dir = str(directory / tag), absolute(save_dir)
    tag_dir = Path(save_dir) / tag
    store_request(require_partners, tag_dir, "Nothing was written.", patience_s=0.0)
    agree_on_options(self)
    _warn_without_memory(self)
    finish_pending(self, before=f"the save of {tag}")
    after = AfterSave(self, tag_dir, tag, began=began)
    barrier = SaveBarrier(tag_dir, timeout_s=options_of(self).save_timeout_s)
    barrier.wait("begin")
    with barrier.attribute_failures():
        by_argument: Literal["argument"] | None = "argument" if exclude_frozen_parameters else None
        excluded_by = "option" if options_of(self).frozen == "exclude" else by_argument
        request = SaveRequest(save_dir, tag, named, client_state, save_latest, excluded_by)
        return _save(self, original, request, barrier, after, save_id=broadcast(new_save_id()))


def _is_left_to_its_engine(engine: Engine) -> bool:
    """Return whether a decoupled checkpoint engine writes the save after it has returned, which is DeepSpeed's alone.

    Raises UnsupportedError where the save is to be elastic.
    """
    writer = engine.checkpoint_engine
    if not writer.is_decoupled():
        return False
    name = type(writer).__name__
    if saves_elastic(engine):
        raise UnsupportedError(
            f"{name} is a decoupled checkpoint engine, which writes after save_checkpoint has returned: elastic "
            'checkpoints do not go with it. Use "async_save": true in the "zeroelastic" block in its place, or save '
            "with elastic_checkpoint off."
        )
    if dist.get_rank() == 0:
        _say_decoupled(name)
    return True


@functools.cache
def _say_decoupled(name: str) -> None:
    logger.warning(
        "saves of this run are left to DeepSpeed, rigid and without a commit record: %s writes them after "
        'save_checkpoint has returned. "async_save": true in the "zeroelastic" block is our way',
        name,
    )


def _save(
    engine: Engine, original: Method, request: SaveRequest, barrier: SaveBarrier, after: AfterSave, *, save_id: str
) -> Any:
    """The save itself, when all ranks have come to it. Collective."""
    # DeepSpeed's own files of stages 1 and 2 have all that another size needs.
    kind = kind_of(engine.optimizer)
    elastic = saves_elastic(engine) and kind is not None and kind.per_param
    prepared = _prepare(engine, request, elastic=elastic)
    if isinstance(prepared, ZeroElasticError):
        asked = request.excludes_frozen  # which DeepSpeed's save would not heed
        refuses = elastic or (saves_elastic(engine) and (asked or isinstance(prepared, UsageError)))
        if refuses or not stock_saves(request.tag):
            raise prepared
        if saves_elastic(engine):
            all_or_raise(lambda: checked_client_state(engine, request.client_state))  # no load would take it
        return _save_by_deepspeed_alone(engine, original, request, prepared)
    live, client_state = prepared
    request = replace(request, client_state=client_state)
    options = options_of(engine)
    background = background_for(engine, live)
    destination = _destination(engine, request, save_id)
    if destination.is_leader:
        after.upload = partial(uploads.add, destination, options)
        over_nodes = any(destination.leaders)
        after.remove_old = partial(remove_old_tags, destination.run_dir, request.tag, options, over_nodes=over_nodes)
    memory = None if background is None else background.memory
    save = Save(request, destination, live, barrier, after, save_id, elastic, memory)
    done = save.write(engine, original)
    if background is not None:
        after.returns()
        state_of(engine).pending = BackgroundSave(save, background.group)
    else:
        save.commit()
        barrier.close()
        if dist.get_rank() == 0:
            logger.info("%s", f"{request.tag_dir}: saved in {after.seconds:.2f} s{after.note}")
    return done


def _destination(engine: Engine, request: SaveRequest, save_id: str) -> Directory:
    """Where the save goes. Collective."""
    options, directory = options_of(engine), request.directory
    leaders: tuple[int, ...] = (0,) * dist.get_world_size()
    if engine.use_node_local_storage():
        leaders = directory_leaders(directory / request.tag)
    return Directory(directory, request.tag, save_id, leaders, save_latest=request.save_latest, fsync=options.fsync)


def _save_by_deepspeed_alone(engine: Engine, original: Method, request: SaveRequest, why: ZeroElasticError) -> Any:
    """DeepSpeed's own save, without a commit record. Collective."""
    tag_dir = request.tag_dir
    without = "no commit record is written" + (", and nothing is uploaded" if options_of(engine).upload else "")
    state, line = state_of(engine), f"{tag_dir}: saved by DeepSpeed alone; {without}: {why}"
    warns = saves_elastic(engine) and not state.warned_of_rigid_saves
    state.warned_of_rigid_saves = True
    if dist.get_rank() == 0 and warns:
        logger.warning('%s The files are rigid in spite of "elastic_checkpoint".', line)
    elif dist.get_rank() == 0:
        logger.info("%s", line)
    with in_rigid_form(engine.optimizer):
        done = request.call_deepspeed(original, engine)
    record = tag_dir / RECORD_NAME
    all_or_raise(lambda: record.unlink(missing_ok=True))  # of a save that this one has overwritten
    return done


def _prepare(
    engine: Engine, request: SaveRequest, *, elastic: bool
) -> tuple[LiveOptimizer, dict[str, Any]] | ZeroElasticError:
    """The live state of this rank, read once for the whole save, and the client state to save. Collective.

    Or the error that says why the save gets no commit record, the same on all ranks.
    """

    def look() -> tuple[LiveOptimizer, dict[str, Any], dict[str, str]]:
        with saves_nothing(request.tag_dir):
            problem = why_not_saved(request.directory, request.tag)
        if problem is not None:
            raise UsageError(
                f"{request.directory}: nothing can be saved under the tag {printable(request.tag)}: {problem}. Nothing "
                "was written; pass another tag."
            )
        if dist.get_rank() == 0:
            _warn_of_other_params(engine, request.tag_dir)
        refuse_to_save(engine, request.tag_dir)
        live = covered_live(engine, engine.optimizer)
        refuse_changed_module(engine, live, request.tag_dir, with_frozen=request.excluded_by != "argument")
        refuse_unwritable(engine)
        refuse_experts_on_nodes(engine, live)
        if request.excludes_frozen:
            refuse_to_exclude_experts(live)
        facts = replicated_facts(live)
        with listed_by_optimizer(engine, live.trained):
            client_state = checked_client_state(engine, request.client_state)
        return live, client_state, facts | {"the step to save": str(saved_step(engine, client_state))}

    try:
        (live, client_state, facts), outcomes = all_gather_of_or_raise(
            look, lambda found: (token_of(found[2], found[0].tp.rank), request.named)
        )
        different = difference(facts, [token for token, _ in outcomes])
        if different is None and live.topology.tensor_size > 1:
            live = _with_copies(engine, live, request.tag_dir)
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


def _with_copies(engine: Engine, live: LiveOptimizer, tag_dir: Path) -> LiveOptimizer:
    """The live state of a run whose tensor parallel ranks are to have copies of some values. Collective.

    Where copies differ, no other size of tensor parallelism has a place for all of them: each tensor parallel rank is
    then saved as a run of its own. Raises UnsupportedError at stages 1 and 2, where only DeepSpeed saves these.
    """
    differing = copies_that_differ(live, device=engine.device)
    if not differing:
        return live
    named = some([f"{name}: {key}" for name, key in differing])
    why = f"the copies that tensor parallel ranks have of the same values differ ({named})"
    if not live.per_param:
        raise UnsupportedError(f"{why}.")
    if dist.get_rank() == 0:
        logger.warning(
            "%s: %s. The checkpoint resumes at this tensor parallel size only. Dropout and other random numbers in a "
            "layer that is copied have to be the same on all ranks that share a batch.",
            *(tag_dir, why),
        )
    return all_or_raise(lambda: covered_live(engine, engine.optimizer, opaque=True))


def _warn_of_other_params(engine: Engine, tag_dir: Path) -> None:
    """Say that a save replaces a checkpoint with other trained parameters, which may be another engine's."""
    try:
        record = read_record(tag_dir)
    except (CheckpointError, UnreadableError):
        return
    if record is not None and record.trained_params not in (None, params_digest(trained_params(engine) or ())):
        logger.warning(
            "%s: this save replaces a checkpoint whose trained parameters are not those of the engine. If another "
            "engine saves under this tag, give each engine a directory of its own.",
            tag_dir,
        )


def _warn_of_full_save(engine: Engine, place: object) -> None:
    """Say that ``"frozen": "exclude"`` has no effect on a save that is DeepSpeed's own."""
    if place and options_of(engine).frozen == "exclude" and dist.get_rank() == 0:
        logger.warning('%s: "frozen": "exclude" has no effect on this save, which is DeepSpeed\'s own.', place)


def _warn_of_damage(engine: Engine, place: object) -> None:
    """Say that a save which is DeepSpeed's own is of an engine that an earlier load has left damaged."""
    damage = state_of(engine).damage
    if damage is not None and place and dist.get_rank() == 0:
        logger.warning(
            "%s: DeepSpeed saves the engine although a load of it failed: %s Load a whole checkpoint into it first, or "
            "remove this save.",
            *(place, damage),
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


def _warn_of_lost_micro_batches(engine: Engine, tag_dir: Path) -> int:
    """How many micro batches wait in gradients, which DeepSpeed does not save; loudly, where there are any."""
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
