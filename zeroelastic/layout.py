"""ZeRO-3 arithmetic: which elements of which parameter sit where in every rank's flat buffers.

ZeRO-3 cuts each parameter of ``numel`` elements into ``world_size`` contiguous parts of
``ceil(numel / world_size)`` elements; rank r owns ``[r * part, min((r + 1) * part, numel))`` and pads its part
to full length. The parts of the parameters of one sub-group are laid end to end, padding included, in one flat
buffer. A layout is therefore the same table for every rank: only the owned range depends on the rank.

Offsets and lengths are in elements. Mirrors ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups`` and
``partition_parameters.Init._partition_param`` (DeepSpeed 0.19.8). ``groups_padding`` of DeepSpeed is not
mirrored: it books the whole padding on the last rank, which is wrong for parameters smaller than the world size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def partition_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's padded part of a parameter: ``ceil(numel / world_size)``."""
    return -(-numel // world_size)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as every rank knows it: its name and its full, unpartitioned shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter; 1 for a 0-dim parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each parameter's part sits in the flat buffers of one world size; the same on every rank.

    Invariant: within a sub-group the padded parts do not overlap, and ``sub_group_numel`` covers them. The arrays
    have shape ``(num_params,)`` and run parallel to ``params``.
    """

    world_size: int
    params: tuple[Param, ...]
    numel: Int64Array
    sub_group: Int64Array
    offset: Int64Array
    sub_group_numel: Int64Array

    @property
    def num_params(self) -> int:
        """Number of parameters in the layout."""
        return len(self.params)

    @property
    def num_sub_groups(self) -> int:
        """Number of flat buffers of each rank."""
        return len(self.sub_group_numel)

    @property
    def part(self) -> Int64Array:
        """Padded part of each parameter: shape ``(num_params,)``, the same on every rank."""
        return -(-self.numel // self.world_size)

    def owned(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """Global start and length of what ``rank`` really owns of each parameter, padding excluded.

        Returns two arrays of shape ``(num_params,)``; the length is 0 where the rank owns nothing.
        """
        part = self.part
        start = np.minimum(part * rank, self.numel)
        return start, np.minimum(part * (rank + 1), self.numel) - start

    def owned_numel(self, rank: int) -> int:
        """Elements that ``rank`` really owns, padding excluded."""
        return int(self.owned(rank)[1].sum())

    def index(self) -> dict[str, int]:
        """Position of each parameter by name."""
        return {param.name: i for i, param in enumerate(self.params)}

    def only(self, names: Collection[str]) -> Layout:
        """The same buffers with the parameters that are named alone: a plan for it leaves the others untouched."""
        if all(param.name in names for param in self.params):
            return self
        keep = np.array([i for i, param in enumerate(self.params) if param.name in names], dtype=np.int64)
        return Layout(
            world_size=self.world_size,
            params=tuple(self.params[i] for i in keep.tolist()),
            numel=self.numel[keep],
            sub_group=self.sub_group[keep],
            offset=self.offset[keep],
            sub_group_numel=self.sub_group_numel,
        )


def layout_from_sub_groups(sub_groups: Sequence[Sequence[Param]], world_size: int) -> Layout:
    """The layout whose sub-groups hold these parameters in this order, parts laid end to end.

    Raises ValueError for a world size below 1 or a parameter that appears twice.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    params = tuple(param for sub_group in sub_groups for param in sub_group)
    if len({param.name for param in params}) != len(params):
        names = [param.name for param in params]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"parameters in more than one place: {', '.join(twice)}")
    sizes = np.array([len(sub_group) for sub_group in sub_groups], dtype=np.int64)
    numel = np.array([param.numel for param in params], dtype=np.int64)
    sub_group = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    part = -(-numel // world_size)
    ends = np.cumsum(part)
    first = np.cumsum(sizes) - sizes
    base = np.where(first > 0, ends[np.maximum(first, 1) - 1], 0) if len(params) else np.zeros_like(sizes)
    totals = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(totals, sub_group, part)
    return Layout(
        world_size=world_size,
        params=params,
        numel=numel,
        sub_group=sub_group,
        offset=ends - part - base[sub_group],
        sub_group_numel=totals,
    )


def pack_sub_groups(
    groups: Sequence[Sequence[Param]], *, world_size: int, sub_group_size: int | None
) -> list[list[Param]]:
    """Cut optimizer groups into sub-groups as DeepSpeed does; ``sub_group_size`` counts elements of ONE rank's parts.

    Because parts shrink as the world grows, the cuts move with the world size: a checkpoint's sub-groups say nothing
    about those of another world size. Parameters without elements are not in any sub-group. Mirrors
    ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups`` (DeepSpeed 0.19.8), overshoot included.
    """
    sub_groups: list[list[Param]] = []
    for group in groups:
        numels = [param.numel for param in group]
        members = [param for param, numel in zip(group, numels, strict=True) if numel > 0]
        if not members:
            continue
        parts = [partition_numel(numel, world_size) for numel in numels if numel > 0]
        if sub_group_size is None or sub_group_size >= sum(parts):
            sub_groups.append(members)
            continue
        current: list[Param] = []
        filled = 0
        for param, part in zip(members, parts, strict=True):
            current.append(param)
            filled += part
            if filled >= sub_group_size:
                sub_groups.append(current)
                current, filled = [], 0
        if current:
            sub_groups.append(current)
    return sub_groups


def unpacked_layout(params: Sequence[Param], world_size: int) -> Layout:
    """The layout in which each parameter is a flat buffer of its own, as frozen parameters are kept."""
    return layout_from_sub_groups([[param] for param in params], world_size)
