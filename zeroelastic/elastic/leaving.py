"""Processes that leave a job: asked to by a signal, or lost without a word.

Launchers, shells and batch systems send the signal to all processes of a group. A worker of a DataLoader that it ended
would end its rank, by an error in the middle of a step, before that can save. So these workers do not get it. For a
rank that no longer answers, for example because its host lost the network, the others wait until a timeout.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch.distributed as dist

from zeroelastic.distributed.collective import set_limit
from zeroelastic.errors import ConfigError, UnsupportedError

EXIT_PREEMPTED = 75
"""The exit code of a job that was asked to stop and should be started again (EX_TEMPFAIL of sysexits.h)."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

DEFAULT_S = 600.0
"""The default of ``zeroelastic.run``; also DeepSpeed's limit for the default group, and torch's for NCCL."""

logger = logging.getLogger(__name__)


class Notice:
    """Handlers of ``signals`` that only note the time, and end the process ``grace`` seconds later if it has not ended.

    Handlers that were set before are called too, and restored by ``end``. ``at`` is the monotonic time of the first
    signal, None before it; ``number`` is that signal, 0 before it. Workers that a DataLoader starts from ``begin`` to
    ``end`` do not get the signals.
    """

    def __init__(self, grace: float = 30.0, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.grace = grace
        self.at: float | None = None
        self.number = 0
        self._signals = tuple(signals)
        self._timer: threading.Timer | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._start = BaseProcess.start

    @property
    def seconds(self) -> float:
        """Since the signal; 0 without one."""
        return 0.0 if self.at is None else time.monotonic() - self.at

    def begin(self) -> None:
        """Set the handlers. Raises ConfigError outside of the main thread, which alone can."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("signal handlers can be set by the main thread alone: enter this block there.")
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        self._start = BaseProcess.start
        BaseProcess.start = _starting_shielded(self._start, self._signals)  # type: ignore[method-assign, assignment]

    def end(self, *, ignoring: bool = False) -> None:
        """Restore the handlers that were set before; ``ignoring`` has signals ignored instead.

        A stopped process ignores them until it has ended: the interpreter removes Python's handlers before that.
        """
        for number, handler in self._previous.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python cannot be set again
                signal.signal(number, signal.SIG_IGN if ignoring else handler)
        self._previous.clear()
        BaseProcess.start = self._start  # type: ignore[method-assign]
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.at is None:
            self.at, self.number = time.monotonic(), number
            self._timer = threading.Timer(self.grace, _exit_at_deadline)
            self._timer.daemon = True
            self._timer.start()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def _starting_shielded(
    start: Callable[[BaseProcess], None], signals: Sequence[signal.Signals]
) -> Callable[[BaseProcess], None]:
    """``multiprocessing.Process.start``, whose new process has ``signals`` blocked if it is a worker of a DataLoader.

    That is inherited, by whatever method processes are started; the worker stays in the process group, with which it
    is killed. A DataLoader ends a worker that hangs by SIGTERM, which is SIGKILL here. torch's DataLoader and
    torchdata's both call the function that a worker runs ``_worker_loop`` (torch 2.13, torchdata 0.11).
    """

    def start_process(process: Any) -> None:
        if getattr(process._target, "__name__", None) != "_worker_loop":
            start(process)
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process._popen.terminate = process._popen.kill

    return start_process


def _exit_at_deadline() -> None:
    logger.error("the grace period is over; what is not saved by now is lost")
    os._exit(EXIT_PREEMPTED)


def set_collective_timeout(seconds: float = DEFAULT_S) -> None:
    """Let collectives of every process group, existing or made later, fail after ``seconds``; saves wait no longer.

    Call it before ``deepspeed.initialize``, since a rank can also be lost while the engine is being built. The timeout
    of ``init_process_group`` holds for the default group only: the groups that DeepSpeed makes, among them the one that
    ZeRO uses, take torch's default of 10 minutes (NCCL) or 30 (gloo). This function changes that default, and that of
    ``deepspeed.init_distributed``; later groups for which a script gives a timeout keep it. A save waits for a
    rank for ``seconds`` too, where ``save_timeout_s`` is longer. Choose more than the
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
    set_limit(seconds)
    vars(c10d)["default_pg_timeout"] = limit
    if getattr(c10d, "default_pg_nccl_timeout", None) is not None:
        vars(c10d)["default_pg_nccl_timeout"] = limit
    if find_spec("deepspeed") is not None:
        _set_default_group_timeout(limit)
    for group in list(world.pg_map) if dist.is_initialized() else []:
        set_one(limit, group)


def _set_default_group_timeout(limit: datetime.timedelta) -> None:
    """Set the timeout of the default group, which ``deepspeed.init_distributed`` makes with its own limit."""
    vars(import_module("deepspeed.constants"))["default_pg_timeout"] = limit
    function = import_module("deepspeed.comm.comm").init_distributed
    names = [name for name, one in inspect.signature(function).parameters.items() if one.default is not one.empty]
    function.__defaults__ = tuple(
        limit if name == "timeout" else value for name, value in zip(names, function.__defaults__, strict=True)
    )
