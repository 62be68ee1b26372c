"""Files behind fsspec: listed, and read by byte range.

A request without an answer after five minutes has failed. What failed for a passing reason is asked for again, a
bounded number of times, with random pauses: what fsspec and the store's own client repeat comes first; this repeats
what they gave up, and counts on nothing of them. ``Retries`` in force are those of the innermost ``retrying`` of this
context, or the default ones.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, ZeroElasticError
from zeroelastic.io.paths import RemotePath, http_status, missing_directory, missing_file, reason

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIME_LIMIT_S = 300.0
"""How long a request may go without an answer."""

_THREADS = 8
_COPY = "Copy the checkpoint to a disk or to an object store."
_RANGE_NOT_SATISFIABLE = 416
_NOT_FOUND = (404, 410)

_TRANSIENT_STATUS = frozenset((408, 429, 500, 502, 503, 504))
_TRANSIENT_ERRNO = frozenset(
    (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN)
)
_TRANSIENT_NAMES = frozenset(
    (
        "ChecksumError", "ClientConnectionError", "ClientOSError", "ClientPayloadError", "ConnectionClosedError",
        "ConnectTimeoutError", "ConnectionTimeoutError", "EndpointConnectionError", "FlexibleChecksumError",
        "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ReadTimeoutError", "ResponseParserError",
        "ResponseStreamingError", "ServerDisconnectedError",
    )
)  # fmt: skip
"""Names of errors of aiohttp, botocore, gcsfs and http.client that stand for a broken or refused connection, or for an
answer that was damaged on its way."""

_DAMAGED_ON_THE_WAY = frozenset(
    ("BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
)
"""Codes with which S3 refuses a request whose body is not what its checksum or length says; its HTTP status is 400."""


class NoAnswerError(TimeoutError):
    """A request had no answer within the time limit; it is not made again."""


@dataclass(frozen=True, slots=True)
class Retries:
    """``number`` of further attempts after the first; before attempt i a pause of up to ``first_pause_s * 2**i``.

    ``timeout_s`` is how long a request may go without an answer; None for the default. A pause is between a half and
    the whole of its bound, which is ``longest_pause_s`` at most.
    """

    number: int = 4
    first_pause_s: float = 0.5
    longest_pause_s: float = 20.0
    timeout_s: float | None = None

    def pause(self, attempt: int) -> None:
        """Wait before attempt ``attempt + 1``; the first is number 0."""
        bound = min(self.longest_pause_s, self.first_pause_s * 2**attempt)
        time.sleep(bound * random.uniform(0.5, 1.0))


_current: ContextVar[Retries] = ContextVar("zeroelastic_retries", default=Retries())  # noqa: B039  it is frozen


def current() -> Retries:
    """The retries in force."""
    return _current.get()


@contextmanager
def retrying(retries: Retries) -> Iterator[None]:
    """Within this context, requests of this thread are repeated as ``retries`` says."""
    token = _current.set(retries)
    try:
        yield
    finally:
        _current.reset(token)


def with_retries(request: Callable[[], T], what: object) -> T:
    """The result of a request, made again while it fails for a passing reason. Raises its last error."""
    retries = current()
    attempt = 0
    while True:
        try:
            return request()
        except Exception as error:  # file systems raise errors of many kinds
            if attempt >= retries.number or not is_transient(error):
                raise
            note_retry(what, error, attempt)
        retries.pause(attempt)
        attempt += 1


def note_retry(what: object, error: object, attempt: int) -> None:
    """Log that a request is made again."""
    text = reason(error) if isinstance(error, BaseException) else str(error)
    logger.debug("%s: attempt %d failed and is repeated: %s", what, attempt + 1, text)


def is_transient(error: BaseException) -> bool:
    """Whether an error of a file system may pass: a broken connection, a transfer that damaged what it carried, a
    server that is busy or failing.

    The HTTP status decides, where the error or what caused it has one; else the kind of the error.
    """
    if isinstance(error, (NoAnswerError, FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError)):
        cause = error.__cause__
        return not isinstance(error, NoAnswerError) and cause is not None and _is_broken_connection(cause)
    seen: BaseException | None = error
    while seen is not None:
        status = http_status(seen)
        if status is not None:
            return status in _TRANSIENT_STATUS or _code(seen) in _DAMAGED_ON_THE_WAY
        if _is_broken_connection(seen):
            return True
        seen = seen.__cause__
    return False


def _code(error: BaseException) -> object:
    """The code of S3's answer in an error of botocore, None in others."""
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


