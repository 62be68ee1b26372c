"""Who takes part in what is collective: every rank must run with zeroelastic installed, and with the same options.

Where a rank runs DeepSpeed alone, it never enters a collective of ours, and the others would wait in it until the
group's timeout. So a rank announces itself in the key-value store of its process group, and the others look there
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

from zeroelastic.agree import together
from zeroelastic.errors import ConfigError, UsageError
from zeroelastic.living import Life, identity, life_of

_WAIT_S = 30.0
"""How much later than the first rank another may call install(), where the engine was built before."""
_TICK_S = 0.1
_AGREED = "_zeroelastic_agreed"

Facts = Mapping[str, object]

_WITHDRAWN = "zeroelastic/withdrawn"
"""The key that is there when any rank has withdrawn."""

_announced_to: Any = None
"""The process group in whose store this rank is."""

_complete: Any = None
"""The process group in whose store every rank was seen; asking again costs one key then, whatever its size."""


def announce() -> None:
    """Say in the store that this rank runs with zeroelastic; nothing where there is no process group yet."""
    global _announced_to
    if dist.is_initialized() and _announced_to is not dist.group.WORLD:
        store = _get_default_store()
        if store is None:  # MPI has none
            return
        store.set(_key(dist.get_rank()), identity(os.getpid()))
        _announced_to = dist.group.WORLD


def withdraw() -> None:
    """Take it back."""
    global _announced_to
    if dist.is_initialized() and _announced_to is dist.group.WORLD:
        with suppress(RuntimeError):  # the store is gone, and with it those who would ask
            _get_default_store().delete_key(_key(dist.get_rank()))
            _get_default_store().set(_WITHDRAWN, "1")
    _announced_to = None


def life_of_rank(rank: int) -> Life:
    """Whether a rank's process runs, as far as this machine can see it."""
    store = _get_default_store()
    return life_of(store.get(_key(rank)).decode()) if store.check([_key(rank)]) else "unknown"


def require_partners(*, wait: bool = True) -> None:
    """Raise UsageError unless every rank runs with zeroelastic; by way of the store alone, within seconds.

    Without ``wait``, every rank has had its time to announce itself.
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


def agree_on(engine: Any, facts: Callable[[], Facts]) -> None:
    """Raise the same ConfigError on every rank where ``facts``, or whether they can be had, differ. Collective.

    Once for each engine; what it found is kept there.
    """
    if vars(engine).get(_AGREED):
        return
    everybody = together(lambda: dict(facts()))[1]
    different = [
        f"{name} is {', '.join(f'{facts[name]!r} on rank {rank}' for rank, facts in enumerate(everybody))}"
        for name in everybody[0]
        if any(facts[name] != everybody[0][name] for facts in everybody)
    ]
    if different:
        raise ConfigError(
            f"the DeepSpeed configuration differs between the ranks: {'; '.join(different)}. Give every rank the same."
        )
    vars(engine)[_AGREED] = True


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
