"""The view of a report, a sentence and tables, and its two forms: in the terminal, and as the page of ``--html``.

The page is one HTML file that needs no other file, network or script. Its name is checked before the work, and it is
written afterwards; never half a file. Names in files are hostile input: Jinja2 escapes every value, after unprintable
characters have become visible, and the page may load nothing. A page has one of two figures, rows of rectangles: who
holds what (``inspect``), and what moves (``plan``).
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zeroelastic._version import __version__
from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.terminal import print_styled, print_wrapped, printable
from zeroelastic.errors import UsageError, buffer_kind

if TYPE_CHECKING:
    from jinja2 import Environment

    from zeroelastic.verbs.inspect.report import InspectReport
    from zeroelastic.verbs.plan import PlanReport

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


_EXISTS = "{}: already exists; refusing to overwrite it without --force. Give another name."
_MOST_ROWS = 1000


def check_page(path: Path | None, *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where no page can be written to ``path``; ``force`` replaces a file."""
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: a report is an HTML file. Give a name that ends in .html or .htm.")
    if path.exists() and not (force and path.is_file()):
        raise UsageError(_EXISTS.format(path))
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.absolute().parent}. Make it first.")


def write_page(path: Path, verb: str, view: View, *, force: bool = False) -> None:
    """Write a view as a page. Raises UsageError where the file exists, without ``force``; OSError."""
    from zeroelastic.io.atomic import write_atomically

    try:
        write_atomically(path, page(verb, view).encode(), replace=force)
    except FileExistsError:
        raise UsageError(_EXISTS.format(path)) from None


def page(verb: str, view: View) -> str:
    """Return the HTML of a view."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            verb=verb,
            view=view,
            most=_MOST_ROWS,
            version=__version__,
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )
    )


@cache
def _environment() -> Environment:
    """Return the template with autoescaping; its style sheet is allowed by its hash."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("zeroelastic.cli", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assert made.loader is not None
    style = made.loader.get_source(made, "style.css")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made.globals.update(style=Markup(style), style_digest=f"sha256-{digest}")
    return made


def _visible(value: Any) -> Any:
    return printable(value) if type(value) is str else value


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
    import numpy as np

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
        rows.append((f"rank {rank:,}", _marks_of(sorted(held), rank, end)))
    few = f" {len(ranks)} of {world_size:,} ranks are drawn." if len(ranks) < world_size else ""
    buffers = f"{buffer_kind(3 if layout.split == 'param' else 2)}s"
    note = f"A row is {end:,} elements: the {buffers} of a rank end to end. What is empty is padding.{few}"
    return Figure("Who holds what", tuple(rows), ((0.0, "0"), (100.0, f"{end:,} elements")), note)


def _marks_of(held: list[tuple[int, int, str]], rank: int, end: int) -> tuple[Mark, ...]:
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
    import numpy as np

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
