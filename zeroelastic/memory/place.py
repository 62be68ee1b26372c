"""The directory of a job in a node's shared memory. It outlives the workers, and goes with their launcher.

    /dev/shm/zeroelastic-<user>/<pid namespace>-<launcher's pid>-<its start>/

What a launcher that was killed has left, with its reaper, is removed by the next job of the same user.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.distributed.process_identity import is_hidden, machine, start_of
from zeroelastic.errors import SaveError
from zeroelastic.memory.launcher import Launcher, launcher

MEMORY_DIR = "ZEROELASTIC_MEMORY_DIR"
"""An environment variable: a directory in memory (tmpfs, ramfs, hugetlbfs) in place of /dev/shm."""


@dataclass(frozen=True, slots=True)
class Place:
    """A job's directory on this node. ``node`` names the node: two launchers on one machine are two nodes."""

    path: Path
    node: str
    launcher: Launcher | None = None

    @staticmethod
    def of_this_job(environment: Mapping[str, str] = os.environ) -> Place:
        """That of the job of this worker; the same for all workers of its launcher."""
        found = launcher()
        root = Path(environment.get(MEMORY_DIR) or "/dev/shm").absolute()
        name = f"{_namespace()}-{found.pid}-{found.started}"
        return Place(root / f"zeroelastic-{os.getuid()}" / name, f"{machine()} {found.pid} {found.started}", found)

    def create(self) -> None:
        """Make the directory, and remove those of launchers that have ended. Raises SaveError."""
        try:
            for directory in (self.path.parent, self.path):
                with suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
                _require_own(directory)
        except OSError as error:
            raise SaveError(
                f"{error.filename or self.path}: {error.strerror}: memory checkpoints cannot be kept there. Set "
                f"{MEMORY_DIR} to a directory in memory that this user may write to."
            ) from error
        self._remove_dead()

    def remove(self) -> None:
        """Remove all that the job keeps on this node."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_dead(self) -> None:
        with suppress(OSError):
            for name in os.listdir(self.path.parent):
                namespace, _, process = name.partition("-")
                pid, _, started = process.partition("-")
                if namespace == _namespace() and pid.isdecimal() and _has_ended(int(pid), started):
                    shutil.rmtree(self.path.parent / name, ignore_errors=True)


def _has_ended(pid: int, started: str) -> bool:
    """Whether there is no such process any more. The start of one that had ended before it was asked for is empty."""
    return start_of(pid) != started or (started == "" and not is_hidden(pid))


def _require_own(directory: Path) -> None:
    """Raise OSError for what is no directory, or that another user could have put there."""
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "is not a directory that this user alone may enter", os.fspath(directory))


def _namespace() -> str:
    """The PID namespace: in another one, process ids mean other processes."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")
