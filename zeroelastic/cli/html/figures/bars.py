"""Numbers side by side, from 0: a line for each where there are few, columns where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroelastic.cli.html.figures.plot import RowLabel, frame, percent, row_of_marks
from zeroelastic.cli.html.figures.scale import Bins, Tick
from zeroelastic.cli.html.markup import Element, element
from zeroelastic.cli.html.page import Figure

_MOST_LINES = 12
_MOST_COLUMNS = 96
_HEIGHT = 120


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its ``share`` of the longest possible one, 0 to 1, and the number as text."""

    label: str
    share: float
    text: str


def draw_bars(name: str, bars: Sequence[Bar], *, long_labels: bool = False) -> Figure:
    """A line for each bar: its label, the bar, its number. ``long_labels`` stand above their bars."""
    return Figure(name, element("ol", *map(_line, bars), class_="bars long" if long_labels else "bars"))


def _line(bar: Bar) -> Element:
    drawn = element("rect", x=0, y=0, width=percent(min(max(bar.share, 0.0), 1.0)), height=14, class_="cell")
    return element(
        "li",
        element("span", bar.label, class_="bar-label"),
        element("svg", drawn, class_="bar", width="100%", height=14, aria_hidden="true"),
        element("span", bar.text, class_="bar-number"),
    )


def draw_columns(name: str, bars: Sequence[Bar], ticks: Sequence[Tick], *, title: str) -> Figure:
    """A column for each bar, where needed one for the largest of neighbours; few bars are drawn as lines."""
    if len(bars) <= _MOST_LINES:
        return draw_bars(name, bars)
    bins = Bins.at_most(len(bars), _MOST_COLUMNS)
    marks = []
    for number in range(bins.num):
        largest = max(bars[number * bins.step : (number + 1) * bins.step], key=lambda bar: bar.share)
        height = max(largest.share * _HEIGHT, 1.0 if largest.share else 0.0)
        marks.append(
            element(
                "rect",
                x=percent((number + 0.1) / bins.num),
                width=percent(0.8 / bins.num),
                y=_HEIGHT - height,
                height=height,
                class_="cell",
                data_tip=f"{largest.label}: {largest.text}",
            )
        )
    lines = [
        element("line", x1="0", x2="100%", y1=_HEIGHT * (1 - tick.at), y2=_HEIGHT * (1 - tick.at), class_="grid")
        for tick in ticks
    ]
    labels = [RowLabel(min(max(_HEIGHT * (1 - tick.at) + 4, 10), _HEIGHT), tick.text) for tick in ticks]
    notes = (f"A column is the largest of {bins.step:,} neighbouring ranks.",) if bins.step > 1 else ()
    drawing = frame(
        name, [*lines, row_of_marks(*marks)], height=_HEIGHT, rows=labels, columns=bins.ticks(8), title=title
    )
    return Figure(name, drawing, notes=notes)
