"""Roll calls of a save: all ranks have come as far as this, or every one of them is told which have not.

A collective that a rank never enters ends after torch's own limit, half an hour or never, and names nobody. So before
each collective of a save the ranks meet at the key-value store of their process group, which costs a few small
messages to it. Whoever has waited for ``timeout_s``, or sees on its own machine that the process of a missing rank has
ended, says so to all: they raise the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zeroelastic.agree import settle, together
from zeroelastic.errors import AbsentRankError, ZeroElasticError
from zeroelastic.stage3.partners import announce, life_of_rank

T = TypeVar("T")

_PREFIX = "zeroelastic/save"
_TICK_S = 0.2
_GRACE_S = 60.0
"""How long a rank may take to answer, in a save that has lost another, where nobody sees whether it lives."""
_EVERYBODY = "everybody"
_FAILED = "a collective failed on another rank"


@dataclass(slots=True)
class _Known:
    """The process group that was last seen, how many saves its ranks have begun, and this rank's keys of those ended.

    Every rank has ended a save before it meets for a later one that is begun after that: when all are at such a
    meeting nobody asks for these keys any more, and they are removed.
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
        self._what, self.timeout_s = what, timeout_s
        self.left = "The tag is not committed, and `latest` is unchanged."
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._meeting = 0
        self._keys: tuple[str, ...] = ()
        self._ended_before: tuple[str, ...] = ()
        if self._world_size == 1:
            return
        self._store = _get_default_store()
        if _known.group is not dist.group.WORLD:
            _known.group, _known.saves, _known.keys = dist.group.WORLD, 0, ()
            self._told(announce)
        _known.saves += 1
        self._save = _known.saves
        self._ended_before, _known.keys = _known.keys, ()

    def meet(self, doing: str) -> None:
        """Return when every rank is here. Raises AbsentRankError, the same on every rank that is. Collective."""
        if self._world_size == 1:
            return
        self._meeting += 1
        verdict = self._told(self._wait_for_all)
        if verdict != _EVERYBODY:
            self._told(lambda: self._decide(self._key(0, "outcome"), verdict))  # those in a collective wait for it
            raise AbsentRankError(f"{self._what}: {verdict} while {doing}. {self.left}")
        self._told(lambda: [self._store.delete_key(key) for key in (*self._ended_before, *self._keys)])
        names = (self._rank, "outcome", "count") if self._rank == 0 else (self._rank,)
        self._ended_before, self._keys = (), tuple(self._key(self._meeting, name) for name in names)

    def end(self) -> None:
        """There are no more meetings: what the last has left at the store is removed at the first of a later save.

        In the thread that makes the next roll call: a save in the background may meet while another is begun.
        """
        _known.keys, self._keys = (*_known.keys, *self._keys), ()

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
            if self._store.check([self._key(0, "alarm")]):
                verdict = self._count_the_living()
                return self._decide(outcome, verdict if verdict != _EVERYBODY else _FAILED)
            waited = time.monotonic() - began
            missing = self._missing(self._meeting)
            ended = [rank for rank in missing if life_of_rank(rank) == "ended"]
            if ended:
                return self._decide(outcome, _have_ended(ended))
            if missing and waited > self.timeout_s:
                return self._decide(outcome, self._late(missing))
        return str(self._store.get(outcome).decode())

    def _count_the_living(self) -> str:
        """Every rank that still runs comes here when one of them has lost another, or says who is lost at a meeting.

        A rank whose process is seen to live is waited for, as in a meeting: what it does may take its time.
        """
        self._store.set(self._key(0, "alarm"), "1")
        self._store.set(self._key(0, self._rank), "1")
        outcome = self._key(0, "outcome")
        began = time.monotonic()
        while not self._appears(outcome, _TICK_S):
            missing = self._missing(0)
            life = {rank: life_of_rank(rank) for rank in missing}
            ended = [rank for rank in missing if life[rank] == "ended"]
            silent = [rank for rank in missing if life[rank] == "unknown"]
            waited = time.monotonic() - began
            if len(ended) == len(missing):
                return self._decide(outcome, _have_ended(ended) if ended else _EVERYBODY)
            if waited > min(_GRACE_S, self.timeout_s) and (ended or silent):
                verdict = f"{_ranks(silent)} did not answer for {waited:.0f} s"
                return self._decide(outcome, _have_ended(ended) if ended else verdict)
            if waited > self.timeout_s:
                return self._decide(outcome, self._late(missing))
        return str(self._store.get(outcome).decode())

    def _late(self, ranks: list[int]) -> str:
        return f'{_ranks(ranks)} did not arrive within {self.timeout_s:g} s ("save_timeout_s")'

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


def _have_ended(ranks: list[int]) -> str:
    return f"the process of {_ranks(ranks)} has ended"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
