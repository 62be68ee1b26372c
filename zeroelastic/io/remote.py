"""Files behind fsspec: listed, and read by byte range, one range or many at the same time.

fsspec is imported when the first URL is parsed. Credentials and endpoints come from where the file system's own tools
take them: for S3 the variables AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL and the rest, or
an instance's role; for Google Cloud Storage GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST; for everything
fsspec's configuration (files in ``~/.config/fsspec``, FSSPEC_S3_... variables).
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnreadableError,
    UsageError,
    ZeroElasticError,
    missing_directory,
    missing_file,
)
from zeroelastic.io.retries import call, current, http_status, is_transient, note_retry, reason, with_retries

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_THREADS = 8
_COPY = "Copy the checkpoint to a disk or to an object store."
_RANGE_NOT_SATISFIABLE = 416
_NOT_FOUND = (404, 410)


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory behind an fsspec file system; ``path`` is what that file system calls it.

    ``options`` are what the URL says about the file system itself, such as the host. ``first_seen`` are the states of
    the files in the first listing of a directory that is watched (``watched``).
    """

    protocol: str
    path: str
    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    first_seen: dict[str, object] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The directory above."""
        return RemotePath(self.protocol, self.path.rstrip("/").rpartition("/")[0], self.options)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.protocol, f"{self.path.rstrip('/')}/{name}", self.options)

    def __str__(self) -> str:
        if URL.match(self.path):  # some file systems call their files by the whole URL
            return self.path
        host = dict(self.options).get("host", "")
        return f"{self.protocol}://{host}{'/' if host else ''}{self.path.lstrip('/')}"

    @property
    def system(self) -> Any:
        """The fsspec file system, one for all paths of a protocol and host. Raises UsageError, UnreadableError."""
        import fsspec

        try:
            return fsspec.filesystem(self.protocol, **dict(self.options))  # kept by fsspec; a forked child has its own
        except (ValueError, ImportError) as error:
            raise not_read(self.protocol, error) from None
        except Exception as error:  # file systems raise errors of many kinds
            raise UnreadableError(f"{self.protocol}://: its file system cannot be set up: {reason(error)}.") from None

    def entries(self) -> list[tuple[str, int | None]]:
        """(name, size, or None for a directory) of each entry. Raises MissingFileError, UnreadableError."""
        listed = self._listing()
        if self.first_seen is not None and not self.first_seen:
            self.first_seen.update(_states(listed))
        here = self.path.rstrip("/")
        found: list[tuple[str, int | None]] = []
        for entry in listed:
            path = str(entry["name"]).rstrip("/")
            if path == here:
                if entry["type"] != "directory" and len(listed) == 1 and entry.get("size"):
                    raise missing_directory(self)
                continue
            name = path.rpartition("/")[2]
            if entry["type"] == "directory":
                found.append((name, None))
            elif entry.get("size") is not None:
                found.append((name, int(entry["size"])))
            else:  # a listing without sizes, as web servers give it
                found.append((name, (self / name).size() or 0))
        return found

    def file_names(self) -> frozenset[str]:
        """The names of the files in a directory. Raises as ``entries``."""
        return frozenset(name for name, size in self.entries() if size is not None)

    def exists(self) -> bool:
        """Whether there is such a directory. Raises UnreadableError."""
        with suppress(MissingFileError):
            self.entries()
            return True
        return False

    def is_symlink(self) -> bool:
        """False: a store has no links."""
        return False

    def modified_at(self) -> float:
        """0: the time of a change is not asked for."""
        return 0.0

    def version(self) -> str:
        """A text that is another one where a file was replaced."""
        info = self.system.info(self.path)
        return f"{info.get('size')} {info.get('ETag') or info.get('mtime')}"

    def _listing(self) -> list[dict[str, Any]]:
        """List a directory as it is now."""
        system: Any = self.system

        def ask() -> list[dict[str, Any]]:
            system.invalidate_cache(self.path)  # a listing from before may be out of date
            found: list[dict[str, Any]] = call(system, "ls", self.path, detail=True)
            return found

        try:
            listed = with_retries(ask, self)
        except (FileNotFoundError, NotADirectoryError):
            raise missing_directory(self) from None
        except Exception as error:  # file systems raise errors of many kinds
            raise UnreadableError(f"{self}: cannot be listed: {reason(error)}.") from None
        return listed

    def watched(self, telling: str) -> RemotePath:
        """This directory, which remembers its files' states when it is first listed."""
        return self if self.first_seen is not None else replace(self, first_seen={})

    def has_changed(self, telling: str) -> bool:
        """Whether a watched directory is gone, or a file of it is another one. One request, where it was listed."""
        if not self.first_seen:
            return False
        try:
            now = _states(self._listing())
        except MissingFileError:
            return True
        return any(now.get(name) != state for name, state in self.first_seen.items())

    def size(self) -> int | None:
        """Size of a file in bytes, None where there is none. Raises UnreadableError; CheckpointError: not known."""
        try:
            found = with_retries(lambda: call(self.system, "info", self.path), self)
        except ZeroElasticError:
            raise
        except Exception as error:  # file systems raise errors of many kinds
            if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not _is_away(error):
                return None
            raise UnreadableError(f"{self}: cannot be looked at: {reason(error)}.") from None
        if found["type"] == "directory":
            return None
        if found.get("size") is None:
            raise CheckpointError(
                f"{self}: its server does not say how large it is, so its ranges cannot be read.", remedy=_COPY
            )
        return int(found["size"])

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes in one request. Raises what the file system raises."""
        try:
            data: bytes = with_retries(
                lambda: call(self.system, "cat_file", self.path, start=offset, end=offset + nbytes), self
            )
        except Exception as error:
            if self.size_if_beyond_end(error, offset + 1) is not None:  # a range that begins there is refused
                return b""
            raise
        return data

    def read_exactly(self, offset: int, nbytes: int) -> bytes:
        """The ``nbytes`` bytes at ``offset``. Raises as ``read_ranges``."""
        return read_ranges([(self, offset, nbytes)])[0]

    def size_if_beyond_end(self, error: BaseException, end: int) -> int | None:
        """The size of a file whose server refused a range because the file ends before ``end``; else None."""
        if not _may_refuse_range(error):
            return None
        try:
            self.system.invalidate_cache(self.parent.path)
            size = self.size()
        except ZeroElasticError:
            return None
        return size if size is not None and size < end else None


def _states(listed: Iterable[dict[str, Any]]) -> dict[str, object]:
    return {str(entry["name"]): repr(sorted(entry.items())) for entry in listed}


def _is_away(error: Exception) -> bool:
    """Whether the "not found" of fsspec's HTTP stands for another failure, such as a server that does not answer."""
    cause = error.__cause__
    return type(cause).__module__.startswith("aiohttp.") and http_status(cause) not in _NOT_FOUND


