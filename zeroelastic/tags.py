"""The checkpoints of a run, newest first: the step each was saved at, and the newest one that is whole.

The order is that of the commits (``commit_order``); names say nothing but where a damaged tag says nothing else.
Finding it opens one file of each tag; tags are checked one by one, and only until one is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.census import is_universal
from zeroelastic.checkpoint import is_rank_file, open_checkpoint
from zeroelastic.commit_order import Tag, newest_first, pointed_at
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    OldFormatError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from zeroelastic.one_save import was_saved_again
from zeroelastic.quarantine import read_mark
from zeroelastic.record import RECORD_NAME, read_head
from zeroelastic.save_place import MAX_LOOKS, open_tag
from zeroelastic.state import open_state
from zeroelastic.storage import FilePath, RemotePath, file_sizes, folders, list_directory
from zeroelastic.tag_names import (
    CHECKPOINT_FOLDER,
    HERE,
    LATEST,
    LATEST_UNIVERSAL,
    directory_of,
    holds_checkpoint,
    is_ours,
    list_tags,
    look_for_tags,
    normal,
    read_latest,
)
from zeroelastic.torchfile import read_torch_file

_FIRST_MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_THREADS = 16
_END_OF_TIME = float(1 << 40)
_UPGRADE = "Upgrade zeroelastic"


@dataclass(frozen=True, slots=True)
class Run:
    """The tags of a directory, newest first; ``in_folders``: each in a ``checkpoint-N`` folder of its own."""

    root: FilePath
    tags: tuple[Tag, ...]
    in_folders: bool


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A tag that is not whole, and why; ``undecided`` where it may be, and cannot be judged here and now.

    ``quarantined``: it is marked as damaged, and was not looked at again.
    """

    tag: Tag
    problems: tuple[str, ...]
    undecided: bool = False
    quarantined: bool = False


Check = Callable[[FilePath], tuple[str, ...]]
"""What is wrong with a tag directory; what it raises of CheckpointError and UnsupportedError is the answer too."""


def list_run(root: FilePath) -> Run:
    """Every checkpoint in a directory. Opens one file of each; raises UsageError where there are none.

    Example::

        [tag.name for tag in list_run(Path("ckpt")).tags]    # ["global_step10", "global_step9"]
    """
    try:
        tags = look_for_tags(root, lambda name: _tag_at(root, name))
    except MissingFileError:
        raise UsageError(f"{root}: no such directory.") from None
    named, _ = named_latest(root)
    if named is not None and all(tag.name != named for tag in tags):  # deeper than tags are looked for, or linked to
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
        raise UsageError(f"{root}: holds no ZeRO-3 checkpoint.")
    latest = None if in_folders else named_latest(root)[0]
    return Run(root, newest_first(tags, latest), in_folders)


def refuse_fresh_start(root: FilePath) -> None:
    """Raise CheckpointError where a directory in which nothing can be resumed holds anything of a checkpoint."""
    try:
        sign = _sign_of_checkpoint(root)
        signs = [sign] if sign else look_for_tags(root, lambda name: _sign_of_checkpoint(root / name))
    except MissingFileError:
        return
    if signs:
        raise CheckpointError(
            f"{root}: no checkpoint in it can be resumed, but {signs[0]}. A run that begins anew beside it would look "
            "like one that goes on. Give the directory of that checkpoint, or another one for the new run; or begin "
            "anew here all the same: resume(..., fresh=True)."
        )


def _sign_of_checkpoint(directory: FilePath) -> str | None:
    """What in a directory is of a checkpoint of DeepSpeed, of any stage, whole or not."""
    try:
        files, inside = list_directory(directory)
    except UnreadableError as error:
        return str(error).rstrip(".")
    signs = [name for name in files if name in (LATEST, LATEST_UNIVERSAL, RECORD_NAME) or is_rank_file(name)]
    if not signs and "zero" in inside and is_universal(directory):
        signs = ["zero"]
    return f"there is {directory / signs[0]}" if signs else None


def find_newest(tags: Iterable[Tag], check: Check) -> tuple[Tag | None, tuple[PassedOver, ...]]:
    """The first of some tags that is whole, and those before it, which are not. The others are not looked at."""
    passed: list[PassedOver] = []
    for tag in tags:
        verdict = check_tag(tag, check)
        if verdict is None:
            return tag, tuple(passed)
        passed.append(verdict)
    return None, tuple(passed)


def check_tag(tag: Tag, check: Check) -> PassedOver | None:
    """None for a tag that is whole, else what is wrong with it. Of a quarantined one only the mark is read.

    A tag that is saved again meanwhile is looked at again; where that goes on, it is undecided.
    """
    if tag.unfinished is not None:
        return PassedOver(tag, (tag.unfinished,))
    for _ in range(MAX_LOOKS):
        tag_dir = open_tag(tag.tag_dir)
        verdict = _check(tag, tag_dir, check)
        if verdict is None or not was_saved_again(tag_dir):
            return verdict
    return PassedOver(tag, ("was saved again each time that it was looked at.",), undecided=True)


