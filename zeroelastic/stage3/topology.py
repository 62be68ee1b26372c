"""Process groups: which arrangements of ranks an elastic checkpoint covers, and what keeps state beside ZeRO's own.

Covered: one ZeRO-3 run over all ranks (sequence parallel ranks included), or one in each tensor parallel rank, which
slices parameters first: ``data parallel size x tensor parallel size`` is the world.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic.checkpoint import NO_TENSOR_PARALLEL, TensorParallel

_OTHER_OPTIMIZERS = {
    "SuperOffloadOptimizer_Stage3": "SuperOffload (its moments are in another process, and DeepSpeed saves none)",
    "MiCS_Optimizer": "MiCS (parameters are partitioned within shard groups, not over all ranks)",
}


def tensor_parallel(optimizer: DeepSpeedZeroOptimizer_Stage3) -> TensorParallel:
    """This rank's place among its tensor parallel peers, each of which partitions slices of its own."""
    group = getattr(optimizer, "model_parallel_group", None)
    if group is None:
        return NO_TENSOR_PARALLEL
    return TensorParallel(int(optimizer.model_parallel_rank), dist.get_world_size(group=group))


def rank_and_tp(engine: Any) -> tuple[int, TensorParallel]:
    """This rank in its data parallel group, and which of the tensor parallel ranks it is."""
    optimizer = getattr(engine, "optimizer", None)
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return dist.get_rank(), NO_TENSOR_PARALLEL
    return dist.get_rank(group=optimizer.dp_process_group), tensor_parallel(optimizer)


def uncovered_topology(optimizer: DeepSpeedZeroOptimizer_Stage3, engine: object) -> list[str]:
    """The names of everything about ranks and groups, and optimizers that work beside ZeRO-3's, that is not covered."""
    problems: list[str] = []
    if getattr(optimizer, "zenflow", False):
        problems.append("ZenFlow (parameters are transposed, and moments are kept beside the optimizer's)")
    kind = type(optimizer).__name__
    if kind != DeepSpeedZeroOptimizer_Stage3.__name__:
        problems.append(_OTHER_OPTIMIZERS.get(kind, kind))
    if getattr(engine, "has_moe_layers", False):
        problems.append("mixture-of-experts layers (experts are partitioned over groups of their own)")
    problems += _uncovered_groups(optimizer, engine)
    return problems


def _uncovered_groups(optimizer: DeepSpeedZeroOptimizer_Stage3, engine: object) -> list[str]:
    world_size = dist.get_world_size()
    data_parallel = dist.get_world_size(group=optimizer.dp_process_group)
    tp = tensor_parallel(optimizer)
    if data_parallel * tp.size == world_size and tp.size == int(getattr(engine, "mp_world_size", 1) or 1):
        return []
    if tp.size > 1:
        return [
            f"an mpu whose groups do not make up the world (data parallel {data_parallel} x model parallel {tp.size} "
            f"of {world_size} ranks)"
        ]
    return [
        f"a data parallel group of {data_parallel} of {world_size} ranks (for sequence parallelism, give "
        "deepspeed.initialize an mpu with get_sequence_data_parallel_group in place of data_parallel_size, so that the "
        "ranks of a sequence share one set of partitions)"
    ]
