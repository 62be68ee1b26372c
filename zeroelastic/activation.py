"""``ZEROELASTIC=1``: what happens in a process of a training job when it has imported DeepSpeed.

``_zeroelastic_hook`` calls ``start``; docs/guides/front-ends.md describes the variables.
"""

from __future__ import annotations

import os

from zeroelastic import install
from zeroelastic.errors import ConfigError

TIMEOUT = "ZEROELASTIC_COLLECTIVE_TIMEOUT"
"""Seconds for which ranks wait for a lost rank: ``--timeout`` of ``zeroelastic.run``, but torch's default if unset."""


def start() -> None:
    """Install zeroelastic, and do what else the environment asks for. Raises ConfigError, and as ``install`` does."""
    seconds = _timeout()
    install()
    if seconds:
        from zeroelastic.elastic.leaving import set_collective_timeout

        set_collective_timeout(seconds)


def _timeout() -> float | None:
    """The timeout of collectives in seconds; None to leave torch's. Raises ConfigError."""
    text = os.environ.get(TIMEOUT, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{TIMEOUT} is {text!r}; it is a number of seconds, or 0 for torch's default. Change it.")
    return seconds or None
