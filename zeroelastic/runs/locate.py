"""Find the checkpoint that a user means: its tag directory, the directory above it, and the framework that wrote it.

A checkpoint may be named by its tag directory, or by the directory whose ``latest`` names the tag: DeepSpeed's save
directory, a ``checkpoint-N`` of the Hugging Face Trainer, a directory of accelerate's ``save_state`` or of Lightning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zeroelastic.checkpoint.tag_files import is_rank_file, is_universal, parse_rank_file
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    printable,
    rank_list,
    some,
)
from zeroelastic.io.paths import FilePath, absolute, as_path, local_path
from zeroelastic.io.storage import directory_exists, file_sizes, list_directory
from zeroelastic.runs.names import (
    LATEST,
    LATEST_UNIVERSAL,
    WHAT_TO_GIVE,
    directory_of,
    list_tags,
    named_latest,
    neighbours,
    normal,
    not_a_directory,
    read_latest,
    why_no_tag_of,
)
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tag_directory import open_tag

logger = logging.getLogger(__name__)

Framework = Literal["deepspeed", "hf-trainer", "accelerate", "lightning"]

_MAX_LISTED = 8
_OF_OTHERS = "zeroelastic reads the checkpoint that it was made from."


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint: ``tag_dir`` is ``root / tag``; ``latest`` is the tag that the root's ``latest`` names, if any.

    ``tag_dir`` is watched (``one_save``): all that is read of it is of one save, or an error.
    """

    root: FilePath
    tag: str
    tag_dir: FilePath
    latest: str | None
    framework: Framework


def find_source(text: str | os.PathLike[str], *, tag: str | None = None, universal: bool = False) -> Source:
    """The checkpoint at a path or URL; ``tag`` chooses one where the path is the directory above the tags.

    Without it, that is the tag that ``latest`` names, or the only one where there is no ``latest``.

    Raises UsageError, with what was found there and what to give; UnsupportedError for a directory in a format of
    others, except a Universal tag directory if ``universal``; MissingFileError when ``latest`` names a tag that does
    not exist. The contents of the tag are checked by ``open_checkpoint``.

    Example::

        find_source("runs/llama/checkpoint-500").tag_dir     # .../checkpoint-500/global_step500
    """
    tag = None if tag is None else str(tag)  # DeepSpeed takes a number, too
    path = as_path(absolute(text))
    opened = open_tag(path)
    try:
        names, inside = list_directory(opened)
    except MissingFileError:
        raise UsageError(not_a_directory(path)) from None
    if any(map(is_rank_file, names)):
        if tag not in (None, path.name):
            raise UsageError(f"{path}: is itself the tag {path.name}. To use {tag}, give the directory above.")
        if not universal and "zero" in inside and is_universal(path):
            raise UnsupportedError(f"{path}: is {UNIVERSAL}. {_OF_OTHERS}")
        root = path.parent
        try:
            around = file_sizes(root)
        except (CheckpointError, UnreadableError):  # only the tag may be listed
            return Source(root, path.name, opened, named_latest(root)[0], "deepspeed")
        latest = named_latest(root)[0] if LATEST in around else None
        return Source(root, path.name, opened, latest, _framework(around, path.name))
    latest = None
    if LATEST in names:
        latest = read_latest(path) if tag is None else named_latest(path)[0]
    chosen = tag if tag is not None else latest
    if chosen is None:
        tags = list_tags(path)
        native = [name for name in tags if not is_universal(directory_of(path, name))]
        if len(tags) == len(native) == 1 and _ranks_without_first(directory_of(path, tags[0])) is None:
            chosen = tags[0]
            logger.warning("%s: has no %s file; %s is its only tag", path, LATEST, printable(chosen))
        elif native:
            raise UsageError(f"{path}: has no {LATEST} file. {_choose(path, tags)}")
    if chosen is None:
        if (kind := other_format(path, names)) is not None:
            raise UnsupportedError(f"{path}: is {kind}. {_OF_OTHERS}")
        raise UsageError(f"{path}: {_what_is_there(path, inside)}")
    if (problem := why_no_tag_of(path, chosen)) is not None:
        raise UsageError(
            f"{path}: {printable(chosen)} is not the name of a tag: {problem}. Give the name of a folder in it."
        )
    chosen = normal(chosen)
    tag_dir = open_tag(directory_of(path, chosen))
    if chosen not in inside and not directory_exists(tag_dir):
        tags = list_tags(path)
        there = _choose(path, tags) if tags else "There are no others."
        if tag is not None:
            raise UsageError(f"{path}: has no tag {printable(chosen)}. {there}")
        raise MissingFileError(
            f"{path}/{LATEST}: names {printable(chosen)}, which is not there. {there}",
            remedy=f"Run `zeroelastic latest DIR --fix` to write the newest tag that verifies into {LATEST}.",
        )
    return Source(path, chosen, tag_dir, latest, _framework(names, chosen))


