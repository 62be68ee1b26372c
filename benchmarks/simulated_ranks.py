"""Ranks of a job as threads that take turns: real code, with simulated collectives and a simulated key-value store.

What each rank asks for is counted. Times mean nothing here: one thread runs at a time, and passes its turn on where a
rank would wait.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from zeroelastic.checkpoint import open as checkpoint_open
from zeroelastic.checkpoint import optimizer_reader
from zeroelastic.deepspeed.save import barrier
from zeroelastic.deepspeed.save import commit as save_commit
from zeroelastic.distributed import partners, process_identity

RANKS_PER_NODE = 8
COUNTED = ("store requests", "listed", "looked at", "opened", "changed", "headers", "collectives", "received bytes")

_LOOKS = ("stat", "lstat")
_CHANGES = ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync", "link")
_STACK_BYTES = 1 << 18


class _Group:
    """In place of a process group, which is only compared."""


class SimulatedRanks:
    """Some ranks of a job of ``world_size``, each a thread, and the operations that each counts.

    Ranks that are not simulated are taken to contribute to a collective what the last simulated rank does; rank 0 has
    to be simulated. ``counts[rank]`` has the entries of ``COUNTED``.
    """

    def __init__(self, world_size: int, ranks: Sequence[int] | None = None) -> None:
        self.world_size = world_size
        self.ranks = list(range(world_size)) if ranks is None else sorted(ranks)
        self.counts = {rank: Counter[str]() for rank in self.ranks}
        self._here = threading.local()
        self._turns = {rank: threading.Semaphore(0) for rank in self.ranks}
        self._next = dict(zip(self.ranks, [*self.ranks[1:], self.ranks[0]], strict=True))
        self._previous = {after: rank for rank, after in self._next.items()}
        self._rounds: dict[int, _Round] = {}
        self._known = {rank: (partners._Known(), barrier._GroupSaves()) for rank in self.ranks}
        self._passed_on = 0  # turns in a row in which nothing happened
        self.store = _Store(self)

    def run(self, action: Callable[[int], Any]) -> dict[int, Any]:
        """What ``action`` returns on every simulated rank. Raises the first error."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._here.rank, self._here.round = rank, 0
            self._turns[rank].acquire()
            self._restore(rank)
            try:
                if not errors:
                    results[rank] = action(rank)
            except BaseException as error:
                errors.append(error)
            self._leave(rank)

        previous = threading.stack_size(_STACK_BYTES)
        try:
            threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in self.ranks]
            with self._replaced():
                for thread in threads:
                    thread.start()
                self._turns[self.ranks[0]].release()
                for thread in threads:
                    thread.join()
        finally:
            threading.stack_size(previous)
        if errors:
            raise errors[0]
        return results

    def count(self, what: str, number: int = 1) -> None:
        """Count for the rank that runs, if one does."""
        rank = getattr(self._here, "rank", None)
        if rank is not None:
            self.counts[rank][what] += number
            self._passed_on = 0

    def pass_on(self, *, idle: bool = False) -> None:
        """Let all other ranks run until they wait. Raises RuntimeError where all of them wait for ever."""
        rank = self._here.rank
        self._passed_on = self._passed_on + 1 if idle else 0
        if self._passed_on > 3 * len(self._next):
            raise RuntimeError("every simulated rank waits for another")
        after = self._next[rank]
        if after != rank:
            self._turns[after].release()
            self._turns[rank].acquire()
            self._restore(rank)

    def _restore(self, rank: int) -> None:
        """What a process knows, as if this rank were one of its own."""
        known, barrier._known = self._known[rank]
        partners._known = lambda: known

    def _leave(self, rank: int) -> None:
        before, after = self._previous.pop(rank), self._next.pop(rank)
        if after != rank:
            self._next[before], self._previous[after] = after, before
            self._turns[after].release()

    def _exchange(self, value: Any, nbytes: int, combine: Callable[[dict[int, Any]], Any] = dict) -> Any:
        """What ``combine`` makes, once, of the values of the simulated ranks by rank; this one receives ``nbytes``."""
        number, rank = self._here.round, self._here.rank
        self._here.round += 1
        meeting = self._rounds.setdefault(number, _Round())
        meeting.values[rank] = value
        while len(meeting.values) < len(self.ranks):
            self.pass_on(idle=True)
        self.count("collectives")
        self.count("received bytes", nbytes)
        self._rounds.pop(number - 1, None)  # every rank has left the round before
        if meeting.combined is None:
            meeting.combined = combine(meeting.values)
        return meeting.combined

    def _by_rank(self, values: dict[int, Any]) -> list[Any]:
        others = values[self.ranks[-1]]
        return [values.get(rank, others) for rank in range(self.world_size)]

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
            values = self._by_rank(self._exchange(tensor, tensor.nbytes * self.world_size))
            for mine, one in zip(tensors, values, strict=True):
                mine.copy_(one)

        def gather(tensor: torch.Tensor, parts: list[torch.Tensor] | None, dst: int = 0, group: Any = None) -> None:
            values = self._exchange(tensor, 0 if parts is None else tensor.nbytes * self.world_size)
            if parts is not None:
                for mine, one in zip(parts, self._by_rank(values), strict=True):
                    mine.copy_(one)

        def broadcast_object_list(values: list[Any], src: int = 0, group: Any = None) -> None:
            nbytes = len(_pickled(values)) if self._here.rank == src else 0
            sent, nbytes = self._exchange((list(values), nbytes), 0)[src]
            self.count("received bytes", nbytes)
            values[:] = sent

        def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
            def reduced(values: dict[int, torch.Tensor]) -> torch.Tensor:
                stacked = torch.stack(list(values.values()))
                return stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.amax(0)

            tensor.copy_(self._exchange(tensor.clone(), tensor.nbytes, reduced))

        collectives = {
            "is_initialized": lambda: True,
            "get_world_size": lambda group=None: self.world_size,
            "get_rank": lambda group=None: self._here.rank,
            "get_backend": lambda group=None: "gloo",
            "all_gather": all_gather,
            "gather": gather,
            "broadcast_object_list": broadcast_object_list,
            "all_reduce": all_reduce,
        }
        world = SimpleNamespace(WORLD=_Group())
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: self.pass_on(idle=True))
        with ExitStack() as stack:
            for name, replacement in collectives.items():
                stack.enter_context(mock.patch.object(dist, name, replacement))
            stack.enter_context(mock.patch.object(dist, "group", world))
            for module in (partners, barrier):
                stack.enter_context(mock.patch.object(module, "_get_default_store", lambda: self.store))
                stack.enter_context(mock.patch.object(module, "machine", self._machine))
                stack.enter_context(mock.patch.object(module, "_known", module._known))
            stack.enter_context(mock.patch.object(partners, "time", clock))
            identity = process_identity.identity(os.getpid())
            stack.enter_context(mock.patch.object(partners, "identity", lambda process: identity))
            for module in (checkpoint_open, optimizer_reader, save_commit):
                stack.enter_context(self._counting(module, "read_torch_file", "headers"))
            for names, what in ((_LOOKS, "looked at"), (_CHANGES, "changed"), (("open",), "opened")):
                for name in names:
                    stack.enter_context(self._counting(os, name, what))
            for opener in (io, builtins):
                stack.enter_context(self._counting(opener, "open", "opened"))
            stack.enter_context(self._counting(os, "listdir", "listed"))
            stack.enter_context(mock.patch.object(os, "scandir", self._scandir(os.scandir)))
            yield

    def _machine(self) -> str:
        return f"node {self._here.rank // RANKS_PER_NODE}"

    def _counting(self, owner: Any, name: str, what: str) -> Any:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count(what)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, counting)

    def _scandir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        class Listed:
            """The entries of a directory; a look at the size of one is counted."""

            def __init__(entries, path: Any = ".") -> None:
                self.count("listed")
                entries._found = original(path)

            def __enter__(entries) -> Any:
                return entries

            def __exit__(entries, *error: object) -> None:
                entries._found.close()

            def __iter__(entries) -> Iterator[Any]:
                return (_Entry(entry, self) for entry in entries._found)

        return Listed


