"""Where a save is made until it is complete: a hidden directory beside its tag, which one rename puts in place.

So a tag is there whole, its commit record included, or not at all; and one that is saved again is the old one, whole,
until it is the new one, whole. ``renameat2`` with RENAME_EXCHANGE (Linux 3.15: ext4, XFS, Btrfs, tmpfs, overlayfs)
swaps the two directories. Where a file system cannot (NFS), the old one is moved aside first, and a crash between
these two renames is mended by the next load or save of the tag: see ``recover``.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from zeroelastic.checkpoint import is_rank_file
from zeroelastic.errors import CheckpointError, UnreadableError, ZeroElasticError
from zeroelastic.one_save import pin, was_saved_again
from zeroelastic.owner import OWNER_NAME, is_of_another, note_owner
from zeroelastic.quarantine import MARK_NAME
from zeroelastic.record import RECORD_NAME, read_record, sync_directory
from zeroelastic.storage import FilePath

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOOKS = 5
"""How often a tag is read that is saved again meanwhile, before that is given up."""

_MADE, _ASIDE = "tmp", "old"
_NAME = re.compile(r"\.(.+)\.([0-9a-f]{32})\.(tmp|old)", re.DOTALL)
_LONGEST = 200  # of 255 bytes that a name may have
_DIGITS = 16
_HERE = -100  # linux/fcntl.h: AT_FDCWD
_EXCHANGE = 2  # linux/fs.h: RENAME_EXCHANGE
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_BETWEEN_RENAMES_S = 0.5
"""How long a tag that a living save moved aside can be away; after that, the save has died."""

_libc = ctypes.CDLL(None, use_errno=True)


def making_of(tag_dir: Path, save_id: str) -> Path:
    """The hidden directory in which this save of a tag is made."""
    return _beside(tag_dir, save_id, _MADE)


def _beside(tag_dir: Path, save_id: str, suffix: str) -> Path:
    place = Path(os.path.realpath(tag_dir))
    return place.parent / f".{_stem(place)}.{save_id}.{suffix}"


def _stem(place: Path) -> str:
    """The tag's name as its hidden directories have it; one that is cut ends in a digest of the whole name."""
    name = os.fsencode(place.name)
    if len(name) <= _LONGEST:
        return place.name
    head = name[: _LONGEST - _DIGITS].decode(errors="ignore").encode()
    return head.ljust(_LONGEST - _DIGITS, b"~").decode() + hashlib.sha256(name).hexdigest()[:_DIGITS]


def _belongs(hidden: Path, place: Path) -> bool:
    """Whether a hidden directory is of a save of this tag. Saves of before cut names without a digest."""
    match = _NAME.fullmatch(hidden.name)
    if match is None:
        return False
    name = os.fsencode(place.name)
    cut = len(name) > _LONGEST and os.fsencode(match[1]) == name[:_LONGEST]
    return match[1] == _stem(place) or (cut and _recorded_name(hidden) == place.name)


def _recorded_name(hidden: Path) -> str | None:
    """The name of the tag by the commit record of a save that was complete."""
    try:
        record = read_record(hidden)
    except (CheckpointError, UnreadableError):
        return None
    return None if record is None else record.tag.rpartition("/")[2]


def is_unfinished(name: str) -> bool:
    """Whether a directory has the name of a save that is being made, or was when its run died."""
    return _NAME.fullmatch(name) is not None


def replaces_nothing(left: Path) -> bool:
    """Whether a hidden directory is all there is of its tag: moved aside by a replacement that was cut short."""
    match = _NAME.fullmatch(left.name)
    if match is None or (match[3] != _ASIDE and not (left.with_suffix(f".{_ASIDE}")).exists()):
        return False
    place = _place_of(left)
    return place is None or not os.path.lexists(place) or _is_empty(place)


def _place_of(hidden: Path) -> Path | None:
    """The tag that a hidden directory belongs to, there or not; None where its name is cut and none that is there."""
    match = _NAME.fullmatch(hidden.name)
    assert match is not None
    if len(os.fsencode(match[1])) < _LONGEST:
        return hidden.parent / match[1]
    recorded = _recorded_name(hidden)
    names = (recorded,) if recorded is not None else os.listdir(hidden.parent)
    return next((hidden.parent / name for name in names if _belongs(hidden, hidden.parent / name)), None)


def unfinished(tag_dir: Path) -> tuple[Path, ...]:
    """The hidden directories that saves of this tag have left beside it, or are making."""
    place = Path(os.path.realpath(tag_dir))
    try:
        names = sorted(os.listdir(place.parent))
    except FileNotFoundError:
        return ()
    return tuple(place.parent / name for name in names if _belongs(place.parent / name, place))


def begin(tag_dir: Path, save_id: str) -> Path:
    """An empty directory to make a save of this tag in; what dead saves of it have left is removed. Raises OSError."""
    if os.path.exists(tag_dir) and not os.path.isdir(tag_dir):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(tag_dir))
    recover(tag_dir)
    for left in unfinished(tag_dir):
        if is_of_another(left):
            logger.warning("%s: another process is saving the same tag", left)
        else:
            logger.info("%s: removed, left by a save that did not finish", left)
            shutil.rmtree(left)
    making = making_of(tag_dir, save_id)
    making.parent.mkdir(parents=True, exist_ok=True)
    making.mkdir()
    note_owner(making)
    with suppress(FileNotFoundError):
        shutil.copymode(tag_dir, making)
    return making


