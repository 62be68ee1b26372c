"""The hidden directory next to a tag in which a save is made, and the rename that publishes it as the tag.

A tag therefore exists complete, with its commit record, or not at all; and when it is saved again, it is the complete
old save until it is the complete new one. ``renameat2`` with RENAME_EXCHANGE (Linux 3.15: ext4, XFS, Btrfs, tmpfs,
overlayfs) swaps the two directories. On a file system that cannot do this (NFS), the old directory is moved aside
first. After a crash between these two renames, the next load or save of the tag finishes the work: see ``recover``.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.tag_files import is_rank_file, one_save, watch
from zeroelastic.distributed.process_identity import Life, identity, life_of
from zeroelastic.errors import CheckpointError, UnreadableError
from zeroelastic.io.atomic import exchange, shortened, sync_directory
from zeroelastic.io.paths import FilePath, local_path

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MADE, _ASIDE, _REMOVED = "tmp", "old", "gone"
_NAME = re.compile(r"\.(.+)\.([0-9a-f]{32})\.(tmp|old|gone)", re.DOTALL)
_LONGEST = 200  # of 255 bytes that a name may have
_BETWEEN_RENAMES_S = 0.5
"""How long a running save keeps a tag moved aside; after that, the save has died."""

_OWNER = ".zeroelastic-owner-"
# The note is the name of an empty file. To remove a file with contents can take as long as the device takes to write
# what is queued before them: a fifth of a second, measured on ext4 beside two gigabytes that nobody flushes.


def staging_dir_of(tag_dir: Path, save_id: str) -> Path:
    """The hidden directory of one save of a tag."""
    return _beside(tag_dir, save_id, _MADE)


def removal_dir_of(path: Path) -> Path:
    """A hidden name for a tag, or for what a save has left, that is being removed."""
    return _beside(path, secrets.token_hex(16), _REMOVED)


def is_removal(path: Path) -> bool:
    """Whether a hidden directory is what a removal is deleting, or was when it was killed."""
    return is_unfinished(path.name) and path.suffix == f".{_REMOVED}"


def _beside(tag_dir: Path, save_id: str, suffix: str) -> Path:
    place = Path(os.path.realpath(tag_dir))
    return place.parent / f".{_stem(place)}.{save_id}.{suffix}"


def _stem(place: Path) -> str:
    """The tag's name, as its hidden directories have it."""
    return shortened(place.name, _LONGEST)


def _belongs(hidden: Path, place: Path) -> bool:
    """Whether a hidden directory is of a save of this tag."""
    match = _NAME.fullmatch(hidden.name)
    return match is not None and match[1] == _stem(place)


def _recorded_name(hidden: Path) -> str | None:
    """The name of the tag in the commit record of a complete save."""
    try:
        record = read_record(hidden)
    except (CheckpointError, UnreadableError):
        return None
    return None if record is None else record.tag.rpartition("/")[2]


def is_unfinished(name: str) -> bool:
    """Whether a name is that of the hidden directory of a save or a removal, running or dead."""
    return _NAME.fullmatch(name) is not None


def replaces_nothing(left: Path) -> bool:
    """Whether only a hidden directory is left of a tag, because a replacement was interrupted."""
    match = _NAME.fullmatch(left.name)
    if match is None or (match[3] != _ASIDE and not (left.with_suffix(f".{_ASIDE}")).exists()):
        return False
    place = _place_of(left)
    return place is None or not os.path.lexists(place) or _is_empty(place)


def _place_of(hidden: Path) -> Path | None:
    """The tag of a hidden directory, whether it exists or not; None where the name is cut and no existing tag fits."""
    match = _NAME.fullmatch(hidden.name)
    assert match is not None
    if len(os.fsencode(match[1])) < _LONGEST:
        return hidden.parent / match[1]
    recorded = _recorded_name(hidden)
    names = (recorded,) if recorded is not None else os.listdir(hidden.parent)
    return next((hidden.parent / name for name in names if _belongs(hidden, hidden.parent / name)), None)


def unfinished(tag_dir: Path) -> tuple[Path, ...]:
    """The hidden directories that saves of this tag have left next to it, or are using now."""
    place = Path(os.path.realpath(tag_dir))
    try:
        names = sorted(os.listdir(place.parent))
    except FileNotFoundError:
        return ()
    return tuple(place.parent / name for name in names if _belongs(place.parent / name, place))


def make_staging_dir(tag_dir: Path, save_id: str) -> Path:
    """Make an empty directory for a save of this tag; leftovers of dead saves are removed. Raises OSError."""
    if os.path.exists(tag_dir) and not os.path.isdir(tag_dir):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(tag_dir))
    recover(tag_dir)
    for left in unfinished(tag_dir):
        if life_of_owner(left) == "lives":
            logger.warning("%s: another save of the same tag is on its way", left)
        else:
            logger.info("%s: removed, left by a save that did not finish", left)
            shutil.rmtree(left)
    staging_dir = staging_dir_of(tag_dir, save_id)
    staging_dir.parent.mkdir(parents=True, exist_ok=True)
    staging_dir.mkdir()
    note_owner(staging_dir)
    with suppress(FileNotFoundError):
        shutil.copymode(tag_dir, staging_dir)
    return staging_dir


