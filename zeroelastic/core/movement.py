"""Which rank each process gets when a job changes size, so that as few elements as possible move.

ZeRO cuts an axis into equal parts, one for each rank. At another world size the parts begin elsewhere, and a process
keeps what its old part and its new one have in common. Both families of layouts (``core.layout``) cut at nearly the
same fractions of their axes, so one assignment serves all parameters: the ranks of N and M processes overlap where
``[i/N, (i+1)/N)`` and ``[j/M, (j+1)/M)`` do.

Between two cuts of an axis is a piece, which one old and one new rank have in common. An assignment keeps pieces of
which no two have a rank in common. On one axis these are in ascending order of both ranks, so the best assignment is
the heaviest ascending chain of pieces. ZeRO-3 cuts each parameter by itself and rounds each part up, so with thousands
of ranks its axes differ: where the layouts are known, what two ranks have in common is added up over all axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import match_params

_MOST_KINDS = 64
"""How many kinds of parameters an assignment counts: at 16,384 ranks each takes milliseconds."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What pairs of an old and a new rank have in common, as arrays of shape ``(num_pieces,)``.

    ``numel`` is how many elements of parameters are in a piece, an axis may have gaps; where axes are added up, how
    many bytes.
    """

    old_rank: Int64Array
    new_rank: Int64Array
    numel: Int64Array


@dataclass(frozen=True, slots=True)
class Recut:
    """Parameters at the old and at the new world size, and how many bytes of state an element of them has."""

    old: Layout
    new: Layout
    element_bytes: int = 1


def assign_ranks(
    old_world_size: int, new_world_size: int, survivors: Sequence[int], recuts: Sequence[Recut] = ()
) -> dict[int, int]:
    """The new rank of each process that stays, by its old rank: so that as few bytes as possible move.

    ``recuts`` are the layouts of all that moves; without them every rank counts as having an equal part of one axis. Of
    all assignments that keep the order of the survivors it is one that moves least; on one axis no other moves less, on
    several another order may. Of very many kinds of parameters the largest are counted.

    A process whose old part overlaps none of the parts that are left gets one of the remaining ranks. The result is the
    same on every process, whatever the order of ``survivors``; those that keep something keep their order. If all stay
    and the size does too, nobody's rank changes. Raises ValueError for survivors that were not in the old world, come
    twice, or are more than the new world has ranks, and for layouts of other world sizes.

        assign_ranks(4, 3, [0, 1, 3])    # {0: 0, 1: 1, 3: 2}
    """
    staying = _checked(old_world_size, new_world_size, survivors)
    for recut in recuts:
        if (recut.old.world_size, recut.new.world_size) != (old_world_size, new_world_size):
            raise ValueError(
                f"a layout goes from {recut.old.world_size} to {recut.new.world_size} ranks, the job from "
                f"{old_world_size} to {new_world_size}."
            )
    pieces = _in_common(recuts, most=_MOST_KINDS)
    if not len(pieces.numel):
        end = np.array([old_world_size * new_world_size])  # in units in which parts of both worlds are whole numbers
        pieces = _pieces(np.zeros_like(end), end, new_world_size, old_world_size)
    return _with_the_rest(_most_kept(pieces, staying)[1], staying, new_world_size)


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


def _kinds(old: Layout, new: Layout) -> list[tuple[list[int], int]]:
    """Elements, both parts and both origins of a parameter, and how many parameters have these; none without elements.

    Those with the most elements come first. A model has few kinds in the per-parameter split, where origins are 0.
    """
    order = match_params(old, new)
    columns = np.stack((new.numel, old.part[order], new.part, old.origin[order], new.origin))[:, new.numel > 0]
    columns = columns[:, np.lexsort(columns)]
    first = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(0)))[: columns.shape[1]]
    counts = np.diff(np.append(first, columns.shape[1]))
    kinds = columns[:, first]
    largest = np.argsort(-kinds[0] * counts, kind="stable")
    return list(zip(kinds[:, largest].T.tolist(), counts[largest].tolist(), strict=True))


def _axes(old: Layout, new: Layout, *, most: int | None = None) -> Iterator[tuple[_Pieces, int]]:
    """The pieces of each axis, and how many axes are cut alike; of ``most`` kinds, where parameters have many."""
    order = match_params(old, new)
    shared = new.origin.any() and np.array_equal(old.origin[order], new.origin)
    if shared and not (old.offset.any() or new.offset.any()):
        for group in np.unique(new.sub_group):
            members = np.flatnonzero((new.sub_group == group) & (new.numel > 0))
            members = members[np.argsort(new.origin[members])]
            if len(members):
                begin, parts = new.origin[members], (int(old.part[order[members[0]]]), int(new.part[members[0]]))
                yield _pieces(begin, begin + new.numel[members], *parts), 1
        return
    for (numel, old_part, new_part, old_origin, new_origin), count in _kinds(old, new)[:most]:
        begin = np.array([old_origin])
        yield _pieces(begin, begin + numel, old_part, new_part, shift=new_origin - old_origin), count


def _in_common(recuts: Sequence[Recut], *, most: int | None = None) -> _Pieces:
    """What each pair of ranks has in common on all axes together, in bytes; of ``most`` kinds of each layout."""
    none = np.empty(0, dtype=np.int64)
    old_ranks, new_ranks, sizes = [none], [none], [none]
    for recut in recuts:
        for pieces, count in _axes(recut.old, recut.new, most=most):
            old_ranks.append(pieces.old_rank)
            new_ranks.append(pieces.new_rank)
            sizes.append(pieces.numel * (count * recut.element_bytes))
    old_rank, new_rank = np.concatenate(old_ranks), np.concatenate(new_ranks)
    num_new = int(new_rank.max(initial=0)) + 1
    pairs, which = np.unique(old_rank * num_new + new_rank, return_inverse=True)
    nbytes = np.zeros_like(pairs)
    np.add.at(nbytes, which.reshape(-1), np.concatenate(sizes))
    return _Pieces(pairs // num_new, pairs % num_new, nbytes)


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
