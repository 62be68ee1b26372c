"""What pages take from the code is what the code says, and every error, variable and verb has its place in them."""

from __future__ import annotations

import builtins
import inspect
import json
import re
import sys
from typing import Any

import pytest
from front_ends.commands import FRONT_ENDS
from front_ends.run import table
from places import ROOT

from zeroelastic import errors
from zeroelastic.cli.app import VERBS

sys.path.insert(0, str(ROOT / "docs/tools"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import drawings
import figures
import reference
import stage

DOCS = ROOT / "docs"
PARTS = reference.parts()
CLI = (DOCS / "reference/cli.md").read_text()
ENTRIES = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
"""Each class of errors, and the builtin that the page names beside it."""


@pytest.mark.parametrize("page", PARTS)
def test_a_page_has_what_the_code_says(page: str) -> None:
    """After a change: ``make reference``."""
    text = (ROOT / page).read_text()
    assert reference.written(text, PARTS[page]) == text


@pytest.mark.parametrize("name", reference.published_schemas())
def test_the_published_schema_is_that_of_the_models(name: str) -> None:
    """After a change: ``make reference``."""
    assert (DOCS / "schemas" / name).read_text() == reference.published_schemas()[name]


@pytest.mark.parametrize("name", drawings.files())
def test_a_drawing_is_what_its_script_draws(name: str) -> None:
    """After a change: ``make reference``."""
    assert (DOCS / "assets" / name).read_text() == drawings.files()[name]


def test_every_error_class_has_an_entry() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ZeroElasticError)
    }
    assert len(classes) > 15
    assert {name for name, _ in ENTRIES} == classes


@pytest.mark.parametrize(("name", "builtin"), ENTRIES)
def test_an_entry_says_which_builtin_an_error_refines(name: str, builtin: str) -> None:
    assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_every_environment_variable_has_an_entry() -> None:
    used: set[str] = set()
    for path in (ROOT / "zeroelastic").rglob("*.py"):
        used |= set(re.findall(r"\bZEROELASTIC_[A-Z_]*[A-Z]\b(?!_)", path.read_text()))
    used = {name for name in used if not name.endswith("_H")}
    page = (DOCS / "reference/options.md").read_text()
    listed = set(re.findall(r"`(ZEROELASTIC_[A-Z_]+)`", page))
    assert used <= listed and len(used) >= 5
    assert listed <= used | {"ZEROELASTIC_BUILD_NATIVE", "ZEROELASTIC_BUILD_CUDA"}


def test_every_verb_has_its_part_of_the_page_and_no_other() -> None:
    parts = re.findall(r"^## (\w+)\n+(?:```.*?```\n+)?<!-- generated: (\w+) -->$", CLI, flags=re.MULTILINE | re.DOTALL)
    assert [verb for verb, part in parts if verb == part] == list(VERBS)


def test_the_first_use_of_a_word_becomes_a_link_and_no_other() -> None:
    text = (
        "# The digest\n\n`digest` and ![a digest](a.svg) [digest](b.md)\n\n```text\ndigest\n```\n\nDigests, a digest.\n"
    )
    made = stage.with_glossary(text, {"digest": "digest"}, "../glossary.md")
    assert made == text.replace("Digests", "[Digests](../glossary.md#digest)")
    assert stage.with_glossary(made, {"digest": "digest"}, "../glossary.md") == made


def test_the_page_on_reliability_names_tests_targets_and_results_that_exist() -> None:
    page = (DOCS / "reliability.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) >= 50
    modules = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for file, name in set(named):
        assert re.search(rf"^def {name}\(", modules[file].read_text(), re.MULTILINE), f"{file}::{name}"
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`", page)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for result in re.findall(r"\(\.\./(benchmarks/results/[^)]*)\)", page):
        assert (ROOT / result).exists(), result


# ---- figures and results of front ends ----


@pytest.mark.parametrize("page", figures.TEMPLATES)
def test_a_page_says_what_the_results_say(page: str) -> None:
    """After a measurement: ``make figures``."""
    text = (ROOT / page).read_text()
    assert figures.written(text, figures.TEMPLATES[page], figures.figures()) == text


def test_every_figure_is_used() -> None:
    used = {name for templates in figures.TEMPLATES.values() for line in templates for name in figures.names_in(line)}
    assert used == figures.figures().keys()


FRONT_END_RESULTS = ROOT / "benchmarks/results/front_ends.json"
FRONT_ENDS_PAGE = (ROOT / "docs/guides/front-ends.md").read_text()
FOUND = json.loads(FRONT_END_RESULTS.read_text())["results"]


def test_the_table_is_that_of_the_raw_output() -> None:
    """After `make front-ends`: put benchmarks/results/front_ends.md into the page."""
    assert table(FOUND) == FRONT_END_RESULTS.with_suffix(".md").read_text()
    assert table(FOUND) in FRONT_ENDS_PAGE


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one['front_end']} {one['stage']}")
def test_each_run_is_the_uninterrupted_one(one: dict[str, Any]) -> None:
    whole, *resumed = one["runs"]
    assert [run["ranks"] for run in resumed] == [3, 1] and one["same"]
    for run in resumed:
        for step in range(run["resumed_at"] + 1, 13):
            assert run["samples"][str(step)] == whole["samples"][str(step)]
            assert len(run["samples"][str(step)]) == 6
            assert abs(run["losses"][str(step)] - whole["losses"][str(step)]) <= 0.01
        assert any("active by ZEROELASTIC=1" in line for line in run["said"])


def test_every_front_end_has_results_at_both_stages() -> None:
    assert {(one["front_end"], one["stage"]) for one in FOUND} == {(name, at) for name in FRONT_ENDS for at in (3, 2)}
