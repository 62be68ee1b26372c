"""Saves by ranks that serve many loads: what a run saved and did afterwards, and what every resume of it must match.

Also on nodes with disks of their own, played by ranks: the same path leads each rank to the directory of its node. That
takes a mount namespace in each rank's process and a bind mount in it, so it takes root on Linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from saved_files import record_of
from training import LOSS_RTOL, Job, Outcome, resume, train_and_save

from zeroelastic.distributed import spreading
from zeroelastic.testing import RankPool, compare_states


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and what the run that wrote it looked like and did afterwards."""

    directory: str
    outcome: Outcome

    @property
    def tag_dir(self) -> Path:
        return next(Path(self.directory).glob("global_step*"))

    @property
    def root(self) -> str:
        return record_of(self.tag_dir).content_root


Saver = Callable[[Job, int], Saved]


def save_once(rank_pool: RankPool, directories: pytest.TempPathFactory, **steps: int) -> Saver:
    """A function that runs a job and saves it, once for each job and world size."""
    made: dict[str, Saved] = {}

    def save(job: Job, world_size: int) -> Saved:
        key = f"{job}@{world_size}"
        if key not in made:
            directory = str(directories.mktemp("save"))
            outcomes = rank_pool.run(train_and_save, world_size, job, directory, **steps)
            assert all(outcome.state == outcomes[0].state for outcome in outcomes)
            made[key] = Saved(directory, outcomes[0])
        return made[key]

    return save


def save_each(jobs: Sequence[Job], directory: str, **steps: int) -> list[Outcome]:
    return [train_and_save(job, f"{directory}/{number}", **steps) for number, job in enumerate(jobs)]


def resume_each(jobs: Sequence[Job], directory: str, **steps: int) -> list[Outcome]:
    return [resume(job, f"{directory}/{number}", **steps) for number, job in enumerate(jobs)]


def check_each(
    rank_pool: RankPool, runs: Mapping[str, tuple[Job, Job]], sizes: tuple[int, int], directory: Path, **steps: int
) -> dict[str, Saved]:
    """Save the first run of each pair on so many ranks, resume by the second on others, and compare: two starts."""
    (before, after), where = sizes, str(directory)
    saves = rank_pool.run(save_each, before, [job for job, _ in runs.values()], where, timeout=300, **steps)
    resumes = rank_pool.run(resume_each, after, [other for _, other in runs.values()], where, timeout=300, **steps)
    found: dict[str, Saved] = {}
    for number, (name, (job, _)) in enumerate(runs.items()):
        assert all(outcomes[number].state == saves[0][number].state for outcomes in saves), name
        found[name] = Saved(f"{where}/{number}", saves[0][number])
        check_resumed(found[name], [outcomes[number] for outcomes in resumes], job, what=name)
        assert resumes[0][number].report.root_matches, name
    return found


def check_resumed(saved: Saved, outcomes: list[Outcome], job: Job, *, what: str = "") -> None:
    """Every rank sees the saved state; training goes on as the uninterrupted run did."""
    for rank, outcome in enumerate(outcomes):
        assert compare_states(saved.outcome.state, outcome.state) == [], f"{what} rank {rank}"
        assert outcome.gathered == saved.outcome.gathered, f"{what} rank {rank}"
        assert outcome.report == outcomes[0].report
        assert outcome.client_state["note"] == "hello"
        steps, distinct = outcome.steps
        assert distinct in (0, sum(step is not None for step in steps)), "sub-groups share one step tensor"
        for got, want in zip(outcome.losses, saved.outcome.losses, strict=True):
            assert got == pytest.approx(want, rel=LOSS_RTOL[job.precision])


_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


MOUNTS_NEED = "mount namespaces are not permitted here; they take root"


@cache
def can_mount() -> bool:
    """Whether a process may have mounts of its own."""
    done = subprocess.run(
        ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"], capture_output=True, check=False, timeout=20
    )
    return done.returncode == 0


class Nodes:
    """Disks of nodes below a directory; ``path`` is where each node sees its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = str(root / "disk")
        Path(self.path).mkdir(parents=True)

    def disk(self, node: int) -> Path:
        """What a node sees at ``path``, from outside of it."""
        disk = self.root / f"node{node}"
        disk.mkdir(exist_ok=True)
        return disk


def on_nodes(nodes: Nodes, placed: Sequence[int], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run ``call`` on this rank with the disk of node ``placed[rank]`` mounted."""
    rank = dist.get_rank()
    node = placed[rank]
    os.environ["LOCAL_RANK"] = str(list(placed[:rank]).count(node))
    mount_disk(nodes, node)
    spreading.FAN_OUT = 1  # ranks send on what they received, as they do where there are many
    return call(*args, **options)


def mount_disk(nodes: Nodes, node: int) -> None:
    """Let this process, and no other, see the disk of a node at ``nodes.path``."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    check(libc.mount(bytes(nodes.disk(node)), nodes.path.encode(), None, _MS_BIND, None))


class NodeRun:
    """A save over nodes, its nodes, and what the run looked like."""

    def __init__(
        self,
        root: Path,
        pool: RankPool,
        job: Job,
        placed: tuple[int, ...],
        save: Callable[[Job, str], Outcome] = train_and_save,
    ) -> None:
        self.nodes, self.pool, self.job = Nodes(root), pool, job
        self.outcome: Outcome = self.call(placed, save, job, self.nodes.path)[0]

    def call(self, placed: tuple[int, ...], function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(on_nodes, len(placed), self.nodes, placed, function, *args, timeout=120, **options)

    def resume(self, placed: tuple[int, ...], **changes: Any) -> list[Outcome]:
        return self.call(placed, resume, self.job.other(installed=True, **changes), self.nodes.path)

    def tag(self, node: int) -> Path:
        return next(self.nodes.disk(node).glob("global_step*"))

    def copy(self, root: Path) -> NodeRun:
        """The same disks elsewhere, to be damaged."""
        made = NodeRun.__new__(NodeRun)
        made.pool, made.job, made.outcome = self.pool, self.job, self.outcome
        shutil.copytree(self.nodes.root, root, dirs_exist_ok=True)
        shutil.rmtree(root / "disk")
        made.nodes = Nodes(root)
        return made
