"""Text for people: headings, labelled lines and tables, with control characters in names from files escaped."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zeroelastic.json_document import json_proper

if TYPE_CHECKING:
    from rich.console import Console

    from zeroelastic.verbs.report import Report

NO_BREAK = "\N{NO-BREAK SPACE}"
_WIDE = 1 << 20
_USUAL_WIDTH = 80


def printable(text: str) -> str:
    """The text with every unprintable character except newlines escaped: names in files are hostile input."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)


def print_line(text: str) -> None:
    """One line on stdout."""
    typer.echo(printable(text))


def log_line(text: str) -> None:
    """One line on stderr."""
    typer.echo(printable(text), err=True)


def print_styled(*parts: str | tuple[str, str]) -> None:
    """Print one line made of plain text and (text, style) pairs; a style is a colour, "bold", or both."""
    line = ""
    for part in parts:
        if isinstance(part, str):
            line += printable(part)
        elif words := part[1].split():
            colour = next((word for word in words if word != "bold"), None)
            line += typer.style(printable(part[0]), fg=colour, bold="bold" in words or None)
        else:
            line += printable(part[0])
    typer.echo(line, color=_coloured())


def print_wrapped(text: str, *, first: str, rest: str) -> None:
    """Print text in lines of the terminal's width, never within a word; elsewhere in one line, which grep finds whole.

    ``first`` begins the first line and ``rest`` the others. A NO_BREAK is printed as a space, at which no line ends.
    """
    width = shutil.get_terminal_size((_WIDE, 0)).columns
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    for line in lines or [first]:
        print_styled(line.replace(NO_BREAK, " "))


def _coloured() -> bool | None:
    """Whether to print colours; None: where stdout is a terminal."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def print_columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), indent: str = "  ") -> None:
    """Print rows of cells in aligned columns; those in ``right`` are aligned to the right."""
    typer.echo("".join(f"{indent}{line}\n" for line in columns(rows, right=right)), nl=False)


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Rows of cells as lines whose columns are aligned; those in ``right`` to the right."""
    safe = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in safe
    ]


def whole_table_console(*, folds: bool = False) -> Console:
    """A console in whose tables nothing is cut: their lines are as long as they must be, and the terminal breaks them.

    With ``folds``, columns that may fold do so on a terminal of usual width; elsewhere names stay whole for grep.
    """
    from rich.console import Console

    out = Console()
    return out if folds and out.is_terminal and out.width >= _USUAL_WIDTH else Console(width=_WIDE)


def print_written(report: Path | None) -> None:
    """Say where the report of ``--html`` is, if there is one."""
    if report is not None:
        print_styled(("Report: ", "bold"), str(report))


def print_document(document: Mapping[str, object]) -> None:
    """Print the document of --json. Strict JSON has no NaN and no infinity: they become strings."""
    typer.echo(json.dumps(json_proper(document), indent=2))


def print_report(report: Report) -> None:
    """Print the document of a report; its values are those of strict JSON already."""
    typer.echo(json.dumps(report.to_json(), indent=2))
