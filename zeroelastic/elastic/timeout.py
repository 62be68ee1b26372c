"""How long ranks wait for one that has fallen silent: a host whose network is gone says nothing, not even goodbye."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from zeroelastic.errors import ConfigError, UnsupportedError

DEFAULT_S = 600.0
"""What ``zeroelastic.run`` sets: DeepSpeed's own limit for the default group, and torch's for NCCL."""


def set_collective_timeout(seconds: float = DEFAULT_S) -> None:
    """Let the collectives of every process group, that there is or that is made later, fail after ``seconds``.

    Call it before ``deepspeed.initialize``: a rank that is lost while the engine is being built is waited for as well.
    A timeout that is given to ``init_process_group`` holds for the default group only; the groups that DeepSpeed makes
    of it, among them the one that ZeRO works in, take torch's own default, 10 minutes (NCCL) or 30 (gloo), whatever
    was given. This changes that default; later groups that are made with a timeout of their own keep it. Choose more
    than the longest that one rank keeps the others waiting, as in a save. Raises ConfigError when ``seconds`` is not
    more than 0, UnsupportedError where torch cannot do it::

        set_collective_timeout(120)
        engine, *_ = deepspeed.initialize(...)
    """
    if not seconds > 0:
        raise ConfigError(f"a collective timeout of {seconds!r} seconds; it has to be more than 0.")
    c10d, limit = dist.distributed_c10d, datetime.timedelta(seconds=seconds)
    world, set_one = getattr(c10d, "_world", None), getattr(c10d, "_set_pg_timeout", None)
    if world is None or set_one is None or not hasattr(c10d, "default_pg_timeout"):
        raise UnsupportedError(
            "this torch has no way to change the timeout of a process group; give the timeout to init_process_group, "
            "which covers the default group."
        )
    vars(c10d)["default_pg_timeout"] = limit
    if getattr(c10d, "default_pg_nccl_timeout", None) is not None:
        vars(c10d)["default_pg_nccl_timeout"] = limit
    for group in list(world.pg_map) if dist.is_initialized() else []:
        set_one(limit, group)
