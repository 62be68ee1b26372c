"""Every learning rate scheduler of torch, and one of a user's own, goes on at another number of ranks.

Under DeepSpeed, accelerate, Lightning and the Trainer: the rates of the steps after the resume are those of the run
that was saved.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks_job import LightningJob, Net, Rows, groups, lightning_trainer, zero_of
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zeroelastic.testing import RankPool

SAVED, AGAIN, LAST = 4, 6, 10
SAVES_AT = {0: SAVED, SAVED: AGAIN, AGAIN: None}
"""The step at which a job saves, by the step from which it goes on."""
GLOBAL_BATCH, SAMPLES = 24, 240
LR = 1e-2


class PrivateScheduler(LRScheduler):
    """A scheduler of a user's own, which has nothing of torch's but the base class, and a state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, length: int) -> None:
        self.optimizer, self._length, self._done = optimizer, length, 0

    def step(self, epoch: Any = None) -> None:
        self._done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LR / (1 + self._done / self._length)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"done": (self._done, self._length)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ((self._done, self._length),) = state.values()


class Decay:
    """The function of a LambdaLR as an object, whose attributes torch saves."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, counter: int) -> float:
        return 1 / (1 + counter / self.length)


def _warmup(optimizer: torch.optim.Optimizer, n: int, first: Any) -> Any:
    return schedulers.SequentialLR(optimizer, [first, schedulers.CosineAnnealingLR(optimizer, 12 * n)], [6 * n])


MAKE: dict[str, Callable[[Any, int], Any]] = {
    "LambdaLR": lambda opt, n: schedulers.LambdaLR(opt, lambda t: 1 / (1 + 0.1 * t / n)),
    "LambdaLR, a fixed function": lambda opt, n: schedulers.LambdaLR(opt, lambda t: 1 / (1 + 0.05 * t)),
    "LambdaLR, an object": lambda opt, n: schedulers.LambdaLR(opt, Decay(10 * n)),
    "MultiplicativeLR": lambda opt, n: schedulers.MultiplicativeLR(opt, lambda t: 0.95),
    "StepLR": lambda opt, n: schedulers.StepLR(opt, 3 * n, 0.5),
    "MultiStepLR": lambda opt, n: schedulers.MultiStepLR(opt, [3 * n, 7 * n], 0.5),
    "ConstantLR": lambda opt, n: schedulers.ConstantLR(opt, 0.1, 7 * n),
    "LinearLR": lambda opt, n: schedulers.LinearLR(opt, 0.1, 1.0, total_iters=8 * n),
    "ExponentialLR": lambda opt, n: schedulers.ExponentialLR(opt, 0.9 ** (1 / n)),
    "SequentialLR": lambda opt, n: _warmup(opt, n, schedulers.LinearLR(opt, 0.1, 1.0, total_iters=6 * n)),
    "SequentialLR of a LambdaLR": lambda opt, n: _warmup(opt, n, schedulers.LambdaLR(opt, lambda t: (t + n) / (9 * n))),
    "CosineAnnealingLR": lambda opt, n: schedulers.CosineAnnealingLR(opt, 12 * n),
    "ChainedScheduler": lambda opt, n: schedulers.ChainedScheduler(
        [schedulers.LinearLR(opt, 0.1, 1.0, total_iters=6 * n), schedulers.ExponentialLR(opt, 0.9 ** (1 / n))], opt
    ),
    "ReduceLROnPlateau": lambda opt, n: schedulers.ReduceLROnPlateau(opt, factor=0.7, patience=n + 1),
    "CyclicLR": lambda opt, n: schedulers.CyclicLR(opt, 1e-3, 1e-2, step_size_up=3 * n, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda opt, n: schedulers.CosineAnnealingWarmRestarts(opt, 5 * n),
    "OneCycleLR": lambda opt, n: schedulers.OneCycleLR(opt, 1e-2, total_steps=LAST * n + 1, cycle_momentum=False),
    "PolynomialLR": lambda opt, n: schedulers.PolynomialLR(opt, 12 * n, 2.0),
    "PrivateScheduler": lambda opt, n: PrivateScheduler(opt, 10 * n),
}
"""Schedulers by name: of an optimizer, and how often they are stepped per optimizer step."""


def metric(name: str) -> tuple[float, ...]:
    """What a scheduler's ``step`` is called with: a loss that does not get better."""
    return (1.0,) if name == "ReduceLROnPlateau" else ()


def rates_of(framework: str, directory: str, names: list[str], start: int) -> dict[str, list[float] | str]:
    """The learning rates of the steps from ``start`` on, or the error of the save or the load, by scheduler."""
    import zeroelastic

    warnings.simplefilter("ignore")
    zeroelastic.install()
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = _JOBS[framework](name, os.path.join(directory, name), start)
        except zeroelastic.ZeroElasticError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _batch(step: int, micro: int) -> torch.Tensor:
    first = step * GLOBAL_BATCH + dist.get_rank() * micro
    return torch.stack([Rows()[index][0] for index in range(first, first + micro)])


def _config(micro: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_of(LightningJob(stage=3)),
        "zeroelastic": {"strict": True},
    }


