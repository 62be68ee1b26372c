"""The ops that torch compiles when DeepSpeed first uses them, and locks of builds that were killed.

torch keeps each op in a folder, and a build there holds the file ``lock``. A build that is killed leaves the file, and
every later one waits for it forever (``FileBaton`` in ``torch.utils.file_baton``, up to torch 2.13).
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from importlib import util
from pathlib import Path


def compiled_ops() -> list[str]:
    """Return the names of the ops that are compiled."""
    return [folder.name for folder in _folders() if (folder / f"{folder.name}.so").exists()]


def left_locks() -> dict[Path, str]:
    """Return the locks that no process of this machine has open, each with a sentence that says how to remove it.

    A process of another machine may have one open, or of another user: the sentence says so.
    """
    torch = util.find_spec("torch")
    source = Path((torch and torch.origin) or "").parent / "utils/cpp_extension.py"
    if not source.is_file() or "FileBaton" not in source.read_text():  # torch from 2.14 on leaves the file unlocked
        return {}
    locks = {lock: taken for folder in _folders() if (taken := _taken(lock := folder / "lock"))}
    held = _open_files() if locks else frozenset()
    return {
        lock: f"{lock}: was left by a build that was killed, and builds there wait forever. If no other machine or "
        f"user builds there, remove it: rm {shlex.quote(str(lock))}"
        for lock, taken in locks.items()
        if os.path.realpath(lock) not in held and _taken(lock) == taken  # else it was released meanwhile
    }


def _taken(lock: Path) -> tuple[int, int] | None:
    """Return what tells this lock from a later one of the same path; None if there is no lock."""
    try:
        found = lock.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _folders() -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache)
    return sorted(path for path in (*root.glob("*"), *root.glob("*/*")) if path.is_dir())


def _open_files() -> frozenset[str]:
    """Return the paths that processes have open."""
    found: set[str] = set()
    for links in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # of another user, or ended meanwhile
            for link in os.scandir(links):
                with suppress(OSError):
                    found.add(os.readlink(link.path))
    return frozenset(found)
