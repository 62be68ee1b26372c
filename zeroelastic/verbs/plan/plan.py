"""``zeroelastic.plan``: what a load or a reshard at another world size would do, before anything is done."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.checkpoint.optimizer_file import zero_option
from zeroelastic.core.global_batch import misfit_notes
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import UsageError, with_remedy
from zeroelastic.json_document import document
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.verbs.plan.bandwidth import Bandwidth, measure_bandwidth
from zeroelastic.verbs.plan.forecast import (
    LOAD_MEMORY_LIMIT,
    RESHARD_MEMORY_LIMIT,
    Forecast,
    make_forecast,
)
from zeroelastic.verbs.plan.head import read_head
from zeroelastic.verbs.reshard.source import train_batch_size

Verb = Literal["load", "reshard"]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a load and a reshard would do.

    ``bandwidth`` is what the seconds are computed from; ``notes`` are about the global batch and another ZeRO stage.
    """

    source: Source
    forecast: Forecast
    bandwidth: Bandwidth
    verb: Verb
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic plan --json``; docs/reference/cli/plan.md has its keys."""
        forecast, speed = self.forecast, self.bandwidth
        head, columns = forecast.head, _columns(forecast)
        saved = forecast.saved_world_size
        read = forecast.bytes_read + forecast.header_bytes
        reshard_read = int(forecast.bytes_read.sum()) + forecast.reshard_header_bytes
        body = {
            "path": str(self.source.tag_dir),
            "tag": self.source.tag,
            "framework": self.source.framework,
            "format": head.shard.format,
            "step": head.model.global_steps,
            "world_size": saved,
            "target_world_size": forecast.world_size,
            "stage": head.shard.stage,
            "target_stage": forecast.stage,
            "verb": self.verb,
            "state": {
                "bytes": forecast.state_bytes,
                "params": head.shard.layout.num_params,
                "frozen_params": 0 if head.frozen is None else head.frozen.num_params,
                "state_keys": list(head.state_keys),
            },
            "bandwidth": asdict(speed),
            "ranks": _rank_documents(forecast, columns),
            "worst": {
                name: {"rank": int(np.argmax(values)), "value": int(values.max())} for name, values in columns.items()
            },
            "total": {name: int(values.sum()) for name, values in columns.items() if name != "memory"},
            "amplification": forecast.amplification,
            "load": {
                "bytes_read": int(read.sum()),
                "bytes_read_worst_rank": int(read.max()),
                "files_worst_rank": int(forecast.files.max()),
                "memory": int(forecast.memory.max()),
                "memory_limit": LOAD_MEMORY_LIMIT,
                "seconds": _seconds(int(read.sum()), 0, speed),
                "seconds_separate": _seconds(int(read.max()), 0, speed),
            },
            "reshard": {
                "bytes_read": reshard_read,
                "bytes_written": forecast.reshard_bytes_written,
                "files_read": saved + len(head.model_sizes),
                "files_written": forecast.world_size + (forecast.world_size if forecast.stage == 3 else 1),
                "memory_limit": RESHARD_MEMORY_LIMIT,
                "seconds": _seconds(reshard_read, forecast.reshard_bytes_written, speed),
            },
            "notes": list(self.notes),
        }
        return document(body, ok=True)


@with_remedy()
def plan(
    src: str | os.PathLike[str],
    *,
    world_size: int,
    stage: int | None = None,
    verb: Verb = "load",
    tag: str | None = None,
    bandwidth: float | str | None = None,
    write_bandwidth: float | str | None = None,
    measure: bool = False,
) -> PlanReport:
    """Say what a load or a reshard on ``world_size`` ranks would read, open, need and take; reads headers only.

    ``stage`` is the ZeRO stage of the run or of the result, by default that of the save; everything else is as in the
    saved configuration.

    Seconds are computed from ``bandwidth``, in bytes per second, or a size such as "2GB"; ``write_bandwidth`` is that
    for writing, by default the same. ``measure`` finds them out: about 256 MiB of the checkpoint are read, and 64 MiB
    written beside it, to a temporary file. Without any of them there are no seconds. Raises UsageError,
    CheckpointError, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.plan("ckpt", world_size=3, bandwidth="2GB")
        print(report.forecast.bytes_read, report.forecast.amplification)
    """
    if world_size < 1:
        raise UsageError(f"a world size of {world_size} makes no sense; give 1 or more.")
    if stage not in (None, 1, 2, 3):
        raise UsageError(f"there is no ZeRO stage {stage} to plan for; give 1, 2 or 3.")
    speed = _given(bandwidth, write_bandwidth, measure)
    source = find_source(src, tag=tag)
    with one_save(source.tag_dir):
        checkpoint = open_checkpoint(source.tag_dir)
        head = read_head(checkpoint)
    forecast = make_forecast(head, world_size, stage=stage)
    if speed is None:
        speed = _measure(checkpoint, source) if measure else Bandwidth(None, None, "none")
    batch = train_batch_size(checkpoint.record, head.shard, head.world_size)
    notes = misfit_notes(batch, world_size, head.world_size, head.shard.ds_config)
    if forecast.stage not in (3, head.shard.stage):
        names = ("round_robin_gradients", "parameter_alignment")
        saved = [f"{name} {str(bool(zero_option(head.shard.ds_config, name))).lower()}" for name in names]
        notes = (*notes, f"for a run with {' and '.join(saved)}, as in the saved configuration")
    return PlanReport(source, forecast, speed, verb, tuple(notes))


def _given(read: float | str | None, write: float | str | None, measure: bool) -> Bandwidth | None:
    """The bandwidth that the user states, or None."""
    if measure and (read, write) != (None, None):
        raise UsageError("--measure: finds out what --bandwidth and --write-bandwidth state; give one or the other.")
    if read is None:
        if write is not None:
            raise UsageError("--write-bandwidth: needs --bandwidth, which is for reading.")
        return None
    return Bandwidth(
        _speed(read, "--bandwidth"), _speed(read if write is None else write, "--write-bandwidth"), "given"
    )


def _speed(value: float | str, option: str) -> float:
    speed = float(size_option(value.strip().removesuffix("/s"), option) if isinstance(value, str) else value)
    if not speed > 0:
        raise UsageError(f"{option}: must be more than 0 bytes per second. Give a rate such as 2GiB.")
    return speed


def _measure(checkpoint: Checkpoint, source: Source) -> Bandwidth:
    files = [path for path in checkpoint.optim_files if isinstance(path, Path)]
    if len(files) < checkpoint.world_size or not isinstance(source.root, Path):
        return Bandwidth(None, None, "none", notes=("the checkpoint is not on this machine; give --bandwidth",))
    return measure_bandwidth(files, source.root)


def _seconds(read: int, written: int, speed: Bandwidth) -> float | None:
    """How long the bytes alone take; None when a speed that is needed is not known."""
    if (read and speed.read is None) or (written and speed.write is None):
        return None
    return (read / speed.read if speed.read else 0.0) + (written / speed.write if speed.write else 0.0)


def _columns(forecast: Forecast) -> dict[str, Int64Array]:
    """What the document has of each target rank: name -> one number per rank."""
    return {
        "bytes_owned": forecast.bytes_owned,
        "bytes_read": forecast.bytes_read,
        "header_bytes": forecast.header_bytes,
        "optimizer_files": forecast.optimizer_files,
        "model_files": forecast.model_files,
        "segments": forecast.segments,
        "requests": forecast.requests,
        "memory": forecast.memory,
    }


def _rank_documents(forecast: Forecast, columns: dict[str, Int64Array]) -> list[dict[str, object]]:
    saved, traffic = forecast.saved_world_size, forecast.traffic
    bytes_by_pair = {
        kind: dict(zip((part.target * saved + part.source).tolist(), part.nbytes.tolist(), strict=True))
        for kind, part in (("optimizer_bytes", forecast.optimizer), ("frozen_bytes", forecast.frozen))
    }
    sources: list[list[dict[str, int]]] = [[] for _ in range(forecast.world_size)]
    for target, rank in zip(traffic.target.tolist(), traffic.source.tolist(), strict=True):
        sources[target].append({"rank": rank, **{k: v.get(target * saved + rank, 0) for k, v in bytes_by_pair.items()}})
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [
        {"rank": rank, **dict(zip(columns, values, strict=True)), "sources": sources[rank]}
        for rank, values in enumerate(rows)
    ]
