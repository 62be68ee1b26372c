"""What Lightning keeps beside the engine, and what becomes of it at another world size.

Loops, callbacks, schedulers and the datamodule travel in the engine's client state, of which new ranks get rank 0's, so
they need nothing of this. Wrapped while zeroelastic is installed, ``DeepSpeedStrategy.load_checkpoint`` also brings in
line what Lightning itself takes as it was (2.6):

* the loops' counters, which count micro-batches of one rank: other ones where the accumulation changed;
* the position in the data: Lightning begins the epoch again while its counters go on, at any world size;
* the scale of gradients: Lightning and DeepSpeed both divide the loss by the accumulation, so that it changes with it.

Runs without ZeRO-3, and whatever else than fitting, are left to Lightning, which is never imported here.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from zeroelastic.agree import settle, together
from zeroelastic.checkpoint import open_checkpoint
from zeroelastic.errors import StrictError, UnsupportedError, ZeroElasticError
from zeroelastic.integrations.told import tell
from zeroelastic.one_save import was_saved_again
from zeroelastic.patching import wrap
from zeroelastic.picklegraph import read_graph
from zeroelastic.save_place import read_tag
from zeroelastic.stage3.options import parse_options
from zeroelastic.stage3.partners import require_partners
from zeroelastic.storage import FilePath

logger = logging.getLogger(__name__)

_TAG = "checkpoint"
_PROGRESS = "epoch_loop.batch_progress"
_SETTINGS = (
    " In Lightning the micro batch is the DataLoader's batch_size and the accumulation is "
    "Trainer(accumulate_grad_batches=...); zeroelastic.elastic.batch_plan computes both."
)

_GRADIENTS = "GRADIENTS"
_LOUD = ("EPOCHS ARE UNEVEN", "SAVED IN THE MIDDLE", _GRADIENTS)
_DIVISOR = "zeroelastic_gradient_divisor"
"""In the client state, and on the engine: what a loss is divided by besides the mean, if not by the accumulation."""
_BACKWARD = "_zeroelastic_backward"
"""On the engine: its own ``backward``, while the one that Lightning calls divides by ``_DIVISOR``."""


def wrap_module(module: ModuleType) -> None:
    """Wrap two methods of ``DeepSpeedStrategy`` of ``lightning.pytorch``; does nothing the second time."""
    wrap(module.DeepSpeedStrategy, "load_checkpoint", _load_checkpoint)
    wrap(module.DeepSpeedStrategy, "save_checkpoint", _save_checkpoint)


def _save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_checkpoint(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        divisor = getattr(getattr(self, "model", None), _DIVISOR, None)
        if divisor is not None:
            checkpoint = {**checkpoint, _DIVISOR: divisor}
        return original(self, checkpoint, *args, **kwargs)

    return save_checkpoint


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(self: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = _fitting(self)
        engine = getattr(self, "model", None)
        if trainer is None or not hasattr(engine, "train_batch_size"):
            return original(self, checkpoint_path, *args, **kwargs)
        saved = _look(trainer, engine, Path(checkpoint_path))
        try:
            client_state = original(self, checkpoint_path, *args, **kwargs)
        except StrictError as error:
            raise StrictError(f"{error}{_SETTINGS}") from None
        if saved is not None:
            notes: list[str] = []
            settle(lambda: _repair(trainer, engine, saved, client_state, notes))
            tell(logger, "Lightning", engine, notes, settings=_SETTINGS, loud=_LOUD)
        return client_state

    return load_checkpoint


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the checkpoint says of the run that wrote it; the same on every rank.

    ``current`` and ``total`` are Lightning's counts of one rank's micro-batches, of the epoch and of all.
    """

    world_size: int
    accumulation: int
    micro: object
    train_batch_size: int | None
    current: Mapping[str, int]
    total: Mapping[str, int]
    is_last_batch: bool
    loader_states: int
    divisor: int

    @property
    def done(self) -> int:
        """Micro-batches of the epoch that are behind: a save within ``on_train_batch_end`` has not counted its own."""
        completed = self.current["completed"]
        return completed + 1 if self.current["ready"] == self.current["processed"] == completed + 1 else completed