def carry_over(tag_dir: Path, staging_dir: Path) -> None:
    """Link the files of the old directory that belong to no save into the new one. Raises OSError."""
    try:
        entries = list(os.scandir(tag_dir))
    except FileNotFoundError:
        return
    for entry in entries:
        target = staging_dir / entry.name
        if (
            is_rank_file(entry.name)
            or entry.name == RECORD_NAME
            or is_note(entry.name)
            or entry.name.startswith(f".{RECORD_NAME}.")  # left by a write
            or os.path.lexists(target)
        ):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, target, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, os.fspath(target))


def _link(src: str, dst: str) -> None:
    try:
        os.link(src, dst, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(src, dst, follow_symlinks=False)


@dataclass(frozen=True, slots=True)
class PublishedTag:
    """A directory that has become a tag. What it has replaced, if anything, is hidden next to it until ``finish``."""

    place: Path
    staging_dir: Path
    replaced: Path | None
    about: os.stat_result

    def finish(self) -> None:
        """Remove the directory that was replaced."""
        if self.replaced is not None:
            shutil.rmtree(self.replaced, ignore_errors=True)

    def take_back(self) -> None:
        """Undo the renames, unless another save has replaced the tag since. Raises OSError."""
        if not os.path.samestat(os.stat(self.place), self.about):
            return
        if self.replaced is not None:
            remove_note(self.replaced)
        if self.replaced == self.staging_dir:
            exchange(self.staging_dir, self.place)
            return
        os.rename(self.place, self.staging_dir)
        if self.replaced is not None:
            os.rename(self.replaced, self.place)


def publish_tag(staging_dir: Path, tag_dir: Path, *, sync: bool = True) -> PublishedTag:
    """Make a complete directory the tag.

    With ``sync`` the contents must be durable, and on return the tag is too. Raises OSError; then the tag is unchanged.
    """
    place = Path(os.path.realpath(tag_dir))
    remove_note(staging_dir)
    about = os.stat(staging_dir)
    try:
        os.rename(staging_dir, place)  # nothing is there, or an empty directory
        replaced = None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        replaced = staging_dir if exchange(staging_dir, place) else _move_aside(staging_dir, place)
    published = PublishedTag(place, staging_dir, replaced, about)
    if replaced is not None:
        with suppress(OSError):
            note_owner(replaced)
    if sync:
        try:
            sync_directory(place.parent)
        except OSError:
            published.take_back()
            raise
    return published


def open_tag(tag_dir: FilePath) -> FilePath:
    """A tag directory, watched for a load, also while a save is replacing it by two renames.

    The path is returned unchanged if there is no such directory.
    """
    here = local_path(tag_dir)
    if here is not None:
        _wait_between_renames(here)
    return watch(tag_dir)


def read_tag(tag_dir: FilePath, read: Callable[[FilePath], T]) -> T:
    """The result of ``read`` for a watched tag directory. Raises SavedAgainError where it was saved again meanwhile."""
    opened = open_tag(tag_dir)
    with one_save(opened):
        return read(opened)


def _wait_between_renames(tag_dir: Path) -> None:
    """Return when the tag exists, or when no save is publishing it."""
    end = time.monotonic() + _BETWEEN_RENAMES_S
    with suppress(OSError):  # the error is raised again when the tag is read
        while not os.path.lexists(tag_dir) and time.monotonic() < end:
            if not any(left.suffix == f".{_ASIDE}" for left in unfinished(tag_dir)):
                return
            time.sleep(0.005)


def wait_for_replacements(root: FilePath, names: Iterable[str]) -> bool:
    """Whether tags were moved aside when a directory was listed, so that their names may be missing from the list.

    On return these tags exist again, or their saves have died.
    """
    here = local_path(root)
    aside = [here / name for name in names if is_unfinished(name) and name.endswith(f".{_ASIDE}")] if here else []
    end = time.monotonic() + _BETWEEN_RENAMES_S
    while any(map(replaces_nothing, aside)) and time.monotonic() < end:
        time.sleep(0.005)
    return bool(aside)


def _move_aside(staging_dir: Path, place: Path) -> Path:
    """Replace a tag by two renames. Between them there is a complete hidden directory and no tag: see ``recover``."""
    aside = staging_dir.with_suffix(f".{_ASIDE}")
    os.rename(place, aside)
    try:
        os.rename(staging_dir, place)
    except OSError as error:
        if not (
            isinstance(error, FileNotFoundError) and os.path.lexists(place)
        ):  # else a load has done it: see recover
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
    """Finish a replacement that was killed between its two renames; returns whether there was one. Raises OSError.

    The new directory was complete and durable when the old one was moved aside, so the new one becomes the tag.
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


def note_owner(directory: Path) -> None:
    """Note this process as the owner of a directory. Raises OSError."""
    (directory / (_OWNER + quote(identity(os.getpid()), safe=""))).touch()


def remove_note(directory: Path) -> None:
    """Remove the note of a directory's owner, if there is one. Raises OSError."""
    for name in _notes(directory):
        (directory / name).unlink(missing_ok=True)


def is_note(name: str) -> bool:
    """Whether a file of this name is the note of an owner."""
    return name.startswith(_OWNER)


def life_of_owner(directory: Path) -> Life:
    """Whether the owner of a directory still runs; unknown where there is no note."""
    notes: list[str] = []
    with suppress(OSError):
        notes = _notes(directory)
    return life_of(unquote(notes[0].removeprefix(_OWNER)) if notes else "")


def _notes(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if is_note(name)]
