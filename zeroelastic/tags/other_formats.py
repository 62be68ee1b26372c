"""Directories that hold a training state or weights in a format of others: recognised by the names of their files."""

from __future__ import annotations

from collections.abc import Collection

from zeroelastic.checkpoint.listing import is_universal
from zeroelastic.errors import CheckpointError, UnreadableError, printable, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import list_directory
from zeroelastic.tags.names import LATEST_UNIVERSAL

UNIVERSAL = (
    'a Universal checkpoint (ds_to_universal). DeepSpeed loads it with "checkpoint": {"load_universal": true}, '
    "and `zeroelastic convert --from universal` makes a native checkpoint of it"
)
_DCP = "a torch.distributed.checkpoint directory, which torch.distributed.checkpoint.load reads"
_SAFETENSORS = "a directory of safetensors files: weights alone, which from_pretrained and safetensors load"

_MAX_LISTED = 8
_MAX_LOOKED_AT = 64


def other_format(path: FilePath, names: Collection[str]) -> str | None:
    """What a directory with these files is, if it is in one of these formats."""
    if LATEST_UNIVERSAL in names or is_universal(path):
        return UNIVERSAL
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return _DCP
    return _SAFETENSORS if any(name.endswith(".safetensors") for name in names) else None


def formats_below(path: FilePath, folders: Collection[str]) -> str | None:
    """The folders of a directory that are in one of these formats, as a list with what each is."""
    found = []
    for name in sorted(folders)[:_MAX_LOOKED_AT]:
        try:
            kind = other_format(path / name, list_directory(path / name)[0])
        except (CheckpointError, UnreadableError):
            continue
        if kind is not None:
            found.append(f"{printable(name)} is {kind}")
    return some(found, _MAX_LISTED, separator="; ") if found else None
