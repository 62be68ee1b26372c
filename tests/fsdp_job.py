"""The training job of the end-to-end tests (``training``) under FSDP2, saved and loaded by torch's own DCP.

The model, the batches, the optimizer groups, the clipping and the schedule are the same, so the losses are those of the
ZeRO run up to rounding. Functions run on ranks.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from training import GLOBAL_BATCH, VOCABULARY, Job, build_model, build_optimizer

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
