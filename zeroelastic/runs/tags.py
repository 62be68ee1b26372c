"""A tag of a run, and the one rule for the newest: what ``latest`` names, else the newest committed tag.

A *finished* tag has a commit record, or is in a folder of a framework whose own ``latest`` names it. Tags are ordered
by the time in the commit record, then by step; tags without a record, which DeepSpeed alone has saved, come before all
others. Only tags that train the same parameters, by name and shape, are compared: several engines may save to one
directory. A name counts only for a damaged tag, which has nothing else.

accelerate and the Trainer write schedulers, generators and counters next to a tag after the engine has saved it. A save
that is cut short before the last of them leaves a tag and files of two saves, which nothing else shows where the
directory was used before. So a hidden file next to the tag names the save that all files belong to, by the id in the
tag's commit record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from zeroelastic.checkpoint.commit_record import RECORD_NAME, params_digest, read_record
from zeroelastic.checkpoint.model_states import trained_tables
from zeroelastic.checkpoint.tag_files import is_rank_file, model_file_name, was_saved_again
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    printable,
    some,
)
from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import directory_exists, file_sizes, place, read_whole
from zeroelastic.runs.names import HERE, LATEST, directory_of
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.torch_file.header import read_torch_file

NOTE = ".zeroelastic-files.json"
UNFINISHED = "unfinished"
"""In the place of a save's id: the files are being written."""

_MAX_BYTES = 1 << 20

Saves = Mapping[str, str | None]
"""The save that the files are of, by tag; None is one without a commit record."""

StepFrom = Literal["record", "header", "name"]

_MAX_LOOKS = 5
"""How often a listing looks at a tag that is saved again or removed meanwhile."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A checkpoint of a run.

    ``path`` is the tag directory ``tag_dir``, or the ``checkpoint-N`` folder around it. ``step`` is None where it is
    unknown; then, and where only the name has it, the tag cannot be whole. ``committed_at`` is the time in its record,
    in seconds since 1970; ``modified_at`` that of its record or first header on the disk, 0 behind a URL. ``save_id``
    is that of its record; ``trained_params`` is the digest of its trained parameters' names and shapes, by its record
    or its header. ``unfinished`` is the problem with the folder around it. ``content_root`` and ``follows`` are in its
    record. ``in_memory``: it is in the memory of the nodes.
    """

    name: str
    path: FilePath
    tag_dir: FilePath
    step: int | None
    step_from: StepFrom | None
    modified_at: float
    committed_at: float | None = None
    save_id: str | None = None
    trained_params: str | None = None
    unfinished: str | None = None
    content_root: str | None = None
    follows: tuple[str, ...] = ()
    in_memory: bool = False

    @property
    def saved_at(self) -> float:
        """When it was saved, as far as it is known; only a time in a record is the same in a copy of the directory."""
        return self.modified_at if self.committed_at is None else self.committed_at

    @property
    def is_finished(self) -> bool:
        """Whether its save finished: it has a commit record, or the folder around it names it."""
        return self.step_from == "record" or (self.path != self.tag_dir and self.unfinished is None)

    @property
    def asked_for(self) -> tuple[FilePath, str]:
        """The directory and the tag to give to ``load_checkpoint``."""
        if self.path != self.tag_dir:
            return self.path, str(self.tag_dir)[len(str(self.path)) :].strip("/")
        directory = self.path
        for _ in self.name.split("/") if self.name != HERE else ():
            directory = directory.parent
        return directory, self.name

    @property
    def age_key(self) -> tuple[float, int, list[tuple[int, str]]]:
        """Greater is newer."""
        parts = [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d{0,18})", self.name)]
        return self.committed_at or 0.0, -1 if self.step is None else self.step, parts


def newest_first(tags: Iterable[Tag]) -> tuple[Tag, ...]:
    """The tags, last committed first; where the times are equal or unknown, the greater step first."""
    return tuple(sorted(tags, key=lambda tag: tag.age_key, reverse=True))


def tags_to_try(tags: Sequence[Tag], latest: str | None, trained_params: str | None) -> tuple[Tag, ...]:
    """Return the tags that a run may go on from, the newest first: the others are for a run that falls back.

    The first is the tag that ``latest`` names. The others are the finished tags with these ``trained_params`` that are
    older, newest first. Where ``latest`` names none of the tags, they are all finished tags with these parameters.
    With None as parameters all tags count. Example::

        tags_to_try(RunStore(root).tags(), "global_step2", None)    # global_step2, then global_step1
    """
    named = next((tag for tag in tags if tag.name == latest), None)
    own = newest_first(tag for tag in tags if tag.is_finished and trained_params in (None, tag.trained_params))
    if named is None:
        return own
    dated = named.committed_at is not None
    return named, *(tag for tag in own if tag is not named and (tag.age_key < named.age_key or not dated))


def committed_after(tags: Sequence[Tag], chosen: Tag) -> tuple[Tag, ...]:
    """The tags with the parameters of ``chosen`` that were committed later, newest first."""
    later = (tag for tag in tags if tag.step_from == "record" and tag.trained_params == chosen.trained_params)
    return newest_first(tag for tag in later if tag.age_key > chosen.age_key)


def about_newer(root: FilePath, chosen: str, newer: Sequence[str]) -> list[str]:
    """A note on a load of the tag that ``latest`` names where newer ones were committed; else none."""
    if not newer:
        return []
    return [
        f"NOT THE NEWEST: {root / LATEST} names {printable(chosen)}, and {some(map(printable, newer))} "
        f"{'was' if len(newer) == 1 else 'were'} committed later. Unless {LATEST} was set back on purpose, a save "
        "ended before it was written"
    ]