def _framework(names: Collection[str], tag: str) -> Framework:
    """The framework that wrote a directory, by files that only this framework writes."""
    if "trainer_state.json" in names:
        return "hf-trainer"
    if tag == "pytorch_model" or "random_states_0.pkl" in names:
        return "accelerate"
    return "lightning" if tag == "checkpoint" else "deepspeed"


def _choose(path: FilePath, tags: Sequence[str]) -> str:
    """Say which tag to give, in words that hold for verbs with and without ``--tag``."""
    there = some(map(printable, tags), _MAX_LISTED)
    if (ranks := _ranks_without_first(directory_of(path, tags[-1]))) is not None:
        return (
            f"There are: {there}, with files of {ranks} and none of rank 0, as on the disk of one node "
            "(use_node_local_storage). Copy what all nodes have into one directory, and give that."
        )
    return f"There are: {there}. Give the path of one, such as {path / tags[-1]}."


def _ranks_without_first(tag_dir: FilePath) -> str | None:
    """The ranks whose files are in a tag directory, in words; None where rank 0's are there, too."""
    found = {file.rank for name in list_directory(tag_dir)[0] if (file := parse_rank_file(name)) is not None}
    return None if 0 in found or not found else rank_list(sorted(found))


def _what_is_there(path: FilePath, inside: Collection[str]) -> str:
    here = local_path(path)
    below = [name for name in inside if here is not None and (here / name / LATEST).is_file()]
    if below:
        return f"is not itself a checkpoint. Give one that it holds: {some(map(printable, below), _MAX_LISTED)}."
    others = formats_below(path, inside)
    if others is not None:
        return f"holds no ZeRO checkpoint; {others}. {_OF_OTHERS}"
    return f"holds no ZeRO checkpoint: neither zero_pp_rank_*_optim_states.pt nor a file {LATEST}. {WHAT_TO_GIVE}"


UNIVERSAL = (
    'a Universal checkpoint (ds_to_universal). DeepSpeed loads it with "checkpoint": {"load_universal": true}, '
    "and `zeroelastic convert --from universal` makes a native checkpoint of it"
)
_DCP = (
    "a torch.distributed.checkpoint directory, which torch.distributed.checkpoint.load reads; of one of FSDP2 "
    "`zeroelastic convert --from fsdp2` makes a native checkpoint"
)
_SAFETENSORS = "a directory of safetensors files: weights alone, which from_pretrained and safetensors load"

_MAX_LOOKED_AT = 64


def other_format(path: FilePath, names: Collection[str]) -> str | None:
    """Return the format of a directory with these files, if it is one of these."""
    if LATEST_UNIVERSAL in names or is_universal(path):
        return UNIVERSAL
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return _DCP
    return _SAFETENSORS if any(name.endswith(".safetensors") for name in names) else None


def formats_below(path: FilePath, folders: Collection[str]) -> str | None:
    """The folders of a directory that are in one of these formats, as a list with what each is."""
    found = []
    for name in sorted(folders)[:_MAX_LOOKED_AT]:
        try:
            kind = other_format(path / name, list_directory(path / name)[0])
        except (CheckpointError, UnreadableError):
            continue
        if kind is not None:
            found.append(f"{printable(name)} is {kind}")
    return some(found, _MAX_LISTED, separator="; ") if found else None


def about_absent(root: FilePath) -> str:
    """A sentence about a directory from which nothing can be loaded: its tags, or directories of similar names."""
    here = local_path(root)
    if here is not None:
        root = here = Path(os.path.abspath(here))
    if here is not None and not here.is_dir():
        kind = "is not a directory" if here.exists() else "no such directory"
        above, inside, alike = neighbours(here, _MAX_LISTED)
        found = [name for name in inside if (above / name / LATEST).is_file() and name not in alike]
        named = [*alike, *found]
        return f"{root}: {kind}. In {above} there {_are(named) if named else 'is no similar name'}."
    if tags := _tags(root):
        return f"{root}: has no file {LATEST}. There {_are(tags, ', newest first')}."
    if here is None:
        return f"{root}: no such directory, or it holds no checkpoint."
    other = other_format(root, list_directory(root)[0])
    return f"{root}: holds no checkpoint." if other is None else f"{root}: is {other}."


def about_absent_tag(root: FilePath, tag: str) -> str:
    """A sentence about a tag that does not exist in a directory, with the tags that do."""
    tags = _tags(root)
    return f"{root}: has no tag {printable(tag)}. There {_are(tags, ', newest first')}." if tags else about_absent(root)


def _tags(root: FilePath) -> list[str]:
    return [tag.name for tag in RunStore(root).tags()]


def _are(names: Sequence[str], order: str = "") -> str:
    return f"are{order}: {some(map(printable, names), _MAX_LISTED)}"
