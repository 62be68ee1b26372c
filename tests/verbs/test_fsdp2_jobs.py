"""Jobs go from FSDP2 to ZeRO and back at other numbers of ranks: state to the bit, losses of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from extended import with_swept
from fsdp_job import FsdpJob, fsdp_resume, fsdp_train_and_save
from training import LOSS_RTOL, Job, build_model, build_optimizer, resume, train_and_save

import zeroelastic
from zeroelastic.testing import RankPool

SHOWN = pytest.mark.support(
    "Using it",
    "From FSDP2 and to FSDP2, with the optimizer (`convert`)",
    "exact",
    "state to the bit, losses of the uninterrupted run; torch and accelerate load what is written",
)


@SHOWN
def test_a_job_of_fsdp2_on_2_ranks_goes_on_as_zero_3_on_3(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job()
    saved, losses = rank_pool.run(fsdp_train_and_save, 2, job, str(tmp_path / "fsdp"))[0]
    report = zeroelastic.convert(tmp_path / "fsdp", tmp_path / "native", from_="fsdp2", world_size=3)
    outcome = rank_pool.run(resume, 3, job.other(), str(tmp_path / "native"))[0]
    assert outcome.gathered == saved
    assert set(outcome.steps[0]) == {3.0}
    torch.testing.assert_close(outcome.losses, losses, rtol=LOSS_RTOL["bf16"], atol=0)
    assert zeroelastic.verify(tmp_path / "native").content_root == report.content_root


@SHOWN
def test_a_zero_2_job_on_3_ranks_goes_on_as_fsdp2_on_2(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(stage=2)
    saved = rank_pool.run(train_and_save, 3, job, str(tmp_path / "native"))[0]
    zeroelastic.convert(tmp_path / "native", tmp_path / "fsdp", to="fsdp2")
    found, losses, options, steps = rank_pool.run(fsdp_resume, 2, job.other(), str(tmp_path / "fsdp"))[0]
    assert found == saved.gathered and steps == {3.0}
    torch.testing.assert_close(losses, saved.losses, rtol=LOSS_RTOL["bf16"], atol=0)
    assert [group["weight_decay"] for group in options] == [0.1, 0.0]
    assert [group["betas"] for group in options] == [(0.8, 0.95)] * 2


def load_with_accelerate(job: Job, directory: str, target: str) -> tuple[dict[str, str], set[float], list[float]]:
    """What accelerate's ``load_state`` puts into a job of FSDP2, which it saves again by ``save_state``."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    # accelerate takes FSDP for GPUs alone; all that it does with checkpoints is the same on a CPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    plugin.set_mixed_precision("bf16")
    model = build_model(job)
    model, optimizer = accelerator.prepare(model, build_optimizer(job, model))
    accelerator.load_state(directory)
    run = FsdpJob.of(model, optimizer.optimizer)
    accelerator.save_state(target)
    return run.look(), run.steps(), [group["lr"] for group in optimizer.param_groups]


@pytest.mark.extended
@SHOWN
@pytest.mark.parametrize("stage", with_swept((2, 3), {2}))
def test_accelerate_loads_what_is_written_and_what_it_saves_comes_back(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    job = Job(stage=stage)
    saved = rank_pool.run(train_and_save, 3, job, str(tmp_path / "native"))[0]
    zeroelastic.convert(tmp_path / "native", tmp_path / "fsdp", to="fsdp2", layout="accelerate")
    places = (str(tmp_path / "fsdp"), str(tmp_path / "again"))
    found, steps, rates = rank_pool.run(load_with_accelerate, 2, job.other(), *places)[0]
    assert found == saved.gathered and steps == {3.0}
    with zeroelastic.open(tmp_path / "native") as ck:
        assert rates == [group.options["lr"] for group in ck.groups]
    back = zeroelastic.convert(tmp_path / "again", tmp_path / "back", from_="fsdp2", world_size=4)
    here = str(tmp_path / "back")
    outcome = rank_pool.run(resume, 4, job.other(stage=3), here, load_lr_scheduler_states=False)[0]
    assert outcome.gathered == saved.gathered and back.content_root
