"""Barriers of a save that name the ranks which do not arrive.

A collective that one rank never enters ends after torch's own limit, half an hour or never, and names no rank. So
before each collective of a save the ranks wait for one another through the key-value store of their process group. Each
rank adds to one counter, sets its own key and waits for the one key that holds the outcome. The last rank to
arrive decides it, or one that waits: when the process of a missing rank on its machine has ended, or ``timeout_s`` have
passed. Every rank then raises the same error. The number of requests that a waiting rank makes does not depend on the
number of ranks. The outcome also says whether an action of any rank has failed: if none has, no collective follows.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zeroelastic.distributed.collective import all_or_raise, limit
from zeroelastic.distributed.partners import absent_ranks, announce, identities_on_this_machine
from zeroelastic.distributed.process_identity import life_of
from zeroelastic.errors import AbsentRankError, ZeroElasticError, rank_list

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX = "zeroelastic/save"
_LAST_FAILED = f"{_PREFIX}/failed"
"""The key that has the number of the last save that a rank was missing at, and what was saved."""
_TICK_S, _MAX_PAUSE_S = 0.2, 2.0
"""The first pause between two requests of a waiting rank, and the longest; each pause is twice the one before."""
_GRACE_S = 60.0
"""How long a rank may take to answer, in a save that has lost another, where no rank sees whether it lives."""
_EVERYBODY, _ACTION_FAILED, _ALARM = "everybody", "an action failed", "alarm"
_FAILED = "a collective failed on another rank"
_STAGES = {
    "begin": "it was about to be saved",
    "write": "its files were written",
    "fsync": "its files were made durable",
    "read back": "its files were read back",
    "upload": "its files were transferred",
    "complete": "its uploads were completed",
    "record": "its commit record was written",
    "publish": "it was put in place",
    "latest": "`latest` was written",
    "end": "its end was waited for",
}
"""Error messages say by these what a save did before each barrier."""


@dataclass(slots=True)
class _GroupSaves:
    """The current process group, how many saves it has begun, and the keys that this rank's finished saves have left.

    Every rank has ended a save before it waits at a barrier of a later one. So when all ranks are at such a barrier,
    no rank reads these keys any more, and they are removed. The group may end meanwhile.
    """

    group: ref[Any] | None = None
    saves: int = 0
    keys: tuple[str, ...] = ()


_known = _GroupSaves()


class SaveBarrier:
    """The barriers of one save. Every rank makes one object at the same point and waits at the same barriers in order.

    ``outcome_note`` ends each error message: it states the result of the failed save. ``timeout_s`` is no longer than
    collectives may take.
    """

    def __init__(self, what: object, *, timeout_s: float) -> None:
        self._what, self.timeout_s = what, min(timeout_s, limit())
        self._limited_by = "set_collective_timeout" if self.timeout_s == limit() else '"save_timeout_s"'
        self.outcome_note = "The tag is not committed, and `latest` is unchanged."
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._meeting = 0
        self._keys: tuple[str, ...] = ()
        self._ended_before: tuple[str, ...] = ()
        if self._world_size == 1:
            return
        self._store = _get_default_store()
        known = None if _known.group is None else _known.group()
        if known is not dist.group.WORLD:
            # Its keys may have these names again: the store of another group has a prefix of its own.
            _known.group, _known.saves, _known.keys = ref(dist.group.WORLD), 0, ()
            self._store_request(announce)
        _known.saves = self._save = self._store_request(self._number)
        self._ended_before, _known.keys = _known.keys, ()

    def wait(self, stage: str, *, ok: bool = True) -> bool:
        """Return when every rank is here, or raise the same AbsentRankError on every rank that is. Collective.

        Returns whether all are ``ok``, the same on every rank.
        """
        if self._world_size == 1:
            return ok
        self._meeting += 1
        meet = partial(self._wait_for_all, ok=ok)
        verdict = store_request(meet, self._what, self.outcome_note, patience_s=self.timeout_s)
        if verdict == _ALARM:  # a rank was lost in a collective, whose others say the same
            verdict, stage = self._store_request(self._find_lost_ranks), "it was saved"
            verdict = verdict if verdict != _EVERYBODY else _FAILED
        if verdict not in (_EVERYBODY, _ACTION_FAILED):
            self._store_request(
                lambda: self._decide(self._key(0, "outcome"), verdict)
            )  # ranks whose collective failed wait for it
            raise self._absent(verdict, _STAGES.get(stage, stage))
        self._store_request(lambda: [self._store.delete_key(key) for key in (*self._ended_before, *self._keys)])
        names = (self._rank, "outcome", "count") if self._rank == 0 else (self._rank,)
        names = (*names, _ACTION_FAILED) if verdict == _ACTION_FAILED and self._rank == 0 else names
        self._ended_before, self._keys = (), tuple(self._key(self._meeting, name) for name in names)
        return verdict == _EVERYBODY

    def is_given_up(self) -> bool:
        """Whether the ranks at the next barrier have given this one up, which was stopped for a while before it."""
        if self._world_size == 1:
            return False
        return self._store_request(lambda: bool(self._store.check([self._key(self._meeting + 1, "outcome")])))

    def close(self) -> None:
        """End the barriers of this save; its keys that are still in the store are removed at the first of a later save.

        Call it in the thread that makes the next SaveBarrier: an asynchronous save may wait while another begins.
        """
        _known.keys, self._keys = (*_known.keys, *self._keys), ()

    def all_or_raise(self, action: Callable[[], T], stage: str) -> T:
        """``all_or_raise``, for actions that may take their time on other ranks. Collective."""
        values, failure = list[T](), None
        try:
            values.append(action())
        except Exception as error:
            failure = error

        def give() -> T:
            if failure is not None:
                raise failure
            return values[0]

        return give() if self.wait(stage, ok=failure is None) else all_or_raise(give)

    @contextmanager
    def attribute_failures(self) -> Iterator[None]:
        """Replace the error of a collective that lost a rank by one that names it, on every running rank."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZeroElasticError) or self._world_size == 1 or not _is_of_a_collective(error):
                raise
            verdict = self._store_request(self._find_lost_ranks)
            if verdict == _EVERYBODY:
                raise
            raise self._absent(verdict, "it was saved") from error

    def _number(self) -> int:
        """Return the number of this save, also on a rank that was not at the last ones, which failed without it.

        The one that failed last may be this one: then the rank is late for it, and its error says so.
        """
        number, _, what = self._store.compare_set(_LAST_FAILED, "", "0 ").decode().partition(" ")
        late = int(number) > _known.saves
        return int(number) + (what != str(self._what)) if late else _known.saves + 1

    def _absent(self, verdict: str, doing: str) -> AbsentRankError:
        """Return the error of this save, which no rank can go on with."""
        self._store_request(lambda: self._store.set(_LAST_FAILED, f"{self._save} {self._what}"))
        return AbsentRankError(f"{self._what}: {verdict} while {doing}. {self.outcome_note}")

    def _key(self, meeting: int, name: object) -> str:
        return f"{_PREFIX}/{self._save}/{meeting}/{name}"

    def _wait_for_all(self, *, ok: bool) -> str:
        """Return the outcome of the meeting, the same on every rank; ``_ALARM`` where a collective has failed."""
        meeting = self._meeting
        if not ok:
            self._store.set(self._key(meeting, _ACTION_FAILED), "1")

        def judge(waited: float) -> str | None:
            if self._store.check([self._key(0, "alarm")]):
                return _ALARM
            if ended := self._ended(meeting):
                return _have_ended(ended)
            if not self._polls_all_ranks(meeting, waited, self.timeout_s):
                return None
            missing = self._missing(meeting, range(self._world_size))
            return self._late(missing) if missing else None

        if self._arrive(meeting) == self._world_size:
            all_ok = not self._store.check([self._key(meeting, _ACTION_FAILED)])
            return self._decide(self._key(meeting, "outcome"), _EVERYBODY if all_ok else _ACTION_FAILED)
        return self._outcome(meeting, judge)

    def _find_lost_ranks(self) -> str:
        """Find out which ranks are lost; every running rank comes here when one of them has lost another.

        A rank whose process is seen to live is waited for, as in a meeting: its work may take its time.
        """

        def judge(waited: float) -> str | None:
            ended = self._ended(0)
            if self._store.add(self._key(0, "count"), 0) + len(ended) == self._world_size:
                return _have_ended(ended) if ended else _EVERYBODY
            patience_s = min(_GRACE_S, self.timeout_s)
            if ended and waited > patience_s:
                return _have_ended(ended)
            if not self._polls_all_ranks(0, waited, patience_s):
                return None
            missing = self._missing(0, range(self._world_size))
            silent = [rank for rank in missing if rank not in identities_on_this_machine()]
            if silent:
                return f"{rank_list(silent)} did not answer for {waited:.0f} s"
            return self._late(missing) if missing and waited > self.timeout_s else None

        self._store.set(self._key(0, "alarm"), "1")
        self._arrive(0)
        return self._outcome(0, judge)

    def _arrive(self, meeting: int) -> int:
        """Record that this rank is at a meeting; returns how many ranks are."""
        self._store.set(self._key(meeting, self._rank), "")
        return int(self._store.add(self._key(meeting, "count"), 1))

    def _outcome(self, meeting: int, judge: Callable[[float], str | None]) -> str:
        """Wait for the outcome of a meeting; ``judge`` is asked for one after each pause, with the seconds waited."""
        key, began, pause = self._key(meeting, "outcome"), time.monotonic(), _TICK_S
        while not self._appears(key, pause):
            waited = time.monotonic() - began
            pause = min(2 * pause, _MAX_PAUSE_S, max(_TICK_S, self.timeout_s - waited))
            verdict = judge(waited)
            if verdict is not None:
                return self._decide(key, verdict)
        return str(self._store.get(key).decode())

    def _ended(self, meeting: int) -> list[int]:
        """Return the ranks of this machine whose processes have ended before they came to a meeting."""
        here = identities_on_this_machine()
        return self._missing(meeting, [rank for rank in sorted(here) if life_of(here[rank]) == "ended"])

    def _late(self, ranks: list[int]) -> str:
        return f"{rank_list(ranks)} did not arrive within {self.timeout_s:g} s ({self._limited_by})"

    def _decide(self, key: str, verdict: str) -> str:
        """Return the value of a key that the first rank to decide has set."""
        return str(self._store.compare_set(key, "", verdict).decode())

    def _appears(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # not within this time; or the store is gone, which the next request finds
            return bool(self._store.check([key]))
        return True

    def _missing(self, meeting: int, ranks: Sequence[int]) -> list[int]:
        return absent_ranks(self._store, ranks, lambda rank: self._key(meeting, rank))

    def _polls_all_ranks(self, meeting: int, waited: float, patience_s: float) -> bool:
        """Whether this rank is the one that asks for every rank, when ``patience_s`` have passed.

        The others do so too when that took longer than ``_GRACE_S``: the first may be dead.
        """
        if waited <= patience_s:
            return False
        key = self._key(meeting, "poll")
        first = self._decide(key, str(self._rank))
        self._keys += (key,) if first == str(self._rank) and key not in self._keys else ()
        return first == str(self._rank) or waited > patience_s + _GRACE_S

    def _store_request(self, ask: Callable[[], T]) -> T:
        return store_request(ask, self._what, self.outcome_note)


def store_request(ask: Callable[[], T], what: object, outcome: str, *, patience_s: float | None = None) -> T:
    """Return the answer of the store of the process group. Raises AbsentRankError where its process has gone.

    A request to a process that is stopped has no limit in torch: an error is logged when it takes ``2 * _GRACE_S``
    longer than ``patience_s``.
    """
    waits_s = (patience_s or 0.0) + 2 * _GRACE_S

    def say() -> None:
        logger.error(
            "%s: has waited for the store of this process group for %.0f s. The process that holds it, rank 0 or the "
            "launcher, may be stopped: let it go on, or end the job.",
            *(what, waits_s),
        )

    timer = threading.Timer(waits_s, say)
    timer.daemon = True
    try:
        if patience_s is not None:
            timer.start()
        return ask()
    except RuntimeError as error:
        raise AbsentRankError(
            f"{what}: the process that holds the store of this process group cannot be reached any more "
            f"({str(error).splitlines()[0]}): rank 0, or the launcher. {outcome}"
        ) from error
    finally:
        timer.cancel()


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Return whether a collective raised the error: NCCL raises a DistError, gloo names its place in gloo.

    Errors of other backends are known by the function that called them: the wait for one may be in any.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    by_place = module.startswith(("torch.distributed.", "deepspeed.comm.", "zeroelastic.distributed."))
    return isinstance(error, dist.DistError) or "/gloo/" in str(error) or by_place


def _have_ended(ranks: list[int]) -> str:
    return f"the process of {rank_list(ranks)} has ended"
