"""Which tag of a run is whole: tags are checked one at a time, newest first, until one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.one_save import saved_again, was_saved_again
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.checkpoint.tag_files import is_rank_file, is_universal
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    NewerFormatError,
    OldFormatError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    some,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, list_directory
from zeroelastic.runs.names import LATEST, LATEST_UNIVERSAL, look_for_tags
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.runs.tags import Tag


@dataclass(frozen=True, slots=True)
class Verdict:
    """A tag that is not whole, and why; ``undecided``: it may be whole, and cannot be checked now.

    ``may_be_newest``: it is undecided and of a kind that a run can resume, so no older tag may take its place.
    """

    tag: Tag
    problems: tuple[str, ...]
    undecided: bool = False
    may_be_newest: bool = False


Check = Callable[[FilePath], tuple[str, ...]]
"""Returns the problems of a tag directory; a CheckpointError or UnsupportedError that it raises is a problem, too."""


def refuse_fresh_start(root: FilePath) -> None:
    """Raise CheckpointError where a directory without a resumable checkpoint has any file of a checkpoint in it."""
    try:
        sign = _sign_of_checkpoint(root)
        signs = [sign] if sign else look_for_tags(root, lambda name: _sign_of_checkpoint(root / name))
    except MissingFileError:
        return
    if signs:
        raise CheckpointError(
            f"{root}: {LATEST} names no checkpoint, and none that is committed trains the parameters of this engine, "
            f"but {signs[0]}. A run that begins anew beside it would look like one that goes on. Load a checkpoint by "
            "its tag, give another directory for the new run, or begin anew here all the same: "
            "resume(..., fresh=True).",
            remedy="",
        )


def _sign_of_checkpoint(directory: FilePath) -> str | None:
    """A file in a directory that belongs to a DeepSpeed checkpoint of any stage, whole or not, as a clause."""
    try:
        files, inside = list_directory(directory)
    except UnreadableError as error:
        return str(error).rstrip(".")
    signs = [name for name in files if name in (LATEST, LATEST_UNIVERSAL, RECORD_NAME) or is_rank_file(name)]
    if not signs and "zero" in inside and is_universal(directory):
        signs = ["zero"]
    return f"there is {directory / signs[0]}" if signs else None


def find_newest(tags: Iterable[Tag], check: Check) -> tuple[Tag | None, tuple[Verdict, ...]]:
    """The first whole tag, and the tags before it, which are not whole. Later tags are not checked."""
    passed: list[Verdict] = []
    for tag in tags:
        verdict = check_tag(tag, check)
        if verdict is None:
            return tag, tuple(passed)
        passed.append(verdict)
    return None, tuple(passed)


def check_tag(tag: Tag, check: Check) -> Verdict | None:
    """None for a whole tag, else its problems. Raises SavedAgainError for one that is saved again during the check."""
    if tag.unfinished is not None:
        return Verdict(tag, (tag.unfinished,))
    tag_dir, problems, undecided, may_be_newest = open_tag(tag.tag_dir), tuple[str, ...](), False, False
    try:
        problems = check(tag_dir)
    except (UnsupportedError, CheckpointError, UnreadableError) as error:
        undecided = isinstance(error, (UnsupportedError, UnreadableError, NewerFormatError))
        may_be_newest = undecided and not isinstance(error, UnsupportedError)
        # the caller names the tag directory
        problems = (str(error).removeprefix(f"{tag.tag_dir}: ").removeprefix(f"{tag.tag_dir}/"),)
    if not problems:
        return None
    if was_saved_again(tag_dir):
        raise saved_again(tag_dir)
    if not undecided and is_universal(tag_dir):
        return Verdict(tag, ("is a Universal checkpoint (ds_to_universal).",), undecided=True)
    return Verdict(tag, problems, undecided, may_be_newest)


def is_damage(error: CheckpointError | UnreadableError) -> bool:
    """Whether an error means that files are damaged, rather than that they cannot be read now or by this version.

    Not damage: an unreachable server, a format newer than this zeroelastic, torch's old format, a class that an
    allow-list refuses.
    """
    return not isinstance(error, (UnreadableError, UnsafePickleError, OldFormatError, NewerFormatError))


def check_quickly(tag_dir: FilePath) -> tuple[str, ...]:
    """A check that reads no payload; it raises the problem and returns none.

    With a commit record: every rank's files exist with the recorded sizes; no header is opened. Without one: every
    rank's headers can be read and belong to one save, as far as they are read here: a checkpoint that only DeepSpeed
    loads may be whole, too. Raises CheckpointError, and UnsupportedError where not even its files are known.
    """
    checkpoint = open_checkpoint(tag_dir)
    if not checkpoint.inventory.is_recorded:
        model = checkpoint.model_states(0)
        for rank in range(checkpoint.world_size):
            with suppress(UnsupportedError):
                checkpoint.require_committed(checkpoint.shard(rank))
        with suppress(UnsupportedError):
            open_state(checkpoint, resizable=False)
        missing = sorted({*model.expert_files} - {*file_sizes(checkpoint.tag_dir)} if model.expert_files else ())
        if missing:
            raise MissingFileError(f"{tag_dir}: files of experts are missing: {some(missing)}.")
    return ()
