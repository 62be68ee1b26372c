"""The commit record ``zeroelastic.json``: what was saved, file by file and parameter by parameter, and its root.

Written by rank 0, or by one rank of each node with a disk of its own, after every file of the tag is on disk and before
``latest`` names the tag. The schema is described field by field in docs/format.md. A record is read as hostile input:
validated in one pass before anything uses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from zeroelastic.core.digest import ParamContent, ScalarValue, content_root
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, MissingFileError, NewerFormatError
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range, read_whole
from zeroelastic.torch_file.header import DTYPE_BYTES

RECORD_NAME = "zeroelastic.json"
RECORD_VERSION = 2

_HEAD_BYTES = 4096
_MAX_RECORD_BYTES = 1 << 30  # about 300 bytes a parameter: three million of them

CheckpointFormat = Literal["elastic", "rigid"]

_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
_Root = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]{1,255}$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TensorRecord(_Schema):
    """One tensor of one parameter: its dtype as saved and its digest, 16 hexadecimal digits."""

    dtype: str
    digest: _Digest

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}")
        return dtype


class ScalarRecord(_Schema):
    """One replicated scalar of optimizer state, such as step."""

    kind: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,16}$")]
    value: int | float | bool | None


class ParamRecord(_Schema):
    """One parameter: name, full shape, whether it is trained, its tensors by state key and its scalars.

    Under tensor parallelism every rank of it has parameters of its own: slices of some, copies of others.
    """

    name: str
    tp_rank: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 62)]], Field(max_length=64)]
    trainable: bool
    tensors: dict[str, TensorRecord]
    scalars: dict[str, ScalarRecord]

    def content(self) -> ParamContent:
        """The same as the digest module states it."""
        return ParamContent(
            param=Param(self.name, tuple(self.shape)),
            tensors={key: (tensor.dtype, int(tensor.digest, 16)) for key, tensor in self.tensors.items()},
            scalars={key: ScalarValue(scalar.kind, scalar.value) for key, scalar in self.scalars.items()},
            tp_rank=self.tp_rank,
        )


class Versions(_Schema):
    """The software that wrote the checkpoint."""

    zeroelastic: str
    deepspeed: str
    torch: str


class CommitRecord(_Schema):
    """The whole record. Invariant: ``content_root`` is the root of ``params``, checked when it is read.

    ``directories`` are the digests of the files' zip directories (``torchfile.directory_digest``), which hold the name,
    place, size and CRC-32 of everything in a file; files that are no zip archives, and older records, have none. Of
    ``mp_rank_XX_model_states.pt`` on node-local disks, a node's record states the node's own.
    ``committed_at`` is in seconds since 1970, and later than that of ``parent``, the save that the run was loaded from
    or had committed before; records of version 1 have neither. What stands before ``versions`` is short: ``read_head``.
    """

    format_version: Annotated[int, Field(ge=1)]
    checkpoint_format: CheckpointFormat
    save_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    tag: str
    world_size: Annotated[int, Field(ge=1, le=1 << 24)]
    tp_size: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    lost_micro_batches: Annotated[int, Field(ge=0)] = 0
    global_steps: int
    train_batch_size: int
    committed_at: Annotated[float, Field(gt=0, lt=1 << 40)] | None = None
    parent: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = None
    versions: Versions
    files: dict[_FileName, Annotated[int, Field(ge=0)]]
    directories: dict[_FileName, _Root] = {}
    params: list[ParamRecord]
    content_root: _Root

    def contents(self) -> list[ParamContent]:
        """What was saved of each parameter, by every tensor parallel rank."""
        return [param.content() for param in self.params]


def param_records(contents: Iterable[ParamContent], trainable: frozenset[str]) -> list[ParamRecord]:
    """The record's parameter table, sorted by name and tensor parallel rank."""
    return [
        ParamRecord(
            name=content.param.name,
            tp_rank=content.tp_rank,
            shape=list(content.param.shape),
            trainable=content.param.name in trainable,
            tensors={
                key: TensorRecord(dtype=dtype, digest=f"{digest:016x}")
                for key, (dtype, digest) in sorted(content.tensors.items())
            },
            scalars={
                key: ScalarRecord(kind=scalar.kind, value=scalar.value)
                for key, scalar in sorted(content.scalars.items())
            },
        )
        for content in sorted(contents, key=lambda content: (content.param.name, content.tp_rank))
    ]


