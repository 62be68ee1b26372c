"""The workflows of .github run what the Makefile and .ci/run have, with the rights that they need and no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_there_is(path: Path) -> None:
    workflow, targets = read(path), re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    made = {
        target for command in commands for words in re.findall(r"\bmake ([\w -]+)", command) for target in words.split()
    }
    assert commands and made <= {*targets}, made
    for name in {name for command in commands for name in re.findall(r"(?:tests|tools|\.ci)/[\w./]+", command)}:
        assert (ROOT / name).exists(), name
    assert all("@" in step["uses"] for step in steps(workflow) if "uses" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_rights_that_it_needs_and_time_limits(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    allowed = {
        "deepspeed-main": {"contents": "read", "issues": "write"},
        "publish": {"id-token": "write"},
    }
    assert all(allowed[name] == rights for name, rights in more.items())


def test_the_matrix_is_what_is_supported() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    versions = re.search(r"^OTHER_DEEPSPEEDS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert versions is not None
    assert sorted(jobs["deepspeed"]["strategy"]["matrix"]["deepspeed"]) == sorted(versions[1].split())
    assert jobs["test"]["strategy"]["matrix"]["python"][0] in (ROOT / "pyproject.toml").read_text()


def test_every_night_has_the_cases_that_make_test_all_leaves_out() -> None:
    ran = [step.get("run") for step in steps(read(ROOT / ".github" / "workflows" / "nightly.yml"))]
    assert ".ci/run" in ran and "make sweep" in ran