def _deepspeed(name: str, path: str, start: int) -> list[float]:
    import deepspeed

    micro = GLOBAL_BATCH // dist.get_world_size()
    torch.manual_seed(1 + start)
    net = Net()
    optimizer = torch.optim.AdamW(groups(net, LR))
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=MAKE[name](optimizer, 1), config=_config(micro)
    )
    if start:
        engine.load_checkpoint(path, tag=f"step{start}")
    rates: list[float] = []
    for step in range(start, LAST):
        if step == SAVES_AT[start]:
            engine.save_checkpoint(path, tag=f"step{step}")
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(engine(_batch(step, micro)))
        engine.step(lr_kwargs={"metrics": metric(name)[0]} if metric(name) else None)
    engine.destroy()
    return rates


def _accelerate(name: str, path: str, start: int) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import InitProcessGroupKwargs

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    micro = GLOBAL_BATCH // dist.get_world_size()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_config(micro)),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    torch.manual_seed(1 + start)
    net = Net()
    optimizer = torch.optim.AdamW(groups(net, LR))
    schedule = MAKE[name](optimizer, dist.get_world_size())
    loader = DataLoader(Rows(SAMPLES), batch_size=micro)
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    if start:
        accelerator.load_state(f"{path}/step{start}")
    rates: list[float] = []
    for step in range(start, LAST):
        if step == SAVES_AT[start]:
            accelerator.save_state(f"{path}/step{step}")
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(model(_batch(step, micro)))
        optimizer.step()
        schedule.step(*metric(name))
        optimizer.zero_grad()
    model.destroy()
    return rates


def _lightning(name: str, path: str, start: int) -> list[float]:
    import lightning.pytorch as pl

    rates: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("metric", 1.0)
            return self.net(batch[0])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            # Before on_train_batch_end, ReduceLROnPlateau is not stepped yet: Lightning does it after that.
            if self.trainer.global_step == SAVES_AT[start]:
                self.trainer.save_checkpoint(f"{path}/step{SAVES_AT[start]}.ckpt")

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(groups(self, LR))
            schedule = {"scheduler": MAKE[name](optimizer, 1), "interval": "step", "monitor": "metric"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(*([] if metric is None else [float(metric)]))

    pl.seed_everything(3)
    job = LightningJob(stage=3, micro=GLOBAL_BATCH // dist.get_world_size())
    trainer = lightning_trainer(job, max_steps=LAST, logger=False)
    loader = DataLoader(Rows(SAMPLES), batch_size=job.micro)
    trainer.fit(Module(), loader, ckpt_path=f"{path}/step{start}.ckpt" if start else None)
    return rates


def _trainer(name: str, path: str, start: int) -> list[float]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    rates: list[float] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, rows: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            return {"loss": self.net(rows)}

    class ScheduledTrainer(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = MAKE[name](self.optimizer if optimizer is None else optimizer, 1)
            return self.lr_scheduler

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_loss": 1.0}

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    micro = GLOBAL_BATCH // dist.get_world_size()
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"} if metric(name) else {}
    args = TrainingArguments(
        output_dir=path,
        per_device_train_batch_size=micro,
        use_cpu=True,
        deepspeed=_config(micro),
        max_steps=LAST,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        learning_rate=LR,
        **evaluated,
    )
    torch.manual_seed(1 + start)
    rows = [{"rows": Rows()[index][0], "labels": 0} for index in range(SAMPLES)]
    trainer = ScheduledTrainer(model=Model(), args=args, train_dataset=rows, eval_dataset=rows, callbacks=[Watch()])
    trainer.train(resume_from_checkpoint=f"{path}/checkpoint-{start}" if start else None)
    return rates


_JOBS = {"DeepSpeed": _deepspeed, "accelerate": _accelerate, "Lightning": _lightning, "Trainer": _trainer}


LIMIT_S = 400.0
FIRST_HALF = sorted(random.Random(1).sample([*MAKE], len(MAKE) // 2))
OTHER_HALF = sorted({*MAKE} - {*FIRST_HALF})
JOBS = {
    "DeepSpeed": [*MAKE],
    "accelerate": FIRST_HALF,
    "accelerate, the others": OTHER_HALF,
    "Lightning": FIRST_HALF,
    "Trainer": OTHER_HALF,
}
"""Of Lightning and the Trainer each scheduler has one; `make sweep` runs all with both."""
SWEPT = {"Lightning, all": [*MAKE], "Trainer, all": [*MAKE]}


def test_the_table_has_every_scheduler_of_torch() -> None:
    named = {name for name in schedulers.__all__ if isinstance(getattr(schedulers, name), type)}
    assert named - {"LRScheduler"} <= set(MAKE)


SHOWN = pytest.mark.support(
    "Frameworks", "accelerate: learning rate schedulers", "exact", "LambdaLR and those of torch"
)


def case(job: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(job, marks=[*marks, *([SHOWN] if job == "accelerate" else [])])


@pytest.mark.parametrize("job", [*map(case, JOBS), *(case(job, pytest.mark.sweep) for job in SWEPT)])
def test_every_scheduler_goes_on(frameworks_pool: RankPool, tmp_path: Path, job: str) -> None:
    """And once more, back at the first number."""
    framework, names = job.partition(",")[0], (JOBS | SWEPT)[job]
    whole = frameworks_pool.run(rates_of, 2, framework, str(tmp_path), names, 0, timeout=LIMIT_S)[0]
    for world_size, start in ((3, SAVED), (2, AGAIN)):
        seen = frameworks_pool.run(rates_of, world_size, framework, str(tmp_path), names, start, timeout=LIMIT_S)
        for name in names:
            assert not isinstance(whole[name], str) and len({*whole[name]}) > 1, (name, whole[name])
            for rank in seen:
                assert rank[name] == pytest.approx(whole[name][start:], rel=1e-9), (name, rank[name], whole[name])
