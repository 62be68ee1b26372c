"""How many elements an assignment of ranks moves, and how many every one moves at least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zeroelastic.core.layout import Layout
from zeroelastic.core.movement import Recut, _axes, _checked, _in_common, _kinds, _most_kept


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

    It is the minimum where all parameters lie on one axis. Elsewhere it is the larger of two bounds: each axis gets an
    assignment of its own, or each rank what it has most in common with on all of them. In the group split, the
    parameters of an optimizer group have one axis, unless their order or the gaps between them differ in the two
    layouts. Raises as ``assign_ranks`` and ``moved_elements``.
    """
    staying = _checked(old.world_size, new.world_size, survivors)
    by_axis = sum(count * _most_kept(pieces, staying)[0] for pieces, count in _axes(old, new))
    pieces = _in_common([Recut(old, new)])
    stays = np.isin(pieces.old_rank, list(staying))
    by_rank = []
    for rank, size in ((pieces.old_rank, old.world_size), (pieces.new_rank, new.world_size)):
        most = np.zeros(size, dtype=np.int64)
        np.maximum.at(most, rank[stays], pieces.numel[stays])
        by_rank.append(int(most.sum()))
    return int(new.numel.sum()) - min(by_axis, *by_rank)
