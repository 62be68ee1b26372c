"""zeroelastic.report: a few lines that say what happened, and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import logged
from training import GLOBAL_BATCH, Job, build_engine, initialize, train_and_save

from zeroelastic import ResumeReport
from zeroelastic.testing import RankPool

REPORT = ResumeReport(
    path="ckpt/global_step10",
    format="elastic",
    saved_world_size=4,
    world_size=3,
    bytes_owned=3 << 20,
    bytes_read=3 << 20,
    header_bytes=2048,
    files_opened=4,
    total_bytes_read=9 << 20,
    seconds=1.234,
    saved_root="a" * 64,
    loaded_root="a" * 64,
    root_matches=True,
    exact=("weights", "optimizer state"),
    rederived=(),
    reset=("client state of rank 3",),
    notes=("GLOBAL BATCH CHANGED from 8 to 6",),
)


def test_the_whole_report():
    assert REPORT.text() == (
        "resumed ckpt/global_step10 (elastic): 4 -> 3 ranks in 1.23 s; content root aaaaaaaaaaaa is the saved one "
        "(verify: read)\n"
        "  worst rank: owns 3 MiB, read 3 MiB + 2 KiB of headers from 4 files\n"
        "  exact: weights; optimizer state\n"
        "  not restored: client state of rank 3\n"
        "  note: GLOBAL BATCH CHANGED from 8 to 6"
    )


@pytest.mark.parametrize(
    ("changes", "proof"),
    [
        ({"root_matches": None, "saved_root": None}, "content root aaaaaaaaaaaa (not compared)"),
        ({"root_matches": None, "saved_root": None, "loaded_root": None}, "content not verified"),
    ],
)
def test_it_claims_no_more_than_was_verified(changes, proof):
    first = dataclasses.replace(REPORT, **changes).text().splitlines()[0]
    assert first.endswith(proof) and "is the saved one" not in first


def test_empty_lists_take_no_line():
    report = dataclasses.replace(REPORT, exact=(), reset=(), notes=())
    assert len(report.text().splitlines()) == 2


def test_it_is_plain_json():
    """With sizes of other groups of ranks only where slices of tensors were loaded."""
    data = json.loads(json.dumps(REPORT.to_dict()))
    assert {*data, "topology"} == {field.name for field in dataclasses.fields(REPORT)} != {*data}
    sliced = dataclasses.replace(REPORT, topology="data parallel 2 -> 4")
    assert sliced.to_dict()["topology"] == "data parallel 2 -> 4"
    assert "\n  data parallel 2 -> 4\n" in sliced.text()
    assert data["exact"] == ["weights", "optimizer state"] and data["root_matches"] is True


def plain_engine(precision: str) -> Any:
    """An engine of a model without buffers."""
    model = torch.nn.Linear(8, 8)
    optimizer, zero = torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3, "elastic_checkpoint": True}
    return initialize(model, zero, optimizer=optimizer, train_batch_size=6, bf16={"enabled": precision == "bf16"})


def save_plain(directory: str, precision: str, client_state: dict[str, int]) -> None:
    plain_engine(precision).save_checkpoint(directory, client_state=client_state)


def load_plain(directory: str, precision: str, **load: bool) -> ResumeReport:
    engine = plain_engine(precision)
    engine.load_checkpoint(directory, **load)
    report: ResumeReport = engine.zeroelastic_report
    return report


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_neither_the_model_nor_the_save_has_is_not_reported_as_lost(
    rank_pool: RankPool, tmp_path: Path, precision: str
) -> None:
    rank_pool.run(save_plain, 2, str(tmp_path / "none"), precision, {})
    rank_pool.run(save_plain, 2, str(tmp_path / "some"), precision, {"epoch": 1})
    fewer = rank_pool.run(load_plain, 1, str(tmp_path / "none"), precision)[0]
    more = rank_pool.run(load_plain, 3, str(tmp_path / "none"), precision)[0]
    weights = ("16-bit weights from the fp32 master weights",) if precision == "bf16" else ()
    assert fewer.reset == () and more.rederived == fewer.rederived == weights
    fewer = rank_pool.run(load_plain, 1, str(tmp_path / "some"), precision, load_optimizer_states=False)[0]
    assert fewer.reset == (
        "optimizer state and hyper-parameters (not asked for)",
        "client state of saved rank 1 (no longer there)",
    )
    more = rank_pool.run(load_plain, 3, str(tmp_path / "some"), precision)[0]
    assert more.rederived == (*weights, "client state of rank 2 from saved rank 0")


def batch_lines(directory: str) -> list[str]:
    """What a load logs of the global batch."""
    engine = build_engine(Job())
    said = logged("deepspeed.load.load")
    engine.load_checkpoint(directory)
    return [line for line in said if "global batch" in line]


@pytest.mark.quick
def test_a_kept_global_batch_is_logged_at_another_size(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path))
    each = GLOBAL_BATCH // 3
    kept = f"global batch {GLOBAL_BATCH} as before (micro batch {each} x 3 ranks x 1 accumulated)"
    assert rank_pool.run(batch_lines, 3, str(tmp_path)) == [[f"resumed on 3 ranks from 2: {kept}"], [], []]
    assert rank_pool.run(batch_lines, 2, str(tmp_path)) == [[], []]
