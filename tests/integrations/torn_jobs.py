"""Jobs of the Trainer, accelerate, Lightning and Fabric that save twice, the second time watched, and that resume.

Watched are the moments between two files of a save, on all ranks: what a kill of the job would leave at each, or the
kill. A rank is at such a moment just before it opens a file for writing, makes, renames, links or removes something in
a directory, and before and after ``torch.save``. The other ranks are stopped meanwhile, wherever they are.

Each has a scheduler and draws random numbers; functions run on ranks. A run is described by what it was at each step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
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


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = {
    "os.rename": 2,
    "os.mkdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "shutil.rmtree": 1,
}
"""Audit events, and how many of their first arguments are paths."""


class Boundaries:
    """The moments at which this rank changes ``directory``; each leaves a copy in ``images``, in their order over all.

    With ``kill``, a rank and a part of a path, there are no copies, and all ranks are killed at the first moment of
    that rank that has to do with such a path.
    """

    def __init__(self, directory: str, images: str, kill: tuple[int, str] | None = None) -> None:
        self.directory, self.images, self.kill = os.path.abspath(directory), Path(images), kill
        self.rank, self.pids = dist.get_rank(), list[int]()
        self.lock, self.is_active = threading.RLock(), False

    def begin(self) -> None:
        """Watch until ``is_active`` is reset. Collective."""
        from zeroelastic.runs import tag_directory

        self.images.mkdir(parents=True, exist_ok=True)
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self.pids = [pid for pid in pids if pid != os.getpid()]
        for owner, name in ((torch, "save"), (tag_directory, "exchange")):
            patch.object(owner, name, self._around(getattr(owner, name))).start()
        sys.addaudithook(self._hook)
        dist.barrier()
        self.is_active = True

    def end(self) -> None:
        """Leave a last copy, of what the save has left. Collective."""
        dist.barrier()
        if self.rank == 0 and self.kill is None:
            self._copy()
        dist.barrier()
        self.is_active = False

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            paths = [arg for arg in args if isinstance(arg, str | os.PathLike)]
            self._at(*paths)
            done = call(*args, **kwargs)
            self._at(*paths)
            return done

        return around

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self._at(args[0])
        elif event in _PATHS:
            self._at(*args[: _PATHS[event]])

    def _at(self, *paths: Any) -> None:
        inside = [path for path in paths if isinstance(path, str | os.PathLike) and self._holds(os.fspath(path))]
        if not inside or not self.is_active:
            return
        with self.lock, open(self.images / ".lock", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if self.kill is None:
                self._copy()
            elif self.kill[0] == self.rank and any(self.kill[1] in os.fsdecode(path) for path in inside):
                for pid in (*self.pids, os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    def _holds(self, path: str | bytes) -> bool:
        return os.path.abspath(os.fsdecode(path)).startswith(self.directory)

    def _copy(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            while not all(
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in self.pids
            ):
                time.sleep(0.001)
            target = self.images / f"{len(os.listdir(self.images)):03d}-rank{self.rank}"
            self.is_active = False
            if os.path.isdir(self.directory):
                while not self._copied(target):
                    shutil.rmtree(target, ignore_errors=True)
            else:
                target.mkdir()
        finally:
            self.is_active = True
            for pid in self.pids:
                os.kill(pid, signal.SIGCONT)

    def _copied(self, target: Path) -> bool:
        """Whether the copy is of one moment: another thread may be about to rename what it has been let rename."""
        with suppress(shutil.Error, FileNotFoundError):
            before = sorted(Path(self.directory).rglob("*"))
            shutil.copytree(self.directory, target, symlinks=True)
            return sorted(Path(self.directory).rglob("*")) == before
        return False


def distinct(images: Path) -> list[Path]:
    """The copies in their order, without those that are like the one before but for hidden files of a save."""
    found: list[Path] = []
    before = ""
    for image in sorted(path for path in images.iterdir() if path.is_dir()):
        if (code := _code(image)) != before:
            found.append(image)
        before = code
    return found


def _code(image: Path) -> str:
    code = hashlib.sha256()
    for path in sorted(image.rglob("*")):
        parts = path.relative_to(image).parts
        hidden = next((number for number, part in enumerate(parts) if part[0] == "." and part.endswith(".tmp")), None)
        if hidden is None:
            code.update(repr(parts).encode())
            with suppress(IsADirectoryError):
                code.update(path.read_bytes())
    return code.hexdigest()
