"""Checkpoints that are not described but refused by name: Universal ones, and those of ZeRO stage 0."""

from __future__ import annotations

from contextlib import suppress

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.tag_files import TagListing
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.locate import UNIVERSAL
from zeroelastic.torch_file.header import read_torch_file


def refuse_other_kinds(listing: TagListing) -> None:
    """Raise UnsupportedError for a Universal checkpoint, and for one of ZeRO stage 0."""
    if listing.kind == "universal":
        raise UnsupportedError(
            f"{listing.directory}: is {UNIVERSAL}. zeroelastic reads the checkpoint that it was made from."
        )
    if is_stage_0(listing):
        raise UnsupportedError(
            f"{listing.directory}: {min(listing.models.values())} holds the optimizer too. It is of ZeRO stage 0, "
            "whose optimizer state does not name its parameters, so that only a stage 0 run resumes it."
        )


def is_stage_0(listing: TagListing) -> bool:
    """Whether there are no optimizer files because the model states file has the optimizer. Opens that file."""
    if listing.kind != "zero-1-2" or listing.optim or RECORD_NAME in listing.sizes:
        return False
    return any(_holds_an_optimizer(listing.directory / name) for name in listing.models.values())


def _holds_an_optimizer(path: FilePath) -> bool:
    """Whether a model states file has the state of the optimizer, as at stage 0 alone; not if it cannot be read."""
    with suppress(CheckpointError, UnsupportedError):
        root = read_torch_file(path, foreign="inert", columns=True).root
        return isinstance(root, dict) and isinstance(root.get("optimizer"), dict)
    return False
