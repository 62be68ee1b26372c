"""The description of one run of a proof, and the record of its ranks: plain data, exchanged as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from zeroelastic.io.atomic import write_atomically
from zeroelastic.testing.state import Fingerprints

Role = Literal["reference size", "reference size again", "other size", "back"]
"""The checkpoint at the size to compare with, twice, and at the other size; then that size's save, loaded back."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The description of one run. ``folder`` is its own: everything that it records is written there.

    Recording begins when the script loads ``source``, a tag directory; with ``instead`` (save directory, tag) that tag
    is loaded in its place. The run is stopped after ``steps`` optimizer steps; with ``save_to`` (directory, tag) it
    saves there first. Writes to ``protected`` paths and everything below them are refused.
    """

    role: Role
    world_size: int
    steps: int
    source: str
    folder: str
    protected: tuple[str, ...] = ()
    instead: tuple[str, str] | None = None
    save_to: tuple[str, str] | None = None

    @property
    def record_path(self) -> Path:
        """Where the first rank writes its record."""
        return Path(self.folder) / "record.json"

    @property
    def log_path(self) -> Path:
        """The output of the ranks."""
        return Path(self.folder) / "log.txt"

    def failure_path(self, rank: int) -> Path:
        """Where a rank writes its Failure."""
        return Path(self.folder) / f"failure-{rank}.json"


@dataclass(slots=True)
class RunRecord:
    """The record of a run. States are gathered over its ranks, tensors as fingerprints.

    ``loaded`` is the state when the checkpoint's load returned, ``started`` that at the first forward pass after it,
    ``ended`` that after the last step. ``replicas`` are differences between ranks in replicated state. ``losses`` and
    ``samples`` are by optimizer step: the mean over the global batch, and a digest of its samples, whatever their
    order. ``loads`` are the paths that the script loaded from. ``report`` is the resume report, as plain values.
    """

    role: Role
    world_size: int
    finished: bool = False
    loads: list[str] = field(default_factory=list)
    report: dict[str, Any] | None = None
    loaded: Fingerprints | None = None
    started: Fingerprints | None = None
    ended: Fingerprints | None = None
    replicas: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[str | None] = field(default_factory=list)
    global_batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    device: str | None = None
    saves_skipped: int = 0
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a rank."""

    rank: int
    error: str
    traceback: str


def write_run(path: Path, run: RunSpec) -> None:
    """Write the description of a run."""
    path.write_text(json.dumps(asdict(run), indent=1) + "\n")


def read_run(path: Path) -> RunSpec:
    """Read what ``write_run`` wrote."""
    return TypeAdapter(RunSpec).validate_json(path.read_bytes())


def write_record(path: Path, record: RunRecord) -> None:
    """Write a record, whole or not at all."""
    write_atomically(path, f"{json.dumps(asdict(record), indent=1)}\n".encode(), sync=False)


def read_record(path: Path) -> RunRecord:
    """Read what ``write_record`` wrote."""
    return TypeAdapter(RunRecord).validate_json(path.read_bytes())
