"""``"keep_global_batch": true``: a Trainer that resumes at another number of ranks keeps the global batch of the save.

Front ends on top of the Hugging Face Trainer (TRL, LLaMA-Factory, ms-swift, axolotl) are started with a batch per
device, which at another number of ranks is another global batch: other samples, another schedule. With the option,
``Trainer.train`` first sets the micro batch and the accumulation with which this number of ranks has the saved global
batch. And where saves are in the background, ``save_total_limit`` removes no checkpoint before the one after it is
complete. Wrapped by ``deepspeed/install/seams`` where transformers is imported; written for transformers 5.23.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.global_batch import listed_world_sizes
from zeroelastic.deepspeed.notices import notice
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.deepspeed.patching import patched, wrap
from zeroelastic.elastic.sampler import BatchPlan, batch_plan
from zeroelastic.errors import ConfigError, SaveError, UnsupportedError
from zeroelastic.integrations.framework_load import read_on_rank_0
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.locate import find_source
from zeroelastic.runs.tag_directory import read_tag
from zeroelastic.verbs.reshard.source import train_batch_size

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


def _train(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        config = _ds_config(self)
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = module.get_last_checkpoint(self.args.output_dir)
            if config is not None and checkpoint is not None:
                checkpoint = newest_complete(Path(checkpoint)) or checkpoint
                resume_from_checkpoint = str(checkpoint)
        if config is not None and isinstance(checkpoint, str | os.PathLike) and parse_options(config).keep_global_batch:
            keep_global_batch(self, config, Path(checkpoint))
        is_path = isinstance(checkpoint, str | os.PathLike)
        run = TrainerRun(self, module.TrainerCallback, Path(checkpoint) if is_path else None)
        with _running(run):
            done = original(self, resume_from_checkpoint, *args, **kwargs)
        for call in run.at_end:
            call()
        return done

    return train


def _save_checkpoint(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    rotate = module.rotate_checkpoints

    def keeping_one_more(
        *args: Any, save_total_limit: int | None = None, best_model_checkpoint: str | None = None, **kwargs: Any
    ) -> None:
        if save_total_limit is not None and save_total_limit > 0:
            # The Trainer keeps the newest and the best, whatever the limit is.
            save_total_limit = 1 + max(save_total_limit, 1 if best_model_checkpoint is None else 2)
        rotate(*args, save_total_limit=save_total_limit, best_model_checkpoint=best_model_checkpoint, **kwargs)

    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _ds_config(self)
        if config is None or not parse_options(config).async_save:
            return original(self, *args, **kwargs)
        # The newest checkpoint is not complete when the Trainer removes the oldest: that of the save before is.
        with patched(module, rotate_checkpoints=keeping_one_more):
            done = original(self, *args, **kwargs)
        if (run := current_run()) is not None and self.args.save_total_limit:
            run.at_end[:] = [partial(_remove_older, self, rotate)]
            if self.control.should_training_stop:  # the Trainer may remove all but the best then
                run.at_end.pop()()
        return done

    return save_checkpoint


def _remove_older(trainer: Any, rotate: Callable[..., None]) -> None:
    """Remove the checkpoints above ``save_total_limit``, once the last one is complete. Collective."""
    from zeroelastic.deepspeed.save.pending import finish_pending

    try:
        finish_pending(trainer.model_wrapped, before="save_total_limit")
    except SaveError as error:
        logger.error("older checkpoints stay, since the last one is not complete: %s", error)
        return
    if trainer.args.should_save:
        rotate(
            output_dir=trainer._get_output_dir(trial=None),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


def newest_complete(newest: Path) -> Path | None:
    """The newest ``checkpoint-N`` beside ``newest`` that has what a resume reads, if that is an older one. Collective.

    A save that was cut short leaves a folder that is newer than the last complete checkpoint, and from which no resume
    goes on.
    """

    def look() -> str | None:
        numbers = (path.name.removeprefix("checkpoint-") for path in newest.parent.glob("checkpoint-*"))
        for number in sorted(map(int, filter(str.isdecimal, numbers)), reverse=True):
            folder = newest.parent / f"checkpoint-{number}"
            if (folder / "trainer_state.json").is_file() and any(folder.glob("global_step*/")):
                return folder.name
        return None

    name = read_on_rank_0(look)
    if name is None or name == newest.name:
        return None
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "%s: has no checkpoint to resume from: its save was cut short, or it has weights alone. The run goes on "
            "from %s. A path as resume_from_checkpoint chooses another.",
            *(newest, name),
        )
    return newest.parent / name


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """One call of ``Trainer.train``; ``checkpoint`` is what it resumes from, None for a fresh start."""

    trainer: Any
    callback_class: type
    checkpoint: Path | None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """What to call once the training has ended without an error, on every rank."""

    def record(self, key: str, values: Mapping[str, int]) -> None:
        """Have the run write ``values`` into the ``trainer_state.json`` of its checkpoints, from its beginning on."""

        def on_train_begin(_: object, args: object, state: Any, control: object, **kwargs: object) -> None:
            state.stateful_callbacks[key] = {"args": {}, "attributes": dict(values)}

        name = "".join(part.capitalize() for part in key.split("_"))
        self.trainer.add_callback(type(name, (self.callback_class,), {"on_train_begin": on_train_begin})())


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
        notice(
            logger,
            f"keep_global_batch: per_device_train_batch_size {micro} -> {plan.micro_batch}, "
            f"gradient_accumulation_steps {accumulation} -> {plan.accumulation}, so that {world_size} ranks have the "
            f"global batch of {checkpoint.name}: {saved}, not {current}",
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
    """The global batch that a ``checkpoint-N`` records, 0 where it records none, on every rank. Collective.

    None where it cannot be read: its load says why.
    """

    def read(tag_dir: FilePath) -> int:
        opened = open_checkpoint(tag_dir)
        return train_batch_size(opened.record, opened.shard(0), opened.world_size) or 0

    return read_on_rank_0(lambda: read_tag(find_source(checkpoint).tag_dir, read))
