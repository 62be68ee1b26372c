"""The training jobs of the tests of accelerate and Lightning: functions that run on pooled ranks, and what they saw."""

from __future__ import annotations

import json
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
from places import ROOT
from saved_files import logged
from torch.utils.data import DataLoader, Dataset

PRELOAD = ("accelerate", "transformers.models.llama.modeling_llama", "peft", "lightning.pytorch", "lightning.fabric")
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


ROUND_ROBIN = {"overlap_comm": True, "allgather_bucket_size": 5e8, "round_robin_gradients": True}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def zero_of(job: AccelerateJob | LightningJob) -> dict[str, Any]:
    """The block ``zero_optimization`` at the job's stage, small enough a bucket or a sub-group to have several."""
    if job.stage == 3:
        zero = {"elastic_checkpoint": True, "sub_group_size": 150, "stage3_param_persistence_threshold": 40}
    else:
        zero = {**ROUND_ROBIN, "reduce_bucket_size": 100}
    return {"stage": job.stage, **zero, **job.zero}


@dataclass(frozen=True)
class AccelerateJob:
    """One run of accelerate; picklable."""

    micro: int = 2
    accumulation: int = 1
    stage: int = 3
    zero: dict[str, Any] = field(default_factory=dict)
    schedule: str = "lambda"
    options: dict[str, Any] = field(default_factory=lambda: {"strict": True})
    seed: int = 3
    shuffle: bool = True
    loader: str = "plain"
    scheduler_is: str = "prepared"
    """Or "forgotten", in a call of ``prepare`` without the model; or "registered", for checkpoints, after that."""

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


def schedule_of(kind: str, optimizer: torch.optim.Optimizer, world_size: int) -> Any:
    from torch.optim import lr_scheduler

    if kind == "lambda":  # written for accelerate: its lengths are multiplied by the number of processes
        return lr_scheduler.LambdaLR(optimizer, lambda tick: max(0.05, 1 - tick / (20 * world_size)))
    if kind == "fixed lambda":  # written without a thought of it
        return lr_scheduler.LambdaLR(optimizer, lambda tick: max(0.05, 1 - tick / 60))
    assert kind == "cosine"
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * world_size)


def of_deepspeed(model: torch.nn.Module, config: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """accelerate's stand-ins for an optimizer and a scheduler that DeepSpeed makes, of a type or by a function."""
    from accelerate.utils import DummyOptim, DummyScheduler

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / 20))

    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    if kind == "deepspeed":
        params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": 20}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    optimizer = DummyOptim(groups(model, 1e-2))
    return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=None if kind == "deepspeed" else schedule)


def prepare(job: AccelerateJob) -> tuple[Any, Any, Any, Any, Any]:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed

    import zeroelastic

    zeroelastic.install()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": job.accumulation,
        "zero_optimization": zero_of(job),
        "zeroelastic": job.options,
    }
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = Net()
    if job.schedule.startswith("deepspeed"):
        optimizer, schedule = of_deepspeed(model, config, job.schedule)
    accelerator = Accelerator(
        gradient_accumulation_steps=job.accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True,
            data_seed=5,
            dispatch_batches=True if job.loader == "dispatched" else None,
            use_stateful_dataloader=job.loader == "stateful",
        ),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    set_seed(job.seed, device_specific=True)
    if not job.schedule.startswith("deepspeed"):
        optimizer = torch.optim.AdamW(groups(model, 1e-2))
        schedule = schedule_of(job.schedule, optimizer, dist.get_world_size())
    rows = WholeStream(SAMPLES) if job.loader == "stream" else Rows()
    loader = DataLoader(rows, batch_size=job.micro, shuffle=job.shuffle and job.loader != "stream")
    if job.scheduler_is == "prepared":
        return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)
    parts = accelerator, *accelerator.prepare(model, optimizer, loader), accelerator.prepare(schedule)
    if job.scheduler_is == "registered":
        accelerator.register_for_checkpointing(parts[-1])
    return parts


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
    job: AccelerateJob,
    steps: int,
    *,
    load: str | None = None,
    save: tuple[int, str] | None = None,
    extra: int = 0,
    loads: int = 1,
) -> Seen:
    """Build, load, look, train up to ``steps`` and save at a step on the way; ``extra`` micro-steps before the save.

    What is loaded is loaded ``loads`` times.
    """
    from zeroelastic.testing import fingerprint, gather_state

    warnings.simplefilter("ignore")
    said = logged("", levels=True)
    parts = prepare(job)
    accelerator, model, *_ = parts
    before = fingerprint(gather_state(model))
    if load is not None:
        try:
            for _ in range(loads):
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


