"""``"verify": "read"`` shows the whole live state, wherever it lies, without a second pass over any of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from saves import save_each
from training import Job, build_engine

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


def load_each(jobs: Sequence[Job], directory: str) -> list[tuple[bool | None, int]]:
    """Whether the content roots match, and of how many tensors with elements the live state was digested, by job."""
    from zeroelastic.deepspeed.live import digests

    found = []
    for number, job in enumerate(jobs):
        engine = build_engine(job.other())
        with mock.patch.object(digests, "digest_pieces", wraps=digests.digest_pieces) as digested:
            engine.load_checkpoint(f"{directory}/{number}")
        pieces = [piece for call in digested.call_args_list for piece in call.args[0]]
        numels = [piece.tensor.numel() for piece in pieces]
        found.append((engine.zeroelastic_report.root_matches, sum(numel > 0 for numel in numels)))
    return found


def test_nothing_is_digested_that_was_read_to_its_place_and_full_digests_all(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_each, 2, list(JOBS.values()), str(tmp_path), before=2, after=0, timeout=300)
    for found in rank_pool.run(load_each, 3, list(JOBS.values()), str(tmp_path), timeout=300):
        assert dict(zip(JOBS, found, strict=True)) == dict.fromkeys(JOBS, (True, 0))
    full = [replace(JOB, options={"verify": "full"})]
    assert all(matches and count > 5 for ((matches, count),) in rank_pool.run(load_each, 2, full, str(tmp_path)))
