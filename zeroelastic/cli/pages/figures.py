"""Figures and tables as data. ``templates/figures.html`` draws the figures as SVG that fills the width it gets.

Positions across are shares of the width, heights and places from above are pixels. Each mark has a text that the
script of the page shows when one points at it, taps it or reaches it with the arrow keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import counted

Tone = Literal["good", "bad", "note", "plain"]

DAMAGE = "damage"
"""The style of a piece that is damaged; it has a sign, too."""

DAMAGED_SOMEWHERE = "damage-all"
"""The style of a piece of which some part is damaged, or that is missing; it has a sign, too."""

_MOST_ROWS = 1000  # of a table in a page
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_NARROWEST = 0.004  # of what is damaged, as a share of the width
_MATRIX_CELLS = 48  # in a row or column
_MATRIX_NUMBERS = 8  # up to this many rows and columns, each cell has its number
_MAP_SQUARES, _MAP_COLUMNS, _MAP_HEIGHT = 1024, 32, 18
_MOST_BARS, _MOST_COLUMNS, _COLUMN_HEIGHT = 12, 96, 120


class Cell(NamedTuple):
    """A cell of a table with a tone."""

    text: str
    tone: Tone | None


class Table(NamedTuple):
    """The first ``rows`` of ``total``. Each column has a title and a style: "" for text, "right", or "name"."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    total: int


def table(columns: Mapping[str, str], rows: Sequence[tuple[object, ...]], *, total: int = 0) -> Table | None:
    """A table of at most 1000 of these rows, without the columns in which nothing is; None without rows.

    A cell is a ``Cell``, text, an integer, or a bool, which is written as "yes" or "no"; nothing is written for None.
    """
    shown = [[_cell(value) for value in row] for row in rows[:_MOST_ROWS]]
    kept = [i for i in range(len(columns)) if any(row[i] for row in shown)]
    titles = list(columns.items())
    made = tuple(tuple(row[i] for i in kept) for row in shown)
    return Table(tuple(titles[i] for i in kept), made, max(total, len(rows))) if rows else None


def _cell(value: object) -> str | Cell:
    if isinstance(value, (str, Cell)):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    assert value is None or isinstance(value, int)
    return "" if value is None else f"{value:,}"


class Tick(NamedTuple):
    """A label at a place of an axis: 0 is its beginning and 1 its end."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Bins:
    """``count`` things in bins of ``step`` each, of which the last may have fewer."""

    count: int
    step: int

    @classmethod
    def at_most(cls, count: int, most: int) -> Bins:
        """At most ``most`` bins of equal size, as small as they can be."""
        return cls(count, max(1, -(-count // most)))

    @property
    def num(self) -> int:
        """How many bins there are."""
        return -(-self.count // self.step)

    def label(self, number: int) -> str:
        """The first and the last thing of a bin: "7", or "0" to "31" with a dash."""
        first = number * self.step
        last = min(first + self.step, self.count) - 1
        return f"{first:,}" if first == last else f"{first:,}\N{EN DASH}{last:,}"

    def ticks(self, most: int) -> tuple[Tick, ...]:
        """The first thing of at most ``most`` bins, at the middle of each."""
        every = max(1, -(-self.num // most))
        return tuple(Tick((i + 0.5) / self.num, f"{i * self.step:,}") for i in range(0, self.num, every))


def round_step(most: float, count: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten of which ``count`` reach ``most``."""
    if most <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(most / count))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor * count >= most * (1 - 1e-9))


def number_ticks(most: float, count: int = 5, unit: str = "") -> tuple[Tick, ...]:
    """Round numbers from 0 to at most ``most``, which is the end of the axis."""
    step = round_step(most, count)
    numbers = [step * i for i in range(int(most / step * (1 + 1e-9)) + 1)] if most > 0 else [0.0]
    return tuple(Tick(number / most if most > 0 else 0.0, f"{number:,.10g}{unit}") for number in numbers)


def byte_ticks(most: int) -> tuple[Tick, ...]:
    """Round numbers of bytes from 0 to at most ``most``."""
    name, size = next(((name, size) for name, size in _UNITS if size <= most), _UNITS[-1])
    ticks = number_ticks(most / size, 4)
    return tuple(Tick(tick.at, tick.text if tick.text == "0" else f"{tick.text} {name}") for tick in ticks)


