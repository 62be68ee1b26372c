"""The report of ``verify``: problems, and the checks that were made or not."""

from __future__ import annotations

from typing import Literal

from zeroelastic.checkpoint.tag_headers import Problem
from zeroelastic.verbs.report import Format, GivenPath, Part, Report, Seconds


class VerifiedFile(Part):
    """A file that a rank has written: its name, which rank, of which kind, and its size in bytes."""

    name: str
    rank: int
    kind: Literal["optimizer", "model", "whole_model"]
    bytes: int


class VerifyReport(Report):
    """The result of a verification. ``valid`` means no problems in what was checked; ``unchecked`` lists what was not.

    ``unsupported`` says what of the checkpoint is not read here and what resumes it: it is sound where it is ``valid``.
    ``content_root`` is computed from the files: None with ``quick``, or where not all of them could be read.
    ``recorded_root`` is that of the commit record. ``remedy`` says what to do about the problems. ``files`` are those
    that ranks have written, damaged or not. ``bytes_read`` bytes were read, the CRC-32 of ``num_records`` records and
    the digests of ``num_tensors`` tensors were computed. ``read_seconds`` is the part of ``seconds`` in which the
    payload was read.
    """

    path: GivenPath
    mode: Literal["full", "quick"]
    format: Format | None
    world_size: int
    content_root: str | None = None
    recorded_root: str | None = None
    problems: tuple[Problem, ...]
    remedy: str | None = None
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    unsupported: tuple[str, ...] = ()
    files: tuple[VerifiedFile, ...] = ()
    num_files: int = 0
    num_params: int = 0
    num_tensors: int = 0
    num_records: int = 0
    bytes_read: int = 0
    seconds: Seconds = 0.0
    read_seconds: Seconds = 0.0

    @property
    def valid(self) -> bool:
        """Return whether the checks found no problem."""
        return self.ok


class VerifyAllReport(Report):
    """The results for all tags of a run, newest first. It is ``ok`` where all are valid."""

    path: GivenPath
    mode: Literal["full", "quick"]
    tags: tuple[VerifyReport, ...]
    bytes_read: int = 0
    seconds: Seconds = 0.0
    read_seconds: Seconds = 0.0
