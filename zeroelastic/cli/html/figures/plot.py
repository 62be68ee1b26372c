"""The frame of a drawing: labels of the rows at the left, marks in the middle, labels of the columns below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroelastic.cli.html.figures.scale import Tick
from zeroelastic.cli.html.markup import Element, Node, element

_AXIS_HEIGHT = 18
_SIGN_WIDTH = 7.2  # of a letter of a label, in pixels


@dataclass(frozen=True, slots=True)
class RowLabel:
    """The label of a row whose middle is at ``y`` pixels. ``bad``: with a sign and in the colour of damage."""

    y: float
    text: str
    bad: bool = False


def percent(share: float) -> str:
    """A share of the width."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def frame(
    name: str,
    marks: Sequence[Node],
    *,
    height: float,
    rows: Sequence[RowLabel] = (),
    columns: Sequence[Tick] = (),
    title: str = "",
) -> Element:
    """A drawing of ``height`` pixels that is as wide as its place; ``title`` says what the labels below are."""
    texts = [f"\N{MULTIPLICATION X} {row.text}" if row.bad else row.text for row in rows]
    width = round(max(map(len, texts), default=0) * _SIGN_WIDTH) + (8 if rows else 0)
    labels = [
        element("text", text, x=width - 6, y=row.y, class_="label bad" if row.bad else "label", text_anchor="end")
        for row, text in zip(rows, texts, strict=True)
    ]
    return element(
        "div",
        element("svg", *labels, class_="rows", width=width, height=height, aria_hidden="true") if rows else None,
        element("svg", *marks, class_="plot", width="100%", height=height, role="img", aria_label=name),
        _axis(columns, bool(rows)) if columns else None,
        element("p", title, class_="axis-title" if rows else "axis-title alone") if title else None,
        class_="chart" if rows else "chart alone",
    )


def _axis(columns: Sequence[Tick], beside_rows: bool) -> Element:
    texts = []
    for tick in columns:
        anchor = "start" if tick.at < 0.04 else "end" if tick.at > 0.96 else "middle"
        texts.append(element("text", tick.text, x=percent(tick.at), y=12, class_="label", text_anchor=anchor))
    name = "columns" if beside_rows else "columns alone"
    return element("svg", *texts, class_=name, width="100%", height=_AXIS_HEIGHT, aria_hidden="true")


def row_of_marks(*marks: Node) -> Element:
    """Marks that the left and right arrow keys walk through."""
    return element("g", *marks, class_="row")


def grid_lines(ticks: Sequence[Tick], height: float) -> list[Node]:
    """Thin lines at the labels of the columns."""
    return [
        element("line", x1=percent(t.at), x2=percent(t.at), y1=0, y2=height, class_="grid") for t in ticks if t.at < 1
    ]


def key(*entries: tuple[str, str]) -> Element:
    """A legend: classes of the style sheet, each with what it stands for."""
    return element(
        "ul",
        *(
            element(
                "li",
                element(
                    "svg",
                    element("rect", x=0, y=0, width=14, height=14, class_=f"mark {style}"),
                    element("text", "\N{MULTIPLICATION X}", x=7, y=11, class_="sign", text_anchor="middle")
                    if "damage" in style
                    else None,
                    width=14,
                    height=14,
                    aria_hidden="true",
                ),
                meaning,
            )
            for style, meaning in entries
        ),
        class_="key",
    )
