"""What saves that did not finish have left in an object store: open uploads, objects without a record, marks.

Kept is everything that a running save may still need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.unfinished import UNFINISHED_NAME, Unfinished, read_unfinished
from zeroelastic.errors import MissingFileError
from zeroelastic.io.objects import OpenUpload, StoredObject, abort_upload, objects_below, open_uploads, remove_objects
from zeroelastic.io.paths import RemotePath, relative_name

logger = logging.getLogger(__name__)

MIN_AGE_S = 3600.0
"""A save whose process cannot be seen counts as dead when it began longer ago than this."""


@dataclass(frozen=True, slots=True)
class StoreLeftover:
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

    @property
    def nbytes(self) -> int:
        """Bytes of its objects; the store does not say how many bytes open uploads hold."""
        return sum(found.nbytes for found in self.objects)

    def why_kept(self, min_age_s: float = MIN_AGE_S) -> str | None:
        """The reason to keep it, None where what made it is dead."""
        life = "unknown" if self.mark is None else self.mark.life
        if life == "lives" and self.mark is not None and not self.mark.is_own:
            return "its save is on its way: the process that makes it is running"
        if life == "unknown" and time.time() - self.began_at < min_age_s:
            return f"a save may be on its way: it changed within the last {min_age_s / 60:.0f} minutes"
        return None


def leftover_of(
    tag_dir: RemotePath, uploads: Sequence[OpenUpload], objects: Iterable[StoredObject] | None = None
) -> StoreLeftover | None:
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
    return StoreLeftover(tag_dir, mark, here, tuple(uploads))


def remove_leftover(found: StoreLeftover) -> None:
    """Abort its uploads, then remove its objects, the mark last. Raises OSError."""
    for upload in found.uploads:
        abort_upload(upload)
    names = sorted((one.name for one in found.objects), key=lambda name: name == UNFINISHED_NAME)
    for some in (names[:-1], names[-1:]):
        remove_objects(found.tag_dir / name for name in some)


def remove_dead_saves(run: RemotePath) -> None:
    """Remove what dead saves of a run have left, as far as their open uploads show it. Raises OSError, UnreadableError.

    One request where nothing is open. A mark without open uploads is found by ``prune``, or by a save of its tag.
    """
    by_tag: dict[str, list[OpenUpload]] = {}
    for upload in open_uploads(run):
        by_tag.setdefault(relative_name(upload.path.parent, run), []).append(upload)
    for name, uploads in sorted(by_tag.items()):
        found = leftover_of(run / name, uploads)
        if found is None or found.why_kept() is not None:
            continue
        remove_leftover(found)
        logger.warning("%s: removed what a save that did not finish has left", found.tag_dir)
