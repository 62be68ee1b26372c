"""Where a file is: a local path, or a URL that fsspec reads, such as ``s3://bucket/run``; and files of this machine.

Local files are ``pathlib.Path``; a ``RemotePath`` has the part of its interface that is used here. ``DiskPath`` has the
methods of a ``RemotePath`` for a file or directory of this machine, which is never opened through a symbolic link that
leads elsewhere.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import Any, TypeAlias

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UsageError, missing_directory
from zeroelastic.io.remote import URL, RemotePath, not_read
from zeroelastic.io.retries import reason


class WatchedPath(PosixPath):
    """A directory of this machine; ``first_seen`` are its files' first states (``watched``)."""

    first_seen: dict[str, object] | None = None

    def __reduce__(self) -> tuple[Callable[..., WatchedPath], tuple[str, dict[str, object] | None]]:
        """Another process, or a copy, keeps what was seen first."""
        return watched_path, (str(self), self.first_seen)


def watched_path(path: str | Path, first_seen: dict[str, object] | None) -> WatchedPath:
    """A directory with its files' states at the first look."""
    made = WatchedPath(path)
    made.first_seen = first_seen
    return made


_FILE = re.compile(r"(?:file|local)://(?:localhost(?=/))?", re.IGNORECASE)
_CHAIN = re.compile(r"[a-z0-9+.-]+::", re.IGNORECASE)


FilePath: TypeAlias = "Path | RemotePath"
"""Where a file is."""


def local_path(path: FilePath) -> Path | None:
    """The path of a file on this machine; None of one behind a URL."""
    return None if isinstance(path, RemotePath) else path


def remote_path(path: FilePath) -> RemotePath:
    """Return a path for code that reads only behind URLs; a local path is a bug of the caller."""
    assert isinstance(path, RemotePath), f"{path} is on this machine"
    return path


def local_paths(paths: Iterable[FilePath]) -> tuple[Path, ...]:
    """Return paths for code that reads only local files; a remote path is a bug of the caller."""
    found: list[Path] = []
    for path in paths:
        assert not isinstance(path, RemotePath), f"{path} is not on this machine"
        found.append(path)
    return tuple(found)


def as_path(text: str | os.PathLike[str] | RemotePath) -> FilePath:
    """The path that a user gave: a URL becomes a RemotePath, everything else a Path.

    Raises UsageError for a URL that nothing reads, UnreadableError for one whose package is not installed.

    Example::

        open_checkpoint(as_path("s3://bucket/run/global_step100"))
    """
    if isinstance(text, (RemotePath, WatchedPath)):
        return text
    if not isinstance(text, str) or URL.match(text) is None:
        if isinstance(text, str) and "://" in text and _CHAIN.match(text):
            raise UsageError(f"{text}: URLs chained with :: are not read. Name the files by their own URL.")
        return Path(_expanded(os.fspath(text)))
    protocol, _, rest = text.partition("://")
    protocol = protocol.lower()
    text = f"{protocol}://{rest}"
    if protocol in ("file", "local"):
        return Path(_FILE.sub("", text, count=1))
    import fsspec

    try:
        kind: Any = fsspec.get_filesystem_class(protocol)
        options = tuple(sorted(kind._get_kwargs_from_urls(text).items()))
        path = str(kind._strip_protocol(text))
        return RemotePath(protocol, path.rstrip("/") or path, options)
    except (ValueError, ImportError) as error:
        raise not_read(protocol, error) from None


def local_directory(text: str | os.PathLike[str], instead: str) -> Path:
    """The directory of this machine that a user gave. Raises UsageError for a URL, with what to do ``instead``."""
    is_url = isinstance(text, str) and URL.match(text) is not None and _FILE.match(text) is None
    path = None if is_url else local_path(as_path(text))
    if path is None:
        raise UsageError(f"{text}: is a URL, not a directory of this machine. {instead}")
    return path


def store_path(text: str) -> RemotePath:
    """The place in a store that a user gave; a directory of this machine is one of the file system "file"."""
    path = as_path(text)
    return path if isinstance(path, RemotePath) else RemotePath("file", str(path), (("auto_mkdir", True),))


def absolute(text: str | os.PathLike[str]) -> str:
    """A local path (or ``file://`` URL) made absolute, symbolic links kept; any other URL unchanged.

    A path that is used again later, by a thread, another process or a later call, is made absolute first, because the
    working directory may have changed by then.
    """
    path = os.fspath(text)
    local = _FILE.match(path)
    if local is not None:
        return os.path.abspath(path[local.end() :])
    return path if "://" in path and (URL.match(path) or _CHAIN.match(path)) else os.path.abspath(_expanded(path))


def _expanded(path: str) -> str:
    """A path with the home directory in place of ``~``, as a shell gives it, unless something here has that name."""
    return os.path.expanduser(path) if path[:1] == "~" and not os.path.lexists(path.partition("/")[0]) else path


