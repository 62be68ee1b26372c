"""``"keep_global_batch": true``: a Trainer that resumes at another number of ranks keeps the global batch of the save.

Front ends on top of the Trainer (TRL, LLaMA-Factory, ms-swift, axolotl) are started with a batch per device, which at
another number of ranks is another global batch. ``Trainer.train`` first sets the micro batch and the accumulation with
which this number of ranks has the saved one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.core.global_batch import listed_world_sizes
from zeroelastic.elastic.batch_plan import BatchPlan, batch_plan
from zeroelastic.errors import ConfigError, UnsupportedError, counted
from zeroelastic.integrations.framework_load import read_folder

logger = logging.getLogger(__name__)

_MICRO, _ACCUMULATION, _GLOBAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


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
