"""Checkpoints that are not described but refused by name: Universal ones, and those of ZeRO stage 0."""

from __future__ import annotations

from contextlib import suppress

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.listing import TagListing
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.tags.other_formats import UNIVERSAL
from zeroelastic.torch_file.header import read_torch_file


def refuse_other_kinds(listing: TagListing) -> None:
    """Raise UnsupportedError for a Universal checkpoint, and for one of ZeRO stage 0."""
    if listing.kind == "universal":
        raise UnsupportedError(
            f"{listing.directory}: is {UNIVERSAL}. zeroelastic reads the checkpoint that it was made from."
        )
    if listing.kind == "zero-1-2" and not listing.optim and RECORD_NAME not in listing.sizes:
        for name in listing.models.values():
            if _holds_an_optimizer(listing.directory / name):
                raise UnsupportedError(
                    f"{listing.directory}: {name} holds the optimizer too. It is of ZeRO stage 0, whose optimizer "
                    "state does not name its parameters, so that only a stage 0 run resumes it."
                )


def _holds_an_optimizer(path: FilePath) -> bool:
    """Whether a model states file has the state of the optimizer, as at stage 0 alone; not if it cannot be read."""
    with suppress(CheckpointError, UnsupportedError):
        root = read_torch_file(path, foreign="inert", columns=True).root
        return isinstance(root, dict) and isinstance(root.get("optimizer"), dict)
    return False
