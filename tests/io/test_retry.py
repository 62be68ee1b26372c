"""Requests that are made again: for passing reasons only, a bounded number of times, with growing random pauses."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
from botocore.exceptions import FlexibleChecksumError
from stores import CountedFileSystem, counted, put

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError
from zeroelastic.io.atomic import put_object, remove_objects, sizes_below
from zeroelastic.io.paths import as_path
from zeroelastic.io.remote import RemotePath, read_ranges
from zeroelastic.io.retries import NoAnswerError, Retries, is_transient, retrying, with_retries
from zeroelastic.io.storage import read_exactly

__all__ = ["counted"]

FAST = Retries(3, first_pause_s=0.0)


def answered(status: int, code: str = "") -> Exception:
    error = OSError(errno.EIO, "failed")
    error.response = {  # type: ignore[attr-defined]
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (answered(503), True),
        (answered(500), True),
        (answered(429), True),
        (answered(403), False),
        (answered(404), False),
        (answered(412), False),
        (answered(400, "BadDigest"), True),
        (answered(400, "InvalidDigest"), False),
        (caused(OSError(errno.EINVAL, "x"), answered(400, "XAmzContentChecksumMismatch")), True),
        (FlexibleChecksumError(error_msg="Expected checksum a did not match calculated checksum: b"), True),
        (caused(OSError(errno.EBUSY, "slow down"), answered(503)), True),
        (caused(OSError(errno.EIO, "x"), answered(400)), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError("late"), True),
        (NoAnswerError("no answer in 300 s"), False),
        (PermissionError("denied"), False),
        (FileNotFoundError("gone"), False),
        (FileExistsError("there"), False),
        (ValueError("bad"), False),
        (OSError(errno.ENOSPC, "full"), False),
    ],
    ids=repr,
)
def test_what_may_pass_is_told_by_status_and_kind(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


def test_a_request_is_repeated_a_bounded_number_of_times() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ConnectionResetError("reset")

    with retrying(FAST), pytest.raises(ConnectionResetError):
        with_retries(fail, "here")
    assert len(calls) == 4


def test_pauses_grow_and_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    retries = Retries(6, first_pause_s=1.0, longest_pause_s=8.0)
    for attempt in range(6):
        retries.pause(attempt)
    bounds = [1, 2, 4, 8, 8, 8]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert len({pause / bound for pause, bound in zip(pauses, bounds, strict=True)}) == 6


def test_only_the_ranges_that_failed_are_asked_for_again(counted: type[CountedFileSystem]) -> None:
    paths = [put(f"counted://b/f{i}", bytes([i]) * 100) for i in range(3)]
    left = [ConnectionResetError("reset"), ConnectionResetError("reset")]

    def answer(path: str, start: int, data: bytes) -> bytes:
        if path.endswith("f1") and left:
            raise left.pop()
        return data

    counted.answer = answer
    with retrying(FAST):
        assert read_ranges([(path, 0, 100) for path in paths]) == [bytes([i]) * 100 for i in range(3)]
    asked = sorted(path[-2:] for path, _, _ in counted.ranges)
    assert asked == ["f0", "f1", "f1", "f1", "f2"]


def test_a_short_answer_is_asked_for_again_and_a_short_file_is_not(counted: type[CountedFileSystem]) -> None:
    path = put("counted://b/f", b"x" * 100)
    left = [1]
    counted.answer = lambda path, start, data: data[:7] if left and left.pop() else data
    with retrying(FAST):
        assert read_ranges([(path, 0, 100)]) == [b"x" * 100]
        counted.ranges.clear()
        with pytest.raises(CheckpointError, match="ends at byte 100"):
            read_ranges([(path, 50, 100)])
    assert len(counted.ranges) == 1


def test_what_is_read_exactly_is_neither_short_nor_from_another_place(
    counted: type[CountedFileSystem], tmp_path: Path
) -> None:
    data = bytes(range(100))
    path = put("counted://b/f", data)
    (tmp_path / "f").write_bytes(data)
    left = [1]
    counted.answer = lambda path, start, found: found[:7] if left and left.pop() else found
    with retrying(FAST):
        for place in (path, tmp_path / "f"):
            assert read_exactly(place, 40, 20) == data[40:60] and read_exactly(place, 100, 0) == b""
            with pytest.raises(CheckpointError, match=r"f: ends at byte 100\. The file is truncated"):
                read_exactly(place, 90, 20)
        counted.answer = lambda path, start, found: data
        with pytest.raises(CheckpointError, match="at byte 40 failed: 100 bytes came for 20"):
            read_exactly(path, 40, 20)


def test_answers_that_stay_short_of_a_file_that_is_whole_are_no_damage(counted: type[CountedFileSystem]) -> None:
    path = put("counted://b/f", b"x" * 100)
    counted.answer = lambda path, start, data: data[:7]
    with retrying(FAST), pytest.raises(UnreadableError, match="sends 7 of 50 bytes, and says that the file has 100"):
        read_ranges([(path, 50, 50)])
    assert len(counted.ranges) == 4

    def remove(path: str, start: int, data: bytes) -> bytes:
        counted.store.clear()
        return data[:7]

    counted.answer = remove
    with retrying(FAST), pytest.raises(MissingFileError):
        read_ranges([(path, 50, 50)])


def test_objects_are_put_once_listed_and_removed() -> None:
    run = as_path("memory://objects/run")
    assert isinstance(run, RemotePath)
    put_object(run / "a/x", b"12")
    put_object(run / "a/[y]", b"3")
    assert sizes_below(run) == {"a/[y]": 1, "a/x": 2}
    remove_objects([run / "a/[y]", run / "a/none"])
    assert sizes_below(run) == {"a/x": 2} and sizes_below(run / "b") == {}
