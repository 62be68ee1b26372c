"""The files of a tag that ranks have written, as a report on the tag lists them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from zeroelastic.checkpoint.tag_files import parse_rank_file
from zeroelastic.verbs.verify.header_check import TagHeaders


class VerifiedFile(NamedTuple):
    """A file that a rank has written: its name, which rank, of which kind, and its size in bytes."""

    name: str
    rank: int
    kind: Literal["optimizer", "model", "whole_model"]
    nbytes: int


def verified_files(headers: TagHeaders) -> tuple[VerifiedFile, ...]:
    """The ranks' files that are there, damaged or not, by rank."""
    found = ((name, parse_rank_file(name), nbytes) for name, nbytes in headers.sizes.items())
    files = [VerifiedFile(name, said.rank, said.kind, nbytes) for name, said, nbytes in found if said is not None]
    return tuple(sorted(files, key=lambda file: (file.rank, file.kind, file.name)))
