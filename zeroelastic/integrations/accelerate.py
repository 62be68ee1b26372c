"""What accelerate keeps beside the engine, and what becomes of it at another number of processes.

``Accelerator.load_state`` ends in the engine's own load, so weights and optimizer state need nothing of this. Wrapped
while zeroelastic is installed, it also brings in line what accelerate itself restores as it was (1.15):

* schedulers, which are stepped once per *process* for every optimizer step (``AcceleratedScheduler.step``);
* ``accelerator.step``, restored only on ranks that find a file of their own, which sends ranks into different
  collectives when the others do not;
* random number generators of ranks that the save did not have, and those of files left from an older, larger save.

What is not DeepSpeed ZeRO-3 goes to accelerate untouched. accelerate itself is never imported here.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from zeroelastic.agree import settle, together
from zeroelastic.checkpoint import Checkpoint, open_checkpoint
from zeroelastic.elastic.position import seed_generators
from zeroelastic.errors import StrictError, UnsupportedError, ZeroElasticError
from zeroelastic.integrations.told import tell
from zeroelastic.patching import wrap
from zeroelastic.picklegraph import read_graph
from zeroelastic.rng import derived_seed
from zeroelastic.save_place import read_tag
from zeroelastic.stage3.options import parse_options
from zeroelastic.stage3.partners import require_partners
from zeroelastic.storage import FilePath

__all__ = ["DataPosition", "data_position", "remaining_epochs"]

logger = logging.getLogger(__name__)

_TAG = "pytorch_model"
_TICKS = "_zeroelastic_ticks_per_step"
"""On a torch scheduler, and with it in ``scheduler.bin``: how often it is stepped per optimizer step, if not as often
as there are processes."""
_LR_TOLERANCE = 1e-6
_LOUD = ("SAVED IN THE MIDDLE", "LEARNING RATE CHANGED")


def wrap_module(module: ModuleType) -> None:
    """Wrap ``accelerate.accelerator.Accelerator.load_state``; does nothing the second time."""
    wrap(module.Accelerator, "load_state", _load_state)


def _load_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state(self: Any, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> Any:
        engine = _engine(self)
        if engine is None:
            return original(self, input_dir, load_kwargs, **kwargs)
        directory = _directory(self, input_dir)
        saved = _look(self, engine, directory) if directory is not None else None
        if saved is None:
            return original(self, input_dir, load_kwargs, **kwargs)
        schedulers = _prepared_schedulers(self)
        try:
            done = original(self, str(directory), load_kwargs, **kwargs)
        except StrictError as error:
            raise StrictError(f"{error}{_SETTINGS}") from None
        notes: list[str] = []
        settle(lambda: _repair(self, engine, saved, schedulers, notes))
        tell(logger, "accelerate", engine, notes, settings=_SETTINGS, loud=_LOUD)
        return done

    return load_state


_SETTINGS = (
    " In accelerate the micro batch is the DataLoader's batch_size and the accumulation is "
    "Accelerator(gradient_accumulation_steps=...); zeroelastic.elastic.batch_plan computes both."
)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the directory says of the run that wrote it; the same on every rank."""

    world_size: int
    accumulation: int
    micro: int | None
    step: int | None
    content_root: str | None


