"""The files of frozen weights that the tags of a run share: which tags refer to them, and the removal of the others.

A file is removed when no tag of the run refers to it, and never while a save may be on its way that counts on it. A
save makes its hidden directory first, then looks for the file and touches it, and at last becomes a tag by a rename. So
a removal (1) looks for hidden directories, tags, and the time of the file; (2) gives the file a hidden name, under
which no save finds it; (3) looks again, for hidden directories first, and gives it its name back if anything may need
it; (4) deletes it. A removal that was killed leaves a hidden name, with which the next one begins at (3), and which
``put_back`` undoes for a save or a load.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.shared_files import SHARED_NAME, SharedFile
from zeroelastic.checkpoint.shared_weights import shared_weights_of
from zeroelastic.checkpoint.tag_files import is_universal, parse_rank_file
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError
from zeroelastic.io.atomic import rename_new, sync_directory
from zeroelastic.io.paths import FilePath, relative_name
from zeroelastic.io.storage import file_names
from zeroelastic.runs.names import TRASH
from zeroelastic.runs.order import Tag
from zeroelastic.runs.run_store import CHANGED, folders_of_run, holds_tag, shared_folders, why_kept
from zeroelastic.runs.tag_directory import is_unfinished, read_tag
from zeroelastic.torch_file.header import read_torch_file

_ASIDE = re.compile(rf"\.({SHARED_NAME.pattern})\.[0-9a-f]{{16}}\.removed")
_PUBLISHING_S = 60.0
"""How long a save may take from the removal of its process's note, which shows that it lives, to its tag."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A shared file of a run: its name, bytes, time of the last change, and what tells versions.

    ``path`` is where it is, under a hidden name where a removal has set it aside.
    """

    name: str
    path: FilePath
    nbytes: int
    changed_at: float
    version: tuple[object, ...]

    @property
    def is_aside(self) -> bool:
        """Whether a removal that was cut short, or is on its way, has given it a hidden name."""
        return self.path.name != self.name


@dataclass(frozen=True, slots=True)
class SharedDecision:
    """Whether to remove a shared file, and the reason."""

    file: StoredFile
    remove: bool
    reason: str


def name_from(path: FilePath, root: FilePath) -> str:
    """The name of a shared file from the directory of a run, or its path where it is elsewhere."""
    return relative_name(path, root) if str(path).startswith(f"{root}/") else str(path)


class SharedFolder(ABC):
    """The folder of a run's shared files, beside its tags or beside its directory."""

    root: FilePath

    @abstractmethod
    def files(self) -> tuple[StoredFile, ...]:
        """The files, sorted by name; none without the folder. Raises UnreadableError."""

    @abstractmethod
    def why_fixed(self, file: StoredFile) -> str | None:
        """The reason why a file is never removed, None for one that may be."""

    @abstractmethod
    def why_saving(self, min_age_s: float) -> str | None:
        """The reason why a save may be on its way anywhere in the run, or None. Raises UnreadableError."""

    @abstractmethod
    def tag_dirs(self) -> list[FilePath]:
        """Every tag of the run, whole or not, removed ones that still exist included. Raises UnreadableError."""

    @abstractmethod
    def remove(self, file: StoredFile, why_needed: Callable[[], str | None]) -> str | None:
        """Remove a file; the reason why it is kept, if ``why_needed`` has one. Raises OSError, UnreadableError."""


def open_shared(root: Path) -> SharedFolder:
    """The shared files of the run in a directory."""
    return _LocalFolder(root)


def shared_files_of(tag_dir: FilePath) -> tuple[SharedFile, ...]:
    """The shared files that a tag refers to, by its commit record, or without one by its model states.

    Raises MissingFileError where there is no such tag, CheckpointError and UnreadableError where that cannot be known.
    """
    return read_tag(tag_dir, _shared_files_of)


