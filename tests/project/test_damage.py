"""A little of the damage campaign of benchmarks/damage.py, whose full run is committed with its results."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT

from zeroelastic.testing import RankPool

sys.path.insert(0, str(ROOT / "benchmarks"))

from damage import LOADED, SAVED, Damage, campaign, choose, load_all, regions, save, verdict

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
    result = campaign(rank_pool, tmp_path, **sizes, stage=stage, slices=slices)
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
    told = [verdict(damage, outcomes) for damage, outcomes in zip(damages, zip(*ranks, strict=True), strict=True)]
    assert told == ["FAILED: state of neither tag: "] * 3 or [text.partition(":")[0] for text in told] == ["FAILED"] * 3
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