def accelerate_numbered(job: AccelerateJob, project: str, steps: int) -> Seen:
    """Go on from the newest checkpoint that accelerate has named itself, and save each step; two are kept."""
    from zeroelastic.testing import fingerprint, gather_state

    warnings.simplefilter("ignore")
    said = logged("", levels=True)
    parts = prepare(job)
    accelerator, model, *_ = parts
    config = accelerator.project_configuration
    config.set_directories(project)
    config.automatic_checkpoint_naming, config.total_limit = True, 2
    if Path(project, "checkpoints").exists():
        accelerator.load_state()
        config.iteration = int(model.global_steps)
    state, step = fingerprint(gather_state(model)), accelerator.step
    losses: list[float] = []
    for stop in range(int(model.global_steps) + 1, steps + 1):
        losses += accelerate_steps(parts, stop)[2]
        accelerator.save_state()
    return Seen(state, step, [], [], losses, (), said)


def accelerate_beside_a_teacher(path: str, *, is_saving: bool, teacher_first: bool) -> tuple[Any, list[str], str]:
    """Train a model beside a frozen one of ZeRO-3 without an optimizer, and save; or resume.

    Returns the state of the trained model and its rate, what was said, and the error of a save of the frozen engine
    itself.
    """
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs
    from training import raised

    import zeroelastic
    from zeroelastic.testing import fingerprint, gather_state

    warnings.simplefilter("ignore")
    said = logged("", levels=True)
    zeroelastic.install()
    micro = 24 // dist.get_world_size()
    config = {"train_micro_batch_size_per_gpu": micro, "zero_allow_untested_optimizer": True}
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_optimization": zero_of(AccelerateJob())}
    frozen = {**config, "zero_optimization": {"stage": 3}}
    plugins = {"student": DeepSpeedPlugin(hf_ds_config=config), "teacher": DeepSpeedPlugin(hf_ds_config=frozen)}
    accelerator = Accelerator(
        deepspeed_plugins=plugins, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], mixed_precision="no"
    )
    torch.manual_seed(1 if is_saving else 2)

    def teach() -> Any:
        torch.manual_seed(5)
        accelerator.state.select_deepspeed_plugin("teacher")
        made = accelerator.prepare(torch.nn.Linear(WIDTH, 3).requires_grad_(False))
        accelerator.state.select_deepspeed_plugin("student")
        return made

    teacher = teach() if teacher_first else None
    model = Net()
    optimizer = torch.optim.AdamW(groups(model, 1e-2))
    schedule = schedule_of("cosine", optimizer, dist.get_world_size())
    loader = DataLoader(Rows(), batch_size=micro)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    teacher = teach() if teacher is None else teacher
    error = ""
    if is_saving:
        for rows, _ in loader:
            model.backward(model(rows) + teacher(rows).square().mean())
            model.step()
            schedule.step()
        accelerator.save_state(path)
        kind, text = raised(lambda: teacher.save_checkpoint(f"{path}/teacher"))
        error = f"{kind}: {text}"
    else:
        accelerator.load_state(path)
    return (fingerprint(gather_state(model)), optimizer.param_groups[0]["lr"]), said, error


def run_script(script: str, arguments: list[str]) -> None:
    """Run an example as ``__main__`` on this rank, as a launcher would have it run."""
    warnings.simplefilter("ignore")
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(dist.get_world_size()), str(dist.get_rank())
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.chdir(Path(script).parent)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def read_history(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class LightningJob:
    """One run of Lightning's Trainer; picklable."""

    micro: int = 2
    accumulation: int = 1
    stage: int = 3
    zero: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: {"strict": True})
    loader: str = "plain"
    samples: int = SAMPLES
    save_in: str = ""
    workers: int = 0

    def at(self, world_size: int, global_batch: int = 24) -> LightningJob:
        """The same job with a micro batch that keeps the global batch."""
        return replace(self, micro=global_batch // world_size // self.accumulation)


class Stateful(DataLoader):
    """A loader that keeps its own position, as torchdata's does: in batches of this rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given = self.start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Stream(torch.utils.data.IterableDataset):
    """All samples in order, each rank every world-size-th micro batch's worth: rank-strided."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        for index in range(dist.get_rank(), self.samples, dist.get_world_size()):
            yield Rows(self.samples)[index]


class WholeStream(Stream):
    """All samples in order on every rank: accelerate deals them out."""

    def __iter__(self) -> Any:
        return (Rows(self.samples)[index] for index in range(self.samples))


def lightning_trainer(job: LightningJob, **more: Any) -> Any:
    """A Trainer on CPUs, with what Lightning configures by itself, and zeroelastic."""
    sys.path.append(str(ROOT / "examples" / "lightning"))
    import lightning.pytorch as pl
    from cpu_accelerator import TrainerOnCPU
    from lightning.pytorch.strategies import DeepSpeedStrategy

    import zeroelastic

    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    zeroelastic.install()
    strategy = DeepSpeedStrategy(stage=job.stage)
    strategy.config["zero_optimization"].update(zero_of(job))
    strategy.config["zeroelastic"] = job.options
    if job.loader == "elastic":  # of which Lightning does not find it out
        strategy.config["train_micro_batch_size_per_gpu"] = job.micro
    return pl.Trainer(
        accelerator=TrainerOnCPU(),
        devices=dist.get_world_size(),
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **more},
    )


