"""Which elements of which parameter sit where in every rank's flat buffers, for each way that ZeRO cuts parameters.

A layout says it with one rule for all families. A parameter is on an axis, from ``origin`` to ``origin + numel``.
The axis is cut every ``part`` elements; rank r has ``[r * part, (r + 1) * part)`` of it, and holds that range in one of
its buffers, from ``offset`` on.

* **Per-parameter split** (ZeRO-3): every parameter has an own axis, with origin 0 and parts of
  ``ceil(numel / world_size)``; the parts of a sub-group's parameters lie end to end in one buffer.
* **Group split** (ZeRO-1 and 2): the parameters of an optimizer group lie end to end on one axis, with gaps where
  parameters are aligned, padded to a multiple of ``2 * world_size``; every rank's buffer is one part of it.

The table is the same for every rank: only the owned ranges depend on the rank. Offsets and lengths are in elements.
Mirrors ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups``, ``partition_parameters.Init._partition_param`` and
``DeepSpeedZeroOptimizer.__init__`` of stage_1_and_2.py (DeepSpeed 0.19.8). ``groups_padding`` of DeepSpeed's stage 3 is
not mirrored: it books the whole padding on the last rank, which is wrong for parameters smaller than the world size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import overload

import numpy as np

from zeroelastic.core import slices as whole_slices
from zeroelastic.core.slices import Int64Array as Int64Array
from zeroelastic.core.slices import RankSet, Slices, Strip, WholeTensors, slices_of


@overload
def partition_numel(numel: int, world_size: int) -> int: ...
@overload
def partition_numel(numel: Int64Array, world_size: int | Int64Array) -> Int64Array: ...
def partition_numel(numel: int | Int64Array, world_size: int | Int64Array) -> int | Int64Array:
    """Elements of one rank's padded part of a parameter, or of each: ``ceil(numel / world_size)``."""
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
    """Where each parameter sits in the flat buffers of one world size; the same on every rank.

    Invariant: within a buffer no two parameters have an element in the same place, and ``sub_group_numel`` covers them
    all. A flat buffer is a sub-group of ZeRO-3, an optimizer group of ZeRO-1 and 2. The arrays have shape
    ``(num_params,)`` and run parallel to ``params``; ``origin``, ``part`` and ``offset`` are explained above.

    ``slices`` says which part of which whole tensor each parameter is, and which ranks share it; ``shape`` and
    ``numel`` are then the slice's. None where every parameter is whole, and all ranks share it. A layout with
    slices may have several of one tensor, which are in the buffers of different ranks.
    """

    world_size: int
    params: tuple[Param, ...]
    numel: Int64Array
    sub_group: Int64Array
    origin: Int64Array
    part: Int64Array
    offset: Int64Array
    sub_group_numel: Int64Array
    slices: Slices | None = None

    @property
    def num_params(self) -> int:
        """Number of parameters in the layout."""
        return len(self.params)

    @property
    def num_sub_groups(self) -> int:
        """Number of flat buffers of each rank."""
        return len(self.sub_group_numel)

    @property
    def parts(self) -> Slices | WholeTensors:
        """Which part of which whole tensor each parameter is, and which ranks share it."""
        return WholeTensors(self.params, self.world_size) if self.slices is None else self.slices

    @property
    def tensors(self) -> tuple[Param, ...]:
        """The whole tensor that each parameter is, or is a slice of."""
        return self.parts.tensors

    @property
    def whole_tensors(self) -> tuple[Param, ...]:
        """Each whole tensor once."""
        return self.parts.whole_tensors

    def part_number(self, rank: int) -> int | Int64Array:
        """Which part a rank has of every parameter, or of each; as many as there are parts where it has none."""
        return self.parts.part_number(rank)

    @property
    def num_parts(self) -> Int64Array:
        """How many ranks share each parameter: shape ``(num_params,)``."""
        return self.parts.num_parts

    def rank_of(self, param: Int64Array, number: Int64Array) -> Int64Array:
        """The rank that has a part of a parameter, of each pair of these."""
        return self.parts.rank_of(param, number)

    def numbers_on(self, rank: int) -> Int64Array:
        """The numbers of the parameters that a rank shares, in the order of ``on_rank``."""
        return np.flatnonzero(self.parts.has(rank))

    def owned(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """Start and length of what ``rank`` really owns of each parameter, padding excluded.

        Returns two arrays of shape ``(num_params,)``; the length is 0 where the rank owns nothing.
        """
        number = self.part_number(rank)
        start = np.clip(self.part * number - self.origin, 0, self.numel)
        owned = np.clip(self.part * (number + 1) - self.origin, 0, self.numel) - start
        return start, self.parts.shared_numel(rank, owned)

    def buffer_offset(self, rank: int) -> Int64Array:
        """Where ``rank``'s buffers have the first element that it owns of each parameter: shape ``(num_params,)``."""
        before: Int64Array = np.maximum(self.origin - self.part * self.part_number(rank), 0)
        return self.offset + before

    def on_rank(self, rank: int) -> Layout:
        """The parameters that a rank is among those to share, in its buffers: of every tensor at most one slice."""
        if self.slices is None:
            return self
        there = self.slices.has(rank)
        if there.all():
            return self
        own = self._take(np.flatnonzero(there))
        lengths = np.zeros(self.num_sub_groups, dtype=np.int64)
        np.maximum.at(lengths, own.sub_group, own.offset + own.part)
        return replace(own, sub_group_numel=lengths)

    def padding(self, rank: int, sub_group: int) -> list[tuple[int, int]]:
        """The runs of one of ``rank``'s buffers that belong to no parameter: begin and end of each, ascending."""
        members = np.flatnonzero((self.sub_group == sub_group) & (self.owned(rank)[1] > 0))
        begins = self.buffer_offset(rank)[members]
        order = np.argsort(begins)
        begins, ends = begins[order], (begins + self.owned(rank)[1][members])[order]
        free = zip([0, *ends.tolist()], [*begins.tolist(), int(self.sub_group_numel[sub_group])], strict=True)
        return [(begin, end) for begin, end in free if begin < end]

    def used(self, rank: int, sub_group: int) -> list[tuple[int, int]]:
        """The runs of one of ``rank``'s buffers that belong to parameters: begin and end of each, ascending."""
        bounds = [0, *chain.from_iterable(self.padding(rank, sub_group)), int(self.sub_group_numel[sub_group])]
        return [(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]

    @property
    def in_buffer(self) -> Int64Array:
        """A number for each parameter that ascends in the order in which they follow each other in a buffer."""
        return self.offset + self.origin

    def owned_numels(self, rank: int) -> list[int]:
        """Elements of each sub-group that ``rank`` really owns, padding excluded."""
        owned = np.bincount(self.sub_group, weights=self.owned(rank)[1], minlength=self.num_sub_groups)
        return [int(numel) for numel in owned]

    def lean_numel(self, rank: int) -> Int64Array:
        """The elements of a rank's part of each group up to the group's last one: shape ``(num_sub_groups,)``."""
        ends, number = (np.zeros(self.num_sub_groups, dtype=np.int64) for _ in range(2))
        np.maximum.at(ends, self.sub_group, self.origin + self.numel)
        number[self.sub_group] = self.part_number(rank)
        lean: Int64Array = np.clip(ends - number * self.sub_group_numel, 0, self.sub_group_numel)
        return lean

    def owned_numel(self, rank: int) -> int:
        """Elements that ``rank`` really owns, padding excluded."""
        return int(self.owned(rank)[1].sum())

    def index(self) -> dict[str, int]:
        """Position of each parameter by name."""
        return {param.name: i for i, param in enumerate(self.params)}

    def only(self, names: Collection[str]) -> Layout:
        """Keep only the named parameters in the buffers: a plan for the result leaves the others untouched."""
        names = frozenset(names)
        if all(param.name in names for param in self.params):
            return self
        return self._take(np.array([i for i, param in enumerate(self.params) if param.name in names], dtype=np.int64))

    def _take(self, keep: Int64Array) -> Layout:
        return replace(
            self,
            params=tuple(self.params[i] for i in keep.tolist()),
            slices=None if self.slices is None else self.slices.take(keep),
            **{name: getattr(self, name)[keep] for name in _OF_PARAMS},
        )


_OF_PARAMS = ("numel", "sub_group", "origin", "part", "offset")
"""The arrays of a layout that run parallel to its parameters."""


def are_whole(*layouts: Layout) -> bool:
    """Whether every parameter of these layouts is a whole tensor, which all ranks share."""
    return all(layout.slices is None for layout in layouts)


def joined_layouts(layouts: Sequence[Layout]) -> Layout:
    """The parameters of several layouts of one world size, whose buffers are on different ranks.

    They are in the order of their buffers. A buffer counts as long as the longest of the same number. Raises ValueError
    for layouts without slices, of other world sizes, or with other numbers of buffers.
    """
    first = layouts[0]
    slices = [layout.slices for layout in layouts if layout.slices is not None]
    if len(slices) < len(layouts) or len({(layout.world_size, layout.num_sub_groups) for layout in layouts}) > 1:
        raise ValueError("layouts that are joined have slices, one world size, and buffers of the same numbers")
    joined = Layout(
        world_size=first.world_size,
        params=tuple(param for layout in layouts for param in layout.params),
        **{name: np.concatenate([getattr(layout, name) for layout in layouts]) for name in _OF_PARAMS},
        sub_group_numel=np.maximum.reduce([layout.sub_group_numel for layout in layouts]),
        slices=whole_slices.joined(slices),
    )
    return joined._take(np.argsort(joined.sub_group, kind="stable"))


def _columns(groups: Sequence[Sequence[Param]], world_size: int) -> tuple[tuple[Param, ...], Int64Array, Int64Array]:
    """All parameters in order, their elements, and the number of each one's group.

    Raises ValueError for a world size below 1 or a parameter that appears twice.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    params = tuple(param for group in groups for param in group)
    if len({param.name for param in params}) != len(params):
        names = [param.name for param in params]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"parameters in more than one place: {', '.join(twice)}")
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    numel = np.array([math.prod(param.shape) for param in params], dtype=np.int64)
    return params, numel, np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def _end_to_end(lengths: Int64Array, group: Int64Array, num_groups: int) -> tuple[Int64Array, Int64Array]:
    """Where each of the lengths begins within its group, laid end to end, and the total of each group."""
    totals = np.zeros(num_groups, dtype=np.int64)
    np.add.at(totals, group, lengths)
    return np.cumsum(lengths) - lengths - (np.cumsum(totals) - totals)[group], totals


def layout_from_sub_groups(
    sub_groups: Sequence[Sequence[Param]], world_size: int, *, num_parts: Sequence[int] | None = None
) -> Layout:
    """The per-parameter split whose sub-groups hold these parameters in this order, parts laid end to end.

    ``num_parts`` are the ranks that share each sub-group, all ranks by default; ``with_slices`` then says which.
    Raises ValueError for a world size below 1 or a parameter that appears twice.
    """
    params, numel, sub_group = _columns(sub_groups, world_size)
    part = partition_numel(numel, world_size if num_parts is None else np.array(num_parts, dtype=np.int64)[sub_group])
    offset, totals = _end_to_end(part, sub_group, len(sub_groups))
    return Layout(
        world_size=world_size,
        params=params,
        numel=numel,
        sub_group=sub_group,
        origin=np.zeros_like(numel),
        part=part,
        offset=offset,
        sub_group_numel=totals,
    )


GROUP_ALIGNMENT = 2
"""Each rank's part of a group is a multiple of so many elements: ``nccl_start_alignment_factor`` of ZeRO-1 and 2."""


def group_split_layout(
    groups: Sequence[Sequence[Param]],
    world_size: int,
    gaps: Sequence[Sequence[int]] | None = None,
    *,
    num_parts: Sequence[int] | None = None,
) -> Layout:
    """The group split of optimizer groups whose parameters are given in buffer order.

    ``gaps`` are the elements left free behind each parameter (``param_alignment_gaps``). Under
    ``round_robin_gradients`` the buffer order depends on the world size (``round_robin_order``). Parameters without
    elements are not in the layout, as they are in no sub-group. ``num_parts`` are the ranks that share each group, all
    ranks by default; ``with_slices`` then says which. Raises ValueError for a world size below 1, a parameter that
    appears twice, or gaps that do not fit.
    """
    params, numel, group = _columns(groups, world_size)
    gap = np.zeros_like(numel)
    if gaps is not None:
        if [len(members) for members in gaps] != [len(members) for members in groups]:
            raise ValueError("the gaps are not one for each parameter")
        gap = np.array([elements for members in gaps for elements in members], dtype=np.int64)
        if (gap < 0).any():
            raise ValueError("a gap is negative")
    origin, totals = _end_to_end(numel + gap, group, len(groups))
    shared_by = np.full(len(groups), world_size) if num_parts is None else np.array(num_parts, dtype=np.int64)
    parts = GROUP_ALIGNMENT * partition_numel(totals, GROUP_ALIGNMENT * shared_by)
    layout = Layout(
        world_size=world_size,
        params=params,
        numel=numel,
        sub_group=group,
        origin=origin,
        part=parts[group],
        offset=np.zeros_like(numel),
        sub_group_numel=parts,
    )
    return layout.only([param.name for param in params if param.numel > 0])


def with_slices(
    layout: Layout,
    ranks: Sequence[RankSet],
    tensors: Mapping[str, tuple[Param, Sequence[Strip]]] = MappingProxyType({}),
) -> Layout:
    """The layout of one rank with what its parameters are of whole tensors.

    ``ranks`` are those that share each buffer. ``tensors`` gives for the name of a parameter the whole tensor, under
    whose name the parameter goes from then on, and the strips of the slice; other parameters are whole.
    """
    own = [
        tensors.get(param.name, (param, (Strip(0, 0, param.numel),) if param.numel else ())) for param in layout.params
    ]
    slices = slices_of(
        [tensor for tensor, _ in own], [ranks[i] for i in layout.sub_group.tolist()], [strips for _, strips in own]
    )
    params = tuple(Param(tensor.name, param.shape) for param, (tensor, _) in zip(layout.params, own, strict=True))
    return replace(layout, params=params, slices=slices)


def round_robin_order(params: Sequence[Param], world_size: int) -> list[Param]:
    """The buffer order of a group under ``round_robin_gradients``: each ``world_size``-th parameter from 0, from 1, ...

    Mirrors ``DeepSpeedZeroOptimizer._round_robin_reorder`` (DeepSpeed 0.19.8).
    """
    return [param for first in range(min(world_size, len(params))) for param in params[first::world_size]]


def original_order(params: Sequence[Param], world_size: int) -> list[Param]:
    """The inverse of ``round_robin_order``: the order in which the optimizer group listed its parameters."""
    indices = [i for first in range(min(world_size, len(params))) for i in range(first, len(params), world_size)]
    return [param for _, param in sorted(zip(indices, params, strict=True), key=lambda pair: pair[0])]


def param_alignment_gaps(params: Sequence[Param], itemsize: int) -> list[int]:
    """The elements that ``parameter_alignment`` leaves free behind each parameter of a group, in buffer order.

    Every parameter but the first begins at a multiple of 16 bytes of the 16-bit buffer, whose elements have
    ``itemsize`` bytes; nothing is left free behind the last one.
    """
    alignment = 16 // math.gcd(16, itemsize)
    gaps: list[int] = []
    end = 0
    for position, param in enumerate(params):
        end += param.numel
        gaps.append(0 if position == len(params) - 1 else -end % alignment)
        end += gaps[-1]
    return gaps


def buffer_order(
    groups: Sequence[Sequence[Param]],
    num_parts: Sequence[int],
    *,
    round_robin: bool = False,
    itemsizes: Sequence[int] | None = None,
) -> tuple[list[list[Param]], list[list[int]]]:
    """The parameters of each optimizer group in the order of its buffer, and the gaps behind them.

    ``groups`` list the parameters as the optimizer does; parameters without elements are in no buffer. ``num_parts``
    are the ranks that share each group, ``itemsizes`` the bytes of an element of its 16-bit buffer, under
    ``parameter_alignment``. Mirrors ``DeepSpeedZeroOptimizer.__init__`` of stage_1_and_2.py (DeepSpeed 0.19.8).
    """
    ordered = [[param for param in members if param.numel > 0] for members in groups]
    if round_robin:
        ordered = [round_robin_order(members, parts) for members, parts in zip(ordered, num_parts, strict=True)]
    gaps = [[0] * len(members) for members in ordered]
    if itemsizes is not None:
        gaps = [param_alignment_gaps(members, size) for members, size in zip(ordered, itemsizes, strict=True)]
    return ordered, gaps


def pack_sub_groups(
    groups: Sequence[Sequence[Param]], *, world_size: int, sub_group_size: int | None
) -> list[list[Param]]:
    """Cut optimizer groups into sub-groups as DeepSpeed does; ``sub_group_size`` counts elements of ONE rank's parts.

    Because parts shrink as the world grows, the cuts move with the world size: a checkpoint's sub-groups say nothing
    about another world size. Parameters without elements are not in any sub-group. Mirrors
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


def in_own_buffers(layout: Layout) -> Layout:
    """Give each parameter an own buffer, as long as the one that it shares with others; places stay the same.

    For a plan whose parameters lie in the layout's buffers, and are filled one by one.
    """
    return replace(
        layout,
        sub_group=np.arange(layout.num_params, dtype=np.int64),
        sub_group_numel=layout.sub_group_numel[layout.sub_group],
    )


def unpacked_layout(params: Sequence[Param], world_size: int) -> Layout:
    """The per-parameter split in which each parameter has an own flat buffer, as frozen parameters are kept."""
    return layout_from_sub_groups([[param] for param in params], world_size)
