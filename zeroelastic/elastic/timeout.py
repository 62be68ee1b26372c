"""The time that ranks wait for a rank that no longer answers, for example because its host lost the network."""

from __future__ import annotations

import datetime
from importlib.util import find_spec

import torch.distributed as dist

from zeroelastic.errors import ConfigError, UnsupportedError

DEFAULT_S = 600.0
"""The default of ``zeroelastic.run``; also DeepSpeed's limit for the default group, and torch's for NCCL."""


def set_collective_timeout(seconds: float = DEFAULT_S) -> None:
    """Let collectives of every process group, existing or made later, fail after ``seconds``.

    Call it before ``deepspeed.initialize``, since a rank can also be lost while the engine is being built. The timeout
    of ``init_process_group`` holds for the default group only: the groups that DeepSpeed makes, among them the one that
    ZeRO uses, take torch's default of 10 minutes (NCCL) or 30 (gloo). This function changes that default, and that of
    ``deepspeed.init_distributed``; later groups for which a script gives a timeout keep it. Choose more than the
    longest time for which one rank keeps the others waiting, as in a save. Raises ConfigError when ``seconds`` is not
    more than 0, UnsupportedError when this torch has no way to do it::

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
    if find_spec("deepspeed") is not None:
        from zeroelastic.deepspeed.process_world import set_default_timeout

        set_default_timeout(limit)
    for group in list(world.pg_map) if dist.is_initialized() else []:
        set_one(limit, group)
