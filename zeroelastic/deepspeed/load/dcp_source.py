"""A checkpoint of FSDP2 as what a load reads (``"source": "dcp"``): by range, into any stage and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.dcp.native import native_form
from zeroelastic.dcp.saved import dcp_folders, open_dcp
from zeroelastic.dcp.state import checkpoint_of
from zeroelastic.deepspeed.options import LoadRequest
from zeroelastic.distributed.collective import broadcast_or_raise
from zeroelastic.errors import MissingFileError, UnreadableError, UnsupportedError, printable, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import list_directory
from zeroelastic.runs.names import read_latest

HINT = 'is a checkpoint of FSDP2, which "source": "dcp" in the "zeroelastic" block loads.'
"""What to say of a directory that a load is given which asks for a checkpoint of DeepSpeed."""


def is_dcp(path: FilePath) -> bool:
    """Whether a directory is a checkpoint of FSDP2."""
    try:
        return bool(dcp_folders(path))
    except (MissingFileError, UnreadableError):
        return False


def find_dcp_source(request: LoadRequest) -> FilePath | None:
    """The checkpoint of FSDP2 that a request means: its directory, or the tag in it. Collective.

    None where it asks for none, and where DeepSpeed has saved there, as a run does that began with one of FSDP2. Raises
    MissingFileError on every rank for a directory of several.
    """
    if request.options.source != "dcp":
        return None
    directory = request.directory
    place = directory if request.tag is None else directory / str(request.tag)

    def look() -> bool:
        if is_dcp(place):
            return True
        if request.tag is None and read_latest(directory) is None:
            _refuse_several(directory)
        return False

    return place if broadcast_or_raise(look) else None


def _refuse_several(directory: FilePath) -> None:
    try:
        below = [name for name in list_directory(directory)[1] if is_dcp(directory / name)]
    except (MissingFileError, UnreadableError):
        return
    if below:
        named = some(map(printable, sorted(below)))
        raise MissingFileError(
            f"{directory}: is no checkpoint of FSDP2, but has some: {named}. Nothing was loaded.",
            remedy="Pass one as the tag, or the path of one as the directory.",
        )


def refuse_dcp(path: FilePath, why: str) -> NoReturn:
    """Raise UnsupportedError for a run that DeepSpeed alone loads because of ``why``."""
    raise UnsupportedError(
        f"{path}: is a checkpoint of FSDP2, and DeepSpeed alone loads this run ({why}), which reads none. "
        "`zeroelastic convert --from fsdp2` makes a checkpoint of ZeRO of it."
    )


def open_dcp_source(root: FilePath, config: Mapping[str, object], world_size: int) -> Checkpoint:
    """The checkpoint as if a run with this DeepSpeed configuration had saved it.

    Tables and small objects are read; chunks are looked up when their extents are asked for.
    """
    return checkpoint_of(native_form(open_dcp(root, all_chunks=False), config, world_size))
