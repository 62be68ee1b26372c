"""The moments between two files of a save, on all ranks: what a kill of the job would leave at each, or the kill.

A rank is at such a moment just before it opens a file for writing, makes, renames, links or removes something in a
directory, and before and after ``torch.save``. The other ranks are stopped meanwhile, wherever they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATHS = {
    "os.rename": 2,
    "os.mkdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "shutil.rmtree": 1,
}
"""Audit events, and how many of their first arguments are paths."""


class Boundaries:
    """The moments at which this rank changes ``directory``; each leaves a copy in ``images``, in their order over all.

    With ``kill``, a rank and a part of a path, there are no copies, and all ranks are killed at the first moment of
    that rank that has to do with such a path.
    """

    def __init__(self, directory: str, images: str, kill: tuple[int, str] | None = None) -> None:
        self.directory, self.images, self.kill = os.path.abspath(directory), Path(images), kill
        self.rank, self.pids = dist.get_rank(), list[int]()
        self.lock, self.is_active = threading.RLock(), False

    def begin(self) -> None:
        """Watch until ``is_active`` is reset. Collective."""
        from zeroelastic.runs import tag_directory

        self.images.mkdir(parents=True, exist_ok=True)
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self.pids = [pid for pid in pids if pid != os.getpid()]
        for owner, name in ((torch, "save"), (tag_directory, "exchange")):
            patch.object(owner, name, self._around(getattr(owner, name))).start()
        sys.addaudithook(self._hook)
        dist.barrier()
        self.is_active = True

    def end(self) -> None:
        """Leave a last copy, of what the save has left. Collective."""
        dist.barrier()
        if self.rank == 0 and self.kill is None:
            self._copy()
        dist.barrier()
        self.is_active = False

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            paths = [arg for arg in args if isinstance(arg, str | os.PathLike)]
            self._at(*paths)
            done = call(*args, **kwargs)
            self._at(*paths)
            return done

        return around

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self._at(args[0])
        elif event in _PATHS:
            self._at(*args[: _PATHS[event]])

    def _at(self, *paths: Any) -> None:
        inside = [path for path in paths if isinstance(path, str | os.PathLike) and self._holds(os.fspath(path))]
        if not inside or not self.is_active:
            return
        with self.lock, open(self.images / ".lock", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if self.kill is None:
                self._copy()
            elif self.kill[0] == self.rank and any(self.kill[1] in os.fsdecode(path) for path in inside):
                for pid in (*self.pids, os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    def _holds(self, path: str | bytes) -> bool:
        return os.path.abspath(os.fsdecode(path)).startswith(self.directory)

    def _copy(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            while not all(
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in self.pids
            ):
                time.sleep(0.001)
            target = self.images / f"{len(os.listdir(self.images)):03d}-rank{self.rank}"
            self.is_active = False
            if os.path.isdir(self.directory):
                while not self._copied(target):
                    shutil.rmtree(target, ignore_errors=True)
            else:
                target.mkdir()
        finally:
            self.is_active = True
            for pid in self.pids:
                os.kill(pid, signal.SIGCONT)

    def _copied(self, target: Path) -> bool:
        """Whether the copy is of one moment: another thread may be about to rename what it has been let rename."""
        with suppress(shutil.Error, FileNotFoundError):
            before = sorted(Path(self.directory).rglob("*"))
            shutil.copytree(self.directory, target, symlinks=True)
            return sorted(Path(self.directory).rglob("*")) == before
        return False


def distinct(images: Path) -> list[Path]:
    """The copies in their order, without those that are like the one before but for hidden files of a save."""
    found: list[Path] = []
    before = ""
    for image in sorted(path for path in images.iterdir() if path.is_dir()):
        if (code := _code(image)) != before:
            found.append(image)
        before = code
    return found


def _code(image: Path) -> str:
    code = hashlib.sha256()
    for path in sorted(image.rglob("*")):
        parts = path.relative_to(image).parts
        hidden = next((number for number, part in enumerate(parts) if part[0] == "." and part.endswith(".tmp")), None)
        if hidden is None:
            code.update(repr(parts).encode())
            with suppress(IsADirectoryError):
                code.update(path.read_bytes())
    return code.hexdigest()
