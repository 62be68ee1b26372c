"""``Trainer.train`` and the saves in it: which checkpoint a run resumes from, and when older ones are removed.

A save that was cut short is passed over. Where saves are in the background, ``save_total_limit`` removes no checkpoint
before the one after it is complete. A resumed run with ``group_by_length`` has the order of samples of rank 0 on all
ranks, and says where it is another one than in the saved run. Written for transformers 5.23.

``"keep_global_batch": true``: front ends on top of the Trainer (TRL, LLaMA-Factory, ms-swift, axolotl) are started with
a batch per device, which at another number of ranks is another global batch. ``Trainer.train`` first sets the micro
batch and the accumulation with which this number of ranks has the saved one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from zeroelastic import last_report
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.core.world_size import listed_world_sizes
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.deepspeed.patching import Method, patched, wrap
from zeroelastic.distributed.collective import broadcast
from zeroelastic.elastic.batch_plan import BatchPlan, batch_plan
from zeroelastic.errors import ConfigError, MissingFileError, SaveError, StrictError, UnsupportedError, counted
from zeroelastic.integrations.framework_checkpoints import (
    add_to_report,
    check_tag,
    is_loaded_here,
    newest_complete,
    numbered,
    read_folder,
    refuse_cut_short,
    save_with_files,
)
from zeroelastic.runs.names import LATEST, LATEST_UNIVERSAL, directory_of, read_latest

logger = logging.getLogger(__name__)

_MICRO, _ACCUMULATION, _GLOBAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


def wrap_module(module: ModuleType) -> None:
    """Wrap methods of ``transformers.trainer.Trainer``; does nothing the second time."""
    wrap(module.Trainer, "train", partial(_train, module))
    if hasattr(module, "rotate_checkpoints"):
        wrap(module.Trainer, "_save_checkpoint", partial(_save_checkpoint, module))
    if hasattr(module.Trainer, "_finalize_training"):
        wrap(module.Trainer, "_finalize_training", partial(_finalize_training, module))


def _train(
    module: ModuleType,
    original: Callable[..., Any],
    self: Any,
    resume_from_checkpoint: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    config = _ds_config(self)
    checkpoint = resume_from_checkpoint
    if checkpoint is True:
        checkpoint = module.get_last_checkpoint(self.args.output_dir)
        if config is not None and checkpoint is not None:
            checkpoint = _last_complete(config, Path(self.args.output_dir)) or checkpoint
            resume_from_checkpoint = str(checkpoint)
    is_path = isinstance(checkpoint, str | os.PathLike)
    if config is not None and is_path:
        refuse_cut_short(Path(checkpoint))
        if parse_options(config).keep_global_batch:
            keep_global_batch(self, config, Path(checkpoint))
    run = TrainerRun(self, module.TrainerCallback, Path(checkpoint) if is_path else None)
    order: AbstractContextManager[None] = nullcontext()
    if config is not None and is_path and _groups_by_length(self.args):
        strict = parse_options(config).strict
        run.add_callback("groups_by_length", lambda state: _say_other_groups(self, state, strict))
        order = patched(self, _get_train_sampler=partial(_order_of_rank_0, self._get_train_sampler))
    with _running(run), order:
        done = original(self, resume_from_checkpoint, *args, **kwargs)
    for call in run.at_end:
        call()
    return done


def _save_checkpoint(module: ModuleType, original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    config, engine, rotate = _ds_config(self), self.model_wrapped, module.rotate_checkpoints
    if config is None or not is_loaded_here(engine):
        return original(self, *args, **kwargs)
    later: list[Callable[[], Any]] = []  # what the Trainer removes and uploads, once the checkpoint is complete

    def postponed(call: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args, **kwargs: later.append(partial(call, *args, **kwargs))

    is_async = parse_options(config).async_save
    # The newest checkpoint is not complete when the Trainer removes the oldest: that of the save before is.
    remove = partial(_keep_one_more, rotate) if is_async else rotate
    with (
        patched(module, rotate_checkpoints=postponed(remove)),
        patched(self, _push_from_checkpoint=postponed(self._push_from_checkpoint)),
    ):
        done = save_with_files([engine], partial(original, self, *args, **kwargs))
    for call in later:
        call()
    if is_async and (run := current_run()) is not None and self.args.save_total_limit:
        run.at_end[:] = [partial(_remove_older, self, rotate)]
        if self.control.should_training_stop:  # the Trainer may remove all but the best then
            run.at_end.pop()()
    return done


def _keep_one_more(
    rotate: Callable[..., None],
    *args: Any,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    **kwargs: Any,
) -> None:
    if save_total_limit is not None and save_total_limit > 0:
        # The Trainer keeps the newest and the best, whatever the limit is.
        save_total_limit = 1 + max(save_total_limit, 1 if best_model_checkpoint is None else 2)
    rotate(*args, save_total_limit=save_total_limit, best_model_checkpoint=best_model_checkpoint, **kwargs)


def _finalize_training(module: ModuleType, original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    config = _ds_config(self)
    loads_or_removes = self.args.load_best_model_at_end or self.args.save_total_limit == 1
    if config is None or not loads_or_removes or self.state.best_model_checkpoint is None:
        return original(self, *args, **kwargs)
    if _is_complete(self, before="the end of the training"):
        return original(self, *args, **kwargs)
    if (run := current_run()) is not None:
        run.at_end.clear()
    with patched(module, sort_checkpoints=lambda *_, **__: []):  # from which the Trainer removes all but one
        return original(self, *args, **kwargs)


def _is_complete(trainer: Any, *, before: str) -> bool:
    """Wait for a save in the background; log where it failed, so that older checkpoints stay. Collective."""
    from zeroelastic.deepspeed.save.background import finish_pending  # it imports deepspeed

    try:
        finish_pending(trainer.model_wrapped, before=before)
    except SaveError as error:
        logger.error("older checkpoints stay, since the last one is not complete: %s", error)
        return False
    return True


def _remove_older(trainer: Any, rotate: Callable[..., None]) -> None:
    """Remove the checkpoints above ``save_total_limit``, once the last one is complete. Collective."""
    if _is_complete(trainer, before="save_total_limit") and trainer.args.should_save:
        rotate(
            output_dir=trainer._get_output_dir(trial=None),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


def _last_complete(config: Mapping[str, Any], output_dir: Path) -> Path | None:
    """The newest ``checkpoint-N`` that has what a resume reads, None where none has. Collective."""

    def check(folder: Path) -> None:
        if not (folder / "trainer_state.json").is_file():
            raise MissingFileError(f"{folder}: has no trainer_state.json.")
        options = config.get("checkpoint", {})
        latest = LATEST_UNIVERSAL if options.get("load_universal", False) else LATEST
        if (tag := read_latest(folder, latest)) is None:
            raise MissingFileError(f"{folder}: has no file {latest}.")
        check_tag(directory_of(folder, tag), on_this_node_only=options.get("use_node_local_storage", False))

    to_choose = "To choose another one, pass its path as resume_from_checkpoint."
    newest, _ = newest_complete(logger, lambda: numbered(output_dir, r"checkpoint-(\d+)"), check, to_choose)
    return newest


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """One call of ``Trainer.train``; ``checkpoint`` is what it resumes from, None for a fresh start."""

    trainer: Any
    callback_class: type
    checkpoint: Path | None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """What to call once the training has ended without an error, on every rank."""

    def record(self, key: str, values: Mapping[str, int]) -> None:
        """Have the run write ``values`` into the ``trainer_state.json`` of all checkpoints of this run."""

        def record(state: Any) -> None:
            state.stateful_callbacks[key] = {"args": {}, "attributes": dict(values)}

        self.add_callback(key, record)

    def add_callback(self, key: str, call: Callable[[Any], None]) -> None:
        """Have ``call`` called with the state of the Trainer when the training begins, after a load."""

        def on_train_begin(_: object, args: object, state: Any, control: object, **kwargs: object) -> None:
            call(state)

        name = "".join(part.capitalize() for part in key.split("_"))
        self.trainer.add_callback(type(name, (self.callback_class,), {"on_train_begin": on_train_begin})())


def _groups_by_length(args: Any) -> bool:
    """Whether the order of samples is made of groups of similar length; older transformers have a flag for it."""
    strategy: str = getattr(args, "train_sampling_strategy", "")
    return strategy == "group_by_length" or bool(getattr(args, "group_by_length", False))


class OrderOfRank0(Sampler[int]):
    """The indices that a sampler has on rank 0, on every rank. To begin an epoch is collective.

    The sampler of ``group_by_length`` draws from the generator of the process, which new ranks have not.
    """

    def __init__(self, order: Sampler[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(broadcast(list(self.order)))


def _order_of_rank_0(sampler_of: Callable[..., Sampler[int] | None], *args: Any, **kwargs: Any) -> OrderOfRank0 | None:
    sampler = sampler_of(*args, **kwargs)
    return None if sampler is None else OrderOfRank0(sampler)


def _say_other_groups(trainer: Any, state: Any, strict: bool) -> None:
    """Say where the order of ``group_by_length`` is not that of the saved run. StrictError, the same on every rank.

    Its groups are made from the batch of one rank, and the generator's state at the beginning of the epoch is not
    saved.
    """
    report = last_report(trainer.model_wrapped)
    if report is None or report.batch_changed:  # which has a warning of its own
        return
    saved = counted(report.saved_world_size, "rank")
    is_resized, is_within_epoch = report.saved_world_size != report.world_size, state.epoch != int(state.epoch)
    if not is_resized and (not is_within_epoch or state.epoch < 1):
        return
    level, note = logging.INFO, f"group_by_length: each sample comes once in an epoch, in another order than on {saved}"
    if is_within_epoch:
        why, later = "draws the order of an epoch anew after a resume", ""
        if is_resized:
            why = f"makes its groups from the batch of one rank, which is another one than on {saved}"
            later = ". Later epochs have each sample once, in another order"
        level, note = (
            logging.WARNING,
            f"POSITION CHANGED: group_by_length {why}: in this epoch some samples come twice, and some not at all"
            f"{later}. Resume at the end of an epoch",
        )
        if strict:
            raise StrictError(f'{report.path}: {note}. Set "strict": false to go on all the same.')
    add_to_report(trainer.model_wrapped, [note])
    if trainer.is_world_process_zero():
        logger.log(level, "%s: %s", report.path, note)


_runs: list[TrainerRun] = []


def current_run() -> TrainerRun | None:
    """The call of ``Trainer.train`` that is running, if there is one."""
    return _runs[-1] if _runs else None


@contextmanager
def _running(run: TrainerRun) -> Iterator[None]:
    _runs.append(run)
    try:
        yield
    finally:
        _runs.pop()


def _ds_config(trainer: Any) -> dict[str, Any] | None:
    """The DeepSpeed configuration from which the engine will be built; None in a run without DeepSpeed."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    config = getattr(plugin, "deepspeed_config", None)
    return config if isinstance(config, dict) else None


