"""The file system operations of each rank while a checkpoint is checked, at 8, 64 and 512 ranks.

    python benchmarks/bench_ranks.py --out benchmarks/results

Ranks are threads of one process that run the real code, ``preflight`` of a load, over a checkpoint saved by as many
ranks in a directory that all of them see; the collectives of torch.distributed are replaced by ones between threads,
and system calls are counted. Writes ranks.json and ranks.md. ``listed`` and ``stats`` count directories and files,
``opens`` files that were opened, ``headers`` the files of ranks whose header was parsed, ``collectives`` calls of
torch.distributed. Counts, unlike times, do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from zeroelastic.checkpoint import open as checkpoint_open
from zeroelastic.checkpoint import optimizer_reader
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tensor_parallel import NO_TENSOR_PARALLEL
from zeroelastic.deepspeed.load.preflight import preflight
from zeroelastic.deepspeed.load.request import LoadRequest
from zeroelastic.deepspeed.options import Options
from zeroelastic.testing.sample import write_sample

WORLD_SIZES = (8, 64, 512)
COUNTED = ("listed", "stats", "opens", "headers", "collectives")


class Ranks:
    """``world_size`` threads in place of the ranks of a job, and the operations of each."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.counts = [Counter[str]() for _ in range(world_size)]
        self._here = threading.local()
        self._barrier = threading.Barrier(world_size)
        self._slots: list[Any] = [None] * world_size

    def run(self, action: Callable[[int], None]) -> None:
        """Run ``action`` on every rank. Raises the first error."""
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._here.rank = rank
            try:
                action(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world_size)]
        with self._replaced():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error

    def count(self, what: str, number: int = 1) -> None:
        """Count for the rank that runs, if one does."""
        rank = getattr(self._here, "rank", None)
        if rank is not None:
            self.counts[rank][what] += number

    def _exchange(self, value: Any) -> list[Any]:
        self.count("collectives")
        self._slots[self._here.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
            for mine, one in zip(tensors, self._exchange(tensor), strict=True):
                mine.copy_(one)

        def broadcast_object_list(values: list[Any], src: int = 0, group: Any = None) -> None:
            values[:] = self._exchange(list(values))[src]

        def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
            tensor.copy_(torch.stack(self._exchange(tensor.clone())).amax(0))

        collectives = {
            "get_world_size": lambda group=None: self.world_size,
            "get_rank": lambda group=None: self._here.rank,
            "get_backend": lambda group=None: "gloo",
            "all_gather": all_gather,
            "broadcast_object_list": broadcast_object_list,
            "all_reduce": all_reduce,
        }
        with ExitStack() as stack:
            for name, replacement in collectives.items():
                stack.enter_context(mock.patch.object(dist, name, replacement))
            for module in (checkpoint_open, optimizer_reader):
                stack.enter_context(self._counting(module, "read_torch_file", "headers"))
            for name in ("stat", "lstat"):
                stack.enter_context(self._counting(os, name, "stats"))
            stack.enter_context(self._counting(os, "open", "opens"))
            stack.enter_context(mock.patch.object(os, "scandir", self._scandir(os.scandir)))
            yield

    def _counting(self, owner: Any, name: str, what: str) -> Any:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count(what)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, counting)

    def _scandir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def scandir(path: Any) -> Iterator[Iterator[Any]]:
            self.count("listed")
            with original(path) as entries:
                found = list(entries)
            self.count("stats", len(found))  # a listing with sizes takes one stat per file
            yield iter(found)

        return scandir


def measure(world_size: int) -> dict[str, Any]:
    """The counts of a preflight by ``world_size`` ranks: of the rank with most, and of rank 1, which lists nothing."""
    with tempfile.TemporaryDirectory() as directory:
        write_sample(Path(directory), world_size=world_size, steps=(1,), hidden=8, layers=1)
        tag_dir = Path(directory) / "global_step1"
        checkpoint = open_checkpoint(tag_dir)
        head, frozen = checkpoint.shard(0), checkpoint.model_states(0).frozen
        groups = tuple(group.params for group in head.groups)
        request = LoadRequest(
            directory, options=Options(verify="quick"), load_module_only=True, load_module_strict=False
        )

        def load(rank: int) -> None:
            live: Any = SimpleNamespace(
                per_param=True,
                rank=rank,
                layout=head.layout,
                groups=groups,
                frozen=frozen,
                tp=NO_TENSOR_PARALLEL,
                optimizer=None,
            )
            preflight(tag_dir, live, request)

        ranks = Ranks(world_size)
        ranks.run(load)
    return {
        "world_size": world_size,
        "worst": {what: max(count[what] for count in ranks.counts) for what in COUNTED},
        "rank 1": {what: ranks.counts[1][what] for what in COUNTED},
        "all": {what: sum(count[what] for count in ranks.counts) for what in COUNTED},
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The counts as a page."""
    lines = [
        "# What each rank asks of the file system",
        "",
        "`preflight` of a load by as many ranks as saved, in a directory that all see, `verify: quick`: real code on",
        "simulated ranks, counted (`benchmarks/bench_ranks.py`). Rank 0 lists the directory, and sends the others what",
        "it found; they ask for the same at any number of ranks.",
        "",
        f"| ranks | of | {' | '.join(COUNTED)} |",
        f"|---|---|{'---|' * len(COUNTED)}",
    ]
    for row in rows:
        for whose in ("rank 1", "worst", "all"):
            name = {"rank 1": "any rank but 0", "worst": "rank 0", "all": "all ranks together"}[whose]
            lines.append(f"| {row['world_size']} | {name} | {' | '.join(str(row[whose][what]) for what in COUNTED)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--world-sizes", type=int, nargs="+", default=list(WORLD_SIZES))
    arguments = parser.parse_args()
    rows = [measure(world_size) for world_size in arguments.world_sizes]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ranks.json").write_text(json.dumps({"preflight": rows}, indent=1) + "\n")
    (arguments.out / "ranks.md").write_text(markdown(rows))
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
