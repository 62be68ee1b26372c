"""Checkpoint engines and background saves of the tests, and what DeepSpeed's fast writer lacks without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from training import Job


def writer_job(kind: str, *, decoupled: bool = False, **job: Any) -> Job:
    """A job whose files DeepSpeed's ``kind`` of writer writes, in another process if ``decoupled``."""
    writer = {"type": kind, "decoupled": decoupled, "io_buffer_size": 1 << 20}
    return Job(config={"checkpoint": {"writer": writer}}, **job)


def let_the_fast_writer_run() -> None:
    """Give DeepSpeed's fast writer what it lacks without a GPU, neither of which touches what it writes.

    Its buffer need not be pinned for libaio, and the op "utils" casts storage objects, which torch.save hands to no
    writer.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.io import fast_file_writer

    class NoCast:
        cast_to_byte_tensor = None

        def load(self) -> NoCast:
            return self

    fast_file_writer.UtilsBuilder = NoCast
    type(get_accelerator()).is_pinned = lambda self, tensor: True


class LateEngine:
    """A third-party engine like DataStates: it writes when it is told to commit, each tensor on its own."""

    def __init__(self) -> None:
        self.info: Any = None
        self.given: list[tuple[Any, str]] = []

    def create(self, info: Any) -> None:
        self.info = info

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        self.given.append((state_dict, path))

    def commit(self, info: Any) -> bool:
        assert info is not None and info == self.info
        for state_dict, path in self.given:
            torch.save(state_dict, path)
        self.info, self.given = None, []
        return True

    def get_commit_info(self) -> None:
        return None

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False

    def cleanup(self) -> None:
        if self.info is not None:
            self.commit(self.info)


@contextmanager
def held_writers() -> Iterator[threading.Event]:
    """While it lasts, nothing is written in the background before the event is set; and no longer than it lasts."""
    from zeroelastic.deepspeed.save.shard_writer import Snapshot

    write, gate = Snapshot.write, threading.Event()

    def wait_and_write(self: Snapshot, *args: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(60)
        write(self, *args)

    Snapshot.write = wait_and_write  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.set()
        Snapshot.write = write  # type: ignore[method-assign]
