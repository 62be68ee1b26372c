"""What the documents of all verbs have in common."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")
Text = Literal["nan", "inf", "-inf"]
Number = int | float | Text
"""Numbers that JSON does not have are text."""

Format = Literal["elastic", "rigid"]
Framework = Literal["deepspeed", "hf-trainer", "accelerate", "lightning"]


class Part(BaseModel):
    """An object within a document."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class Document(Part):
    """What every document begins with; ``ok`` is whether the exit code is 0."""

    schema_version: Literal[1]
    ok: bool


class Failure(Document):
    """What every verb prints when it fails: the sentence that is on stderr, too."""

    ok: Literal[False]
    error: str


class Sides(Part, Generic[T]):
    """A value of each of two checkpoints."""

    a: T
    b: T
