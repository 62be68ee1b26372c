"""Where checkpoint files are: a local path, or a URL that fsspec reads, such as ``s3://bucket/run``; never written to.

Local files are ``pathlib.Path``. A ``RemotePath`` has the part of its interface that is used here, and is read by byte
range only. fsspec itself is imported when the first URL is looked at. Credentials and endpoints are not asked for
here: they come from where the file system's own tools take them, for S3 the variables AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL and the rest, or an instance's role; for Google Cloud Storage
GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST; for everything fsspec's configuration (files in
``~/.config/fsspec``, FSSPEC_S3_... variables). Retries are fsspec's; what has not answered in five minutes has failed.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UsageError, ZeroElasticError
from zeroelastic.pinned import PinnedPath

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CHAIN = re.compile(r"[a-z0-9+.-]+::", re.IGNORECASE)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PATIENCE_S = 300.0
_THREADS = 8
_MAX_REQUEST_BYTES = 8 << 20

FOLLOW_LINKS = "ZEROELASTIC_FOLLOW_LINKS"
"""The environment variable that, set to 1, lets symbolic links to files lead anywhere."""


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory behind an fsspec file system; ``path`` is what that file system calls it.

    ``options`` are what the URL says about the file system itself, such as the host. ``first_seen`` is what the first
    listing of a directory says of its files, where that is kept (``one_save.pin``).
    """

    protocol: str
    path: str
    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    first_seen: dict[str, str] | None = field(default=None, repr=False, compare=False)

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
        if _URL.match(self.path):  # some file systems call their files by the whole URL
            return self.path
        host = dict(self.options).get("host", "")
        return (
            f"{self.protocol}://{host}/{self.path.lstrip('/')}"
            if host
            else f"{self.protocol}://{self.path.lstrip('/')}"
        )

    @property
    def system(self) -> Any:
        """The fsspec file system; one and the same for all paths of one protocol and host. Raises UsageError,
        UnreadableError."""
        return _system(self.protocol, self.options)


FilePath: TypeAlias = "Path | RemotePath"
"""Where a file is."""


def local_paths(paths: Iterable[FilePath]) -> tuple[Path, ...]:
    """The same paths, for those who read local files only; another one is a bug of ours."""
    found: list[Path] = []
    for path in paths:
        assert isinstance(path, Path), f"{path} is not on this machine"
        found.append(path)
    return tuple(found)


def as_path(text: str | os.PathLike[str] | RemotePath) -> FilePath:
    """What a user wrote: a URL becomes a RemotePath, everything else a Path.

    Raises UsageError for a URL that nothing reads, UnreadableError for one whose package is not installed.

    Example::

        open_checkpoint(as_path("s3://bucket/run/global_step100"))
    """
    if isinstance(text, (RemotePath, PinnedPath)):
        return text
    if not isinstance(text, str) or _URL.match(text) is None:
        if isinstance(text, str) and "://" in text and _CHAIN.match(text):
            raise UsageError(f"{text}: URLs chained with :: are not read. Name the files by their own URL.")
        return Path(text)
    protocol, _, rest = text.partition("://")
    protocol = protocol.lower()
    text = f"{protocol}://{rest}"
    if protocol in ("file", "local"):
        return Path(rest)
    import fsspec

    try:
        kind: Any = fsspec.get_filesystem_class(protocol)
        options = tuple(sorted(kind._get_kwargs_from_urls(text).items()))
        path = str(kind._strip_protocol(text))
        return RemotePath(protocol, path.rstrip("/") or path, options)
    except (ValueError, ImportError) as error:
        raise _not_read(protocol, error) from None


def absolute(text: str | os.PathLike[str]) -> str:
    """A local path as it is meant now: absolute, symbolic links kept. A URL stays what it is.

    What is used again later, by a thread, another process or a later call, is made absolute first: the working
    directory may have changed by then.
    """
    path = os.fspath(text)
    return path if "://" in path and (_URL.match(path) or _CHAIN.match(path)) else os.path.abspath(path)


def _system(protocol: str, options: Iterable[tuple[str, Any]]) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(protocol, **dict(options))  # fsspec keeps the instance, and a forked child's apart
    except (ValueError, ImportError) as error:
        raise _not_read(protocol, error) from None
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{protocol}://: its file system cannot be set up: {_reason(error)}.") from None


def _not_read(protocol: str, error: Exception) -> UsageError | UnreadableError:
    if not isinstance(error, ImportError):
        return UsageError(f"{protocol}://: no file system of this name is known to fsspec ({error}).")
    how = f"pip install 'zeroelastic[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else str(error)
    return UnreadableError(f"{protocol}://: what reads this is not installed. Install it: {how}.")


