"""The random number generators of ranks that the saved run did not have, and files of ranks that this run has not.

accelerate has a file of each rank, ``random_states_*.pkl``; the Trainer has ``rng_state_*.pth``, or one without a rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic import last_report
from zeroelastic.distributed.collective import all_gather
from zeroelastic.elastic.position import seed_generators
from zeroelastic.errors import ZeroElasticError, counted, rank_list
from zeroelastic.integrations.framework_load import Notes
from zeroelastic.report import ResumeReport
from zeroelastic.torch_file.header import read_tree


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
