"""Jobs go from FSDP2 to ZeRO and back at other numbers of ranks: state to the bit, losses of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_job import fsdp_resume, fsdp_train_and_save
from training import LOSS_RTOL, Job, resume, train_and_save

import zeroelastic
from zeroelastic.testing import run_ranks

SECTION, FEATURE = "Using it", "From FSDP2 and to FSDP2, with the optimizer (`convert`)"


@pytest.mark.support(
    SECTION,
    FEATURE,
    "exact",
    "state to the bit, losses of the uninterrupted run; torch and accelerate load what is written",
)
def test_a_job_of_fsdp2_on_2_ranks_goes_on_as_zero_3_on_3(tmp_path: Path) -> None:
    job = Job()
    saved, losses = run_ranks(fsdp_train_and_save, 2, job, str(tmp_path / "fsdp"))[0]
    report = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "native", from_="fsdp2", world_size=3)
    outcome = run_ranks(resume, 3, job.other(), str(tmp_path / "native"))[0]
    assert outcome.gathered == saved
    assert set(outcome.steps[0]) == {3.0}
    torch.testing.assert_close(outcome.losses, losses, rtol=LOSS_RTOL["bf16"], atol=0)
    assert zeroelastic.verify(tmp_path / "native").content_root == report.content_root


@pytest.mark.support(
    SECTION,
    FEATURE,
    "exact",
    "state to the bit, losses of the uninterrupted run; torch and accelerate load what is written",
)
def test_a_zero_2_job_on_3_ranks_goes_on_as_fsdp2_on_2(tmp_path: Path) -> None:
    job = Job(stage=2)
    saved = run_ranks(train_and_save, 3, job, str(tmp_path / "native"))[0]
    zeroelastic.convert(tmp_path / "native", tmp_path / "fsdp", to="fsdp2")
    found, losses, options, steps = run_ranks(fsdp_resume, 2, job.other(), str(tmp_path / "fsdp"))[0]
    assert found == saved.gathered and steps == {3.0}
    torch.testing.assert_close(losses, saved.losses, rtol=LOSS_RTOL["bf16"], atol=0)
    assert [group["weight_decay"] for group in options] == [0.1, 0.0]
    assert [group["betas"] for group in options] == [(0.8, 0.95)] * 2
