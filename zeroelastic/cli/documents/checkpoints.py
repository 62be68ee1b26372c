"""The documents of the verbs that look at a checkpoint: inspect, show, verify, diff."""

from __future__ import annotations

from typing import Any, Literal

from zeroelastic.cli.documents.common import Document, Format, Framework, Number, Part, Sides


class Quarantine(Part):
    why: str
    files: list[str]
    marked_at: str
    version: str


class Versions(Part):
    zeroelastic: str | None
    deepspeed: str | None
    torch: str | None


class Record(Part):
    state: Literal["present", "absent", "damaged", "unknown"]
    content_root: str | None


class Totals(Part):
    params: int
    numel: int
    trained_params: int
    trained_numel: int
    frozen_params: int
    frozen_numel: int
    tied_params: int
    state_bytes: int | None
    files: int
    disk_bytes: int


class StateKey(Part):
    dtypes: list[str]
    num_params: int
    bytes: int


class Scalar(Part):
    kind: str
    value: Any


class Group(Part):
    options: dict[str, Any]
    num_params: int
    numel: int


class LossScaler(Part):
    class_name: str
    dynamic: bool
    overflow: bool
    attributes: dict[str, Any]


class InspectedParam(Part):
    name: str
    kind: Literal["trained", "frozen", "tied"]
    shape: list[int]
    numel: int
    bytes: int | None
    group: int | None
    dtypes: dict[str, str]
    tied_to: str | None
    sub_group: int | None
    offset: int | None


class SavedLayout(Part):
    split: Literal["param", "group"]
    sub_group_numel: list[int]


class Buffer(Part):
    name: str
    shape: list[int]
    dtype: str


class TagFiles(Part):
    num_missing: int
    missing: list[str]
    stale: list[str]
    odd: list[str]
    leftovers: list[str]
    folders: list[str]


class Inspect(Document):
    problems: list[str]
    remedy: str | None
    unsupported: list[str]
    notes: list[str]
    path: str
    tag: str
    latest: str | None
    framework: Framework
    format: Format | None
    stage: int | None
    world_size: int | None
    tp_size: int | None
    step: int | None
    skipped_steps: int | None
    samples: int | None
    save_id: str | None
    versions: Versions
    model_dtype: str | None
    master_dtype: str | None
    train_batch_size: int | None
    sub_group_size: int | None
    num_sub_groups: int | None
    layout: SavedLayout | None
    quarantine: Quarantine | None
    record: Record
    totals: Totals
    state: dict[str, StateKey]
    scalars: dict[str, list[Scalar]]
    groups: list[Group]
    loss_scaler: LossScaler | None
    params: list[InspectedParam]
    buffers: list[Buffer]
    scheduler: bool | None
    client_state: list[str] | None
    files: TagFiles
    headers_read: int


class Statistics(Part):
    numel: int
    min: Number | None
    max: Number | None
    mean: Number | None
    std: Number | None
    norm: Number
    zeros: int
    nans: int
    infs: int


class Place(Part):
    rank: int
    file: str
    offset: int
    bytes: int
    start: int
    numel: int


class ShownTensor(Part):
    name: str
    kind: str
    key: str
    dtype: str
    shape: list[int]
    bytes: int
    group: int | None
    tied_to: str | None
    other_kinds: list[str]
    value: Any
    statistics: Statistics | None
    digest: str | None
    recorded_digest: str | None
    first: list[Number]
    last: list[Number]
    places: list[Place]


class Show(Document):
    path: str
    tag: str
    format: Format
    world_size: int
    step: int
    pattern: str
    tensors: list[ShownTensor]


class Problem(Part):
    file: str
    sentence: str
    param: str | None
    key: str | None
    offset: int | None
    bytes: int | None


class VerifiedFile(Part):
    name: str
    rank: int
    kind: Literal["optimizer", "model", "whole_model"]
    bytes: int


class Verify(Document):
    path: str
    mode: Literal["full", "quick"]
    format: Format | None
    world_size: int
    content_root: str | None
    recorded_root: str | None
    problems: list[Problem]
    remedy: str | None
    quarantine: Quarantine | None
    lifted: bool
    checked: list[str]
    unchecked: list[str]
    unsupported: list[str]
    files: list[VerifiedFile]
    num_files: int
    num_params: int
    num_tensors: int
    num_records: int
    bytes_read: int
    seconds: float
    read_seconds: float


class DifferingTensor(Part):
    param: str
    key: str
    dtype: Sides[str]
    shape: Sides[list[int]]
    num_elements: int | None
    num_different: int | None
    num_nonfinite: int | None
    num_sign_changed: int | None
    max_abs: float | None
    max_ulp: int | None
    norm: float | None
    relative_norm: float | None
    num_nan: Sides[int] | None
    num_inf: Sides[int] | None


class ParamAndKey(Part):
    param: str
    key: str


class Difference(Part):
    what: str
    a: str | None
    b: str | None


class Diff(Document):
    weights_equal: bool
    a: str
    b: str
    content_root: Sides[str | None]
    num_tensors: int
    num_equal: int
    bytes_read: int
    tensors: list[DifferingTensor]
    only_a: list[ParamAndKey]
    only_b: list[ParamAndKey]
    state: list[Difference]
    saving: list[Difference]
