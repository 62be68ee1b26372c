"""A release besides code: change log and citation of this version, pinned versions, and the workflows."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from places import ROOT

from zeroelastic import __version__


def test_the_changelog_has_notes_of_this_version_below_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](.*)$", text, flags=re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == __version__
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings[1:])


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_pinned_versions_install_on_the_first_release_of_a_python_version() -> None:
    """Linux distributions keep early ones: Debian 12 has 3.11.2, and a package may require 3.11.5."""
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    first = {"python_version": minor, "python_full_version": f"{minor}.0"}
    installed = {package.metadata["Name"].lower().replace("_", "-"): package for package in distributions()}
    compared = 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        package = installed.get(pin.name)
        if package and package.version in pin.specifier and (pin.marker is None or pin.marker.evaluate(first)):
            requires = package.metadata.get("Requires-Python") or ""
            assert first["python_full_version"] in SpecifierSet(requires), f"{line}: requires Python {requires}"
            compared += 1
    assert compared > 100


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
    assert "make native-tests test-all" in ran and "make sweep" in ran