def _may_refuse_range(error: BaseException) -> bool:
    """Whether an error may be the answer to a range that a file does not have.

    The HTTP status decides, where the error or its cause has one. s3fs and others translate it: to EINVAL, ValueError.
    """
    for answer in (error, error.__cause__):
        status = http_status(answer)
        if status is not None:
            return status == _RANGE_NOT_SATISFIABLE
    return isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno == errno.EINVAL)


RemoteRange: TypeAlias = tuple[RemotePath, int, int]
"""A file, the first byte of a range of it, and how many bytes."""


def read_ranges(ranges: Sequence[RemoteRange]) -> list[bytes]:
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


def _ask(ranges: Sequence[RemoteRange]) -> list[bytes | BaseException]:
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


def _may_pass(wanted: RemoteRange, answer: bytes | BaseException) -> bool:
    """Whether the answer to a range is a failure that may pass: also fewer bytes than the file has there."""
    path, offset, nbytes = wanted
    if isinstance(answer, BaseException):
        return is_transient(answer)
    if len(answer) >= nbytes:
        return False
    try:
        size = path.size()
    except ZeroElasticError:
        return False
    return size is not None and size >= offset + nbytes


def _failure(path: RemotePath, offset: int, nbytes: int, answer: object) -> CheckpointError | UnreadableError:
    if isinstance(answer, FileNotFoundError):
        return missing_file(path)
    if isinstance(answer, BaseException):
        size = path.size_if_beyond_end(answer, offset + nbytes)
        if size is not None:
            return CheckpointError(f"{path}: ends at byte {size}. The file is truncated.")
        return UnreadableError(f"{path}: reading at byte {offset} failed: {reason(answer)}.")
    got = len(answer) if isinstance(answer, bytes) else 0
    if got < nbytes:
        path.system.invalidate_cache(path.parent.path)
        try:
            size = path.size()
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


def not_read(protocol: str, error: Exception) -> UsageError | UnreadableError:
    if not isinstance(error, ImportError):
        return UsageError(f"{protocol}://: no file system of this name is known to fsspec ({error}).")
    how = f"pip install 'zeroelastic[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else str(error)
    return UnreadableError(f"{protocol}://: what reads this is not installed. Install it: {how}.", remedy="")
