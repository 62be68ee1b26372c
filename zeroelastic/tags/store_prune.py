"""``prune`` in an object store: what to remove, and the removal, object by object.

A store has no rename. So a tag that is removed is marked first (``checkpoint.unfinished``), then its commit record
goes, then everything else, and the mark last: a removal that is cut short leaves no checkpoint, and the next one
finishes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.unfinished import UNFINISHED_NAME, new_mark
from zeroelastic.errors import MissingFileError, UsageError
from zeroelastic.io.objects import OpenUpload, StoredObject, objects_below, open_uploads, put_object, remove_objects
from zeroelastic.io.paths import RemotePath, relative_name
from zeroelastic.tags.candidates import Check, check_quickly, list_run
from zeroelastic.tags.commit_order import Tag
from zeroelastic.tags.prune import (
    CHANGED,
    MIN_AGE_S,
    Decision,
    PrunePlan,
    Tree,
    Unfinished,
    busy,
    decide,
    refuse_to_keep_none,
    why_kept_after_all,
)
from zeroelastic.tags.store_leftovers import StoreLeftover, leftover_of, remove_leftover


def plan_store_prune(
    root: RemotePath,
    *,
    keep: int,
    invalid: bool = False,
    min_age_s: float = MIN_AGE_S,
    check: Check = check_quickly,
    of: str | None = None,
) -> PrunePlan:
    """``plan_prune`` for a URL: one listing of all objects, and one of open uploads. Raises UsageError."""
    refuse_to_keep_none(keep)
    try:
        objects = objects_below(root)
    except MissingFileError:
        objects = []
    uploads = open_uploads(root)
    leftovers = list(_leftovers(root, objects, uploads))
    unfinished = tuple(_decided(found, root, min_age_s) for found in leftovers)
    # A tag without a record whose save did not finish is no tag.
    parts = {str(found.tag_dir) for found in leftovers if any(one.name != UNFINISHED_NAME for one in found.objects)}
    try:
        run = list_run(root)
    except UsageError:
        if unfinished:
            return PrunePlan(root, (), (), unfinished)
        raise
    run = replace(run, tags=tuple(tag for tag in run.tags if str(tag.tag_dir) not in parts))

    def look(tag: Tag, valid: bool) -> tuple[Tree, str]:
        assert isinstance(tag.path, RemotePath)
        tree = _tree(_within(objects, relative_name(tag.path, root)))
        if not tree.mark:
            raise FileNotFoundError(str(tag.path))
        recorded = any(name.rpartition("/")[2].partition("@")[0] == RECORD_NAME for name, *_ in tree.mark)
        return tree, busy(tree, min_age_s, committed=valid and recorded)

    return PrunePlan(root, tuple(decide(root, run, keep, invalid, check, ({}, {}), look, of)), (), unfinished)


def remove_stored_tag(plan: PrunePlan, decision: Decision) -> str | None:
    """Remove one tag; the reason where it changed since the decision and is kept, else None. Raises OSError."""
    path, root = decision.tag.path, plan.root
    assert isinstance(path, RemotePath) and isinstance(root, RemotePath) and path.path != root.path
    assert decision.remove and decision.tree is not None
    if (kept := why_kept_after_all(plan, decision)) is not None:
        return kept
    try:
        here = objects_below(path)
    except MissingFileError:
        return CHANGED
    if _tree(here).mark != decision.tree.mark:
        return CHANGED
    tag_dir = decision.tag.tag_dir
    assert isinstance(tag_dir, RemotePath)
    put_object(tag_dir / UNFINISHED_NAME, new_mark("removal").text)
    remove_objects([tag_dir / RECORD_NAME])
    remove_objects(path / one.name for one in here)
    remove_objects([tag_dir / UNFINISHED_NAME])
    return None


def remove_stored_leftover(plan: PrunePlan, found: Unfinished) -> str | None:
    """Remove what a dead save has left; returns as ``remove_stored_tag`` does. Raises OSError, UnreadableError."""
    tag_dir = plan.root / found.name
    assert isinstance(tag_dir, RemotePath)
    left = leftover_of(tag_dir, open_uploads(tag_dir))
    if left is None:
        return None  # a save has removed it
    if _tree(left.objects).mark != found.tree.mark:
        return CHANGED
    remove_leftover(left)
    return None


def _leftovers(
    root: RemotePath, objects: Iterable[StoredObject], uploads: Iterable[OpenUpload]
) -> Iterator[StoreLeftover]:
    by_tag: dict[str, list[OpenUpload]] = {}
    for upload in uploads:
        by_tag.setdefault(relative_name(upload.path.parent, root), []).append(upload)
    here = list(objects)
    for one in here:
        folder, _, name = one.name.rpartition("/")
        if name == UNFINISHED_NAME and folder:
            by_tag.setdefault(folder, [])
    for name, open_here in sorted(by_tag.items()):
        found = leftover_of(root / name, open_here, _within(here, name))
        if found is not None:
            yield found


def _decided(found: StoreLeftover, root: RemotePath, min_age_s: float) -> Unfinished:
    kept = found.why_kept(min_age_s)
    count = len(found.uploads)
    uploads = f" ({count} {'upload' if count == 1 else 'uploads'} not completed)" if count else ""
    reason = kept or f"of a save that did not finish{uploads}"
    return Unfinished(relative_name(found.tag_dir, root), _tree(found.objects), kept is None, reason)


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
    )
