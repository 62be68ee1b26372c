"""The kinds of DeepSpeed's optimizers that are loaded and saved here, and the live optimizer of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from zeroelastic.checkpoint.tag_files import NO_TENSOR_PARALLEL, TensorParallel
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.evaluation import Evaluation
from zeroelastic.deepspeed.live.group_split import Bf16GroupSplit, GroupSplit
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer, tensor_parallel
from zeroelastic.deepspeed.live.stage3 import Stage3
from zeroelastic.deepspeed.live.trained import param_names
from zeroelastic.errors import UnsupportedError

_KINDS: dict[type, type[LiveOptimizer]] = {
    DeepSpeedZeroOptimizer_Stage3: Stage3,
    DeepSpeedZeroOptimizer: GroupSplit,
    BF16_Optimizer: Bf16GroupSplit,
    DeepSpeedZeRoOffload: Evaluation,
}
"""DeepSpeed's class -> ours. Also for subclasses of DeepSpeed's; ``uncovered`` names the ones that are not covered."""


def kind_of(optimizer: object, *, to_load: bool = False) -> type[LiveOptimizer] | None:
    """The class of the live optimizer, or None for an optimizer that is left to DeepSpeed alone.

    What stands for the optimizer of an engine without one has a class ``to_load`` only.
    """
    kind = _class_of(optimizer)
    if kind is None or not (kind.trains or to_load):
        return None
    return kind if kind.left_to_deepspeed(optimizer) is None else None


def why_left_to_deepspeed(optimizer: object) -> str | None:
    """What of a run has its loads and saves left to DeepSpeed; None where they are ours, and for other optimizers."""
    kind = _class_of(optimizer)
    return None if kind is None else kind.left_to_deepspeed(optimizer)


def _class_of(optimizer: object) -> type[LiveOptimizer] | None:
    return next((ours for theirs, ours in _KINDS.items() if isinstance(optimizer, theirs)), None)


def read_live(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> LiveOptimizer:
    """The live state of one rank: trained is what the optimizer has, frozen every other parameter of the module.

    Raises UnsupportedError for parameters that are not partitioned over all ranks.
    """
    kind = kind_of(optimizer, to_load=True)
    assert kind is not None
    return kind(optimizer, names)


def covered_live(engine: Engine, optimizer: Any) -> LiveOptimizer:
    """The live state of a run that elastic checkpoints cover. Raises UnsupportedError for any other."""
    kind = kind_of(optimizer, to_load=True)
    assert kind is not None
    if (problems := kind.uncovered(optimizer, engine)) and not kind.trains:
        raise UnsupportedError(f"engines without an optimizer are not loaded with {', '.join(problems)} yet.")
    if problems:
        raise UnsupportedError(
            f"elastic checkpoints do not cover {', '.join(problems)} yet. Save with elastic_checkpoint off, and resume "
            "at the world size that saved."
        )
    return read_live(optimizer, param_names(engine))


def trained_params(engine: Engine) -> list[Param] | None:
    """The parameters that the engine trains, or one without an optimizer would; None where that is not known here."""
    kind = kind_of(engine.optimizer, to_load=True)
    if kind is None:
        return None
    names = param_names(engine)
    live = read_live(engine.optimizer, names)
    if kind.trains:
        return list(live.layout.params)
    wanted = {name for param, name in names.items() if param.requires_grad}
    return [param for param in live.frozen.params if param.name in wanted]


def rank_and_tp(engine: Engine) -> tuple[int, TensorParallel]:
    """This rank in its data parallel group, and which of the tensor parallel ranks it is."""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None or kind_of(optimizer) is None:  # without an optimizer there are no such groups, either
        return dist.get_rank(), NO_TENSOR_PARALLEL
    return dist.get_rank(group=optimizer.dp_process_group), tensor_parallel(optimizer)
