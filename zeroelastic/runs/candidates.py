"""The checkpoints of a run, newest first: the step each was saved at, and the newest one that is whole.

The order is that of ``order``; names are used only for damaged tags that have nothing else.
Listing opens one file of each tag; tags are checked one at a time, until a whole one is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.contradictions import not_committed
from zeroelastic.checkpoint.model_states import trained_tables
from zeroelastic.checkpoint.one_save import saved_again, was_saved_again
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.checkpoint.tag_files import is_rank_file, is_universal, model_file_name
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    NewerFormatError,
    OldFormatError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    some,
)
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import file_sizes, folders, list_directory
from zeroelastic.runs import order
from zeroelastic.runs.framework_files import require_own_files
from zeroelastic.runs.names import (
    CHECKPOINT_FOLDER,
    HERE,
    LATEST,
    LATEST_UNIVERSAL,
    directory_of,
    holds_checkpoint,
    is_ours,
    list_tags,
    look_for_tags,
    named_latest,
    normal,
    not_a_directory,
)
from zeroelastic.runs.order import Tag, newest_first
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.torch_file.header import read_torch_file

_THREADS = 16
_MAX_LOOKS = 5
"""How often a listing looks at a tag that is saved again or removed meanwhile."""


@dataclass(frozen=True, slots=True)
class Run:
    """The tags of a directory, newest first; ``in_folders``: each is in a ``checkpoint-N`` folder of its own."""

    root: FilePath
    tags: tuple[Tag, ...]
    in_folders: bool


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A tag that is not whole, and why; ``undecided``: it may be whole, and cannot be checked now.

    ``may_be_newest``: it is undecided and of a kind that a run can resume, so no older tag may take its place.
    """

    tag: Tag
    problems: tuple[str, ...]
    undecided: bool = False
    may_be_newest: bool = False


Check = Callable[[FilePath], tuple[str, ...]]
"""Returns the problems of a tag directory; a CheckpointError or UnsupportedError that it raises is a problem, too."""


def list_run(root: FilePath) -> Run:
    """Every checkpoint in a directory. Opens one file of each. Raises UsageError for a directory without checkpoints.

    Example::

        [tag.name for tag in list_run(Path("ckpt")).tags]    # ["global_step10", "global_step9"]
    """
    try:
        tags = look_for_tags(root, lambda name: _tag_at(root, name))
    except MissingFileError:
        raise UsageError(not_a_directory(root)) from None
    named, _ = named_latest(root)
    if named is not None and all(tag.name != named for tag in tags):  # a link, or deeper than the search for tags goes
        tags += [tag for tag in (_tag_at(root, named),) if tag is not None]
    in_folders = False
    if all(tag.step_from == "name" and CHECKPOINT_FOLDER.fullmatch(tag.name) for tag in tags):  # none of them was read
        names = [name for name in folders(root) if CHECKPOINT_FOLDER.fullmatch(name)]
        with ThreadPoolExecutor(_THREADS) as pool:
            found = [tag for tag in pool.map(lambda name: _tag_in_folder(root, name), names) if tag is not None]
        tags, in_folders = (found, True) if found else (tags, False)
    if not tags:
        if holds_checkpoint(root):
            raise UsageError(f"{root}: is a tag itself; give the directory above.")
        raise UsageError(f"{root}: holds no ZeRO checkpoint. Give the directory above the tags.")
    return Run(root, newest_first(tags), in_folders)


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


def find_newest(tags: Iterable[Tag], check: Check) -> tuple[Tag | None, tuple[PassedOver, ...]]:
    """The first whole tag, and the tags before it, which are not whole. Later tags are not checked."""
    passed: list[PassedOver] = []
    for tag in tags:
        verdict = check_tag(tag, check)
        if verdict is None:
            return tag, tuple(passed)
        passed.append(verdict)
    return None, tuple(passed)


