"""Runs, targets and reports with names as long as a file system allows, beside which hidden names are made."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_command
from sample import write_sample

import zeroelastic
from zeroelastic.verbs.new_directory import staging_of, sweep

LONG = "é" * 127
"""254 bytes."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_sample(tmp_path / LONG, hidden=8)
    return tmp_path / LONG


def test_a_run_with_a_long_name_is_listed_and_pruned(run: Path) -> None:
    assert [tag.status for tag in zeroelastic.ls(run).tags] == ["committed"] * 2
    assert zeroelastic.prune(run, keep=1, dry_run=False).removed == ("global_step2",)


def test_targets_with_long_names_are_made(run: Path, tmp_path: Path) -> None:
    made = tmp_path / f"{LONG[:-1]}b"
    assert zeroelastic.reshard(run, made, world_size=3).content_root == zeroelastic.verify(run).content_root
    zeroelastic.export(run, tmp_path / f"{LONG[:-1]}c")
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["b", "c", "é"]


def test_hidden_names_of_long_targets_that_begin_alike_are_not_one(tmp_path: Path) -> None:
    one, other = tmp_path / f"{LONG}a", tmp_path / f"{LONG}b"
    one.mkdir()
    for target in (one, other):
        staging_of(target).mkdir()
    sweep(tmp_path)  # what is left of targets that are there
    assert not staging_of(one).exists() and staging_of(other).exists()


def test_a_report_with_a_long_name_is_written(run: Path, tmp_path: Path) -> None:
    page = tmp_path / f"{'x' * 250}.html"
    done = run_command("verify", run, "--html", page)
    assert done.returncode == 0 and page.stat().st_size > 0