class Mark(NamedTuple):
    """A rectangle, ``style`` is a class of the style sheet."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tip: str
    opacity: float | None = None


class RowLabel(NamedTuple):
    """The label of a row whose middle is at ``y`` pixels. ``bad``: with a sign and in the colour of damage."""

    y: float
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of ``height`` pixels.

    ``rows`` are marks that the left and right arrow keys walk through; ``signs`` say without colour that something is
    damaged; ``numbers`` are texts above marks; ``levels`` are thin horizontal lines, ``grid`` has thin vertical ones at
    the ``ticks`` below the drawing; ``title`` says what the ticks are. ``legend``: styles, each with its meaning;
    ``ramp``: the largest number of bytes of a legend of shades, and its shade. ``notes``: what the drawing leaves out.
    """

    height: float
    rows: tuple[tuple[Mark, ...], ...] = ()
    signs: tuple[tuple[float, float], ...] = ()
    numbers: tuple[tuple[float, float, str], ...] = ()
    levels: tuple[float, ...] = ()
    labels: tuple[RowLabel, ...] = ()
    ticks: tuple[Tick, ...] = ()
    grid: bool = False
    title: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    ramp: tuple[int, float] | None = None
    notes: tuple[str, ...] = ()
    few_numbers: bool = True

    @property
    def label_width(self) -> int:
        """Pixels for the labels of the rows."""
        longest = max((len(label.text) + 2 * label.bad for label in self.labels), default=0)
        return round(longest * 7.2) + (8 if self.labels else 0)


class Bar(NamedTuple):
    """A bar: its ``share`` of the longest possible one, 0 to 1, and the number as text."""

    label: str
    share: float
    text: str


class Bars(NamedTuple):
    """A line for each bar: its label, the bar, its number. ``long`` labels stand above their bars."""

    bars: tuple[Bar, ...]
    long: bool = False
    notes: tuple[str, ...] = ()


class Piece(NamedTuple):
    """A piece from ``start`` to ``end`` of a strip, on the scale of the drawing; ``style`` is a class of the sheet."""

    start: float
    end: float
    style: str
    tip: str


class Strip(NamedTuple):
    """A row of pieces; those that come later are drawn above the others."""

    label: str
    pieces: Sequence[Piece]
    bad: bool = False


def strips(
    rows: Sequence[Strip],
    *,
    end: float,
    ticks: tuple[Tick, ...] = (),
    title: str = "",
    legend: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    grid: bool = False,
) -> Chart:
    """Pieces end to end in strips on one scale from 0 to ``end``: buffers of ranks, bytes of files, phases of a job."""
    height = 26 if len(rows) <= 12 else 18
    marks, signs = [], []
    for number, strip in enumerate(rows):
        top = number * height
        drawn = []
        for piece in strip.pieces:
            width = (piece.end - piece.start) / end if end else 1.0
            width = max(width, _NARROWEST if piece.style == DAMAGE else 0.0)
            x, style = piece.start / end if end else 0.0, f"mark {piece.style}"
            drawn.append(Mark(x, top + 2, width, height - 4, style, piece.tip))
        marks.append(tuple(drawn))
        damaged = [piece for piece in strip.pieces if piece.style == DAMAGE]
        for piece in damaged or [piece for piece in strip.pieces if piece.style == DAMAGED_SOMEWHERE]:
            middle = (piece.start + piece.end) / 2 / end if end else 0.5
            signs.append((min(max(middle, 0.012), 0.988), top + height / 2 + 5))
    return Chart(
        height * len(rows),
        tuple(marks),
        tuple(signs),
        labels=tuple(RowLabel((i + 0.5) * height + 4, strip.label, strip.bad) for i, strip in enumerate(rows)),
        ticks=ticks,
        grid=grid,
        title=title,
        legend=tuple(legend),
        notes=tuple(notes),
    )


