"""Roll calls of a save: all ranks have come as far as this, or every one of them is told which have not.

A collective that a rank never enters ends after torch's own limit, half an hour or never, and names nobody. So before
each collective of a save the ranks meet at the key-value store of their process group, which costs a few small
messages to it. Whoever has waited for ``timeout_s``, or sees on its own machine that the process of a missing rank has
ended, says so to all: they raise the same error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zeroelastic.agree import settle, together
from zeroelastic.errors import AbsentRankError, ZeroElasticError

T = TypeVar("T")

_PREFIX = "zeroelastic/save"
_TICK_S = 0.2
_GRACE_S = 10.0
_EVERYBODY = "everybody"


@dataclass(slots=True)
class _Known:
    """The process group that was last seen, how many saves its ranks have begun, and this rank's keys of a meeting.

    When all are at the next meeting nobody asks for these keys any more, and they are removed.
    """

    group: Any = None
    saves: int = 0
    keys: tuple[str, ...] = ()


_known = _Known()


class RollCall:
    """The meetings of one save. Every rank makes one at the same point and calls the same meetings in order.

    ``left`` is what errors say of the state that the save leaves.
    """

    def __init__(self, what: object, *, timeout_s: float) -> None:
        self._what, self._timeout_s = what, timeout_s
        self.left = "The tag is not committed, and `latest` is unchanged."
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._meeting = 0
        if self._world_size == 1:
            return
        self._store = _get_default_store()
        if _known.group is not dist.group.WORLD:
            _known.group, _known.saves, _known.keys = dist.group.WORLD, 0, ()
            self._told(lambda: self._store.set(f"{_PREFIX}/process/{self._rank}", _identity(os.getpid())))
        _known.saves += 1
        self._save = _known.saves

    def meet(self, doing: str) -> None:
        """Return when every rank is here. Raises AbsentRankError, the same on every rank that is. Collective."""
        if self._world_size == 1:
            return
        self._meeting += 1
        verdict = self._told(self._wait_for_all)
        if verdict != _EVERYBODY:
            raise AbsentRankError(f"{self._what}: {verdict} while {doing}. {self.left}")
        self._told(lambda: [self._store.delete_key(key) for key in _known.keys])
        names = (self._rank, "outcome", "count") if self._rank == 0 else (self._rank,)
        _known.keys = tuple(self._key(self._meeting, name) for name in names)

    def settle(self, action: Callable[[], T], doing: str) -> T:
        """``agree.settle``, entered when every rank is through with its action. Collective."""
        outcome = _attempted(action)
        self.meet(doing)
        return settle(outcome)

    def together(self, action: Callable[[], T], doing: str) -> tuple[T, list[T]]:
        """``agree.together``, entered when every rank is through with its action. Collective."""
        outcome = _attempted(action)
        self.meet(doing)
        return together(outcome)

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Turn the error of a collective that lost a rank into one that names it, on every rank that is left."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZeroElasticError) or self._world_size == 1 or not _is_of_a_collective(error):
                raise
            verdict = self._told(self._count_the_living)
            if verdict == _EVERYBODY:
                raise
            raise AbsentRankError(f"{self._what}: {verdict} while it was saved. {self.left}") from error

    def _key(self, meeting: int, name: object) -> str:
        return f"{_PREFIX}/{self._save}/{meeting}/{name}"

    def _wait_for_all(self) -> str:
        outcome = self._key(self._meeting, "outcome")
        self._store.set(self._key(self._meeting, self._rank), "1")
        if self._store.add(self._key(self._meeting, "count"), 1) == self._world_size:
            return self._decide(outcome, _EVERYBODY)
        began = time.monotonic()
        while not self._appears(outcome, _TICK_S):
            waited = time.monotonic() - began
            missing = self._missing(self._meeting)
            ended = [rank for rank in missing if self._has_ended(rank)]
            if not missing:
                continue  # the last of them is about to say so
            if ended:
                return self._decide(outcome, f"the process of {_ranks(ended)} has ended")
            if self._store.check([self._key(0, "alarm")]):
                verdict = self._count_the_living()
                return verdict if verdict != _EVERYBODY else "a collective failed on another rank"
            if waited > self._timeout_s:
                why = f'{_ranks(missing)} did not arrive within {self._timeout_s:g} s ("save_timeout_s")'
                return self._decide(outcome, why)
        return str(self._store.get(outcome).decode())

    def _count_the_living(self) -> str:
        """Every rank that still runs comes here when one of them has lost another; the rest is lost."""
        self._store.set(self._key(0, "alarm"), "1")
        self._store.set(self._key(0, self._rank), "1")
        outcome = self._key(0, "outcome")
        deadline = time.monotonic() + min(_GRACE_S, self._timeout_s)
        while True:
            missing = self._missing(0)
            if not missing:
                return self._decide(outcome, _EVERYBODY)
            if all(self._has_ended(rank) for rank in missing):
                return self._decide(outcome, f"the process of {_ranks(missing)} has ended")
            if time.monotonic() > deadline:
                return self._decide(outcome, f"{_ranks(missing)} cannot be reached")
            if self._appears(outcome, _TICK_S):
                break
        return str(self._store.get(outcome).decode())

    def _decide(self, key: str, verdict: str) -> str:
        """The first verdict that any rank passes holds for all."""
        return str(self._store.compare_set(key, "", verdict).decode())

    def _appears(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # not within this time; or the store is gone, which the next question to it tells
            return bool(self._store.check([key]))
        return True

    def _missing(self, meeting: int) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([self._key(meeting, rank)])]

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended: only where it runs on this machine."""
        key = f"{_PREFIX}/process/{rank}"
        if not self._store.check([key]):
            return False
        said = self._store.get(key).decode()
        place, _, process = said.partition(" ")
        return bool(place == _place() and _identity(int(process.partition(" ")[0])) != said)

    def _told(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RuntimeError as error:
            raise AbsentRankError(
                f"{self._what}: the process that holds the store of this process group cannot be reached any more "
                f"({str(error).splitlines()[0]}): rank 0, or the launcher. {self.left}"
            ) from error


def _attempted(action: Callable[[], T]) -> Callable[[], T]:
    """The action, done: its value, or its exception, is given when it is asked for."""
    try:
        value = action()
    except Exception as error:
        failure = error

        def fail() -> T:
            raise failure

        return fail
    return lambda: value


def _is_of_a_collective(error: RuntimeError) -> bool:
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in ("gloo", "nccl", "peer", "socket"))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _place() -> str:
    """A machine that runs, and a numbering of processes on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _identity(process: int) -> str:
    """One process of all: its place, number and time of start; without a time where it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{_place()} {process} -"
    return f"{_place()} {process} {'-' if fields[0] in 'ZX' else fields[19]}"
