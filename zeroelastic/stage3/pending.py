"""Saves that go on after ``save_checkpoint`` has returned: at most one of an engine, waited for before the next thing.

Two kinds: of a decoupled checkpoint engine (``decoupled``) and in a thread of ours (``background``). Both are finished
before what would change what is being written, or end it: the next save, a load, ``save_16bit_model``, ``destroy``.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.stage3.partners import require_partners

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_zeroelastic_pending"


class Pending(ABC):
    """A save that is not committed yet, as far as this rank knows.

    A process that is forked from a rank has a copy of its saves, which are not its own: they end in the rank.
    """

    seconds: float | None = None
    """From the call of ``save_checkpoint`` to the end of the save, once it is finished; None where that says nothing,
    because nothing was done in between."""

    def __init__(self, tag_dir: Path) -> None:
        self.tag_dir, self._process = tag_dir, os.getpid()

    def is_own(self) -> bool:
        """Whether this process began it."""
        return self._process == os.getpid()

    @abstractmethod
    def is_done(self) -> bool:
        """Whether ``finish`` would not have to wait on this rank."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for it and commit it; raises what went wrong, on every rank. Collective."""

    @abstractmethod
    def abandon(self) -> None:
        """Said when nobody will call ``finish`` any more, on this rank alone."""


def hand_over(engine: Any, pending: Pending) -> None:
    """Remember a save until ``flush``."""
    assert not has_pending(engine)
    setattr(engine, _ATTRIBUTE, pending)


def has_pending(engine: Any) -> bool:
    """Whether a save of ours waits for its end."""
    return pending_of(engine) is not None


def pending_of(engine: Any) -> Pending | None:
    """The save of this process that waits for its end."""
    found: Pending | None = engine.__dict__.get(_ATTRIBUTE)
    return found if found is not None and found.is_own() else None


def flush(engine: Any, *, before: str = "") -> float | None:
    """Finish the pending save, if there is one; returns its seconds on this rank, where they are known. Collective.

    ``before`` says what has to wait: rank 0 logs it with the seconds that it waited, as a warning, for training stands
    still. Raises on every rank what the save ended with: then its tag is not committed, ``latest`` as it was.
    """
    pending = _taken(engine)
    if pending is None:
        return None
    require_partners()
    waits, began = not pending.is_done(), time.monotonic()
    try:
        pending.finish()
    finally:
        if before and waits and dist.get_rank() == 0:
            logger.warning(
                "%s waited %.2f s for the save of %s to be finished", before, time.monotonic() - began, pending.tag_dir
            )
    return pending.seconds


def abandon(engine: Any) -> None:
    """Let go of a pending save where its ranks can no longer be asked together."""
    pending = _taken(engine)
    if pending is not None:
        pending.abandon()


def _taken(engine: Any) -> Pending | None:
    """The save that waits for its end, which the engine does not have any more."""
    pending = pending_of(engine)
    engine.__dict__.pop(_ATTRIBUTE, None)
    return pending
