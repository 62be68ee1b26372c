"""The forecast for ranks that have slices of tensors: the plan of each target rank is made, and counted.

The slices of the target are those that ``reshard`` would write, and a run of these sizes has (``ReshardTarget``).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import make_plan
from zeroelastic.verbs.plan.forecast import NO_TRAFFIC, Forecast, Head, Traffic, add_traffic
from zeroelastic.verbs.reshard.reshard import ReshardPlan


class _Counts:
    """Numbers of target ranks, added up over the plans for trained and frozen parameters."""

    def __init__(self, world_size: int) -> None:
        self.owned, self.segments, self.pieces = np.zeros((3, world_size), dtype=np.int64)

    def add(self, source: Layout, target: Layout, nbytes: Int64Array, num_keys: Int64Array) -> Traffic:
        """Count the plans between two layouts over all ranks; bytes of an element and keys are of ``source``'s."""
        by_name = dict(zip((tensor.name for tensor in source.tensors), nbytes.tolist(), strict=True))
        keys: list[Int64Array] = []
        counted: list[Int64Array] = []
        for rank in range(target.world_size):
            own = target.on_rank(rank)
            plan = make_plan(source, own, rank)
            of_params = np.array([by_name[tensor.name] for tensor in own.tensors], dtype=np.int64)
            self.owned[rank] += int((own.owned(rank)[1] * of_params).sum())
            runs = np.ones_like(plan.length) if plan.runs is None else plan.runs.count
            self.segments[rank] += int((runs * num_keys[plan.src_param]).sum())
            self.pieces[rank] += int(runs.sum())
            keys.append(rank * source.world_size + plan.src_rank)
            counted.append(plan.numel * nbytes[plan.src_param])
        return add_traffic(np.concatenate(keys), np.concatenate(counted), source.world_size)


def slices_forecast(head: Head, checkpoint: Checkpoint, planned: ReshardPlan) -> Forecast:
    """The forecast of a load of a checkpoint, or of its reshard, as ``planned``.

    The numbers are those of ``Forecast``, but that segments which follow each other in file and destination count as
    requests of their own.
    """
    target, source = planned.target, head.layout
    world_size = target.world_size
    counts = _Counts(world_size)
    optimizer = counts.add(source, target.layout, head.element_bytes, head.num_keys)
    frozen = NO_TRAFFIC
    state_bytes = _state_bytes(source, head.element_bytes)
    if head.frozen is not None:
        sizes = head.frozen_bytes
        parts = target.slicing.frozen_layout(head.frozen.whole_tensors, 3)  # at every stage each rank fills its part
        frozen = counts.add(head.frozen, parts, sizes, np.ones_like(sizes))
        state_bytes += _state_bytes(head.frozen, sizes)
    module = head.module_bytes(world_size)
    return Forecast(
        head=head,
        world_size=world_size,
        stage=target.stage,
        state_bytes=state_bytes,
        optimizer=optimizer,
        frozen=frozen,
        bytes_owned=counts.owned,
        model_files=_model_files(checkpoint, frozen, world_size),
        segments=counts.segments,
        requests=counts.segments,
        pieces=counts.pieces,
        module=module,
        modules_resharded=world_size,
        reshard_bytes_written=_bytes_written(head, planned, module),
        reshard_files_written=target.num_files,
    )


def _state_bytes(layout: Layout, nbytes: Int64Array) -> int:
    """Bytes of whole tensors, given those of an element of each parameter of their layout."""
    by_name: Mapping[str, int] = dict(zip((tensor.name for tensor in layout.tensors), nbytes.tolist(), strict=True))
    return sum(tensor.numel * by_name[tensor.name] for tensor in layout.whole_tensors)


def _model_files(checkpoint: Checkpoint, frozen: Traffic, world_size: int) -> Int64Array:
    """Model states files that each rank opens: one of each saved tensor parallel rank, and those of frozen pieces."""
    topology, whole = checkpoint.topology, checkpoint.whole_model
    sources: list[set[int]] = [set() for _ in range(world_size)]
    for target, source in zip(frozen.target.tolist(), frozen.source.tolist(), strict=True):
        sources[target].add(source)
    for rank, found in enumerate(sources):
        data_rank = topology.place(rank)[0] if rank < checkpoint.world_size and not whole else 0
        found.update(topology.rank(data_rank, t) for t in range(topology.tensor_size))
    return np.array([len(found) for found in sources], dtype=np.int64)


def _bytes_written(head: Head, planned: ReshardPlan, module: Int64Array) -> int:
    """Bytes that a reshard writes: files like the saved ones, with the payload of the new ranks."""
    target = planned.target
    around = int(head.optimizer_sizes[0]) - head.optimizer_payload(head.layout, 0)
    optimizer = sum(around + head.optimizer_payload(target.layout, rank) for rank in range(target.world_size))
    frozen = 0 if head.frozen is None else _state_bytes(head.frozen, head.frozen_bytes)
    if target.stage == 3:
        return optimizer + int(module.sum()) + frozen + head.record_bytes
    weights = int(head.trained_weights * target.times_written)
    return optimizer + int(module[: target.topology.tensor_size].sum()) + weights + frozen + head.record_bytes