def _shared_files_of(tag_dir: FilePath) -> tuple[SharedFile, ...]:
    record = read_record(tag_dir)
    if record is not None:
        return record.shared
    files = {name: file for name in file_names(tag_dir) if (file := parse_rank_file(name)) is not None}
    name = next((name for name in sorted(files) if files[name].kind != "optimizer"), None)
    if name is None:
        if is_universal(tag_dir):
            return ()
        raise CheckpointError(f"{tag_dir}: has neither a commit record nor a model states file.")
    root = read_torch_file(tag_dir / name, foreign="inert", columns=True).root
    if not isinstance(root, dict):
        raise CheckpointError(f"{tag_dir / name}: is not a DeepSpeed model states file.")
    shared = shared_weights_of(root, tag_dir / name)
    return () if shared is None else shared.files


def plan_shared(
    root: Path, *, kept: Iterable[Tag], removed: Collection[FilePath], min_age_s: float
) -> tuple[SharedDecision, ...]:
    """What becomes of each shared file of a run once the tags ``removed`` are gone. Changes nothing.

    ``kept`` are tags to ask first. Raises UnreadableError where the folder cannot be listed.
    """
    folder = open_shared(root)
    first = [tag.tag_dir for tag in kept]
    return tuple(_decide(folder, file, first, removed, min_age_s) for file in folder.files())


def _decide(
    folder: SharedFolder, file: StoredFile, first: Iterable[FilePath], removed: Collection[FilePath], min_age_s: float
) -> SharedDecision:
    """What becomes of one file. The tags ``first`` are known already, so that they cost no search."""
    needed = folder.why_fixed(file) or _why_referred(folder, file, first)
    needed = needed or _why_needed(folder, file, min_age_s, gone=(*removed, folder.root / TRASH))
    if needed is None:
        return SharedDecision(file, True, "no tag refers to it")
    return SharedDecision(file, False, f"its removal was cut short; {needed}" if file.is_aside else needed)


def remove_shared(root: Path, file: StoredFile, min_age_s: float) -> str | None:
    """Remove a shared file that nothing needs; the reason why it is kept, None where it is gone.

    Raises OSError, UnreadableError.
    """
    folder = open_shared(root)
    return folder.remove(file, lambda: _why_needed(folder, file, min_age_s))


def _why_needed(
    folder: SharedFolder, file: StoredFile, min_age_s: float, *, gone: Collection[FilePath] = ()
) -> str | None:
    """The reason why a file may be needed, None where it is not. ``gone`` are tags that do not count."""
    fixed = folder.why_fixed(file)
    if fixed is not None:
        return fixed
    if time.time() - file.changed_at < min_age_s:
        return f"a save may be on its way: it changed within the last {min_age_s / 60:.0f} minutes"
    try:
        saving = folder.why_saving(min_age_s)
        if saving is not None:
            return saving
        for _ in range(2):  # a removal may put back a tag that was saved again, between the two
            tag_dirs = (tag_dir for tag_dir in folder.tag_dirs() if not any(_is_in(tag_dir, each) for each in gone))
            referred = _why_referred(folder, file, tag_dirs)
            if referred is not None:
                return referred
    except UnreadableError as error:
        return f"it cannot be known whether a tag refers to it: {error}"
    return None


def _why_referred(folder: SharedFolder, file: StoredFile, tag_dirs: Iterable[FilePath]) -> str | None:
    """A sentence about the first of the tags that refers to a file, or that may do so."""
    for tag_dir in tag_dirs:
        name = relative_name(tag_dir, folder.root)
        try:
            if any(shared.name == file.name for shared in shared_files_of(tag_dir)):
                return f"{name} refers to it"
        except MissingFileError:  # removed meanwhile
            continue
        except (CheckpointError, UnreadableError) as error:
            return f"{name} may refer to it: {error}"
    return None


def _is_in(path: FilePath, directory: FilePath) -> bool:
    return f"{path}/".startswith(f"{directory}/")


