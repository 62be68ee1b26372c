"""How long ranks wait for one that has fallen silent: a host whose network is gone says nothing, not even goodbye."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from zeroelastic.errors import ConfigError, UnsupportedError


def set_collective_timeout(seconds: float) -> None:
    """Let every collective of every process group that there is fail after ``seconds``. Call it after initialize.

    The timeout given to ``init_process_group`` holds for the default group only: the groups that DeepSpeed makes of it,
    among them the one that ZeRO works in, wait 10 minutes (NCCL) or 30 (gloo) whatever was given (torch.distributed's
    ``new_group``). Choose more than the longest that one rank keeps the others waiting, as in a save. Raises
    ConfigError when ``seconds`` is not more than 0 or there is no process group yet, UnsupportedError where torch
    cannot do it::

        engine, *_ = deepspeed.initialize(...)
        set_collective_timeout(120)
    """
    if not seconds > 0:
        raise ConfigError(f"a collective timeout of {seconds!r} seconds; it has to be more than 0.")
    if not dist.is_initialized():
        raise ConfigError("there is no process group yet: call set_collective_timeout after deepspeed.initialize.")
    c10d = dist.distributed_c10d
    world, set_one = getattr(c10d, "_world", None), getattr(c10d, "_set_pg_timeout", None)
    if world is None or set_one is None:
        raise UnsupportedError(
            "this torch has no way to change the timeout of a process group; give the timeout to init_process_group, "
            "which covers the default group."
        )
    for group in list(world.pg_map):
        set_one(datetime.timedelta(seconds=seconds), group)
