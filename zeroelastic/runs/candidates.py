"""The checkpoints of a run, newest first: the step each was saved at, and the newest one that is whole.

The order is that of the commits (``order``); names are used only for damaged tags that have nothing else.
Listing opens one file of each tag; tags are checked one at a time, until a whole one is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.marks import read_mark
from zeroelastic.checkpoint.model_states import trained_tables
from zeroelastic.checkpoint.one_save import was_saved_again
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
from zeroelastic.io.storage import file_sizes, folders, list_directory, modified_at
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
from zeroelastic.runs.order import Tag, newest_first, pointed_at, without_other_runs
from zeroelastic.runs.tag_directory import MAX_LOOKS, open_tag
from zeroelastic.torch_file.header import read_torch_file

_THREADS = 16


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
    ``quarantined``: it is marked as damaged, and was not checked again.
    """

    tag: Tag
    problems: tuple[str, ...]
    undecided: bool = False
    may_be_newest: bool = False
    quarantined: bool = False


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
    latest = None if in_folders else named_latest(root)[0]
    return Run(root, newest_first(tags, latest), in_folders)


def refuse_fresh_start(root: FilePath) -> None:
    """Raise CheckpointError where a directory without a resumable checkpoint has any file of a checkpoint in it."""
    try:
        sign = _sign_of_checkpoint(root)
        signs = [sign] if sign else look_for_tags(root, lambda name: _sign_of_checkpoint(root / name))
    except MissingFileError:
        return
    if signs:
        raise CheckpointError(
            f"{root}: no checkpoint in it can be resumed, but {signs[0]}. A run that begins anew beside it would look "
            "like one that goes on. Give the directory of that checkpoint, or another one for the new run; or begin "
            "anew here all the same: resume(..., fresh=True).",
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


def find_newest(
    tags: Iterable[Tag], check: Check, verdicts: dict[Tag, PassedOver | None] | None = None
) -> tuple[Tag | None, tuple[PassedOver, ...]]:
    """The first whole tag, and the tags before it, which are not whole. Later tags are not checked.

    ``verdicts`` are those of earlier calls; tags in it are not checked again, and new verdicts are added to it.
    """
    verdicts = {} if verdicts is None else verdicts
    passed: list[PassedOver] = []
    for tag in tags:
        if tag not in verdicts:
            verdicts[tag] = check_tag(tag, check)
        verdict = verdicts[tag]
        if verdict is None:
            return tag, tuple(passed)
        passed.append(verdict)
    return None, tuple(passed)


def check_tag(tag: Tag, check: Check) -> PassedOver | None:
    """None for a whole tag, else its problems. For a quarantined tag only the mark is read.

    A tag that is saved again during the check is checked again, at most MAX_LOOKS times; then it is undecided.
    """
    if tag.unfinished is not None:
        return PassedOver(tag, (tag.unfinished,))
    for _ in range(MAX_LOOKS):
        tag_dir = open_tag(tag.tag_dir)
        verdict = _check(tag, tag_dir, check)
        if verdict is None or not was_saved_again(tag_dir):
            return verdict
    return PassedOver(tag, ("was saved again each time that it was looked at.",), undecided=True, may_be_newest=True)


def _check(tag: Tag, tag_dir: FilePath, check: Check) -> PassedOver | None:
    try:
        mark = read_mark(tag_dir)
        if mark is not None:
            return PassedOver(tag, (mark.sentence,), quarantined=True)
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
    """The tags of a directory that were committed after the tag ``name``, which ``latest`` names, newest first.

    Those of runs of other parameters are left out.
    Reads the first lines of each record; a tag without a record, or in quarantine, does not count.
    """

    def recorded(name: str) -> Tag | None:
        try:
            tag_dir = directory_of(root, name)
            opened = open_tag(tag_dir)
            return None if read_mark(opened) is not None else _from_record(tag_dir, name, opened)
        except (CheckpointError, UnreadableError):
            return None

    above = name.rpartition("/")[0] or HERE
    try:
        names = [normal(f"{above}/{other}") for other in folders(directory_of(root, above)) if not is_ours(other)]
    except (CheckpointError, UnreadableError):
        return ()
    with ThreadPoolExecutor(_THREADS) as pool:
        tags = newest_first(filter(None, pool.map(recorded, names)), name)
    params = next((tag.trained_params for tag in tags if tag.name == name), None)
    order = [tag.name for tag in without_other_runs(tags, params)]
    return tuple(order[: order.index(name)]) if name in order else ()


def going_on_from(root: FilePath, tags: Sequence[Tag]) -> int:
    """The index of the tag, newest first, at which a run resumes: 0, or that of the tag ``latest`` was set back to."""
    latest, _ = named_latest(root)
    at = next((i for i, tag in enumerate(tags) if tag.name == latest), 0)
    if at == 0:  # times are asked for only where they decide
        return 0
    newer = [replace(tag, modified_at=tag.modified_at or modified_at(tag.tag_dir / RECORD_NAME)) for tag in tags[:at]]
    return pointed_at([*newer, *tags[at:]], latest, modified_at(root / LATEST))


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
                checkpoint.shard(rank)
        with suppress(UnsupportedError):
            open_state(checkpoint, resizable=False)
        missing = sorted({*model.expert_files} - {*file_sizes(checkpoint.tag_dir)} if model.expert_files else ())
        if missing:
            raise MissingFileError(f"{tag_dir}: files of experts are missing: {some(missing)}.")
    return ()


def _tag_at(root: FilePath, name: str) -> Tag | None:
    """The tag in a directory, None where there is none. A tag that is saved again meanwhile is read again."""
    path = directory_of(root, name)
    for _ in range(MAX_LOOKS):
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
    return Tag(name, path, path, named, None if named is None else "name", changed, changed)


def _tag_in_folder(root: FilePath, name: str) -> Tag | None:
    """The checkpoint in a ``checkpoint-N`` folder, None where there is none."""
    folder = root / name
    try:
        inside = list_tags(folder)
    except MissingFileError:
        return None
    except UnreadableError:  # ``check_tag`` reports the reason, and that it is undecided
        changed = _modified(folder)
        return Tag(name, folder, folder, _step_of(name), "name", changed, changed)
    if not inside:
        return None
    latest, problem = named_latest(folder)
    if problem is None and latest is None:
        problem = f"has no {LATEST} file. The save did not finish."
    elif problem is None and latest not in inside:
        problem = f"its {LATEST} names {latest}, which is not there."
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


def _from_record(tag_dir: FilePath, name: str, opened: FilePath) -> Tag:
    """A tag, from its commit record."""
    path = opened / RECORD_NAME
    record = read_record(opened)
    if record is None:
        raise MissingFileError(f"{path}: no such file.")
    changed = _modified(path)
    return Tag(
        name,
        tag_dir,
        tag_dir,
        record.global_steps,
        "record",
        record.committed_at or changed,
        changed,
        record.committed_at is not None,
        record.save_id,
        record.parent,
        record.run,
        record.trained_params,
    )


def _from_header(tag_dir: FilePath, name: str, opened: FilePath) -> Tag:
    """A tag, from its first model states file; step 0 where the file has none, as in a load."""
    present = file_sizes(opened)
    own, whole = (model_file_name(0, 0, whole=whole) for whole in (False, True))
    path = opened / (whole if whole in present and own not in present else own)
    states = read_torch_file(path, foreign="inert", columns=True).root
    if not isinstance(states, dict):
        raise UnsafePickleError(f"{path}: is not a DeepSpeed model states file.")
    step = states.get("global_steps")
    changed = _modified(path)
    try:
        params = params_digest(chain.from_iterable(trained_tables(states, path)))
    except CheckpointError:
        params = None
    found = step if type(step) is int else 0
    return Tag(name, tag_dir, tag_dir, found, "header", changed, changed, trained_params=params)


def _step_of(name: str) -> int | None:
    """The number at the end of a name."""
    match = re.search(r"(\d{1,18})(\.ckpt)?$", name)
    return None if match is None else int(match[1])


def _modified(path: FilePath) -> float:
    return 0.0 if isinstance(path, RemotePath) else modified_at(path)
