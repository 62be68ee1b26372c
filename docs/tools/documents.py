"""The documents of ``--json``: the report of each verb, and their JSON Schemas.

docs/schemas is made of them (reference.py), and tests hold what the verbs print to them.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from zeroelastic.cli.doctor import Doctor
from zeroelastic.verbs.convert.convert import ConvertReport, ExportReport
from zeroelastic.verbs.diff import DiffReport
from zeroelastic.verbs.inspect.report import InspectReport
from zeroelastic.verbs.interface import Failure, Report
from zeroelastic.verbs.plan import PlanReport
from zeroelastic.verbs.prune import PruneReport
from zeroelastic.verbs.reshard.plan import ReshardReport
from zeroelastic.verbs.tags import LatestReport, ListReport
from zeroelastic.verbs.verify.findings import VerifyAllReport, VerifyReport

DOCUMENTS: dict[str, type[Report]] = {
    "inspect": InspectReport,
    "verify": VerifyReport,
    "verify-all": VerifyAllReport,
    "diff": DiffReport,
    "plan": PlanReport,
    "reshard": ReshardReport,
    "export": ExportReport,
    "convert": ConvertReport,
    "ls": ListReport,
    "latest": LatestReport,
    "prune": PruneReport,
    "doctor": Doctor,
}
"""The document of each verb, unless it fails; ``verify --all`` prints another document than ``verify``."""


def check(verb: str, text: str) -> Report:
    """The document that a verb has printed. Raises pydantic.ValidationError for one that does not fit its schema."""
    data = json.loads(text)
    name = "verify-all" if verb == "verify" and "tags" in data else verb
    model = Failure if "error" in data else DOCUMENTS[name]
    return model.model_validate_json(text)


def schemas() -> dict[str, str]:
    """File name -> JSON Schema of each verb's document, and of the "zeroelastic" block of a DeepSpeed configuration."""
    from zeroelastic.deepspeed.options import Options

    made = {verb: _schema(model | Failure) for verb, model in DOCUMENTS.items()}
    made["options"] = Options.model_json_schema()
    return {f"{name}.json": json.dumps(schema, indent=1) + "\n" for name, schema in made.items()}


def _schema(either: Any) -> dict[str, Any]:
    return TypeAdapter(either).json_schema(mode="serialization", by_alias=True)
