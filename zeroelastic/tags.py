"""The checkpoints of a run, newest first: the step each was saved at, and the newest one that is whole.

The order is that of the steps that commit records and headers state, then of the time of the save; names say nothing
but where a damaged tag says nothing else. Finding the steps opens one file of each tag; tags are checked one by one,
by whoever asks, and only until one is found.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zeroelastic.census import is_universal
from zeroelastic.checkpoint import is_rank_file, open_checkpoint
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    OldFormatError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)
from zeroelastic.quarantine import read_mark
from zeroelastic.record import RECORD_NAME
from zeroelastic.state import open_state
from zeroelastic.storage import FilePath, RemotePath, file_sizes, folders, list_directory, read_range, read_whole
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

StepFrom = Literal["record", "header", "name"]

_HEAD_BYTES = 2048
_HEAD_STEP = re.compile(rb'^ "global_steps": (\d{1,18}),$', re.MULTILINE)
_MOST_RECORD_BYTES = 1 << 30
_FIRST_MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_THREADS = 16
_UPGRADE = "Upgrade zeroelastic"


@dataclass(frozen=True, slots=True)
class Tag:
    """A checkpoint of a run.

    ``path`` is what a person calls it: the tag directory, or the ``checkpoint-N`` folder around it; ``tag_dir`` the tag
    directory itself. ``step`` is None where nothing tells; then, and where only its name tells, it cannot be whole.
    ``saved_at`` is the modification time of its commit record or first header, in seconds; 0 behind a URL.
    ``unfinished`` says what is wrong with the folder around the tag, if anything is.
    """

    name: str
    path: FilePath
    tag_dir: FilePath
    step: int | None
    step_from: StepFrom | None
    saved_at: float
    unfinished: str | None = None

    @property
    def asked_for(self) -> tuple[FilePath, str]:
        """The directory and the tag with which ``load_checkpoint`` takes it."""
        if self.path != self.tag_dir:
            return self.path, str(self.tag_dir)[len(str(self.path)) :].strip("/")
        directory = self.path
        for _ in self.name.split("/") if self.name != HERE else ():
            directory = directory.parent
        return directory, self.name

    @property
    def age_key(self) -> tuple[bool, int, float, list[tuple[int, str]]]:
        """Greater is newer; tags of unknown step are greatest."""
        parts = [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d{0,18})", self.name)]
        return self.step is None, self.step or 0, self.saved_at, parts


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
    return Run(root, tuple(sorted(tags, key=lambda tag: tag.age_key, reverse=True)), in_folders)


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
    """None for a tag that is whole, else what is wrong with it. Of a quarantined one only the mark is read."""
    if tag.unfinished is not None:
        return PassedOver(tag, (tag.unfinished,))
    try:
        mark = read_mark(tag.tag_dir)
        if mark is not None:
            return PassedOver(tag, (mark.sentence,), quarantined=True)
        problems = check(tag.tag_dir)
    except UnsupportedError as error:
        return PassedOver(tag, (_brief(str(error), tag),), undecided=True)
    except UnreadableError as error:
        return PassedOver(tag, (_brief(str(error), tag),), undecided=True)
    except CheckpointError as error:
        problems = (_brief(str(error), tag),)
        if _UPGRADE in str(error):  # a file of tomorrow
            return PassedOver(tag, problems, undecided=True)
    if problems and is_universal(tag.tag_dir):
        return PassedOver(tag, ("is a Universal checkpoint (ds_to_universal).",), undecided=True)
    return PassedOver(tag, problems) if problems else None


def is_damage(error: CheckpointError | UnreadableError) -> bool:
    """Whether an error says that files are not what was saved, rather than that they are not for us to read now.

    Not for us: a server that is away, a file of tomorrow, torch's old format, and what an allow-list refuses.
    """
    return not isinstance(error, (UnreadableError, UnsafePickleError, OldFormatError)) and _UPGRADE not in str(error)


def committed_after(root: Path, name: str) -> tuple[str, ...]:
    """The tags of a directory whose commit records state a later step than that of the tag ``name``, newest first.

    Reads the first lines of each record; a tag that has none, or a mark of quarantine, does not count.
    """

    def step(tag: str) -> int | None:
        try:
            return None if read_mark(root / tag) is not None else _record_step(root / tag / RECORD_NAME)
        except (CheckpointError, UnreadableError):
            return None

    above = name.rpartition("/")[0] or HERE
    try:
        own = _record_step(directory_of(root, name) / RECORD_NAME)
        beside = [normal(f"{above}/{other}") for other in folders(directory_of(root, above)) if not is_ours(other)]
        names = [other for other in beside if other != name]
    except (CheckpointError, UnreadableError):
        return ()
    with ThreadPoolExecutor(_THREADS) as pool:
        steps = {other: found for other, found in zip(names, pool.map(step, names), strict=True) if found is not None}
    return tuple(sorted((other for other in steps if steps[other] > own), key=lambda other: -steps[other]))


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
    """The tag in a directory, None where it is not one."""
    path = directory_of(root, name)
    for file, read, step_from in ((RECORD_NAME, _record_step, "record"), (_FIRST_MODEL, _header_step, "header")):
        try:
            step = read(path / file)
        except MissingFileError:
            continue
        except (CheckpointError, UnreadableError):
            break  # there is something, and it is damaged
        return Tag(name, path, path, step, step_from, _modified(path / file))  # type: ignore[arg-type]
    try:
        is_tag = any(file == RECORD_NAME or is_rank_file(file) for file in file_sizes(path))
    except MissingFileError:
        is_tag = False
    except (CheckpointError, UnreadableError):  # it cannot be listed, so that nobody can load it
        is_tag = _step_of(name) is not None
    if not is_tag:
        return None
    named = _step_of(name)
    return Tag(name, path, path, named, None if named is None else "name", _modified(path))


def _tag_in_folder(root: FilePath, name: str) -> Tag | None:
    """The checkpoint in a ``checkpoint-N`` folder, None where there is none in it."""
    folder = root / name
    try:
        inside = list_tags(folder)
    except MissingFileError:
        return None
    except UnreadableError:  # ``check_tag`` finds out why, and does not call it damaged
        return Tag(name, folder, folder, _step_of(name), "name", _modified(folder))
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


def _record_step(path: FilePath) -> int:
    """The step in a commit record. Its first lines tell, as zeroelastic writes it; else all of it is parsed."""
    head = read_range(path, 0, _HEAD_BYTES)
    if not head:
        raise CheckpointError(f"{path}: is empty.")
    match = _HEAD_STEP.search(head)
    if match is not None:
        return int(match[1])
    try:
        data = json.loads(read_whole(path, limit=_MOST_RECORD_BYTES).decode("utf-8"))
    except (ValueError, RecursionError):
        data = None
    step = data.get("global_steps") if isinstance(data, dict) else None
    if type(step) is not int:
        raise CheckpointError(f"{path}: states no step.")
    return step


def _header_step(path: FilePath) -> int:
    """The step in a model states file; 0 where it states none, as loading has it."""
    root = read_torch_file(path, foreign="inert").root
    if not isinstance(root, dict):
        raise UnsafePickleError(f"{path}: is not a DeepSpeed model states file.")
    step = root.get("global_steps")
    return step if type(step) is int else 0


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
