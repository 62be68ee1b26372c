"""The needs of the Hugging Face Trainer besides ``zeroelastic.install()`` to continue at another world size.

The Trainer calls the engine's own methods, so weights, optimizer state, counters and scheduler resume without this
module. It handles state outside of the engine: the global batch, the order and the end of an epoch, and the random
number generators of new ranks. Written for ``Trainer`` of transformers 5.23.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback

from zeroelastic import install, last_report
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.elastic.batch_plan import batch_plan
from zeroelastic.errors import StrictError, UnsupportedError, UsageError
from zeroelastic.integrations.framework_checkpoints import Notes
from zeroelastic.integrations.per_process import are_close, compare_generators, load_generators, rates_at
from zeroelastic.report import ResumeReport

__all__ = ["batch_args", "elastic"]

logger = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

_STRATEGIES = ("random", "sequential")
_RECORD = "zeroelastic"
"""The key of our entry in ``stateful_callbacks`` of ``trainer_state.json``."""


def batch_args(*, global_batch: int, max_per_device: int, world_size: int | None = None) -> dict[str, int]:
    """The batch settings of ``TrainingArguments`` that keep the global batch at the world size of this launch.

    ``max_per_device`` is the largest micro batch that fits; the largest one that divides a rank's share is taken.
    Raises ConfigError, listing the world sizes that work, when the ranks cannot share the batch evenly.

    >>> batch_args(global_batch=24, max_per_device=6, world_size=3)
    {'per_device_train_batch_size': 4, 'gradient_accumulation_steps': 2}
    """
    plan = batch_plan(global_batch, world_size, max_per_device)
    return {"per_device_train_batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.accumulation}


def elastic(trainer: AnyTrainer) -> AnyTrainer:
    """Make a Trainer continue at any world size as it would have at the old one; returns the same trainer.

    Installs zeroelastic. From then on, for this trainer:

    * an epoch has a whole number of global batches: an incomplete last one is dropped (``dataloader_drop_last``) or
      filled up with the epoch's first samples, so epochs, steps and the learning rate schedule do not depend on the
      world size;
    * ranks without saved random number generators get new ones, seeded from the run's seed, the step and the rank;
    * a resume with another position in the data or another schedule logs a warning, and is an error under
      ``"strict": true`` in the ``"zeroelastic"`` block.

    Raises UnsupportedError for settings whose order of samples depends on the world size.

    >>> trainer = elastic(Trainer(model=model, args=args, train_dataset=data))  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """
    _refuse(trainer)
    install()
    sampler_of, load_own = trainer._get_train_sampler, trainer._load_rng_state
    trainer._get_train_sampler = lambda *args, **kwargs: _whole_batches(trainer, sampler_of(*args, **kwargs))
    trainer._load_rng_state = lambda checkpoint: load_generators(trainer, load_own, checkpoint)
    trainer.add_callback(_ResumeCallback(trainer))
    return trainer


def _refuse(trainer: Trainer) -> None:
    args = trainer.args
    problems: list[str] = []
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in _STRATEGIES:
        problems.append(
            f"train_sampling_strategy {strategy!r}: its order depends on the world size; use "
            + " or ".join(map(repr, _STRATEGIES))
        )
    if args.auto_find_batch_size:
        problems.append("auto_find_batch_size: it changes the global batch; use batch_args")
    if trainer.accelerator.split_batches:
        problems.append(
            "split_batches in accelerator_config: the Trainer counts such a batch once per rank; leave it out"
        )
    if trainer.accelerator.dispatch_batches and not isinstance(trainer.train_dataset, IterableDataset):
        problems.append(
            "dispatch_batches in accelerator_config: a resume within an epoch skips the batches of one rank, not "
            "those of all; leave it out"
        )
    for name in ("_get_train_sampler", "_load_rng_state"):
        if not callable(getattr(trainer, name, None)):
            problems.append(f"transformers {transformers.__version__} has no Trainer.{name}")
    if any(isinstance(callback, _ResumeCallback) for callback in trainer.callback_handler.callbacks):
        problems.append("elastic() was called for this trainer before")
    if problems:
        raise UnsupportedError(
            "this Trainer cannot be made elastic: "
            + "; ".join(problems)
            + ". Change these settings; without elastic() its state still resumes "
            "at any world size."
        )


class WholeBatches(Sampler[int]):
    """The indices of another sampler, cut or filled up to a multiple of the global batch.

    With ``drop_last`` an incomplete last batch is dropped; without, it is filled up with the epoch's first samples. So
    at every world size, step k of an epoch has the samples ``[k * global_batch, (k + 1) * global_batch)`` of the order.
    """

    def __init__(self, order: Sampler[int], global_batch: int, *, drop_last: bool) -> None:
        samples = len(order)  # type: ignore[arg-type]
        if samples == 0 or (drop_last and samples < global_batch):
            raise UsageError(
                f"the data has {samples} samples, fewer than one global batch of {global_batch}, and an incomplete "
                "batch is dropped: there is nothing to train on. Make the batch smaller, or turn drop_last off."
            )
        self.order, self.global_batch, self.drop_last = order, global_batch, drop_last
        self.num_batches = samples // global_batch if drop_last else -(-samples // global_batch)

    def __len__(self) -> int:
        return self.num_batches * self.global_batch

    def __iter__(self) -> Iterator[int]:
        first: list[int] = []
        given = 0
        for index in islice(self.order, len(self)):
            if len(first) < self.global_batch:
                first.append(index)
            given += 1
            yield index
        yield from islice(cycle(first), len(self) - given)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch's number to the order, if it has ``set_epoch``."""
        set_epoch = getattr(self.order, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _whole_batches(trainer: Trainer, sampler: Sampler[int] | None) -> Sampler[int] | None:
    """The Trainer's own order of samples, in whole global batches; None stays None (iterable datasets)."""
    if sampler is None:
        return None
    args = trainer.args
    if type(sampler) is RandomSampler:  # as accelerate shuffles: by the seed and the epoch's number
        sampler = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            data_seed=args.seed if args.data_seed is None else args.data_seed,
        )
    elif not isinstance(sampler, SequentialSampler) and not hasattr(sampler, "set_epoch"):
        raise UnsupportedError(
            f"the order of a {type(sampler).__name__} cannot be found again after a resume: it has no set_epoch(). "
            "Give it one that seeds it by the epoch's number."
        )
    return WholeBatches(sampler, trainer.get_total_train_batch_size(args), drop_last=args.dataloader_drop_last)