def in_folders(tags: Iterable[Tag]) -> bool:
    """Whether tags are in folders of a framework, which have a ``latest`` each."""
    return any(tag.path != tag.tag_dir for tag in tags)


def by_params(tags: Sequence[Tag]) -> tuple[tuple[Tag, ...], ...]:
    """The tags by the parameters that they train, each group in the order given.

    Tags whose parameters are unknown, because they are damaged, are with the others if those train the same ones; else
    they are in no group.
    """
    known = list(dict.fromkeys(tag.trained_params for tag in tags if tag.trained_params is not None))
    if len(known) <= 1:
        return (tuple(tags),) if tags else ()
    return tuple(tuple(tag for tag in tags if tag.trained_params == params) for params in known)


def tag_at(root: FilePath, name: str) -> Tag | None:
    """The tag in a directory, None where there is none. A tag that is saved again meanwhile is read again."""
    path = directory_of(root, name)
    for _ in range(_MAX_LOOKS):
        opened = open_tag(path)
        found = _look_at(path, opened, name)
        if (found is not None and found.step_from == "record") or not was_saved_again(opened):
            break
    return found


def _look_at(path: FilePath, opened: FilePath, name: str) -> Tag | None:
    with suppress(CheckpointError, UnreadableError):  # there is no such file, or it is damaged
        return _of_record(path, name, opened) or _of_header(path, name, opened)
    step = step_of(name)
    try:
        is_tag = any(file == RECORD_NAME or is_rank_file(file) for file in file_sizes(opened))
    except MissingFileError:
        return None
    except (CheckpointError, UnreadableError):  # it cannot be listed, so it cannot be loaded
        is_tag = step is not None
    return Tag(name, path, path, step, None if step is None else "name", place(path).modified_at()) if is_tag else None


def _of_record(path: FilePath, name: str, opened: FilePath) -> Tag | None:
    record, changed = read_record(opened), place(opened / RECORD_NAME).modified_at()
    if record is None:
        return None
    return Tag(
        name,
        path,
        path,
        record.global_steps,
        "record",
        changed,
        record.committed_at,
        record.save_id,
        record.trained_params,
        content_root=record.content_root,
        follows=record.follows,
    )


def committed_tag(root: FilePath, name: str) -> Tag | None:
    """The tag in a directory by its commit record; None where there is none, or a damaged one."""
    path = directory_of(root, name)
    with suppress(CheckpointError, UnreadableError):
        return _of_record(path, name, open_tag(path))
    return None


def _of_header(path: FilePath, name: str, opened: FilePath) -> Tag:
    """A tag, from its first model states file; step 0 where the file has none, as in a load."""
    present = file_sizes(opened)
    own, whole = (model_file_name(0, 0, whole=whole) for whole in (False, True))
    file = opened / (whole if whole in present and own not in present else own)
    states = read_torch_file(file, foreign="inert").root
    if not isinstance(states, dict):
        raise UnsafePickleError(f"{file}: is not a DeepSpeed model states file.")
    step, changed, params = states.get("global_steps"), place(file).modified_at(), None
    with suppress(CheckpointError, UnsupportedError):
        params = params_digest(chain.from_iterable(trained_tables(states, file)))
    return Tag(name, path, path, step if type(step) is int else 0, "header", changed, trained_params=params)


def step_of(name: str) -> int | None:
    """The number at the end of a name."""
    match = re.search(r"(\d{1,18})(\.ckpt)?$", name)
    return None if match is None else int(match[1])


def expect_files(directory: Path, tag: str) -> None:
    """Note, before a tag is saved, that the files next to it belong to the tag that exists. Raises OSError."""
    try:
        noted = _read(directory)
        new = {} if tag in noted else {tag: saved_id(directory, tag)}
    except CheckpointError:  # damage that the save replaces
        noted, new = {}, {tag: UNFINISHED}
    if new:
        directory.mkdir(parents=True, exist_ok=True)
        note_files(directory, {**noted, **new})


def note_files(directory: Path, saves: Saves) -> None:
    """Note the saves that the files next to tags belong to. Raises OSError."""
    write_atomically(directory / NOTE, json.dumps(saves).encode())


def saved_id(directory: FilePath, tag: str) -> str | None:
    """Return the id of the save that a tag is of; None where there is no tag, or one without a commit record."""
    record = read_record(open_tag(directory_of(directory, tag)))
    return None if record is None else record.save_id


def require_own_files(directory: FilePath) -> None:
    """Raise CheckpointError where the files next to a tag are of another save than the tag."""
    for tag, save_id in _read(directory).items():
        if saved_id(directory, tag) != save_id and directory_exists(directory_of(directory, tag)):
            raise CheckpointError(
                f"{directory}: the save of {printable(tag)} was cut short: the files beside it (scheduler, generators, "
                "counters of the framework) are not all of the same save. Load another checkpoint, and save into a new "
                f"directory each time, so that there is one. To load this mix all the same, remove "
                f"{directory / NOTE}.",
                remedy="",
            )


def _read(directory: FilePath) -> Saves:
    """The note; nothing where there is none."""
    path = directory / NOTE
    try:
        saves = json.loads(read_whole(path, limit=_MAX_BYTES))
    except MissingFileError:
        return {}
    except (ValueError, RecursionError):  # a CheckpointError is one, too
        saves = None
    if not isinstance(saves, dict) or not all(one is None or isinstance(one, str) for one in saves.values()):
        raise CheckpointError(f"{path}: is not the JSON object that zeroelastic writes there. It is damaged.")
    return saves