def _check(tag: Tag, tag_dir: FilePath, check: Check) -> PassedOver | None:
    try:
        mark = read_mark(tag_dir)
        if mark is not None:
            return PassedOver(tag, (mark.sentence,), quarantined=True)
        problems = check(tag_dir)
    except UnsupportedError as error:
        return PassedOver(tag, (_brief(str(error), tag),), undecided=True)
    except UnreadableError as error:
        return PassedOver(tag, (_brief(str(error), tag),), undecided=True)
    except CheckpointError as error:
        problems = (_brief(str(error), tag),)
        if _UPGRADE in str(error):  # a file of tomorrow
            return PassedOver(tag, problems, undecided=True)
    if problems and is_universal(tag_dir):
        return PassedOver(tag, ("is a Universal checkpoint (ds_to_universal).",), undecided=True)
    return PassedOver(tag, problems) if problems else None


def is_damage(error: CheckpointError | UnreadableError) -> bool:
    """Whether an error says that files are not what was saved, rather than that they are not for us to read now.

    Not for us: a server that is away, a file of tomorrow, torch's old format, and what an allow-list refuses.
    """
    return not isinstance(error, (UnreadableError, UnsafePickleError, OldFormatError)) and _UPGRADE not in str(error)


def committed_after(root: Path, name: str) -> tuple[str, ...]:
    """The tags of a directory that were committed after the tag ``name``, which ``latest`` names, newest first.

    Reads the first lines of each record; a tag that has none, or a mark of quarantine, does not count.
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
        order = [tag.name for tag in newest_first(filter(None, pool.map(recorded, names)), name)]
    return tuple(order[: order.index(name)]) if name in order else ()


def going_on_from(root: FilePath, tags: Sequence[Tag]) -> int:
    """Where among the tags of a directory, newest first, a run goes on: 0, or where ``latest`` was pointed later."""
    latest, _ = named_latest(root)
    return pointed_at(tags, latest, _modified(root / LATEST))


def _brief(problem: str, tag: Tag) -> str:
    """A sentence without the directory that it is told of anyway."""
    return problem.removeprefix(f"{tag.tag_dir}: ").removeprefix(f"{tag.tag_dir}/")


def check_quickly(tag_dir: FilePath) -> tuple[str, ...]:
    """A check that reads no payload: nothing is returned, what is wrong is raised.

    With a commit record: whether every rank's files are there and have the sizes that it states; no header is opened.
    Without one: whether every rank's headers can be read and are of one save. Raises CheckpointError, UnsupportedError.
    """
    checkpoint = open_checkpoint(tag_dir)
    if checkpoint.record is None:
        open_state(checkpoint)
    return ()


def named_latest(root: FilePath) -> tuple[str | None, str | None]:
    """The tag that ``latest`` names, and what is wrong with that file; both None where there is none."""
    try:
        return read_latest(root), None
    except (CheckpointError, UnreadableError) as error:
        return None, str(error)


def _tag_at(root: FilePath, name: str) -> Tag | None:
    """The tag in a directory, None where it is not one. One that is saved again meanwhile is looked at again."""
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
            break  # there is something, and it is damaged
    try:
        is_tag = any(file == RECORD_NAME or is_rank_file(file) for file in file_sizes(opened))
    except MissingFileError:
        is_tag = False
    except (CheckpointError, UnreadableError):  # it cannot be listed, so that nobody can load it
        is_tag = _step_of(name) is not None
    if not is_tag:
        return None
    named = _step_of(name)
    changed = _modified(path)
    return Tag(name, path, path, named, None if named is None else "name", changed, changed)


def _tag_in_folder(root: FilePath, name: str) -> Tag | None:
    """The checkpoint in a ``checkpoint-N`` folder, None where there is none in it."""
    folder = root / name
    try:
        inside = list_tags(folder)
    except MissingFileError:
        return None
    except UnreadableError:  # ``check_tag`` finds out why, and does not call it damaged
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
    """A tag as its commit record has it."""
    path = opened / RECORD_NAME
    head = read_head(path)
    step, committed_at, save_id, parent = (
        head.get(key) for key in ("global_steps", "committed_at", "save_id", "parent")
    )
    if type(step) is not int:
        raise CheckpointError(f"{path}: states no step.")
    changed = _modified(path)
    dated = type(committed_at) is float and 0 < committed_at < _END_OF_TIME
    return Tag(
        name,
        tag_dir,
        tag_dir,
        step,
        "record",
        committed_at if dated else changed,  # type: ignore[arg-type]
        changed,
        dated,
        save_id if isinstance(save_id, str) else None,
        parent if isinstance(parent, str) else None,
    )


def _from_header(tag_dir: FilePath, name: str, opened: FilePath) -> Tag:
    """A tag as its first model states file has it; step 0 where that states none, as loading has it."""
    path = opened / _FIRST_MODEL
    states = read_torch_file(path, foreign="inert").root
    if not isinstance(states, dict):
        raise UnsafePickleError(f"{path}: is not a DeepSpeed model states file.")
    step = states.get("global_steps")
    changed = _modified(path)
    return Tag(name, tag_dir, tag_dir, step if type(step) is int else 0, "header", changed, changed)


def _step_of(name: str) -> int | None:
    """The number that a name ends in."""
    match = re.search(r"(\d{1,18})(\.ckpt)?$", name)
    return None if match is None else int(match[1])


def _modified(path: FilePath) -> float:
    if isinstance(path, RemotePath):
        return 0.0
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
