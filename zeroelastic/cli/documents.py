"""The documents of ``--json``: those of prove, timeline and doctor, the list of all verbs, and their JSON Schemas.

The documents of other verbs are the reports in ``zeroelastic.verbs``. No verb imports this module, whose models cost
time to build, but for a page of ``--html``; tests hold what the verbs print to them.

``python -m zeroelastic.cli.documents docs/schemas`` writes the schemas, and that of the "zeroelastic" block.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from zeroelastic.cli.machine import Doctor
from zeroelastic.verbs.convert.convert import ConvertReport, ExportReport
from zeroelastic.verbs.diff.diff import DiffReport
from zeroelastic.verbs.inspect.report import InspectReport
from zeroelastic.verbs.latest import LatestReport
from zeroelastic.verbs.ls import ListReport
from zeroelastic.verbs.plan.plan import PlanReport
from zeroelastic.verbs.prune import PruneReport
from zeroelastic.verbs.report import Failure, Format, Number, Part, Report
from zeroelastic.verbs.reshard.reshard import ReshardReport
from zeroelastic.verbs.show import ShowReport
from zeroelastic.verbs.verify.report import VerifyReport


class Check(Part):
    name: str
    ok: bool | None
    sentence: str
    details: list[str]


class ProvedSource(Part):
    path: str
    format: Format | None
    world_size: int
    step: int | None
    num_files: int
    num_params: int
    num_tensors: int
    bytes_read: int


class ContentRoots(Part):
    recorded: str | None
    files: str | None
    loaded_at_reference_size: str | None
    loaded_at_other_size: str | None
    saved_at_other_size: str | None
    loaded_back: str | None


class Run(Part):
    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    role: Literal["reference size", "reference size again", "other size", "back"]
    world_size: int
    seconds: float
    finished: bool
    record: str | None
    record_sha256: str | None
    saves_skipped: int | None = None
    precision: str | None = None
    device: str | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    samples: list[str | None] | None = None
    loads: Any = None
    resume_report: dict[str, Any] | None = None


class Machine(Part):
    host: str
    kernel: str
    cores: int
    device: str


class Prove(Report):
    verdict: Literal["PROVED", "NOT PROVED"]
    reasons: list[str]
    checks: list[Check]
    source: ProvedSource
    content_roots: ContentRoots
    steps: int
    tolerance: float
    losses: dict[str, list[Number | None]]
    runs: list[Run]
    script: list[str]
    command: list[str]
    versions: dict[str, str]
    machine: Machine
    written: str
    signed_off_by: str | None
    digest: str


class Restart(Part):
    since_kill: bool
    noticing: float | None
    rendezvous: float
    imports: float
    engine: float
    load: float
    first_step: float
    total: float
    our_share: float


class Point(Part):
    time: float
    step: int
    loss: Number | None


class Start(Part):
    time: float
    ended: float
    world_size: int
    nodes: int
    host: str
    restart_count: int | None
    in_place: bool | None
    tag: str | None
    tier: Literal["in-place", "memory", "node-local", "directory"] | None
    moved_bytes: int | None
    resumed_at: int | None
    proved: bool | None
    last_step: int | None
    lost_steps: int
    saves: int
    save_seconds: float
    save_times: list[float]
    memory_stall_seconds: float | None
    memory_bytes: int | None
    points: list[Point]
    end: Literal["done", "resized", "stopped", "error"] | None
    error: str | None
    restart: Restart | None


class NodeChange(Part):
    time: float
    change: int
    cause: str


class Timeline(Report):
    began: float
    lost_steps: int
    torn_lines: int
    plot: str | None
    starts: list[Start]
    nodes: list[NodeChange]


DOCUMENTS: dict[str, type[Report]] = {
    "inspect": InspectReport,
    "show": ShowReport,
    "verify": VerifyReport,
    "diff": DiffReport,
    "plan": PlanReport,
    "reshard": ReshardReport,
    "export": ExportReport,
    "convert": ConvertReport,
    "ls": ListReport,
    "latest": LatestReport,
    "prune": PruneReport,
    "prove": Prove,
    "timeline": Timeline,
    "doctor": Doctor,
}
"""What each verb prints, unless it fails."""


def check(verb: str, text: str) -> Report:
    """The document that a verb has printed. Raises pydantic.ValidationError for one that does not fit its schema."""
    model = Failure if "error" in json.loads(text) else DOCUMENTS[verb]
    return model.model_validate_json(text)


def schemas() -> dict[str, str]:
    """File name -> JSON Schema of each verb's document, and of the "zeroelastic" block of a DeepSpeed configuration."""
    from zeroelastic.deepspeed.options import Options

    made = {verb: _schema(model | Failure) for verb, model in DOCUMENTS.items()}
    made["options"] = Options.model_json_schema()
    return {f"{name}.json": json.dumps(schema, indent=1) + "\n" for name, schema in made.items()}


def _schema(either: Any) -> dict[str, Any]:
    return TypeAdapter(either).json_schema(mode="serialization", by_alias=True)


if __name__ == "__main__":
    for name, text in schemas().items():
        (Path(sys.argv[1]) / name).write_text(text)