def _fitting(strategy: Any) -> Any:
    """The trainer of a strategy that trains at ZeRO stage 3 from sharded checkpoints, else None."""
    if not strategy.zero_stage_3 or strategy.load_full_weights or strategy.lightning_module is None:
        return None
    trainer = strategy.lightning_module.trainer
    return trainer if str(getattr(trainer.state.fn, "value", "")) == "fit" else None


def _look(trainer: Any, engine: Any, path: Path) -> _Saved | None:
    """Read what was saved, and refuse what cannot be resumed before anything is touched. Collective.

    None when it is no ZeRO-3 checkpoint of a Trainer: what loads it says why.
    """

    def read() -> _Saved | None:
        if dist.get_rank() != 0:
            return None
        try:
            return read_tag(path / _TAG, look)
        except ZeroElasticError:
            return None

    def look(tag_dir: FilePath) -> _Saved | None:
        checkpoint = open_checkpoint(tag_dir)
        config = checkpoint.shard(0).ds_config
        try:
            state = read_graph(checkpoint.model_states(0).path)
        except ZeroElasticError as error:
            if was_saved_again(tag_dir):
                raise
            logger.warning(
                "DATA BEGINS THE EPOCH AGAIN: the loops' counters cannot be read without running it: %s", error
            )
            return None
        return _saved(state, checkpoint.world_size, config)

    require_partners()
    saved = together(read)[1][0]
    if saved is not None:
        settle(lambda: _refuse(trainer, engine, path, saved))
    return saved


def _saved(state: object, world_size: int, config: Mapping[str, object]) -> _Saved | None:
    loops = state.get("loops") if isinstance(state, dict) else None
    fit = loops.get("fit_loop") if isinstance(loops, dict) else None
    progress = fit.get(_PROGRESS) if isinstance(fit, dict) else None
    if not isinstance(fit, dict) or not isinstance(progress, dict):
        return None
    accumulation, micro = config.get("gradient_accumulation_steps", 1), config.get("train_micro_batch_size_per_gpu")
    if type(accumulation) is not int:
        return None
    loop_state, divisor = fit.get("state_dict"), state.get(_DIVISOR) if isinstance(state, dict) else None
    return _Saved(
        world_size=world_size,
        accumulation=accumulation,
        micro=micro,
        train_batch_size=micro * accumulation * world_size if type(micro) is int else None,
        current=progress["current"],
        total=progress["total"],
        is_last_batch=bool(progress["is_last_batch"]),
        loader_states=len(loop_state.get("combined_loader", ())) if isinstance(loop_state, dict) else 0,
        divisor=divisor if type(divisor) is int else accumulation,
    )


def _refuse(trainer: Any, engine: Any, path: Path, saved: _Saved) -> None:
    then = (saved.world_size, saved.micro, saved.accumulation)
    now = (trainer.world_size, engine.train_micro_batch_size_per_gpu(), trainer.accumulate_grad_batches)
    if saved.loader_states and then != now:
        raise UnsupportedError(
            f"{path}: holds the state of a stateful DataLoader, which counts the batches of {then[0]} ranks (micro "
            f"batch {then[1]}, accumulation {then[2]}); this run has {now[0]} ({now[1]}, {now[2]}), where that is "
            "another place in the data. Train with a plain DataLoader: its position is restored at any world size."
        )
    problem = _uneven(saved)
    if problem and parse_options(engine._config._param_dict).strict:
        raise StrictError(f'{path}: {problem}. ("strict": false in the "zeroelastic" block allows it.)')


def _uneven(saved: _Saved) -> str:
    """What makes the saved position one between optimizer steps, or an empty string."""
    left = saved.done % saved.accumulation
    if (left and saved.is_last_batch) or (saved.total["ready"] - saved.current["ready"]) % saved.accumulation:
        return (
            f"EPOCHS ARE UNEVEN: they end within an optimizer step of {saved.accumulation} micro-batches, so what "
            "comes next depends on the world size. Train on a whole number of global batches"
        )
    if left:
        return f"SAVED IN THE MIDDLE of an optimizer step: {left} of {saved.accumulation} micro-batches are lost"
    return ""


