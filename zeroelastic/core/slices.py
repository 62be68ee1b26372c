"""Parts of whole tensors that ranks hold under tensor and expert parallelism, and the ranks that share each part.

ZeRO cuts what a rank has of a parameter: a *slice* of a whole tensor, which other ranks may have too. A slice is one or
more *strips* of the flattened whole tensor: runs of elements at equal distances. A part of dimension 0, such as some of
the experts of a layer or the rows of a column parallel weight, is one run; the columns of a row parallel weight are one
run for each row. Strips that two slices have in common are the same strips, *copies* of each other: a replicated
parameter, or a head of keys that several ranks keep. All quantities are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from zeroelastic.core.layout import Param

Int64Array = npt.NDArray[np.int64]

MOST_STRIPS = 1 << 20
"""Strips that a whole tensor may be made of."""

_BEHIND_ALL = 1 << 62


class RankSet(NamedTuple):
    """The ranks ``first``, ``first + step``, ... that share a parameter, each with one part of it."""

    first: int
    step: int
    num_ranks: int


class Strip(NamedTuple):
    """``num_runs`` runs of ``numel`` elements.

    Run i begins at ``start + i * stride`` of the whole tensor, flattened, and at ``offset + i * step`` of the slice.
    ``stride`` and ``step`` are 0 where there is one run.
    """

    start: int
    offset: int
    numel: int
    num_runs: int = 1
    stride: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Strips:
    """Strips in columns of shape ``(num_strips,)``; ``param`` is the number of the slice's parameter, ascending."""

    param: Int64Array
    start: Int64Array
    offset: Int64Array
    numel: Int64Array
    num_runs: Int64Array
    stride: Int64Array
    step: Int64Array

    def take(self, index: Int64Array) -> Strips:
        """Some of the strips, in the order given."""
        return Strips(*(getattr(self, field.name)[index] for field in fields(Strips)))

    def __len__(self) -> int:
        return len(self.param)


@dataclass(frozen=True, slots=True)
class Slices:
    """The parts of whole tensors that the parameters of a layout are, and the ranks that share them.

    ``tensors[i]`` is the whole tensor, of the same name, that parameter i is a slice of; several parameters may be
    slices of one. ``first_rank``, ``rank_step`` and ``num_parts``, of shape ``(num_params,)``, are its ``RankSet``.

    Invariant (``check_slices``): the strips of a parameter make it up, and over all parameters two strips of one tensor
    are the same or have no element in common.
    """

    tensors: tuple[Param, ...]
    first_rank: Int64Array
    rank_step: Int64Array
    num_parts: Int64Array
    strips: Strips

    @property
    def whole_tensors(self) -> tuple[Param, ...]:
        """Each whole tensor once."""
        return tuple({tensor.name: tensor for tensor in self.tensors}.values())

    @property
    def params_of_strips(self) -> Int64Array:
        """The number of each strip's parameter."""
        return self.strips.param

    def strip(self, number: int) -> tuple[int, int]:
        """The parameter of a strip, and where the strip begins in the whole tensor."""
        return int(self.strips.param[number]), int(self.strips.start[number])

    def shared_numel(self, rank: int, numel: Int64Array) -> Int64Array:
        """These elements of each parameter; 0 where the rank is not among those that share it."""
        return np.where(self.has(rank), numel, 0)

    def part_number(self, rank: int) -> Int64Array:
        """Which part of each parameter a rank has, ``num_parts`` where it has none: shape ``(num_params,)``."""
        number, rest = np.divmod(rank - self.first_rank, self.rank_step)
        is_there = (rest == 0) & (number >= 0) & (number < self.num_parts)
        return np.where(is_there, number, self.num_parts)

    def has(self, rank: int) -> npt.NDArray[np.bool_]:
        """Whether a rank is among those that share each parameter: shape ``(num_params,)``."""
        there: npt.NDArray[np.bool_] = self.part_number(rank) < self.num_parts
        return there

    def rank_of(self, param: Int64Array, number: Int64Array) -> Int64Array:
        """The rank that has a part of a parameter, of each pair of these."""
        rank: Int64Array = self.first_rank[param] + number * self.rank_step[param]
        return rank

    def take(self, keep: Int64Array) -> Slices:
        """The slices of some parameters, in the order given."""
        number = np.full(len(self.tensors), -1, dtype=np.int64)
        number[keep] = np.arange(len(keep))
        found = np.flatnonzero(number[self.strips.param] >= 0)
        strips = self.strips.take(found[np.argsort(number[self.strips.param[found]], kind="stable")])
        return Slices(
            tuple(self.tensors[i] for i in keep.tolist()),
            self.first_rank[keep],
            self.rank_step[keep],
            self.num_parts[keep],
            replace(strips, param=number[strips.param]),
        )


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """What ``Slices`` says of parameters, for those that are whole tensors, each of one strip, shared by all ranks."""

    tensors: tuple[Param, ...]
    world_size: int

    @property
    def whole_tensors(self) -> tuple[Param, ...]:
        return self.tensors

    @property
    def num_parts(self) -> Int64Array:
        return np.full(len(self.tensors), self.world_size)

    @property
    def params_of_strips(self) -> Int64Array:
        return np.arange(len(self.tensors))

    def strip(self, number: int) -> tuple[int, int]:
        return number, 0

    def shared_numel(self, rank: int, numel: Int64Array) -> Int64Array:
        return numel

    def part_number(self, rank: int) -> int:
        return rank

    def has(self, rank: int) -> npt.NDArray[np.bool_]:
        return np.ones(len(self.tensors), dtype=np.bool_)

    def rank_of(self, param: Int64Array, number: Int64Array) -> Int64Array:
        return number