def matrix(source: Int64Array, target: Int64Array, nbytes: Int64Array, *, num_sources: int, num_targets: int) -> Chart:
    """How many bytes go from where to where: entry i moves ``nbytes[i]`` from rank ``source[i]`` to ``target[i]``.

    Shades are proportional to bytes, so that cells that are nearly equal look equal. Neighbouring ranks are put
    together where there are more than 48.
    """
    rows, columns = Bins.at_most(num_sources, _MATRIX_CELLS), Bins.at_most(num_targets, _MATRIX_CELLS)
    amounts = np.zeros((rows.num, columns.num), dtype=np.int64)
    np.add.at(amounts, (source // rows.step, target // columns.step), nbytes)
    most = int(amounts.max(initial=0))
    with_numbers = max(amounts.shape) <= _MATRIX_NUMBERS
    height = 36 if rows.num <= 8 else 22 if rows.num <= 16 else 12 if rows.num <= 32 else 9
    darkest = 0.5 if with_numbers else 1.0
    marks, numbers = [], []
    for row, line in enumerate(amounts.tolist()):
        drawn = []
        for column, amount in enumerate(line):
            saved = f"saved rank{'s' if rows.step > 1 else ''} {rows.label(row)}"
            to = f"target rank{'s' if columns.step > 1 else ''} {columns.label(column)}"
            drawn.append(
                Mark(
                    column / columns.num,
                    row * height,
                    1 / columns.num,
                    height,
                    "cell" if amount else "cell none",
                    f"{saved} to {to}: {format_size(amount) if amount else 'nothing'}",
                    max(amount / most * darkest, 0.04) if amount else None,
                )
            )
            if amount and with_numbers:
                numbers.append(((column + 0.5) / columns.num, (row + 0.5) * height + 4, format_size(amount)))
        marks.append(tuple(drawn))
    labels = tuple(
        RowLabel((row + 0.5) * height + 4, f"rank {rows.label(row)}" if rows.step == 1 else rows.label(row))
        for row in range(0, rows.num, max(1, -(-rows.num // 16)))
    )
    notes: tuple[str, ...] = ()
    if (rows.step, columns.step) != (1, 1):
        cell = f"{counted(rows.step, 'saved rank')} by {counted(columns.step, 'target rank')}"
        partial = num_sources % rows.step or num_targets % columns.step
        fewer = "; the last row and column may be of fewer" if partial else ""
        notes = (f"Neighbouring ranks are put together: a cell is {cell}{fewer}.",)
    return Chart(
        rows.num * height,
        tuple(marks),
        numbers=tuple(numbers),
        labels=labels,
        ticks=columns.ticks(8),
        title="target rank (rows: saved rank)",
        ramp=(most, darkest),
        notes=notes,
        few_numbers=columns.num <= 4,
    )


def rank_map(num_ranks: int, problems: Mapping[int, str]) -> Chart:
    """Which of many ranks have a problem: a square for each rank, or for neighbours where there are very many."""
    bins = Bins.at_most(num_ranks, _MAP_SQUARES)
    columns = min(_MAP_COLUMNS, bins.num)
    lines = -(-bins.num // columns)
    by_bin: dict[int, list[str]] = {}
    for rank, what in sorted(problems.items()):
        by_bin.setdefault(rank // bins.step, []).append(f"rank {rank:,}: {what}")
    marks, signs = [], []
    for line in range(lines):
        squares = []
        for number in range(line * columns, min((line + 1) * columns, bins.num)):
            column = number % columns
            found = by_bin.get(number, [])
            tip = "; ".join(found[:3]) if found else f"rank {bins.label(number)}: no problem"
            tip += f"; and {len(found) - 3:,} more ranks" if len(found) > 3 else ""
            style = "mark damage" if found else "mark part-a"
            squares.append(Mark(column / columns, line * _MAP_HEIGHT, 1 / columns, _MAP_HEIGHT, style, tip))
            if found:
                signs.append(((column + 0.5) / columns, (line + 0.5) * _MAP_HEIGHT + 5))
        marks.append(tuple(squares))
    return Chart(
        lines * _MAP_HEIGHT,
        tuple(marks),
        tuple(signs),
        labels=tuple(
            RowLabel((line + 0.5) * _MAP_HEIGHT + 4, f"{line * columns * bins.step:,}") for line in range(lines)
        ),
        legend=(("part-a", "no problem"), (DAMAGE, "has a problem")),
        notes=(f"A square stands for {bins.step:,} neighbouring ranks.",) if bins.step > 1 else (),
    )


def columns(bars: Sequence[Bar], ticks: Sequence[Tick], *, title: str) -> Chart | Bars:
    """A column for each bar, where needed one for the largest of neighbours; few bars are drawn as lines."""
    if len(bars) <= _MOST_BARS:
        return Bars(tuple(bars))
    bins = Bins.at_most(len(bars), _MOST_COLUMNS)
    marks = []
    for number in range(bins.num):
        largest = max(bars[number * bins.step : (number + 1) * bins.step], key=lambda bar: bar.share)
        height = max(largest.share * _COLUMN_HEIGHT, 1.0 if largest.share else 0.0)
        x, tip = (number + 0.1) / bins.num, f"{largest.label}: {largest.text}"
        marks.append(Mark(x, _COLUMN_HEIGHT - height, 0.8 / bins.num, height, "cell", tip))
    heights = [_COLUMN_HEIGHT * (1 - tick.at) for tick in ticks]
    return Chart(
        _COLUMN_HEIGHT,
        (tuple(marks),),
        levels=tuple(heights),
        labels=tuple(
            RowLabel(min(max(y + 4, 10), _COLUMN_HEIGHT), tick.text) for y, tick in zip(heights, ticks, strict=True)
        ),
        ticks=bins.ticks(8),
        title=title,
        notes=(f"A column is the largest of {bins.step:,} neighbouring ranks.",) if bins.step > 1 else (),
    )
