"""Which rank each process gets when a job changes size, so that as few elements as possible move.

ZeRO cuts an axis into equal parts, one for each rank. At another world size the parts begin elsewhere, and a process
keeps what its old part and its new one have in common. Both families of layouts (``core.layout``) cut at nearly the
same fractions of their axes, so one assignment serves all parameters: the ranks of N and M processes overlap where
``[i/N, (i+1)/N)`` and ``[j/M, (j+1)/M)`` do.

Walking along the axis, each piece between two cuts belongs to one old and one new rank, and the next piece shares at
least one of the two with it. An assignment takes pieces of which no two share a rank. So the best one is found by one
walk over the pieces, ``N + M - 1`` of them, which remembers which ranks of the current piece are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import match_params

_OLD, _NEW = 1, 2
"""Bits of a state of the walk: the old rank of the current piece is taken, its new rank is."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of an axis between two cuts, in order, as arrays of shape ``(num_pieces,)``.

    ``numel`` is how many elements of parameters are in each; an axis may have gaps.
    """

    old_rank: Int64Array
    new_rank: Int64Array
    numel: Int64Array


def assign_ranks(old_world_size: int, new_world_size: int, survivors: Sequence[int]) -> dict[int, int]:
    """The new rank of each process that stays, by its old rank: of all assignments, one that moves least.

    A process whose old part overlaps none of the parts that are left gets one of the remaining ranks. The result is the
    same on every process, whatever the order of ``survivors``; those that keep something keep their order. If all stay
    and the size does too, nobody's rank changes. Takes O(old + new world size). Raises ValueError for survivors that
    were not in the old world, come twice, or are more than the new world has ranks.

        assign_ranks(4, 3, [0, 1, 3])    # {0: 0, 1: 1, 3: 2}
    """
    staying = _checked(old_world_size, new_world_size, survivors)
    end = np.array([old_world_size * new_world_size])
    pieces = _pieces(np.zeros_like(end), end, new_world_size, old_world_size)  # parts, in units of 1 / (N M)
    kept = _most_kept(pieces, staying)[1]
    places = sorted(set(range(new_world_size)) - set(kept.values()))
    others = sorted(staying - kept.keys())
    return dict(sorted({**kept, **dict(zip(others, places, strict=False))}.items()))


def moved_elements(old: Layout, new: Layout, new_rank_of: Mapping[int, int]) -> int:
    """How many elements the processes of the new world do not hold already: of the weights, and of each state.

    ``new_rank_of`` is as ``assign_ranks`` returns it. The layouts hold the same parameters, or ValueError is raised.
    Takes time of O(survivors) for each kind of parameter, and memory of O(survivors + parameters).
    """
    before = np.fromiter(new_rank_of.keys(), dtype=np.int64, count=len(new_rank_of))
    after = np.fromiter(new_rank_of.values(), dtype=np.int64, count=len(new_rank_of))
    kept = 0
    for (numel, old_part, new_part, old_origin, new_origin), count in _kinds(old, new):
        begin = np.maximum(before * old_part - old_origin, after * new_part - new_origin)
        end = np.minimum((before + 1) * old_part - old_origin, (after + 1) * new_part - new_origin)
        kept += count * int((np.minimum(end, numel) - np.maximum(begin, 0)).clip(min=0).sum())
    return int(new.numel.sum()) - kept


def least_moved(old: Layout, new: Layout, survivors: Sequence[int]) -> int:
    """A number of elements that every assignment of ranks moves: of the weights, and of each state.

    It is the minimum where all parameters lie on one axis. Elsewhere each axis gets an assignment of its own, which
    moves less than one for all does. In the group split, the parameters of an optimizer group have one axis, unless
    their order or the gaps between them differ in the two layouts. Raises as ``assign_ranks`` and ``moved_elements``.
    """
    staying = _checked(old.world_size, new.world_size, survivors)
    order = match_params(old, new)
    kept = 0
    if np.array_equal(old.origin[order], new.origin) and not (old.offset.any() or new.offset.any()):
        for group in np.unique(new.sub_group):
            members = np.flatnonzero((new.sub_group == group) & (new.numel > 0))
            members = members[np.argsort(new.origin[members])]
            if len(members):
                begin, parts = new.origin[members], (int(old.part[order[members[0]]]), int(new.part[members[0]]))
                kept += _most_kept(_pieces(begin, begin + new.numel[members], *parts), staying)[0]
    else:
        for (numel, old_part, new_part, old_origin, new_origin), count in _kinds(old, new):
            begin = np.array([old_origin])
            pieces = _pieces(begin, begin + numel, old_part, new_part, shift=new_origin - old_origin)
            kept += count * _most_kept(pieces, staying)[0]
    return int(new.numel.sum()) - kept


def _checked(old_world_size: int, new_world_size: int, survivors: Sequence[int]) -> frozenset[int]:
    staying = frozenset(survivors)
    if len(staying) != len(survivors):
        raise ValueError("a process cannot stay twice: a survivor is listed more than once.")
    if len(staying) > new_world_size:
        raise ValueError(f"{len(staying)} processes cannot stay in a world of {new_world_size}.")
    outside = sorted(rank for rank in staying if not 0 <= rank < old_world_size)
    if outside:
        raise ValueError(f"rank {outside[0]} was not in a world of {old_world_size}, so it cannot stay.")
    return staying


def _kinds(old: Layout, new: Layout) -> Iterator[tuple[list[int], int]]:
    """Elements, both parts and both origins of a parameter, and how many parameters have these; none without elements.

    A model has few kinds in the per-parameter split, where origins are 0.
    """
    order = match_params(old, new)
    columns = np.stack((new.numel, old.part[order], new.part, old.origin[order], new.origin))[:, new.numel > 0]
    kinds, counts = np.unique(columns, axis=1, return_counts=True)
    yield from zip(kinds.T.tolist(), counts.tolist(), strict=True)


def _pieces(begin: Int64Array, end: Int64Array, old_part: int, new_part: int, *, shift: int = 0) -> _Pieces:
    """Cut an axis on which parameters lie from ``begin`` to ``end``, in order, as both worlds do.

    A place ``x`` of the old axis is ``x + shift`` on the new one.
    """
    first, last = int(begin[0]), int(end[-1])
    old_cuts = old_part * np.arange(first // old_part + 1, -(-last // old_part))
    new_cuts = new_part * np.arange((first + shift) // new_part + 1, -(-(last + shift) // new_part)) - shift
    cuts = np.unique(np.concatenate(([first, last], old_cuts, new_cuts)))
    run = np.searchsorted(begin, cuts, side="right") - 1
    before = np.cumsum(end - begin) - (end - begin)
    filled = before[run] + np.minimum(cuts, end[run]) - begin[run]
    return _Pieces(cuts[:-1] // old_part, (cuts[:-1] + shift) // new_part, np.diff(filled))


def _most_kept(pieces: _Pieces, staying: Collection[int]) -> tuple[int, dict[int, int]]:
    """The most elements that processes can keep on one axis, and the new rank of each that keeps some, by its old one.

    ``best[state]`` is the most that is kept of the pieces so far, if the walk is in that state; -1 if it cannot be.
    """
    best, trail = [0, -1, -1, -1], []
    last_old = last_new = -1
    rows = list(zip(pieces.old_rank.tolist(), pieces.new_rank.tolist(), pieces.numel.tolist(), strict=True))
    for old, new, numel in rows:
        shared = _OLD * (old == last_old) | _NEW * (new == last_new)
        entered, origin = [-1, -1, -1, -1], [0, 0, 0, 0]
        for state, kept in enumerate(best):
            if kept > entered[state & shared]:
                entered[state & shared], origin[state & shared] = kept, state
        taken = numel > 0 and old in staying and entered[0] >= 0 and entered[0] + numel > entered[_OLD | _NEW]
        if taken:
            entered[_OLD | _NEW], origin[_OLD | _NEW] = entered[0] + numel, origin[0]
        trail.append((origin, taken))
        best, last_old, last_new = entered, old, new
    state = best.index(max(best))
    most, kept_by = best[state], {}
    for (old, new, _), (origin, taken) in zip(reversed(rows), reversed(trail), strict=True):
        if taken and state == _OLD | _NEW:
            kept_by[old] = new
        state = origin[state]
    return most, kept_by
