"""The documents of the verbs for the directory of a run: ls, latest, prune."""

from __future__ import annotations

from typing import Literal

from zeroelastic.cli.documents.common import Document, Part


class ListedTag(Part):
    tag: str
    path: str
    folder: str
    step: int | None
    world_size: int | None
    stage: int | None
    bytes: int
    saved_at: float | None
    status: Literal["committed", "no record", "incomplete", "quarantined", "universal", "unreadable"]
    why: str | None
    latest: bool
    run: int | None


class Ls(Document):
    directory: str
    latest: str | None
    tags: list[ListedTag]


class PassedOver(Part):
    tag: str
    step: int | None
    problems: list[str]


class LatestFile(Part):
    names: str | None
    is_newest: bool
    fixed: bool


class Latest(Document):
    directory: str
    tag: str | None
    path: str | None
    folder: str | None
    step: int | None
    saved_at: float | None
    verified: Literal["full", "quick"]
    num_tags: int
    passed_over: list[PassedOver]
    newer: list[str]
    left: list[str]
    latest: LatestFile


class Unfinished(Part):
    name: str
    action: str
    reason: str
    bytes: int


class PrunedTag(Part):
    tag: str
    path: str
    folder: str
    step: int | None
    saved_at: float
    valid: bool
    action: str
    reason: str
    bytes: int | None


class Prune(Document):
    directory: str
    keep: int
    dry_run: bool
    tags: list[PrunedTag]
    unfinished: list[Unfinished]
    removed: list[str]
    freed_bytes: int
    leftovers: int
