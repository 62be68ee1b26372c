"""A file system behind ``counted://`` URLs that keeps a log of what it is asked, and can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from zeroelastic.io.paths import as_path
from zeroelastic.io.remote import RemotePath


class CountedFileSystem(MemoryFileSystem):
    """fsspec's file system in memory; ``ranges`` are the (path, start, end) that were read, ``calls`` the others."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    ranges: ClassVar[list[tuple[str, int, int]]] = []
    calls: ClassVar[list[tuple[str, str]]] = []
    answer: ClassVar[Callable[[str, int, bytes], bytes] | None] = None
    _log = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        assert start is not None and end is not None, "a whole file was asked for"
        with self._log:
            self.ranges.append((path, start, end))
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return data if type(self).answer is None else type(self).answer(path, start, data)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.calls.append(("ls", path))
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self.calls.append(("info", path))
        return super().info(path, **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        assert mode == "wb", "a file was opened, not read by range"
        return super().open(path, mode=mode, **kwargs)


def put(url: str, data: bytes) -> RemotePath:
    """Make a file; its path."""
    path = as_path(url)
    assert isinstance(path, RemotePath)
    CountedFileSystem().pipe_file(path.path, data)
    forget()
    return path


def upload(directory: Path, url: str) -> str:
    """Copy the files of a directory; returns the URL."""
    for path in directory.iterdir():
        put(f"{url}/{path.name}", path.read_bytes())
    return url


def forget() -> None:
    """Empty the log."""
    CountedFileSystem.ranges.clear()
    CountedFileSystem.calls.clear()


@pytest.fixture
def counted() -> Iterator[type[CountedFileSystem]]:
    """The file system, empty."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    CountedFileSystem.store.clear()
    CountedFileSystem.pseudo_dirs[:] = [""]
    CountedFileSystem.answer = None
    forget()
    yield CountedFileSystem
    CountedFileSystem.answer = None
    CountedFileSystem.store.clear()