def _ask(system: Any, operation: str, *arguments: Any, **options: Any) -> Any:
    """Call a file system, and wait no longer than ``_PATIENCE_S`` where it can be stopped."""
    if not system.async_impl:
        return getattr(system, operation)(*arguments, **options)
    from fsspec.asyn import sync

    return sync(system.loop, getattr(system, f"_{operation}"), *arguments, timeout=_PATIENCE_S, **options)


def _reason(error: BaseException) -> str:
    """What went wrong, in one line without a full stop, whatever a file system raised."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()).rstrip(".")
    if type(error).__name__ == "FSTimeoutError":
        return f"no answer in {_PATIENCE_S:.0f} s"
    return text or type(error).__name__


def list_directory(directory: FilePath) -> tuple[dict[str, int], tuple[str, ...]]:
    """The files of a directory with their sizes in bytes, and the names of its directories, sorted.

    Links to files count as files. One listing, so one request where the directory is remote and not large. Raises
    MissingFileError where there is no such directory, UnreadableError where it cannot be listed.
    """
    entries = list(_entries(directory))
    files = {name: size for name, size in entries if size is not None}
    return files, tuple(sorted(name for name, size in entries if size is None))


def file_sizes(directory: FilePath) -> dict[str, int]:
    """The files of a directory and their sizes in bytes. Lists and raises as ``list_directory``."""
    return list_directory(directory)[0]


def folders(directory: FilePath) -> tuple[str, ...]:
    """The names of the directories in a directory, sorted. Lists and raises as ``list_directory``."""
    return list_directory(directory)[1]


def _entries(directory: FilePath) -> Iterable[tuple[str, int | None]]:
    """(name, size, or None for a directory) of what is in a directory."""
    if isinstance(directory, RemotePath):
        return _remote_entries(directory)
    found: list[tuple[str, int | None]] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file():
                    found.append((entry.name, entry.stat().st_size))
                elif entry.is_dir():
                    found.append((entry.name, None))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{directory}: no such checkpoint directory.") from None
    except OSError as error:
        raise UnreadableError(f"{directory}: cannot be listed: {error.strerror}.") from None
    return found


def _remote_entries(directory: RemotePath) -> list[tuple[str, int | None]]:
    listed = _remote_listing(directory)
    if directory.first_seen is not None and not directory.first_seen:
        directory.first_seen.update({str(entry["name"]): repr(sorted(entry.items())) for entry in listed})
    here = directory.path.rstrip("/")
    found: list[tuple[str, int | None]] = []
    for entry in listed:
        path = str(entry["name"]).rstrip("/")
        if path == here:
            if entry["type"] != "directory" and len(listed) == 1 and entry.get("size"):
                raise MissingFileError(f"{directory}: no such checkpoint directory.")
            continue
        name = path.rpartition("/")[2]
        if entry["type"] == "directory":
            found.append((name, None))
        elif entry.get("size") is not None:
            found.append((name, int(entry["size"])))
        else:  # a listing without sizes, as web servers give it
            found.append((name, file_size(directory / name) or 0))
    return found


def _remote_listing(directory: RemotePath) -> list[dict[str, Any]]:
    """What a file system says of each entry of a directory, as it is now."""
    system: Any = directory.system
    try:
        system.invalidate_cache(directory.path)  # a listing from before may be out of date
        listed: list[dict[str, Any]] = _ask(system, "ls", directory.path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{directory}: no such checkpoint directory.") from None
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{directory}: cannot be listed: {_reason(error)}.") from None
    return listed


def changed_since_listed(directory: RemotePath) -> bool:
    """Whether a file is gone or another one since the first listing, by all that the file system says of it.

    One request, where there was a listing. Raises UnreadableError.
    """
    if not directory.first_seen:
        return False
    try:
        now = {str(entry["name"]): repr(sorted(entry.items())) for entry in _remote_listing(directory)}
    except MissingFileError:
        return True
    return any(now.get(name) != seen for name, seen in directory.first_seen.items())


def file_size(path: FilePath) -> int | None:
    """Size of a file in bytes, None where there is none. Raises UnreadableError where it cannot be known."""
    try:
        if isinstance(path, RemotePath):
            found = _ask(path.system, "info", path.path)
            if found["type"] == "directory":
                return None
            if found.get("size") is None:
                raise CheckpointError(f"{path}: its server does not say how large it is, so its ranges cannot be read.")
            return int(found["size"])
        at = os.stat(path)
    except ZeroElasticError:
        raise
    except Exception as error:  # each file system has errors of its own
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not _is_away(error):
            return None
        raise UnreadableError(f"{path}: cannot be looked at: {_reason(error)}.") from None
    return at.st_size if stat.S_ISREG(at.st_mode) else None


def _is_away(error: Exception) -> bool:
    """Whether the "not found" of fsspec's HTTP stands for another failure, such as a server that does not answer."""
    cause = error.__cause__
    return type(cause).__module__.startswith("aiohttp.") and getattr(cause, "status", None) not in (404, 410)


