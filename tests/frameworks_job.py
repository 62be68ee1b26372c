"""The training jobs of the tests of accelerate and Lightning: functions that run on pooled ranks, and what they saw."""

from __future__ import annotations

import json
import logging
import os
import random
import runpy
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

WIDTH, SAMPLES = 8, 48


class Rows(Dataset):
    """Rows of numbers that follow from their index."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return row, torch.tensor(index)


class Net(torch.nn.Module):
    """Small, with parameters of fewer elements than ranks, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 33), torch.nn.Linear(33, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("batches_seen", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(rows))) * self.scale
        return (out + 0.1 * self.frozen(out) - rows[:, :3]).square().mean()


def groups(model: torch.nn.Module, lr: float) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1, "lr": lr},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "lr": lr / 3},
    ]


@dataclass(frozen=True)
class AccelerateJob:
    """One run of accelerate; picklable."""

    micro: int = 2
    accumulation: int = 1
    schedule: str = "lambda"
    options: dict[str, Any] = field(default_factory=lambda: {"strict": True})
    seed: int = 3
    shuffle: bool = True

    def at(self, world_size: int, global_batch: int = 24) -> AccelerateJob:
        """The same job with a micro batch that keeps the global batch."""
        return replace(self, micro=global_batch // world_size // self.accumulation)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run: its state, then the learning rate and the samples of each step, and what was said."""

    state: dict[str, Any]
    step: int
    rates: list[float]
    samples: list[list[int]]
    losses: list[float]
    draws: tuple[Any, ...]
    said: list[str]
    notes: tuple[str, ...] = ()
    error: tuple[str, str] = ("", "")


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")


def listen() -> list[str]:
    """What zeroelastic says from now on."""
    listener = Listener()
    log = logging.getLogger("zeroelastic")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    return listener.said


def schedule_of(kind: str, optimizer: torch.optim.Optimizer, world_size: int) -> Any:
    from torch.optim import lr_scheduler

    if kind == "lambda":  # written for accelerate: its lengths are multiplied by the number of processes
        return lr_scheduler.LambdaLR(optimizer, lambda tick: max(0.05, 1 - tick / (20 * world_size)))
    if kind == "fixed lambda":  # written without a thought of it
        return lr_scheduler.LambdaLR(optimizer, lambda tick: max(0.05, 1 - tick / 60))
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * world_size)
    assert kind == "one cycle"
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=20 * world_size)


def prepare(job: AccelerateJob) -> tuple[Any, Any, Any, Any, Any]:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed

    import zeroelastic

    zeroelastic.install()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": job.accumulation,
        "zero_optimization": {
            "stage": 3,
            "elastic_checkpoint": True,
            "sub_group_size": 150,
            "stage3_param_persistence_threshold": 40,
        },
        "zeroelastic": job.options,
    }
    accelerator = Accelerator(
        gradient_accumulation_steps=job.accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    set_seed(job.seed, device_specific=True)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = Net()
    optimizer = torch.optim.AdamW(groups(model, 1e-2))
    schedule = schedule_of(job.schedule, optimizer, dist.get_world_size())
    loader = DataLoader(Rows(), batch_size=job.micro, shuffle=job.shuffle)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def accelerate_steps(parts: tuple[Any, ...], steps: int) -> tuple[list[float], list[list[int]], list[float]]:
    """Train up to optimizer step ``steps``, from wherever the engine stands."""
    from zeroelastic.integrations.accelerate import remaining_epochs

    accelerator, model, optimizer, loader, schedule = parts
    rates, samples, losses = [], [], []
    seen: list[int] = []
    part = 0.0
    if model.global_steps >= steps:
        return rates, samples, losses
    for _, batches in remaining_epochs(accelerator, loader, 10):
        for rows, index in batches:
            with accelerator.accumulate(model):
                loss = model(rows)
                accelerator.backward(loss)
                optimizer.step()
                rate = optimizer.param_groups[0]["lr"]
                schedule.step()
            seen += accelerator.gather(index).tolist()
            part += accelerator.gather(loss.detach().double()).mean().item()
            if accelerator.sync_gradients:
                rates.append(rate)
                samples.append(sorted(seen))
                losses.append(part / accelerator.gradient_accumulation_steps)
                seen, part = [], 0.0
                if model.global_steps >= steps:
                    return rates, samples, losses
    raise AssertionError("the epochs ended too early")


def accelerate_run(
    job: AccelerateJob, steps: int, *, load: str | None = None, save: tuple[int, str] | None = None, extra: int = 0
) -> Seen:
    """Build, load, look, train up to ``steps`` and save at a step on the way; ``extra`` micro-steps before the save."""
    from zeroelastic.testing import fingerprint, gather_state

    warnings.simplefilter("ignore")
    said = listen()
    parts = prepare(job)
    accelerator, model, *_ = parts
    before = fingerprint(gather_state(model))
    if load is not None:
        try:
            accelerator.load_state(load)
        except Exception as error:
            assert fingerprint(gather_state(model)) == before, "a load that was refused changed the live state"
            return Seen({}, accelerator.step, [], [], [], (), said, error=(type(error).__name__, str(error)))
    state = fingerprint(gather_state(model))
    step = accelerator.step
    draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
    history: tuple[list[Any], ...] = ([], [], [])
    for stop in sorted({steps, *([save[0]] if save else [])}):
        for old, new in zip(history, accelerate_steps(parts, stop), strict=True):
            old += new
        if save is not None and stop == save[0]:
            for _ in range(extra):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(job.micro, WIDTH)))
            state = fingerprint(gather_state(model))
            accelerator.save_state(save[1])
            draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
    report = getattr(model, "zeroelastic_report", None)
    return Seen(state, step, *history, draws, said, report.notes if report is not None else ())


def run_script(script: str, arguments: list[str]) -> None:
    """Run an example as ``__main__`` on this rank, as a launcher would have it run."""
    warnings.simplefilter("ignore")
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(dist.get_world_size()), str(dist.get_rank())
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def read_history(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