def relative_name(path: FilePath, directory: FilePath) -> str:
    """The name of a path from a directory: "." for the directory itself."""
    if isinstance(path, RemotePath) and isinstance(directory, RemotePath):
        return path.path[len(directory.path.rstrip("/")) :].strip("/") or "."
    return os.path.relpath(str(path), str(directory))


FOLLOW_LINKS = "ZEROELASTIC_FOLLOW_LINKS"
"""The environment variable that, set to 1, lets symbolic links to files lead anywhere."""


def open_regular(path: Path) -> io.FileIO:
    """Open a local file for reading, unbuffered. Never waits, as opening a named pipe does.

    A symbolic link may lead to files below the directory above its own (the tag's, for a file of a tag), and from a
    snapshot of the Hugging Face Hub's cache to that cache's blobs: a checkpoint from another source must not get
    other files of this machine read, and copied, in its place. FOLLOW_LINKS in the environment lifts that. Links to
    directories are followed. Raises OSError, CheckpointError for such a link.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if os.path.islink(path):
            _check_link(path)
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
        f"itself there; or, if you made this link, set {FOLLOW_LINKS}=1.",
        remedy="",
    )


def read_fully(fd: int, nbytes: int, offset: int) -> bytes:
    pieces: list[bytes] = []
    while nbytes and (piece := os.pread(fd, nbytes, offset)):
        pieces.append(piece)
        offset += len(piece)
        nbytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextmanager
def _listed(directory: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(directory) as entries:
            yield entries
    except (FileNotFoundError, NotADirectoryError):
        raise missing_directory(directory) from None
    except UnreadableError:
        raise
    except OSError as error:
        raise UnreadableError(f"{directory}: cannot be listed: {error.strerror}.") from None


def _is(look: Callable[[], bool], directory: Path, name: str) -> bool:
    """Ask an entry of a directory about its kind. A link that leads to itself is of none."""
    try:
        return look()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise UnreadableError(f"{directory / name}: cannot be looked at: {error.strerror}.") from None


class DiskPath:
    """A file or directory of this machine, with the methods of a ``RemotePath``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first_seen = path.first_seen if isinstance(path, WatchedPath) else None

    def entries(self) -> list[tuple[str, int | None]]:
        found: list[tuple[str, int | None]] = []
        with _listed(self._path) as entries:
            for entry in entries:
                if _is(entry.is_file, self._path, entry.name):
                    found.append((entry.name, entry.stat().st_size))
                elif _is(entry.is_dir, self._path, entry.name):
                    found.append((entry.name, None))
        return found

    def file_names(self) -> frozenset[str]:
        with _listed(self._path) as entries:
            return frozenset(entry.name for entry in entries if _is(entry.is_file, self._path, entry.name))

    def size(self) -> int | None:
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UnreadableError(f"{self._path}: cannot be looked at: {reason(error)}.") from None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def exists(self) -> bool:
        if self._first_seen is not None:
            return True
        with suppress(MissingFileError), _listed(self._path):
            return True
        return False

    def modified_at(self) -> float:
        try:
            return os.stat(self._path).st_mtime
        except OSError:
            return 0.0

    def version(self) -> str:
        found = os.stat(self._path)
        return f"{found.st_size} {found.st_mtime_ns}"

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` bytes at ``offset``: fewer where the file ends. Raises OSError, CheckpointError."""
        with open_regular(self._path) as file:
            left = min(nbytes, max(0, os.fstat(file.fileno()).st_size - offset))  # no memory for what is not there
            return read_fully(file.fileno(), left, offset)

    def read_exactly(self, offset: int, nbytes: int) -> bytes:
        data = self.read(offset, nbytes)
        if len(data) < nbytes:
            raise CheckpointError(f"{self._path}: ends at byte {offset + len(data)}. The file is truncated.")
        return data

    def watched(self, telling: str) -> Path:
        """This directory, which remembers its files' states; a missing directory's path is unchanged.

        Where there is a file ``telling``, which every save writes anew, its state stands for all of them.
        """
        seen = None if self._first_seen is not None else self._states(telling)
        return self._path if seen is None else watched_path(self._path, seen)

    def has_changed(self, telling: str) -> bool:
        """Whether a watched directory is gone, or a file of it is gone or another one."""
        if self._first_seen is None:
            return False
        now = self._states(telling)
        return now is None or any(now.get(name) != state for name, state in self._first_seen.items())

    def _states(self, telling: str) -> dict[str, object] | None:
        """The states of a local directory's files, or of one that tells; None where there is no directory.

        That file is opened: a network file system may answer ``stat`` from its cache.
        """
        with suppress(OSError):
            fd = os.open(self._path / telling, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return {telling: _state(os.fstat(fd))}
            finally:
                os.close(fd)
        found: dict[str, object] = {}
        try:
            for entry in os.scandir(self._path):
                with suppress(OSError):
                    if not entry.is_dir():
                        found[entry.name] = _state(entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # reading a file of it raises the error
            pass
        return found


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
