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
from zeroelastic.source import LATEST, list_tags, read_latest
from zeroelastic.state import open_state
from zeroelastic.storage import FilePath, RemotePath, file_sizes, folders, read_range, read_whole
from zeroelastic.torchfile import read_torch_file

StepFrom = Literal["record", "header", "name"]

_FOLDER = re.compile(r"checkpoint[-_]\d+|.+\.ckpt")
_HIDDEN = "."
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
        names = [name for name in folders(root) if not name.startswith(_HIDDEN) and name.isprintable()]
    except MissingFileError:
        raise UsageError(f"{root}: no such directory.") from None
    with ThreadPoolExecutor(_THREADS) as pool:  # for file systems that take their time
        tags = [tag for tag in pool.map(lambda name: _tag_at(root, name), names) if tag is not None]
        in_folders = False
        if all(tag.step_from == "name" and _FOLDER.fullmatch(tag.name) for tag in tags):  # nothing in them was read
            inside = [name for name in names if _FOLDER.fullmatch(name)]
            found = [tag for tag in pool.map(lambda name: _tag_in_folder(root, name), inside) if tag is not None]
            tags, in_folders = (found, True) if found else (tags, False)
    if not tags:
        if any(map(is_rank_file, file_sizes(root))):
            raise UsageError(f"{root}: is a tag itself; give the directory above.")
        raise UsageError(f"{root}: holds no ZeRO-3 checkpoint.")
    return Run(root, tuple(sorted(tags, key=lambda tag: tag.age_key, reverse=True)), in_folders)


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

    try:
        own = _record_step(root / name / RECORD_NAME)
        names = [other for other in folders(root) if not other.startswith(_HIDDEN) and other != name]
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
    path = root / name
    for file, read, step_from in ((RECORD_NAME, _record_step, "record"), (_FIRST_MODEL, _header_step, "header")):
        try:
            step = read(path / file)
        except MissingFileError:
            continue
        except (CheckpointError, UnreadableError):
            break  # there is something, and it is damaged
        return Tag(name, path, path, step, step_from, _modified(path / file))  # type: ignore[arg-type]
    try:
        files = [file for file in file_sizes(path) if file == RECORD_NAME or is_rank_file(file)]
    except (CheckpointError, UnreadableError):
        files = [_FIRST_MODEL] if not _is_gone(path) else []  # it cannot be listed, so that nobody can load it
        files = files if _step_of(name) is not None else []
    if not files:
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


def _is_gone(path: FilePath) -> bool:
    return isinstance(path, Path) and not os.path.lexists(path)
