"""The state that accelerate keeps outside of the engine, corrected for another number of processes.

``Accelerator.load_state`` calls the engine's own load. While zeroelastic is installed, its wrapper also corrects what
accelerate (1.15) restores unchanged:

* schedulers, which are stepped once per *process* for every optimizer step (``AcceleratedScheduler.step``);
* ``accelerator.step``, which is restored only on ranks that find a file of their own;
* the random number generators of new ranks, and those in files left from an older save of more ranks.

Runs that zeroelastic does not load go to accelerate unchanged. This module never imports accelerate.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.deepspeed.engine import options_of
from zeroelastic.deepspeed.live.kinds import is_without_optimizer
from zeroelastic.deepspeed.patching import Method, patched, wrap
from zeroelastic.deepspeed.save.background import finish_pending, pending_of
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.errors import MissingFileError, StrictError, UnsupportedError, some
from zeroelastic.integrations.framework_checkpoints import (
    BatchSettings,
    Notes,
    check_tag,
    is_loaded_here,
    load_and_correct,
    newest_complete,
    numbered,
    on_rank_0,
    save_with_files,
)
from zeroelastic.integrations.per_process import correct_scheduler, reseed_new_rank, saved_rank_states, wrap_schedulers

__all__ = ["DataPosition", "data_position", "remaining_epochs"]

logger = logging.getLogger(__name__)

_TAG = "pytorch_model"
_WARNED = "_zeroelastic_warned"
"""An attribute of accelerate's ProjectConfiguration: rank 0 has said of its run what it lacks."""
_PASSED_OVER = "_zeroelastic_passed_over"
"""Another one: the folders without a complete checkpoint that a load has passed over."""


def wrap_module(module: ModuleType) -> None:
    """Wrap saves and loads of accelerate's ``Accelerator``, and its schedulers; does nothing the second time."""
    wrap(module.Accelerator, "load_state", _load_state)
    wrap(module.Accelerator, "save_state", _save_state)
    wrap_schedulers(module)


