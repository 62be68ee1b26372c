"""The figures in the README and the pages are those of the committed raw results (benchmarks/figures.py)."""

from __future__ import annotations

import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import figures


@pytest.mark.parametrize("page", figures.TEMPLATES)
def test_a_page_says_what_the_results_say(page: str) -> None:
    """After a measurement: ``make figures``."""
    text = (ROOT / page).read_text()
    assert figures.written(text, figures.TEMPLATES[page], figures.figures()) == text


def test_a_figure_that_no_result_has_is_found() -> None:
    values = {"a": "1.2", "b": "**0.47**"}
    page = "Of two, one takes 1.3 s\nand the other **0.47** of it."
    template = "one takes {a} s and the other {b} of it."
    assert figures.written(page, (template,), values) == page.replace("1.3", "1.2")
    for other in ("another takes {a} s", "{a}"):  # in no place, and in two
        with pytest.raises(ValueError, match="places look like"):
            figures.written(page, (other,), values)


def test_every_figure_is_used() -> None:
    used = {name for templates in figures.TEMPLATES.values() for line in templates for name in figures.names_in(line)}
    assert used == figures.figures().keys()
