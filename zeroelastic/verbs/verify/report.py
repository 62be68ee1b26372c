"""``zeroelastic.verify``: every byte of a checkpoint read once, and what is wrong with it."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import replace

from zeroelastic.checkpoint.marks import lift_mark
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import CheckpointError, UsageError, with_remedy
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.runs.locate import find_source
from zeroelastic.verbs.options import Progress, no_progress
from zeroelastic.verbs.verify.header_check import TagHeaders, check_headers
from zeroelastic.verbs.verify.verify import VerifyReport, damaged, verify_from_headers


@with_remedy()
def verify(
    src: str | os.PathLike[str],
    *,
    tag: str | None = None,
    quick: bool = False,
    lift_quarantine: bool = False,
    processes: Processes | None = None,
    progress: Progress = no_progress,
) -> VerifyReport:
    """Check that a checkpoint is what its save left: complete, undamaged, of one save.

    Reads every byte of every rank's files once: headers, checksums of all records, digests of all tensors against the
    commit record; with ``quick`` only names, sizes and the record. Damage is reported, not raised. ``lift_quarantine``
    removes the mark of damage from a checkpoint that is valid. Several ``processes`` share the reading; collective.

    Raises UsageError where there is no checkpoint, UnsupportedError, UnreadableError, SavedAgainError.

    Example::

        import zeroelastic
        report = zeroelastic.verify("ckpt")
        print(report.valid, report.content_root)
        for problem in report.problems:
            print(problem.sentence)
    """
    if lift_quarantine and quick:
        raise UsageError(
            "--lift-quarantine: only a full verification shows that a checkpoint is valid; leave --quick out."
        )
    processes = processes or Processes()
    began = time.monotonic()

    def open_headers() -> TagHeaders:
        tag_dir = find_source(src, tag=tag).tag_dir
        with one_save(tag_dir):
            return check_headers(tag_dir, quick=quick)

    try:
        headers = processes.all_or_raise(open_headers)
    except CheckpointError as error:  # a checkpoint whose headers cannot be read is a finding, too
        return replace(damaged(os.fspath(src), error, quick=quick), seconds=time.monotonic() - began)
    opened = time.monotonic()
    with nullcontext() if quick else progress("verify", headers.nbytes // processes.size) as advance:
        report = verify_from_headers(headers, quick=quick, progress=advance, processes=processes)
    done = time.monotonic()
    lifted = lift_quarantine and report.valid and processes.rank == 0 and _lift(headers.tag_dir)
    return replace(report, lifted=lifted, seconds=done - began, read_seconds=0.0 if quick else done - opened)


def _lift(tag_dir: FilePath) -> bool:
    if isinstance(tag_dir, RemotePath):
        raise UsageError(
            f"{tag_dir}: --lift-quarantine writes on this machine only. Run it where the directory is mounted, or "
            "remove the mark with the tools of the store."
        )
    return lift_mark(tag_dir)
