"""State that front ends keep for each process: random number generators, and schedulers stepped once per process.

A rank that the saved run did not have has no generators, and files of ranks that this run has not are left. accelerate
has a file of each rank, ``random_states_*.pkl``; the Trainer has ``rng_state_*.pth``, or one without a rank. accelerate
steps a learning rate scheduler once per process, also at another number of processes.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, SupportsFloat

import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeroelastic import last_report
from zeroelastic.deepspeed.patching import Method, patched, wrap
from zeroelastic.distributed.collective import all_gather
from zeroelastic.elastic.position import seed_generators
from zeroelastic.errors import ZeroElasticError, counted, rank_list
from zeroelastic.integrations.framework_checkpoints import Notes
from zeroelastic.report import ResumeReport
from zeroelastic.torch_file.header import read_tree

_LR_TOLERANCE = 1e-6
_TICKS = "_zeroelastic_ticks_per_step"
"""An attribute of accelerate's scheduler, in ``scheduler.bin`` beside the state of the one that it steps: how often per
optimizer step, if that is not the number of processes."""
_FUNCTION = "_zeroelastic_function"
"""An attribute of a function in a LambdaLR whose counter is scaled: the function of the script."""


def saved_rank_states(directory: Path, rank: int) -> dict[object, object] | None:
    """A rank's generators and ``accelerator.step``, not executed; None without a file, or if it is damaged."""
    with suppress(ZeroElasticError):
        states = read_tree(directory / f"random_states_{rank}.pkl")
        return states if isinstance(states, dict) else None
    return None


def reseed_new_rank(directory: Path, saved_size: int, identity: str, notes: Notes) -> None:
    """Seed the generators of new ranks from ``identity`` and the rank; the others have their files. Collective."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    has_file = all_gather(saved_rank_states(directory, rank) is not None)
    old = range(min(world_size, saved_size))
    if missing := [one for one in old if not has_file[one]]:
        notes.warn(
            f"random number generators of {rank_list(missing)}: NOT RESTORED. random_states_*.pkl is missing or "
            "damaged: the save was cut short after the model, or the file was left behind"
        )
    kept = f"random number generators: the saved ones on {counted(len(old) - len(missing), 'rank')}; "
    num_new = world_size - saved_size
    if num_new < 0:
        notes.info(f"{kept}those of {counted(-num_new, 'rank')} dropped")
    if num_new <= 0:
        return
    if rank >= saved_size:
        seed_generators(identity, rank)
    notes.info(f"{kept}{num_new} new, seeded from the checkpoint and the rank")


def compare_generators(checkpoint: Path, report: ResumeReport) -> tuple[list[str], list[str], list[str]]:
    """How the random number generators are resumed, as sentences: exact, re-derived, not restored."""
    exact, rederived, reset = list[str](), list[str](), list[str]()
    saved = _saved_generators(checkpoint, report.saved_world_size)
    kept = [rank for rank in range(report.world_size) if rank in saved]
    new = [rank for rank in range(report.world_size) if rank not in saved]
    left = [rank for rank in saved if rank >= report.world_size]
    if kept:
        exact.append(f"random number generators of {rank_list(kept)}")
    if new:
        rederived.append(f"random number generators of {rank_list(new)} from the seed, the step and the rank")
    if left:
        reset.append(f"random number generators of saved {rank_list(left)} (no longer there)")
    return exact, rederived, reset


def _saved_generators(checkpoint: Path, saved_world_size: int) -> dict[int, Path]:
    """The files of ``Trainer._save_rng_state`` by rank, without those left from an older save of more ranks."""
    if saved_world_size == 1:
        found = {0: checkpoint / "rng_state.pth"}
    else:
        found = {rank: checkpoint / f"rng_state_{rank}.pth" for rank in range(saved_world_size)}
    return {rank: path for rank, path in found.items() if path.is_file()}


def load_generators(trainer: Any, load: Callable[[str | None], None], checkpoint: str | None) -> None:
    """Let the Trainer load this rank's file; seed new generators where there is none."""
    report = last_report(trainer.model_wrapped)
    if checkpoint is None or report is None:
        load(checkpoint)
        return
    args = trainer.args
    path = _saved_generators(Path(checkpoint), report.saved_world_size).get(args.process_index)
    if path is None:
        seed_generators(f"transformers {args.seed} {trainer.state.global_step}", args.process_index)
        return
    wanted = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
    if path.name == wanted:
        load(checkpoint)
        return
    with tempfile.TemporaryDirectory() as directory:  # the same file by the name the Trainer expects
        os.symlink(path.absolute(), Path(directory) / wanted)
        load(directory)