def slices_of(tensors: Sequence[Param], ranks: Sequence[RankSet], strips: Sequence[Sequence[Strip]]) -> Slices:
    """The slices of some parameters: the whole tensor, the ranks and the strips of each."""
    rows = [(param, *strip) for param, own in enumerate(strips) for strip in own]
    first, step, count = np.array(ranks, dtype=np.int64).reshape(-1, 3).T
    return Slices(tuple(tensors), first, step, count, Strips(*np.array(rows, dtype=np.int64).reshape(-1, 7).T))


def whole(tensors: Sequence[Param], world_size: int) -> Slices:
    """Parameters that are whole tensors, each shared by all ranks."""
    count = len(tensors)
    zero, one = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    numel = np.array([tensor.numel for tensor in tensors], dtype=np.int64)
    strips = Strips(np.arange(count, dtype=np.int64), zero, zero, numel, one, zero, zero).take(np.flatnonzero(numel))
    return Slices(tuple(tensors), zero, one, np.full(count, world_size, dtype=np.int64), strips)


def joined(parts: Sequence[Slices]) -> Slices:
    """The slices of all of these, one after the other."""
    base = np.cumsum([0, *(len(part.tensors) for part in parts)])
    strips = [replace(part.strips, param=part.strips.param + base[i]) for i, part in enumerate(parts)]
    return Slices(
        tuple(tensor for part in parts for tensor in part.tensors),
        np.concatenate([part.first_rank for part in parts]),
        np.concatenate([part.rank_step for part in parts]),
        np.concatenate([part.num_parts for part in parts]),
        Strips(*(np.concatenate([getattr(part, field.name) for part in strips]) for field in fields(Strips))),
    )


def strips_of_box(whole_shape: Sequence[int], box: Sequence[tuple[int, int]]) -> tuple[Strip, ...]:
    """The strips of a box of a tensor that is a slice by itself; ``box`` is (begin, size) for each dimension.

    Example::

        strips_of_box((32, 64), [(0, 32), (32, 32)])    # the second half of each of 32 rows
    """
    sizes, strides = [size for _, size in box], row_major_strides(whole_shape)
    start = sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    return strips_of_view(sizes, start, strides, 0, row_major_strides(sizes))


