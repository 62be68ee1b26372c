"""How many bytes go from each saved rank to each target rank, as shades of one colour from none to the most."""

from __future__ import annotations

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.html.figures.plot import RowLabel, frame, percent, row_of_marks
from zeroelastic.cli.html.figures.scale import Bins
from zeroelastic.cli.html.markup import Element, element
from zeroelastic.cli.html.page import Figure
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import counted

_MOST_CELLS = 48
_MOST_NUMBERS = 8  # up to this many rows and columns, each cell has its number
_NUMBERS_ON_A_PHONE = 4
_DARKEST_BEHIND_NUMBERS = 0.5


def draw_matrix(
    name: str, source: Int64Array, target: Int64Array, nbytes: Int64Array, *, num_sources: int, num_targets: int
) -> Figure:
    """The picture: entry i moves ``nbytes[i]`` bytes from rank ``source[i]`` to ``target[i]``.

    Shades are proportional to bytes, so that cells that are nearly equal look equal. Neighbouring ranks are put
    together where there are more than 48.
    """
    rows, columns = Bins.at_most(num_sources, _MOST_CELLS), Bins.at_most(num_targets, _MOST_CELLS)
    amounts = np.zeros((rows.num, columns.num), dtype=np.int64)
    np.add.at(amounts, (source // rows.step, target // columns.step), nbytes)
    most = int(amounts.max(initial=0))
    numbers = max(amounts.shape) <= _MOST_NUMBERS
    cell_height = 36 if rows.num <= 8 else 22 if rows.num <= 16 else 12 if rows.num <= 32 else 9
    darkest = _DARKEST_BEHIND_NUMBERS if numbers else 1.0
    marks = [
        row_of_marks(
            *(
                _cell(rows, columns, row, column, amount, amount / most * darkest if most else 0.0, cell_height)
                for column, amount in enumerate(line)
            )
        )
        for row, line in enumerate(amounts.tolist())
    ]
    if numbers:
        style = "number" if columns.num <= _NUMBERS_ON_A_PHONE else "number wide"
        marks += [
            element(
                "text",
                format_size(amount),
                class_=style,
                text_anchor="middle",
                x=percent((column + 0.5) / columns.num),
                y=(row + 0.5) * cell_height + 4,
            )
            for row, line in enumerate(amounts.tolist())
            for column, amount in enumerate(line)
            if amount
        ]
    every = max(1, -(-rows.num // 16))
    labels = [
        RowLabel((row + 0.5) * cell_height + 4, f"rank {rows.label(row)}" if rows.step == 1 else rows.label(row))
        for row in range(0, rows.num, every)
    ]
    notes: tuple[str, ...] = ()
    if (rows.step, columns.step) != (1, 1):
        cell = f"{counted(rows.step, 'saved rank')} by {counted(columns.step, 'target rank')}"
        fewer = (
            "; the last row and column may be of fewer" if num_sources % rows.step or num_targets % columns.step else ""
        )
        notes = (f"Neighbouring ranks are put together: a cell is {cell}{fewer}.",)
    drawing = frame(
        name,
        marks,
        height=rows.num * cell_height,
        rows=labels,
        columns=columns.ticks(8),
        title="target rank (rows: saved rank)",
    )
    return Figure(name, drawing, _ramp(most, darkest), notes)


def _cell(rows: Bins, columns: Bins, row: int, column: int, amount: int, shade: float, height: int) -> Element:
    source = f"saved rank{'s' if rows.step > 1 else ''} {rows.label(row)}"
    target = f"target rank{'s' if columns.step > 1 else ''} {columns.label(column)}"
    return element(
        "rect",
        x=percent(column / columns.num),
        y=row * height,
        width=percent(1 / columns.num),
        height=height,
        class_="cell" if amount else "cell none",
        fill_opacity=max(shade, 0.04) if amount else None,
        data_tip=f"{source} to {target}: {format_size(amount) if amount else 'nothing'}",
    )


def _ramp(most: int, darkest: float) -> Element:
    """The legend: shades from 0 to the most."""
    shades = 24
    drawn = [
        element("rect", x=6 * i, y=0, width=6, height=12, class_="shade", fill_opacity=darkest * i / (shades - 1))
        for i in range(shades)
    ]
    return element(
        "p",
        "0 ",
        element("svg", *drawn, width=6 * shades, height=12, class_="ramp", aria_hidden="true"),
        f" {format_size(most)}",
        class_="key",
    )
