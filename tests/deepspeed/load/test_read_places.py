"""``"verify": "read"`` shows the whole live state, wherever it lies, without a second pass over any of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from training import Job, build_engine, train_step

from zeroelastic.testing import RankPool

JOB = Job(options={"verify": "read"})
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
JOBS = {
    "stage 3": JOB,
    "stage 2": replace(JOB, stage=2),
    "stage 3, offloaded": replace(JOB, zero=OFFLOAD),
    "stage 2, offloaded": replace(JOB, stage=2, zero=OFFLOAD),
    "stage 3, fp32": replace(JOB, precision="fp32"),
}


def save(job: Job, directory: str) -> None:
    engine = build_engine(job)
    for step in range(2):
        train_step(engine, step)
    engine.save_checkpoint(directory)


def load(job: Job, directory: str) -> tuple[bool | None, int]:
    """Whether the content roots match, and of how many tensors with elements the live state was digested."""
    from zeroelastic.deepspeed.live import digests

    engine = build_engine(job.other())
    with mock.patch.object(digests, "digest_pieces", wraps=digests.digest_pieces) as digested:
        engine.load_checkpoint(directory)
    pieces = [piece for call in digested.call_args_list for piece in call.args[0]]
    return engine.zeroelastic_report.root_matches, sum(piece.tensor.numel() > 0 for piece in pieces)


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_digested_that_was_read_to_its_place(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save, 2, JOBS[name], str(tmp_path))
    assert set(rank_pool.run(load, 3, JOBS[name], str(tmp_path))) == {(True, 0)}


def test_full_digests_all_of_it(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save, 2, JOB, str(tmp_path))
    results = rank_pool.run(load, 2, replace(JOB, options={"verify": "full"}), str(tmp_path))
    assert all(matches and count > 5 for matches, count in results)