def strips_of_view(
    shape: Sequence[int], start: int, strides: Sequence[int], offset: int, steps: Sequence[int]
) -> tuple[Strip, ...]:
    """The strips of a block of elements that is a view of the whole tensor and of the slice.

    ``start`` and ``strides`` are the arguments of ``torch.as_strided`` for the one, ``offset`` and ``steps`` for the
    other: a piece of DeepSpeed's affine maps (deepspeed.checkpoint.affine, 0.19.8). Raises ValueError for a block that
    is no strips of runs, or of more than ``MOST_STRIPS``.
    """
    if 0 in shape:
        return ()
    dims = [(size, stride, step) for size, stride, step in zip(shape, strides, steps, strict=True) if size > 1]
    numel, count, stride, step = 1, 1, 0, 0
    while dims and dims[-1][1] == numel and dims[-1][2] == numel:
        numel *= dims.pop()[0]
    if dims:
        count, stride, step = dims.pop()
        while dims and dims[-1][1:] == (stride * count, step * count):
            count *= dims.pop()[0]
    if stride < numel * (count > 1) or step < numel * (count > 1):
        raise ValueError(f"a block of shape {tuple(shape)} with strides {tuple(strides)} is not made of runs")
    places = [(start, offset)]
    for size, far, local in dims:
        if len(places) * size > MOST_STRIPS:
            raise ValueError(f"a block of shape {tuple(shape)} is in more than {MOST_STRIPS} strips")
        places = [(at + i * far, on + i * local) for at, on in places for i in range(size)]
    return tuple(Strip(at, on, numel, count, stride, step) for at, on in places)


def numbered(first: Int64Array, count: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For each i, the numbers from ``first[i]`` on, ``count[i]`` of them: the positions i, and the numbers."""
    position = np.repeat(np.arange(len(first)), count)
    return position, first[position] + np.arange(len(position)) - np.repeat(np.cumsum(count) - count, count)


def row_major_strides(shape: Sequence[int]) -> list[int]:
    """The distance of neighbours in each dimension of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def tensor_numbers(slices: Slices) -> Int64Array:
    """A number for the whole tensor of each parameter: that of the last parameter that is a slice of it."""
    number = {tensor.name: i for i, tensor in enumerate(slices.tensors)}
    return np.array([number[tensor.name] for tensor in slices.tensors], dtype=np.int64)


def strip_keys(slices: Slices) -> Int64Array:
    """The columns in which strips agree that are copies: shape ``(5, num_strips)``, ``tensor_numbers`` last."""
    strips = slices.strips
    tensor = tensor_numbers(slices)[strips.param]
    return np.stack((strips.stride, strips.num_runs, strips.numel, strips.start, tensor))


def copies_together(key: Int64Array, *among: npt.NDArray[np.generic]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The strips of ``strip_keys`` in an order in which copies follow each other, sorted by ``among``, the last first.

    With the places in that order where other copies begin, and how many they are.
    """
    order = np.lexsort((*among, *key))
    begins = np.append(True, (key[:, order[1:]] != key[:, order[:-1]]).any(0))[: len(order)]
    first = np.flatnonzero(begins)
    return order, first, np.diff(np.append(first, len(order)))


def first_copies(slices: Slices) -> Int64Array:
    """For each strip the first one that is the same of the same tensor, itself where there is none before it."""
    order, first, count = copies_together(strip_keys(slices))
    found = np.empty_like(order)
    found[order] = np.repeat(order[first], count)
    return found


def strips_of_runs(slices: Slices, param: Int64Array, start: Int64Array) -> Int64Array:
    """The strip that each run is of: one that begins at ``start`` of the whole tensor, in parameter ``param``.

    Parameters that are one strip need no search; the strips of the others are tried one after the other.
    """
    strips = slices.strips
    first = np.searchsorted(strips.param, param, side="left")
    count = np.searchsorted(strips.param, param, side="right") - first
    found: Int64Array = first.copy()
    left = np.flatnonzero(count > 1)
    for number in range(int(count.max(initial=0))):
        strip = first[left] + number
        before = start[left] - strips.start[strip]
        far = np.maximum(strips.stride[strip], 1)
        run = np.where(strips.num_runs[strip] > 1, before // far, 0)
        within = before - run * strips.stride[strip]
        inside = (run >= 0) & (run < strips.num_runs[strip]) & (within >= 0) & (within < strips.numel[strip])
        found[left[inside]] = strip[inside]
        left = left[~inside & (number + 1 < count[left])]
    return found


def places_in_slices(slices: Slices, strip: Int64Array, start: Int64Array) -> Int64Array:
    """Where slices have the elements at ``start`` of whole tensors, each of which is in one of these strips."""
    strips = slices.strips.take(strip)
    far: Int64Array = np.where(strips.num_runs > 1, strips.stride, _BEHIND_ALL)
    before: Int64Array = start - strips.start
    run: Int64Array = np.floor_divide(before, far)
    place: Int64Array = strips.offset + before - run * (far - strips.step)
    return place