def _engine(accelerator: Any) -> Any:
    """The first DeepSpeed engine at ZeRO stage 3, or None when there is nothing for us to do."""
    if not str(getattr(accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
        return None
    for model in accelerator._models:
        stage = getattr(model, "zero_optimization_stage", None)
        if stage is not None and stage() == 3:
            return model
    return None


def _directory(accelerator: Any, input_dir: Any) -> Path | None:
    """The directory that accelerate is going to load, None when it is going to complain."""
    if input_dir is not None:
        return Path(input_dir).expanduser()
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    found = {
        int(match[1]): path
        for path in (Path(accelerator.project_dir) / "checkpoints").glob("*")
        if (match := re.search(r"(\d+)$", path.name))
    }
    return found[max(found)] if found else None


def _look(accelerator: Any, engine: Any, directory: Path) -> _Saved | None:
    """Read what was saved, and refuse what cannot be resumed before anything is touched. Collective.

    None when the directory is not one of a ZeRO-3 save: the engine's own load says why, on every rank.
    """

    def read() -> _Saved | None:
        if dist.get_rank() != 0:
            return None
        try:
            checkpoint, config = read_tag(directory / _TAG, _open)
        except ZeroElasticError:
            return None
        accumulation, micro = config.get("gradient_accumulation_steps"), config.get("train_micro_batch_size_per_gpu")
        return _Saved(
            world_size=checkpoint.world_size,
            accumulation=accumulation if type(accumulation) is int else 1,
            micro=micro if type(micro) is int else None,
            step=_saved_step(directory / "random_states_0.pkl"),
            content_root=checkpoint.record.content_root if checkpoint.record is not None else None,
        )

    require_partners()
    saved = together(read)[1][0]
    if saved is not None:
        settle(lambda: _refuse(accelerator, engine, directory, saved))
    return saved


def _open(tag_dir: FilePath) -> tuple[Checkpoint, Mapping[str, object]]:
    checkpoint = open_checkpoint(tag_dir)
    return checkpoint, checkpoint.shard(0).ds_config


def _saved_step(path: Path) -> int | None:
    """``accelerator.step`` as rank 0 saved it; nothing in the file is run."""
    if not path.exists():
        return None
    states = read_graph(path)
    step = states.get("step") if isinstance(states, dict) else None
    return step if type(step) is int else None


def _refuse(accelerator: Any, engine: Any, directory: Path, saved: _Saved) -> None:
    now = (accelerator.num_processes, accelerator.gradient_accumulation_steps, engine.train_micro_batch_size_per_gpu())
    then = (saved.world_size, saved.accumulation, saved.micro)
    stateful = [loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
    if stateful and then != now and any(directory.glob("dl_state_dict*.bin")):
        raise UnsupportedError(
            f"{directory}: dl_state_dict.bin counts the batches of {then[0]} processes (micro batch {then[2]}, "
            f"accumulation {then[1]}); this run has {now[0]} ({now[2]}, {now[1]}), where that is another place in the "
            "data. Turn use_stateful_dataloader off and take the position from "
            "zeroelastic.integrations.accelerate.data_position."
        )
    phase = (saved.step or 0) % saved.accumulation
    if phase and parse_options(engine._config._param_dict).strict:
        raise StrictError(
            f"{directory}: was saved after {phase} of {saved.accumulation} micro-steps of an optimizer step, and their "
            "gradients were not saved. Save at accelerator.sync_gradients. "
            '("strict": false in the "zeroelastic" block begins that step anew.)'
        )


def _prepared_schedulers(accelerator: Any) -> list[Any]:
    """The schedulers that accelerate steps; those of DeepSpeed are the engine's own affair."""
    return [one for one in accelerator._schedulers if hasattr(one, "step_with_optimizer") and hasattr(one, "scheduler")]


def _repair(accelerator: Any, engine: Any, saved: _Saved, schedulers: list[Any], notes: list[str]) -> None:
    if saved.step is not None:
        phase = saved.step % saved.accumulation
        accelerator.step = saved.step // saved.accumulation * accelerator.gradient_accumulation_steps
        if phase:
            notes.append(
                f"SAVED IN THE MIDDLE of an optimizer step: {phase} of {saved.accumulation} micro-steps are lost"
            )
    _reseed_new_rank(accelerator, engine, saved, notes)
    for scheduler in schedulers:
        _repair_scheduler(scheduler, accelerator.num_processes, saved, notes)


def _reseed_new_rank(accelerator: Any, engine: Any, saved: _Saved, notes: list[str]) -> None:
    """Ranks that were there have their own file; the others are seeded as ``zeroelastic reshard`` seeds them."""
    world_size, rank = accelerator.num_processes, dist.get_rank()
    if world_size < saved.world_size:
        notes.append(
            f"random number generators: the saved ones; those of {saved.world_size - world_size} ranks dropped"
        )
    if world_size <= saved.world_size:
        return
    identity = saved.content_root or f"step {engine.global_steps}"
    if rank >= saved.world_size:
        seed_generators(derived_seed(identity, rank))
    notes.append(
        f"random number generators: the saved ones on {saved.world_size} ranks; {world_size - saved.world_size} new, "
        "seeded from the checkpoint and the rank"
    )


def _repair_scheduler(accelerated: Any, world_size: int, saved: _Saved, notes: list[str]) -> None:
    """Have a scheduler go on at the optimizer step at which it was saved.

    A schedule that is a function of the script (LambdaLR) was written for the processes of its run: its counter is
    scaled. One that travels in its own state (T_max, milestones, total_steps) counts in the saved run's ticks: it goes
    on being stepped as often per optimizer step as it was. The saved learning rate says which a function is.
    """
    scheduler = accelerated.scheduler
    name = type(scheduler).__name__
    if not accelerated.step_with_optimizer:
        notes.append(f"{name}: counts the script's own calls (step_scheduler_with_optimizer is off); left as it was")
        return
    native = 1 if accelerated.split_batches else world_size
    ticks = vars(scheduler).pop(_TICKS, None) or (1 if accelerated.split_batches else saved.world_size)
    if ticks == native:
        return
    counter = scheduler.last_epoch
    steps, rest = divmod(counter, ticks)
    rates = scheduler.get_last_lr()
    if isinstance(scheduler, LambdaLR) and not rest:
        scaled = _rates(scheduler, steps * native)
        if _close(scaled, rates) or not _close(_rates(scheduler, counter), rates):
            scheduler.last_epoch = steps * native
            scheduler._step_count = max(1, scheduler._step_count - counter + scheduler.last_epoch)
            notes.append(f"{name}: counter {counter} ({ticks} per step) -> {scheduler.last_epoch} ({native} per step)")
            if not _close(scaled, rates):
                notes.append(f"LEARNING RATE CHANGED: {name} gives {scaled}, {rates} was saved")
            return
    _tick(accelerated, ticks)
    notes.append(f"{name}: goes on being stepped {ticks} times per optimizer step, as it was saved")


def _rates(scheduler: LambdaLR, counter: int) -> list[float]:
    """The learning rates of a LambdaLR at a counter."""
    return [
        float(base) * float(factor(counter))
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]


def _close(ours: list[float], theirs: list[float]) -> bool:
    return all(
        math.isclose(float(a), float(b), rel_tol=_LR_TOLERANCE, abs_tol=1e-15)
        for a, b in zip(ours, theirs, strict=True)
    )


def _tick(accelerated: Any, ticks: int) -> None:
    """Have accelerate step a scheduler ``ticks`` times per optimizer step, whatever the number of processes."""
    scheduler = accelerated.scheduler
    step_once = type(accelerated).step
    accelerated.split_batches = True  # accelerate's word for: once
    setattr(scheduler, _TICKS, ticks)

    def step(*args: Any, **kwargs: Any) -> None:
        count = ticks if accelerated.gradient_state.sync_gradients else 1
        for _ in range(count):
            if scheduler._step_count <= getattr(scheduler, "total_steps", math.inf):
                step_once(accelerated, *args, **kwargs)

    accelerated.step = step


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where the next optimizer step begins in the data: after ``steps`` optimizer steps of epoch ``epoch``.

    ``batches`` of the prepared DataLoader are to be skipped on each rank, ``samples`` of the epoch are done over all.
    ``steps_per_epoch`` is None for a stream without length.
    """

    epoch: int
    steps: int
    batches: int
    samples: int
    steps_per_epoch: int | None


def data_position(accelerator: Any, dataloader: Any) -> DataPosition:
    """The position of a prepared map-style DataLoader, from the optimizer steps that DeepSpeed counted.

    It depends on the global batch alone, not on the number of processes; call it after ``accelerator.load_state``. An
    epoch has ``ceil(samples / global batch)`` steps, or the whole ones only where the DataLoader drops its last batch.

        position = data_position(accelerator, loader)
        loader.set_epoch(position.epoch)
        rest = accelerator.skip_first_batches(loader, position.batches)
    """
    engine = _engine(accelerator)
    if engine is None:
        raise UnsupportedError("data_position needs a model that accelerator.prepare made a ZeRO-3 engine of.")
    accumulation = accelerator.gradient_accumulation_steps
    done, batch = int(engine.global_steps), int(engine.train_batch_size())
    try:
        samples = int(dataloader.total_dataset_length)
    except TypeError:
        return DataPosition(0, done, done * accumulation, done * batch, None)
    per_epoch = samples // batch if getattr(dataloader, "_drop_last", False) else -(-samples // batch)
    if per_epoch == 0:
        raise UnsupportedError(
            f"the DataLoader has {samples} samples, fewer than the global batch of {batch}, and drops its last batch."
        )
    epoch, steps = divmod(done, per_epoch)
    return DataPosition(epoch, steps, steps * accumulation, steps * batch, per_epoch)


def remaining_epochs(accelerator: Any, dataloader: Any, num_epochs: int) -> Iterator[tuple[int, Iterator[Any]]]:
    """The epochs that are left, each with its batches: the first one begins where the loaded checkpoint stopped.

    The same samples in each optimizer step at every number of processes, if the order of an epoch follows from its
    number alone (``DataLoaderConfiguration(use_seedable_sampler=True)``, or no shuffling).

        for epoch, batches in remaining_epochs(accelerator, loader, num_epochs=3):
            for batch in batches:
                with accelerator.accumulate(model): ...
    """
    position = data_position(accelerator, dataloader)
    accumulation = accelerator.gradient_accumulation_steps
    for epoch in range(position.epoch, num_epochs):
        skip = position.batches if epoch == position.epoch else 0
        dataloader.set_epoch(epoch)
        batches = iter(accelerator.skip_first_batches(dataloader, skip) if skip else dataloader)
        last = None if position.steps_per_epoch is None else position.steps_per_epoch * accumulation - skip
        yield epoch, _first(batches, last)


def _first(batches: Iterator[Any], count: int | None) -> Iterator[Any]:
    """The first ``count`` batches, all for None; what is left of an epoch without a whole global batch is dropped."""
    for number, batch in enumerate(batches):
        if count is not None and number >= count:
            return
        yield batch
