"""``zeroelastic.ls``: all checkpoints of a run, newest first, with what saved each and whether it can be resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from zeroelastic.checkpoint.checker import is_stage_0
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.marks import read_mark
from zeroelastic.checkpoint.shared_files import SharedFile, check_shared_files
from zeroelastic.checkpoint.tag_files import TagListing, list_tag
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, with_remedy
from zeroelastic.io.paths import FilePath, as_path, local_directory
from zeroelastic.io.storage import file_size
from zeroelastic.runs.candidates import list_run
from zeroelastic.runs.names import named_latest
from zeroelastic.runs.order import Tag, runs_of
from zeroelastic.runs.shared_folder import name_from, open_shared
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.verbs.options import IN_A_STORE
from zeroelastic.verbs.report import Part, Report

Status = Literal["committed", "no record", "incomplete", "quarantined", "universal", "unreadable"]
"""``no record``: all files are there, and nothing to verify them with, as DeepSpeed saves. ``incomplete``: files are
missing. ``quarantined``: a load found it damaged."""

SizeOf = Callable[[FilePath], int | None]
"""The size of a file, None where there is none."""


class TagInfo(Part):
    """A checkpoint of the run; a field is None where it is not known. ``saved_at`` is in seconds since 1970.

    ``path`` is its tag directory, ``folder`` the ``checkpoint-N`` around it, or the same. ``run`` numbers the runs that
    save to the directory, from 1, in the order of their newest checkpoints. ``bytes`` are those of its own files,
    ``shared_bytes`` those of the shared files that it takes frozen weights from.
    """

    tag: str
    path: str
    folder: str
    step: int | None
    world_size: int | None
    stage: int | None
    bytes: int
    shared_bytes: int
    saved_at: float | None
    status: Status
    why: str | None
    latest: bool
    run: int | None


class SharedInfo(Part):
    """A file of frozen weights that tags share, by its name from the directory, or its path; and the tags."""

    name: str
    bytes: int
    tags: tuple[str, ...]


class ListReport(Report):
    """The checkpoints of a directory, newest first; ``latest`` is the tag that the file ``latest`` names.

    ``bytes`` is what the checkpoints and the shared files of the run take, and ``saved_bytes`` what the checkpoints
    would take more if each had its frozen weights itself.
    """

    directory: str
    latest: str | None
    tags: tuple[TagInfo, ...]
    shared: tuple[SharedInfo, ...]
    bytes: int
    saved_bytes: int


@with_remedy()
def ls(directory: str | os.PathLike[str]) -> ListReport:
    """List the checkpoints of a run, newest first: step, ranks, ZeRO stage, size, time, and whether they are committed.

    Reads names, sizes, the first lines of each commit record, and one header of a tag where that alone tells; shared
    files are those that commit records state, and those in the run's folder. Raises UsageError where there are none,
    UnreadableError.

    Example::

        import zeroelastic
        print([(tag.tag, tag.step, tag.status) for tag in zeroelastic.ls("ckpt").tags])
    """
    root = Path(os.path.abspath(local_directory(directory, IN_A_STORE)))
    run = list_run(root)
    latest = None if run.in_folders else named_latest(root)[0]
    numbers = {tag.name: number for number, tags in enumerate(runs_of(run.tags), 1) for tag in tags}
    size_of = cache(file_size)
    described = [_describe(tag, latest, numbers.get(tag.name), size_of) for tag in run.tags]
    tags, shared = tuple(info for info, _ in described), _shared(root, described, size_of)
    return ListReport(
        ok=True,
        directory=str(root),
        latest=latest,
        tags=tags,
        shared=tuple(file.info for file in shared),
        bytes=sum(tag.bytes for tag in tags) + sum(file.info.bytes for file in shared if file.of_run),
        saved_bytes=sum(file.saved_bytes for file in shared),
    )


class _Shared(NamedTuple):
    """A shared file, and what more the tags that refer to it would take with a copy each."""

    info: SharedInfo
    of_run: bool
    saved_bytes: int


def _shared(root: Path, described: Sequence[tuple[TagInfo, tuple[SharedFile, ...]]], size_of: SizeOf) -> list[_Shared]:
    """The files that tags refer to, and those in the folder of the run to which none does."""
    folder = open_shared(Path(os.path.realpath(root)))
    own = {file.path for file in folder.files()}
    tags: dict[FilePath, list[str]] = {path: [] for path in own}
    nbytes: dict[FilePath, int] = {}
    for info, files in described:
        for file in files:
            path = file.at(as_path(info.path))
            own |= {path} if file.is_of_run else set()
            nbytes[path] = file.nbytes
            tags.setdefault(path, []).append(info.tag)
    found: list[_Shared] = []
    for path, names in sorted(tags.items(), key=lambda item: str(item[0])):
        copies = len(names) - 1 if path in own and names else len(names)
        size = None
        with suppress(UnreadableError):  # the tags that refer to it are unreadable, too
            size = size_of(path)
        shown = SharedInfo(name=name_from(path, folder.root), bytes=size or 0, tags=tuple(names))
        found.append(_Shared(shown, path in own, copies * nbytes.get(path, 0)))
    return found


def _describe(tag: Tag, latest: str | None, run: int | None, size_of: SizeOf) -> tuple[TagInfo, tuple[SharedFile, ...]]:
    """A tag, and the shared files that it refers to; ``size_of`` gives the size of a file."""
    status: Status
    world_size, stage, nbytes, why = None, None, 0, tag.unfinished
    shared: tuple[SharedFile, ...] = ()
    try:
        listing = list_tag(tag.tag_dir)
        nbytes = sum(listing.sizes.values())
        record = read_record(listing.directory)
        world_size = listing.num_ranks if record is None else record.world_size
        stage, shared = _stage(listing), () if record is None else record.shared
        mark = read_mark(tag.tag_dir)
        if mark is not None:
            status, why = "quarantined", mark.sentence
        elif listing.kind == "universal":
            status, stage = "universal", None
        elif tag.unfinished is not None or (listing.missing(world_size)[0] and not is_stage_0(listing)):
            status = "incomplete"
        else:
            status = "no record" if record is None else "committed"
            try:
                check_shared_files(
                    [file for file in shared if size_of(file.at(tag.tag_dir)) != file.nbytes], tag.tag_dir
                )
            except CheckpointError as error:
                status, why = "incomplete", str(error)
    except (CheckpointError, UnsupportedError, UnreadableError) as error:
        status, why = "unreadable", str(error)
    info = TagInfo(
        tag=tag.name,
        path=str(tag.tag_dir),
        folder=str(tag.path),
        step=tag.step,
        world_size=world_size,
        stage=stage,
        bytes=nbytes,
        shared_bytes=sum(file.nbytes for file in shared),
        saved_at=tag.saved_at or None,
        status=status,
        why=why,
        latest=tag.name == latest,
        run=run,
    )
    return info, shared


def _stage(listing: TagListing) -> int | None:
    """The ZeRO stage: by the names of files at stage 3; 1 and 2 differ in the header of an optimizer file alone."""
    if listing.kind != "zero-1-2":
        return 3
    if not listing.optim:
        return 0
    root = read_torch_file(listing.directory / listing.optim[min(listing.optim)]).root
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    stage = state.get("zero_stage", 1) if isinstance(state, dict) else None
    return stage if type(stage) is int else None
