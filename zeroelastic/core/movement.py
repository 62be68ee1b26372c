"""Which rank each process gets when a job changes size, so that as few elements as possible move.

ZeRO cuts an axis into equal parts, one for each rank. At another world size the parts begin elsewhere, and a process
keeps what its old part and its new one have in common. Both families of layouts (``core.layout``) cut at nearly the
same fractions of their axes, so one assignment serves all parameters: the ranks of N and M processes overlap where
``[i/N, (i+1)/N)`` and ``[j/M, (j+1)/M)`` do.

Between two cuts of an axis is a piece, which one old and one new rank have in common. An assignment keeps pieces of
which no two have a rank in common. On one axis these are in ascending order of both ranks, so the best assignment is
the heaviest ascending chain of pieces. ZeRO-3 cuts each parameter by itself and rounds each part up, so with thousands
of ranks its axes differ; ``assign_ranks_of`` takes what two ranks have in common on all of them together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import match_params


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What pairs of an old and a new rank have in common, as arrays of shape ``(num_pieces,)``.

    ``numel`` is how many elements of parameters are in a piece; an axis may have gaps.
    """

    old_rank: Int64Array
    new_rank: Int64Array
    numel: Int64Array


def assign_ranks(old_world_size: int, new_world_size: int, survivors: Sequence[int]) -> dict[int, int]:
    """The new rank of each process that stays, by its old rank: of all assignments, one that moves least.

    A process whose old part overlaps none of the parts that are left gets one of the remaining ranks. The result is the
    same on every process, whatever the order of ``survivors``; those that keep something keep their order. If all stay
    and the size does too, nobody's rank changes. Raises ValueError for survivors that were not in the old world, come
    twice, or are more than the new world has ranks.

        assign_ranks(4, 3, [0, 1, 3])    # {0: 0, 1: 1, 3: 2}
    """
    staying = _checked(old_world_size, new_world_size, survivors)
    end = np.array([old_world_size * new_world_size])
    pieces = _pieces(np.zeros_like(end), end, new_world_size, old_world_size)  # parts, in units of 1 / (N M)
    return _with_the_rest(_most_kept(pieces, staying)[1], staying, new_world_size)


def assign_ranks_of(old: Layout, new: Layout, survivors: Sequence[int]) -> dict[int, int]:
    """``assign_ranks`` between two layouts, whose parts are counted as they are rounded.

    For ZeRO-3 on thousands of ranks, where the roundings of a rank's parts add up to more than a part. Of assignments
    that keep the order of the survivors it is one that moves least; with several axes another order may move less.
    """
    staying = _checked(old.world_size, new.world_size, survivors)
    axes = list(_axes(old, new))
    if not axes:
        return assign_ranks(old.world_size, new.world_size, survivors)
    places = np.concatenate([pieces.old_rank * new.world_size + pieces.new_rank for pieces, _ in axes])
    numels = np.concatenate([pieces.numel * count for pieces, count in axes])
    pairs, which = np.unique(places, return_inverse=True)
    numel = np.zeros_like(pairs)
    np.add.at(numel, which, numels)
    pieces = _Pieces(pairs // new.world_size, pairs % new.world_size, numel)
    return _with_the_rest(_most_kept(pieces, staying)[1], staying, new.world_size)


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
    kept = sum(count * _most_kept(pieces, staying)[0] for pieces, count in _axes(old, new))
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


def _axes(old: Layout, new: Layout) -> Iterator[tuple[_Pieces, int]]:
    """The pieces of each axis, and how many axes are cut alike."""
    order = match_params(old, new)
    if np.array_equal(old.origin[order], new.origin) and not (old.offset.any() or new.offset.any()):
        for group in np.unique(new.sub_group):
            members = np.flatnonzero((new.sub_group == group) & (new.numel > 0))
            members = members[np.argsort(new.origin[members])]
            if len(members):
                begin, parts = new.origin[members], (int(old.part[order[members[0]]]), int(new.part[members[0]]))
                yield _pieces(begin, begin + new.numel[members], *parts), 1
        return
    for (numel, old_part, new_part, old_origin, new_origin), count in _kinds(old, new):
        begin = np.array([old_origin])
        yield _pieces(begin, begin + numel, old_part, new_part, shift=new_origin - old_origin), count


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
    """The elements of the heaviest ascending chain of pieces, and the new rank of each process in it, by its old one.

    ``best[n]`` is the last piece of the heaviest chain that ends at one of some new ranks below n: those of a Fenwick
    tree, so that adding a piece and asking for the best one below a rank each look at ``log2`` of the ranks.
    """
    every = zip(pieces.old_rank.tolist(), pieces.new_rank.tolist(), pieces.numel.tolist(), strict=True)
    # Pieces of one old rank in descending order of the new one: none of them follows another in a chain.
    rows = sorted((row for row in every if row[0] in staying and row[2] > 0), key=lambda row: (row[0], -row[1]))
    size = max((new for _, new, _ in rows), default=0) + 1
    best, weight, before = [-1] * (size + 1), [0] * (len(rows) + 1), [-1] * len(rows)  # weight[-1] is of no piece
    for i, (_, new, numel) in enumerate(rows):
        last, place = -1, new
        while place > 0:
            if weight[best[place]] > weight[last]:
                last = best[place]
            place &= place - 1
        weight[i], before[i] = weight[last] + numel, last
        place = new + 1
        while place <= size:
            if weight[i] > weight[best[place]]:
                best[place] = i
            place += place & -place
    last = max(range(len(rows)), key=weight.__getitem__, default=-1)
    most, kept_by = weight[last], {}
    while last >= 0:
        kept_by[rows[last][0]] = rows[last][1]
        last = before[last]
    return most, kept_by


def _with_the_rest(kept_by: Mapping[int, int], staying: frozenset[int], new_world_size: int) -> dict[int, int]:
    """The assignment in which the processes that keep nothing get the ranks that are left, in order."""
    places = sorted(set(range(new_world_size)) - set(kept_by.values()))
    others = sorted(staying - kept_by.keys())
    return dict(sorted({**kept_by, **dict(zip(others, places, strict=False))}.items()))