def read_range(path: FilePath, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends.

    Raises MissingFileError, UnreadableError with the file and what went wrong.
    """
    if nbytes <= 0:
        return b""
    try:
        return _range(path, offset, nbytes)
    except ZeroElasticError:
        raise
    except FileNotFoundError:
        raise _missing(path) from None
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{path}: reading at byte {offset} failed: {_reason(error)}.") from None


def read_whole(path: FilePath, *, limit: int) -> bytes:
    """A small file. Raises MissingFileError, UnreadableError, CheckpointError: has more than ``limit`` bytes."""
    try:
        data = _range(path, 0, limit + 1)
    except ZeroElasticError:
        raise
    except FileNotFoundError:
        raise _missing(path) from None
    except Exception as error:  # each file system has errors of its own
        raise UnreadableError(f"{path}: cannot be read: {_reason(error)}.") from None
    if len(data) > limit:
        raise CheckpointError(f"{path}: has more than {limit} bytes, which such a file never has.")
    return data


def _missing(path: FilePath) -> MissingFileError:
    return MissingFileError(f"{path}: no such file. The checkpoint is incomplete.")


def _range(path: FilePath, offset: int, nbytes: int) -> bytes:
    if isinstance(path, RemotePath):
        return _remote_range(path, offset, nbytes)
    return _local_range(path, offset, nbytes)


def open_regular(path: Path) -> io.FileIO:
    """Open a local file for reading, unbuffered. Never waits, as opening a named pipe does.

    A symbolic link may lead to files below the directory above its own (the tag's, for a file of a tag), and from a
    snapshot of the Hugging Face Hub's cache to that cache's blobs: a checkpoint that somebody else made must not have
    other files of this machine read, and copied, in its place. FOLLOW_LINKS in the environment lifts that. Links to
    directories are followed. Raises OSError, CheckpointError for such a link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:  # which would name the file as the pinned directory leads to it
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        found = os.fstat(fd)
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if os.path.islink(path):
            _check_link(path)
        if isinstance(path, PinnedPath):
            path.note_open(found)
        return io.FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _check_link(path: Path) -> None:
    if os.environ.get(FOLLOW_LINKS) == "1":
        return
    folder, target = os.path.realpath(path.parent), os.path.realpath(path)
    allowed = [os.path.dirname(folder)]
    repository, snapshots, revision = folder.rpartition("/snapshots/")
    if snapshots and revision:
        allowed.append(f"{repository}/blobs")
    if any(target.startswith(f"{directory.rstrip('/')}/") for directory in allowed):
        return
    raise CheckpointError(
        f"{path}: is a symbolic link to {target}, which is outside of {allowed[0]}. It was not read. Put the file "
        f"itself there; or, if you made this link, set {FOLLOW_LINKS}=1."
    )


def _local_range(path: Path, offset: int, nbytes: int) -> bytes:
    with open_regular(path) as file:
        left = min(nbytes, max(0, os.fstat(file.fileno()).st_size - offset))  # no memory for what is not there
        pieces: list[bytes] = []
        while left and (piece := os.pread(file.fileno(), left, offset)):
            pieces.append(piece)
            offset += len(piece)
            left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _remote_range(path: RemotePath, offset: int, nbytes: int) -> bytes:
    """Up to ``nbytes`` bytes in one request. Raises what the file system raises."""
    try:
        data: bytes = _ask(path.system, "cat_file", path.path, start=offset, end=offset + nbytes)
    except Exception as error:
        if _beyond_the_end(error, path, offset + 1) is not None:  # a range that begins there is refused
            return b""
        raise
    return data


def _beyond_the_end(error: BaseException, path: RemotePath, end: int) -> int | None:
    """The size of a file whose server refused a range because the file ends before ``end``; else None."""
    text = f"{type(error).__name__} {error}".lower()
    if "range" not in text and "416" not in text:
        return None
    try:
        path.system.invalidate_cache(path.parent.path)
        size = file_size(path)
    except ZeroElasticError:
        return None
    return size if size is not None and size < end else None


def read_ranges(ranges: Sequence[tuple[RemotePath, int, int]]) -> list[bytes]:
    """The bytes of many (file, offset, nbytes) of remote files, requested at the same time; each has its full length.

    Memory: the answers. How many requests are under way at a time is the file system's to say, 8 where it does not.
    Raises MissingFileError, UnreadableError, CheckpointError (truncated) with the file and the offset: of several
    failures, the first in order.
    """
    answers: list[bytes | BaseException | None] = [None] * len(ranges)
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
                got = _ask(system, "cat_ranges", paths, starts, ends, on_error="return")
            else:
                got = _in_threads(system.cat_file, paths, starts, ends)
        except Exception as error:  # of all of them at once, such as a time limit
            got = [error] * len(members)
        for i, answer in zip(members, got, strict=True):
            answers[i] = answer
    checked: list[bytes] = []
    for (path, offset, nbytes), answer in zip(ranges, answers, strict=True):
        if not isinstance(answer, bytes) or len(answer) != nbytes:
            raise _failure(path, offset, nbytes, answer)
        checked.append(answer)
    return checked


def _failure(path: RemotePath, offset: int, nbytes: int, answer: object) -> CheckpointError | UnreadableError:
    if isinstance(answer, FileNotFoundError):
        return _missing(path)
    if isinstance(answer, BaseException):
        size = _beyond_the_end(answer, path, offset + nbytes)
        if size is not None:
            return CheckpointError(f"{path}: ends at byte {size}. The file is truncated.")
        return UnreadableError(f"{path}: reading at byte {offset} failed: {_reason(answer)}.")
    got = len(answer) if isinstance(answer, bytes) else 0
    if got < nbytes:
        return CheckpointError(f"{path}: ends at byte {offset + got}. The file is truncated.")
    return CheckpointError(
        f"{path}: reading at byte {offset} failed: {got} bytes came for {nbytes}. Its server does not serve ranges."
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
            except Exception as error:  # handed to whoever asked
                answers[i] = error

    # Daemons, so that an interrupted program ends without waiting for its requests.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(paths)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return answers


class BlockFile:
    """A remote file of which headers are read: whole blocks come, the last ones are kept, neighbours in one request.

    Memory: 4 MiB of blocks, and what one ``read`` returns. ``bytes_read`` counts what was requested.
    """

    BLOCK = 16 << 10
    _MAX_BLOCKS = 256
    _ENDS = 64 << 10

    def __init__(self, path: RemotePath) -> None:
        """Look up the size, and read the first and the last 64 KiB. Raises MissingFileError, CheckpointError."""
        size = file_size(path)
        if size is None:
            raise _missing(path)
        self.path = path
        self.size = size
        self.bytes_read = 0
        self._blocks: dict[int, bytes] = {}
        self.prefetch([(0, self._ENDS), (max(0, size - self._ENDS), self._ENDS)])

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises MissingFileError, CheckpointError."""
        numbers = self._numbers(offset, nbytes)
        blocks = self._get(numbers)
        data = b"".join(blocks[number] for number in numbers)
        begin = offset - numbers.start * self.BLOCK
        return data[begin : begin + nbytes]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read (offset, nbytes) at once, so that ``read`` finds them; at most ``capacity`` of them are kept."""
        self._get(sorted({number for offset, nbytes in ranges for number in self._numbers(offset, nbytes)}))

    @property
    def capacity(self) -> int:
        """Small ranges that are kept for sure after a prefetch."""
        return self._MAX_BLOCKS // 2

    def _numbers(self, offset: int, nbytes: int) -> range:
        end = min(offset + nbytes, self.size)
        return range(offset // self.BLOCK, -(-end // self.BLOCK)) if 0 <= offset < end else range(0)

    def _get(self, numbers: Sequence[int]) -> Mapping[int, bytes]:
        found = {number: self._blocks[number] for number in numbers if number in self._blocks}
        runs: list[range] = []
        for number in numbers:
            if number in found:
                continue
            if runs and runs[-1].stop == number and len(runs[-1]) * self.BLOCK < _MAX_REQUEST_BYTES:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        wanted: list[tuple[RemotePath, int, int]] = []
        for run in runs:
            begin = run.start * self.BLOCK
            wanted.append((self.path, begin, min(run.stop * self.BLOCK, self.size) - begin))
        for run, data in zip(runs, read_ranges(wanted), strict=True):
            self.bytes_read += len(data)
            for i, number in enumerate(run):
                found[number] = data[i * self.BLOCK : (i + 1) * self.BLOCK]
        # A long read leaves what is kept alone but for its end, where the next one may begin.
        for number in numbers if len(numbers) <= self._MAX_BLOCKS else numbers[-1:]:
            self._blocks.pop(number, None)
            self._blocks[number] = found[number]  # the newest are last
        for number in list(self._blocks)[: -self._MAX_BLOCKS]:
            del self._blocks[number]
        return found
