"""The view of a report: a sentence and tables, the same in the terminal and on the page of ``--html``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from zeroelastic.cli.terminal import print_styled, print_wrapped, printable

if TYPE_CHECKING:
    from zeroelastic.cli.figures import Figure

Severity = Literal["plain", "good", "note", "bad"]

_STYLES: dict[Severity, str] = {"plain": "", "good": "green", "note": "yellow", "bad": "bold red"}


class Row(NamedTuple):
    """The cells of a row, and how serious what they say is."""

    cells: tuple[str, ...]
    severity: Severity = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. ``columns`` are the titles of the columns, empty where these need none.

    The cells of the columns in ``right`` are aligned to the right. A terminal shows the first ``most`` rows, a page
    more; ``more`` says how to see the others. ``total`` counts the rows that there are, where ``rows`` are the first.
    """

    title: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = ()
    right: frozenset[int] = frozenset()
    most: int = 24
    total: int = 0
    more: str = "--json lists them all"

    def more_than(self, shown: int) -> int:
        """How many rows there are beyond the first ``shown``."""
        return max(len(self.rows), self.total) - shown


@dataclass(frozen=True, slots=True)
class View:
    """The view of a report: the checkpoint in the ``title``, tables, a figure for the page, and the answer."""

    title: str
    tables: Sequence[Table]
    sentence: str
    severity: Severity
    figure: Figure | None = None


def row(*values: object, severity: Severity = "plain") -> Row:
    """A row of values: nothing is written for None, and numbers have thousands separators."""
    return Row(tuple(_text(value) for value in values), severity)


def facts(title: str, values: Iterable[tuple[str, object]]) -> Table:
    """A table of labels and values, without those that are None, empty, or lists of nothing else.

    The values of a list or tuple are joined by commas.
    """
    lines = ((label, _joined(value)) for label, value in values)
    return Table(title, tuple(row(label, value) for label, value in lines if value))


def sentences(title: str, texts: Iterable[str], severity: Severity) -> Table:
    """A table of one column."""
    return Table(title, tuple(row(text, severity=severity) for text in texts))


def _joined(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(text for text in map(_text, value) if text)
    return _text(value)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_view(view: View) -> None:
    """Print a view in the terminal: its tables, then the sentence."""
    print_styled((view.title, "bold"))
    for table in view.tables:
        if table.rows:
            print_table(table)
    print_styled("")
    print_wrapped(view.sentence, first="", rest="", style=_STYLES[view.severity])


def print_table(table: Table, indent: str = "  ") -> None:
    """Print a table: columns are aligned, and a terminal breaks the lines of the last column only."""
    if table.title:
        print_styled((f"\n{table.title}", "bold"))
    shown = table.rows[: table.most]
    lines = [Row(table.columns), *shown] if table.columns else shown
    safe = [[printable(cell) for cell in line.cells] for line in lines]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    for line, cells in zip(lines, safe, strict=True):
        *before, last = (
            cell.rjust(width) if i in table.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        start = indent + "".join(f"{cell}  " for cell in before)
        print_wrapped(last.rstrip(), first=start, rest=" " * len(start), style=_STYLES[line.severity])
    if (more := table.more_than(len(shown))) > 0:
        print_styled(f"  ... and {more:,} more; {table.more}")
