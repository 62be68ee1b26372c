"""The files beside the tags of a run that several of them share: safetensors files, named by their content.

A lean save (``"lean": true``) leaves frozen weights out of its tag (``shared_weights``), and its commit record lists
the files that have them. docs/concepts/format.md describes these files. They are read as hostile input.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from zeroelastic.checkpoint.param_table import Schema
from zeroelastic.errors import CheckpointError, MissingFileError, shown
from zeroelastic.io.atomic import shortened
from zeroelastic.io.paths import FilePath, RemotePath, as_path
from zeroelastic.io.storage import file_size
from zeroelastic.torch_file.safetensors import Head, read_head

FROZEN_FOLDER = "_zeroelastic_frozen"
"""The folder of a run's shared files, beside its tags. The Trainer pushes nothing to the Hub whose name begins so."""

_LONGEST = 255 - len(FROZEN_FOLDER) - 1

SHARED_NAME = re.compile(r"frozen-[0-9a-f]{32}\.safetensors")
"""The name of a shared file: the first digits of its digest."""

_RELATIVE = rf"(\.\./){{1,8}}{FROZEN_FOLDER}(_[^/\x00]+)?/{SHARED_NAME.pattern}"
_OF_OTHERS = r"(/|[a-z][a-z0-9+.-]*://)[^\x00]*\.safetensors"
_METADATA_KEY = "zeroelastic"
_DIGEST = re.compile("[0-9a-f]{16}")


class SharedFile(Schema):
    """A file that tags of a run refer to.

    ``path`` is relative to the tag directory, for a file of the run, or else absolute or a URL. ``digest`` is that of
    all tensors in a file of the run, and of those that the tag takes from any other (``digest_of``).
    """

    path: Annotated[str, StringConstraints(pattern=rf"^({_RELATIVE}|{_OF_OTHERS})$", max_length=4096)]
    nbytes: Annotated[int, Field(ge=0, lt=1 << 62)]
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.rpartition("/")[2]

    @property
    def is_of_run(self) -> bool:
        """Whether the file is the run's own, not one of a base model that ``"frozen"`` names."""
        return self.path.startswith("../")

    def at(self, tag_dir: FilePath) -> FilePath:
        """Where the file is, for a tag at ``tag_dir``; not pinned."""
        if not self.is_of_run:
            return as_path(self.path)
        parts = self.path.split("/")
        folder = tag_dir if isinstance(tag_dir, RemotePath) else Path(str(tag_dir)).resolve()
        for part in parts:
            folder = folder.parent if part == ".." else folder / part
        return folder


def digest_of(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> str:
    """The digest of some tensors, given the dtype, shape and digest of each by name: 64 hexadecimal digits."""
    rows = [[name, dtype, list(shape), f"{digest:016x}"] for name, (dtype, shape, digest) in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def shared_name(digest: str) -> str:
    """The name of the shared file with this digest."""
    return f"frozen-{digest[:32]}.safetensors"


def metadata_of(digests: Mapping[str, int]) -> dict[str, str]:
    """The metadata of a shared file: the digest of each tensor."""
    return {_METADATA_KEY: json.dumps({name: f"{digest:016x}" for name, digest in digests.items()})}


def digest_from_text(text: object) -> int:
    """The digest of a tensor as files have it: 16 hexadecimal digits. Raises ValueError for anything else."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ValueError(f"a digest is {shown(text)}")
    return int(text, 16)


def read_shared_head(path: FilePath) -> tuple[Head, dict[str, int]]:
    """The header of a shared file, and the digests of its tensors that it states.

    Raises MissingFileError, UnreadableError, CheckpointError where it is damaged or is not one that a save has made.
    """
    head = read_head(path)
    try:
        stated = json.loads(head.metadata[_METADATA_KEY])
        digests = {name: digest_from_text(stated[name]) for name in head.tensors}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{path}: does not state the digests of its tensors. The file is damaged.") from None
    digest = digest_of({name: (at.dtype, at.shape, digests[name]) for name, at in head.tensors.items()})
    if SHARED_NAME.fullmatch(path.name) and path.name != shared_name(digest):
        raise CheckpointError(f"{path}: its header has other tensors than its name says. The file is damaged.")
    return head, digests


def check_shared_files(files: Iterable[SharedFile], tag_dir: FilePath) -> None:
    """Raise MissingFileError, CheckpointError unless the files are there, with the sizes that a tag states."""
    for file in files:
        path = file.at(tag_dir)
        check_shared_size(path, file_size(path), file, tag_dir)


def check_shared_size(path: FilePath, size: int | None, file: SharedFile, tag_dir: FilePath) -> None:
    """Raise as ``check_shared_files`` for a file of this size, None where it is not there."""
    if size is None:
        how = (
            f"put the folder {FROZEN_FOLDER} of the run there"
            if file.is_of_run
            else ('put it back, or name the directory of the model in "frozen" in the "zeroelastic" block')
        )
        raise MissingFileError(
            f'{path}: no such file. The checkpoint {tag_dir} was saved with "lean": true and takes its frozen weights, '
            f"digest {file.digest[:12]}..., from it: {how}."
        )
    if size != file.nbytes:
        raise CheckpointError(
            f"{path}: has {size} bytes, and the checkpoint {tag_dir} takes its frozen weights from a file of "
            f"{file.nbytes}. It is damaged, or another file."
        )


def frozen_folder(run: FilePath) -> FilePath:
    """The folder of a run's shared files."""
    return run / FROZEN_FOLDER


def frozen_folder_beside(run: FilePath) -> FilePath:
    """The same where nothing may be added to the run's directory: accelerate takes all in it for its checkpoints."""
    return run.parent / f"{FROZEN_FOLDER}_{shortened(run.name, _LONGEST)}"
