"""What the functions of all verbs have in common: options, progress, and reports.

The report of a verb is one pydantic model: its function returns it, ``--json`` prints it, the terminal and the page of
``--html`` render it. Its fields are the keys of the document, in this order; an unknown or missing key is an error.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PlainSerializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from zeroelastic.errors import UsageError
from zeroelastic.io.paths import absolute, as_path, local_paths

Advance: TypeAlias = Callable[[int], None]
"""Takes the number of bytes done since it was last called."""

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with a title and the number of bytes when work begins; the context lasts as long as the work does."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # pathlib makes one slash of two


IN_A_STORE = (
    "Give the directory into which the run saves; what was uploaded is listed and removed with the tools of the store."
)
"""The advice where a command that looks after a run is given a URL."""

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_option(value: float | str, option: str) -> float:
    """The value of an option such as ``--min-age``, in seconds. Raises UsageError naming the option."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip().lower())
    if match is None:
        raise UsageError(f"{option}: {value!r} is not a time such as 90s, 15m, 2h or 1d.")
    return float(match[1]) * _SECONDS[match[2]]


def whole_option(value: int, option: str) -> int:
    """The value of an option that is a whole number, also one of numpy's. Raises UsageError naming the option."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{option}: {value!r} is not a whole number. Give one, such as 4.") from None


def choice_option(value: str | None, option: str, choices: Sequence[str]) -> None:
    """Raise UsageError naming the option where its value is none of the choices. The command line asks typer."""
    if value is not None and value not in choices:
        raise UsageError(f"{option}: there is no {value!r}. Give one of {', '.join(choices)}, or leave it out.")


@contextmanager
def no_progress(title: str, nbytes: int) -> Iterator[Advance]:
    """A ``Progress`` that shows nothing."""
    yield lambda more: None


def local_target(dst: str | os.PathLike[str]) -> Path:
    """The directory to write. Raises UsageError for a URL: only sources may be behind an object store."""
    if found := _URL.match(os.fspath(dst)):
        shown = f"{found[0]}/{os.fspath(dst)[found.end() :].lstrip('/')}"
        raise UsageError(f"{shown}: is a URL; targets are written to this machine. Write it here, then copy it there.")
    (path,) = local_paths([as_path(os.fspath(dst))])
    return path


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
