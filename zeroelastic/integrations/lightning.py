"""The state that Lightning keeps outside of the engine, corrected for another world size.

New ranks get the client state of rank 0. While zeroelastic is installed, the wrapper of
``DeepSpeedStrategy.load_checkpoint`` also corrects what Lightning (2.6) restores unchanged:

* the counters of the loops, which count micro-batches of one rank and differ where the accumulation changed;
* the position in the data: at any world size, Lightning begins the epoch again while its counters go on;
* the scale of gradients, which changes with the accumulation, because Lightning and DeepSpeed both divide the loss by
  it. The option ``"keep_gradient_scale"`` keeps the saved scale.

Runs that zeroelastic does not load, and calls other than ``fit``, go to Lightning unchanged. This module never imports
Lightning.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.deepspeed.engine import options_of
from zeroelastic.deepspeed.patching import Method, patched, wrap
from zeroelastic.deepspeed.save.background import finish_pending
from zeroelastic.elastic.sampler import is_position
from zeroelastic.errors import StrictError, ZeroElasticError
from zeroelastic.integrations.framework_checkpoints import (
    BatchSettings,
    Notes,
    is_loaded_here,
    load_and_correct,
)
from zeroelastic.torch_file.header import read_tree

logger = logging.getLogger(__name__)

_TAG = "checkpoint"
_PROGRESS = "epoch_loop.batch_progress"
_SETTINGS = (
    "In Lightning the micro batch is the DataLoader's batch_size and the accumulation is "
    "Trainer(accumulate_grad_batches=...); zeroelastic.elastic.batch_plan computes both."
)

_DIVISOR = "zeroelastic_gradient_divisor"
"""In the client state: the number by which a loss is divided besides the mean, if that is not the accumulation."""
_GRADIENT_SCALE = "_zeroelastic_gradient_scale"
"""On the engine of a run whose divisor is that of the saved run: the divisor, and what a loss is multiplied by."""


def wrap_module(module: ModuleType) -> None:
    """Wrap the methods for checkpoints of ``DeepSpeedStrategy``; does nothing the second time."""
    wrap(module.DeepSpeedStrategy, "load_checkpoint", _load_checkpoint)
    wrap(module.DeepSpeedStrategy, "save_checkpoint", _save_checkpoint)
    wrap(module.DeepSpeedStrategy, "remove_checkpoint", _remove_checkpoint)


def _save_checkpoint(original: Method, self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    divisor, _ = getattr(getattr(self, "model", None), _GRADIENT_SCALE, (None, None))
    if divisor is not None:
        checkpoint = {**checkpoint, _DIVISOR: divisor}
    return original(self, checkpoint, *args, **kwargs)


def _remove_checkpoint(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Remove an older checkpoint (``save_top_k``) once that of a save in the background is complete. Collective."""
    if is_loaded_here(getattr(self, "model", None)):
        finish_pending(self.model, before="the removal of an older checkpoint")
    return original(self, *args, **kwargs)