def lightning_run(
    job: LightningJob,
    steps: int,
    *,
    load: str | None = None,
    save: tuple[int, str] | None = None,
    loads: int = 1,
) -> Seen:
    """Fit up to ``steps``, saving on the way at the end of a batch (or in another hook), and say what was seen.

    What is loaded is loaded ``loads`` times into the same engine.
    """
    import lightning.pytorch as pl
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zeroelastic.testing import fingerprint, gather_state

    said = logged("", levels=True)
    states: dict[str, Any] = {}
    rates: list[float] = []
    samples: list[list[int]] = []
    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen: list[int] = []
            self.part = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows, index = batch
            loss = self.net(rows)
            self.seen += self.all_gather(index).flatten().tolist()
            self.part += self.all_gather(loss.detach().double()).mean().item()
            self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            return loss

        def on_train_start(self) -> None:
            for _ in range(loads - 1):
                self.trainer.strategy.load_checkpoint(load)
            states["start"] = fingerprint(gather_state(self.trainer.strategy.model))
            states["step"] = self.trainer.global_step

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % job.accumulation == 0:
                rates.append(self.rate)
                samples.append(sorted(self.seen))
                losses.append(self.part / job.accumulation)
                self.seen, self.part = [], 0.0
            if save is not None and self.trainer.global_step == save[0] and "saved" not in states:
                states["saved"] = fingerprint(gather_state(self.trainer.strategy.model))
                if not job.save_in:
                    self.trainer.save_checkpoint(save[1])

            middle = self.trainer.global_step == (save or (0,))[0] and (batch_idx + 1) % job.accumulation == 1
            if job.save_in == "middle" and middle and not Path(save[1]).exists():
                self.trainer.save_checkpoint(save[1])
            if job.save_in == "epoch end" and self.trainer.is_last_batch and not Path(save[1]).exists():
                self.trainer.save_checkpoint(save[1])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            wanted = job.save_in == "batch start" and save is not None and self.trainer.global_step == save[0]
            if wanted and not Path(save[1]).exists():
                self.trainer.save_checkpoint(save[1])

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = (DeepSpeedCPUAdam if job.zero == OFFLOADED else torch.optim.AdamW)(groups(self, 1e-2))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / 20))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    pl.seed_everything(3)
    trainer = lightning_trainer(
        job,
        max_steps=steps,
        accumulate_grad_batches=job.accumulation,
        logger=False,
        use_distributed_sampler=job.loader != "elastic",
    )
    module = Module()
    if job.loader == "stream":
        loader: Any = DataLoader(Stream(job.samples), batch_size=job.micro)
    elif job.loader == "elastic":
        from zeroelastic.elastic import BatchPlan, ElasticDistributedSampler, ElasticStatefulDataLoader

        world_size = dist.get_world_size()
        plan = BatchPlan(job.micro * job.accumulation * world_size, world_size, job.micro, job.accumulation)
        sampler = ElasticDistributedSampler(Rows(job.samples), plan.global_batch)
        loader = ElasticStatefulDataLoader(Rows(job.samples), sampler, plan, num_workers=job.workers)
    else:
        kind = Stateful if job.loader == "stateful" else DataLoader
        loader = kind(Rows(job.samples), batch_size=job.micro, shuffle=True, num_workers=job.workers)
    try:
        trainer.fit(module, loader, ckpt_path=load)
    except Exception as error:
        if type(error).__module__ != "zeroelastic.errors":
            raise
        return Seen({}, 0, [], [], [], (), said, error=(type(error).__name__, str(error)))
    report = getattr(trainer.strategy.model, "zeroelastic_report", None)
    notes = report.notes if report is not None else ()
    return Seen(
        states.get("saved", states["start"]),
        states["step"],
        rates,
        samples,
        losses,
        (),
        said,
        notes,
    )


def lightning_test(job: LightningJob, path: str) -> tuple[dict[str, list[float]], float, int]:
    """``Trainer.test`` of a model with other weights: weights and buffers in the test, the loss, and samples."""
    import deepspeed
    import lightning.pytorch as pl

    found: dict[str, list[float]] = {}
    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def on_test_start(self) -> None:
            with deepspeed.zero.GatheredParameters([p for p in self.parameters() if hasattr(p, "ds_id")]):
                for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                    found[name] = tensor.detach().flatten().tolist()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            losses.append(float(self.net(batch[0])))

    pl.seed_everything(11)
    trainer = lightning_trainer(job, logger=False)
    trainer.test(Module(), DataLoader(Rows(job.samples), batch_size=1), ckpt_path=path, verbose=False)
    return found, sum(losses), len(losses)
