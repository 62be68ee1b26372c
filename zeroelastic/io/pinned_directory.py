"""A directory that is opened once: its files are read from the open directory, even after its path leads elsewhere.

A tag that is saved again is replaced as a whole, so files that are opened by path, one after the other, may belong to
two saves. A ``PinnedPath`` keeps the text of its path, for messages, and directs every open, stat and listing
(``os.fspath``) through the open directory, by ``/proc/self/fd``. A file that was removed from the directory is then
missing, and never a file of another save.
"""

from __future__ import annotations

import os
from pathlib import Path, PosixPath
from typing import NamedTuple


class FileState(NamedTuple):
    """Facts about a file that change when it is replaced or written to."""

    inode: int
    nbytes: int
    modified_ns: int


def file_state(found: os.stat_result) -> FileState:
    """The state of a file, from what ``stat`` says."""
    return FileState(found.st_ino, found.st_size, found.st_mtime_ns)


class _OpenDirectory:
    """The open directory, which is closed with the last path through it, and its files as they were first opened.

    ``route`` is the directory for system calls: where there is no ``/proc`` its path, so that nothing is pinned.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # keeps the inode from being used again
        self.inode = _inode(os.fstat(self.fd))
        self.route = f"/proc/self/fd/{self.fd}"
        try:
            self.is_pinned = _inode(os.stat(self.route)) == self.inode
        except OSError:
            self.is_pinned = False
        if not self.is_pinned:
            self.route = os.fspath(path)
        self.opened: dict[str, FileState] = {}

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class PinnedPath(PosixPath):
    """A directory that ``pin_directory`` opened, or something in it; ``/``, ``parent`` and ``with_name`` stay in it."""

    __slots__ = ("_below", "_directory")

    _directory: _OpenDirectory
    _below: str

    @classmethod
    def _of(cls, directory: _OpenDirectory, name: str) -> PinnedPath:
        made = cls(directory.path / name)
        made._directory, made._below = directory, name
        return made

    def __fspath__(self) -> str:
        if not hasattr(self, "_directory"):
            raise AssertionError(f"{self}: derived from a pinned path in a way that loses the pin; use / and with_name")
        return f"{self._directory.route}/{self._below}" if self._below else self._directory.route

    def __reduce__(self) -> tuple[type[Path], tuple[str]]:
        """Another process, or a copy, has the path alone."""
        return Path, (str(self),)

    def __truediv__(self, key: str | os.PathLike[str]) -> Path:  # type: ignore[override]
        if os.path.isabs(key):
            return Path(str(self)) / key
        return self._of(self._directory, os.path.join(self._below, key))

    @property
    def parent(self) -> Path:  # type: ignore[override]
        """The directory above: still in the pinned one, but for that of the pinned one itself."""
        if not self._below:
            return Path(str(self)).parent
        return self._of(self._directory, os.path.dirname(self._below))

    def joinpath(self, *keys: str | os.PathLike[str]) -> Path:  # type: ignore[override]
        """As ``/``."""
        found: Path = self
        for key in keys:
            found = found / key
        return found

    def resolve(self, strict: bool = False) -> Path:  # type: ignore[override]
        """Where the pinned directory, or the file in it, is now, as a plain path."""
        return Path(os.path.realpath(self, strict=strict))

    def with_name(self, name: str) -> Path:  # type: ignore[override]
        """The file of another name beside this one."""
        return self.parent / name

    def note_open(self, found: os.stat_result) -> None:
        """Remember the state of the file opened by this path; the first time counts."""
        self._directory.opened.setdefault(self._below, file_state(found))

    def note_all(self) -> None:
        """Remember the state of all files in the directory, as if they were opened. Raises OSError."""
        with os.scandir(self._directory.route) as entries:
            for entry in entries:
                if entry.is_file():
                    self._directory.opened.setdefault(entry.name, file_state(entry.stat()))

    @property
    def was_replaced(self) -> bool:
        """Whether the path of the directory leads to another one by now, or nowhere."""
        try:
            fd = os.open(self._directory.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return _inode(os.fstat(fd)) != self._directory.inode
        finally:
            os.close(fd)

    @property
    def rewritten(self) -> tuple[str, ...]:
        """The files that changed since they were first opened; a file that is gone does not count.

        Where the directory could not be pinned, a file without a name stands for its replacement.
        """
        found: list[str] = [] if self._directory.is_pinned or not self.was_replaced else [""]
        for name, before in self._directory.opened.items():
            try:
                now = os.stat(f"{self._directory.route}/{name}")
            except OSError:
                continue
            if file_state(now) != before:
                found.append(name)
        return tuple(sorted(found))


def pin_directory(path: Path) -> Path:
    """Open a directory: a path that keeps leading to it. Unchanged if it is pinned already or cannot be opened."""
    if isinstance(path, PinnedPath):
        return path
    try:
        return PinnedPath._of(_OpenDirectory(path), "")
    except OSError:
        return path


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
