"""A job at one size, as the training loop sees it: when to leave the loop, and what becomes of an error."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from zeroelastic.elastic.events import Events
from zeroelastic.elastic.notice import Notice
from zeroelastic.elastic.position import Position
from zeroelastic.elastic.preemption import Every, Preemption
from zeroelastic.elastic.resume import Resumed
from zeroelastic.elastic.world_changes import Changes
from zeroelastic.errors import ConfigError
from zeroelastic.report import ResizeReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of ``worlds``."""

    build: Callable[[], Any]
    directory: str | os.PathLike[str]
    data: Position | None
    saving: Every | None
    client_state: Callable[[], Mapping[str, Any]] | None
    log: str | os.PathLike[str] | None
    status: bool
    strict: bool
    fresh: bool
    required: bool
    sizes: Callable[[int], bool] | None

    def facts(self) -> dict[str, str]:
        """What has to be alike on all ranks, which take part in the same collectives then."""
        named = {"data": type(self.data).__name__, "saving": self.saving, "client_state": self.client_state is not None}
        alike = {**named, "strict": self.strict, "fresh": self.fresh, "required": self.required}
        return {f"the argument {name} of worlds()": str(value) for name, value in alike.items()}


class World:
    """The job at one size; a context manager that gives the engine. ``worlds`` makes it.

    ``start`` is what the job resumed from, as ``resume`` returns it: its ``tier`` is "in-place" where the state came
    from the world before. ``report`` says what that cost, None otherwise. ``data`` is the position in the data.
    ``stopped`` says whether the whole job was asked to stop, ``saves`` are the tags that were saved so far. ``changes``
    and ``failed``, after the block, say how it ended.
    """

    engine: Any
    log: Any
    _stop: Any
    changes: Changes | None

    def __init__(
        self,
        asked: Asked,
        engine: Any,
        data: Position | None,
        start: Resumed,
        log: Events,
        notice: Notice,
        changes: Changes | None,
        report: ResizeReport | None,
    ) -> None:
        self.engine, self.data, self.start, self.log, self.report = engine, data, start, log, report
        self.changes, self.failed = changes, False
        self.stopped, self.saves = False, list[str]()
        self._step = int(engine.global_steps)
        self._stop = Preemption(
            engine,
            asked.directory,
            data=data,
            saving=asked.saving,
            client_state=asked.client_state,
            log=log,
            notice=notice,
            changes=changes,
        )

    def ends(self) -> bool:
        """Whether to leave the training loop: the world changes, or the job stops. Collective; after each step.

        Saves first where a save is due, as ``preemption`` does, and advances ``data``. Raises ConfigError where the
        next accumulation has begun, even if nothing changes now: its gradients would be lost in a change.
        """
        from zeroelastic.deepspeed.engine import accumulated_micro_batches

        step, taken = int(self.engine.global_steps), accumulated_micro_batches(self.engine)
        if taken and step != self._step:
            raise ConfigError(
                f"world.ends() was called {taken} micro batches after optimizer step {step}; a change of size would "
                "lose their gradients. Call it right after engine.step(), before the next micro batch."
            )
        self._step = step
        ended: bool = self._stop()
        self.stopped, self.saves = self._stop.stopped, self._stop.saves
        if ended and self.changes is not None and self.changes.goes_by_directory:
            self._stop.save(background=False)
        return ended

    def save(self, tag: str | None = None, *, background: bool | None = None) -> str:
        """Save now, as ``Preemption.save``. Collective. Returns the tag."""
        saved: str = self._stop.save(tag, background=background)
        return saved

    def state(self) -> dict[str, Any]:
        """The client state of this moment."""
        state: dict[str, Any] = self._stop.state()
        return state

    def release(self) -> Any:
        """The engine, which nothing here refers to any more: the caller's loop still has this object."""
        engine = self.engine
        self.engine = self._stop = self.log = self.changes = None
        return engine

    def __enter__(self) -> Any:
        self._stop.__enter__()
        return self.engine

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the world. An error of a collective whose peer has died goes no further: it is none of the program."""
        try:
            self._stop.__exit__(kind, value, trace)
        except Exception as error:
            if value is not None or self.changes is None or not self.changes.lost_peer(error):
                raise
            kind, value, self.failed = type(error), error, True
        if isinstance(value, Exception) and self.changes is not None:
            self.failed = self.failed or self.changes.lost_peer(value)
        self.log.__exit__(kind, value, trace)
        if self.failed and self.changes is not None:
            logger.warning("world %d has lost a member, and ends: %s", self.changes.now.number, value)
            forget_frames(value)
            self._stop.forget_memory()
        return self.failed


def forget_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error refer to: while one has a process group, other ranks wait in it for this one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
