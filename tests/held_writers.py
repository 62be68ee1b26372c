"""Background saves that write nothing before a test lets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
