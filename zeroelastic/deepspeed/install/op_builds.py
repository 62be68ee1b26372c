"""Builds of DeepSpeed's ops: compiled before a job needs them, and the locks that killed builds left.

torch up to 2.13 makes a file called ``lock`` in the folder of an extension, and other builds wait until it is gone:
forever where the process that made it was killed. ``zeroelastic.run`` warns of such locks before the ranks of a node
start, and ``zeroelastic doctor --fix`` removes those whose process has certainly ended. torch 2.14.1 leaves the file
after every build and locks it during one (``torch.utils._filelock``): no file is in the way then.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from zeroelastic.errors import UnsupportedError, UsageError

LOCK_NAME = "lock"

_QUIET_S = 1800.0
"""A lock that no visible process has open counts as left only after this long without changes beside it."""
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "gluster", "panfs", "weka")

State = Literal["held", "left", "unknown"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock file. ``held``: a process here has it open. ``left``: its process has ended.

    ``unknown``: no process here has it open, but one of another machine, container or user may, because the file
    system is shared or something was written beside the lock within half an hour.
    """

    path: str
    age_s: float
    state: State

    @property
    def problem(self) -> str:
        """What it does to builds, and what to do about it; empty for a lock that is held."""
        if self.state == "held":
            return ""
        remove = f"rm {shlex.quote(self.path)}"
        if self.state == "left":
            why, remedy = "was left by a process that has ended", f"Remove it: zeroelastic doctor --fix, or {remove}"
        else:
            why, remedy = "is open in no process here", f"If nothing builds there, remove it: {remove}"
        return f"the build lock {self.path}, {self.age_s:.0f} s old, {why}: builds there wait forever. {remedy}"


def find_locks(root: Path | None = None) -> tuple[BuildLock, ...]:
    """The locks in a directory of extensions, by default in the one that torch uses: none where none is in the way."""
    if not waits_for_lock_files():
        return ()
    root = _extensions_dir() if root is None else root
    found = sorted((*root.glob(f"*/{LOCK_NAME}"), *root.glob(f"*/*/{LOCK_NAME}")))
    return tuple(lock for path in found if (lock := _look_at(path)) is not None)


def waits_for_lock_files() -> bool:
    """Whether the installed torch waits until a lock file is gone, by its source: importing torch takes a second."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        with suppress(OSError):
            return "FileBaton" in Path(folder, "utils", "cpp_extension.py").read_text()
    return True


def remove_left_locks() -> tuple[BuildLock, ...]:
    """Remove the locks whose process has ended; returns them. Raises OSError."""
    left = tuple(lock for lock in find_locks() if lock.state == "left")
    for lock in left:
        Path(lock.path).unlink(missing_ok=True)
    return left


def build_ops(names: Sequence[str]) -> None:
    """Compile and load ops by the names that ``ds_report`` lists; at once where they are in torch's cache.

    Of several processes on a machine one compiles each op, and the others wait for it. Raises UsageError for a name
    that this DeepSpeed lacks, UnsupportedError for an op that this machine cannot build. Source:
    ``deepspeed.ops.op_builder.all_ops.ALL_OPS`` (DeepSpeed 0.19.8)::

        build_ops(["cpu_adam"])
    """
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    unknown = [name for name in names if name not in ALL_OPS]
    if unknown:
        raise UsageError(f"DeepSpeed has no op {', '.join(unknown)} here. Choose among {', '.join(sorted(ALL_OPS))}.")
    for name in dict.fromkeys(names):
        builder = ALL_OPS[name]
        if not builder.is_compatible(verbose=False):
            raise UnsupportedError(f"the op {name} cannot be built on this machine; `ds_report` says what it lacks.")
        builder.load()
        logger.info("DeepSpeed's op %s is built", name)


def _look_at(path: Path) -> BuildLock | None:
    """One lock, or None where it is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    state: State = "unknown"
    if _is_open(status):
        state = "held"
    elif time.time() - max(status.st_mtime, _last_change(path)) > _QUIET_S and not _is_shared(path):
        state = "left"
    return BuildLock(str(path), time.time() - status.st_mtime, state)


def _last_change(path: Path) -> float:
    """The time of the last write in the folder of a lock, in seconds since 1970."""
    with suppress(OSError):
        return max(entry.stat().st_mtime for entry in os.scandir(path.parent))
    return time.time()


def _is_open(status: os.stat_result) -> bool:
    """Whether a visible process of this machine has the file open: torch keeps it open during a build."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(link.stat(), status):
                        return True
    return False


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
