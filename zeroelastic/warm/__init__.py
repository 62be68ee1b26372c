"""Workers that start warm: one process per node has imported torch and DeepSpeed, and forks each worker.

``client`` takes a worker's place among the launcher's processes and asks for the fork, ``server`` imports and forks,
``messages`` is what the two say to each other. No module here imports torch.
"""

from __future__ import annotations

import os

LAUNCHER = "ZEROELASTIC_LAUNCHER"
"""An environment variable of a worker that was forked from a warm process: its launcher's process id, and its own."""


def launcher_of_warm_worker() -> int | None:
    """The process id of the launcher of this process, if it was forked from a warm process."""
    launcher, _, worker = os.environ.get(LAUNCHER, "").partition(":")
    return int(launcher) if launcher.isdecimal() and worker == str(os.getpid()) else None


def is_warm_worker() -> bool:
    """Whether this process was forked from a warm process."""
    return launcher_of_warm_worker() is not None
