"""Pieces end to end in strips on one scale: buffers of ranks, bytes of files, phases of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroelastic.cli.html.figures.plot import RowLabel, frame, grid_lines, percent, row_of_marks
from zeroelastic.cli.html.figures.scale import Tick
from zeroelastic.cli.html.markup import Element, Node, element
from zeroelastic.cli.html.page import Figure

_NARROWEST = 0.004  # of what is damaged, as a share of the width

DAMAGE = "damage"
"""The style of a piece that is damaged; it has a sign, too."""

DAMAGED_SOMEWHERE = "damage-all"
"""The style of a piece of which some part is damaged, or that is missing; it has a sign, too."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece from ``start`` to ``end`` of a strip, on the scale of the drawing; ``style`` is a class of the sheet."""

    start: float
    end: float
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class Strip:
    """A row of pieces; those that come later lie above the others."""

    label: str
    pieces: tuple[Piece, ...]
    bad: bool = False


def draw_strips(
    name: str,
    strips: Sequence[Strip],
    *,
    end: float,
    ticks: Sequence[Tick] = (),
    title: str = "",
    legend: Element | None = None,
    notes: tuple[str, ...] = (),
    lines: bool = False,
) -> Figure:
    """The picture; its scale goes from 0 to ``end``. ``lines``: with thin lines at the ticks, behind the strips."""
    height = 26 if len(strips) <= 12 else 18
    marks: list[Node] = [*grid_lines(ticks, height * len(strips))] if lines else []
    for number, strip in enumerate(strips):
        top = number * height
        drawn = [_piece(piece, top, height, end) for piece in strip.pieces]
        damaged = [piece for piece in strip.pieces if piece.style == DAMAGE]
        damaged = damaged or [piece for piece in strip.pieces if piece.style == DAMAGED_SOMEWHERE]
        signs = [_sign(piece, top, height, end) for piece in damaged]
        marks += [row_of_marks(*drawn), *signs]
    labels = [RowLabel((number + 0.5) * height + 4, strip.label, bad=strip.bad) for number, strip in enumerate(strips)]
    drawing = frame(name, marks, height=height * len(strips), rows=labels, columns=ticks, title=title)
    return Figure(name, drawing, legend, notes)


def _piece(piece: Piece, top: float, height: float, end: float) -> Element:
    return element(
        "rect",
        x=percent(piece.start / end if end else 0.0),
        y=top + 2,
        width=percent(
            max((piece.end - piece.start) / end if end else 1.0, _NARROWEST if piece.style == DAMAGE else 0.0)
        ),
        height=height - 4,
        class_=f"mark {piece.style}",
        data_tip=piece.tip,
    )


def _sign(piece: Piece, top: float, height: float, end: float) -> Element:
    """What says in the picture, without colour, that something is damaged; also where the piece is thin."""
    middle = (piece.start + piece.end) / 2 / end if end else 0.5
    return element(
        "text",
        "\N{MULTIPLICATION X}",
        x=percent(min(max(middle, 0.012), 0.988)),
        y=top + height / 2 + 5,
        class_="sign",
        text_anchor="middle",
    )
