"""What is reported while an executor works, by all that read, scan, move or write; and how Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import REPOSITORY, Engine, ranges, segment

from zeroelastic.errors import CheckpointError
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import CopyTable, move_segments, read_segments, scan_segments, write_segments

TOLD = ("read", "write", "move", "scan")
Progress = Callable[[int], None]


class Stop(Exception):
    """What a progress function raises."""


def operate(
    operation: str,
    engine: Engine,
    rows: CopyTable,
    src: np.ndarray,
    folder: Path,
    progress: Progress | None,
    **more: object,
) -> object:
    """One operation on rows from one source to one destination of the same size; what it returns."""
    source, target = folder / "source", folder / "target"
    call = {"progress": progress, "executor": engine.name, **more}
    if operation == "read":
        return read_segments(rows, (source,), [engine.put(np.zeros(len(src), dtype=np.uint8))], **call)  # type: ignore[arg-type]
    if operation == "write":
        return write_segments(rows, [engine.put(src)], [target], **call)  # type: ignore[arg-type]
    if operation == "move":
        return move_segments(rows, [source], [target], **call)  # type: ignore[arg-type]
    return scan_segments(ranges(rows), (source,), **call)  # type: ignore[arg-type]


def told_by(engine: Engine) -> list[str]:
    """The operations that an engine tells of: at least the one that each has."""
    found = [operation for operation in TOLD if engine.can(operation)]
    assert "read" in found
    return found


def make_source(folder: Path, size: int) -> np.ndarray:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    (folder / "source").write_bytes(data.data)
    (folder / "target").write_bytes(bytes(size))
    return data


@pytest.mark.parametrize("nbytes", [0, 3, 100_000, 35_000_001])
def test_the_caller_is_told_of_every_byte_on_its_own_thread(engine: Engine, tmp_path: Path, nbytes: int) -> None:
    data = make_source(tmp_path, nbytes)
    calls: list[tuple[int, int]] = []
    for operation in told_by(engine):
        calls.clear()
        begin = time.monotonic()
        operate(
            operation, engine, segment(0, 0, nbytes), data, tmp_path,
            lambda done: calls.append((done, threading.get_ident())),
        )  # fmt: skip
        most = (time.monotonic() - begin) / 0.05 + 1
        assert sum(done for done, _ in calls) == nbytes
        assert {thread for _, thread in calls} == {threading.get_ident()}
        assert all(done >= 0 for done, _ in calls) and 1 <= len(calls) <= most
    engine.free()


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_what_the_progress_raises_ends_the_operation_and_comes_out_of_it(
    engine: Engine, tmp_path: Path, kind: type[BaseException]
) -> None:
    data = make_source(tmp_path, 2_000_000)
    rows = segment(0, 0, len(data))
    calls: list[int] = []

    def raises(done: int) -> None:
        calls.append(done)
        raise kind("enough")

    for operation in told_by(engine):
        calls.clear()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kind, match="enough"):
            operate(operation, engine, rows, data, tmp_path, raises)
        assert len(calls) == 1
        assert len(os.listdir("/proc/self/fd")) == before
        operate(operation, engine, rows, data, tmp_path, None)  # it goes on working
    engine.free()


def test_an_error_of_the_file_comes_out_where_somebody_is_told(engine: Engine, tmp_path: Path) -> None:
    data = make_source(tmp_path, 2_000_000)
    (tmp_path / "source").write_bytes(b"short")
    for operation in told_by(engine):
        if operation != "write":
            with pytest.raises(CheckpointError, match="ends at byte 5"):
                operate(operation, engine, segment(0, 0, len(data)), data, tmp_path, lambda _: None)
    engine.free()


LONG_CALL = """
    import signal, sys, time
    from pathlib import Path
    import numpy as np
    from zeroelastic.executors.dispatch import *

    operation, executor, threads, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    size, count = 8 << 20, 100_000  # most of a tebibyte: the same bytes again and again
    src, dst, data = folder / "src", folder / "dst", np.zeros(size, dtype=np.uint8)
    src.write_bytes(data.data)
    dst.write_bytes(data.data)
    zero = np.zeros(count, dtype=np.int64)
    rows = CopyTable(zero, zero, zero, zero, zero + size)
    more = {"threads": threads, "executor": executor}
    reported = 0

    def progress(nbytes):
        global reported
        if reported == 0:
            print("started", flush=True)
        reported += 1

    def call():
        if operation == "scan":
            sums = np.zeros(count, np.uint32)
            scan_segments(Ranges(zero, zero, zero + size), [src], crc32=sums, progress=progress, **more)
        elif operation == "read":
            read_segments(rows, [src], [data], progress=progress, **more)
        elif operation == "write":
            write_segments(rows, [data], [dst], progress=progress, **more)
        else:
            move_segments(rows, [src], [dst], progress=progress, **more)
"""


def run_long_call(script: str, *arguments: object) -> subprocess.Popen[str]:
    code = textwrap.dedent(LONG_CALL) + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


MORE = (("scan", 2), ("write", 1), ("move", 1))


# Destinations overlap, which several threads must not fill.
@pytest.mark.parametrize(
    ("operation", "threads"),
    [("scan", 1), ("read", 1), *(pytest.param(*more, marks=pytest.mark.extended) for more in MORE)],
)
def test_ctrl_c_ends_a_long_call_at_once(scanner: Engine, tmp_path: Path, operation: str, threads: int) -> None:
    script = """
    try:
        call()
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
    """
    child = run_long_call(script, operation, scanner.name, threads, tmp_path)
    try:
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        said, complaints = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert complaints == "" and child.returncode == 0
    assert float(said) - sent < 1  # 0.05 s where there is a processor for it


def test_a_signal_whose_handler_raises_is_never_lost(tmp_path: Path) -> None:
    """At whatever moment it comes; ctypes would only print what is raised between its call and a ``try``."""
    if not describe_build("native").usable:
        pytest.skip("the native engine is not built")
    script = """
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    signal.signal(signal.SIGALRM, ring)
    heard = 0
    for i in range(20):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0037 * i)
            call()
        except Alarm:
            heard += 1
    print(heard)
    """
    child = run_long_call(script, "scan", "native", 2, tmp_path)
    try:
        said, complaints = child.communicate(timeout=90)
    finally:
        child.kill()
        child.wait()
    assert complaints == "" and said.split()[-1] == "20"
