"""The directory of a run in an object store, which has no rename.

A tag that is saved or removed is marked first (``checkpoint.marks``). Of a removal, its commit record goes next,
then everything else, and the mark last: a removal that is cut short leaves no checkpoint, and the next one finishes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.marks import UNFINISHED_NAME, Unfinished, new_mark, read_unfinished
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.errors import MissingFileError, UnreadableError
from zeroelastic.io.objects import (
    OpenUpload,
    StoredObject,
    abort_upload,
    modified_at,
    objects_below,
    open_uploads,
    put_object,
    remove_objects,
)
from zeroelastic.io.paths import FilePath, RemotePath, relative_name
from zeroelastic.runs.names import LATEST
from zeroelastic.runs.order import Tag
from zeroelastic.runs.run_store import CHANGED, MIN_AGE_S, Leftover, RunStore, Tree, why_alive

logger = logging.getLogger(__name__)

_ATTEMPTS, _SECOND = 4, 1.1


class ObjectRun(RunStore):
    """A directory in an object store: one listing of all objects, and one of open uploads."""

    root: RemotePath

    def __init__(self, root: RemotePath) -> None:
        self.root = root

    def written_at(self) -> float:
        return modified_at(self.root / LATEST)

    def committed_at(self, tag: Tag) -> float:
        return modified_at(_remote(tag.tag_dir) / RECORD_NAME)

    def write_latest(self, name: str, modified_at: float) -> None:
        put_object(self.root / LATEST, name.encode())

    def roll_back(self, name: str, tags: Sequence[Tag], at: int) -> None:
        """Raises UnreadableError where the store's clock, which may count in seconds, does not show the order."""
        last = max((self.committed_at(tag) for tag in tags[:at]), default=0.0)
        for _ in range(_ATTEMPTS):
            self.write_latest(name, 0.0)
            if self.written_at() > last or not last:
                return
            time.sleep(_SECOND)
        raise UnreadableError(
            f"{self.root / LATEST}: names {name}, but the store does not say that it was written after the last "
            "commit, so that `resume` does not take it for a rollback. Run it again in a minute.",
            remedy="",
        )

    def tree(self, tag: Tag) -> Tree:
        tree = _tree(_within(self.objects, relative_name(tag.path, self.root)))
        if not tree.mark:
            raise FileNotFoundError(str(tag.path))
        return tree

    def leftovers(self, tags: Sequence[Tag], min_age_s: float) -> tuple[Leftover, ...]:
        found: list[Leftover] = []
        for left in self.unfinished:
            kept = self._why_kept(left, min_age_s)
            count = len(left.uploads)
            uploads = f" ({count} {'upload' if count == 1 else 'uploads'} not completed)" if count else ""
            reason = kept or f"of a save that did not finish{uploads}"
            found.append(Leftover(relative_name(left.tag_dir, self.root), _tree(left.objects), kept is None, reason))
        return tuple(found)

    def without_parts(self, tags: Sequence[Tag]) -> tuple[Tag, ...]:
        parts = {str(left.tag_dir) for left in self.unfinished if any(o.name != UNFINISHED_NAME for o in left.objects)}
        return tuple(tag for tag in tags if str(tag.tag_dir) not in parts)

    def remove(self, tag: Tag, tree: Tree) -> str | None:
        path, tag_dir = _remote(tag.path), _remote(tag.tag_dir)
        assert path.path != self.root.path
        try:
            here = objects_below(path)
        except MissingFileError:
            return CHANGED
        if _tree(here).mark != tree.mark:
            return CHANGED
        is_marked = any(one.name.rpartition("/")[2] == UNFINISHED_NAME for one in here)  # by what died
        try:
            put_object(tag_dir / UNFINISHED_NAME, new_mark("removal").text, create=not is_marked)
        except FileExistsError:  # a save of the tag has just begun
            return CHANGED
        remove_objects([tag_dir / RECORD_NAME])
        remove_objects(path / one.name for one in here)
        remove_objects([tag_dir / UNFINISHED_NAME])
        return None

    def remove_leftover(self, found: Leftover) -> str | None:
        tag_dir = self.root / found.name
        left = unfinished_of(tag_dir, open_uploads(tag_dir))
        if left is None:
            return None  # a save has removed it
        if _tree(left.objects).mark != found.tree.mark:
            return CHANGED
        left.remove()
        return None

    def remove_dead_saves(self) -> None:
        """One request where nothing is open. A mark without open uploads is found by ``leftovers``, or a save."""
        for name, uploads in sorted(self._uploads().items()):
            found = unfinished_of(self.root / name, uploads)
            if found is None or self._why_kept(found, MIN_AGE_S) is not None:
                continue
            found.remove()
            logger.warning("%s: removed what a save that did not finish has left", found.tag_dir)

    def _why_kept(self, left: UnfinishedTag, min_age_s: float) -> str | None:
        """The reason to keep what is unfinished; an upload of a shared file has no mark but that of the save's tag."""
        kept = left.why_kept(min_age_s)
        if kept is None and left.tag_dir.name == FROZEN_FOLDER:
            saves = (other.why_kept(min_age_s) for other in self.unfinished if other.mark is not None)
            return next((why for why in saves if why is not None), None)
        return kept

    @cached_property
    def objects(self) -> list[StoredObject]:
        """All objects below the directory."""
        try:
            return objects_below(self.root)
        except MissingFileError:
            return []

    @cached_property
    def unfinished(self) -> list[UnfinishedTag]:
        """What is unfinished of each tag, by the tag's name."""
        by_tag = self._uploads()
        for one in self.objects:
            folder, _, name = one.name.rpartition("/")
            if name == UNFINISHED_NAME and folder:
                by_tag.setdefault(folder, [])
        found = (unfinished_of(self.root / n, up, _within(self.objects, n)) for n, up in sorted(by_tag.items()))
        return [one for one in found if one is not None]

    def _uploads(self) -> dict[str, list[OpenUpload]]:
        """The open uploads by tag."""
        by_tag: dict[str, list[OpenUpload]] = {}
        for upload in open_uploads(self.root):
            by_tag.setdefault(relative_name(upload.path.parent, self.root), []).append(upload)
        return by_tag


