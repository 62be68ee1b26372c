"""The directory of a job in a node's shared memory. It outlives the workers, and goes with their launcher.

The launcher is the process that started the workers of this node: torchrun's agent, DeepSpeed's launcher, slurmstepd.

    /dev/shm/zeroelastic-<user>/<pid namespace>-<launcher's pid>-<its start>/

        <run>/complete/<tag>/   a checkpoint as a node-local disk would have it: files of ranks, and the commit record
        <run>/writing/...       files that the ranks are filling; complete tags have hard links to them

``<run>`` stands for the directory in which the engine saves to disk and for the parameters that it trains, so that the
engines of a job stay apart. A tag is in ``complete`` by one rename, when all its files are on this node; it can be
resumed from when that is so on all nodes.

What a launcher that was killed has left, with its reaper, is removed by the next job of the same user. In another PID
namespace, such as that of a container that was killed, the launcher cannot be seen. The lock of the reaper is looked at
there, which the kernel releases when the reaper ends. A directory is removed if the lock is free and the reaper ran on
this boot of the machine.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import multiprocessing
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.distributed.process_identity import is_hidden, machine, start_of
from zeroelastic.elastic.memory.reaper import LOCK_NAME
from zeroelastic.errors import CheckpointError, SaveError
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.tag_directory import is_unfinished

logger = logging.getLogger(__name__)

MEMORY_DIR = "ZEROELASTIC_MEMORY_DIR"
"""An environment variable: a directory in memory (tmpfs, ramfs, hugetlbfs) in place of /dev/shm."""

_TAG = re.compile(r"step(\d+)-([0-9a-f]{32})")
_COMPLETE, _WRITING = "complete", "writing"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_OF_A_WORKER = ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that a launcher sets for a worker, and a wrapper around the worker has too."""


def launcher() -> int:
    """Return the launcher of this process: the nearest ancestor that is no wrapper (a shell, numactl) of it alone.

    A process that nobody launched is its own launcher.
    """
    if multiprocessing.parent_process() is None and "LOCAL_RANK" not in os.environ:
        return os.getpid()
    return _unlike(os.getppid(), os.environ)


@dataclass(frozen=True, slots=True)
class JobPlace:
    """A job's directory on this node. ``node`` names the node: two launchers on one machine are two nodes.

    ``launcher`` is a process by its id and its start (``start_of``), as ids are used again.
    """

    path: Path
    node: str
    launcher: tuple[int, str] | None = None

    @staticmethod
    def of_this_job(environment: Mapping[str, str] = os.environ) -> JobPlace:
        """The place of this worker's job; the same for all workers of a launcher."""
        pid = launcher()
        started = start_of(pid)
        root = Path(environment.get(MEMORY_DIR) or "/dev/shm").absolute()
        path = root / f"zeroelastic-{os.getuid()}" / f"{_namespace()}-{pid}-{started}"
        return JobPlace(path, f"{machine()} {pid} {started}", (pid, started))

    def create(self) -> None:
        """Make the directory, and remove directories whose launchers have ended. Raises SaveError."""
        try:
            for directory in (self.path.parent, self.path):
                with suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
            require_own(self.path, below=self.path.parents[1])
        except OSError as error:
            raise SaveError(
                f"{error.filename or self.path}: {error.strerror}: memory checkpoints cannot be kept there. Set "
                f"{MEMORY_DIR} to a directory in memory that this user may write to."
            ) from error
        self._remove_dead()

    def _remove_dead(self) -> None:
        with suppress(OSError):
            for name in os.listdir(self.path.parent):
                namespace, _, process = name.partition("-")
                pid, _, started = process.partition("-")
                directory = self.path.parent / name
                if not namespace.isdecimal() or not pid.isdecimal():
                    continue
                if namespace == _namespace():
                    if _has_ended(int(pid), started):
                        shutil.rmtree(directory, ignore_errors=True)
                else:
                    with suppress(OSError), _abandoned(directory):
                        logger.info("%s: removed, left by a job that was killed in another PID namespace", directory)
                        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _abandoned(directory: Path) -> Iterator[None]:
    """Keep the lock of a job's directory in another PID namespace. Raises OSError unless its reaper has ended."""
    require_own(directory, below=directory.parents[1])
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        boot = machine().partition("/")[0]
        if os.pread(lock, 200, 0).decode(errors="replace").partition("/")[0] != boot:
            raise PermissionError(errno.EPERM, "was not made on this boot of the machine", os.fspath(directory))
        yield
    finally:
        os.close(lock)


