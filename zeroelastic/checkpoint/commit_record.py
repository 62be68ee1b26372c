"""The commit record ``zeroelastic.json``: what was saved, file by file and parameter by parameter, and its root.

Written by rank 0, or by one rank of each node with a disk of its own, after every file of the tag is on disk and before
``latest`` names the tag. docs/concepts/format.md describes the schema field by field. A record is read as hostile
input: validated in one pass before anything uses it.

The parameter table: parameters that have the same state keys, dtypes and scalars are one group, which says these once;
each parameter is a row of its group: the name, the shape, and the digest of each state key in the order of the sorted
keys.

Everything that is read from a tag is of one save, although another job may save the tag again meanwhile: a load or a
verb looks at the tag directory once (``watch``), passes that path to all readers, and looks again when it has read
everything (``one_save``). Every save writes its commit record anew, so where there is one its state tells; other
checkpoints are told by the states of their files, which DeepSpeed rewrites in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import repeat
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
)
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
from zeroelastic.errors import CheckpointError, MissingFileError, NewerFormatError, without_pydantic
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_whole
from zeroelastic.torch_file.header import DTYPE_BYTES

RECORD_NAME = "zeroelastic.json"
RECORD_VERSION = 1
OVERWRITTEN = f"(If DeepSpeed overwrote this tag without zeroelastic, remove {RECORD_NAME}.)"

_MAX_RECORD_BYTES = 1 << 30  # about 120 bytes a parameter: eight million of them

_CHECKSUM = re.compile(rb',[ \n\r\t]*"checksum"[ \n\r\t]*:[ \n\r\t]*"([0-9a-f]{64})"[ \n\r\t]*\}[ \n\r\t]*\Z')

CheckpointFormat = Literal["elastic", "rigid"]

_Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]{1,255}$")]


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return dtype


DTypeName = Annotated[str, AfterValidator(_known_dtype)]
TpRank = Annotated[int, Field(ge=0, lt=1 << 16)]
_Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 62)], ...], Field(max_length=64)]
_TensorDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]


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
    rows: list[tuple[str, _Shape, tuple[_TensorDigest, ...]]]

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


class SavedWith(Schema):
    """The software that wrote the checkpoint."""

    zeroelastic: str
    deepspeed: str
    torch: str


class CommitRecord(Schema):
    """The whole record. Invariant: ``content_root`` is the root of ``params``, checked when it is read.

    ``files`` are sizes in bytes by name.
    ``directories`` are the digests of the files' zip directories (``torch_file.header.directory_digest``), which hold
    the name, place, size and CRC-32 of everything in a file; files that are no zip archives have none. Of
    ``mp_rank_XX_model_states.pt`` on node-local disks, a node's record states the node's own.
    ``committed_at`` is in seconds since 1970, and later than that of the save that the run was loaded from or had
    committed before. ``follows`` are the saves on the disk after which a checkpoint in memory was made: that which was
    loaded or committed last, and that which was begun last. ``trained_params`` is the digest of the trained parameters'
    names and shapes (``params_digest``), of tensor parallel rank 0: it tells whose the checkpoints in one directory are
    (``runs.tags``). ``excluded_by`` says what kept frozen weights out of the files, the option ``"frozen"`` or the
    argument of ``save_checkpoint``. ``own_weights``: the weights of the model were not the master weights,
    cast; None: that is not known.
    """

    format_version: Annotated[int, Field(ge=RECORD_VERSION, le=RECORD_VERSION)]
    checkpoint_format: CheckpointFormat
    save_id: _Id
    tag: str
    world_size: Annotated[int, Field(ge=1, le=1 << 24)]
    tp_size: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    lost_micro_batches: Annotated[int, Field(ge=0)] = 0
    global_steps: int
    train_batch_size: int
    committed_at: Annotated[float, Field(gt=0, lt=1 << 40)] | None = None
    follows: tuple[_Id, ...] = ()
    trained_params: _Id | None = None
    excluded_by: Literal["option", "argument"] | None = None
    own_weights: bool | None = False
    versions: SavedWith
    files: dict[_FileName, Annotated[int, Field(ge=0, lt=1 << 62)]]
    directories: dict[_FileName, _Digest] = Field(default={})
    params: ParamTable
    content_root: _Digest

    def contents(self) -> list[ParamContent]:
        """Return the saved tensors of each parameter, by every tensor parallel rank."""
        return self.params.contents()

    def excluded(self) -> list[ParamContent]:
        """Return the frozen parameters whose digests are recorded and whose weights are in no file."""
        if self.excluded_by is None:
            return []
        return [content for content in self.contents() if content.param.name not in self.params.trained]

    @property
    def excluded_how(self) -> str:
        """How the save was asked to leave frozen weights out."""
        return '"frozen": "exclude"' if self.excluded_by == "option" else "exclude_frozen_parameters=True"


def read_record(tag_dir: FilePath) -> CommitRecord | None:
    """The commit record of a tag directory, or None where there is none.

    Raises CheckpointError when it is there and cannot be believed: not JSON, not the schema, another version, a wrong
    root or checksum, or more than 1 GiB.
    """
    path = tag_dir / RECORD_NAME
    try:
        text = read_whole(path, limit=_MAX_RECORD_BYTES)
    except MissingFileError:
        return None
    end = _CHECKSUM.search(text)
    body, checksum = (text, "") if end is None else (text[: end.start()], end[1].decode())
    try:
        record = CommitRecord.model_validate_json(text if end is None else body + b"}")
    except ValidationError as error:
        version = _version(text)
        if version > RECORD_VERSION:
            raise NewerFormatError(
                f"{path}: format version {version} is newer than {RECORD_VERSION}. Upgrade zeroelastic to load it."
            ) from None
        raise CheckpointError(f"{path}: {_first_problem(error)}. The commit record is damaged.") from None
    root, found = record.params.root, hashlib.sha256(body).hexdigest()
    if root != record.content_root:
        raise CheckpointError(
            f"{path}: content_root is {record.content_root[:12]}..., its own table gives {root[:12]}.... The commit "
            "record is damaged."
        )
    if checksum != found:
        raise CheckpointError(
            f"{path}: its checksum is {checksum[:12] or None}..., its content gives {found[:12]}.... The commit "
            "record is damaged, or was edited by hand."
        )
    return record


def _version(text: bytes) -> int:
    """The format version that the text of a record states; 0 where it states none."""
    try:
        data = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return 0
    version = data.get("format_version") if isinstance(data, dict) else None
    return version if type(version) is int else 0


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"is not JSON ({without_pydantic(first['msg'])})"
    where = ".".join(str(part) for part in first["loc"]) or "the document"
    return f"{where}: {without_pydantic(first['msg'])}"


def record_text(record: CommitRecord) -> bytes:
    """The bytes of ``zeroelastic.json``: one parameter and one file a line, so that records can be compared by eye.

    Tensor parallelism, lost micro batches, time, followed saves and excluded weights are left out where there are none.
    """
    data = record.model_dump(mode="json", exclude={"params"}, exclude_defaults=True)
    lines = _lines({**data, "params": record.params.document()})
    body = "".join(lines).removesuffix("\n}").encode()
    return b'%b,\n "checksum": "%b"\n}\n' % (body, hashlib.sha256(body).hexdigest().encode())


def _lines(value: object, depth: int = 0) -> Iterator[str]:
    """Yield a value as JSON; entries of lists and objects of the first four levels each begin a line."""
    if depth == 4 or not value or not isinstance(value, (dict, list)):
        yield json.dumps(value)
        return
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    line = "\n" + " " * (depth + 1)
    yield begin
    for i, (key, one) in enumerate(zip(keys, value.values() if isinstance(value, dict) else value, strict=True)):
        yield f"{',' if i else ''}{line}{key}"
        yield from _lines(one, depth + 1)
    yield f"{line[:-1]}{end}"
