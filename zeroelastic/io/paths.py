"""Where a file is: a local path, or a URL that fsspec reads, such as ``s3://bucket/run``.

Local files are ``pathlib.Path``; a ``RemotePath`` has the part of its interface that is used here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PosixPath
from typing import Any, TypeAlias

from zeroelastic.errors import UsageError
from zeroelastic.io.remote import URL, RemotePath, not_read


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
