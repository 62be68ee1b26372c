"""``zeroelastic.ls`` and ``zeroelastic.latest``: the tags of a run, and the newest one that verifies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.inventory import Inventory, is_stage_0
from zeroelastic.checkpoint.optimizer_file import zero_option
from zeroelastic.checkpoint.tag_files import TagListing, list_tag
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, UsageError, printable, with_remedy
from zeroelastic.io.paths import FilePath, absolute, as_path, local_directory
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.names import LATEST, named_latest
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tags import Tag, committed_after, in_folders, tags_to_try
from zeroelastic.runs.verdicts import Check, Verdict, check_quickly, check_tag, find_newest
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.verbs.interface import IN_A_STORE, Part, Progress, Report, no_progress
from zeroelastic.verbs.verify.findings import VerifyReport
from zeroelastic.verbs.verify.verify import verify_checkpoint

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
            status, why = "incomplete", f"{RECORD_NAME} is missing. An elastic save writes it last."
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


class PassedOver(Part):
    """A newer checkpoint that does not verify."""

    tag: str
    step: int | None
    problems: tuple[str, ...]
    undecided: bool = Field(default=False, exclude=True)
    may_be_newest: bool = Field(default=False, exclude=True)


class LatestFile(Part):
    """What the file ``latest`` names, whether that is the newest, and whether it was written."""

    names: str | None
    is_newest: bool
    fixed: bool
    problem: str | None = Field(default=None, exclude=True)  # with the file
    changes: bool = Field(default=False, exclude=True)  # it was, or would be, written


class LatestReport(Report):
    """The newest checkpoint that verifies; ``verified`` is how tags were checked.

    ``newer`` are tags that were committed after the one that ``latest`` names. The attribute ``tag`` is the checkpoint
    (``name``, ``path``, ``tag_dir``, ``step``), or None; the document has its name.
    """

    directory: str
    tag_name: str | None = Field(alias="tag")
    path: str | None
    folder: str | None
    step: int | None
    saved_at: float | None
    verified: Literal["full", "quick"]
    num_tags: int
    passed_over: tuple[PassedOver, ...]
    newer: tuple[str, ...]
    latest: LatestFile
    _tag: Tag | None = PrivateAttr()

    @property
    def tag(self) -> Tag | None:
        """The newest checkpoint that verifies, or None."""
        return self._tag


@with_remedy()
def latest(
    directory: str | os.PathLike[str],
    *,
    quick: bool = False,
    fix: bool = False,
    set_to: str | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> LatestReport:
    """Find the newest checkpoint of a run that verifies.

    That is the tag which the file ``latest`` names, or the newest committed one where that does not verify. Every byte
    is read, with ``quick`` only sizes and the commit record, or headers. ``fix`` lets ``latest`` name the tag that was
    found, ``set_to`` another tag; with ``dry_run`` nothing is written.

    Raises UsageError where there are no checkpoints, CheckpointError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.latest("ckpt", quick=True)
        print(report.tag.name, report.tag.step)
    """
    if fix and set_to is not None:
        raise UsageError("--fix and --set: give only one of the two.")
    if dry_run and not fix and set_to is None:
        raise UsageError("--dry-run: goes with --fix or --set; without them nothing is written.")
    check: Check = _check_quickly if quick or set_to is not None else lambda tag_dir: _check_fully(tag_dir, progress)
    store, tags = _tags_of(directory, "--fix" if fix else None if set_to is None else "--set")
    named, problem = (None, None) if in_folders(tags) else named_latest(store.root)
    passed: tuple[Verdict, ...] = ()
    if set_to is not None:
        found: Tag | None = _require(store, tags, set_to, check)
    else:
        params = next((tag.trained_params for tag in tags if tag.name == named), None)
        found, passed = find_newest(tags_to_try(tags, named, params), check)
    changes = found is not None and (set_to is not None or (fix and found.name != named))
    if found is not None and changes:
        _refuse_unreadable(passed)
        if not dry_run:
            if fix and named_latest(store.root) != (named, problem):  # a save has written it meanwhile
                return latest(directory, quick=quick, fix=True, progress=progress)
            _point(store, tags, found, fix=fix)
    newer = () if found is None else committed_after(tags, found)
    report = LatestReport(
        ok=found is not None,
        directory=absolute(str(store.root)),
        tag=None if found is None else found.name,
        path=None if found is None else absolute(str(found.tag_dir)),
        folder=None if found is None else absolute(str(found.path)),
        step=None if found is None else found.step,
        saved_at=None if found is None else found.saved_at,
        verified="quick" if quick or set_to is not None else "full",
        num_tags=len(tags),
        passed_over=tuple(map(_passed_over, passed)),
        newer=tuple(tag.name for tag in newer if all(tag is not verdict.tag for verdict in passed)),
        latest=LatestFile(
            names=named,
            is_newest=found is not None and named == found.name,
            fixed=changes and not dry_run,
            problem=problem,
            changes=changes,
        ),
    )
    report._tag = found
    return report


def _tags_of(directory: str | os.PathLike[str], changing: str | None) -> tuple[RunStore, Sequence[Tag]]:
    """The tags of a run; ``changing`` is the option that writes its ``latest``, if any. Raises UsageError."""
    store = RunStore(as_path(directory) if changing is None else local_directory(directory, IN_A_STORE))
    tags = store.require_tags()
    if changing is not None and in_folders(tags):
        raise UsageError(
            f"{store.root}: its checkpoints are in folders, each with its own latest; {changing} is for tags. Give one "
            "of the folders."
        )
    return store, tags


def _passed_over(verdict: Verdict) -> PassedOver:
    return PassedOver(
        tag=verdict.tag.name,
        step=verdict.tag.step,
        problems=verdict.problems,
        undecided=verdict.undecided,
        may_be_newest=verdict.may_be_newest,
    )


def _require(store: RunStore, tags: Sequence[Tag], name: str, check: Check) -> Tag:
    """The tag of this name, which ``latest`` is to name. Raises an error unless it is there and whole."""
    tag = next((tag for tag in tags if tag.name == name), None)
    if tag is None:
        there = ", ".join(tag.name for tag in tags[:8])
        raise UsageError(f"{store.root}: has no tag {name}. There are, newest first: {there}.")
    verdict = check_tag(tag, check)
    if verdict is not None:
        kind = UnreadableError if verdict.undecided else CheckpointError
        raise kind(f"{tag.tag_dir}: {verdict.problems[0]} {LATEST} was not changed.")
    return tag


def _point(store: RunStore, tags: Sequence[Tag], found: Tag, *, fix: bool) -> None:
    """Let ``latest`` name a tag; with ``fix`` one that a save has committed meanwhile, which may have written it."""
    store.point(found.name)
    later = [tag for tag in store.tags() if tag not in tags] if fix else []
    if later:
        store.point(later[0].name)


def _refuse_unreadable(passed: Sequence[Verdict]) -> None:
    for verdict in passed:
        if verdict.may_be_newest:
            raise UnreadableError(
                f"{verdict.tag.tag_dir}: {verdict.problems[0].rstrip('.')}. It may be whole, and is newer than every "
                f"tag that verifies: {LATEST} was not changed. Run it again where this tag can be read, or name a "
                "tag with --set.",
                remedy="",
            )


def _check_quickly(tag_dir: FilePath) -> tuple[str, ...]:
    try:
        return check_quickly(tag_dir)
    except UnsupportedError:  # names and sizes can be checked all the same
        return _problems(verify_checkpoint(tag_dir, quick=True))


def _check_fully(tag_dir: FilePath, progress: Progress) -> tuple[str, ...]:
    with progress(f"verifying {printable(tag_dir.name)}", sum(file_sizes(tag_dir).values())) as advance:
        return _problems(verify_checkpoint(tag_dir, progress=advance))


def _problems(report: VerifyReport) -> tuple[str, ...]:
    return tuple(
        problem.sentence if problem.file in problem.sentence else f"{problem.file}: {problem.sentence}"
        for problem in report.problems
    )