def put_back(folder: FilePath) -> None:
    """Give all files in a folder of shared files the names back that a removal has taken from them. Raises OSError.

    For a save before it looks for shared files. A removal that is on its way keeps them then.
    """
    if isinstance(folder, Path):
        for file in _files_in(folder):
            if file.is_aside:
                _put_back(Path(str(file.path)))


def put_back_missing(files: Iterable[SharedFile], tag_dir: FilePath) -> None:
    """Put back those of a tag's shared files that a removal has set aside, as far as the directory can be written."""
    for file in files:
        path = file.at(tag_dir)
        if file.is_of_run and isinstance(path, Path) and not path.exists():
            with suppress(OSError):
                put_back(path.parent)


def _put_back(aside: Path) -> None:
    match = _ASIDE.fullmatch(aside.name)
    assert match is not None
    place = aside.with_name(match[1])
    try:
        if not rename_new(aside, place):
            os.link(aside, place)
            aside.unlink()
    except FileExistsError:  # a save has made it again, with the same content
        aside.unlink(missing_ok=True)
    except FileNotFoundError:  # another process has put it back, or deleted it
        return
    sync_directory(aside.parent)


class _LocalFolder(SharedFolder):
    """A folder on a disk."""

    root: Path

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self) -> tuple[StoredFile, ...]:
        return tuple(file for folder in shared_folders(self.root) for file in _files_in(folder))

    def why_fixed(self, file: StoredFile) -> str | None:
        path = Path(str(file.path))
        if path.parent.is_symlink():
            return f"{path.parent.name} is a symbolic link, so that other runs may use what is in it"
        return "it is a symbolic link" if path.is_symlink() else None

    def why_saving(self, min_age_s: float) -> str | None:
        for folder, entries in folders_of_run(self.root):
            for entry in entries:
                if is_unfinished(entry.name) and entry.is_dir(follow_symlinks=False):
                    kept = why_kept(folder / entry.name, max(min_age_s, _PUBLISHING_S))
                    if kept is not None:
                        return f"{relative_name(folder / entry.name, self.root)}: {kept}"
        return None

    def tag_dirs(self) -> list[FilePath]:
        places = (self.root, self.root / TRASH)
        return [folder for place in places for folder, entries in folders_of_run(place) if holds_tag(entries)]

    def remove(self, file: StoredFile, why_needed: Callable[[], str | None]) -> str | None:
        aside = Path(str(file.path))
        place = aside.with_name(file.name)
        if not file.is_aside:
            kept = why_needed()
            if kept is not None:
                return kept
            aside = place.with_name(f".{file.name}.{secrets.token_hex(8)}.removed")
            try:
                os.rename(place, aside)
            except FileNotFoundError:
                return None
        try:
            kept = CHANGED if _stored_file(aside, file.name).version != file.version else why_needed()
            if kept is None:
                aside.unlink()
                sync_directory(place.parent)
                return None
        except FileNotFoundError:  # another process has put it back, or deleted it
            return CHANGED if place.exists() else None
        except BaseException:
            _put_back(aside)
            raise
        _put_back(aside)
        return kept


def _files_in(folder: Path) -> list[StoredFile]:
    """The shared files in a folder, sorted by name; none without the folder. Raises UnreadableError."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableError(f"{folder}: cannot be listed: {error.strerror}.") from None
    found: list[StoredFile] = []
    for name in names:
        aside = _ASIDE.fullmatch(name)
        if aside is not None or SHARED_NAME.fullmatch(name):
            with suppress(FileNotFoundError):
                found.append(_stored_file(folder / name, name if aside is None else aside[1]))
    return found


def _stored_file(path: Path, name: str) -> StoredFile:
    """Raises FileNotFoundError, also for a link to nothing."""
    found = os.stat(path)
    version = (found.st_ino, found.st_size, found.st_mtime_ns)
    return StoredFile(name, path, found.st_size, found.st_mtime, version)