class _ResumeCallback(TrainerCallback):
    """Adds to the resume report of one trainer, and sets its sampler's epoch."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.epoch = trainer, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The epochs that are done, as Trainer._init_training_state counts them.
        self.epoch = state.global_step // _updates_per_epoch(self.trainer, kwargs["train_dataloader"])
        report = last_report(self.trainer.model_wrapped)
        if report is not None and state.global_step:
            self.trainer.model_wrapped.zeroelastic_report = _complete(self.trainer, kwargs["train_dataloader"], report)
        sampler = _sampler_of(kwargs["train_dataloader"])
        if sampler is not None:
            state.stateful_callbacks[_RECORD] = {"args": {}, "attributes": _order(sampler)}

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # accelerate (1.15) does not reach our sampler behind a loader that skips batches.
        sampler = _sampler_of(kwargs["train_dataloader"])
        if sampler is not None:
            sampler.set_epoch(self.epoch)
        self.epoch += 1


def _sampler_of(loader: Any) -> WholeBatches | None:
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None and not hasattr(batches, "sampler"):
        batches = getattr(batches, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    return sampler if isinstance(sampler, WholeBatches) else None


def _updates_per_epoch(trainer: Trainer, loader: Any) -> int:
    """Optimizer steps of an epoch, as the Trainer counts them. A stream without a length is one epoch."""
    sampler = _sampler_of(loader)
    if sampler is not None:
        return sampler.num_batches
    try:
        micro_steps, accumulation = len(loader), int(trainer.args.gradient_accumulation_steps)
    except TypeError:
        return int(trainer.state.max_steps)
    return max(1, -(-micro_steps // accumulation))


def _complete(trainer: Trainer, loader: Any, report: ResumeReport) -> ResumeReport:
    """The engine's report with what the engine does not know. Raises StrictError, the same on every rank."""
    checkpoint = Path(report.path).parent
    exact, rederived, reset = compare_generators(checkpoint, report)
    notes = _drift(trainer, loader, checkpoint)
    if notes.texts and parse_options(trainer.accelerator.state.deepspeed_plugin.deepspeed_config).strict:
        raise StrictError(
            f'{checkpoint}: {"; ".join(notes.texts)}. Resume with the settings of the save. ("strict": false '
            "allows it.)"
        )
    sampler = _sampler_of(loader)
    if trainer.args.ignore_data_skip:
        reset.append("position in the data (ignore_data_skip)")
    elif sampler is not None:
        if not notes.texts:
            unknown = "" if _RECORD in trainer.state.stateful_callbacks else ", of an order whose seed is not recorded"
            exact.append(f"position in the data (epochs of {sampler.num_batches} global batches{unknown})")
    else:
        notes.info("the order of an iterable dataset is its own; epochs may end elsewhere at another world size")
    saved = _saved_state(checkpoint)
    if saved["max_steps"] != trainer.state.max_steps and _other_length_is_meant(trainer, saved):
        notes.info(
            f"the run ends at step {trainer.state.max_steps}, the saved one at {saved['max_steps']}: learning rates "
            "follow the new schedule"
        )
    if trainer.is_world_process_zero():
        listed = {"exact": exact, "re-derived": rederived, "not restored": reset, "note": notes.texts}
        for title, items in listed.items():
            if items:
                logger.log(notes.level, "%s: %s: %s", checkpoint, title, "; ".join(items))
    return replace(
        report,
        exact=(*report.exact, *exact),
        rederived=(*report.rederived, *rederived),
        reset=(*report.reset, *reset),
        notes=(*report.notes, *notes.texts),
    )


