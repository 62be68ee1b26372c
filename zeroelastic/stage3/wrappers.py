"""What the wrapped DeepSpeed methods do: each factory takes the original method and returns its replacement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic.agree import gather, settle, together
from zeroelastic.checkpoint import open_checkpoint
from zeroelastic.errors import (
    CheckpointError,
    LayoutMismatchError,
    MissingFileError,
    OldFormatError,
    UnsupportedError,
)
from zeroelastic.notices import notice
from zeroelastic.patching import patched
from zeroelastic.safepickle import allow_globals
from zeroelastic.stage3 import memory
from zeroelastic.stage3.background import forget_background, refuse_background, wants_background
from zeroelastic.stage3.fallback import load_newest
from zeroelastic.stage3.frameworks import wrap_frameworks
from zeroelastic.stage3.lineage import lineage_of
from zeroelastic.stage3.live import LiveState, read_live, refuse_unsupported
from zeroelastic.stage3.load import Wanted, load
from zeroelastic.stage3.loaded_values import check_loaded_values
from zeroelastic.stage3.module_keys import ModuleKeys, recorded_keys
from zeroelastic.stage3.module_states import model_states_reader
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.partners import agree_on, announce, require_partners
from zeroelastic.stage3.pending import abandon, flush, has_pending
from zeroelastic.stage3.reloading import Attempt, is_of_all_ranks, load_one_save
from zeroelastic.stage3.save import elastic_state_dict
from zeroelastic.stage3.saving import (
    Saving,
    facts_of,
    live_of,
    options_of,
    save_checkpoint,
    saves_elastic,
    stage3_optimizer,
)
from zeroelastic.stage3.stock import stock_loads
from zeroelastic.stage3.storage_rules import leave_to_stock, loads_in_stock, own_rigid_files, refuse_unwritable
from zeroelastic.stage3.survey import survey
from zeroelastic.stage3.tag_choice import about_choice, choose_tag, nothing_to_load, warn_of_mark
from zeroelastic.stage3.topology import tensor_parallel
from zeroelastic.stage3.trained import param_names
from zeroelastic.storage import absolute

logger = logging.getLogger(__name__)

Method = Callable[..., Any]

_LOUD = ("CHANGED", "LOST", "NOT THE NEWEST")


@contextmanager
def loading_strictly(engine: Any, strict: bool) -> Iterator[None]:
    """While it lasts, loads are strict if ``strict``, whatever the configuration says, and as it says otherwise."""
    with patched(engine, _zeroelastic_strict=strict):
        yield


def configure_zero_optimizer(original: Method) -> Method:
    """Validate our options and refuse what elastic saving cannot cover, while the engine is being built."""

    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        announce()
        made = original(self, optimizer)
        if isinstance(made, DeepSpeedZeroOptimizer_Stage3):
            require_partners(wait=False)  # a barrier of DeepSpeed's is in what makes such an optimizer
            agree_on(self, partial(facts_of, self))
            made._zeroelastic_engine = self
            wrap_frameworks()
            if wants_background(self, options_of(self).background_save):
                settle(lambda: refuse_background(self))
            if saves_elastic(self):
                settle(lambda: _check_covered(self, made))
                refuse_unwritable(self, made)
        return made

    return _configure_zero_optimizer


def _check_covered(engine: Any, optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Raise UnsupportedError for a run that elastic checkpoints do not cover."""
    refuse_unsupported(optimizer, engine)
    live_of(engine, optimizer)


def state_dict(original: Method) -> Method:
    """The elastic state dict under ``"elastic_checkpoint": true``, the stock one otherwise."""

    def state_dict(self: Any) -> Any:
        engine = getattr(self, "_zeroelastic_engine", None)
        if engine is None or not saves_elastic(engine):
            return original(self)
        saving: Saving | None = getattr(self, "_zeroelastic_saving", None)
        return elastic_state_dict(
            self,
            saving.live if saving is not None else read_live(self, param_names(engine)),
            save_id=saving.save_id if saving is not None else "",
            train_batch_size=engine.train_batch_size(),
            alias=saving is not None,
            share_storage=saving.shard.shares_storage if saving is not None else True,
            digests=saving.shard.table if saving is not None else None,
        )

    return state_dict


def load_state_dict(original: Method) -> Method:
    """Elastic state dicts, one per saved rank, at any world size; stock ones go to the original."""

    def load_state_dict(self: Any, state_dict_list: Any, *args: Any, **kwargs: Any) -> Any:
        if not memory.is_elastic(state_dict_list):
            return original(self, state_dict_list, *args, **kwargs)
        engine = getattr(self, "_zeroelastic_engine", None)
        names = param_names(engine) if engine is not None else self.param_names
        flags = dict(zip(("load_optimizer_states", "load_from_fp32_weights"), args, strict=False)) | kwargs
        return memory.load_state_dicts(
            self,
            read_live(self, names),
            state_dict_list,
            optimizer_states=bool(flags.get("load_optimizer_states", True)),
        )

    return load_state_dict


