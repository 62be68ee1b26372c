"""Made-up runs whose tags share files of frozen weights: tags with a commit record, and files of any content."""

from __future__ import annotations

import os
import time
from pathlib import Path

from saved_files import record_of
from synthetic import SAVE_ID, write_checkpoint

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, record_text
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, SharedFile, shared_name

HOUR = 3600.0
FIRST, SECOND, THIRD = (digit * 64 for digit in "abc")
"""Digests of shared files."""


def shared_path(root: Path, digest: str = FIRST) -> Path:
    """Where the shared file of this digest is."""
    return root / FROZEN_FOLDER / shared_name(digest)


def write_shared(root: Path, digest: str = FIRST, *, nbytes: int = 1000, age_s: float = 2 * HOUR) -> Path:
    """A file of frozen weights, which has not changed for a while."""
    path = shared_path(root, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * nbytes)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def refer(tag_dir: Path, *digests: str, nbytes: int = 1000, depth: int = 1) -> None:
    """Let the commit record of a tag refer to shared files, ``depth`` folders above it."""
    record = record_of(tag_dir)
    (tag_dir / RECORD_NAME).write_bytes(record_text(referring(record, *digests, nbytes=nbytes, depth=depth)))


def referring(record: CommitRecord, *digests: str, nbytes: int = 1000, depth: int = 1) -> CommitRecord:
    """The record of a tag that refers to shared files."""
    folder = "../" * depth + FROZEN_FOLDER
    files = tuple(SharedFile(path=f"{folder}/{shared_name(d)}", nbytes=nbytes, digest=d) for d in digests)
    return record.model_copy(update={"shared": files})


def lean_tag(tag_dir: Path, step: int, *digests: str, depth: int = 1, save_id: str = SAVE_ID) -> Path:
    """A tag that takes its frozen weights from shared files, which has not changed for two hours."""
    write_checkpoint(tag_dir, world_size=2, global_steps=step, frozen=None, record=True, save_id=save_id)
    refer(tag_dir, *digests, depth=depth)
    then = time.time() - 2 * HOUR
    for path in (tag_dir, *tag_dir.iterdir()):
        os.utime(path, (then, then))
    return tag_dir