def wrap_schedulers(module: ModuleType) -> None:
    """Wrap accelerate's ``AcceleratedScheduler``; does nothing the second time."""
    wrap(module.AcceleratedScheduler, "state_dict", _state_dict)
    wrap(module.AcceleratedScheduler, "load_state_dict", _load_state_dict)
    wrap(module.AcceleratedScheduler, "step", _step)


def correct_scheduler(accelerated: Any, saved_size: int, world_size: int, notes: Notes) -> None:
    """Let a scheduler continue at the optimizer step at which it was saved.

    Its state counts the steps of the saved run: it is still stepped as often per optimizer step as it was. A function
    in the script may count the steps of this run (``LambdaLR`` with lengths times the number of processes): the saved
    learning rate decides whether its counter is scaled.
    """
    name = type(accelerated.scheduler).__name__
    if not accelerated.step_with_optimizer:
        notes.info(f"{name}: counts the script's own calls (step_scheduler_with_optimizer is off); left as it was")
        return
    native = 1 if accelerated.split_batches else world_size
    ticks = getattr(accelerated, _TICKS, None) or (1 if accelerated.split_batches else saved_size)
    setattr(accelerated, _TICKS, None if ticks == native else ticks)
    lambdas = _lambda_schedulers(accelerated.scheduler)
    for one in lambdas:  # as they were before an earlier load
        one.lr_lambdas = [getattr(function, _FUNCTION, function) for function in one.lr_lambdas]
    if ticks == native:
        return
    notes.info(f"{name}: goes on being stepped {ticks} times per optimizer step, as it was saved")
    for one in lambdas:
        counter, rates = one.last_epoch, one.get_last_lr()
        scaled = rates_at(one, counter * native // ticks)
        if are_close(rates_at(one, counter), rates) and not are_close(scaled, rates):
            continue
        one.lr_lambdas = [_scaled(function, native, ticks) for function in one.lr_lambdas]
        notes.info(f"LambdaLR: its function counts {native} times per optimizer step")
        if not are_close(scaled, rates):
            notes.warn(f"LEARNING RATE CHANGED: LambdaLR gives {scaled}, {rates} was saved")


def _lambda_schedulers(scheduler: Any) -> list[LambdaLR]:
    """Return a scheduler, if it is a LambdaLR, and those in it: of a ``SequentialLR``, or of a user's own class."""
    found = [scheduler]
    for one in found:
        for value in getattr(one, "__dict__", {}).values():
            inner = value if isinstance(value, list | tuple) else (value,)
            found += [one for one in inner if isinstance(one, LRScheduler) and all(one is not other for other in found)]
    return [one for one in found if isinstance(one, LambdaLR)]


def _scaled(function: Callable[[int], float], native: int, ticks: int) -> Callable[[int], float]:
    """Return the function of a LambdaLR for a counter that is stepped ``ticks`` times per optimizer step."""
    if getattr(function, "__dict__", None):  # an object whose state is saved: it counts as in the saved run
        return function

    def scaled(counter: int) -> float:
        return function(counter * native // ticks)

    setattr(scaled, _FUNCTION, function)
    return scaled


def _state_dict(original: Method, self: Any) -> Any:
    ticks = getattr(self, _TICKS, None)
    return original(self) if ticks is None else {**original(self), _TICKS: ticks}


def _load_state_dict(original: Method, self: Any, state_dict: Any) -> Any:
    ticks = state_dict.get(_TICKS) if isinstance(state_dict, dict) else None
    setattr(self, _TICKS, ticks)
    if ticks is not None:
        state_dict = {key: value for key, value in state_dict.items() if key != _TICKS}
    return original(self, state_dict)


def _step(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Step a scheduler as often per optimizer step as in the run that saved it."""
    ticks = getattr(self, _TICKS, None)
    if ticks is None:
        return original(self, *args, **kwargs)
    with (
        patched(self, split_batches=False),
        patched(sys.modules[original.__module__], AcceleratorState=lambda: SimpleNamespace(num_processes=ticks)),
    ):
        return original(self, *args, **kwargs)


def rates_at(scheduler: LambdaLR, counter: int) -> list[float]:
    """The learning rates of a LambdaLR at a counter."""
    return [
        float(base) * float(factor(counter))
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]


def are_close(ours: Iterable[SupportsFloat], theirs: Iterable[SupportsFloat]) -> bool:
    """Whether learning rates are the same but for rounding."""
    return all(
        math.isclose(float(a), float(b), rel_tol=_LR_TOLERANCE, abs_tol=1e-15)
        for a, b in zip(ours, theirs, strict=True)
    )
