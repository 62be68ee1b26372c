"""Campaigns at a small size: kills (`make crash`) and damage (`make damage`), whose long results are committed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from extended import with_swept
from places import ROOT

from zeroelastic.testing import RankPool

sys.path.insert(0, str(ROOT / "benchmarks"))

from crash_memory import Campaign
from crash_reshard import campaign as kill_reshards
from crash_training import campaign as kill_jobs
from damage import LOADED, SAVED, Damage, choose, load_all, regions, save, verdict
from damage import campaign as damage_each
from report import words_of_lines


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", with_swept((2, 6), {6}))
def test_a_job_with_checkpoints_in_memory_goes_on_after_kills(kills: int) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/crash_memory.py"), "--kills", str(kills), "--kind", "copies"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == kills and result["files_left_in_memory"] == 0
    resumed = sum(count for what, count in result["outcomes"].items() if what.startswith("resumed from memory"))
    assert resumed >= kills - 1


@pytest.mark.timeout(300)
def test_a_node_that_is_late_at_the_rendezvous_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three nodes dies while another's agent is stopped: the third starts alone, without what only these had."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("ZEROELASTIC_MEMORY_DIR", str(memory))
    job = Campaign(tmp_path, "copies", random.Random(0))
    until, nodes = time.monotonic() + 120, list(job.cluster.nodes)
    try:
        job.cluster.reach("three ranks", until, lambda: words_of_lines(tmp_path / "resumes")[-1][3] == "3")
        begun = len(words_of_lines(tmp_path / "steps"))
        job.cluster.reach("three steps", until, lambda: len(words_of_lines(tmp_path / "steps")) >= begun + 3)
        _, late, lost = nodes
        late.agent.send_signal(signal.SIGSTOP)
        job.cluster.nodes.remove(lost)
        lost.kill()
        reached = int(words_of_lines(tmp_path / "steps")[-1][0])
        before = len(words_of_lines(tmp_path / "resumes"))
        log = tmp_path / "node0.log"
        job.cluster.reach("a start without it", until, lambda: "nodes that may be late" in log.read_text())
        late.agent.send_signal(signal.SIGCONT)
        job.cluster.reach("the next start", until, lambda: len(words_of_lines(tmp_path / "resumes")) > before)
    finally:
        job.close()
    tier, step, found, size = words_of_lines(tmp_path / "resumes")[before]
    assert (tier, size) == ("memory", "2") and reached - int(step) <= 1
    assert found in [state for number, state in words_of_lines(tmp_path / "steps") if number == step]


def test_the_committed_campaign_of_memory_has_so_many_kills() -> None:
    result = json.loads((ROOT / "benchmarks/results/crash_memory.json").read_text())
    outcomes = result["outcomes"]
    assert result["kills"] >= 200 and result["files_left_in_memory"] == 0
    assert min(outcomes["a node killed"], outcomes["a worker killed"]) >= 50
    assert min(outcomes[f"killed during the {phase}"] for phase in ("copy", "exchange", "swap")) >= 25
    assert {(job["kind"], job["stage"]) for job in result["jobs"]} == {("copies", 3), ("parity", 2)}
    assert not [what for what in outcomes if what.endswith("steps lost, from memory") and what[0] not in "01"]


def test_a_killed_training_job_resumes_at_another_size_from_a_whole_checkpoint(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    result = kill_jobs(tmp_path, rank_pool, kills=4, seed=3, stage=3)
    outcomes = result["outcomes"]
    assert isinstance(outcomes, dict) and outcomes["killed while saving"] >= 1
    assert outcomes["resumed on 2 ranks"] + outcomes["resumed on 3 ranks"] >= 2


@pytest.mark.parametrize("stages", [(3, 3), (2, 3)])
def test_a_kill_leaves_no_target_or_a_whole_one_and_the_source_as_it_was(
    tmp_path: Path, stages: tuple[int, int]
) -> None:
    result = kill_reshards(tmp_path, kills=6 if stages == (3, 3) else 3, seed=3, world_size=8, stages=stages)
    outcomes = result["outcomes"]
    assert isinstance(outcomes, dict)
    assert outcomes["absent"] + outcomes["complete"] == result["kills"]
    assert outcomes["resumed"] >= 1 or stages != (3, 3)  # of three kills, none may come in the middle


CAMPAIGNS = {"crash_training": 200, "crash_training_stage2": 60}
RESHARDS = {"crash_reshard": 50, "crash_reshard_stage3_to_stage2": 50, "crash_reshard_stage2_to_stage3": 25}


@pytest.mark.parametrize(("name", "kills"), [*CAMPAIGNS.items(), *RESHARDS.items()])
def test_the_committed_campaign_has_so_many_kills(name: str, kills: int) -> None:
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    outcomes = result["outcomes"]
    assert result["kills"] >= kills
    if name in RESHARDS:
        assert outcomes["absent"] >= kills // 2 and max(result["ranks_taken_over"]) >= 5
        return
    assert outcomes["killed while saving"] >= kills // 2
    resumed = sum(outcomes.get(f"resumed on {size} ranks", 0) for size in (2, 3))
    assert resumed + outcomes.get("no save yet", 0) == result["kills"]


DETECTED = {"tensor", "pickle", "directory", "header", "small record", "frozen fragment", "text"}
"""Parts of files in which no bit may be flipped unnoticed, where the file is one that the run reads as a whole."""


@pytest.mark.support(
    "Checkpoint engines and storage",
    "any damage of a checkpoint",
    "refused",
    "a file is named; unused bytes may differ",
)
@pytest.mark.parametrize(
    ("stage", "slices"),
    [(3, ""), (2, ""), (3, "AutoTP"), pytest.param(3, "AutoEP", marks=pytest.mark.sweep), (2, "MoE")],
)
def test_damage_of_every_class_is_noticed_or_harmless(
    rank_pool: RankPool, tmp_path: Path, stage: int, slices: str
) -> None:
    sizes = {"flips": 40, "truncations": 25, "blocks": 3, "seed": 11, "only": 24}
    result = damage_each(rank_pool, tmp_path, **sizes, stage=stage, slices=slices)
    assert result["failed"] == [] and result["damages"] == 24
    assert {row["damage"] for row in result["counts"]} == {
        "flip", "truncate", "zero", "swap", "older", "of another run",
    }  # fmt: skip


def test_the_campaign_would_see_damage_that_is_loaded(rank_pool: RankPool, tmp_path: Path) -> None:
    """Without verification: damaged tensors are loaded, and a file that is not damaged is not named."""
    pristine, work = tmp_path / "pristine", tmp_path / "work"
    rank_pool.run(save, SAVED, str(pristine), 1.0, 3)
    shutil.copytree(pristine, work)
    places = regions(pristine)
    largest = {kind: max(found, key=lambda place: place[2], default=None) for kind, found in places.items()}
    damages = [
        Damage("flip", ": ".join(kind), *largest[kind][:2], 1)
        for kind in (("optimizer", "tensor"), ("model", "buffer"), ("model", "frozen fragment"))
    ]
    ranks = rank_pool.run(load_all, LOADED, str(work), str(pristine), damages, 3, "off")
    verdicts = [verdict(damage, outcomes) for damage, outcomes in zip(damages, zip(*ranks, strict=True), strict=True)]
    assert [text.partition(":")[0] for text in verdicts] == ["FAILED"] * 3, verdicts
    named = [("error", "CheckpointError", "another.pt: is damaged")] * LOADED
    assert verdict(damages[0], named).startswith("FAILED: names no damaged file")
    assert verdict(damages[0], [("foreign", "KeyError", damages[0].file)] * LOADED).startswith("FAILED")
    assert verdict(damages[0], [named[0], ("state of global_step3", "", "")]).startswith("FAILED: the ranks differ")
    chosen = choose(pristine, pristine, flips=40, truncations=5, blocks=3, seed=11)
    assert chosen == choose(pristine, pristine, flips=40, truncations=5, blocks=3, seed=11), "the seed does not decide"


@pytest.mark.parametrize(
    ("name", "flips", "truncations"),
    [("damage", 1000, 200), ("damage_stage2", 400, 80)],
)
def test_the_committed_campaign_missed_nothing(name: str, flips: int, truncations: int) -> None:
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    rows = result["raw"]
    counts = Counter(row[0] for row in rows)
    assert counts["flip"] >= flips and counts["truncate"] >= truncations
    assert {row[0] for row in rows} == {"flip", "truncate", "zero", "swap", "older", "of another run"}
    assert result["failed"] == [] and {row[6] for row in rows} == {"detected", "warned", "harmless"}
    harmless = {(row[1], row[2]) for row in rows if row[6] == "harmless"}
    # At stage 2 each file is read, and a directory ends with fields that say nothing of what is in it.
    parts = DETECTED - {"directory"} if name.endswith("stage2") else DETECTED
    whole = {file for where, file in harmless if where.partition(": ")[2] in parts}
    last = f"zero_pp_rank_{SAVED - 1}_mp_rank_00_model_states.pt"
    assert all(file.endswith(last) for file in whole), "only of the rank that is no more"
