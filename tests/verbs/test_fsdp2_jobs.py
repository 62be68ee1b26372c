"""Jobs go from FSDP2 to ZeRO and back at other numbers of ranks: state to the bit, losses of the uninterrupted run."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from extended import with_swept
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from training import GLOBAL_BATCH, LOSS_RTOL, VOCABULARY, Job, build_model, build_optimizer, resume, train_and_save

import zeroelastic
from zeroelastic.testing import RankPool

Losses = list[float]


class FsdpJob:
    """A model under FSDP2 in bf16 mixed precision, with its optimizer and scheduler."""

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> FsdpJob:
        """A job whose model is under FSDP2 already."""
        self = cls.__new__(cls)
        self.model, self.optimizer = model, optimizer
        return self

    def __init__(self, job: Job) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model: torch.nn.Module = build_model(job)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = build_optimizer(job, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 8))

    def step(self, step: int) -> float:
        """One optimizer step on the global batch of ``step``, as ``training.train_step``."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 5), generator=generator)
        part = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = self.model(part, part.roll(1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total / dist.get_world_size())

    def state_dict(self, *, flat: bool = False) -> dict[str, Any]:
        """What a job saves, and what it loads into."""
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer, options=options),
            "lr_scheduler": self.schedule.state_dict(),
        }

    def load(self, directory: Path, *, flat: bool = False) -> None:
        """Load as a user does: into the state dict of the job, by torch's own reader."""
        state = self.state_dict(flat=flat)
        dcp.load(state, checkpoint_id=directory)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=options)
        self.schedule.load_state_dict(state["lr_scheduler"])

    def look(self) -> dict[str, str]:
        """Weights and optimizer state of the trained parameters by their bits, as ``training.gathered`` has them."""
        found: dict[str, str] = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                values = {"fp32": param.detach(), **self.optimizer.state[param]}
                for key, value in values.items():
                    if key != "step":
                        found[f"{name}/{key}"] = hashed(value)
        return found

    def steps(self) -> set[float]:
        """Every ``step`` of the optimizer."""
        return {float(state["step"]) for state in self.optimizer.state.values()}


def hashed(value: torch.Tensor) -> str:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    raw = whole.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{whole.dtype}:{hashlib.sha256(raw).hexdigest()}"


def fsdp_train_and_save(
    job: Job, directory: str, before: int = 3, after: int = 2, flat: bool = False
) -> tuple[dict[str, str], Losses]:
    """The state that was saved after some steps, and the losses of the uninterrupted run."""
    run = FsdpJob(job)
    for step in range(before):
        run.step(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(run.state_dict(flat=flat), checkpoint_id=directory)
    return run.look(), [run.step(step) for step in range(before, before + after)]


def fsdp_resume(
    job: Job, directory: str, before: int = 3, after: int = 2, flat: bool = False
) -> tuple[dict[str, str], Losses, list[dict[str, Any]], set[float]]:
    """What was loaded, the losses after it, the optimizer's options, and its steps."""
    run = FsdpJob(job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.load(Path(directory), flat=flat)
    options = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    steps = run.steps()
    return run.look(), [run.step(step) for step in range(before, before + after)], options, steps


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
