"""Which saved rank's files give how much to which target rank, as a picture for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroelastic.cli.sizes import format_size

if TYPE_CHECKING:
    from rich.text import Text

    from zeroelastic.forecast import Traffic

_MOST_ROWS = 16
_MOST_NUMBERS = 5  # as many columns are shown as numbers; more of them as shades
_SHADES = " ░▒▓█"
_COLOURS = ("", "blue", "cyan", "yellow", "bold red")


def heat_map(traffic: Traffic, num_sources: int, num_targets: int, *, width: int = 80) -> list[Text]:
    """The lines of the picture: saved ranks down, target ranks across, neighbours added up where there are many."""
    from rich.text import Text

    rows = min(num_sources, _MOST_ROWS)
    labels = [_span(row, rows, num_sources) for row in range(rows)]
    label_width = max(len("saved rank"), *map(len, labels))
    room = width - label_width - 2 - 12  # the sum of a row on the right
    numbers = num_targets <= _MOST_NUMBERS
    columns = num_targets if numbers else min(num_targets, room)
    cell = 10 if numbers else max(1, min(3, room // columns))
    matrix = traffic.binned(num_sources, num_targets, rows=rows, columns=columns)
    most = int(matrix.max(initial=0))
    lines = [Text(f"{'saved rank':<{label_width}}  {_axis(columns, num_targets, cell, numbers)}".rstrip(), style="dim")]
    for label, row in zip(labels, matrix, strict=True):
        line = Text(f"{label:>{label_width}}  ")
        for nbytes in row.tolist():
            shade = _shade(nbytes, most)
            text = f"{format_size(nbytes) if nbytes else '·':>{cell}}" if numbers else _SHADES[shade] * cell
            line.append(text, style=_COLOURS[shade])
        line.append(f"{format_size(int(row.sum())):>12}", style="dim")
        lines.append(line)
    per = -(-num_sources // rows), -(-num_targets // columns)
    if not numbers:
        each = "" if per == (1, 1) else f" ({per[0]} saved x {per[1]} target ranks a cell)"
        lines.append(Text(f"{'':<{label_width}}  ░ some  █ {format_size(most)}, the most{each}", style="dim"))
    return lines


def _shade(nbytes: int, most: int) -> int:
    """0 for nothing, else 1 to 4 by quarters of the most."""
    return 0 if nbytes == 0 else min(4, 1 + nbytes * 4 // most)


def _span(row: int, rows: int, count: int) -> str:
    """The ranks that a row stands for; those of ``index * rows // count == row``."""
    first, end = -(-row * count // rows), -(-(row + 1) * count // rows)
    return str(first) if end - first == 1 else f"{first}-{end - 1}"


def _axis(columns: int, num_targets: int, cell: int, numbers: bool) -> str:
    """The target ranks above the columns, as many as there is room for."""
    if numbers:
        return "".join(f"{f'to {rank}':>{cell}}" for rank in range(columns))
    line = ""
    for column in range(columns):
        label = f"{'to ' if not line else ''}{-(-column * num_targets // columns)}"
        at = column * cell
        if at >= len(line) + 4 or not line:
            line = f"{line:<{at}}{label}"
    return line
