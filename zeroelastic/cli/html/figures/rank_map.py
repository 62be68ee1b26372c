"""Which of many ranks have a problem: a square for each rank, or for neighbours where there are very many."""

from __future__ import annotations

from collections.abc import Mapping

from zeroelastic.cli.html.figures.plot import RowLabel, frame, key, percent, row_of_marks
from zeroelastic.cli.html.figures.scale import Bins
from zeroelastic.cli.html.markup import Node, element
from zeroelastic.cli.html.page import Figure

_MOST_SQUARES = 1024
_COLUMNS = 32
_HEIGHT = 18


def draw_rank_map(name: str, num_ranks: int, problems: Mapping[int, str]) -> Figure:
    """The picture; ``problems`` says of each rank that has one what it is."""
    bins = Bins.at_most(num_ranks, _MOST_SQUARES)
    columns = min(_COLUMNS, bins.num)
    lines = -(-bins.num // columns)
    by_bin: dict[int, list[str]] = {}
    for rank, what in sorted(problems.items()):
        by_bin.setdefault(rank // bins.step, []).append(f"rank {rank:,}: {what}")
    marks: list[Node] = []
    for line in range(lines):
        squares: list[Node] = []
        signs: list[Node] = []
        for number in range(line * columns, min((line + 1) * columns, bins.num)):
            said = by_bin.get(number)
            column = number % columns
            squares.append(
                element(
                    "rect",
                    x=percent(column / columns),
                    y=line * _HEIGHT,
                    width=percent(1 / columns),
                    height=_HEIGHT,
                    class_="mark damage" if said else "mark part-a",
                    data_tip=_said(said) if said else f"rank {bins.label(number)}: no problem",
                )
            )
            if said:
                sign = element(
                    "text",
                    "\N{MULTIPLICATION X}",
                    x=percent((column + 0.5) / columns),
                    y=(line + 0.5) * _HEIGHT + 5,
                    class_="sign",
                    text_anchor="middle",
                )
                signs.append(sign)
        marks += [row_of_marks(*squares), *signs]
    labels = [RowLabel((line + 0.5) * _HEIGHT + 4, f"{line * columns * bins.step:,}") for line in range(lines)]
    notes = (f"A square stands for {bins.step:,} neighbouring ranks.",) if bins.step > 1 else ()
    drawing = frame(name, marks, height=lines * _HEIGHT, rows=labels)
    return Figure(name, drawing, key(("part-a", "no problem"), ("damage", "has a problem")), notes)


def _said(sentences: list[str]) -> str:
    """The first sentences, and how many more there are."""
    more = len(sentences) - 3
    return "; ".join(sentences[:3]) + (f"; and {more:,} more ranks" if more > 0 else "")
