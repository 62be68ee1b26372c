"""Process groups: which arrangements of ranks an elastic checkpoint covers.

Covered: one ZeRO run over all ranks (sequence parallel ranks included), or one in each tensor parallel rank, which
slices parameters first: ``data parallel size x tensor parallel size`` is the world.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


def tensor_parallel(optimizer: Any) -> TensorParallel:
    """This rank's place among its tensor parallel peers, each of which partitions slices of its own."""
    group = getattr(optimizer, "model_parallel_group", None)
    if group is None:
        return NO_TENSOR_PARALLEL
    return TensorParallel(int(optimizer.model_parallel_rank), dist.get_world_size(group=group))


def uncovered_groups(optimizer: Any, engine: object) -> list[str]:
    """The names of the process groups in use that elastic checkpoints do not cover."""
    problems: list[str] = []
    if getattr(engine, "has_moe_layers", False):
        problems.append("mixture-of-experts layers (experts are partitioned over groups of their own)")
    world_size = dist.get_world_size()
    data_parallel = dist.get_world_size(group=optimizer.dp_process_group)
    tp = tensor_parallel(optimizer)
    if data_parallel * tp.size == world_size and tp.size == int(getattr(engine, "mp_world_size", 1) or 1):
        return problems
    if tp.size > 1:
        problems.append(
            f"an mpu whose groups do not make up the world (data parallel {data_parallel} x model parallel {tp.size} "
            f"of {world_size} ranks)"
        )
    else:
        problems.append(
            f"a data parallel group of {data_parallel} of {world_size} ranks (for sequence parallelism, give "
            "deepspeed.initialize an mpu with get_sequence_data_parallel_group in place of data_parallel_size, so that "
            "the ranks of a sequence share one set of partitions)"
        )
    return problems
