"""Lines over steps: losses, and differences of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroelastic.cli.html.figures.plot import RowLabel, frame, grid_lines, key, percent, row_of_marks
from zeroelastic.cli.html.figures.scale import Tick, round_step
from zeroelastic.cli.html.markup import Node, element
from zeroelastic.cli.html.page import Figure
from zeroelastic.cli.output.thinning import spread

_HEIGHT = 200
_MARGIN = 10  # pixels above the highest point and below the lowest
_MOST_POINTS = 300


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points (x, y); ``style`` is a class of the style sheet. A gap is a y that is not finite."""

    name: str
    style: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line with a name, such as a tolerance."""

    name: str
    y: float


def draw_lines(
    name: str, lines: Sequence[Line], *, x_name: str, y_name: str, from_zero: bool = False, limit: Limit | None = None
) -> Figure:
    """The picture. ``from_zero``: the y axis begins at 0, else a little below the lowest point."""
    values = [y for line in lines for _, y in line.points if math.isfinite(y)]
    values += [limit.y] if limit is not None else []
    places = [x for line in lines for x, _ in line.points]
    if not values:
        return Figure(name, frame(name, (), height=1), notes=("No number of it is finite.",))
    low, high = (0.0 if from_zero else min(values)), max(values)
    if high <= low:
        low, high = (0.0, 1.0) if high == low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    first, last = min(places), max(places)

    def across(x: float) -> float:
        return 0.02 + 0.96 * ((x - first) / (last - first) if last > first else 0.5)

    def down(y: float) -> float:
        return _MARGIN + (_HEIGHT - 2 * _MARGIN) * (high - y) / (high - low)

    heights = _round_numbers(low, high)
    marks: list[Node] = [element("line", x1="0", x2="100%", y1=down(y), y2=down(y), class_="grid") for y in heights]
    if limit is not None:
        marks.append(element("line", x1="0", x2="100%", y1=down(limit.y), y2=down(limit.y), class_="limit"))
    for line in lines:
        shown = [line.points[i] for i in spread(len(line.points), _MOST_POINTS)]
        marks.append(_path([(1000 * across(x), down(y)) for x, y in shown if math.isfinite(y)], line.style))
        marks.append(
            row_of_marks(
                *(
                    element(
                        "circle",
                        cx=percent(across(x)),
                        cy=down(y),
                        r=3,
                        class_=f"point {line.style}",
                        data_tip=f"{line.name}, {x_name} {x:,.10g}: {y_name} {y:.8g}",
                    )
                    for x, y in shown
                    if math.isfinite(y)
                )
            )
        )
    labels = [RowLabel(down(y) + 4, f"{y:.6g}") for y in heights]
    entries = [(line.style, line.name) for line in lines]
    entries += [("limit-key", f"{limit.name} {limit.y:.3g}")] if limit is not None else []
    ticks = _places(first, last, across)
    drawing = frame(
        name, [*grid_lines(ticks, _HEIGHT), *marks], height=_HEIGHT, rows=labels, columns=ticks, title=x_name
    )
    lost = sum(not math.isfinite(y) for line in lines for _, y in line.points)
    notes: tuple[str, ...] = (f"{lost:,} of the numbers are not finite, and are not drawn.",) if lost else ()
    thinned = max(len(line.points) for line in lines)
    notes += (f"{_MOST_POINTS} of {thinned:,} points of a line are drawn.",) if thinned > _MOST_POINTS else ()
    return Figure(name, drawing, key(*entries), notes)


def _path(points: Sequence[tuple[float, float]], style: str) -> Node:
    """The line itself: stretched to the width of the drawing, which its thickness is not."""
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = element("polyline", points=text, class_=f"line {style}", vector_effect="non-scaling-stroke")
    return element(
        "svg", drawn, x=0, y=0, width="100%", height=_HEIGHT, viewBox=f"0 0 1000 {_HEIGHT}", preserveAspectRatio="none"
    )


def _round_numbers(low: float, high: float) -> list[float]:
    step = round_step(high - low, 4)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _places(first: float, last: float, across: object) -> list[Tick]:
    """Whole steps below the drawing."""
    assert callable(across)
    step = max(1, round(round_step(last - first, 5))) if last > first else 1
    begin = math.ceil(first / step) * step
    return [Tick(across(x), f"{x:,}") for x in range(begin, int(last) + 1, step)]
