"""``zeroelastic.plan``: what a load or a reshard at another world size would do, before anything is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np
from pydantic import PrivateAttr

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.checkpoint.optimizer_file import zero_option
from zeroelastic.checkpoint.topology import expert_sizes
from zeroelastic.core.global_batch import misfit_notes
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import UsageError, with_remedy
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.verbs.options import whole_option
from zeroelastic.verbs.plan.bandwidth import Bandwidth, measure_bandwidth
from zeroelastic.verbs.plan.forecast import (
    LOAD_MEMORY_LIMIT,
    RESHARD_MEMORY_LIMIT,
    Forecast,
    Head,
    make_forecast,
    read_head,
)
from zeroelastic.verbs.report import Format, Framework, Part, Report
from zeroelastic.verbs.reshard.source import train_batch_size

Verb = Literal["load", "reshard"]
T = TypeVar("T")


class PlannedState(Part):
    """The state of the checkpoint."""

    bytes: int
    params: int
    frozen_params: int
    state_keys: tuple[str, ...]


class PlannedSource(Part):
    """The bytes that a target rank reads from the files of one saved rank."""

    rank: int
    optimizer_bytes: int
    frozen_bytes: int


class Columns(Part, Generic[T]):
    """The numbers of a target rank, or the same of several."""

    bytes_owned: T
    bytes_read: T
    header_bytes: T
    optimizer_files: T
    model_files: T
    segments: T
    requests: T


class PlannedRank(Columns[int]):
    """One target rank."""

    rank: int
    memory: int
    sources: tuple[PlannedSource, ...]


class WorstRank(Part):
    """The target rank with the largest number."""

    rank: int
    value: int


class Worst(Columns[WorstRank]):
    """The largest of each number."""

    memory: WorstRank


class PlannedLoad(Part):
    """What a load takes; ``seconds`` where all ranks share the bandwidth, ``seconds_separate`` where each has it."""

    bytes_read: int
    bytes_read_worst_rank: int
    files_worst_rank: int
    memory: int
    memory_limit: int
    seconds: float | None
    seconds_separate: float | None


class PlannedReshard(Part):
    """What an offline reshard takes."""

    bytes_read: int
    bytes_written: int
    files_read: int
    files_written: int
    memory_limit: int
    seconds: float | None


class PlannedTopology(Part):
    """The tensor and the expert parallel sizes of the save and of the target; ``experts`` are those of all layers."""

    tensor_parallel: int
    target_tensor_parallel: int
    expert_parallel: int
    target_expert_parallel: int
    experts: int

    @property
    def sentence(self) -> str:
        """The sizes of both sides."""
        sizes = [("tensor parallel", self.tensor_parallel, self.target_tensor_parallel)]
        sizes += [("expert parallel", self.expert_parallel, self.target_expert_parallel)] if self.experts else []
        return ", ".join(f"{what} {saved} to {target}" for what, saved, target in sizes if (saved, target) != (1, 1))


class PlanReport(Report):
    """What a load and a reshard would do.

    ``bandwidth`` is what the seconds are computed from; ``notes`` are about the global batch and another ZeRO stage.
    ``topology`` is there where ranks have slices of tensors.
    """

    path: str
    tag: str
    framework: Framework
    format: Format
    step: int
    world_size: int
    target_world_size: int
    stage: int
    target_stage: int
    verb: Verb
    state: PlannedState
    bandwidth: Bandwidth
    ranks: tuple[PlannedRank, ...]
    worst: Worst
    total: Columns[int]
    amplification: float
    load: PlannedLoad
    reshard: PlannedReshard
    topology: PlannedTopology | None = None
    notes: tuple[str, ...]

    only_where_given: ClassVar[frozenset[str]] = frozenset({"topology"})
    _forecast: Forecast = PrivateAttr()

    @property
    def forecast(self) -> Forecast:
        """The numbers of all target ranks as arrays, and the traffic between ranks; not in the document."""
        return self._forecast


def make_report(
    source: Source,
    forecast: Forecast,
    speed: Bandwidth,
    verb: Verb,
    notes: tuple[str, ...],
    topology: PlannedTopology | None = None,
) -> PlanReport:
    """The report on a forecast."""
    head, saved = forecast.head, forecast.saved_world_size
    columns = {
        "bytes_owned": forecast.bytes_owned,
        "bytes_read": forecast.bytes_read,
        "header_bytes": forecast.header_bytes,
        "optimizer_files": forecast.optimizer_files,
        "model_files": forecast.model_files,
        "segments": forecast.segments,
        "requests": forecast.requests,
        "memory": forecast.memory,
    }
    worst = {name: WorstRank(rank=int(np.argmax(value)), value=int(value.max())) for name, value in columns.items()}
    read = forecast.bytes_read + forecast.header_bytes
    reshard_read = int(forecast.bytes_read.sum()) + forecast.reshard_header_bytes
    report = PlanReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        framework=source.framework,
        format=head.shard.format,
        step=head.model.global_steps,
        world_size=saved,
        target_world_size=forecast.world_size,
        stage=head.shard.stage,
        target_stage=forecast.stage,
        verb=verb,
        state=PlannedState(
            bytes=forecast.state_bytes,
            params=len(head.layout.whole_tensors),
            frozen_params=0 if head.frozen is None else len(head.frozen.whole_tensors),
            state_keys=tuple(head.state_keys),
        ),
        bandwidth=speed,
        ranks=_ranks(forecast, columns),
        worst=Worst(**worst),
        total=Columns[int](**{name: int(value.sum()) for name, value in columns.items() if name != "memory"}),
        amplification=forecast.amplification,
        load=PlannedLoad(
            bytes_read=int(read.sum()),
            bytes_read_worst_rank=int(read.max()),
            files_worst_rank=int(forecast.files.max()),
            memory=int(forecast.memory.max()),
            memory_limit=LOAD_MEMORY_LIMIT,
            seconds=seconds_of(int(read.sum()), 0, speed),
            seconds_separate=seconds_of(int(read.max()), 0, speed),
        ),
        reshard=PlannedReshard(
            bytes_read=reshard_read,
            bytes_written=forecast.reshard_bytes_written,
            files_read=saved + len(head.model_sizes) + len(head.model.expert_files),
            files_written=forecast.reshard_files_written,
            memory_limit=RESHARD_MEMORY_LIMIT,
            seconds=seconds_of(reshard_read, forecast.reshard_bytes_written, speed),
        ),
        topology=topology,
        notes=notes,
    )
    report._forecast = forecast
    return report


def seconds_of(read: int, written: int, speed: Bandwidth) -> float | None:
    """How long the bytes alone take; None when a speed that is needed is not known."""
    if (read and speed.read is None) or (written and speed.write is None):
        return None
    return (read / speed.read if speed.read else 0.0) + (written / speed.write if speed.write else 0.0)


def _ranks(forecast: Forecast, columns: dict[str, Int64Array]) -> tuple[PlannedRank, ...]:
    saved, traffic = forecast.saved_world_size, forecast.traffic
    optimizer, frozen = (
        dict(zip((part.target * saved + part.source).tolist(), part.nbytes.tolist(), strict=True))
        for part in (forecast.optimizer, forecast.frozen)
    )
    sources: list[list[PlannedSource]] = [[] for _ in range(forecast.world_size)]
    for target, rank in zip(traffic.target.tolist(), traffic.source.tolist(), strict=True):
        pair = target * saved + rank
        sources[target].append(
            PlannedSource(rank=rank, optimizer_bytes=optimizer.get(pair, 0), frozen_bytes=frozen.get(pair, 0))
        )
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return tuple(
        PlannedRank(rank=rank, sources=tuple(sources[rank]), **dict(zip(columns, values, strict=True)))
        for rank, values in enumerate(rows)
    )


@with_remedy()
def plan(
    src: str | os.PathLike[str],
    *,
    world_size: int,
    stage: int | None = None,
    tp: int | None = None,
    ep: int | None = None,
    like: str | os.PathLike[str] | None = None,
    verb: Verb = "load",
    tag: str | None = None,
    bandwidth: float | str | None = None,
    write_bandwidth: float | str | None = None,
    measure: bool = False,
) -> PlanReport:
    """Say what a load or a reshard on ``world_size`` ranks would read, open, need and take; reads headers only.

    ``world_size`` counts all ranks. ``stage`` is the ZeRO stage of the run or of the result, ``tp`` its tensor
    parallel and ``ep`` its expert parallel size, by default those of the save; ``like`` is a checkpoint of a run of
    that tensor parallel size, where the save does not say how it cuts. Everything else is as in the saved
    configuration.

    Seconds are computed from ``bandwidth``, in bytes per second, or a size such as "2GB"; ``write_bandwidth`` is that
    for writing, by default the same. ``measure`` finds them out: about 256 MiB of the checkpoint are read, and 64 MiB
    written beside it, to a temporary file. Without any of them there are no seconds. Raises UsageError,
    CheckpointError, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.plan("ckpt", world_size=3, bandwidth="2GB")
        print(report.forecast.bytes_read, report.forecast.amplification)
    """
    world_size = whole_option(world_size, "--world-size")
    if world_size < 1:
        raise UsageError(f"a world size of {world_size} makes no sense; give 1 or more.")
    if stage not in (None, 1, 2, 3):
        raise UsageError(f"there is no ZeRO stage {stage} to plan for; give 1, 2 or 3.")
    speed = _given(bandwidth, write_bandwidth, measure)
    source = find_source(src, tag=tag)
    with one_save(source.tag_dir):
        checkpoint = open_checkpoint(source.tag_dir)
        head = read_head(checkpoint)
        topology = None
        if head.over_ranks is None and tp in (None, 1) and ep in (None, 1) and like is None:
            forecast = make_forecast(head, world_size, stage=stage)
        else:
            like = None if like is None else os.fspath(like)
            forecast, topology = _plan_of_slices(source, checkpoint, head, (world_size, stage, tp, ep, like))
    if speed is None:
        speed = _measure(checkpoint, source) if measure else Bandwidth(read=None, write=None, origin="none")
    data_size = checkpoint.topology.data_size
    batch = train_batch_size(checkpoint.record, head.shard, data_size)
    tensor_size = 1 if topology is None else topology.target_tensor_parallel
    notes = misfit_notes(batch, world_size // tensor_size, data_size, head.shard.ds_config)
    if forecast.stage not in (3, head.shard.stage):
        names = ("round_robin_gradients", "parameter_alignment")
        saved = [f"{name} {str(bool(zero_option(head.shard.ds_config, name))).lower()}" for name in names]
        notes = (*notes, f"for a run with {' and '.join(saved)}, as in the saved configuration")
    return make_report(source, forecast, speed, verb, tuple(notes), topology)


def _plan_of_slices(
    source: Source,
    checkpoint: Checkpoint,
    head: Head,
    target: tuple[int, int | None, int | None, int | None, str | None],
) -> tuple[Forecast, PlannedTopology]:
    """The forecast for ranks that have slices; ``target`` is the world size, the stage, tp, ep and like."""
    # Imported for these alone: a plan without slices takes a moment.
    from zeroelastic.verbs.plan.slices import slices_forecast
    from zeroelastic.verbs.reshard.reshard import plan_reshard
    from zeroelastic.verbs.reshard.target import ReshardOptions

    world_size, stage, tp, ep, like = target
    saved_size = checkpoint.topology.tensor_size
    tensor_size = saved_size if tp is None else tp
    planned = plan_reshard(source, ReshardOptions(world_size=world_size, stage=stage, tp=tp, ep=ep, like=like))
    slicing = planned.target.slicing
    topology = PlannedTopology(
        tensor_parallel=saved_size,
        target_tensor_parallel=tensor_size,
        expert_parallel=max(expert_sizes(checkpoint.layout, checkpoint.topology), default=1),
        target_expert_parallel=slicing.expert_size,
        experts=sum(layer.num_experts for layer in slicing.layers),
    )
    return slices_forecast(head, checkpoint, planned), topology


def _given(read: float | str | None, write: float | str | None, measure: bool) -> Bandwidth | None:
    """The bandwidth that the user states, or None."""
    if measure and (read, write) != (None, None):
        raise UsageError("--measure: finds out what --bandwidth and --write-bandwidth state; give one or the other.")
    if read is None:
        if write is not None:
            raise UsageError("--write-bandwidth: needs --bandwidth, which is for reading.")
        return None
    return Bandwidth(
        read=_speed(read, "--bandwidth"),
        write=_speed(read if write is None else write, "--write-bandwidth"),
        origin="given",
    )


def _speed(value: float | str, option: str) -> float:
    speed = float(size_option(value.strip().removesuffix("/s"), option) if isinstance(value, str) else value)
    if not speed > 0:
        raise UsageError(f"{option}: must be more than 0 bytes per second. Give a rate such as 2GiB.")
    return speed


def _measure(checkpoint: Checkpoint, source: Source) -> Bandwidth:
    files = [path for path in checkpoint.optim_files if isinstance(path, Path)]
    if len(files) < checkpoint.world_size or not isinstance(source.root, Path):
        notes = ("the checkpoint is not on this machine; give --bandwidth",)
        return Bandwidth(read=None, write=None, origin="none", notes=notes)
    return measure_bandwidth(files, source.root)
