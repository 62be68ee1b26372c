"""``zeroelastic.inspect``: what a checkpoint is, from its headers, and what is wrong with it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeroelastic.checkpoint.optimizer_file import ScalerState
from zeroelastic.checkpoint.tag_files import is_rank_file
from zeroelastic.errors import CheckpointError, UnreadableError, finding, with_remedy
from zeroelastic.io.paths import FilePath, RemotePath, as_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.json_document import document
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.torch_file.header import DType
from zeroelastic.verbs.inspect.inspect import inspect_source
from zeroelastic.verbs.inspect.model import KINDS, Inspection, ParamInfo

_FILES = ("num_missing", "missing", "stale", "odd", "leftovers", "folders")


@dataclass(frozen=True, slots=True)
class InspectReport:
    """What was found: ``inspection`` has everything, ``params`` are the parameters that were asked for."""

    inspection: Inspection
    params: tuple[ParamInfo, ...]

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is whole as far as was looked, and zeroelastic works on it."""
        return not self.problems and not self.unsupported

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes the checkpoint invalid."""
        return tuple(self.inspection.problems)

    @property
    def remedy(self) -> str | None:
        """What to do about the problems; None where there are none."""
        return self.inspection.remedy or (CheckpointError.remedy if self.problems else None)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """What zeroelastic does not do with the checkpoint."""
        return tuple(self.inspection.unsupported)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing."""
        return tuple(self.inspection.notes)

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it, where that is known."""
        return self.inspection.world_size

    @property
    def step(self) -> int | None:
        """``global_steps`` of the engine that saved it, where that is known."""
        return self.inspection.step

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic inspect --json``; docs/reference/cli/inspect.md has its keys."""
        trained, frozen, tied = (self.inspection.count(kind) for kind in KINDS)
        found = asdict(replace(self.inspection, params=self.params, scaler=None))
        del found["kind"], found["scaler"], found["remedy"]
        for sized in (*found["params"], *found["state"].values()):
            sized["bytes"] = sized.pop("nbytes")
        body = {
            "problems": found.pop("problems"),
            "remedy": self.remedy,
            **{key: found.pop(key) for key in ("unsupported", "notes", "path", "tag")},
            "record": {"state": found.pop("record"), "content_root": found.pop("content_root")},
            "totals": {
                "params": trained[0] + frozen[0],
                "numel": trained[1] + frozen[1],
                "trained_params": trained[0],
                "trained_numel": trained[1],
                "frozen_params": frozen[0],
                "frozen_numel": frozen[1],
                "tied_params": tied[0],
                "state_bytes": self.inspection.state_bytes,
                "files": found.pop("num_files"),
                "disk_bytes": found.pop("disk_bytes"),
            },
            "loss_scaler": _scaler_document(self.inspection.scaler),
            "files": {key: found.pop(key) for key in _FILES},
            **found,
        }
        return document(body, ok=self.ok)


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
    return InspectReport(found, found.params if params is None else found.matching(params))


def _look(src: str, tag: str | None, all_ranks: bool) -> Inspection:
    try:
        return inspect_source(find_source(src, tag=tag), all_ranks=all_ranks)
    except CheckpointError as error:
        path = as_path(src) if isinstance(as_path(src), RemotePath) else Path(os.path.abspath(src))
        if tag is None and _holds_rank_files(path):  # a damaged file beside a tag does not make the tag invalid
            source = Source(path.parent, path.name, open_tag(path), None, "deepspeed")
            found = inspect_source(source, all_ranks=all_ranks)
            found.notes.append(finding(error))
            return found
        return Inspection(path=str(path), tag=tag or "", problems=[finding(error)], remedy=error.remedy or None)


def _holds_rank_files(path: FilePath) -> bool:
    try:
        return any(map(is_rank_file, file_sizes(path)))
    except (CheckpointError, UnreadableError):
        return False


def _scaler_document(scaler: ScalerState | None) -> dict[str, object] | None:
    if scaler is None:
        return None
    attributes = {key: value.name if isinstance(value, DType) else value for key, value in scaler.attributes.items()}
    return {**asdict(replace(scaler, attributes={})), "attributes": attributes}