def _load_checkpoint(original: Method, self: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    trainer = _fitting(self)
    engine = getattr(self, "model", None)
    if trainer is None or not is_loaded_here(engine):
        return original(self, checkpoint_path, *args, **kwargs)
    path = Path(checkpoint_path)
    return load_and_correct(
        *("Lightning", engine, lambda: original(self, checkpoint_path, *args, **kwargs)),
        directory=path,
        tag=_TAG,
        read=_read,
        refuse=partial(_refuse, trainer, engine, path),
        correct=partial(_correct, trainer, engine),
        settings=_SETTINGS,
    )


@dataclass(frozen=True, slots=True)
class _SavedLoops:
    """The run that wrote the checkpoint; the same on every rank.

    ``current`` and ``total`` are Lightning's counts of one rank's micro-batches, in the epoch and in all.
    ``loader_states`` are how many loaders have a state, and ``positions`` how many of these fit any world size.
    """

    batch: BatchSettings
    current: Mapping[str, int]
    total: Mapping[str, int]
    is_last_batch: bool
    loader_states: int
    positions: int
    divisor: int

    @property
    def done(self) -> int:
        """Micro-batches done in the epoch, with the one whose ``on_train_batch_end`` saved: it is not counted yet."""
        completed = self.current["completed"]
        return completed + 1 if self.current["ready"] == self.current["processed"] == completed + 1 else completed


def _fitting(strategy: Any) -> Any:
    """The trainer, if it is fitting from sharded checkpoints; ``load_full_weights`` means something at stage 3 only."""
    if strategy.lightning_module is None or (strategy.load_full_weights and strategy.zero_stage_3):
        return None
    trainer = strategy.lightning_module.trainer
    return trainer if str(getattr(trainer.state.fn, "value", "")) == "fit" else None


def _read(checkpoint: Checkpoint) -> _SavedLoops | None:
    """The run that wrote a checkpoint; None when it is not one of a Trainer."""
    try:
        state = read_tree(checkpoint.model_states(0).path)
    except ZeroElasticError as error:
        logger.warning("DATA BEGINS THE EPOCH AGAIN: the loops' counters cannot be read without running it: %s", error)
        return None
    loops = state.get("loops") if isinstance(state, dict) else None
    fit = loops.get("fit_loop") if isinstance(loops, dict) else None
    progress = fit.get(_PROGRESS) if isinstance(fit, dict) else None
    if not isinstance(state, dict) or not isinstance(fit, dict) or not isinstance(progress, dict):
        return None
    batch, loop_state, divisor = BatchSettings.saved(checkpoint), fit.get("state_dict"), state.get(_DIVISOR)
    states = loop_state.get("combined_loader", ()) if isinstance(loop_state, dict) else ()
    return _SavedLoops(
        batch=batch,
        current=progress["current"],
        total=progress["total"],
        is_last_batch=bool(progress["is_last_batch"]),
        loader_states=len(states),
        positions=sum(map(is_position, states)),
        divisor=divisor if type(divisor) is int else batch.accumulation,
    )


def _refuse(trainer: Any, engine: Any, path: Path, saved: _SavedLoops) -> None:
    if saved.loader_states > saved.positions:
        saved.batch.refuse_other(
            BatchSettings.of(engine, trainer.accumulate_grad_batches),
            f"{path}: holds the state of a stateful DataLoader",
            "Train with a plain DataLoader, whose position is restored at any world size, or with "
            "zeroelastic.elastic.ElasticStatefulDataLoader.",
        )
    problem = _uneven(saved)
    if problem and options_of(engine).strict:
        raise StrictError(
            f'{path}: {problem}. Save between optimizer steps. ("strict": false in the "zeroelastic" block allows it.)'
        )


def _uneven(saved: _SavedLoops) -> str:
    """Why the saved position is within an optimizer step; empty if it is not."""
    accumulation = saved.batch.accumulation
    left = saved.done % accumulation
    if (left and saved.is_last_batch) or (saved.total["ready"] - saved.current["ready"]) % accumulation:
        return (
            f"EPOCHS ARE UNEVEN: they end within an optimizer step of {accumulation} micro-batches, so what "
            "comes next depends on the world size. Train on a whole number of global batches"
        )
    if left:
        return f"SAVED IN THE MIDDLE of an optimizer step: {left} of {accumulation} micro-batches are lost"
    return ""


def _correct(trainer: Any, engine: Any, saved: _SavedLoops, client_state: dict[str, Any], notes: Notes) -> None:
    """Set the counters of the loops for this run's accumulation, and skip the batches that are done."""
    then, now = saved.batch, BatchSettings.of(engine, trainer.accumulate_grad_batches)
    accumulation, samples = now.accumulation, then.samples
    steps, rest = saved.done // then.accumulation, 0
    if samples is not None and samples != engine.train_batch_size():
        steps, rest = divmod(steps * samples, engine.train_batch_size())
    if problem := _uneven(saved):
        notes.warn(problem)
    if rest:
        notes.info(f"{rest} samples of the epoch come again: they do not fill a step of the new global batch")
    done = steps * accumulation
    progress = client_state["loops"]["fit_loop"][_PROGRESS]
    if done and not saved.is_last_batch:
        _reopen_epoch(client_state["loops"]["fit_loop"]["epoch_progress"])
    before = (saved.total["ready"] - saved.current["ready"]) * accumulation // then.accumulation
    for key, value in saved.current.items():
        progress["current"][key] = done - (saved.done - value)
        progress["total"][key] = before + done - (saved.done - value)
    if accumulation != then.accumulation:
        notes.info(f"batch counters: {saved.done} of {then.accumulation} a step -> {done} of {accumulation} a step")
    keep = options_of(engine).keep_gradient_scale
    _scale_gradients(engine, saved.divisor if keep else accumulation, accumulation)
    if saved.divisor != accumulation:
        here, there = (saved.divisor, accumulation) if keep else (accumulation, saved.divisor)
        why = "as in the saved run" if keep else '"keep_gradient_scale" is off'
        notes.warn(f"GRADIENTS are divided by {here} besides the mean, not by {there}: {why}")
    within_epoch = bool(done and not saved.is_last_batch)
    if within_epoch or saved.positions:
        whole = engine.train_batch_size() if (then.world_size, then.micro) != (now.world_size, now.micro) else 1
        _skip_at_setup(trainer.fit_loop, done if within_epoch else 0, whole)
    if within_epoch and not saved.loader_states:
        notes.info(f"data: the epoch goes on after its first {done} batches per rank")


def _reopen_epoch(progress: dict[str, dict[str, int]]) -> None:
    """Undo that a run which ended within an epoch (``max_steps``) counted the epoch as done."""
    current = progress["current"]
    if current["processed"] != current["ready"]:
        return
    for counts in (progress["current"], progress["total"]):
        counts["processed"] = counts["completed"] = counts["ready"] - 1


def _scale_gradients(engine: Any, divisor: int, accumulation: int) -> None:
    """Divide losses by ``divisor`` where Lightning divides them by ``accumulation``; a later call replaces this.

    Adam's moments and the threshold of gradient clipping are in the units of the run that made them.
    """
    vars(engine).pop(_GRADIENT_SCALE, None)
    if divisor != accumulation:
        wrap(type(engine), "backward", _backward)
        vars(engine)[_GRADIENT_SCALE] = divisor, accumulation / divisor


def _backward(original: Method, self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    _, factor = vars(self).get(_GRADIENT_SCALE, (None, None))
    return original(self, loss if factor is None else loss * factor, *args, **kwargs)


def _skip_at_setup(fit_loop: Any, batches: int, whole: int) -> None:
    """Let the loaders skip their first batches, once the loaders are made and before they are iterated over.

    ``_FitLoop._load_combined_loader_states`` is called at that moment. Loaders that have a state skip nothing: they go
    to their places by themselves, and ours then say the length of an epoch, not what remains of it, which Lightning
    would take for that of every epoch. A loader that begins again within the epoch is to have a multiple of ``whole``
    samples: rank 0 warns of any other number.
    """
    patch = ExitStack()

    def skip() -> None:
        patch.close()
        fit_loop._load_combined_loader_states()
        combined = fit_loop._combined_loader
        for loader in combined.flattened:
            if hasattr(loader, "has_whole_length"):
                loader.has_whole_length = True
        if not batches:
            return
        epoch = fit_loop.epoch_progress.current.processed
        for loader in combined.flattened if fit_loop.trainer.is_global_zero else ():
            samples = 0 if _is_stateful(loader) else _short_of(loader, batches, combined)
            if samples % whole:
                logger.warning(
                    "POSITION CHANGED: a loader of %d samples begins again within the epoch; they do not fill global "
                    "batches of %d, so its place depends on the world size. Give it a multiple of them.",
                    *(samples, whole),
                )
        combined.flattened = [
            _skipping(loader, skip, epoch) if skip and not _is_stateful(loader) else loader
            for loader, skip in zip(combined.flattened, _batches_done(combined, batches), strict=True)
        ]

    patch.enter_context(patched(fit_loop, _load_combined_loader_states=skip))


def _batches_done(combined: Any, batches: int) -> list[int]:
    """How many batches of each loader are done after so many of the epoch; none where the epoch is over.

    A loader that is shorter than the epoch begins again within it, or has no batches left.
    """
    lengths = [_length(loader) for loader in combined.flattened]
    if batches >= (min if combined._mode == "min_size" else max)(lengths):
        return [0] * len(lengths)
    if combined._mode == "max_size_cycle":
        return [batches if batches < length else int(batches % max(1, length)) for length in lengths]
    return [batches] * len(lengths)


def _is_stateful(loader: Any) -> bool:
    """Whether Lightning saves the state of a loader (``_Stateful``)."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _short_of(loader: Any, batches: int, combined: Any) -> int:
    """The samples of a loader that has begun again before so many batches of the epoch; 0 of any other."""
    samples = _length(getattr(loader, "dataset", ()))
    if combined._mode != "max_size_cycle" or _length(loader) > batches or math.isinf(samples):
        return 0
    return int(samples)


def _length(loader: Any) -> float:
    """How many batches a loader has, or samples a dataset; infinity for a stream."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def _skipping(loader: Any, batches: int, epoch: int) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or batch_sampler is None:
        return _SkipOnce(loader, batches)
    samplers: tuple[Any, ...] = (loader.sampler, getattr(batch_sampler, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # workers draw indices before Lightning does this
    patch = ExitStack()  # past DataLoader's guard against a new batch sampler; closed when the skipping is done
    patch.enter_context(patched(loader, batch_sampler=_SkipOnce(batch_sampler, batches, done=patch.close)))
    return loader


class _SkipOnce:
    """An iterable whose first iterator leaves out the first ``skip`` items and calls ``done``.

    First means first used: a DataLoader with workers makes two iterators. Everything else is that of ``items``.
    """

    def __init__(self, items: Any, skip: int, done: Callable[[], None] = lambda: None) -> None:
        self._items, self._skip, self._done = items, skip, done

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        if skip:
            self._done()
        yield from itertools.islice(iter(self._items), skip, None)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # there are no items yet while it is being unpickled
            raise AttributeError(name)
        return getattr(self._items, name)
