"""The commit record ``zeroelastic.json``: what was saved, file by file and parameter by parameter, and its root.

Written by rank 0, or by one rank of each node with a disk of its own, after every file of the tag is on disk and before
``latest`` names the tag. docs/concepts/format.md describes the schema field by field. A record is read as hostile
input: validated in one pass before anything uses it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from zeroelastic.checkpoint.param_table import ParamTable, Schema
from zeroelastic.core.digest import ParamContent
from zeroelastic.errors import CheckpointError, MissingFileError, NewerFormatError, without_pydantic
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_whole

RECORD_NAME = "zeroelastic.json"
RECORD_VERSION = 1
OVERWRITTEN = f"(If DeepSpeed overwrote this tag without zeroelastic, remove {RECORD_NAME}.)"

_MAX_RECORD_BYTES = 1 << 30  # about 120 bytes a parameter: eight million of them

_CHECKSUM = re.compile(rb',[ \n\r\t]*"checksum"[ \n\r\t]*:[ \n\r\t]*"([0-9a-f]{64})"[ \n\r\t]*\}[ \n\r\t]*\Z')

CheckpointFormat = Literal["elastic", "rigid"]

_Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, StringConstraints(pattern=r"^[^/\x00]{1,255}$")]


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
