"""Text for people on stdout: headings, labelled lines and tables; what files say is made harmless to a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from zeroelastic.documents import json_proper

if TYPE_CHECKING:
    from rich.console import Console


def harmless(text: str) -> str:
    """The same text with everything that a terminal does not simply print escaped: names in files are hostile input."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)


def say(out: Console, *parts: str | tuple[str, str]) -> None:
    """One line: plain text and (text, style) pairs."""
    from rich.text import Text

    safe = [harmless(part) if isinstance(part, str) else (harmless(part[0]), part[1]) for part in parts]
    out.print(Text.assemble(*safe), soft_wrap=True)


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Rows of cells as lines whose columns are aligned; those in ``right`` to the right."""
    safe = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in safe
    ]


def print_document(document: Mapping[str, object]) -> None:
    """What --json prints: one document, in JSON proper, which has no NaN and no infinity; they become text."""
    typer.echo(json.dumps(json_proper(document), indent=2))