def check_tag(tag: Tag, check: Check) -> PassedOver | None:
    """None for a whole tag, else its problems. Raises SavedAgainError for one that is saved again during the check."""
    if tag.unfinished is not None:
        return PassedOver(tag, (tag.unfinished,))
    tag_dir = open_tag(tag.tag_dir)
    verdict = _check(tag, tag_dir, check)
    if verdict is not None and was_saved_again(tag_dir):
        raise saved_again(tag_dir)
    return verdict


def _check(tag: Tag, tag_dir: FilePath, check: Check) -> PassedOver | None:
    try:
        problems = check(tag_dir)
    except (UnsupportedError, UnreadableError, NewerFormatError) as error:
        may_be_newest = not isinstance(error, UnsupportedError)
        return PassedOver(tag, (_brief(str(error), tag),), undecided=True, may_be_newest=may_be_newest)
    except CheckpointError as error:
        problems = (_brief(str(error), tag),)
    if problems and is_universal(tag_dir):
        return PassedOver(tag, ("is a Universal checkpoint (ds_to_universal).",), undecided=True)
    return PassedOver(tag, problems) if problems else None


def is_damage(error: CheckpointError | UnreadableError) -> bool:
    """Whether an error means that files are damaged, rather than that they cannot be read now or by this version.

    Not damage: an unreachable server, a format newer than this zeroelastic, torch's old format, a class that an
    allow-list refuses.
    """
    return not isinstance(error, (UnreadableError, UnsafePickleError, OldFormatError, NewerFormatError))


def committed_after(root: FilePath, name: str) -> tuple[str, ...]:
    """The tags of a directory with the same parameters that were committed after the tag ``name``, newest first.

    Reads the first lines of each record.
    """

    def recorded(name: str) -> Tag | None:
        try:
            tag_dir = directory_of(root, name)
            return _from_record(tag_dir, name, open_tag(tag_dir))
        except (CheckpointError, UnreadableError):
            return None

    above = name.rpartition("/")[0] or HERE
    try:
        names = [normal(f"{above}/{other}") for other in folders(directory_of(root, above)) if not is_ours(other)]
    except (CheckpointError, UnreadableError):
        return ()
    with ThreadPoolExecutor(_THREADS) as pool:
        tags = list(filter(None, pool.map(recorded, names)))
    chosen = next((tag for tag in tags if tag.name == name), None)
    return () if chosen is None else tuple(tag.name for tag in order.committed_after(tags, chosen))


def _brief(problem: str, tag: Tag) -> str:
    """A problem without its tag directory, which the caller names anyway."""
    return problem.removeprefix(f"{tag.tag_dir}: ").removeprefix(f"{tag.tag_dir}/")


def check_quickly(tag_dir: FilePath) -> tuple[str, ...]:
    """A check that reads no payload; it raises the problem and returns none.

    With a commit record: every rank's files exist with the recorded sizes; no header is opened. Without one: every
    rank's headers can be read and belong to one save, as far as they are read here: a checkpoint that only DeepSpeed
    loads may be whole, too. Raises CheckpointError, and UnsupportedError where not even its files are known.
    """
    checkpoint = open_checkpoint(tag_dir)
    if checkpoint.record is None:
        model = checkpoint.model_states(0)
        for rank in range(checkpoint.world_size):
            with suppress(UnsupportedError):
                shard = checkpoint.shard(rank)
                if (unrecorded := not_committed(shard, None)) is not None:
                    raise MissingFileError(unrecorded)
        with suppress(UnsupportedError):
            open_state(checkpoint, resizable=False)
        missing = sorted({*model.expert_files} - {*file_sizes(checkpoint.tag_dir)} if model.expert_files else ())
        if missing:
            raise MissingFileError(f"{tag_dir}: files of experts are missing: {some(missing)}.")
    return ()


def _tag_at(root: FilePath, name: str) -> Tag | None:
    """The tag in a directory, None where there is none. A tag that is saved again meanwhile is read again."""
    path = directory_of(root, name)
    for _ in range(_MAX_LOOKS):
        opened = open_tag(path)
        found = _look_at(path, opened, name)
        if (found is not None and found.step_from == "record") or not was_saved_again(opened):
            break
    return found