def call(system: Any, operation: str, *arguments: Any, **options: Any) -> Any:
    """Call a file system. Raises NoAnswerError after the time limit where the call can be stopped."""
    if not system.async_impl:
        return getattr(system, operation)(*arguments, **options)
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError

    limit = current().timeout_s or TIME_LIMIT_S
    try:
        return sync(system.loop, getattr(system, f"_{operation}"), *arguments, timeout=limit, **options)
    except FSTimeoutError:
        raise NoAnswerError(f"no answer in {limit:.0f} s") from None


def remote_entries(directory: RemotePath) -> list[tuple[str, int | None]]:
    """(name, size, or None for a directory) of what is in a directory. Raises MissingFileError, UnreadableError."""
    listed = _remote_listing(directory)
    if directory.first_seen is not None and not directory.first_seen:
        directory.first_seen.update(_states(listed))
    here = directory.path.rstrip("/")
    found: list[tuple[str, int | None]] = []
    for entry in listed:
        path = str(entry["name"]).rstrip("/")
        if path == here:
            if entry["type"] != "directory" and len(listed) == 1 and entry.get("size"):
                raise missing_directory(directory)
            continue
        name = path.rpartition("/")[2]
        if entry["type"] == "directory":
            found.append((name, None))
        elif entry.get("size") is not None:
            found.append((name, int(entry["size"])))
        else:  # a listing without sizes, as web servers give it
            found.append((name, remote_size(directory / name) or 0))
    return found


def _remote_listing(directory: RemotePath) -> list[dict[str, Any]]:
    """What a file system says of each entry of a directory, as it is now."""
    system: Any = directory.system

    def ask() -> list[dict[str, Any]]:
        system.invalidate_cache(directory.path)  # a listing from before may be out of date
        found: list[dict[str, Any]] = call(system, "ls", directory.path, detail=True)
        return found

    try:
        listed = with_retries(ask, directory)
    except (FileNotFoundError, NotADirectoryError):
        raise missing_directory(directory) from None
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{directory}: cannot be listed: {reason(error)}.") from None
    return listed


def listed_states(directory: RemotePath) -> dict[str, object] | None:
    """All that a file system says of each file of a directory now; None where there is none. Raises UnreadableError."""
    try:
        return _states(_remote_listing(directory))
    except MissingFileError:
        return None


def _states(listed: Iterable[dict[str, Any]]) -> dict[str, object]:
    return {str(entry["name"]): repr(sorted(entry.items())) for entry in listed}


def remote_size(path: RemotePath) -> int | None:
    """Size of a file in bytes, None where there is none. Raises UnreadableError, CheckpointError: it is not known."""
    try:
        found = with_retries(lambda: call(path.system, "info", path.path), path)
    except ZeroElasticError:
        raise
    except Exception as error:  # file systems raise errors of many kinds
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not _is_away(error):
            return None
        raise UnreadableError(f"{path}: cannot be looked at: {reason(error)}.") from None
    if found["type"] == "directory":
        return None
    if found.get("size") is None:
        raise CheckpointError(
            f"{path}: its server does not say how large it is, so its ranges cannot be read.", remedy=_COPY
        )
    return int(found["size"])


def _is_away(error: Exception) -> bool:
    """Whether the "not found" of fsspec's HTTP stands for another failure, such as a server that does not answer."""
    cause = error.__cause__
    return type(cause).__module__.startswith("aiohttp.") and http_status(cause) not in _NOT_FOUND