@dataclass(frozen=True, slots=True)
class UnfinishedTag:
    """What there is in a tag directory of a save, or removal, that is on its way or did not finish.

    ``objects`` are all objects of the tag where it has no commit record, else the mark alone.
    """

    tag_dir: RemotePath
    mark: Unfinished | None
    objects: tuple[StoredObject, ...]
    uploads: tuple[OpenUpload, ...]

    @property
    def began_at(self) -> float:
        """When the newest part of it began, in seconds since 1970."""
        times = [*(upload.began_at for upload in self.uploads), *(found.modified_at for found in self.objects)]
        return max([0.0 if self.mark is None else self.mark.began_at, *times])

    def why_kept(self, min_age_s: float = MIN_AGE_S) -> str | None:
        """The reason to keep it, None where what made it is dead."""
        if self.mark is not None and self.mark.is_own:
            return None
        return why_alive("unknown" if self.mark is None else self.mark.life, lambda: self.began_at, min_age_s)

    def remove(self) -> None:
        """Abort its uploads, then remove its objects, the mark last. Raises OSError."""
        for upload in self.uploads:
            abort_upload(upload)
        names = sorted((one.name for one in self.objects), key=lambda name: name == UNFINISHED_NAME)
        for some in (names[:-1], names[-1:]):
            remove_objects(self.tag_dir / name for name in some)


def unfinished_of(
    tag_dir: RemotePath, uploads: Sequence[OpenUpload], objects: Iterable[StoredObject] | None = None
) -> UnfinishedTag | None:
    """What is unfinished of one tag, None where nothing is. Raises UnreadableError.

    ``uploads`` are the open ones below it, ``objects`` those of the tag where the caller has listed them.
    """
    if objects is None:
        try:
            objects = objects_below(tag_dir)
        except MissingFileError:
            objects = ()
    here = tuple(objects)
    names = {found.name for found in here}
    mark = read_unfinished(tag_dir) if UNFINISHED_NAME in names else None
    if mark is None and not uploads:
        return None
    if mark is None:
        here = ()
    elif RECORD_NAME in names:
        here = tuple(found for found in here if found.name == UNFINISHED_NAME)
    return UnfinishedTag(tag_dir, mark, here, tuple(uploads))


def _remote(path: FilePath) -> RemotePath:
    assert isinstance(path, RemotePath)
    return path


def _within(objects: Iterable[StoredObject], name: str) -> list[StoredObject]:
    """The objects below a directory, by their names from there."""
    begin = f"{name}/"
    return [replace(one, name=one.name[len(begin) :]) for one in objects if one.name.startswith(begin)]


def _tree(objects: Iterable[StoredObject]) -> Tree:
    found = list(objects)
    return Tree(
        nbytes=sum(one.nbytes for one in found),
        changed_at=max((one.modified_at for one in found), default=0.0),
        temporaries=(),
        one_device=True,
        mark=tuple(sorted((f"{one.name}@{one.version}", 0, one.nbytes, int(one.modified_at)) for one in found)),
        is_committed=any(one.name.rpartition("/")[2] == RECORD_NAME for one in found),
    )
