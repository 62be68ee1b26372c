"""ms-swift's order of samples, kept at another number of ranks.

``swift.dataloader.shard.BatchSamplerShard`` (ms-swift up to 4.6) permutes ``samples // ranks * ranks`` numbers, so that
another number of ranks has other permutations, and a resume repeats samples. While zeroelastic is installed, a run that
resumes permutes as many numbers as the run that it continues, and records how many. Versions that permute all samples
are left alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from zeroelastic.deepspeed.patching import Method, wrap
from zeroelastic.integrations.framework_checkpoints import read_folder
from zeroelastic.integrations.trainer import TrainerRun, current_run

logger = logging.getLogger(__name__)

_PERMUTED = "_zeroelastic_permuted"
"""On a sampler: how many numbers it permutes."""
_RECORD = "zeroelastic_order"
"""The key of our entry in ``stateful_callbacks`` of ``trainer_state.json``."""


def wrap_module(module: ModuleType) -> None:
    """Wrap the sampler of ``swift.dataloader.shard``; does nothing the second time."""
    sampler = getattr(module, "BatchSamplerShard", None)
    if not isinstance(sampler, type):
        logger.warning("swift.dataloader.shard has no BatchSamplerShard: a resume at another size may repeat samples")
        return
    wrap(sampler, "__init__", _init)
    wrap(sampler, "__iter__", _iter)


def _init(original: Method, self: Any, total_samples: int, *args: Any, **kwargs: Any) -> None:
    original(self, total_samples, *args, **kwargs)
    run = current_run()
    if run is not None and _order_depends_on_size(self, total_samples):
        _continue_order(self, total_samples, run)


def _order_depends_on_size(sampler: Any, samples: int) -> bool:
    """Whether a sampler permutes a multiple of the number of ranks: such a one keeps the number of each rank.

    Groups of similar length are made of batches, and are left as they are.
    """
    one_rank = getattr(sampler, "total_samples", None) == samples // sampler.world_size
    grouped = getattr(sampler, "group_by_length", False)
    return one_rank and not hasattr(sampler, "total_size") and bool(sampler.shuffle) and not grouped


def _continue_order(sampler: Any, samples: int, run: TrainerRun) -> None:
    """Let a new sampler permute as many numbers as the run that is resumed, if any, and record how many. Collective."""
    world_size = int(sampler.world_size)
    own = permuted = samples // world_size * world_size
    if run.checkpoint is not None:
        checkpoint = run.checkpoint
        tp_size = int(sampler.tp_size)
        saved = read_folder(checkpoint, lambda opened: _saved_order(checkpoint, samples, opened.world_size // tp_size))
        if saved is None:
            logger.warning(
                "%s: ms-swift's order of samples cannot be continued: the checkpoint does not tell which it was, or "
                "the data had another length. Other samples follow than in the saved run, some for the second time.",
                checkpoint,
            )
        else:
            permuted = saved
    setattr(sampler, _PERMUTED, permuted)
    sampler.total_samples = permuted // world_size
    if permuted != own and sampler.rank == 0:
        logger.info(
            "%s",
            f"ms-swift permutes {permuted} of {samples} samples, as in the saved run; on {world_size} ranks it would "
            f"begin another order, of {own}",
        )
    run.record(_RECORD, {"samples": samples, "permuted": permuted})


def _iter(original: Method, self: Any) -> Iterator[list[int]]:
    permuted = getattr(self, _PERMUTED, None)
    return original(self) if permuted is None else _batches(self, permuted)


def _batches(sampler: Any, permuted: int) -> Iterator[list[int]]:
    """This rank's batches of an epoch: every world_size-th sample of the order."""
    order = torch.randperm(permuted, generator=torch.Generator().manual_seed(sampler.curr_seed)).tolist()
    mine = order[: sampler.total_samples * sampler.world_size][sampler.rank :: sampler.world_size]
    for first in range(0, len(mine), sampler.batch_size):
        batch = mine[first : first + sampler.batch_size]
        if len(batch) == sampler.batch_size or not sampler.drop_last:
            yield batch


def _saved_order(checkpoint: Path, samples: int, world_size: int) -> int | None:
    """How many numbers the saved run permuted: as recorded, or as ms-swift does at its number of ranks."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        recorded = state.get("stateful_callbacks", {}).get(_RECORD, {}).get("attributes")
        if recorded is not None:
            return int(recorded["permuted"]) if recorded["samples"] == samples else None
    except (OSError, ValueError):
        return None
    return samples // world_size * world_size