def get_all_ckpt_names(original: Method) -> Method:
    """The module states file that the survey chose, while a load of ours runs: new ranks have none of their own."""

    def _get_all_ckpt_names(self: Any, checkpoints_path: Any, tag: Any) -> Any:
        paths: tuple[str, ...] | None = getattr(self, "_zeroelastic_module_paths", None)
        return original(self, checkpoints_path, tag) if paths is None else list(paths)

    return _get_all_ckpt_names


def commit_decoupled_checkpoint(original: Method) -> Method:
    """What DeepSpeed does before an optimizer step; for a save of ours, its record and ``latest`` too."""

    def _commit_decoupled_checkpoint(self: Any) -> Any:
        return flush(self) if has_pending(self) else original(self)

    return _commit_decoupled_checkpoint


def save_16bit_model(original: Method) -> Method:
    """DeepSpeed's own; a pending save is committed first, which it would make a decoupled engine forget."""

    def save_16bit_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        flush(self, before="save_16bit_model()")
        return original(self, *args, **kwargs)

    return save_16bit_model


def destroy(original: Method) -> Method:
    """DeepSpeed's own, after a pending save is committed."""

    def destroy(self: Any) -> Any:
        try:
            if dist.is_initialized():
                flush(self, before="destroy()")
            else:
                abandon(self)
        finally:
            forget_background(self)
            original(self)

    return destroy


def collect(original: Method) -> Method:
    """DeepSpeed's own, which calls ``destroy``: a pending save is let go of before, for this rank is here alone."""

    def __del__(self: Any) -> None:
        try:
            abandon(self)
        finally:
            original(self)

    return __del__


