"""Strips of a whole tensor that several slices have, copies of each other; and the strip that a run is of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zeroelastic.core.slices import Int64Array, Slices

_BEHIND_ALL = 1 << 62


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
