"""The two figures of a page: who holds what (``inspect``), and what moves (``plan``). Each is rows of rectangles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.errors import buffer_kind
from zeroelastic.verbs.inspect.report import InspectReport
from zeroelastic.verbs.plan import PlanReport

_MOST_RANKS = 16  # with a row in the figure of who holds what
_LEAST_SHARE = 1 / 200  # of a row: neighbours are put together until they are that wide
_MOST_CELLS = 48  # in a row or column of what moves
_MOST_NUMBERS = 8  # up to so many rows and columns each cell has its number


class Mark(NamedTuple):
    """A rectangle from ``x`` on, both in percent of the width; ``opacity`` from 0 to 1; ``tip`` says what it is."""

    x: float
    width: float
    opacity: float
    tip: str
    text: str = ""


class Figure(NamedTuple):
    """Rows of rectangles, each row with a label. ``axis`` are labels below, at percentages of the width."""

    title: str
    rows: tuple[tuple[str, tuple[Mark, ...]], ...]
    axis: tuple[tuple[float, str], ...]
    note: str


def who_holds_what(found: InspectReport) -> Figure | None:
    """Return the trained parameters in the buffers of each rank, in the order of the buffers; None where unknown."""
    layout, world_size = found.layout, found.world_size or 0
    known = [one for one in found.params if one.sub_group is not None and one.offset is not None]
    if layout is None or not known:
        return None
    sizes = layout.sub_group_numel
    bases, end = np.cumsum([0, *sizes]).tolist(), sum(sizes) or 1
    ranks = sorted({*range(0, world_size, -(-world_size // _MOST_RANKS)), world_size - 1})
    rows = []
    for rank in ranks:
        held: list[tuple[int, int, str]] = []  # begin, elements, name
        for one in known:
            group, offset, numel = one.sub_group or 0, one.offset or 0, one.numel
            if layout.split == "param":
                part = -(-numel // world_size)
                begin, count = offset, min(part, max(numel - rank * part, 0))
            else:
                size = sizes[group]
                begin = max(offset, rank * size)
                begin, count = begin - rank * size, min(offset + numel, (rank + 1) * size) - begin
            if count > 0:
                held.append((bases[group] + begin, count, one.name))
        rows.append((f"rank {rank:,}", _joined(sorted(held), rank, end)))
    few = f" {len(ranks)} of {world_size:,} ranks are drawn." if len(ranks) < world_size else ""
    buffers = f"{buffer_kind(3 if layout.split == 'param' else 2)}s"
    note = f"A row is {end:,} elements: the {buffers} of a rank end to end. What is empty is padding.{few}"
    return Figure("Who holds what", tuple(rows), ((0.0, "0"), (100.0, f"{end:,} elements")), note)


def _joined(held: list[tuple[int, int, str]], rank: int, end: int) -> tuple[Mark, ...]:
    """Return the marks of a rank; parameters that are too small to be seen alone are put together."""
    groups: list[list[tuple[int, int, str]]] = []
    for piece in held:
        if groups and sum(count for _, count, _ in groups[-1]) < end * _LEAST_SHARE:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    marks = []
    for number, group in enumerate(groups):
        first, last = group[0], group[-1]
        what = first[2] if len(group) == 1 else f"{len(group):,} parameters from {first[2]} to {last[2]}"
        numel = sum(count for _, count, _ in group)
        tip = f"rank {rank:,}: {what}, {numel:,} elements"
        width = 100 * (last[0] + last[1] - first[0]) / end
        marks.append(Mark(100 * first[0] / end, width, 0.6 if number % 2 else 0.35, tip))
    return tuple(marks)


def what_moves(plan: PlanReport) -> Figure:
    """Return the bytes that each target rank reads from each saved rank's files: a row per saved rank."""
    sources, targets = plan.world_size, plan.target_world_size
    down, across = -(-sources // _MOST_CELLS), -(-targets // _MOST_CELLS)
    amounts = np.zeros((-(-sources // down), -(-targets // across)), dtype=np.int64)
    for rank in plan.ranks:
        for source in rank.sources:
            amounts[source.rank // down, rank.rank // across] += source.bytes
    most, width = int(amounts.max(initial=1)) or 1, 100 / amounts.shape[1]
    rows = []
    for row, line in enumerate(amounts.tolist()):
        label = _span(row, down, sources)
        marks = [
            Mark(
                column * width,
                width,
                0.05 + 0.6 * nbytes / most if nbytes else 0.0,
                f"from rank {label} to rank {_span(column, across, targets)}: {format_size(nbytes)}",
                format_size(nbytes) if nbytes and max(amounts.shape) <= _MOST_NUMBERS else "",
            )
            for column, nbytes in enumerate(line)
        ]
        rows.append((f"from {label}", tuple(marks)))
    every = -(-amounts.shape[1] // 8)
    axis = [((i + 0.5) * width, f"to {_span(i, across, targets)}") for i in range(0, amounts.shape[1], every)]
    note = f"Saved ranks are rows, target ranks columns. The darkest cell is {format_size(most)}."
    return Figure("What moves", tuple(rows), tuple(axis), note)


def _span(number: int, step: int, count: int) -> str:
    """Return the ranks that a cell stands for."""
    first, last = number * step, min((number + 1) * step, count) - 1
    return f"{first:,}" if first == last else f"{first:,}\N{EN DASH}{last:,}"