def _drift(trainer: Trainer, loader: Any, checkpoint: Path) -> Notes:
    """How the position in the data and the schedule differ from the saved run's."""
    notes = Notes()
    state, updates = trainer.state, _updates_per_epoch(trainer, loader)
    here, sampler = state.global_step / updates, _sampler_of(loader)
    recorded = state.stateful_callbacks.get(_RECORD, {}).get("attributes")
    if recorded is not None and sampler is not None:
        order = _order(sampler)
        changes = [f"{key} {recorded.get(key)} -> {order[key]}" for key in order if recorded.get(key) != order[key]]
        if changes:
            notes.warn(f"POSITION CHANGED: {', '.join(changes)}: other samples follow than in the saved run")
    # Without our record. The saved epoch counts micro steps, of which the last update may have fewer; the difference is
    # less than one update.
    elif abs(state.epoch - here) * updates > 0.999:
        notes.warn(
            f"POSITION CHANGED: step {state.global_step} was saved at epoch {state.epoch:.3f} and is epoch {here:.3f} "
            f"of this run, which has {updates} steps an epoch. Other data, or a run without elastic() that cut its "
            "epochs by the world size"
        )
    saved = _saved_state(checkpoint)
    if saved["max_steps"] != state.max_steps and not _other_length_is_meant(trainer, saved):
        notes.warn(
            f"SCHEDULE CHANGED: the same {state.num_train_epochs} epochs end at step {state.max_steps} and ended at "
            f"step {saved['max_steps']} in the saved run, so the learning rates differ"
        )
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    if saved["max_steps"] == state.max_steps and isinstance(scheduler, LambdaLR):
        now, then = rates_at(scheduler, scheduler.last_epoch), list(map(float, scheduler.get_last_lr()))
        if not are_close(now, then):
            notes.warn(f"SCHEDULE CHANGED: the learning rates at step {state.global_step} are {now}, {then} were saved")
    return notes


def _order(sampler: WholeBatches) -> dict[str, Any]:
    """Describe the order of samples, for ``trainer_state.json``."""
    return {
        "samples": len(sampler.order),  # type: ignore[arg-type]
        "global_batch": sampler.global_batch,
        "drop_last": sampler.drop_last,
        "shuffle_seed": getattr(sampler.order, "initial_seed", None),
    }


def _saved_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return state


def _other_length_is_meant(trainer: Trainer, saved: dict[str, Any]) -> bool:
    """Whether the user asked for a longer or shorter run than the saved one."""
    return trainer.args.max_steps > 0 or bool(saved["num_train_epochs"] != trainer.state.num_train_epochs)