def _save_state(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save, and remove older checkpoints (``total_limit``) once the new one is complete: accelerate does so before.

    A save in the background is complete before the next one begins, and until then one more checkpoint stays.
    """
    config, engine = self.project_configuration, _engine(self)
    if engine is None:
        return original(self, *args, **kwargs)
    left_out = _without_optimizer(self)
    problems = _problems(self, engine, left_out)
    if problems and dist.get_rank() == 0 and not hasattr(config, _WARNED):
        logger.warning("accelerate: %s", "; ".join(problems))
        setattr(config, _WARNED, True)
    if config.automatic_checkpoint_naming:
        all_or_raise(lambda: _remove_passed_over(self) if self.is_main_process else None)
    engines = list(filter(is_loaded_here, self._models))
    limit = config.total_limit if config.automatic_checkpoint_naming else None
    if limit is not None:
        for one in engines:
            finish_pending(one, before="save_state()")
    with patched(config, total_limit=None), _doing_nothing("save_checkpoint", left_out.values()):
        done = save_with_files(engines, partial(original, self, *args, **kwargs))
    if limit is not None:
        keep = max(1, limit) + any(pending_of(one) is not None for one in engines)
        all_or_raise(lambda: _remove_older(self, keep) if self.is_main_process else None)
    return done


def _tags(accelerator: Any) -> dict[str, Any]:
    """Return the engines by their tags."""
    return {f"{_TAG}_{number}" if number else _TAG: model for number, model in enumerate(accelerator._models)}


def _without_optimizer(accelerator: Any) -> dict[str, Any]:
    """Return the ZeRO-3 engines without an optimizer by their tags: DeepSpeed has no way to save one (0.19.8)."""
    return {
        tag: model
        for tag, model in _tags(accelerator).items()
        if is_without_optimizer(getattr(model, "optimizer", None))
    }


@contextmanager
def _doing_nothing(method: str, engines: Iterable[Any]) -> Iterator[None]:
    """Within this context, a method of some engines does nothing."""
    with ExitStack() as stack:
        for one in engines:
            stack.enter_context(patched(one, **{method: lambda *_, **__: None}))
        yield


def _remove_passed_over(accelerator: Any) -> None:
    """Remove the folder of the save that begins, into which accelerate does not save, if a load has passed it over."""
    for path in getattr(accelerator.project_configuration, _PASSED_OVER, ()):
        if path.name == f"checkpoint_{accelerator.save_iteration}" and path.exists():
            shutil.rmtree(path)
            logger.warning("%s: removed for a new save. load_state() had found no complete checkpoint in it", path)


def _remove_older(accelerator: Any, keep: int) -> None:
    for path in _numbered(accelerator)[:-keep]:
        shutil.rmtree(path)
        logger.info("%s: removed, by total_limit of accelerate's ProjectConfiguration", path)


def _problems(accelerator: Any, engine: Any, left_out: Iterable[str]) -> list[str]:
    """List what a checkpoint of this run lacks: engines ``left_out``, and a torch scheduler that nothing saves."""
    problems = [
        f"{tag} IS NOT IN THE CHECKPOINT: a ZeRO-3 model without an optimizer keeps the weights that the script loads"
        for tag in left_out
    ]
    objects = [*accelerator._custom_objects, *(v for one in accelerator._custom_objects for v in vars(one).values())]
    is_stepped = hasattr(getattr(engine.basic_optimizer, "step", None), "_wrapped_by_lr_sched")
    if is_stepped and not accelerator._schedulers and not any(isinstance(one, LRScheduler) for one in objects):
        problems.insert(
            0,
            "NO LEARNING RATE SCHEDULER is in the checkpoint, though one steps this optimizer: after a resume the "
            "schedule begins again. accelerator.prepare() keeps a scheduler only if the model is in the same call. "
            "Call accelerator.register_for_checkpointing(scheduler)",
        )
    return problems


def _load_state(original: Method, self: Any, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> Any:
    engine = _engine(self)
    if engine is None:
        return original(self, input_dir, load_kwargs, **kwargs)
    for one in filter(is_loaded_here, self._models):
        finish_pending(one, before="load_state()")
    directory = _directory(self, engine, input_dir)
    if directory is None:
        return original(self, input_dir, load_kwargs, **kwargs)
    tags = _tags(self)
    (tag,) = (tag for tag, model in tags.items() if model is engine)
    left_out = on_rank_0(lambda: [tag for tag in _without_optimizer(self) if not (directory / tag).is_dir()])
    with _doing_nothing("load_checkpoint", map(tags.__getitem__, left_out)):
        return load_and_correct(
            *("accelerate", engine, lambda: original(self, str(directory), load_kwargs, **kwargs)),
            directory=directory,
            tag=tag,
            read=partial(_read, directory),
            refuse=partial(_refuse, self, engine, directory),
            correct=lambda saved, _, notes: _correct(self, engine, directory, saved, left_out, notes),
            settings=_SETTINGS,
        )


_SETTINGS = (
    "In accelerate the micro batch is the DataLoader's batch_size and the accumulation is "
    "Accelerator(gradient_accumulation_steps=...); zeroelastic.elastic.batch_plan computes both."
)


@dataclass(frozen=True, slots=True)
class _SavedSteps:
    """The run that wrote the checkpoint; the same on every rank."""

    batch: BatchSettings
    step: int | None
    content_root: str | None


def _engine(accelerator: Any) -> Any:
    """The first DeepSpeed engine that zeroelastic loads, at any ZeRO stage; None without one."""
    if not str(getattr(accelerator, "distributed_type", "")).endswith("DEEPSPEED"):
        return None
    return next(filter(is_loaded_here, accelerator._models), None)


def _schedulers(accelerator: Any) -> list[Any]:
    """The schedulers that accelerate steps and saves; those of a DeepSpeed configuration are the engine's."""
    of_engines = [getattr(model, "lr_scheduler", None) for model in accelerator._models]
    return [one for one in accelerator._schedulers if all(one.scheduler is not other for other in of_engines)]


def _directory(accelerator: Any, engine: Any, input_dir: Any) -> Path | None:
    """The directory to load, of numbered ones the newest complete one; None where accelerate will raise. Collective."""
    if input_dir is not None:
        return Path(input_dir).expanduser()
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        return None
    newest, passed_over = newest_complete(
        *(logger, lambda: _numbered(accelerator), lambda folder: _check(accelerator, engine, folder)),
        "To choose another one, pass its path to load_state().",
    )
    if newest is not None:
        setattr(config, _PASSED_OVER, passed_over)
        return newest
    found = _numbered(accelerator)
    return found[-1] if found else None


def _check(accelerator: Any, engine: Any, folder: Path) -> None:
    """Raise CheckpointError where a folder lacks what ``load_state`` reads."""
    for tag, model in _tags(accelerator).items():
        if is_loaded_here(model):
            check_tag(folder / tag, on_this_node_only=engine.use_node_local_storage())
    names = [
        f"scheduler_{number}.bin" if number else "scheduler.bin" for number in range(len(_schedulers(accelerator)))
    ]
    names += [f"custom_checkpoint_{number}.pkl" for number in range(len(accelerator._custom_objects))]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise MissingFileError(f"{folder}: has no {some(missing)}.")


def _numbered(accelerator: Any) -> list[Path]:
    """The checkpoints that accelerate has named by their numbers, in this order."""
    return numbered(Path(accelerator.project_dir) / "checkpoints", r".*?(\d+)")


def _read(directory: Path, checkpoint: Checkpoint) -> _SavedSteps:
    step = (saved_rank_states(directory, 0) or {}).get("step")
    root = checkpoint.inventory.content_root
    return _SavedSteps(BatchSettings.saved(checkpoint), step if type(step) is int else None, root)


def _refuse(accelerator: Any, engine: Any, directory: Path, saved: _SavedSteps) -> None:
    is_stateful = any(getattr(loader, "use_stateful_dataloader", False) for loader in accelerator._dataloaders)
    if is_stateful and any(directory.glob("dl_state_dict*.bin")):
        saved.batch.refuse_other(
            BatchSettings.of(engine, accelerator.gradient_accumulation_steps),
            f"{directory}: has a dl_state_dict.bin",
            "Turn use_stateful_dataloader off and take the position from "
            "zeroelastic.integrations.accelerate.data_position.",
        )
    accumulation = saved.batch.accumulation
    phase = (saved.step or 0) % accumulation
    if phase and options_of(engine).strict:
        raise StrictError(
            f"{directory}: was saved after {phase} of {accumulation} micro-steps of an optimizer step, and their "
            "gradients were not saved. Save at accelerator.sync_gradients. "
            '("strict": false in the "zeroelastic" block begins that step anew.)'
        )


def _correct(
    accelerator: Any, engine: Any, directory: Path, saved: _SavedSteps, left_out: Iterable[str], notes: Notes
) -> None:
    if saved.step is not None:
        steps, phase = divmod(saved.step, saved.batch.accumulation)
        accelerator.step = steps * accelerator.gradient_accumulation_steps
        if phase:
            lost = f"{phase} of {saved.batch.accumulation} micro-steps are lost"
            notes.warn(f"SAVED IN THE MIDDLE of an optimizer step: {lost}")
    reseed_new_rank(directory, saved.batch.world_size, saved.content_root or f"step {engine.global_steps}", notes)
    for problem in _problems(accelerator, engine, left_out):
        notes.warn(problem)
    for scheduler in _schedulers(accelerator):
        correct_scheduler(scheduler, saved.batch.world_size, accelerator.num_processes, notes)


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where the next optimizer step begins in the data: after ``steps`` optimizer steps of epoch ``epoch``.

    ``skip_first_batches`` takes ``batches``; all ranks have consumed ``samples`` of the epoch. ``steps_per_epoch`` is
    None for a stream without length.
    """

    epoch: int
    steps: int
    batches: int
    samples: int
    steps_per_epoch: int | None


def data_position(accelerator: Any, dataloader: Any) -> DataPosition:
    """The position of a prepared map-style DataLoader, from the optimizer steps that DeepSpeed counted.

    It depends only on the global batch, not on the number of processes; call it after ``accelerator.load_state``. An
    epoch has ``ceil(samples / global batch)`` steps, or ``floor`` where the DataLoader drops its last batch.

        position = data_position(accelerator, loader)
        loader.set_epoch(position.epoch)
        rest = accelerator.skip_first_batches(loader, position.batches)
    """
    engine = _engine(accelerator)
    if engine is None:
        raise UnsupportedError(
            "data_position needs a model that accelerator.prepare made a ZeRO engine of, whose loads are zeroelastic's."
        )
    accumulation = accelerator.gradient_accumulation_steps
    done, batch = int(engine.global_steps), int(engine.train_batch_size())
    try:
        samples = int(dataloader.total_dataset_length)
    except TypeError:
        return DataPosition(0, done, done * accumulation, done * batch, None)
    per_epoch = samples // batch if getattr(dataloader, "_drop_last", False) else -(-samples // batch)
    if per_epoch == 0:
        raise UnsupportedError(
            f"the DataLoader has {samples} samples, fewer than the global batch of {batch}, and drops its last "
            "batch. Make the batch smaller."
        )
    epoch, steps = divmod(done, per_epoch)
    batches = steps * accumulation * (accelerator.num_processes if _skips_before_dealing(dataloader) else 1)
    return DataPosition(epoch, steps, batches, steps * batch, per_epoch)


def _skips_before_dealing(dataloader: Any) -> bool:
    """Whether ``skip_first_batches`` skips batches of rank 0 that are then dealt out (``dispatch_batches``)."""
    dispatches = any(kind.__name__ == "DataLoaderDispatcher" for kind in type(dataloader).__mro__)
    return dispatches and not dataloader.split_batches and not isinstance(dataloader.dataset, IterableDataset)


def remaining_epochs(accelerator: Any, dataloader: Any, num_epochs: int) -> Iterator[tuple[int, Iterator[Any]]]:
    """The remaining epochs, each with its batches; the first one begins where the loaded checkpoint stopped.

    Each optimizer step has the same samples at every number of processes, if the order of an epoch depends on its
    number only (``DataLoaderConfiguration(use_seedable_sampler=True)``, or no shuffling).

        for epoch, batches in remaining_epochs(accelerator, loader, num_epochs=3):
            for batch in batches:
                with accelerator.accumulate(model): ...
    """
    if getattr(dataloader, "use_stateful_dataloader", False):
        raise UnsupportedError(
            "remaining_epochs keeps the position in the data, and so does a DataLoader with use_stateful_dataloader: "
            "together they leave batches out after a resume. Turn use_stateful_dataloader off: then a resume is right "
            "at any number of processes."
        )
    position = data_position(accelerator, dataloader)
    per_epoch, left = position.steps_per_epoch, position.batches
    for epoch in range(position.epoch, num_epochs):
        dataloader.set_epoch(epoch)
        if per_epoch is None:  # a stream, which may have ended and begun again before
            batches = iter(dataloader)
            left -= sum(1 for _ in itertools.islice(batches, left))
            if not left:
                yield epoch, batches
            continue
        batches = iter(accelerator.skip_first_batches(dataloader, left) if left else dataloader)
        steps = per_epoch - (position.steps if left else 0)
        yield epoch, _first(batches, steps * accelerator.gradient_accumulation_steps)
        left = 0


def _first(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The first ``count`` batches; drops the end of an epoch that does not fill a global batch."""
    for number, batch in enumerate(batches):
        if number >= count:
            return
        yield batch
