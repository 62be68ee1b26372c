"""Common parts of all reports.

The report of a verb is one pydantic model: its function returns it, ``--json`` prints it, the terminal and the page of
``--html`` render it. Its fields are the keys of the document, in this order; an unknown or missing key is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PlainSerializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from zeroelastic.io.paths import absolute

SCHEMA_VERSION: Literal[1] = 1
"""Of all documents: it changes when a key of any of them changes its name or its meaning."""

T = TypeVar("T")
Text = Literal["nan", "inf", "-inf"]
Number = int | float | Text
"""Numbers that JSON does not have are text."""

GivenPath = Annotated[str, PlainSerializer(absolute, return_type=str)]
"""A path as it was given; in the document it is absolute."""

Seconds = Annotated[float, PlainSerializer(lambda seconds: round(seconds, 3), return_type=float)]
"""A time; the document has it to the millisecond."""

Format = Literal["elastic", "rigid"]
Framework = Literal["deepspeed", "hf-trainer", "accelerate", "lightning"]


class Part(BaseModel):
    """An object within a report."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        populate_by_name=True,
        json_schema_serialization_defaults_required=True,
    )


class Report(Part):
    """The first fields of every report; ``ok`` is whether the command exits with 0.

    The document has the fields ``only_where_given`` where they are not None.
    """

    only_where_given: ClassVar[frozenset[str]] = frozenset()
    schema_version: Literal[1] = SCHEMA_VERSION
    ok: bool

    def to_json(self) -> dict[str, Any]:
        """The document that the command prints with ``--json``; docs/schemas has its keys, verb by verb."""
        absent = {name for name in self.only_where_given if getattr(self, name) is None}
        return {key: _json_proper(value) for key, value in self.model_dump(by_alias=True, exclude=absent).items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, which requires only the fields that every document has."""
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        own["required"] = [name for name in own.get("required", ()) if name not in cls.only_where_given]
        return schema


class Failure(Report):
    """The document of a verb that failed: the sentence that is on stderr, too."""

    ok: Literal[False]
    error: str


class Sides(Part, Generic[T]):
    """A value of each of two checkpoints."""

    a: T
    b: T


def _json_proper(value: object) -> object:
    """The value in strict JSON: NaN and infinities, which JSON does not have, become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_proper(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_proper(item) for item in value]
    return value