def _has_ended(pid: int, started: str) -> bool:
    """Return whether a process has ended. The start of one that had ended before it was asked for is empty."""
    return start_of(pid) != started or (started == "" and not is_hidden(pid))


def require_own(directory: Path, *, below: Path, with_files: bool = False) -> None:
    """Raise OSError unless this user alone may enter every directory from ``below``, without it, to ``directory``.

    ``with_files``: the last of them has to contain only files that this user alone may read. Each directory is opened
    from within the one above it, and no link is followed. Raises FileNotFoundError where there is none.
    """
    name = ""
    fd = os.open(below, _DIRECTORY)
    try:
        for name in directory.relative_to(below).parts:
            fd, above = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd), fd
            os.close(above)
            _require_private(os.fstat(fd))
        for name in os.listdir(fd) if with_files else ():
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise NotADirectoryError
            _require_private(found)
    except (PermissionError, NotADirectoryError) as error:
        raise PermissionError(
            errno.EPERM, f"is not what this user alone may read and write ({name})", os.fspath(directory)
        ) from error
    except OSError as error:
        error.filename = os.fspath(directory)
        if error.errno == errno.ELOOP:
            raise PermissionError(errno.EPERM, f"a link leads there ({name})", os.fspath(directory)) from error
        raise
    finally:
        os.close(fd)


def _require_private(found: os.stat_result) -> None:
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError


def _namespace() -> str:
    """The PID namespace: in another one, process ids mean other processes."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _unlike(pid: int, own: Mapping[str, str]) -> int:
    """Return the nearest of a process and its ancestors that was not started with this worker's variables."""
    wanted = {name: own.get(name) for name in _OF_A_WORKER}
    while wanted["LOCAL_RANK"] is not None and pid > 1:
        found = _environment(pid)
        if any(found.get(name) != value for name, value in wanted.items()):
            break
        pid = _parent(pid)
    return pid


def _environment(pid: int) -> dict[str, str]:
    """Return the variables a process was started with; none where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The directories of one engine's run in a node's shared memory."""

    path: Path

    @staticmethod
    def of(place: Path, directory: FilePath, trained_params: str) -> RunPlace:
        """Return the place of the run which saves to ``directory`` and trains these parameters (``params_digest``)."""
        named = os.fsencode(f"{directory}\n{trained_params}")
        return RunPlace(place / hashlib.sha256(named).hexdigest()[:16])

    @property
    def complete(self) -> Path:
        """The directory that a load is given."""
        return self.path / _COMPLETE

    def writing(self, attempt: str) -> Path:
        """The directory in which the ranks of one start of the job fill files."""
        return self.path / _WRITING / attempt

    def create(self) -> None:
        """Make the directories. Raises OSError."""
        for directory in (self.path, self.complete, self.path / _WRITING):
            directory.mkdir(mode=0o700, exist_ok=True)

    def require_own(self, tag: str) -> None:
        """Raise CheckpointError where another user could have put a tag there; nothing where there is none."""
        with suppress(FileNotFoundError):
            try:
                require_own(self.complete / tag, below=self.path.parents[2], with_files=True)
            except PermissionError as error:
                raise CheckpointError(
                    f"{error.filename}: {error.strerror}, so that it is not read. Remove it.", remedy=""
                ) from None

    def tags(self) -> list[str]:
        """The complete tags of this node, except those that another user could have put there."""
        try:
            found = [name for name in os.listdir(self.complete) if _TAG.fullmatch(name)]
        except OSError:
            return []
        names: list[str] = []
        for name in found:
            try:
                self.require_own(name)
                names.append(name)
            except CheckpointError as error:
                logger.warning("%s", error)
        return names

    def others(self) -> Iterator[RunPlace]:
        """The places of other engines of the job: they train other parameters, or save elsewhere."""
        with suppress(OSError):
            names = (name for name in os.listdir(self.path.parent) if name != self.path.name)
            yield from (RunPlace(self.path.parent / name) for name in names)

    def remove_tags(self, *, but: str | None = None) -> None:
        """Remove all other complete tags, by a rename first, so that none is ever seen in part."""
        for tag in {*self.tags()} - {but}:
            gone = self.path / _WRITING / f"removed-{tag}"
            with suppress(OSError):
                os.rename(self.complete / tag, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def remove_writing(self, *, but: str) -> None:
        """Remove files that earlier starts of the job were filling; complete tags keep their links to them."""
        with suppress(OSError):
            for directory, is_old in ((self.path / _WRITING, but.__ne__), (self.complete, is_unfinished)):
                for name in filter(is_old, os.listdir(directory)):
                    shutil.rmtree(directory / name, ignore_errors=True)
