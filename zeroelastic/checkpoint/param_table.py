"""The parameter table of a commit record: as JSON has it, and in columns.

Parameters that have the same state keys, dtypes and scalars are one group, which says these once; each parameter is a
row of its group: the name, the shape, and the digest of each state key in the order of the sorted keys
(docs/concepts/format.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from heapq import merge
from itertools import repeat
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, core_schema

from zeroelastic.core.digest import (
    ContentGroup,
    ParamContent,
    ScalarValue,
    group_contents,
    root_of_groups,
    sorted_order,
)
from zeroelastic.core.layout import Param
from zeroelastic.torch_file.header import DTYPE_BYTES


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return dtype


DTypeName = Annotated[str, AfterValidator(_known_dtype)]
TpRank = Annotated[int, Field(ge=0, lt=1 << 16)]
_Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 62)], ...], Field(max_length=64)]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]


class Schema(BaseModel):
    """A part of the commit record, as JSON has it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class ScalarRecord(Schema):
    """One replicated scalar of optimizer state, such as step."""

    kind: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,16}$")]
    value: int | float | bool | None


def params_digest(params: Iterable[Param]) -> str:
    """A digest of the names and shapes of parameters with elements, in any order: 32 hexadecimal digits."""
    rows = sorted(json.dumps([param.name, *param.shape]) for param in params if param.numel)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]


class _GroupRows(Schema):
    """A group of the table, as JSON has it: each row is a name, a shape, and a digest of each tensor."""

    trainable: bool
    tp_rank: TpRank = 0
    tensors: dict[str, DTypeName]
    scalars: dict[str, ScalarRecord]
    rows: list[tuple[str, _Shape, tuple[_Digest, ...]]]

    def columns(self) -> ContentGroup:
        """The group in columns. Raises ValueError for a row that has not one digest for each tensor."""
        for i, (_, _, digests) in enumerate(self.rows):
            if len(digests) != len(self.tensors):
                raise ValueError(f"rows.{i} has {len(digests)} digests, and there are {len(self.tensors)} tensors")
        order = sorted_order([name for name, _, _ in self.rows]).tolist()
        names, shapes, digests = zip(*(self.rows[i] for i in order), strict=True) if order else ((), (), ())
        data = bytes.fromhex("".join(text for texts in digests for text in texts))
        return ContentGroup(
            tensors=tuple(sorted(self.tensors.items())),
            scalars={key: ScalarValue(scalar.kind, scalar.value) for key, scalar in self.scalars.items()},
            tp_rank=self.tp_rank,
            trainable=self.trainable,
            names=names,
            shapes=shapes,
            digests=np.frombuffer(data, dtype=">u8").reshape(len(names), len(self.tensors)).astype(np.uint64),
        )


class ParamTable:
    """The parameters of a commit record, in columns."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, groups: Sequence[ContentGroup]) -> None:
        self.groups = tuple(sorted(groups, key=lambda group: (group.tensors, group.tp_rank, not group.trainable)))

    @property
    def root(self) -> str:
        """The content root of the parameters."""
        return root_of_groups(self.groups)

    @property
    def trained(self) -> frozenset[str]:
        """The names of the trained parameters."""
        return frozenset(name for group in self.groups if group.trainable for name in group.names)

    @cached_property
    def digests(self) -> dict[tuple[str, str], tuple[str, int]]:
        """The dtype and the digest of each tensor by parameter and state key."""
        return {
            (name, key): (dtype, digest)
            for group in self.groups
            for name, row in zip(group.names, group.digests.tolist(), strict=True)
            for (key, dtype), digest in zip(group.tensors, row, strict=True)
        }

    def contents(self) -> list[ParamContent]:
        """Return the content of each parameter, sorted by name and tensor parallel rank."""
        places = [
            zip(group.names, repeat(group.tp_rank), repeat(number), range(len(group.names)))
            for number, group in enumerate(self.groups)
        ]
        return [self.groups[number].content(row) for *_, number, row in merge(*places)]

    def document(self) -> list[dict[str, object]]:
        """The table as JSON has it."""
        return [
            {
                "trainable": group.trainable,
                **({"tp_rank": group.tp_rank} if group.tp_rank else {}),
                "tensors": dict(group.tensors),
                "scalars": {key: {"kind": s.kind, "value": s.value} for key, s in sorted(group.scalars.items())},
                "rows": [
                    [name, shape, [f"{digest:016x}" for digest in digests]]
                    for name, shape, digests in zip(group.names, group.shapes, group.digests.tolist(), strict=True)
                ],
            }
            for group in self.groups
        ]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read a table from the JSON of the groups."""
        groups = handler.generate_schema(list[_GroupRows])
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(
                lambda found: cls([group.columns() for group in found]), groups
            ),
            python_schema=core_schema.is_instance_schema(cls),
        )

    def __len__(self) -> int:
        return sum(len(group.names) for group in self.groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamTable) and (self.trained, self.contents()) == (other.trained, other.contents())


def param_records(contents: Iterable[ParamContent], trainable: frozenset[str]) -> ParamTable:
    """The record's parameter table."""
    return ParamTable(group_contents(contents, trainable))
