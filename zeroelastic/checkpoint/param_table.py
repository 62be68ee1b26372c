"""The parameter table of a commit record: in columns, and as rows of text in JSON.

Parameters that have the same state keys, dtypes and scalars are one group, which says these once; each parameter is a
row, ``"0123456789abcdef fedcba9876543210 [4,7] model.weight"``: the digest of each state key in the order of the
sorted keys, the shape, and the name, which is the rest of the row (docs/concepts/format.md).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import repeat
from json.encoder import encode_basestring_ascii
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from zeroelastic.core.digest import (
    ContentGroup,
    ParamContent,
    ScalarValue,
    UInt64Array,
    group_contents,
    interleaved,
    root_of_groups,
    sorted_order,
)
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, shown
from zeroelastic.torch_file.header import DTYPE_BYTES

_ROWS = 1 << 14  # rows that are text at one time
_SHAPE = re.compile(r"\[(?:(?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18})){0,63})?\]")
_MAX_SIZE = 1 << 62
_NO_ROWS = '"rows":[]'


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return dtype


DTypeName = Annotated[str, AfterValidator(_known_dtype)]
TpRank = Annotated[int, Field(ge=0, lt=1 << 16)]


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


class _Rows(Schema):
    """A group of the table, as JSON has it."""

    trainable: bool
    tp_rank: TpRank = 0
    tensors: dict[str, DTypeName]
    scalars: dict[str, ScalarRecord]
    rows: list[str]


class _ListOfGroups(Schema):
    params: list[_Rows]


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

    @property
    def digests(self) -> dict[tuple[str, str], tuple[str, int]]:
        """The dtype and the digest of each tensor by parameter and state key."""
        return {
            (name, key): (dtype, digest)
            for group in self.groups
            for name, row in zip(group.names, group.digests.tolist(), strict=True)
            for (key, dtype), digest in zip(group.tensors, row, strict=True)
        }

    def contents(self) -> list[ParamContent]:
        """What was saved of each parameter, sorted by name and tensor parallel rank."""
        places = [
            zip(group.names, repeat(group.tp_rank), repeat(number), range(len(group.names)))
            for number, group in enumerate(self.groups)
        ]
        return [self.groups[number].content(row) for *_, number, row in merge(*places)]

    def __len__(self) -> int:
        return sum(len(group.names) for group in self.groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamTable) and (self.trained, self.contents()) == (other.trained, other.contents())


def param_records(contents: Iterable[ParamContent], trainable: frozenset[str]) -> ParamTable:
    """The record's parameter table."""
    return ParamTable(group_contents(contents, trainable))


def read_params(data: dict[str, object]) -> tuple[ParamTable, str]:
    """The table of a record, which is taken out of the record's JSON, and the JSON's checksum.

    Raises ValidationError, and CheckpointError for a row that is none; both name the place.
    """
    params = {"params": data["params"]} if "params" in data else {}
    groups = _ListOfGroups.model_validate(params).params
    checksum = record_checksum(data)
    del data["params"], params  # frees rows as they are read
    return ParamTable([_read_group(group, number) for number, group in enumerate(groups)]), checksum


def record_checksum(data: Mapping[str, object]) -> str:
    """The SHA-256 of a record's other fields as sorted JSON without spaces: 64 hexadecimal digits.

    The rows of files, which have checks of their own, are left out.
    """
    covered = {key: value for key, value in data.items() if key not in ("checksum", "file_rows")}
    return checksum_of(covered, rows_of(data))


def _read_group(group: _Rows, number: int) -> ContentGroup:
    width = 17 * len(group.tensors)
    digests: list[UInt64Array] = [np.empty((0, len(group.tensors)), dtype=np.uint64)]
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    known: dict[str, tuple[int, ...] | None] = {}
    for at in range(0, len(group.rows), _ROWS):
        window = group.rows[at : at + _ROWS]
        group.rows[at : at + _ROWS] = [""] * len(window)  # frees rows that were read
        found = _digests([row[:width] for row in window], len(group.tensors))
        ends = [row.find(" ", width) for row in window]
        texts = [row[width:end] for row, end in zip(window, ends, strict=True)]
        known |= {text: _shape(text) for text in {*texts} - known.keys()}
        sizes = [shape for shape in map(known.__getitem__, texts) if shape is not None]
        if found is None or len(sizes) < len(window) or -1 in ends:
            wrong = next((i for i, row in enumerate(window) if not _is_row(row, len(group.tensors))), 0)
            raise CheckpointError(
                f"params.{number}.rows.{at + wrong}: {shown(window[wrong])} is not {len(group.tensors)} digests, a "
                "shape and a name"
            )
        digests.append(found)
        names += [row[end + 1 :] for row, end in zip(window, ends, strict=True)]
        shapes += sizes
    table = np.concatenate(digests)
    order = sorted_order(names)
    if (np.diff(order) != 1).any():
        names, shapes, table = [names[i] for i in order], [shapes[i] for i in order], table[order]
    return ContentGroup(
        tensors=tuple(sorted(group.tensors.items())),
        scalars={key: ScalarValue(scalar.kind, scalar.value) for key, scalar in group.scalars.items()},
        tp_rank=group.tp_rank,
        trainable=group.trainable,
        names=names,
        shapes=shapes,
        digests=table,
    )


