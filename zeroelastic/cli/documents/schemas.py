"""The document of each verb, and the JSON Schemas in docs/schemas, which are made from the models.

``python -m zeroelastic.cli.documents.schemas docs/schemas`` writes them, and that of the "zeroelastic" block.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zeroelastic.cli.documents.checkpoints import Diff, Inspect, Show, Verify
from zeroelastic.cli.documents.common import Document, Failure
from zeroelastic.cli.documents.copies import Convert, Export, Plan, Reshard
from zeroelastic.cli.documents.jobs import Doctor, Prove, Timeline
from zeroelastic.cli.documents.runs import Latest, Ls, Prune

DOCUMENTS: dict[str, type[Document]] = {
    model.__name__.lower(): model
    for model in (
        *(Inspect, Show, Verify, Diff, Plan, Reshard, Export, Convert),
        *(Ls, Latest, Prune, Prove, Timeline, Doctor),
    )
}
"""What each verb prints, unless it fails."""


def check(verb: str, text: str) -> Document:
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
    return TypeAdapter(either).json_schema(by_alias=True)


if __name__ == "__main__":
    for name, text in schemas().items():
        (Path(sys.argv[1]) / name).write_text(text)
