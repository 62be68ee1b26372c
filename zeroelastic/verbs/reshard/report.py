"""The report of ``reshard``: what it did, or would do."""

from __future__ import annotations

from zeroelastic.verbs.report import Format, GivenPath, Report


class ReshardReport(Report):
    """What a reshard did, or would do: ``state_bytes`` of state in ``files`` files, and ``extras``, the files beside.

    ``world_size`` is that of the source, ``target_world_size`` that of the result. ``content_root`` is that of the
    written files, ``recorded_root`` that of the source's commit record, or None. ``resumed_ranks`` ranks were complete
    from an earlier run that was killed. After a dry run, what only writing tells is None.
    """

    path: str
    tag: str
    target: GivenPath
    dry_run: bool
    format: Format
    world_size: int
    target_world_size: int
    target_stage: int
    state_bytes: int
    params: int
    sub_groups: int
    files: int
    extras: tuple[str, ...]
    bytes_moved: int | None = None
    file_bytes: int | None = None
    resumed_ranks: int | None = None
    recorded_root: str | None = None
    content_root: str | None = None
    verified: bool | None = None
    notes: tuple[str, ...]