def keep_global_batch(trainer: Any, config: dict[str, Any], checkpoint: Path) -> None:
    """Give a Trainer the batch settings with which its ranks have the checkpoint's global batch. Collective.

    The micro batch does not grow. Raises the same error on every rank: ConfigError where the ranks cannot share the
    global batch evenly, UnsupportedError for settings under which it cannot be kept.
    """
    saved = _saved_batch(checkpoint)
    if saved is None:
        return
    if saved == 0:
        raise ConfigError(
            f'{checkpoint}: no global batch is recorded there, which "keep_global_batch" would keep. Set '
            "per_device_train_batch_size and gradient_accumulation_steps yourself, and leave the option out."
        )
    args, world_size = trainer.args, dist.get_world_size() if dist.is_initialized() else 1
    micro, accumulation = int(args.per_device_train_batch_size), int(args.gradient_accumulation_steps)
    current = int(trainer.get_total_train_batch_size(args))
    if current == saved:
        return
    plan = _plan(trainer, checkpoint, saved, current, world_size)
    args.per_device_train_batch_size = trainer._train_batch_size = plan.micro_batch
    args.gradient_accumulation_steps = plan.accumulation
    _set_config(trainer, config, plan)
    if trainer.is_world_process_zero():
        logger.info(
            "%s",
            f"keep_global_batch: per_device_train_batch_size {micro} -> {plan.micro_batch}, "
            f"gradient_accumulation_steps {accumulation} -> {plan.accumulation}, so that the global batch on "
            f"{counted(world_size, 'rank')} is that of {checkpoint.name}: {saved}, not {current}",
        )


