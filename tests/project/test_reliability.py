"""docs/reliability.md has the figures of the campaigns, and names tests that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from reliability import CAMPAIGNS, NOT_RUN, PAGE, RESULTS, figures, plain, written


def test_the_page_has_the_figures_of_the_raw_results() -> None:
    page = PAGE.read_text()
    assert page == written(page, RESULTS), "make reliability"


def test_the_page_names_tests_and_targets_that_exist() -> None:
    page = PAGE.read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) >= 50
    modules = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for file, name in set(named):
        assert re.search(rf"^def {name}\(", modules[file].read_text(), re.MULTILINE), f"{file}::{name}"
    makefile = (ROOT / "Makefile").read_text()
    without_result = {campaign.target for campaign in CAMPAIGNS if not (RESULTS / f"{campaign.name}.json").exists()}
    for target in set(re.findall(r"`make ([\w-]+)`", page)):
        assert f"make {target}" in without_result or re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_what_was_not_run_is_said_and_a_changed_figure_shows(tmp_path: Path) -> None:
    assert figures(tmp_path).count(NOT_RUN) == len(CAMPAIGNS)
    result = json.loads((RESULTS / "crash_reshard.json").read_text())
    (tmp_path / "crash_reshard.json").write_text(json.dumps({**result, "kills": 4711}))
    assert "4711 kills" in figures(tmp_path) and figures(tmp_path).count(NOT_RUN) == len(CAMPAIGNS) - 1
    page = tmp_path / "page.md"
    shutil.copy(PAGE, page)
    command = [sys.executable, ROOT / "benchmarks/reliability.py", "--page", page, "--results", tmp_path]
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 1 and "make reliability" in checked.stderr
    subprocess.run(command, timeout=60, check=True)
    assert "4711 kills" in page.read_text()
    subprocess.run([*command, "--check"], timeout=60, check=True)
    with pytest.raises(ValueError, match="the page has no"):
        written("# A page", tmp_path)


def test_damage_is_added_up_by_kind() -> None:
    rows = [
        {"damage": "flip", "where": "a", "detected": 900, "warned": 2, "harmless": 3, "FAILED": 0},
        {"damage": "flip", "where": "b", "detected": 95, "warned": 0, "harmless": 0, "FAILED": 0},
        {"damage": "swap", "where": "a", "detected": 6, "warned": 0, "harmless": 0, "FAILED": 1},
    ]
    sentences = next(campaign.sentences for campaign in CAMPAIGNS if campaign.name == "damage")
    lines = sentences({"seed": 0, "saved_on": 3, "loaded_on": 2, "counts": rows})
    assert lines[0].endswith("1,007: 1,001 detected, 2 warned, 3 harmless, 1 failed")
    assert lines[1:] == [
        "flip: 1,000: 995 detected, 2 warned, 3 harmless, 0 failed",
        "swap: 7: 6 detected, 0 warned, 0 harmless, 1 failed",
    ]


def test_a_result_of_another_form_is_listed_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "damage.json").write_text(json.dumps({"damages": 12, "seed": 3}))
    assert "* damages: 12\n* seed: 3\n" in figures(tmp_path)


def test_kills_are_added_up_over_jobs() -> None:
    sentences = next(campaign.sentences for campaign in CAMPAIGNS if campaign.name == "crash_training")
    job = {"seed": 0, "minutes": 1.5, "steps_trained": 600, "errors_of_surviving_ranks": {"AbsentRankError": 2}}
    result = {"kills": 200, "ranks": 4, "outcomes": {"resumed": 9}}
    for found, counted in (({**result, **job}, 2), ({**result, "jobs": [job, {**job, "seed": 1}]}, 4)):
        lines = sentences(found)
        assert lines[0].startswith(f"200 kills of one rank or all of 4, seed {'0' if counted == 2 else '0, 1'}, in")
        assert lines[1:] == ["outcomes: resumed 9", f"errors of ranks that survived: AbsentRankError {counted}"]


def test_an_unknown_result_is_listed_as_it_is() -> None:
    result = {
        "machine": {"cpu": "x"},
        "kills": 1200,
        "found": {"a": 1, "b": 2},
        "rows": [{"n": 3, "raw": [1]}],
        "raw": [1],
    }
    assert plain(result) == ["kills: 1,200", "found: a 1, b 2", "rows: n 3"]
