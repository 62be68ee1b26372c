"""The documents of the verbs that plan another checkpoint, or make it: plan, reshard, export, convert."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import Field

from zeroelastic.cli.documents.common import Document, Format, Framework, Part

T = TypeVar("T")


class PlannedState(Part):
    bytes: int
    params: int
    frozen_params: int
    state_keys: list[str]


class PlannedBandwidth(Part):
    read: float | None
    write: float | None
    origin: Literal["given", "measured", "none"]
    cached: bool | None
    bytes_measured: int
    notes: list[str]


class PlannedSource(Part):
    rank: int
    optimizer_bytes: int
    frozen_bytes: int


class Columns(Part, Generic[T]):
    bytes_owned: T
    bytes_read: T
    header_bytes: T
    optimizer_files: T
    model_files: T
    segments: T
    requests: T


class PlannedRank(Columns[int]):
    rank: int
    memory: int
    sources: list[PlannedSource]


class WorstRank(Part):
    rank: int
    value: int


class Worst(Columns[WorstRank]):
    memory: WorstRank


class PlannedLoad(Part):
    bytes_read: int
    bytes_read_worst_rank: int
    files_worst_rank: int
    memory: int
    memory_limit: int
    seconds: float | None
    seconds_separate: float | None


class PlannedReshard(Part):
    bytes_read: int
    bytes_written: int
    files_read: int
    files_written: int
    memory_limit: int
    seconds: float | None


class Plan(Document):
    path: str
    tag: str
    framework: Framework
    format: Format
    step: int
    world_size: int
    target_world_size: int
    stage: int
    target_stage: int
    verb: Literal["load", "reshard"]
    state: PlannedState
    bandwidth: PlannedBandwidth
    ranks: list[PlannedRank]
    worst: Worst
    total: Columns[int]
    amplification: float
    load: PlannedLoad
    reshard: PlannedReshard
    notes: list[str]


class Reshard(Document):
    path: str
    tag: str
    target: str
    dry_run: bool
    format: Format
    world_size: int
    target_world_size: int
    target_stage: int
    state_bytes: int
    params: int
    sub_groups: int
    files: int
    extras: list[str]
    bytes_moved: int | None
    file_bytes: int | None
    resumed_ranks: int | None
    recorded_root: str | None
    content_root: str | None
    verified: bool | None
    notes: list[str]


class ExportedFile(Part):
    name: str
    bytes: int
    tensors: int


class Export(Document):
    path: str
    tag: str
    target: str
    dry_run: bool
    world_size: int
    bytes: int
    bytes_read: int
    trained: int
    frozen: int
    buffers: int
    optimizer_tensors: int
    tied: dict[str, str]
    files: list[ExportedFile]
    digests_compared: int | None
    left_out: list[str]
    seconds: float


class Convert(Document):
    path: str
    tag: str
    target: str
    from_: Literal["native", "universal"] = Field(alias="from")
    to: Literal["universal", "dcp", "elastic", "rigid"]
    dry_run: bool
    world_size: int
    target_world_size: int | None
    bytes_read: int
    tensors: int
    digests_compared: int | None
    content_root: str | None
    notes: list[str]
    seconds: float
