"""``zeroelastic.ls``: all checkpoints of a run, newest first, with what saved each and whether it can be resumed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.inventory import Inventory, is_stage_0
from zeroelastic.checkpoint.optimizer_file import zero_option
from zeroelastic.checkpoint.tag_files import TagListing, list_tag
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, with_remedy
from zeroelastic.io.paths import local_directory
from zeroelastic.runs.names import named_latest
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tags import Tag, in_folders
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.verbs.interface import IN_A_STORE, Part, Report

Status = Literal["committed", "no record", "incomplete", "universal", "unreadable"]
"""``no record``: all files are there, and nothing to verify them with, as DeepSpeed saves. ``incomplete``: files are
missing."""


class TagInfo(Part):
    """A checkpoint of the run; a field is None where it is not known. ``saved_at`` is in seconds since 1970.

    ``path`` is its tag directory, ``folder`` the ``checkpoint-N`` around it, or the same. ``bytes`` are those of its
    files.
    """

    tag: str
    path: str
    folder: str
    step: int | None
    world_size: int | None
    stage: int | None
    bytes: int
    saved_at: float | None
    status: Status
    why: str | None
    latest: bool


class ListReport(Report):
    """The checkpoints of a directory, newest first; ``latest`` is the tag that the file ``latest`` names.

    ``bytes`` is what the checkpoints take.
    """

    directory: str
    latest: str | None
    tags: tuple[TagInfo, ...]
    bytes: int


@with_remedy()
def ls(directory: str | os.PathLike[str]) -> ListReport:
    """List the checkpoints of a run, newest first: step, ranks, ZeRO stage, size, time, and whether they are committed.

    Reads names, sizes, commit records, and one header of a tag where that alone tells. Raises
    UsageError where there are none, UnreadableError.

    Example::

        import zeroelastic
        print([(tag.tag, tag.step, tag.status) for tag in zeroelastic.ls("ckpt").tags])
    """
    root = Path(os.path.abspath(local_directory(directory, IN_A_STORE)))
    found = RunStore(root).require_tags()
    latest = None if in_folders(found) else named_latest(root)[0]
    tags = tuple(_describe(tag, latest) for tag in found)
    return ListReport(
        ok=True,
        directory=str(root),
        latest=latest,
        tags=tags,
        bytes=sum(tag.bytes for tag in tags),
    )


def _describe(tag: Tag, latest: str | None) -> TagInfo:
    status: Status
    world_size, stage, nbytes, why = None, None, 0, tag.unfinished
    try:
        listing = list_tag(tag.tag_dir)
        nbytes = sum(listing.sizes.values())
        saved = Inventory(listing.sizes, listing.sizes, read_record(listing.directory))
        world_size = saved.data_size or listing.num_ranks
        stage = None if listing.is_universal else _stage(listing)
        if listing.is_universal:
            status = "universal"
        elif tag.unfinished is not None or (listing.files.missing(world_size)[0] and not is_stage_0(listing)):
            status = "incomplete"
        elif not saved.is_recorded and stage == 3 and "base_optimizer_state" in _optimizer_state(listing):
            status, why = "incomplete", f"{RECORD_NAME} is missing, which an elastic save writes last."
        else:
            status = "committed" if saved.is_recorded else "no record"
    except (CheckpointError, UnsupportedError, UnreadableError) as error:
        status, why = "unreadable", str(error)
    return TagInfo(
        tag=tag.name,
        path=str(tag.tag_dir),
        folder=str(tag.path),
        step=tag.step,
        world_size=world_size,
        stage=stage,
        bytes=nbytes,
        saved_at=tag.saved_at or None,
        status=status,
        why=why,
        latest=tag.name == latest,
    )


def _stage(listing: TagListing) -> int | None:
    """The ZeRO stage: by the names of files at stage 3; 1 and 2 differ in the header of an optimizer file alone.

    Where optimizer files were removed, it is the configured one.
    """
    if not listing.files.whole_model:
        return 3
    if listing.files.optim:
        stage = _optimizer_state(listing).get("zero_stage", 1)
    elif is_stage_0(listing):
        stage = 0
    else:
        root = read_torch_file(
            listing.directory / listing.files.models[min(listing.files.models)], foreign="inert"
        ).root
        stage = zero_option(root.get("ds_config") if isinstance(root, dict) else None, "stage")
    return stage if type(stage) is int else None


def _optimizer_state(listing: TagListing) -> Mapping[object, object]:
    root = read_torch_file(listing.directory / listing.files.optim[min(listing.files.optim)]).root
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    return state if isinstance(state, dict) else {}
