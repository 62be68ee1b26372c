"""Saves that go on after ``save_checkpoint`` has returned. An engine has at most one of them.

A thread of ours (``background``) writes such a save. It is finished before any call that would change or end what is
being written: the next save, a load, ``save_16bit_model`` and ``destroy``.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch.distributed as dist

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.save.barrier import store_request
from zeroelastic.distributed.partners import require_partners

logger = logging.getLogger(__name__)

_unfinished: set[Pending] = set()
"""The saves, of all engines of this process, for which ``at_exit`` is called when the interpreter ends."""


class Pending(ABC):
    """A save that is not committed yet, as far as this rank knows.

    A process that is forked from a rank has copies of the rank's saves. They are not its own: the rank finishes them.
    """

    seconds: float | None = None
    """Seconds from the call of ``save_checkpoint`` to the end of the save, once it is finished."""

    def __init__(self, tag_dir: Path) -> None:
        self.tag_dir, self._process, self._rank = tag_dir, os.getpid(), dist.get_rank()
        _unfinished.add(self)

    def created_by_this_process(self) -> bool:
        """Whether this process began the save."""
        return self._process == os.getpid()

    @abstractmethod
    def is_done(self) -> bool:
        """Whether ``finish`` would not have to wait on this rank."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the save and commit it. Raises its error on every rank. Collective."""

    @abstractmethod
    def drop(self) -> None:
        """Called on this rank alone when ``finish`` will not be called any more."""

    def at_exit(self) -> None:
        """Called when the interpreter ends before the save is finished."""
        self.drop()

    def forget_at_exit(self) -> None:
        """Do not have ``at_exit`` called any more."""
        _unfinished.discard(self)


def unfinished() -> list[Pending]:
    """The saves that this process itself began and for which ``at_exit`` is to be called."""
    return [save for save in list(_unfinished) if save.created_by_this_process()]


@atexit.register
def finish_at_exit() -> None:
    """Call ``at_exit`` of what is unfinished."""
    for save in unfinished():
        save.at_exit()


def pending_of(engine: Engine) -> Pending | None:
    """The pending save of the engine, if this process began it."""
    found = state_of(engine).pending
    assert found is None or isinstance(found, Pending)
    return found if found is not None and found.created_by_this_process() else None


def finish_pending(engine: Engine, *, before: str = "") -> float | None:
    """Finish the pending save, if there is one, and return its seconds on this rank, if known. Collective.

    ``before`` names the call that has to wait. Rank 0 logs it with the seconds waited, as a warning, because training
    stands still. Raises the error of the save on every rank; then its tag is not committed and ``latest`` is unchanged.
    """
    pending = _taken(engine)
    if pending is None:
        return None
    outcome = "Unless `latest` names it, it is not committed."
    store_request(require_partners, pending.tag_dir, outcome, patience_s=0.0)
    waits, began = not pending.is_done(), time.monotonic()
    try:
        pending.finish()
    finally:
        if before and waits and dist.get_rank() == 0:
            logger.warning(
                "%s waited %.2f s for the save of %s to be finished", before, time.monotonic() - began, pending.tag_dir
            )
    return pending.seconds


def drop_pending(engine: Engine) -> None:
    """Give up a pending save where its ranks can no longer be reached by a collective."""
    pending = _taken(engine)
    if pending is not None:
        pending.drop()


def _taken(engine: Engine) -> Pending | None:
    """Remove and return the pending save of the engine."""
    pending = pending_of(engine)
    state_of(engine).pending = None
    return pending
