"""Which parameters lie where in the buffers of each rank, as a drawing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from zeroelastic.cli.documents.checkpoints import InspectedParam, SavedLayout
from zeroelastic.cli.html.figures.plot import key
from zeroelastic.cli.html.figures.scale import Bins, number_ticks
from zeroelastic.cli.html.figures.strips import DAMAGE, Piece, Strip, draw_strips
from zeroelastic.cli.html.page import Figure
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import counted

_MOST_RANKS = 24
_MOST_PIECES = 120  # in a strip: neighbouring parameters that are smaller than this share are put together
_MOST_SUB_GROUPS = 40  # more are not told apart


def draw_layout(
    layout: SavedLayout,
    params: Sequence[InspectedParam],
    world_size: int,
    *,
    missing: Collection[int],
    marked: Collection[int],
) -> Figure:
    """The picture: a strip for each rank; those in ``missing`` have no optimizer file, the ``marked`` lack some."""
    placed = [param for param in params if param.sub_group is not None and param.offset is not None]
    columns = np.array([(param.numel, param.sub_group, param.offset) for param in placed], dtype=np.int64)
    columns = columns.reshape(-1, 3)
    order = np.lexsort((columns[:, 2], columns[:, 1]))
    names = [placed[i].name for i in order.tolist()]
    numel, sub_group, offset = columns[order].T
    sizes = np.array(layout.sub_group_numel, dtype=np.int64)
    bases = np.cumsum(sizes) - sizes
    end = int(sizes.sum())
    by_rank = Bins.at_most(world_size, _MOST_RANKS)
    shown = sorted({*range(0, world_size, by_rank.step), world_size - 1, *sorted(marked)[: _MOST_RANKS // 2]})
    strips = []
    for rank in shown:
        if rank in missing:
            piece = Piece(0, end, DAMAGE, f"rank {rank:,}: its optimizer file is missing")
            strips.append(Strip(f"rank {rank:,}", (piece,), bad=True))
            continue
        begin, length = _owned(layout.split, numel, sub_group, offset, sizes, rank, world_size)
        pieces = _padding(rank, sub_group, length, sizes, bases)
        pieces += _pieces(rank, names, sub_group, bases[sub_group] + begin, length, end, len(sizes))
        strips.append(Strip(f"rank {rank:,}", tuple(pieces), bad=rank in marked))
    notes = [
        f"All sub-groups of a rank end to end, {end:,} elements; a colour changes where a parameter ends, and its hue "
        "from sub-group to sub-group. Frozen parameters are not in it."
    ]
    if len(shown) < world_size:
        notes.append(f"{len(shown)} of {world_size:,} ranks are drawn.")
    if marked:
        notes.append("A rank with a sign lacks files, which are listed below.")
    if len(names) > _MOST_PIECES:
        notes.append("Neighbouring small parameters are put together.")
    entries = [("part-a", "parameters")]
    entries += [("part-c", "of every second sub-group")] if len(sizes) > 1 else []
    entries += [("padding", "padding")]
    entries += [(DAMAGE, "missing")] if missing else []
    return draw_strips(
        "The flat buffers of each rank, and the parameters in them",
        strips,
        end=end,
        ticks=number_ticks(end),
        title="elements",
        legend=key(*entries),
        notes=tuple(notes),
    )


def _owned(
    split: str,
    numel: Int64Array,
    sub_group: Int64Array,
    offset: Int64Array,
    sizes: Int64Array,
    rank: int,
    world_size: int,
) -> tuple[Int64Array, Int64Array]:
    """Where a rank's buffers have its part of each parameter, and how many elements that is."""
    if split == "param":
        part = -(-numel // world_size)
        return offset, np.clip(numel - part * rank, 0, part)
    first = sizes[sub_group] * rank
    begin = np.clip(offset - first, 0, sizes[sub_group])
    return begin, np.clip(offset + numel - first, 0, sizes[sub_group]) - begin


def _padding(rank: int, sub_group: Int64Array, length: Int64Array, sizes: Int64Array, bases: Int64Array) -> list[Piece]:
    """The sub-groups that are not full, as what lies beneath their parameters."""
    if len(sizes) > _MOST_SUB_GROUPS:
        sub_group, sizes, bases = np.zeros_like(sub_group), sizes.sum(keepdims=True), bases[:1]
    owned = np.bincount(sub_group, weights=length, minlength=len(sizes)).astype(np.int64)
    return [
        Piece(base, base + size, "padding", f"rank {rank:,}: {counted(size - have, 'element')} of padding")
        for base, size, have in zip(bases.tolist(), sizes.tolist(), owned.tolist(), strict=True)
        if have < size
    ]


def _pieces(
    rank: int,
    names: Sequence[str],
    sub_group: Int64Array,
    begin: Int64Array,
    length: Int64Array,
    end: int,
    num_sub_groups: int,
) -> list[Piece]:
    """The parameters of one rank, neighbours put together where they are too small to be seen alone."""
    have = np.flatnonzero(length)
    if not len(have):
        return []
    together = begin[have] * _MOST_PIECES // max(end, 1) if len(have) > _MOST_PIECES else np.arange(len(have))
    if num_sub_groups <= _MOST_SUB_GROUPS:
        together = together * num_sub_groups + sub_group[have]
    first = np.flatnonzero(np.r_[True, np.diff(together) != 0])
    last = np.r_[first[1:], len(have)] - 1
    elements = np.add.reduceat(length[have], first)
    pieces = []
    for number, (one, other, count) in enumerate(
        zip(have[first].tolist(), have[last].tolist(), elements.tolist(), strict=True)
    ):
        odd = int(sub_group[one]) % 2 if num_sub_groups <= _MOST_SUB_GROUPS else 0
        style = ("part-a", "part-b", "part-c", "part-d")[2 * odd + number % 2]
        num = int(last[number] - first[number]) + 1
        what = names[one] if num == 1 else f"{num:,} parameters from {names[one]} to {names[other]}"
        if num_sub_groups > 1:
            what = f"sub-group {int(sub_group[one]):,}, {what}"
        tip = f"rank {rank:,}, {what}: {counted(count, 'element')}"
        pieces.append(Piece(int(begin[one]), int(begin[other] + length[other]), style, tip))
    return pieces
