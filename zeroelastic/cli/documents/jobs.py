"""The documents of the verbs for training jobs and machines: prove, timeline, doctor."""

from __future__ import annotations

from typing import Any, Literal

from zeroelastic.cli.documents.common import Document, Format, Number, Part


class Check(Part):
    name: str
    ok: bool | None
    sentence: str
    details: list[str]


class ProvedSource(Part):
    path: str
    format: Format | None
    world_size: int
    step: int | None
    num_files: int
    num_params: int
    num_tensors: int
    bytes_read: int


class ContentRoots(Part):
    recorded: str | None
    files: str | None
    loaded_at_reference_size: str | None
    loaded_at_other_size: str | None
    saved_at_other_size: str | None
    loaded_back: str | None


class Run(Part):
    role: Literal["reference size", "reference size again", "other size", "back"]
    world_size: int
    seconds: float
    finished: bool
    record: str | None
    record_sha256: str | None
    saves_skipped: int | None = None
    precision: str | None = None
    device: str | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    samples: list[str | None] | None = None
    loads: Any = None
    resume_report: dict[str, Any] | None = None


class Machine(Part):
    host: str
    kernel: str
    cores: int
    device: str


class Prove(Document):
    verdict: Literal["PROVED", "NOT PROVED"]
    reasons: list[str]
    checks: list[Check]
    source: ProvedSource
    content_roots: ContentRoots
    steps: int
    tolerance: float
    losses: dict[str, list[Number | None]]
    runs: list[Run]
    script: list[str]
    command: list[str]
    versions: dict[str, str]
    machine: Machine
    written: str
    signed_off_by: str | None
    digest: str


class Restart(Part):
    since_kill: bool
    noticing: float | None
    rendezvous: float
    imports: float
    engine: float
    load: float
    first_step: float
    total: float
    our_share: float


class Point(Part):
    time: float
    step: int
    loss: Number | None


class Start(Part):
    time: float
    ended: float
    world_size: int
    nodes: int
    host: str
    restart_count: int | None
    in_place: bool | None
    tag: str | None
    tier: Literal["in-place", "memory", "node-local", "directory"] | None
    moved_bytes: int | None
    resumed_at: int | None
    proved: bool | None
    last_step: int | None
    lost_steps: int
    saves: int
    save_seconds: float
    save_times: list[float]
    memory_stall_seconds: float | None
    memory_bytes: int | None
    points: list[Point]
    end: Literal["done", "resized", "stopped", "error"] | None
    error: str | None
    restart: Restart | None


class NodeChange(Part):
    time: float
    change: int
    cause: str


class Timeline(Document):
    began: float
    lost_steps: int
    torn_lines: int
    plot: str | None
    starts: list[Start]
    nodes: list[NodeChange]


class Engine(Part):
    state: Literal["usable", "not built", "broken"]
    path: str
    log: str | None
    compiler: str
    targets: str
    instruction_set: str | None
    threads: int | None
    reason: str
    remedy: str


class Method(Part):
    name: str
    use: Literal["wrapped", "called"]
    expected: list[str]
    found: list[str] | None
    problem: str


class DeepSpeed(Part):
    state: Literal["usable", "not installed", "broken"]
    version: str | None
    seams: list[Method]
    reason: str
    remedy: str


class Activation(Part):
    state: Literal["on", "off", "broken"]
    value: str | None
    files: list[str]
    reason: str


class Disk(Part):
    directory: str
    bytes: int
    write: float | None
    read_warm: float | None
    read_cold: float | None
    note: str
    problem: str


class BuildLock(Part):
    path: str
    age_s: float
    state: Literal["held", "left", "unknown"]


class Doctor(Document):
    problems: list[str]
    versions: dict[str, str | None]
    package: str
    python: str
    platform: str
    num_cores: int
    engines: dict[str, Engine]
    executor: str | None
    deepspeed: DeepSpeed
    activation: Activation
    disk: Disk | None
    build_locks: list[BuildLock]
