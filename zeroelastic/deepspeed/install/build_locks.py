"""The locks under which torch builds extensions such as DeepSpeed's ops: their owners, and locks of killed processes.

torch makes a file called ``lock`` in the folder of the extension, and other builds wait until it is gone: forever where
the process that made it was killed. While zeroelastic is installed, a lock has the identity of its process from the
moment it is there, and one whose process has ended is removed. A lock without an identity is removed only where no
process on this machine has it open, nothing was built beside it for half an hour, and the folder is not on a network
file system that other machines share; otherwise a warning that says what to do is repeated.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zeroelastic.deepspeed.patching import Method, wrap
from zeroelastic.distributed.process_identity import identity, life_of

LOCK_NAME = "lock"

_QUIET_S = 1800.0
"""A lock without an identity is removed only after this long without changes beside it."""
_WARN_S = 60.0
_TICK_S = 0.5
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "gluster", "panfs", "weka")

State = Literal["held", "left", "unknown"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock file. ``left``: its process has ended. ``unknown``: that cannot be seen from this machine."""

    path: str
    age_s: float
    state: State


def find_locks(root: Path | None = None) -> tuple[BuildLock, ...]:
    """The locks in a directory of extensions; by default, in the one that torch uses."""
    root = _extensions_dir() if root is None else root
    found = sorted((*root.glob(f"*/{LOCK_NAME}"), *root.glob(f"*/*/{LOCK_NAME}")))
    return tuple(lock for path in found if (lock := look_at(path)) is not None)


def look_at(path: Path) -> BuildLock | None:
    """One lock, or None where it is gone."""
    try:
        name, status = path.read_text(errors="replace"), path.stat()
    except FileNotFoundError:
        return None
    life = life_of(name)
    state: State = "held" if life == "lives" else "left" if life == "ended" else "unknown"
    quiet_s = time.time() - _last_change(path)
    if not name:
        if _is_open(status):
            state = "held"
        elif quiet_s > _QUIET_S and not _is_shared(path):
            state = "left"
    return BuildLock(str(path), time.time() - status.st_mtime, state)


def watch_locks() -> None:
    """Let this process sign its locks and remove those of ended processes, until ``unwrap_all``."""
    from torch.utils.file_baton import FileBaton

    wrap(FileBaton, "try_acquire", _try_acquire)


def _try_acquire(original: Method) -> Method:
    """Like torch's, but returns False only when the lock is gone, so that torch does not wait for it."""

    def try_acquire(self: Any) -> bool:
        path = Path(self.lock_file_path)
        warned = time.monotonic()
        while not _make(self, original):
            lock, owner = look_at(path), "unknown"
            while lock is not None:
                owner = lock.state
                if owner == "left":
                    _remove(path)
                elif owner == "unknown" and time.monotonic() - warned >= _WARN_S:
                    warned = time.monotonic()
                    logger.warning(
                        "%s: waiting for this build lock, which is %.0f s old; whether its process lives cannot be "
                        "seen from here. If nothing builds there, remove it: rm %s",
                        path,
                        lock.age_s,
                        path,
                    )
                time.sleep(_TICK_S)
                lock = look_at(path)
            if owner == "held":
                return False  # built by another process
        return True

    return try_acquire


def _make(baton: Any, original: Method) -> bool:
    """Make the lock, with the identity of this process in it before others see it; False where there is one."""
    path = Path(baton.lock_file_path)
    try:
        baton.fd = _make_signed(path)
    except FileExistsError:
        return False
    except OSError:  # not on this file system: signed a moment later, in which a kill leaves a lock without an identity
        if not original(baton):
            return False
        with suppress(OSError):  # a lock works without an identity, too
            path.write_text(identity(os.getpid()))
    return True


def _make_signed(path: Path) -> int:
    """A file without a name that has the identity of this process, and gets its name when it is complete; open."""
    made = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY)
    try:
        os.write(made, identity(os.getpid()).encode())
        os.link(f"/proc/self/fd/{made}", path, src_dir_fd=made)  # the number is ignored, but has links followed
    except BaseException:
        os.close(made)
        raise
    return made


def _remove(path: Path) -> None:
    """Remove a left lock, unless another process has just removed it and made its own."""
    try:
        with open(path.with_name(f"{LOCK_NAME}.removed"), "w") as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            lock = look_at(path)
            if lock is not None and lock.state == "left":
                path.unlink()
                logger.warning(
                    "%s: this build lock, %.0f s old, was left by a process that has ended; it is removed, and the "
                    "build begins again",
                    path,
                    lock.age_s,
                )
    except OSError as error:
        logger.warning("%s: this build lock was left by a process that has ended. Remove it: %s", path, error)
        time.sleep(_WARN_S)


def _last_change(path: Path) -> float:
    """The time of the last write in the folder of a lock, in seconds since 1970."""
    with suppress(OSError):
        return max(entry.stat().st_mtime for entry in os.scandir(path.parent))
    return time.time()


def _is_open(status: os.stat_result) -> bool:
    """Whether a visible process of this machine has the file open: torch keeps it open during a build."""
    wanted = (status.st_dev, status.st_ino)
    return any((found.st_dev, found.st_ino) == wanted for found in _open_files())


def _open_files() -> Iterator[os.stat_result]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                for link in (process / "fd").iterdir():
                    with suppress(OSError):
                        yield link.stat()


def _is_shared(path: Path) -> bool:
    """Whether the file may be on a network file system."""
    where, kind = Path("/"), ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            mount, found = line.split()[1:3]
            if Path(mount) in path.resolve().parents and len(Path(mount).parts) >= len(where.parts):
                where, kind = Path(mount), found
    return kind == "" or kind.startswith(_NETWORK)


def _extensions_dir() -> Path:
    """Where torch builds: as ``torch.utils.cpp_extension.get_default_build_root``, without torch."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return Path(named) if named else cache / "torch_extensions"