def load_checkpoint(original: Method) -> Method:
    """A load at any world size; what is not ours (other stages, universal checkpoints) goes to the original."""

    def load_checkpoint(
        self: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        def stock() -> Any:
            found = original(
                self,
                load_dir,
                tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
            if found[0] is not None and not load_module_only:
                lineage_of(self).load(None, found[1])
            return found

        optimizer = stage3_optimizer(self)
        flush(self, before="load_checkpoint()")  # what a load fills is what a decoupled engine may still be writing
        if optimizer is None or self.load_universal_checkpoint():
            return stock()
        load_dir = absolute(load_dir)
        require_partners()
        agree_on(self, partial(facts_of, self))
        began = time.perf_counter()
        self.__dict__.pop("zeroelastic_report", None)  # that of an earlier load
        options = _agreed(options_of(self))
        if options.fallback and tag is None:
            loaded = load_newest(
                Path(load_dir),
                lambda directory, name: self.load_checkpoint(
                    directory,
                    name,
                    load_module_strict=load_module_strict,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                    custom_load_fn=custom_load_fn,
                ),
                self,
            )
            if loaded is not None:
                return loaded[0]

        def one_attempt(attempt: Attempt) -> Any:
            chosen, newer = choose_tag(Path(load_dir), tag)
            if chosen is None:
                nothing_to_load(Path(load_dir), required=options.required)
                return stock()
            tag_dir = attempt.open_tag(Path(load_dir) / chosen)
            warn_of_mark(tag_dir)
            refused = _refused(self, optimizer, tag_dir)
            if refused is not None:
                if dist.get_rank() == 0:
                    logger.warning("loading through DeepSpeed alone: %s", refused)
                return stock()
            wanted = Wanted(optimizer_states=load_optimizer_states, module_only=load_module_only)
            live = live_of(self, optimizer)
            try:
                with allow_globals(options.allow_globals):
                    found = survey(
                        tag_dir,
                        live,
                        weights_only=wanted.weights_only,
                        options=options,
                        strict_module=load_module_strict and custom_load_fn is None,
                    )
                settle(
                    lambda: check_loaded_values(
                        self,
                        found.model,
                        buffers=custom_load_fn is None,
                        schedule=load_lr_scheduler_states,
                        module_only=load_module_only,
                    )
                )
            except Exception as error:
                if not is_of_all_ranks(error) or attempt.was_saved_again():
                    raise
                if isinstance(error, OldFormatError):
                    leave_to_stock(error, tag_dir, live, node_local=self.use_node_local_storage())
                elif not isinstance(error, (CheckpointError, LayoutMismatchError, UnsupportedError)):
                    raise
                else:
                    with allow_globals(options.allow_globals):
                        left = isinstance(error, UnsupportedError) and _only_stock_reads(tag_dir, live)
                        left = left or stock_loads(
                            self,
                            live,
                            tag_dir,
                            strict=load_module_strict and custom_load_fn is None,
                            optimizer_states=load_optimizer_states,
                            damaged=isinstance(error, CheckpointError),
                        )
                    if not left:
                        raise
                if dist.get_rank() == 0:
                    logger.warning("loading through DeepSpeed alone: %s", error)
                return stock()
            keys = ModuleKeys()

            def load_module(module_path: str) -> tuple[Any, Any]:
                with (
                    model_states_reader(
                        self, found, module_path, safe_load=options.safe_load, allow_globals=options.allow_globals
                    ),
                    recorded_keys(self.module, keys, forgive=options.missing_state == "fresh"),
                ):
                    path, state = self._load_checkpoint(
                        load_dir,
                        chosen,
                        load_module_strict=load_module_strict,
                        load_optimizer_states=True,  # False would merge the full model on every rank; see ``load``
                        load_lr_scheduler_states=load_lr_scheduler_states,
                        load_module_only=load_module_only,
                        custom_load_fn=custom_load_fn,
                    )
                if path is None:
                    raise CheckpointError(f"{found.model.path}: DeepSpeed did not load it.")
                if not load_optimizer_states:
                    state.setdefault("optimizer", None)
                return str(found.model.path), state

            with allow_globals(options.allow_globals):
                outcome, report = load(
                    self,
                    found,
                    live,
                    tag_dir=tag_dir,
                    options=options,
                    said=about_choice(Path(load_dir), chosen, newer),
                    wanted=wanted,
                    load_module=load_module,
                    keys=keys,
                    began=began,
                    pending=attempt.pending_micro_batches,
                )
            self.zeroelastic_report = report
            if dist.get_rank() == 0:
                loud = bool(report.changed) or any(word in note for note in report.notes for word in _LOUD)
                line, _, details = report.text().partition("\n")
                if loud:
                    logger.warning("%s", report.text())
                else:
                    notice(logger, line, details=f"\n{details}")
            if not load_module_only:
                lineage_of(self).load(found.checkpoint.record, outcome[1])
            return outcome

        return load_one_save(self, one_attempt)

    return load_checkpoint


def _agreed(options: Options) -> Options:
    """The options with one level of verification for all ranks: the least, where the default differs. Collective."""
    levels = set(gather(options.verify))
    if len(levels) == 1:
        return options
    return options.model_copy(update={"verify": next(level for level in ("off", "quick", "full") if level in levels)})


def _refused(engine: Any, optimizer: DeepSpeedZeroOptimizer_Stage3, tag_dir: Path) -> UnsupportedError | None:
    """Why this load is left to DeepSpeed: a rigid checkpoint of the same world size in a configuration we do not cover.

    Raises UnsupportedError when DeepSpeed could not load it either, because it is elastic or of another size.
    Collective.
    """

    def look() -> tuple[str, bool] | None:
        try:
            _check_covered(engine, optimizer)
            return None
        except UnsupportedError as error:
            world_size = dist.get_world_size(group=optimizer.dp_process_group)
            return str(error), loads_in_stock(
                tag_dir,
                engine.global_rank,
                world_size,
                tensor_parallel(optimizer),
                node_local=engine.use_node_local_storage(),
            )

    _, outcomes = together(look)
    reasons: list[tuple[str, bool]] = [outcome for outcome in outcomes if outcome is not None]
    if not reasons:
        return None
    if not all(stock for _, stock in reasons):
        raise UnsupportedError(f"{tag_dir}: {reasons[0][0]}")
    return UnsupportedError(reasons[0][0])


def _only_stock_reads(tag_dir: Path, live: LiveState) -> bool:
    """Whether a rigid checkpoint of this world size holds state that only DeepSpeed can read. Collective."""

    def look() -> bool:
        try:
            checkpoint = open_checkpoint(tag_dir, near_rank=live.rank, tp=live.tp)
        except UnsupportedError:  # of another stage: what is wrong with it is ours to say
            return False
        except MissingFileError:  # on another node
            return own_rigid_files(tag_dir, live.rank, live.layout.world_size)
        try:
            if checkpoint.world_size != live.layout.world_size:
                return False
            checkpoint.shard(live.rank)
            return False
        except UnsupportedError:
            return not (checkpoint.record is not None and checkpoint.record.checkpoint_format == "elastic")

    return all(together(look)[1])


REPLACEMENTS: dict[str, Callable[[Method], Method]] = {
    "_commit_decoupled_checkpoint": commit_decoupled_checkpoint,
    "_configure_zero_optimizer": configure_zero_optimizer,
    "_get_all_ckpt_names": get_all_ckpt_names,
    "__del__": collect,
    "destroy": destroy,
    "load_checkpoint": load_checkpoint,
    "load_state_dict": load_state_dict,
    "save_16bit_model": save_16bit_model,
    "save_checkpoint": save_checkpoint,
    "state_dict": state_dict,
}
"""What makes the replacement of each method that is wrapped, of its original."""
