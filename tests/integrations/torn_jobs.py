"""Jobs of the Trainer, accelerate, Lightning and Fabric that save twice, the second time watched, and that resume.

Each has a scheduler and draws random numbers; functions run on ranks. A run is described by what it was at each step.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from boundaries import Boundaries
from frameworks_job import AccelerateJob, LightningJob, Net, Rows, accelerate_steps, groups, lightning_trainer, prepare
from places import ROOT
from torch.utils.data import DataLoader
from trainer_job import TrainerJob, run_trainer

FIRST, SECOND, LAST = 2, 4, 6
"""The steps of the two saves, and the last one of a run."""
GLOBAL_BATCH = 24


@dataclass
class Run:
    """What a rank saw: state and the next random numbers at steps; rates and samples of the steps after ``start``."""

    start: int = 0
    state: dict[int, Any] = field(default_factory=dict)
    draws: dict[int, Any] = field(default_factory=dict)
    rates: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    error: str = ""

    def look(self, step: int, engine: Any) -> None:
        """Note the state at a step, and draw."""
        from zeroelastic.testing import fingerprint, gather_state

        self.state[step] = fingerprint(gather_state(engine))
        self.draws[step] = (random.random(), float(np.random.rand()), float(torch.rand(())))


@dataclass(frozen=True)
class Case:
    """How a framework saves: into a used directory or a new one, in the background or not.

    ``exchanges``: the file system swaps two directories at once, as NFS does not.
    """

    framework: str
    is_used: bool
    is_async: bool
    exchanges: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {"strict": True, "async_save": self.is_async}


def save_twice(case: Case, directory: str, images: str, kill: tuple[int, str] | None = None) -> Run:
    """Train, and save after two steps and, watched, after two more."""
    from zeroelastic.runs import tag_directory

    warnings.simplefilter("ignore")
    if not case.exchanges:
        patch.object(tag_directory, "exchange", lambda *_: False).start()
    return _JOBS[case.framework](case, directory, Boundaries(directory, images, kill))


def resume(case: Case, directory: str) -> Run:
    """Go on from what a start finds, up to the last step; an error that is raised is what was seen."""
    warnings.simplefilter("ignore")
    try:
        return _JOBS[case.framework](case, directory, None)
    except Exception as error:
        return Run(error=f"{type(error).__name__}: {error}")


def _begin(engine: Any, boundaries: Boundaries) -> None:
    import zeroelastic

    zeroelastic.wait_for_save(engine)  # the first one
    boundaries.begin()


def _finish(engine: Any, boundaries: Boundaries) -> None:
    import zeroelastic

    zeroelastic.wait_for_save(engine)
    boundaries.end()


def _accelerate(case: Case, directory: str, boundaries: Boundaries | None) -> Run:
    job = AccelerateJob(stage=2, options=case.options, seed=3 if boundaries else 99).at(dist.get_world_size())
    parts = prepare(job)
    accelerator, model, *_ = parts
    path = None
    if case.is_used:
        path = os.path.join(directory, "state")
    else:
        accelerator.project_configuration.set_directories(directory)
        accelerator.project_configuration.automatic_checkpoint_naming = True
    run = Run()
    if boundaries is None:
        accelerator.load_state(path)
        run.start = model.global_steps
        run.look(run.start, model)
    for step in (FIRST, SECOND, LAST):
        if step <= model.global_steps:
            continue
        rates, samples, _ = accelerate_steps(parts, step)
        run.rates += rates
        run.samples += samples
        if boundaries is not None and step != LAST:
            if step == SECOND:
                _begin(model, boundaries)
            accelerator.save_state(path)
            if step == SECOND:
                _finish(model, boundaries)
            run.look(step, model)
    return run


def _trainer(case: Case, directory: str, boundaries: Boundaries | None) -> Run:
    from transformers import Trainer

    job = TrainerJob(
        directory,
        stage=2,
        args={"save_strategy": "steps", "save_steps": 2},
        config={"zeroelastic": case.options},
        stop_at=LAST,
        resume=True if boundaries is None else None,
    )
    save = Trainer._save_checkpoint

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == SECOND:
            _begin(self.model_wrapped, boundaries)
        elif boundaries.is_active:
            _finish(self.model_wrapped, boundaries)
        return save(self, *args, **kwargs)

    if boundaries is None:
        seen = run_trainer(job)
    else:
        import zeroelastic

        zeroelastic.install()
        save = Trainer._save_checkpoint
        with patch.object(Trainer, "_save_checkpoint", watching):
            seen = run_trainer(job)
    return of_trainer(seen)


def another_trainer(directory: str) -> Run:
    """A run of other weights, which saves the same steps."""
    args = {"save_strategy": "steps", "save_steps": SECOND, "learning_rate": 2e-2, "seed": 77, "data_seed": 42}
    return of_trainer(run_trainer(TrainerJob(directory, stage=2, args=args, model_seed=8, stop_at=SECOND + 1)))


def of_trainer(seen: Any) -> Run:
    start = seen.first_step
    state = {**seen.saved, start: seen.resumed}
    steps = range(start, max(seen.samples) + 1)
    return Run(
        start, state, seen.generators, [seen.rates[step + 1] for step in steps], [seen.samples[s] for s in steps]
    )


def _lightning(case: Case, directory: str, boundaries: Boundaries | None) -> Run:
    import lightning.pytorch as pl

    job = LightningJob(stage=2, options=case.options, samples=48).at(dist.get_world_size())
    run = Run()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows, index = batch
            run.samples.append(sorted(self.all_gather(index).flatten().tolist()))
            run.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return self.net(rows)

        def on_train_start(self) -> None:
            run.start = self.trainer.global_step
            run.look(run.start, self.trainer.strategy.model)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            engine, step = self.trainer.strategy.model, self.trainer.global_step
            if boundaries is not None and step in (FIRST, SECOND):
                if step == SECOND:
                    _begin(engine, boundaries)
                self.trainer.save_checkpoint(_file(case, directory, step))
                if step == SECOND:
                    _finish(engine, boundaries)
                run.look(step, engine)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(groups(self, 1e-2))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / 20))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    pl.seed_everything(3)
    trainer = lightning_trainer(job, max_steps=LAST, logger=False)
    path = None if boundaries is not None else _newest(case, directory)
    trainer.fit(Module(), DataLoader(Rows(48), batch_size=job.micro, shuffle=True), ckpt_path=path)
    run.draws.clear()  # Lightning saves no generators
    return run


def _newest(case: Case, directory: str) -> str:
    path = _file(case, directory, SECOND)
    return path if os.path.exists(path) else _file(case, directory, FIRST)


def _file(case: Case, directory: str, step: int) -> str:
    return os.path.join(directory, "last.ckpt" if case.is_used else f"step{step}.ckpt")


def _fabric(case: Case, directory: str, boundaries: Boundaries | None) -> Run:
    sys.path.append(str(ROOT / "examples" / "lightning"))
    from cpu_accelerator import FabricOnCPU
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy

    import zeroelastic

    zeroelastic.install()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    micro = GLOBAL_BATCH // dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
        "zeroelastic": case.options,
    }
    strategy = DeepSpeedStrategy(config=config)
    fabric = Fabric(accelerator=FabricOnCPU(), devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    fabric.seed_everything(7 if boundaries is not None else 99)
    net = Net()
    optimizer = torch.optim.AdamW(groups(net, 1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / 20))
    model, optimizer = fabric.setup(net, optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    run = Run()
    if boundaries is None:
        fabric.load(_newest(case, directory), state)
        run.start = state["step"]
        run.look(run.start, model._forward_module)
    order = torch.randperm(GLOBAL_BATCH * LAST, generator=torch.Generator().manual_seed(5)).tolist()
    while state["step"] < LAST:
        batch = sorted(order[state["step"] * GLOBAL_BATCH :][:GLOBAL_BATCH])
        rows = torch.stack([Rows(len(order))[index][0] for index in batch[dist.get_rank() * micro :][:micro]])
        run.samples.append(batch)
        run.rates.append(optimizer.param_groups[0]["lr"])
        fabric.backward(model(rows))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["step"] += 1
        if boundaries is not None and state["step"] in (FIRST, SECOND):
            if state["step"] == SECOND:
                _begin(model._forward_module, boundaries)
            fabric.save(_file(case, directory, state["step"]), state)
            if state["step"] == SECOND:
                _finish(model._forward_module, boundaries)
            run.look(state["step"], model._forward_module)
    run.draws.clear()  # nor does Fabric
    return run


_JOBS = {"accelerate": _accelerate, "Trainer": _trainer, "Lightning": _lightning, "Fabric": _fabric}
