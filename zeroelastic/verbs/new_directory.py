"""A directory that appears complete or not at all: written under a hidden name in the same parent, then renamed.

The hidden directory of a run that was killed is taken over by the next one with the same manifest, and is emptied by
one with another. A lock keeps two runs apart; it goes with the process that holds it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroelastic.checkpoint.tag_files import is_temporary
from zeroelastic.errors import UsageError
from zeroelastic.io.atomic import (
    name_in_errors,
    rename_new,
    reserve_space,
    shortened,
    sync_directory,
    sync_path,
    write_atomically,
)
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.runs.names import PARTIAL
from zeroelastic.runs.tag_directory import note_owner, remove_note

logger = logging.getLogger(__name__)

_LOCK, _MANIFEST = "lock", "manifest.json"
_FLUSHING_THREADS = 8
_LONGEST = 255 - 1 - len(PARTIAL)


def check_free(dst: Path, *sources: FilePath) -> None:
    """Raise UsageError when ``dst`` cannot be made: it is there, lies inside a source, or its parent is not there."""
    if os.path.lexists(dst):
        raise UsageError(f"{dst}: already exists; refusing to overwrite it. Remove it or give another name.")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent}: no such directory. Make it first.")
    for source in filter(None, map(local_path, sources)):
        if dst.parent.resolve().joinpath(dst.name).is_relative_to(source.resolve()):
            raise UsageError(f"{dst}: lies inside the source {source}, which must not change. Give a name outside it.")


def reserve_file(path: Path, nbytes: int) -> None:
    """Make a file of this size, its space set aside where the file system can: a full disk is noticed before work.

    Raises OSError naming it.
    """
    with name_in_errors(path), open(path, "xb", buffering=0) as file:
        os.truncate(file.fileno(), nbytes)
        reserve_space(file.fileno(), nbytes)


def flush_tree(directory: Path) -> None:
    """fsync all files in a directory, then the directories, the innermost first."""
    tree = list(os.walk(directory, topdown=False))
    with ThreadPoolExecutor(_FLUSHING_THREADS) as pool:
        files = (Path(folder, name) for folder, _, names in tree for name in names)
        for _ in pool.map(sync_path, files):
            pass
    for folder, _, _ in tree:
        sync_directory(Path(folder))


def staging_of(dst: Path) -> Path:
    """The hidden directory in which ``dst`` is made."""
    return dst.parent / f".{shortened(dst.name, _LONGEST)}{PARTIAL}"


def staged_bytes(dst: Path) -> int:
    """Return how many bytes of the disk an earlier run has left of ``dst``."""
    sizes = []
    for file in staging_of(dst).rglob("*"):
        with suppress(OSError):
            sizes.append(file.stat().st_blocks * 512)
    return sum(sizes)


def sweep(parent: Path) -> None:
    """Remove the hidden directories of targets that are there: left by a kill between the renaming and the removal.

    One whose lock is held, or cannot be asked for, stays.
    """
    left = list(parent.glob(f".?*{PARTIAL}"))
    of_targets = {staging_of(parent / name).name for name in os.listdir(parent)} if left else set()
    for staging in left:
        if staging.name in of_targets and staging.is_dir() and not staging.is_symlink():
            with suppress(OSError):
                lock = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(staging)
                finally:
                    os.close(lock)


@contextmanager
def new_directory(target: Path, *, manifest: Mapping[str, object] | None = None) -> Iterator[tuple[Path, str]]:
    """A directory to fill, which becomes ``target`` when the block ends well, and an identity of the run.

    Everything in it is flushed to its device before it gets its name. A block that fails leaves nothing. With a
    ``manifest``, a process that is ended leaves what it has done to the next run with an equal one, which has the same
    identity. Raises UsageError as ``check_free`` and when another process is at it, OSError.
    """
    target = Path(os.path.abspath(target))
    staging = staging_of(target)
    directory = staging / "root"
    held: list[int] = []

    try:
        check_free(target)
        held.append(_lock(staging, target))
        identity = _take(staging, {"run": secrets.token_hex(8)} if manifest is None else manifest)
        directory.mkdir(exist_ok=True)
        yield directory, identity
        flush_tree(directory)
        try:
            renamed = rename_new(directory, target)
        except FileExistsError:
            renamed = False
        if not renamed:  # also where the file system cannot rename without replacing
            check_free(target)
            os.rename(directory, target)
        sync_directory(target.parent)
        shutil.rmtree(staging, ignore_errors=True)
    except BaseException as error:
        if held and (manifest is None or isinstance(error, (Exception, KeyboardInterrupt))):
            shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = _as_target(Path(os.fsdecode(error.filename)), staging, target)
        raise
    finally:
        for lock in held:
            os.close(lock)


def _as_target(path: Path, staging: Path, target: Path) -> str:
    """A path inside the hidden directory as it is going to be inside the target, for messages."""
    if path.is_relative_to(staging / "root"):
        return os.fspath(target / path.relative_to(staging / "root"))
    return os.fspath(target if path.is_relative_to(staging) else path)


def _lock(staging: Path, target: Path) -> int:
    """The descriptor that locks a hidden directory, which is made where it is not there. Raises UsageError, OSError."""
    staging.mkdir(exist_ok=True)
    try:
        lock = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        with suppress(OSError):  # there is something in it
            staging.rmdir()
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"{target}: another process is writing it. Wait for it, or end it.") from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): see to it that only one command writes it", target, error.strerror)
    return lock


def _take(staging: Path, manifest: Mapping[str, object]) -> str:
    """The identity of the run: that of an earlier one with an equal manifest, or a new one, in an empty directory."""
    identity = ""
    with suppress(OSError, ValueError, AttributeError, KeyError):
        saved = json.loads((staging / _MANIFEST).read_text())
        found = saved.pop("identity")
        if saved == json.loads(json.dumps(manifest)):
            identity = str(found)
    if identity:
        for folder, _, names in os.walk(staging):
            for name in filter(is_temporary, names):  # of a write in which the earlier run was killed
                Path(folder, name).unlink()
    else:
        for name in os.listdir(staging):
            if name != _LOCK:
                path = staging / name
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        identity = uuid.uuid4().hex
        write_atomically(staging / _MANIFEST, json.dumps({**manifest, "identity": identity}).encode())
    remove_note(staging)
    note_owner(staging)
    return identity
