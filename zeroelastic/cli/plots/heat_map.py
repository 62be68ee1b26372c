"""How many bytes each target rank reads from each saved rank's files, as a picture for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroelastic.byte_sizes import format_size

if TYPE_CHECKING:
    from rich.text import Text

    from zeroelastic.verbs.plan.forecast import Traffic

_MOST_ROWS = 16
_MOST_NUMBERS = 5  # up to this many columns are shown as numbers, more as shades
_CORNER, _GAP = "saved rank", 2
_NUMBER_WIDTH, _SUM_WIDTH = 10, 12
_MOST_CELL = 3
_SIGNS, _PLAIN_SIGNS = "·░▒▓█", ".-+*#"
"""For no bytes, and for each quarter up to the most; the plain ones are for a terminal that has no others."""
_COLOURS = ("", "blue", "cyan", "yellow", "bold red")


def heat_map(
    traffic: Traffic, num_sources: int, num_targets: int, *, width: int = 80, encoding: str = "utf-8"
) -> list[Text]:
    """The lines of the picture: a row per saved rank, a column per target rank; neighbours are summed where needed.

    ``width`` and ``encoding`` are those of the terminal; the picture takes 40 columns or more, and 80 at most.
    """
    from rich.text import Text

    signs = _SIGNS if _has(encoding, _SIGNS) else _PLAIN_SIGNS
    shades = f" {signs[1:]}"

    source_step = -(-num_sources // _MOST_ROWS)
    labels = [_span(first, source_step, num_sources) for first in range(0, num_sources, source_step)]
    label_width = max(len(_CORNER), *map(len, labels))
    room = max(40, min(width, 80)) - label_width - _GAP - _SUM_WIDTH
    numbers = num_targets <= min(_MOST_NUMBERS, room // _NUMBER_WIDTH)
    target_step = 1 if numbers else -(-num_targets // room)
    columns = -(-num_targets // target_step)
    cell = _NUMBER_WIDTH if numbers else min(_MOST_CELL, room // columns)
    matrix = traffic.binned(num_sources, num_targets, source_step=source_step, target_step=target_step)
    most = int(matrix.max(initial=0))
    axis = _axis([column * target_step for column in range(columns)], cell, numbers)
    lines = [Text(f"{_CORNER:<{label_width}}{'':{_GAP}}{axis}", style="dim")]
    for label, row in zip(labels, matrix, strict=True):
        line = Text(f"{label:>{label_width}}{'':{_GAP}}")
        for nbytes in row.tolist():
            shade = _shade(nbytes, most)
            text = f"{format_size(nbytes) if nbytes else signs[0]:>{cell}}" if numbers else shades[shade] * cell
            line.append(text, style=_COLOURS[shade])
        line.append(f"{format_size(int(row.sum())):>{_SUM_WIDTH}}", style="dim")
        lines.append(line)
    if not numbers:
        each = f"; a cell is {source_step} x {target_step} ranks" if (source_step, target_step) != (1, 1) else ""
        legend = f"{signs[1:]} are the quarters up to {format_size(most)}{each}"
        lines.append(Text(f"{'':{label_width + _GAP}}{legend}", style="dim"))
    return lines


def _has(encoding: str, signs: str) -> bool:
    try:
        signs.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _shade(nbytes: int, most: int) -> int:
    """0 for no bytes, else 1 to 4 by quarters of the largest cell."""
    return 0 if nbytes == 0 else min(4, 1 + nbytes * 4 // most)


def _span(first: int, step: int, count: int) -> str:
    """The ranks that a row stands for."""
    last = min(first + step, count) - 1
    return str(first) if first == last else f"{first}-{last}"


def _axis(targets: list[int], cell: int, numbers: bool) -> str:
    """The target ranks above the columns, as many as there is room for."""
    if numbers:
        return "".join(f"{f'to {rank}':>{cell}}" for rank in targets)
    line = ""
    for column, rank in enumerate(targets):
        at = column * cell
        if not line:
            line = f"to {rank}"
        elif at >= len(line) + 3 and at + len(str(rank)) <= len(targets) * cell:
            line = f"{line:<{at}}{rank}"
    return line
