"""The ranks of a training job: each must run with zeroelastic installed, and with the same options.

A rank that runs DeepSpeed alone never enters a collective of ours, and the others would wait in it until the timeout of
the process group. So each rank announces itself in the key-value store of its process group, and the others look there
before the first collective of each call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zeroelastic.distributed.collective import all_gather_or_raise
from zeroelastic.distributed.process_identity import identity, machine
from zeroelastic.errors import ConfigError, UsageError, rank_list, some

_WAIT_S = 30.0
"""How much later than the first rank another may call install(), where the engine was built before."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_MAX_LISTED = 6

Facts = Mapping[str, object]

_PREFIX = "zeroelastic/installed"
_ALL = f"{_PREFIX}/all"
"""The key that the last rank to announce itself sets."""
_WITHDRAWN = "zeroelastic/withdrawn"
"""The key that is there when any rank has withdrawn: what was counted before does not count any more."""


@dataclass(slots=True)
class _KnownPartners:
    """The state of a process group in this process: that it has announced itself, that all have, and who runs here.

    ``here``: by rank, identities of processes; None where not all are known yet.
    """

    announced: bool = False
    complete: bool = False
    here: dict[int, str] | None = None


_known_of: WeakKeyDictionary[Any, _KnownPartners] = WeakKeyDictionary()
"""By process group, which ends with its last reference."""


def _known() -> _KnownPartners:
    """The state of the present default process group."""
    return _known_of.setdefault(dist.group.WORLD, _KnownPartners())


def announce() -> None:
    """Record in the store that this rank runs with zeroelastic; does nothing where there is no process group yet."""
    if dist.is_initialized() and not _known().announced:
        store = _get_default_store()
        if store is None:  # MPI has none
            return
        rank, name = dist.get_rank(), identity(os.getpid())
        store.set(_key(rank), name)
        store.set(f"{_machine_key()}/{store.add(_machine_key(), 1)}", f"{rank} {name}")
        if store.add(f"{_PREFIX}/count", 1) == dist.get_world_size():
            store.set(_ALL, "1")
        _known().announced = True


def withdraw() -> None:
    """Remove the record that ``announce`` made."""
    if dist.is_initialized() and _known().announced:
        with suppress(RuntimeError):  # the store is gone, so no rank can ask any more
            _get_default_store().set(_WITHDRAWN, "1")
            _get_default_store().delete_key(_key(dist.get_rank()))
        _known().announced = False


def identities_on_this_machine() -> dict[int, str]:
    """The identity of the process of each rank that has announced itself and runs on this machine, by rank."""
    known = _known()
    if known.here is not None:
        return known.here
    store = _get_default_store()
    complete = store.check([_ALL])
    keys = [f"{_machine_key()}/{number + 1}" for number in range(store.add(_machine_key(), 0))]
    named = [key for key in keys if complete or store.check([key])]
    entries = [entry.decode().partition(" ") for entry in store.multi_get(named)] if named else []
    found = dict(sorted((int(rank), name) for rank, _, name in entries))
    if complete:
        known.here = found
    return found


def absent_ranks(store: Any, ranks: Sequence[int], key: Callable[[int], str]) -> list[int]:
    """The ranks whose key is not in the store: found by halves, so that few requests find few of them."""
    if not ranks or store.check([key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return absent_ranks(store, ranks[:middle], key) + absent_ranks(store, ranks[middle:], key)


def require_partners(*, wait: bool = True) -> None:
    """Raise UsageError unless every rank runs with zeroelastic; uses the store alone and takes seconds at most.

    Without ``wait``, a rank that has not announced itself yet counts as absent.
    """
    if dist.get_world_size() == 1 or _get_default_store() is None:
        return
    announce()
    deadline = time.monotonic() + (_WAIT_S if wait else 0.0)
    pause = _FIRST_PAUSE_S
    while not _all_are_here():
        if time.monotonic() >= deadline:
            absent = absent_ranks(_get_default_store(), range(dist.get_world_size()), _key)
            if not absent:
                return
            raise UsageError(
                f"zeroelastic is installed on rank {dist.get_rank()} but not on rank{'s' if len(absent) > 1 else ''} "
                f"{', '.join(map(str, absent))}: a save or load would hang. Call "
                "zeroelastic.install() on every rank, before deepspeed.initialize, or on none."
            )
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _MAX_PAUSE_S)


def agree_on(facts: Callable[[], Facts]) -> None:
    """Raise the same ConfigError on every rank if ``facts`` differ, or fail on one of them. Collective."""
    everybody = all_gather_or_raise(lambda: dict(facts()))[1]
    different: list[str] = []
    for name in everybody[0]:
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(everybody):
            ranks.setdefault(repr(own[name]), []).append(rank)
        if len(ranks) > 1:
            where = some((f"{value} on {_ranks(found)}" for value, found in ranks.items()), _MAX_LISTED)
            different.append(f"{name} is {where}")
    if different:
        raise ConfigError(
            f"the DeepSpeed configuration differs between the ranks: {'; '.join(different)}. Give every rank the same."
        )


def _ranks(found: Sequence[int]) -> str:
    """Ranks as text; of many that do not follow each other, the first few."""
    follow = len(found) == found[-1] - found[0] + 1
    return rank_list(found) if follow or len(found) <= _MAX_LISTED else f"ranks {some(map(str, found), _MAX_LISTED)}"


def _all_are_here() -> bool:
    """Whether every rank has announced itself: by the key of the last one, or one by one where any has withdrawn."""
    store = _get_default_store()
    if store.check([_WITHDRAWN]):
        return store.check([_key(rank) for rank in range(dist.get_world_size())])
    known = _known()
    known.complete = known.complete or store.check([_ALL])
    return known.complete


def _key(rank: int) -> str:
    return f"{_PREFIX}/{rank}"


def _machine_key() -> str:
    return f"{_PREFIX}/on/{machine()}"
