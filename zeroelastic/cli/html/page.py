"""The model of a page: what a report says, without how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zeroelastic.cli.html.markup import Element

Tone = Literal["good", "bad", "note", "plain"]

SIGNS: dict[Tone, str] = {"good": "✓", "bad": "✕", "note": "!", "plain": "•"}
"""What says the same as the colour of a tone."""

WORDS: dict[Tone, str] = {"good": "ok", "bad": "problem", "note": "note", "plain": "information"}

MOST_ROWS = 1000
"""The most rows of a table in a page."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A label and its value, in a list beneath the sentence."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. ``name``: of a parameter, a file or a digest, which is set in a font of equal widths."""

    text: str
    tone: Tone | None = None
    name: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. ``total`` rows there are in all, of which ``rows`` are the first in the order that ``order`` names."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: int
    order: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its name, which is its accessible name, too.

    ``legend`` says what colours stand for, ``notes`` what the drawing leaves out.
    """

    name: str
    drawing: Element
    legend: Element | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """A line of a list, with a sign in front of it; ``details`` are lines beneath it."""

    text: str
    tone: Tone
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands beneath it."""

    heading: str
    blocks: tuple[Figure | Table | tuple[Item, ...] | str, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A report: ``sentence`` answers the question of the verb, and the rest says why."""

    verb: str
    title: str
    tone: Tone
    sentence: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]


def facts(*pairs: tuple[str, object]) -> tuple[Fact, ...]:
    """Facts without those whose value is not known: None or empty."""
    return tuple(Fact(label, str(value)) for label, value in pairs if value not in (None, ""))


def sections(*found: Section | None) -> tuple[Section, ...]:
    """The sections that there are, without those that have nothing to show."""
    return tuple(section for section in found if section is not None and section.blocks)


def names(*texts: str) -> tuple[Cell, ...]:
    """Cells that are names."""
    return tuple(Cell(text, name=True) for text in texts)


def cells(*texts: str) -> tuple[Cell, ...]:
    """Cells of plain text."""
    return tuple(map(Cell, texts))


def table(
    caption: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]], *, order: str = "first", total: int = 0
) -> Table:
    """A table of at most MOST_ROWS of these rows, without the columns in which nothing is.

    A column whose title begins with ``>`` is aligned to the right.
    """
    shown = rows[:MOST_ROWS]
    kept = [i for i in range(len(columns)) if any(row[i].text for row in shown)]
    made = tuple(Column(columns[i].removeprefix(">"), right=columns[i].startswith(">")) for i in kept)
    return Table(caption, made, tuple(tuple(row[i] for i in kept) for row in shown), max(total, len(rows)), order)


def items(tone: Tone, texts: Sequence[str]) -> tuple[tuple[Item, ...], ...]:
    """A list as blocks of a section: none for no texts, otherwise one."""
    return (tuple(Item(text, tone) for text in texts),) if texts else ()