def carry_over(tag_dir: Path, making: Path) -> None:
    """Give the new directory, by hard link, what lies in the old one and is no file of a save. Raises OSError."""
    try:
        entries = list(os.scandir(tag_dir))
    except FileNotFoundError:
        return
    for entry in entries:
        target = making / entry.name
        if (
            is_rank_file(entry.name)
            or entry.name in (RECORD_NAME, MARK_NAME, OWNER_NAME)
            or _is_leftover(entry.name)
            or os.path.lexists(target)
        ):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, target, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, os.fspath(target))


def _is_leftover(name: str) -> bool:
    return name.startswith((f".{RECORD_NAME}.", f".{MARK_NAME}."))


def _link(src: str, dst: str) -> None:
    try:
        os.link(src, dst, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(src, dst, follow_symlinks=False)


def put_in_place(making: Path, tag_dir: Path) -> None:
    """Make a complete directory the tag, and remove what it replaces. Raises OSError; then the tag is what it was.

    Everything in it is durable already, and so is the tag on return.
    """
    place = Path(os.path.realpath(tag_dir))
    (making / OWNER_NAME).unlink(missing_ok=True)
    try:
        os.rename(making, place)  # nothing is there, or an empty directory
        replaced = None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        replaced = making if _exchange(making, place) else _move_aside(making, place)
    sync_directory(place.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def open_tag(tag_dir: FilePath) -> FilePath:
    """A tag directory, pinned for a load: also one that a save is replacing by two renames at this moment.

    As it is where there is no such directory.
    """
    if isinstance(tag_dir, Path):
        _wait_between_renames(tag_dir)
    return pin(tag_dir)


def read_tag(tag_dir: FilePath, read: Callable[[FilePath], T]) -> T:
    """What ``read`` returns of a tag directory, pinned; once more where it fails because the tag was saved again."""
    for _ in range(MAX_LOOKS - 1):
        opened = open_tag(tag_dir)
        try:
            return read(opened)
        except ZeroElasticError:
            if not was_saved_again(opened):
                raise
    return read(open_tag(tag_dir))


def _wait_between_renames(tag_dir: Path) -> None:
    """Return when the tag is there, or nobody is putting it there."""
    end = time.monotonic() + _BETWEEN_RENAMES_S
    with suppress(OSError):  # what cannot be listed is said when it is read
        while not os.path.lexists(tag_dir) and time.monotonic() < end:
            if not any(left.suffix == f".{_ASIDE}" for left in unfinished(tag_dir)):
                return
            time.sleep(0.005)


def wait_for_replacements(root: Path, names: Iterable[str]) -> bool:
    """Whether a listing has tags that were moved aside, so that their names may be missing from it.

    On return they are there, or their saves have died.
    """
    aside = [root / name for name in names if is_unfinished(name) and name.endswith(f".{_ASIDE}")]
    end = time.monotonic() + _BETWEEN_RENAMES_S
    while any(map(replaces_nothing, aside)) and time.monotonic() < end:
        time.sleep(0.005)
    return bool(aside)


def _exchange(making: Path, place: Path) -> bool:
    """Swap two directories at once; False where the file system cannot."""
    if not hasattr(_libc, "renameat2"):
        return False
    if _libc.renameat2(_HERE, os.fsencode(making), _HERE, os.fsencode(place), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(place))


def _move_aside(making: Path, place: Path) -> Path:
    """Two renames for one: what ``recover`` finds between them is a complete directory and no tag."""
    aside = making.with_suffix(f".{_ASIDE}")
    os.rename(place, aside)
    try:
        os.rename(making, place)
    except OSError as error:
        if not (isinstance(error, FileNotFoundError) and os.path.lexists(place)):  # else a load did it: see recover
            os.rename(aside, place)
            raise
    return aside


def recover_all(directory: Path) -> None:
    """``recover`` every tag of a directory. Raises OSError."""
    for name in os.listdir(directory):
        place = _place_of(directory / name) if name.endswith(f".{_ASIDE}") and is_unfinished(name) else None
        if place is not None:
            recover(place)


def recover(tag_dir: Path) -> bool:
    """Finish a replacement that was killed between its two renames; whether there was one. Raises OSError.

    The new directory was complete and durable when the old one was moved aside, so it is what is put in place.
    """
    place = Path(os.path.realpath(tag_dir))
    _wait_between_renames(place)
    if os.path.lexists(place) and not _is_empty(place):
        return False
    left = unfinished(tag_dir)
    for aside in left:
        if aside.suffix == f".{_ASIDE}":
            made = aside.with_suffix(f".{_MADE}")
            chosen = made if (made / RECORD_NAME).is_file() else aside
            os.rename(chosen, place)
            sync_directory(place.parent)
            logger.warning("%s: a replacement of this tag was cut short; it is finished now", place)
            return True
    return False


def _is_empty(directory: Path) -> bool:
    try:
        return not os.listdir(directory)
    except NotADirectoryError:
        return False