def _digests(heads: Sequence[str], count: int) -> UInt64Array | None:
    """The digests that rows begin with, shape ``(num_rows, count)``; None where one has none."""
    text = "".join(heads)
    try:
        data = bytes.fromhex(text)
    except ValueError:
        return None
    if {*map(len, heads)} != {17 * count} or (data.hex(" ", 8) + " " if data else "") != text:
        return None
    return np.frombuffer(data, dtype=">u8").reshape(len(heads), count).astype(np.uint64)


def _is_row(row: str, count: int) -> bool:
    text, space, _ = row[17 * count :].partition(" ")
    return bool(space) and _digests([row[: 17 * count]], count) is not None and _shape(text) is not None


def _shape(text: str) -> tuple[int, ...] | None:
    shape = tuple(json.loads(text)) if _SHAPE.fullmatch(text) else None
    return shape if shape is None or all(size < _MAX_SIZE for size in shape) else None


def group_json(group: ContentGroup) -> dict[str, object]:
    """A group as JSON has it, without its rows."""
    return {
        "trainable": group.trainable,
        **({"tp_rank": group.tp_rank} if group.tp_rank else {}),
        "tensors": dict(group.tensors),
        "scalars": {key: {"kind": s.kind, "value": s.value} for key, s in sorted(group.scalars.items())},
        "rows": [],
    }


def group_rows(group: ContentGroup) -> Iterator[bytes]:
    """The rows of a group as JSON strings with commas between them, some thousand at a time."""
    text_of = {shape: str(list(shape)).replace(" ", "").encode() for shape in set(group.shapes)}
    for at in range(0, len(group.names), _ROWS):
        here = slice(at, at + _ROWS)
        names = [encode_basestring_ascii(name)[1:].encode() for name in group.names[here]]
        digests = group.digest_texts(here, ['"', *[" "] * len(group.tensors)])
        columns = [digests, [text_of[shape] for shape in group.shapes[here]], names]
        yield ((b"%b%b %b," * len(names)) % interleaved(columns))[:-1]


def rows_of(data: Mapping[str, object]) -> list[Iterator[bytes]]:
    """The rows in the JSON of a record, for each group as of ``group_rows``."""
    params = data.get("params")
    groups = [group for group in params if isinstance(group, dict)] if isinstance(params, list) else []
    return [_joined(group["rows"]) for group in groups if isinstance(group.get("rows"), list)]


def _joined(rows: list[str]) -> Iterator[bytes]:
    for at in range(0, len(rows), _ROWS):
        yield ",".join(map(encode_basestring_ascii, rows[at : at + _ROWS])).encode()


def checksum_of(data: Mapping[str, object], rows: Sequence[Iterable[bytes]]) -> str:
    """The SHA-256 of a record as sorted JSON without spaces, where ``rows`` are those of its groups.

    Memory: that of the record without rows. Raises CheckpointError for JSON that has ``rows`` in other places.
    """
    params = data.get("params")
    if rows and isinstance(params, list):
        data = {**data, "params": [{**group, "rows": []} for group in params]}
    parts = json.dumps(data, sort_keys=True, separators=(",", ":")).split(_NO_ROWS)
    if len(parts) != len(rows) + 1:
        raise CheckpointError("has rows where there should be none")
    checksum = hashlib.sha256(parts[0].encode())
    for pieces, part in zip(rows, parts[1:], strict=True):
        checksum.update(_NO_ROWS[:-1].encode())
        for i, piece in enumerate(pieces):
            checksum.update(b"," * (i > 0))
            checksum.update(piece)
        checksum.update(f"]{part}".encode())
    return checksum.hexdigest()


def table_text(groups: Sequence[Mapping[str, object]], rows: Sequence[Sequence[bytes]]) -> Iterator[bytes]:
    """The JSON of groups with their rows, as of ``group_rows``: one parameter a line."""
    for i, (group, pieces) in enumerate(zip(groups, rows, strict=True)):
        yield b",\n  " * (i > 0) + json.dumps(group)[:-2].encode()
        for j, piece in enumerate(pieces):
            # A quote inside a row follows a backslash, so that this is the end of one row and the begin of the next.
            yield b"," * (j > 0) + b"\n   " + piece.replace(b'","', b'",\n   "')
        yield b"\n  ]}"