@dataclass(slots=True)
class _Round:
    """One collective: the values of the simulated ranks that have come to it, and what was made of all of them."""

    values: dict[int, Any] = field(default_factory=dict)
    combined: Any = None


class _Entry:
    """An entry of a directory whose ``stat`` is counted; its kind comes with the listing."""

    def __init__(self, entry: os.DirEntry[str], ranks: SimulatedRanks) -> None:
        self.name, self.path = entry.name, entry.path
        self.is_file, self.is_dir, self.is_symlink = entry.is_file, entry.is_dir, entry.is_symlink
        self._entry, self._ranks = entry, ranks

    def __fspath__(self) -> str:
        return self.path

    def stat(self, **kwargs: Any) -> os.stat_result:
        self._ranks.count("looked at")
        return self._entry.stat(**kwargs)


class _Store:
    """A key-value store in memory, with the methods of ``torch.distributed.Store``; each call is a request."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self._ranks, self._values = ranks, dict[str, bytes]()

    def set(self, key: str, value: str) -> None:
        self._ranks.count("store requests")
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._ranks.count("store requests")
        return self._values[key]

    def add(self, key: str, number: int) -> int:
        self._ranks.count("store requests")
        found = int(self._values.get(key, b"0")) + number
        self._values[key] = str(found).encode()
        return found

    def check(self, keys: list[str]) -> bool:
        self._ranks.count("store requests")
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._ranks.count("store requests")
        return [self._values[key] for key in keys]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._ranks.count("store requests")
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = value.encode()
        return self._values[key]

    def delete_key(self, key: str) -> bool:
        self._ranks.count("store requests")
        return self._values.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: Any) -> None:
        """One request, however long it lasts: all other ranks run until they wait, too."""
        self._ranks.count("store requests")
        while not all(key in self._values for key in keys):
            self._ranks.pass_on(idle=True)


def _pickled(values: list[Any]) -> bytes:
    import pickle

    return pickle.dumps(values)
