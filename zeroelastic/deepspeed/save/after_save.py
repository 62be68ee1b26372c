"""What follows the end of a save: old tags are removed, and rank 0 gives observers the report of the save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import torch.distributed as dist

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.io.paths import FilePath
from zeroelastic.monitoring.observers import publish
from zeroelastic.monitoring.spans import continued, current_context
from zeroelastic.report import SaveReport


class AfterSave:
    """One save from the call of ``save_checkpoint`` to its report, which is made once; on every rank.

    ``began`` is the monotonic time of the call. ``remove_old`` is called after the commit, and returns the tags that it
    removed; the save sets it when it knows its options.
    """

    def __init__(self, engine: Engine, tag_dir: FilePath, tag: str, *, began: float) -> None:
        self.remove_old: Callable[[], tuple[str, ...]] = tuple
        self.removed: tuple[str, ...] = ()
        self._engine, self._tag_dir, self._tag, self._began = ref(engine), tag_dir, tag, began
        self._step, self._world_size, self._rank = int(engine.global_steps), dist.get_world_size(), dist.get_rank()
        self._stall: float | None = None
        self._reported = False
        self._context: Any = None

    def returns(self) -> None:
        """``save_checkpoint`` returns now, and the save goes on."""
        self._stall = time.monotonic() - self._began

    def waited(self, seconds: float) -> None:
        """The training loop waited again for this save."""
        self._stall = (self._stall or 0.0) + seconds

    def below_its_span(self) -> AbstractContextManager[None]:
        """A context for the thread in which the save goes on: spans in it are below that of ``save_checkpoint``."""
        return continued(self._context)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """An exception inside the block is that of the save; observers get it, and it goes on."""
        self._context = self._context or current_context()
        try:
            yield
        except BaseException as error:
            self._report(error=str(error) or type(error).__name__)
            raise

    def committed(self, nbytes: int) -> None:
        """The save is committed, with ``nbytes`` in its files: old tags are removed now."""
        self.removed = self.remove_old()
        self._report(nbytes=nbytes)

    def _report(self, *, nbytes: int = 0, error: str | None = None) -> None:
        if self._reported or self._rank != 0:
            return
        self._reported = True
        seconds = time.monotonic() - self._began
        report = SaveReport(
            path=str(self._tag_dir),
            tag=self._tag,
            step=self._step,
            world_size=self._world_size,
            background=self._stall is not None,
            stall_seconds=seconds if self._stall is None else self._stall,
            seconds=seconds,
            bytes=nbytes,
            removed=self.removed,
            error=error,
        )
        publish(report, self._engine())
