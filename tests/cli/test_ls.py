"""``zeroelastic ls``: every checkpoint of a run, with what saved it and its status."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from places import GOLDEN
from programs import run_command

import zeroelastic


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of seven tags: committed, of DeepSpeed at stages 3, 2 and 1, without a file, damaged, and Universal."""
    root = tmp_path / "run"
    sources = {
        "global_step2": "elastic2",
        "global_step3": "rigid3",
        "global_step4": "stage2_rank2",
        "global_step5": "stage1_bf16_optimizer_rank2",
        "global_step6": "elastic3",
        "global_step7": "elastic2",
    }
    for tag, golden in sources.items():
        shutil.copytree(GOLDEN / golden / "global_step2", root / tag)
    next((root / "global_step6").glob("*rank_1_*optim_states.pt")).unlink()
    (root / "global_step8/zero").mkdir(parents=True)
    for name in ("zero/optimizer_state.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (root / "global_step8" / name).touch()
    (root / "latest").write_text("global_step2")
    return root


def test_every_tag_is_listed_with_what_saved_it_and_its_status(run: Path) -> None:
    found = {tag.tag: tag for tag in zeroelastic.ls(run).tags}
    facts = {name[-1]: (tag.world_size, tag.stage, tag.status, tag.latest) for name, tag in found.items()}
    assert facts == {
        "2": (2, 3, "committed", True),
        "3": (3, 3, "no record", False),
        "4": (2, 2, "no record", False),
        "5": (2, 1, "no record", False),
        "6": (3, 3, "incomplete", False),
        "7": (2, 3, "committed", False),
        "8": (1, None, "universal", False),
    }
    whole = found["global_step2"]
    assert whole.bytes == sum(file.stat().st_size for file in (run / "global_step2").iterdir())
    assert whole.step == 2 and whole.saved_at is not None and whole.path == str(run / "global_step2")


def test_for_people_it_is_a_table(run: Path) -> None:
    lines = run_command("ls", run).stdout.splitlines()
    assert lines[0].split() == ["tag", "step", "ranks", "stage", "size", "saved", "status"] and len(lines) == 8
    (line,) = [line for line in lines if line.startswith("global_step2 ")]
    assert re.fullmatch(r"global_step2 +2 +2 +3 +[\d.]+ KiB  [-\d]{10} [:\d]{8}  committed, latest", line)


def test_the_document_names_the_directory_and_its_latest(run: Path) -> None:
    found = json.loads(run_command("ls", run, "--json").stdout)
    assert found["latest"] == "global_step2" and found["directory"] == str(run)