def _look_at(path: FilePath, opened: FilePath, name: str) -> Tag | None:
    for read in (_from_record, _from_header):
        try:
            return read(path, name, opened)
        except MissingFileError:
            continue
        except (CheckpointError, UnreadableError):
            break  # there is a file, and it is damaged
    try:
        is_tag = any(file == RECORD_NAME or is_rank_file(file) for file in file_sizes(opened))
    except MissingFileError:
        is_tag = False
    except (CheckpointError, UnreadableError):  # it cannot be listed, so it cannot be loaded
        is_tag = _step_of(name) is not None
    if not is_tag:
        return None
    named = _step_of(name)
    changed = _modified(path)
    return Tag(name, path, path, named, None if named is None else "name", changed)


def _tag_in_folder(root: FilePath, name: str) -> Tag | None:
    """The checkpoint in a ``checkpoint-N`` folder, None where there is none."""
    folder = root / name
    try:
        inside = list_tags(folder)
    except MissingFileError:
        return None
    except UnreadableError:  # ``check_tag`` reports the reason, and that it is undecided
        changed = _modified(folder)
        return Tag(name, folder, folder, _step_of(name), "name", changed)
    if not inside:
        return None
    latest, problem = named_latest(folder)
    if problem is None:
        problem = _why_unfinished(folder, latest, inside)
    chosen = latest if latest in inside else inside[-1]
    assert chosen is not None
    tag = _tag_at(folder, chosen)
    if tag is None:
        return None
    step, step_from = tag.step, tag.step_from
    if step is None:
        step = _step_of(name)
        step_from = None if step is None else "name"
    return replace(tag, name=name, path=folder, step=step, step_from=step_from, unfinished=problem)


def _why_unfinished(folder: FilePath, latest: str | None, inside: Collection[str]) -> str | None:
    """Why the save in the folder of a framework did not finish; None where it did."""
    if latest is None:
        return f"has no {LATEST} file. The save did not finish."
    if latest not in inside:
        return f"its {LATEST} names {latest}, which is not there."
    try:
        require_own_files(folder)
    except (CheckpointError, UnreadableError) as error:
        return str(error).removeprefix(f"{folder}: ")
    return None


def _from_record(tag_dir: FilePath, name: str, opened: FilePath) -> Tag:
    """A tag, from its commit record."""
    path = opened / RECORD_NAME
    record = read_record(opened)
    if record is None:
        raise MissingFileError(f"{path}: no such file.")
    return Tag(
        name,
        tag_dir,
        tag_dir,
        record.global_steps,
        "record",
        _modified(path),
        record.committed_at,
        record.save_id,
        record.trained_params,
    )


def _from_header(tag_dir: FilePath, name: str, opened: FilePath) -> Tag:
    """A tag, from its first model states file; step 0 where the file has none, as in a load."""
    present = file_sizes(opened)
    own, whole = (model_file_name(0, 0, whole=whole) for whole in (False, True))
    path = opened / (whole if whole in present and own not in present else own)
    states = read_torch_file(path, foreign="inert").root
    if not isinstance(states, dict):
        raise UnsafePickleError(f"{path}: is not a DeepSpeed model states file.")
    step = states.get("global_steps")
    changed = _modified(path)
    try:
        params = params_digest(chain.from_iterable(trained_tables(states, path)))
    except (CheckpointError, UnsupportedError):
        params = None
    found = step if type(step) is int else 0
    return Tag(name, tag_dir, tag_dir, found, "header", changed, trained_params=params)


def _step_of(name: str) -> int | None:
    """The number at the end of a name."""
    match = re.search(r"(\d{1,18})(\.ckpt)?$", name)
    return None if match is None else int(match[1])


def _modified(path: FilePath) -> float:
    if isinstance(path, RemotePath):
        return 0.0
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
