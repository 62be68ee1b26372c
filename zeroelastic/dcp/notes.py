"""JSON notes in a checkpoint of FSDP2 of all that it has no place for, so that the way back loses nothing.

A conversion to FSDP2 writes it under the key ``zeroelastic`` of the model's DCP directory, which torch does not read;
the way back takes it. A job of FSDP2 that saves again does not write it: what it then says is no longer there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zeroelastic.checkpoint.optimizer_file import ParamGroup
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import ScalarValue

NOTES_VERSION = 1


def _with_tuples(value: object) -> object:
    """A value of JSON, which has lists in place of tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Option = Annotated[Any, BeforeValidator(_with_tuples)]


class NativeNotes(BaseModel):
    """The facts of a ZeRO checkpoint that FSDP2 has no place for.

    ``options`` are the hyper-parameters of each group as the ZeRO run had them; ``kinds`` the type of each value of the
    optimizer's state that is no tensor, such as "pyint" for ``step``, where all parameters have the same.
    ``lr_scheduler`` is the state of a scheduler that torch does not have. ``buffers`` and ``tied`` say which tensors of
    the model are no parameters of their own; None where that is not known.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format_version: int = NOTES_VERSION
    counters: dict[str, _Count] = {}
    ds_config: dict[str, Any] | None = None
    stage: Annotated[int, Field(ge=1, le=3)] | None = None
    options: tuple[dict[str, _Option], ...] = ()
    kinds: dict[str, str] = {}
    lr_scheduler: dict[str, Any] | None = None
    buffers: tuple[str, ...] | None = None
    tied: dict[str, str] | None = None

    def text(self) -> str:
        """The notes as JSON."""
        return json.dumps(self.model_dump())


def read_notes(text: str) -> NativeNotes:
    """The notes of a JSON object; of another version none is known. Raises ValueError for other text."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return NativeNotes.model_validate_json(text) if found.get("format_version") == NOTES_VERSION else NativeNotes()


def kinds_of_scalars(part: TensorSet) -> dict[str, str]:
    """The type of each value that all parameters keep in one type."""
    kinds: dict[str, set[str]] = {}
    for scalars in part.scalars:
        for key, value in scalars.items():
            kinds.setdefault(key, set()).add(value.kind)
    return {key: found.pop() for key, found in kinds.items() if len(found) == 1}


def with_kind(value: ScalarValue, kind: str | None) -> ScalarValue:
    """Return the number in another type, or as it is where the type does not hold it."""
    if kind is None or value.value is None:
        return value
    made = ScalarValue(kind, int(value.value) if kind in _INTEGERS else float(value.value))
    return made if made.number() == value.number() else value


_INTEGERS = frozenset(["pyint", "int64", "int32", "int16", "int8", "uint8"])


def with_native_options(groups: Sequence[ParamGroup], notes: NativeNotes) -> tuple[ParamGroup, ...]:
    """The groups with the options that the ZeRO run had, in the values of now; as they are where it had others."""
    if len(notes.options) != len(groups):
        return tuple(groups)
    return tuple(
        ParamGroup({key: group.options.get(key, value) for key, value in own.items()}, group.params)
        for group, own in zip(groups, notes.options, strict=True)
    )
