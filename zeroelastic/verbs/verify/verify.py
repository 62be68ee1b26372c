"""``zeroelastic.verify``: every byte of a checkpoint read once, and every problem reported with its place.

    report = verify_checkpoint(Path("ckpt/global_step100"))
    report.valid, report.problems

The steps: ``check_headers``, ``scan_ranks``, ``full_report``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from zeroelastic.checkpoint.checker import check_headers
from zeroelastic.checkpoint.tag_files import check_one_save, is_universal, one_save, watch
from zeroelastic.checkpoint.tag_headers import TagHeaders
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, with_remedy
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.io.storage import directory_exists
from zeroelastic.runs.locate import UNIVERSAL, find_source
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.runs.tags import require_own_files
from zeroelastic.verbs.interface import Progress, no_progress
from zeroelastic.verbs.verify.findings import VerifyAllReport, VerifyReport, full_report, not_opened, quick_report
from zeroelastic.verbs.verify.payload_scan import scan_ranks


@with_remedy()
def verify(
    src: str | os.PathLike[str],
    *,
    tag: str | None = None,
    quick: bool = False,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Check that a checkpoint is what its save left: complete, undamaged, of one save.

    Reads every byte of every rank's files once: headers, checksums of all records, digests of all tensors against the
    commit record; with ``quick`` only names, sizes and the record. Damage is reported, not raised.

    Raises UsageError where there is no checkpoint, UnsupportedError, UnreadableError, SavedAgainError.

    Example::

        import zeroelastic
        report = zeroelastic.verify("ckpt")
        print(report.valid, report.content_root)
        for problem in report.problems:
            print(problem.sentence)
    """
    return _verified(lambda: _found(src, tag), os.fspath(src), quick=quick, progress=progress)


@with_remedy()
def verify_all(
    src: str | os.PathLike[str],
    *,
    quick: bool = False,
    progress: Progress = no_progress,
) -> VerifyAllReport:
    """Check every checkpoint of a run, newest first, each as ``verify`` does.

    A tag that cannot be checked is in the report, not ``ok`` and without problems; the others are checked all the same.
    One that is removed meanwhile is left out. Raises UsageError where there are no checkpoints, UnreadableError where
    the directory cannot be listed.

    Example::

        import zeroelastic
        for report in zeroelastic.verify_all("ckpt").tags:
            print(report.path, report.valid)
    """
    began = time.monotonic()
    root = as_path(src)
    reports: list[VerifyReport] = []
    for name in [str(tag.tag_dir) for tag in RunStore(root).require_tags()]:
        try:
            found = _verified(partial(_open_native, as_path(name)), name, quick=quick, progress=progress)
        except (UnreadableError, UnsupportedError) as error:
            found = not_opened(name, error, quick=quick)
        if found.ok or directory_exists(as_path(name)):
            reports.append(found)
    return VerifyAllReport(
        ok=all(report.ok for report in reports),
        path=os.fspath(src),
        mode="quick" if quick else "full",
        tags=tuple(reports),
        bytes_read=sum(report.bytes_read for report in reports),
        seconds=time.monotonic() - began,
        read_seconds=sum(report.read_seconds for report in reports),
    )


def _found(src: str | os.PathLike[str], tag: str | None) -> FilePath:
    """Find a checkpoint. Raises CheckpointError where a framework's files next to it are of another save."""
    source = find_source(src, tag=tag)
    require_own_files(source.root)
    return source.tag_dir


def _open_native(path: FilePath) -> FilePath:
    """Open a tag of a run. Raises UnsupportedError for a Universal checkpoint."""
    tag_dir = open_tag(path)
    if is_universal(tag_dir):
        raise UnsupportedError(f"{path}: is {UNIVERSAL}.")
    return tag_dir


def _verified(find: Callable[[], FilePath], name: str, *, quick: bool, progress: Progress) -> VerifyReport:
    """Return the report on the tag that ``find`` finds; ``name`` is that of one that cannot be opened."""
    began = time.monotonic()
    try:
        headers = _open_headers(find(), quick=quick)
    except CheckpointError as error:  # a checkpoint whose headers cannot be read is a finding, too
        return not_opened(name, error, quick=quick).model_copy(update={"seconds": time.monotonic() - began})
    opened = time.monotonic()
    with nullcontext() if quick else progress("verify", headers.nbytes) as advance:
        report = _judged(headers, quick=quick, progress=advance)
    done = time.monotonic()
    read_seconds = 0.0 if quick else done - opened
    return report.model_copy(update={"seconds": done - began, "read_seconds": read_seconds})


def verify_checkpoint(
    tag_dir: FilePath, *, quick: bool = False, progress: ProgressFunction | None = None
) -> VerifyReport:
    """Check a checkpoint: its files, headers and record, and unless ``quick`` every byte of every rank's files.

    Without a commit record there are no digests to compare with; the report says so. ``progress`` is given the number
    of bytes done since it was last called. Memory: the headers of all ranks and a few MiB. Damage is reported, not
    raised. Raises MissingFileError where there is no ZeRO-3 checkpoint, UnsupportedError for one that is not read here,
    SavedAgainError for one that was saved again meanwhile.
    """
    return _judged(_open_headers(watch(tag_dir), quick=quick), quick=quick, progress=progress)


def _open_headers(tag_dir: FilePath, *, quick: bool) -> TagHeaders:
    with one_save(tag_dir):
        return check_headers(tag_dir, headers="none" if quick else "all")


def _judged(headers: TagHeaders, *, quick: bool, progress: ProgressFunction | None = None) -> VerifyReport:
    report = quick_report(headers) if quick else full_report(headers, scan_ranks(headers, progress=progress))
    check_one_save(headers.tag_dir)
    return report
