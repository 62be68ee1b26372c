"""Saving in the background: what is left of a save after its snapshot, in a thread, while training goes on.

The thread writes, makes durable, agrees with the threads of the other ranks and commits, exactly as a save that is
waited for; it agrees over a process group of its own, so nothing of it comes between the collectives of training. It
uses one processor at a low priority.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.agree import agreeing_over
from zeroelastic.errors import SaveError, UnsupportedError, ZeroElasticError
from zeroelastic.notices import notice
from zeroelastic.patching import patched
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.pending import Pending
from zeroelastic.stage3.roll_call import RollCall
from zeroelastic.stage3.shard_writer import writes_with_torch
from zeroelastic.stage3.snapshot import HostMemory
from zeroelastic.stage3.storage_rules import on_nvme

logger = logging.getLogger(__name__)

_NICER = 19
_WISH, _PLACE, _WARNED = "_zeroelastic_background_wish", "_zeroelastic_background", "_zeroelastic_said_why_not"
_running: set[BackgroundSave] = set()


@contextmanager
def saving_in_background(engine: Any, wish: bool | None) -> Iterator[None]:
    """While it lasts, saves of an engine are in the background, or are not; None leaves that to the options."""
    with patched(engine, **{_WISH: wish}):
        yield


def wants_background(engine: Any, option: bool) -> bool:
    """Whether the next save is asked to be in the background."""
    wish: bool | None = engine.__dict__.get(_WISH)
    return option if wish is None else wish


def refuse_background(engine: Any) -> None:
    """Raise UnsupportedError where another checkpoint engine than torch's writes, which has its own background.

    While an engine is being built it has none yet: then its configuration is asked.
    """
    config, writer = engine._config, engine.checkpoint_engine
    if writer is not None:
        name = "" if writes_with_torch(writer) else type(writer).__name__
    elif config.checkpoint_config.get("writer") is not None:
        name = "the writer that its configuration names"
    else:
        datastates = getattr(config, "datastates_config", None)
        name = "DataStates" if datastates is not None and datastates.enabled else ""
    if name:
        raise UnsupportedError(
            f'"background_save" is for DeepSpeed\'s ordinary checkpoint engine; this run saves with {name}, which has '
            "a way of its own to save while training goes on, or none. Leave out one of the two."
        )


def why_not(engine: Any, live: LiveState) -> str | None:
    """Why a save has to be waited for all the same, or None; the same on every rank, and said once."""
    reason = None
    if on_nvme(live.optimizer):
        reason = "a snapshot of what lies on NVMe would take the host memory that it is kept out of"
    elif live.layout.world_size != dist.get_world_size():
        reason = "they are not there yet for tensor parallelism"
    if reason is not None and _WARNED not in engine.__dict__:
        setattr(engine, _WARNED, True)
        if dist.get_rank() == 0:
            logger.warning("saves are not in the background: %s", reason)
    return reason


@dataclass(frozen=True, slots=True)
class Background:
    """What the saves of one engine share: the group over which their threads agree, and the snapshot's memory."""

    group: dist.ProcessGroup
    memory: HostMemory = field(default_factory=HostMemory)


def background_of(engine: Any) -> Background:
    """An engine's, made when it is first needed. Collective then."""
    found: Background | None = engine.__dict__.get(_PLACE)
    if found is None:
        found = Background(dist.new_group(backend="gloo"))
        setattr(engine, _PLACE, found)
    return found


def forget_background(engine: Any) -> None:
    """Free the memory of an engine's snapshots, of which none is being written."""
    engine.__dict__.pop(_PLACE, None)


class BackgroundSave(Pending):
    """A save whose ``work``, collective over ``group`` and by ``roll_call``, is done by a thread that begins at once.

    ``work`` raises the same error on every rank. Where it cannot, because a rank has died or the group is gone, each
    rank has its own, and ``finish`` raises on all. ``ended`` is when the thread was done, on the monotonic clock.
    """

    def __init__(
        self, tag_dir: Path, work: Callable[[], None], group: dist.ProcessGroup, roll_call: RollCall, *, began: float
    ) -> None:
        super().__init__(tag_dir)
        self._roll_call = roll_call
        self._work, self._group, self._began = work, group, began
        self._failure: ZeroElasticError | None = None
        self.ended: float | None = None
        self._rank = dist.get_rank()
        self._thread = threading.Thread(target=self._run, name="zeroelastic-save", daemon=True)
        _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        _lower_priority()
        try:
            with agreeing_over(self._group):
                self._work()
            if self._rank == 0:
                seconds = time.monotonic() - self._began
                notice(logger, f"{self.tag_dir}: saved in the background, {seconds:.2f} s after it began")
        except ZeroElasticError as error:
            self._fail(error)
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            if not dist.is_initialized():
                why = (
                    "the process groups were destroyed before it was finished. Call engine.destroy() or "
                    "zeroelastic.wait_for_save(engine) first"
                )
            self._fail(
                SaveError(
                    f"{self.tag_dir}: the save in the background ended on rank {self._rank}: {why}. It is not "
                    "committed unless `latest` names it."
                )
            )
        finally:
            self.ended = time.monotonic()
            self.seconds = self.ended - self._began
            del self._work
            _running.discard(self)

    def _fail(self, error: ZeroElasticError) -> None:
        self._failure = error
        if self._rank == 0:
            logger.error("the next save, load or destroy() will raise this: %s", error)

    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the thread; raises on every rank what any of them ended with. Collective."""
        self.wait()
        self._roll_call.end()
        last = RollCall(self.tag_dir, timeout_s=self._roll_call.timeout_s)
        last.left = "Unless `latest` names it, it is not committed."
        last.settle(self.raise_failure, "its end was waited for")
        last.end()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the thread on this rank; whether it has ended."""
        self._thread.join(seconds)
        return self.is_done()

    def raise_failure(self) -> None:
        """Raise what it ended with, if with an error."""
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """The thread goes on; the end of the interpreter waits for it."""


def _own_saves() -> list[BackgroundSave]:
    """Those that a thread of this process writes."""
    return [save for save in list(_running) if save.is_own()]


def finish_all() -> None:
    """Wait for all saves of this process, without the other ranks. Raises what the first that failed ended with."""
    saves = _own_saves()
    for save in saves:
        save.wait()
    for save in saves:
        save.raise_failure()


def _lower_priority() -> None:
    """Of this thread: under Linux a thread has a priority of its own."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


def _at_exit() -> None:
    """Let saves come to their end; the threads of all ranks do not need the rest of their programs for it."""
    for save in _own_saves():
        logger.warning("%s: the run ends when this save is finished; call engine.destroy() first", save.tag_dir)
        save.wait()
        if save._failure is not None:
            logger.error("%s", save._failure)


atexit.register(_at_exit)