def remote_range(path: RemotePath, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes in one request. Raises what the file system raises."""
    try:
        data: bytes = with_retries(
            lambda: call(path.system, "cat_file", path.path, start=offset, end=offset + nbytes), path
        )
    except Exception as error:
        if _size_if_beyond_end(error, path, offset + 1) is not None:  # a range that begins there is refused
            return b""
        raise
    return data


def _size_if_beyond_end(error: BaseException, path: RemotePath, end: int) -> int | None:
    """The size of a file whose server refused a range because the file ends before ``end``; else None."""
    if not _may_refuse_range(error):
        return None
    try:
        path.system.invalidate_cache(path.parent.path)
        size = remote_size(path)
    except ZeroElasticError:
        return None
    return size if size is not None and size < end else None


def _may_refuse_range(error: BaseException) -> bool:
    """Whether an error may be the answer to a range that a file does not have.

    The HTTP status decides, where the error or its cause has one. s3fs and others translate it: to EINVAL, ValueError.
    """
    for answer in (error, error.__cause__):
        status = http_status(answer)
        if status is not None:
            return status == _RANGE_NOT_SATISFIABLE
    return isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno == errno.EINVAL)


def read_ranges(ranges: Sequence[tuple[RemotePath, int, int]]) -> list[bytes]:
    """The bytes of many (file, offset, nbytes) of remote files, requested at the same time; each has its full length.

    Memory: the answers. The file system limits the requests under way at a time; where it does not, there are 8.
    Raises MissingFileError, UnreadableError (also where answers stay short of a file that has these bytes),
    CheckpointError (truncated) with the file and the offset: of several failures, the first in order.
    """
    retries = current()
    answers: list[bytes | BaseException] = [b""] * len(ranges)
    wanted: Sequence[int] = range(len(ranges))
    for attempt in range(retries.number + 1):
        for i, answer in zip(wanted, _ask([ranges[i] for i in wanted]), strict=True):
            answers[i] = answer
        wanted = [i for i in wanted if _may_pass(ranges[i], answers[i])]
        if not wanted or attempt == retries.number:
            break
        note_retry(ranges[wanted[0]][0], answers[wanted[0]], attempt)
        retries.pause(attempt)
    checked: list[bytes] = []
    for (path, offset, nbytes), answer in zip(ranges, answers, strict=True):
        if not isinstance(answer, bytes) or len(answer) != nbytes:
            raise _failure(path, offset, nbytes, answer)
        checked.append(answer)
    return checked


def _ask(ranges: Sequence[tuple[RemotePath, int, int]]) -> list[bytes | BaseException]:
    """The answer to each range, or its error."""
    answers: list[bytes | BaseException] = [b""] * len(ranges)
    systems: dict[tuple[str, tuple[tuple[str, Any], ...]], list[int]] = {}
    for i, (path, _, _) in enumerate(ranges):
        systems.setdefault((path.protocol, path.options), []).append(i)
    for members in systems.values():
        system: Any = ranges[members[0]][0].system
        paths = [ranges[i][0].path for i in members]
        starts = [ranges[i][1] for i in members]
        ends = [ranges[i][1] + ranges[i][2] for i in members]
        try:
            if system.async_impl:
                got = call(system, "cat_ranges", paths, starts, ends, on_error="return")
            else:
                got = _in_threads(system.cat_file, paths, starts, ends)
        except Exception as error:  # of all of them at once, such as a time limit
            got = [error] * len(members)
        for i, answer in zip(members, got, strict=True):
            answers[i] = answer
    return answers


def _may_pass(wanted: tuple[RemotePath, int, int], answer: bytes | BaseException) -> bool:
    """Whether the answer to a range is a failure that may pass: also fewer bytes than the file has there."""
    path, offset, nbytes = wanted
    if isinstance(answer, BaseException):
        return is_transient(answer)
    if len(answer) >= nbytes:
        return False
    try:
        size = remote_size(path)
    except ZeroElasticError:
        return False
    return size is not None and size >= offset + nbytes


def _failure(path: RemotePath, offset: int, nbytes: int, answer: object) -> CheckpointError | UnreadableError:
    if isinstance(answer, FileNotFoundError):
        return missing_file(path)
    if isinstance(answer, BaseException):
        size = _size_if_beyond_end(answer, path, offset + nbytes)
        if size is not None:
            return CheckpointError(f"{path}: ends at byte {size}. The file is truncated.")
        return UnreadableError(f"{path}: reading at byte {offset} failed: {reason(answer)}.")
    got = len(answer) if isinstance(answer, bytes) else 0
    if got < nbytes:
        path.system.invalidate_cache(path.parent.path)
        try:
            size = remote_size(path)
        except UnreadableError as error:
            return error
        except CheckpointError:  # the server does not say it
            size = offset + got
        if size is None:
            return missing_file(path)
        if size >= offset + nbytes:
            return UnreadableError(
                f"{path}: reading at byte {offset} failed: its server sends {got} of {nbytes} bytes, and says that the "
                f"file has {size}."
            )
        return CheckpointError(f"{path}: ends at byte {offset + got}. The file is truncated.")
    return CheckpointError(
        f"{path}: reading at byte {offset} failed: {got} bytes came for {nbytes}. Its server does not serve ranges.",
        remedy=_COPY,
    )


def _in_threads(
    read: Callable[..., bytes], paths: Sequence[str], starts: Sequence[int], ends: Sequence[int]
) -> list[bytes | BaseException]:
    """The answers of a file system that has one request at a time, from several threads."""
    answers: list[bytes | BaseException] = [b""] * len(paths)
    numbers = iter(range(len(paths)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            try:
                answers[i] = read(paths[i], start=starts[i], end=ends[i])
            except Exception as error:  # returned to the caller
                answers[i] = error

    # Daemons, so that an interrupted program ends without waiting for its requests.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(paths)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return answers
