"""Generations: the checkpoints that a node's shared memory holds, the newest complete one and the one being made.

    <place>/<run>/complete/<tag>/   a checkpoint as a node-local disk would have it: files of ranks, commit record, note
    <place>/<run>/writing/...       files that the ranks are filling; complete tags have hard links to them

``<run>`` stands for the directory in which the engine saves to disk and for the parameters that it trains, so that the
engines of a job stay apart. A tag is in ``complete`` by one rename, when all its files are on this node; it can be
resumed from when that is so on all nodes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from zeroelastic.elastic.memory.place import require_own
from zeroelastic.errors import CheckpointError, UnreadableError
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes

logger = logging.getLogger(__name__)

NOTE_NAME = "zeroelastic_memory.json"
"""Beside the commit record: what a resume from memory has to know in addition."""

_TAG = re.compile(r"step(\d+)-([0-9a-f]{32})")
_COMPLETE, _WRITING = "complete", "writing"


class MemoryNote(BaseModel):
    """What one generation is; the same text on all nodes.

    ``parent`` is the save on the disk, by its id, that the run continued from or committed last, and ``begun`` the one
    that it had begun last: the state is newer than that, too, if it was committed later. ``files`` are the files
    of each rank that are on other nodes too, with their sizes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    save_id: str
    committed_at: float
    parent: str | None
    begun: str | None = None
    world_size: int
    content_root: str
    files: tuple[dict[str, int], ...]


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The directories of one engine's run in a node's shared memory."""

    path: Path

    @staticmethod
    def of(place: Path, directory: FilePath, trained_params: str) -> RunPlace:
        """That of the run which saves to ``directory`` and trains these parameters (``params_digest``)."""
        named = os.fsencode(f"{directory}\n{trained_params}")
        return RunPlace(place / hashlib.sha256(named).hexdigest()[:16])

    @property
    def complete(self) -> Path:
        """The directory that a load is given."""
        return self.path / _COMPLETE

    def writing(self, attempt: str) -> Path:
        """Where the ranks of one start of the job fill files."""
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
        """The complete tags of this node, newest step first, but for those that another user could have put there."""
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
        return sorted(names, key=lambda name: int(name.split("-")[0].removeprefix("step")), reverse=True)

    def files(self, tag: str) -> dict[str, int]:
        """The files of a tag, by name, with their sizes; none where it has gone."""
        try:
            return dict(file_sizes(self.complete / tag))
        except (UnreadableError, ValueError):
            return {}

    def note(self, tag: str) -> MemoryNote | None:
        """The note of a tag; None where it is missing or damaged."""
        try:
            return MemoryNote.model_validate_json((self.complete / tag / NOTE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def publish(self, staging: Path, tag: str) -> None:
        """Make a directory the tag, whose files this user alone may read then. Raises OSError."""
        for entry in os.scandir(staging):
            os.chmod(entry.path, 0o600)
        os.rename(staging, self.complete / tag)

    def remove_tags(self, *, but: Iterable[str] = ()) -> None:
        """Remove all other complete tags."""
        for tag in set(self.tags()) - set(but):
            self.remove_tag(tag)

    def remove_tag(self, tag: str) -> None:
        """Remove a complete tag, if it is there, by a rename first, so that it is never seen in part."""
        gone = self.path / _WRITING / f"removed-{tag}"
        with suppress(OSError):
            os.rename(self.complete / tag, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def remove_writing(self, *, but: str) -> None:
        """Remove what earlier starts of the job were filling; complete tags keep their links to it."""
        with suppress(OSError):
            for name in os.listdir(self.path / _WRITING):
                if name != but:
                    shutil.rmtree(self.path / _WRITING / name, ignore_errors=True)


def tag_of(step: int, save_id: str) -> str:
    """The name of a generation."""
    return f"step{step}-{save_id}"


def save_id_of(tag: str) -> str:
    """The id of the save that a generation is."""
    found = _TAG.fullmatch(tag)
    assert found is not None
    return found[2]


def lacking(note: MemoryNote, seen: Mapping[str, int]) -> list[int]:
    """The saved ranks of whose files some are on no node."""
    return [rank for rank, files in enumerate(note.files) if not files.items() <= seen.items()]
