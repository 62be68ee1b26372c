"""The commit record ``zeroelastic.json``: what was saved, file by file and parameter by parameter, and its root.

Written by rank 0, or by one rank of each node with a disk of its own, after every file of the tag is on disk and before
``latest`` names the tag. docs/concepts/format.md describes the schema field by field. A record is read as hostile
input: validated in one pass before anything uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, SkipValidation, StringConstraints, ValidationError

from zeroelastic.checkpoint.file_table import (
    MAX_RANKS,
    ROW_BYTES,
    ROWS_BEGIN,
    ROWS_END,
    FileDirectories,
    FileNames,
    FileRow,
    FileRows,
    FileSizes,
    names_json,
    names_of_json,
    read_row,
    rows_text,
)
from zeroelastic.checkpoint.param_table import (
    ParamTable,
    Schema,
    checksum_of,
    group_json,
    group_rows,
    read_params,
    table_text,
)
from zeroelastic.checkpoint.shared_files import SharedFile
from zeroelastic.core.digest import ParamContent
from zeroelastic.errors import CheckpointError, MissingFileError, NewerFormatError, without_pydantic
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_size, read_range, read_whole

RECORD_NAME = "zeroelastic.json"
RECORD_VERSION = 4

_HEAD_BYTES = 4096
_MAX_RECORD_BYTES = 1 << 30  # about 100 bytes a parameter: ten million of them

CheckpointFormat = Literal["elastic", "rigid"]

_Root = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]{1,255}$")]


class Versions(Schema):
    """The software that wrote the checkpoint."""

    zeroelastic: str
    deepspeed: str
    torch: str


class _Files(Schema):
    """A name, or with ``ranks`` the names of that many ranks' files."""

    name: _FileName
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None


class _ListOfFiles(Schema):
    num_files: Annotated[int, Field(ge=0)]
    files: list[_Files]


class CommitRecord(Schema):
    """The whole record. Invariant: ``content_root`` is the root of ``params``, checked when it is read.

    ``files`` are sizes in bytes by name; of a record that ``read_record_by_range`` read, they and ``directories`` are
    read as they are asked for.
    ``directories`` are the digests of the files' zip directories (``torch_file.header.directory_digest``), which hold
    the name, place, size and CRC-32 of everything in a file; files that are no zip archives have none. Of
    ``mp_rank_XX_model_states.pt`` on node-local disks, a node's record states the node's own.
    ``committed_at`` is in seconds since 1970, and later than that of ``parent``, the save that the run was loaded from
    or had committed before. ``run`` is the same in every save of a run and of what is resumed from it; its first 16
    digits are the time at which the run began, in microseconds since 1970.
    ``trained_params`` is the digest of the trained parameters' names and shapes (``params_digest``), of tensor parallel
    rank 0. Both distinguish the checkpoints of two engines in one directory (``runs.order``). ``shared`` are the files
    beside the tag that have its frozen weights, of a lean save. What stands before ``versions`` is short:
    ``read_head``.
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
    parent: _Id | None = None
    run: _Id | None = None
    trained_params: _Id | None = None
    shared: Annotated[tuple[SharedFile, ...], Field(strict=False)] = ()
    versions: Versions
    files: Annotated[Mapping[str, int], SkipValidation]
    directories: Annotated[Mapping[str, str], SkipValidation] = Field(default={})
    params: ParamTable
    content_root: _Root

    def contents(self) -> list[ParamContent]:
        """What was saved of each parameter, by every tensor parallel rank."""
        return self.params.contents()


def read_record(tag_dir: FilePath) -> CommitRecord | None:
    """The commit record of a tag directory, or None where there is none.

    Raises CheckpointError when it is there and cannot be believed: not JSON, not the schema, another version, a root
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
    if type(version) is int and 0 < version < RECORD_VERSION:
        raise CheckpointError(
            f"{path}: format version {version} is older than {RECORD_VERSION}, and no release wrote it. Remove this "
            "file to load the checkpoint without its record, and save it again."
        )
    return _record_of(path, data)


def read_record_by_range(tag_dir: FilePath) -> tuple[CommitRecord | None, int]:
    """The commit record of a tag directory without the rows of its files, and the bytes that were read of it.

    Rows are read later, by range, and checked then; those of a record that zeroelastic has not written are read here.
    Returns and raises as ``read_record``.
    """
    path = tag_dir / RECORD_NAME
    size = file_size(path)
    if size is None:
        return None, 0
    text = read_range(path, 0, _HEAD_BYTES)
    short = _short_head(text) or {}
    num_files = short.get("num_files")
    end = size - len(ROWS_END) - num_files * ROW_BYTES if type(num_files) is int and num_files >= 0 else 0
    if short.get("format_version") == RECORD_VERSION and len(ROWS_BEGIN) < end <= _MAX_RECORD_BYTES:
        text = text[:end] + read_range(path, len(text), end - len(text))
        data = _object(text.removesuffix(ROWS_BEGIN) + b"}") if text.endswith(ROWS_BEGIN) else None
        if data is not None and "file_rows" not in data:
            return _record_of(path, data, rows_offset=end), len(text)
    return read_record(tag_dir), size


