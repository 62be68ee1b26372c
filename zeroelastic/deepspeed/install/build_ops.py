"""DeepSpeed's ops, compiled before a job needs them: within ``deepspeed.initialize`` the other ranks wait meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zeroelastic.deepspeed.install.build_locks import watch_locks
from zeroelastic.errors import UnsupportedError, UsageError

logger = logging.getLogger(__name__)


def build_ops(names: Sequence[str]) -> None:
    """Compile and load ops by the names that ``ds_report`` lists; at once where they are in torch's cache.

    Of several processes on a machine one compiles each op, and the others wait for it; the lock of one that was killed
    is removed. Raises UsageError for a name that this DeepSpeed lacks, UnsupportedError for an op that this machine
    cannot build. Source: ``deepspeed.ops.op_builder.all_ops.ALL_OPS`` (DeepSpeed 0.19.8)::

        build_ops(["cpu_adam"])
    """
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    unknown = [name for name in names if name not in ALL_OPS]
    if unknown:
        raise UsageError(f"DeepSpeed has no op {', '.join(unknown)} here. Choose among {', '.join(sorted(ALL_OPS))}.")
    watch_locks()
    for name in dict.fromkeys(names):
        builder = ALL_OPS[name]
        if not builder.is_compatible(verbose=False):
            raise UnsupportedError(f"the op {name} cannot be built on this machine; `ds_report` says what it lacks.")
        builder.load()
        logger.info("DeepSpeed's op %s is built", name)