def _repair(trainer: Any, engine: Any, saved: _Saved, client_state: dict[str, Any], notes: list[str]) -> None:
    """Set the loops' counters for this run's accumulation, and have the epoch's first batches skipped."""
    accumulation = trainer.accumulate_grad_batches
    steps, rest = saved.done // saved.accumulation, 0
    if saved.train_batch_size is not None and saved.train_batch_size != engine.train_batch_size():
        steps, rest = divmod(steps * saved.train_batch_size, engine.train_batch_size())
    if problem := _uneven(saved):
        notes.append(problem)
    if rest:
        notes.append(f"{rest} samples of the epoch come again: they do not fill a step of the new global batch")
    done = steps * accumulation
    progress = client_state["loops"]["fit_loop"][_PROGRESS]
    if done and not saved.is_last_batch:
        _reopen_epoch(client_state["loops"]["fit_loop"]["epoch_progress"])
    before = (saved.total["ready"] - saved.current["ready"]) * accumulation // saved.accumulation
    for key, value in saved.current.items():
        progress["current"][key] = done - (saved.done - value)
        progress["total"][key] = before + done - (saved.done - value)
    if accumulation != saved.accumulation:
        notes.append(f"batch counters: {saved.done} of {saved.accumulation} a step -> {done} of {accumulation} a step")
    keep = parse_options(engine._config._param_dict).keep_gradient_scale
    _divide(engine, saved.divisor if keep else accumulation, accumulation)
    if saved.divisor != accumulation:
        now, then = (saved.divisor, accumulation) if keep else (accumulation, saved.divisor)
        why = "as in the saved run" if keep else '"keep_gradient_scale" is off'
        notes.append(f"{_GRADIENTS} are divided by {now} besides the mean, not by {then}: {why}")
    if done and not saved.is_last_batch and not saved.loader_states:
        _skip_at_setup(trainer.fit_loop, done)
        notes.append(f"data: the epoch goes on after its first {done} batches per rank")


def _reopen_epoch(progress: dict[str, dict[str, int]]) -> None:
    """A run that ended within an epoch (``max_steps``) counts it as done, and would go on in the next one's order."""
    current = progress["current"]
    if current["processed"] != current["ready"]:
        return
    for counts in (progress["current"], progress["total"]):
        counts["processed"] = counts["completed"] = counts["ready"] - 1


def _divide(engine: Any, divisor: int, accumulation: int) -> None:
    """Have the loss, of which Lightning gives the engine an ``accumulation``-th, divided by the saved run's divisor.

    Adam's moments and a gradient clipping threshold are in the units of the run that made them. However often it is
    called for an engine, the last time holds.
    """
    if _BACKWARD in vars(engine):
        engine.backward = vars(engine).pop(_BACKWARD)
        delattr(engine, _DIVISOR)
    if divisor == accumulation:
        return
    backward = engine.backward
    vars(engine).update({_BACKWARD: backward, _DIVISOR: divisor})
    engine.backward = lambda loss, *args, **kwargs: backward(loss * (accumulation / divisor), *args, **kwargs)


def _skip_at_setup(fit_loop: Any, batches: int) -> None:
    """Have the loaders skip, once they are made and before the first iterator over them is.

    ``_FitLoop._load_combined_loader_states`` is what is called at that moment; it has nothing to load here.
    """

    def skip() -> None:
        del fit_loop._load_combined_loader_states
        combined = fit_loop._combined_loader
        epoch = fit_loop.epoch_progress.current.processed
        combined.flattened = [_skipping(loader, batches, epoch) for loader in combined.flattened]

    fit_loop._load_combined_loader_states = skip


def _skipping(loader: Any, batches: int, epoch: int) -> Any:
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        length = None
    if length is not None and batches >= length:
        return loader  # the epoch is over, or a loader that is begun again within it
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or batch_sampler is None:
        return _SkipOnce(loader, batches)
    samplers: tuple[Any, ...] = (loader.sampler, getattr(batch_sampler, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # workers draw indices before Lightning does this
    vars(loader)["batch_sampler"] = _SkipOnce(batch_sampler, batches)  # a DataLoader refuses it by its front door
    return loader


class _SkipOnce:
    """An iterable whose first iterator leaves out the first ``skip`` items; everything else is the original's.

    The first one that is used: a DataLoader with workers makes two.
    """

    def __init__(self, items: Any, skip: int) -> None:
        self._items, self._skip = items, skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        yield from itertools.islice(iter(self._items), skip, None)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled in a worker there are no items yet
            raise AttributeError(name)
        return getattr(self._items, name)
