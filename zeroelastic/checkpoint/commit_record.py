"""The commit record ``zeroelastic.json``: what was saved, file by file and parameter by parameter, and its root.

Written by rank 0, or by one rank of each node with a disk of its own, after every file of the tag is on disk and before
``latest`` names the tag. docs/concepts/format.md describes the schema field by field. A record is read as hostile
input: validated in one pass before anything uses it.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from zeroelastic.checkpoint.param_table import (
    ParamTable,
    Schema,
    checksum_of,
    group_json,
    group_rows,
    read_params,
    table_text,
)
from zeroelastic.core.digest import ParamContent
from zeroelastic.errors import CheckpointError, MissingFileError, NewerFormatError, without_pydantic
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range, read_whole

RECORD_NAME = "zeroelastic.json"
RECORD_VERSION = 3

_HEAD_BYTES = 4096
_MAX_RECORD_BYTES = 1 << 30  # about 100 bytes a parameter: ten million of them

CheckpointFormat = Literal["elastic", "rigid"]

_Root = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]{1,255}$")]


class Versions(Schema):
    """The software that wrote the checkpoint."""

    zeroelastic: str
    deepspeed: str
    torch: str


class CommitRecord(Schema):
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
    directories: dict[_FileName, _Root] = Field(default={})
    params: ParamTable
    content_root: _Root

    def contents(self) -> list[ParamContent]:
        """What was saved of each parameter, by every tensor parallel rank."""
        return self.params.contents()


def read_record(tag_dir: FilePath) -> CommitRecord | None:
    """The commit record of a tag directory, or None where there is none.

    Raises CheckpointError when it is there and cannot be believed: not JSON, not the schema, a newer format, a root
    that is not the root of its own table, a checksum that is not that of the rest, or more than 1 GiB.
    """
    path = tag_dir / RECORD_NAME
    try:
        text = read_whole(path, limit=_MAX_RECORD_BYTES).decode("utf-8")  # of bytes, json would guess the encoding
    except MissingFileError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). The commit record is damaged.") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). The commit record is damaged.") from None
    del text
    version = data.get("format_version") if isinstance(data, dict) else None
    if type(version) is int and version > RECORD_VERSION:
        raise NewerFormatError(
            f"{path}: format version {version} is newer than {RECORD_VERSION}. Upgrade zeroelastic to load it."
        )
    checksum = data.pop("checksum", None) if isinstance(data, dict) else None
    try:
        record, found = _validated(data, version if type(version) is int and version > 0 else RECORD_VERSION)
    except (ValidationError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {_first_problem(error)}. The commit record is damaged.") from None
    root = record.params.root
    if root != record.content_root:
        raise CheckpointError(
            f"{path}: content_root is {record.content_root[:12]}..., its own table gives {root[:12]}.... The commit "
            "record is damaged."
        )
    # Older records may have neither directories nor a checksum.
    if checksum != found and (checksum is not None or record.directories or record.format_version >= 3):
        raise CheckpointError(
            f"{path}: its checksum is {str(checksum)[:12]}..., its content gives {found[:12]}.... The commit "
            "record is damaged, or was edited by hand."
        )
    return record


def _validated(data: object, version: int) -> tuple[CommitRecord, str]:
    """The record of its JSON, whose table is taken out of it, and the checksum that it should have."""
    if not isinstance(data, dict):
        data = {"the document": data}
    params, checksum = read_params(data, version)
    return CommitRecord.model_validate({**data, "params": params}), checksum


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


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        return f"{where}: {without_pydantic(first['msg'])}"
    return str(error)


def record_text(record: CommitRecord) -> bytes:
    """The bytes of ``zeroelastic.json``: one parameter a line, so that two records can be compared by eye.

    Records of older versions become ones of this version.

    Tensor parallelism, lost micro batches, directories, time and parent are not mentioned where there are none.
    """
    data = {**record.model_dump(mode="json", exclude={"params"}), "format_version": RECORD_VERSION}
    if not record.directories:
        del data["directories"]
    if record.tp_size == 1:
        del data["tp_size"]
    if record.lost_micro_batches == 0:
        del data["lost_micro_batches"]
    for key in ("committed_at", "parent"):
        if data[key] is None:
            del data[key]
    groups = [group_json(group) for group in record.params.groups]
    rows = [list(group_rows(group)) for group in record.params.groups]
    data["checksum"] = checksum_of({**data, "params": groups}, rows)
    head = json.dumps(data, indent=1).removesuffix("\n}")
    return b"".join([head.encode(), b',\n "params": [\n  ', *table_text(groups, rows), b"\n ]\n}\n"])