def _plan(trainer: Any, checkpoint: Path, saved: int, current: int, world_size: int) -> BatchPlan:
    args = trainer.args
    micro, accumulation = int(args.per_device_train_batch_size), int(args.gradient_accumulation_steps)
    start = f"{checkpoint}: was saved with a global batch of {saved}"
    if args.auto_find_batch_size:
        raise UnsupportedError(
            f'{start}; auto_find_batch_size chooses its own. Leave it out, or leave out "keep_global_batch".'
        )
    if current != micro * accumulation * world_size or trainer._train_batch_size != micro:
        raise UnsupportedError(
            f'{start}; "keep_global_batch" needs a run in which each rank takes samples of its own, and {world_size} '
            f"ranks x {micro} x {accumulation} are not the {current} of this run. Set per_device_train_batch_size and "
            "gradient_accumulation_steps yourself, and leave the option out."
        )
    if saved % world_size:
        raise ConfigError(
            f"{start}, which {world_size} ranks cannot share evenly. World sizes that work: "
            f'{listed_world_sizes(saved)}. Without "keep_global_batch" this run has a global batch of {current} '
            f"({micro} x {world_size} ranks x {accumulation}), and other samples."
        )
    return batch_plan(saved, world_size, micro)


def _set_config(trainer: Any, config: dict[str, Any], plan: BatchPlan) -> None:
    """Set the three batch settings wherever the Trainer keeps the DeepSpeed configuration that it has filled in."""
    values = {_MICRO: plan.micro_batch, _ACCUMULATION: plan.accumulation, _GLOBAL: plan.global_batch}
    plugin = trainer.accelerator.state.deepspeed_plugin
    config.update(values)
    for holder in (getattr(plugin, "hf_ds_config", None), getattr(trainer.args, "hf_deepspeed_config", None)):
        if holder is None:
            continue
        holder.config.update(values)
        # What differed from the arguments when these were made, as texts ("- ds train_batch_size=6 vs hf ...").
        holder.mismatches = [text for text in getattr(holder, "mismatches", []) if not _is_about(values, text)]
    if hasattr(plugin, "gradient_accumulation_steps"):
        plugin.gradient_accumulation_steps = plan.accumulation


def _is_about(values: Mapping[str, int], mismatch: str) -> bool:
    return any(mismatch.startswith(f"- ds {name}=") for name in values)


def _saved_batch(checkpoint: Path) -> int | None:
    """The global batch that a ``checkpoint-N`` records, or 0; None where it cannot be read. Collective."""

    def read(opened: Checkpoint) -> int:
        return opened.train_batch_size(opened.shard(0)) or 0

    return read_folder(checkpoint, read)
