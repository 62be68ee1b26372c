"""``zeroelastic.reshard``: a checkpoint for another number of ranks, without a training job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import with_remedy
from zeroelastic.io.paths import absolute
from zeroelastic.json_document import document
from zeroelastic.runs.locate import find_source
from zeroelastic.verbs.options import Progress, local_target, no_progress
from zeroelastic.verbs.reshard.reshard import ReshardOptions, ReshardPlan, check_target, plan_reshard
from zeroelastic.verbs.reshard.reshard import ReshardReport as Result
from zeroelastic.verbs.reshard.reshard import reshard as write_checkpoint

Format = Literal["elastic", "rigid"]


@dataclass(frozen=True, slots=True)
class ReshardForecast:
    """What a reshard would write: ``nbytes`` of state in ``files`` files, and ``extras``, the files beside them."""

    source: str
    path: str
    tag: str
    stage: int
    format: Format
    saved_world_size: int
    world_size: int
    nbytes: int
    num_params: int
    num_sub_groups: int
    files: int
    extras: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What a reshard did: the ``forecast``, and the ``result``, which is None after a dry run."""

    forecast: ReshardForecast
    result: Result | None

    @property
    def content_root(self) -> str | None:
        """The content root of the new checkpoint, None after a dry run."""
        return None if self.result is None else self.result.root

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic reshard --json``; docs/reference/cli/reshard.md has its keys."""
        planned, done = self.forecast, self.result
        body: dict[str, object] = {
            "path": planned.source,
            "tag": planned.tag,
            "target": absolute(planned.path),
            "dry_run": done is None,
            "format": planned.format,
            "world_size": planned.saved_world_size,
            "target_world_size": planned.world_size,
            "target_stage": planned.stage,
            "state_bytes": planned.nbytes,
            "params": planned.num_params,
            "sub_groups": planned.num_sub_groups,
            "files": planned.files,
            "extras": planned.extras,
            "bytes_moved": None if done is None else done.bytes_moved,
            "file_bytes": None if done is None else done.file_bytes,
            "resumed_ranks": None if done is None else done.resumed_ranks,
            "recorded_root": None if done is None else done.source_root,
            "content_root": None if done is None else done.root,
            "verified": None if done is None else done.verified,
            "notes": planned.notes if done is None else done.notes,
        }
        return document(body, ok=True)


@with_remedy()
def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    world_size: int,
    tag: str | None = None,
    format: Format | None = None,
    sub_group_size: int | None = None,
    stage: int | None = None,
    round_robin_gradients: bool | None = None,
    parameter_alignment: bool | None = None,
    max_memory: int | str = "1GiB",
    verify: bool = False,
    dry_run: bool = False,
    processes: Processes | None = None,
    progress: Progress = no_progress,
) -> ReshardReport:
    """Write a native DeepSpeed checkpoint for ``world_size`` ranks from one of any number of ranks, bit for bit.

    ``dst`` gets the same tag, ``latest``, and the files that frameworks keep beside the tag; it appears complete or not
    at all. A run that was killed is continued by the same call. What is read is compared with the commit record, where
    there is one; ``verify`` reads the result again before it appears. ``stage`` is the ZeRO stage of the
    result, by default that of the source; one of stage 0, plain data parallel, DeepSpeed alone can read. ``format``
    "rigid" is what stock DeepSpeed writes; "elastic", the default at stage 3, describes itself, and does not exist at
    the others. ``round_robin_gradients`` and
    ``parameter_alignment`` are those of the run that will load a result of stage 1 or 2, by default those of the saved
    configuration; ``sub_group_size`` is the same for stage 3. Several ``processes`` share the work; collective.

    Raises UsageError where ``dst`` exists or there is no checkpoint, CheckpointError, DigestMismatchError,
    UnsupportedError, OSError.

    Example::

        import zeroelastic
        report = zeroelastic.reshard("ckpt", "ckpt-3", world_size=3)
        assert report.content_root == zeroelastic.verify("ckpt").content_root
    """
    target = local_target(dst)
    memory = size_option(max_memory, "--max-memory")
    options = ReshardOptions(
        world_size=world_size,
        format=format,
        sub_group_size=sub_group_size,
        stage=stage,
        round_robin_gradients=round_robin_gradients,
        parameter_alignment=parameter_alignment,
        max_memory=memory,
        verify=verify,
    )
    processes = processes or Processes()
    source = processes.all_or_raise(lambda: find_source(src, tag=tag))
    with one_save(source.tag_dir):
        plan = processes.all_or_raise(lambda: plan_reshard(source, options))
        forecast = _forecast(plan, target)
        if dry_run:
            processes.run_on_rank0(lambda: check_target(plan, target))
            return ReshardReport(forecast, None)
        writers = plan.target.layout.world_size
        share = plan.nbytes * len(processes.mine(writers)) // writers
        with progress(f"resharding to {world_size}", share) as advance:
            return ReshardReport(forecast, write_checkpoint(plan, target, processes=processes, progress=advance))


def _forecast(plan: ReshardPlan, dst: Path) -> ReshardForecast:
    layout = plan.target.layout
    return ReshardForecast(
        source=str(plan.source.tag_dir),
        path=str(dst),
        tag=plan.source.tag,
        stage=plan.target.stage,
        format=plan.target.format,
        saved_world_size=plan.state.checkpoint.world_size,
        world_size=plan.target.world_size,
        nbytes=plan.nbytes,
        num_params=sum(part.layout.num_params for part in plan.saved.parts),
        num_sub_groups=layout.num_sub_groups if plan.target.stage != 0 else len(plan.saved.groups),
        files=plan.target.num_files,
        extras=tuple(sorted([*plan.sidecar_files.copied, *plan.sidecar_files.derived])),
        notes=tuple(plan.sidecar_files.notes),
    )