def read_record(tag_dir: FilePath) -> CommitRecord | None:
    """The commit record of a tag directory, or None where there is none.

    Raises CheckpointError when it is there and cannot be believed: not JSON, not the schema, a newer format, a root
    that is not the root of its own table, a checksum that is not that of the rest, or more than 1 GiB.
    """
    path = tag_dir / RECORD_NAME
    try:
        text = read_whole(path, limit=_MAX_RECORD_BYTES)
    except MissingFileError:
        return None
    try:
        data = json.loads(text.decode("utf-8"))  # of bytes, json would guess the encoding
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). The commit record is damaged.") from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if type(version) is int and version > RECORD_VERSION:
        raise NewerFormatError(
            f"{path}: format version {version} is newer than {RECORD_VERSION}. Upgrade zeroelastic to load it."
        )
    checksum = data.pop("checksum", None) if isinstance(data, dict) else None
    try:
        record = CommitRecord.model_validate(data)
    except (ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: {_first_problem(error)}. The commit record is damaged.") from None
    root = content_root(record.contents())
    if root != record.content_root:
        raise CheckpointError(
            f"{path}: content_root is {record.content_root[:12]}..., its own table gives {root[:12]}.... The commit "
            "record is damaged."
        )
    if checksum is not None or record.directories:  # older records have neither
        found = record_checksum(data)
        if checksum != found:
            raise CheckpointError(
                f"{path}: its checksum is {str(checksum)[:12]}..., its content gives {found[:12]}.... The commit "
                "record is damaged, or was edited by hand."
            )
    return record


def read_head(path: FilePath) -> dict[str, object]:
    """The fields of a record before ``versions``, unchecked: from its first lines, where zeroelastic wrote it.

    Raises CheckpointError for a file that is empty or no JSON object.
    """
    head = read_range(path, 0, _HEAD_BYTES)
    if not head:
        raise CheckpointError(f"{path}: is empty.")
    short, found, _ = head.partition(b',\n "versions": ')
    data = _object(short + b"}") if found else None
    if data is None:
        data = _object(read_whole(path, limit=_MAX_RECORD_BYTES))
    if data is None:
        raise CheckpointError(f"{path}: is not JSON. The commit record is damaged.")
    return data


def _object(text: bytes) -> dict[str, object] | None:
    try:
        data = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def record_checksum(data: Mapping[str, object]) -> str:
    """The SHA-256 of a record's other fields as sorted JSON without spaces: 64 hexadecimal digits."""
    rest = {key: value for key, value in data.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc']) or 'the document'}: {first['msg']}"
    return str(error)


def record_text(record: CommitRecord) -> bytes:
    """The bytes of ``zeroelastic.json``: one parameter a line, so that two records can be compared by eye.

    Tensor parallelism, lost micro batches, directories, time and parent are not mentioned where there are none.
    """
    data = record.model_dump(mode="json")
    params = data["params"]
    if not record.directories:
        del data["directories"]
    if record.tp_size == 1:
        del data["tp_size"]
    if record.lost_micro_batches == 0:
        del data["lost_micro_batches"]
    for key in ("committed_at", "parent"):
        if data[key] is None:
            del data[key]
    for param in params:
        if param["tp_rank"] == 0:
            del param["tp_rank"]
    data["checksum"] = record_checksum(data)
    del data["params"]
    head = json.dumps(data, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(param, separators=(",", ":")) for param in params)
    return f'{head},\n "params": [\n{lines}\n ]\n}}\n'.encode()