def with_rows_at(record: CommitRecord, tag_dir: FilePath | None) -> CommitRecord:
    """A record whose rows are read as they are asked for, from a directory; None where it is sent to other ranks."""
    if not isinstance(record.files, FileSizes):
        return record
    rows = record.files.rows.at(None if tag_dir is None else tag_dir / RECORD_NAME)
    return record.model_copy(update={"files": FileSizes(rows), "directories": FileDirectories(rows)})


def _record_of(path: FilePath, data: object, *, rows_offset: int | None = None) -> CommitRecord:
    """The record of its JSON, checked; its rows are at ``rows_offset`` of the file, or in the JSON."""
    checksum = data.pop("checksum", None) if isinstance(data, dict) else None
    try:
        record, found = _validated(data, None if rows_offset is None else path, rows_offset or 0)
    except (ValidationError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {_first_problem(error)}. The commit record is damaged.") from None
    root = record.params.root
    if root != record.content_root:
        raise CheckpointError(
            f"{path}: content_root is {record.content_root[:12]}..., its own table gives {root[:12]}.... The commit "
            "record is damaged."
        )
    if checksum != found:
        raise CheckpointError(
            f"{path}: its checksum is {str(checksum)[:12]}..., its content gives {found[:12]}.... The commit "
            "record is damaged, or was edited by hand."
        )
    return record


def _validated(data: object, path: FilePath | None, rows_offset: int) -> tuple[CommitRecord, str]:
    """The record of its JSON, whose tables are taken out of it, and the checksum that it should have."""
    if not isinstance(data, dict):
        data = {"the document": data}
    rows = data.pop("file_rows", None)
    params, checksum = read_params(data)
    of_files = {key: data.pop(key) for key in ("num_files", "files", "directories") if key in data}
    record = CommitRecord.model_validate({**data, "files": {}, "params": params})
    return record.model_copy(update=_read_files(record.save_id, of_files, rows, path, rows_offset)), checksum


def _read_files(
    save_id: str, data: Mapping[str, object], rows: object, path: FilePath | None, offset: int
) -> dict[str, Mapping[str, int] | Mapping[str, str]]:
    """The sizes and the digests of files, of the rows in the JSON or, with ``path``, of those in the file."""
    listed = _ListOfFiles.model_validate(data)
    names = names_of_json([(entry.name, entry.ranks) for entry in listed.files])
    if listed.num_files != len(names):
        raise CheckpointError(f"num_files: is {listed.num_files}, but files names {len(names)}")
    if path is not None:
        lazy = FileRows(path, names, save_id, offset)
        return {"files": FileSizes(lazy), "directories": FileDirectories(lazy)}
    if not isinstance(rows, list) or len(rows) != len(names):
        raise CheckpointError(f"file_rows: should be a list of {len(names)} rows")
    found = {name: read_row(save_id, names, place, rows[place]) for place, name in enumerate(names)}
    return {
        "files": {name: row.size for name, row in found.items()},
        "directories": {name: row.directory for name, row in found.items() if row.directory is not None},
    }


def read_head(path: FilePath) -> dict[str, object]:
    """The fields of a record before ``versions``, unchecked: from its first lines, where zeroelastic wrote it.

    Raises CheckpointError for a file that is empty or no JSON object.
    """
    head = read_range(path, 0, _HEAD_BYTES)
    if not head:
        raise CheckpointError(f"{path}: is empty.")
    data = _short_head(head)
    if data is None:
        data = _object(read_whole(path, limit=_MAX_RECORD_BYTES))
    if data is None:
        raise CheckpointError(f"{path}: is not JSON. The commit record is damaged.")
    return data


def _short_head(head: bytes) -> dict[str, object] | None:
    """What stands before ``versions`` in the first bytes of a record; None where zeroelastic has not written it."""
    short, found, _ = head.partition(b',\n "versions": ')
    return _object(short + b"}") if found else None


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
    """The bytes of ``zeroelastic.json``: one parameter and one file a line, so that records can be compared by eye.

    Tensor parallelism, lost micro batches, time, parent, run and shared files are not mentioned where there are none.
    """
    names = FileNames.of(record.files)
    elsewhere = {"params", "files", "directories", "versions", "content_root"}
    data = {
        **record.model_dump(mode="json", exclude=elsewhere, exclude_defaults=True),
        "num_files": len(names),
        "versions": record.versions.model_dump(mode="json"),
        "files": names_json(names),
        "content_root": record.content_root,
    }
    groups = [group_json(group) for group in record.params.groups]
    rows = [list(group_rows(group)) for group in record.params.groups]
    data["checksum"] = checksum_of({**data, "params": groups}, rows)
    head = json.dumps(data, indent=1).removesuffix("\n}")
    files = {name: FileRow(size, record.directories.get(name)) for name, size in record.files.items()}
    rows_of_files = rows_text(record.save_id, names, files)
    return b"".join([head.encode(), b',\n "params": [\n  ', *table_text(groups, rows), b"\n ]", *rows_of_files])
