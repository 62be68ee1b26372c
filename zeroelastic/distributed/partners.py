"""The ranks of a training job: each must run with zeroelastic installed, and with the same options.

A rank that runs DeepSpeed alone never enters a collective of ours, and the others would wait in it until the timeout of
the process group. So each rank announces itself in the key-value store of its process group, and the others look there
before the first collective of each call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zeroelastic.distributed.collective import all_gather_or_raise
from zeroelastic.distributed.process_identity import Life, identity, life_of, machine
from zeroelastic.errors import ConfigError, UsageError

_WAIT_S = 30.0
"""How much later than the first rank another may call install(), where the engine was built before."""
_TICK_S = 0.1

Facts = Mapping[str, object]

_WITHDRAWN = "zeroelastic/withdrawn"
"""The key that is there when any rank has withdrawn."""

_announced_to: Any = None
"""The process group in whose store this rank has announced itself."""

_complete: Any = None
"""The process group in whose store every rank was seen; the next check then asks for one key, whatever its size."""


_local: tuple[Any, dict[int, str]] = (None, {})
"""A process group, and the identities of its ranks on this machine: read once, when every rank has announced itself."""


def announce() -> None:
    """Record in the store that this rank runs with zeroelastic; does nothing where there is no process group yet."""
    global _announced_to
    if dist.is_initialized() and _announced_to is not dist.group.WORLD:
        store = _get_default_store()
        if store is None:  # MPI has none
            return
        store.set(_key(dist.get_rank()), identity(os.getpid()))
        _announced_to = dist.group.WORLD


def withdraw() -> None:
    """Remove the record that ``announce`` made."""
    global _announced_to
    if dist.is_initialized() and _announced_to is dist.group.WORLD:
        with suppress(RuntimeError):  # the store is gone, so no rank can ask any more
            _get_default_store().delete_key(_key(dist.get_rank()))
            _get_default_store().set(_WITHDRAWN, "1")
    _announced_to = None


def life_of_rank(rank: int) -> Life:
    """Whether a rank's process runs, as far as this machine can see it."""
    store = _get_default_store()
    return life_of(store.get(_key(rank)).decode()) if store.check([_key(rank)]) else "unknown"


def identities_on_this_machine() -> dict[int, str]:
    """The identity of the process of each rank that has announced itself and runs on this machine, by rank."""
    global _local
    group, found = _local
    if group is dist.group.WORLD:
        return found
    store, ranks = _get_default_store(), range(dist.get_world_size())
    complete = store.check([_key(rank) for rank in ranks])
    ranks_there = [rank for rank in ranks if complete or store.check([_key(rank)])]
    names = store.multi_get([_key(rank) for rank in ranks_there])
    where = machine()
    found = {
        rank: name.decode()
        for rank, name in zip(ranks_there, names, strict=True)
        if name.decode().partition(" ")[0] == where
    }
    if complete:
        _local = (dist.group.WORLD, found)
    return found


def require_partners(*, wait: bool = True) -> None:
    """Raise UsageError unless every rank runs with zeroelastic; uses the store alone and takes seconds at most.

    Without ``wait``, a rank that has not announced itself yet counts as absent.
    """
    if dist.get_world_size() == 1 or _get_default_store() is None:
        return
    announce()
    deadline = time.monotonic() + (_WAIT_S if wait else 0.0)
    while absent := _absent():
        if time.monotonic() >= deadline:
            raise UsageError(
                f"zeroelastic is installed on rank {dist.get_rank()}, and not on rank{'s' if len(absent) > 1 else ''} "
                f"{', '.join(map(str, absent))}: saves and loads of both together would wait for each other. Call "
                "zeroelastic.install() on every rank, before deepspeed.initialize, or on none."
            )
        time.sleep(_TICK_S)


def agree_on(facts: Callable[[], Facts]) -> None:
    """Raise the same ConfigError on every rank if ``facts`` differ, or fail on one of them. Collective."""
    everybody = all_gather_or_raise(lambda: dict(facts()))[1]
    different = [
        f"{name} is {', '.join(f'{facts[name]!r} on rank {rank}' for rank, facts in enumerate(everybody))}"
        for name in everybody[0]
        if any(facts[name] != everybody[0][name] for facts in everybody)
    ]
    if different:
        raise ConfigError(
            f"the DeepSpeed configuration differs between the ranks: {'; '.join(different)}. Give every rank the same."
        )


def _absent() -> list[int]:
    global _complete
    store, ranks = _get_default_store(), range(dist.get_world_size())
    if _complete is dist.group.WORLD and not store.check([_WITHDRAWN]):
        return []
    if store.check([_key(rank) for rank in ranks]):
        _complete = dist.group.WORLD
        return []
    return [rank for rank in ranks if not store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"zeroelastic/installed/{rank}"
