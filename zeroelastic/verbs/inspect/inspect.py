"""``zeroelastic.inspect``: what a checkpoint is, from its headers, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from zeroelastic.checkpoint.one_save import one_save, saved_again, was_saved_again
from zeroelastic.checkpoint.tag_files import is_rank_file, list_tag
from zeroelastic.errors import CheckpointError, UnreadableError, finding, with_remedy
from zeroelastic.io.paths import FilePath, RemotePath, as_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.verbs.inspect.inspector import Inspection, Inspector
from zeroelastic.verbs.inspect.other_kinds import refuse_other_kinds
from zeroelastic.verbs.inspect.report import InspectedParam, InspectReport


@with_remedy()
def inspect(
    src: str | os.PathLike[str], *, tag: str | None = None, params: str | None = None, all_ranks: bool = False
) -> InspectReport:
    """Say what a checkpoint is: who saved it, what it holds, and what is missing or wrong.

    Reads the commit record and the headers of one rank, or of ``all_ranks``; no weights. ``params`` chooses the
    parameters of the report by a glob, or by a part of their names. A damaged checkpoint is described as far as
    possible, with ``problems``. Raises UsageError where there is no checkpoint, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.inspect("ckpt", params="norm")
        print(report.world_size, report.step, [param.name for param in report.params])
    """
    found = _look(os.fspath(src), tag, all_ranks)
    return found if params is None else found.model_copy(update={"params": _matching(found.params, params)})


def _look(src: str, tag: str | None, all_ranks: bool) -> InspectReport:
    try:
        return inspect_source(find_source(src, tag=tag), all_ranks=all_ranks)
    except CheckpointError as error:
        path = as_path(src) if isinstance(as_path(src), RemotePath) else Path(os.path.abspath(src))
        if tag is None and _holds_rank_files(path):  # a damaged file beside a tag does not make the tag invalid
            source = Source(path.parent, path.name, open_tag(path), None, "deepspeed")
            found = inspect_source(source, all_ranks=all_ranks)
            return found.model_copy(update={"notes": [*found.notes, finding(error)]})
        return Inspection(
            path=str(path), tag=tag or "", problems=[finding(error)], remedy=error.remedy or None
        ).report()


def _matching(params: Sequence[InspectedParam], pattern: str) -> list[InspectedParam]:
    """The parameters whose names match a glob, or contain a text without ``*``, ``?`` and ``[``."""
    if any(sign in pattern for sign in "*?["):
        return [param for param in params if fnmatchcase(param.name, pattern)]
    return [param for param in params if pattern in param.name]


def _holds_rank_files(path: FilePath) -> bool:
    try:
        return any(map(is_rank_file, file_sizes(path)))
    except (CheckpointError, UnreadableError):
        return False


def inspect_source(source: Source, *, all_ranks: bool = False) -> InspectReport:
    """Describe a checkpoint; a damaged one as far as its files can be read.

    ``all_ranks`` opens every rank's headers and reports contradictions between them. Raises UnreadableError where the
    directory or a file cannot be read, SavedAgainError where it was saved again meanwhile, UnsupportedError for
    checkpoints of other ZeRO stages and Universal ones.

    Example::

        inspect_source(find_source("ckpt")).world_size
    """
    with one_save(source.tag_dir):
        found = _inspect(source, all_ranks).report()
    if found.problems and was_saved_again(source.tag_dir):
        raise saved_again(source.tag_dir)
    return found


def _inspect(source: Source, all_ranks: bool) -> Inspection:
    listing = list_tag(source.tag_dir)
    refuse_other_kinds(listing)
    found = Inspection(path=str(source.tag_dir), tag=source.tag, framework=source.framework, latest=source.latest)
    inspector = Inspector(listing, found)
    inspector.files(source)
    inspector.record()
    inspector.headers()
    inspector.params()
    if all_ranks:
        inspector.all_ranks()
    return found
