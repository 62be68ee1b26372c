"""The plan of a reshard: the source, the files of the target, and notes on everything that is not carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.checkpoint.open import open_committed
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.core.global_batch import misfit_notes
from zeroelastic.errors import UnsupportedError
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.torch_file.tree import entry
from zeroelastic.verbs.report import Format, GivenPath, Report
from zeroelastic.verbs.reshard.new_slicing import data_parallel_size, slicing_notes, target_slicing
from zeroelastic.verbs.reshard.options import ReshardOptions
from zeroelastic.verbs.reshard.sidecar_files import SidecarFiles, plan_sidecar_files
from zeroelastic.verbs.reshard.sink import NativeSink
from zeroelastic.verbs.reshard.source import (
    ReshardSource,
    for_slicing,
    reshard_source,
    saved_sub_group_size,
    slicing_of,
    with_options,
)
from zeroelastic.verbs.reshard.stage_1_2 import GroupSink
from zeroelastic.verbs.reshard.stage_3 import Stage3Sink


class ReshardReport(Report):
    """The result of a reshard: ``state_bytes`` of state in ``files`` files, and ``extras`` beside the tag.

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


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Everything that a reshard needs: where the source is, and the files of the target with the source's state."""

    source: Source
    target: NativeSink
    sidecar_files: SidecarFiles
    options: ReshardOptions
    notes: tuple[str, ...]

    @property
    def saved(self) -> ReshardSource:
        """The source, as a run with the options of the target would have saved it."""
        return self.target.source

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return self.saved.nbytes

    def report(self, dst: Path) -> ReshardReport:
        """The report of a dry run."""
        target = self.target
        return ReshardReport(
            ok=True,
            path=str(self.source.tag_dir),
            tag=self.source.tag,
            target=str(dst),
            dry_run=True,
            format=target.format,
            world_size=self.saved.checkpoint.world_size,
            target_world_size=target.world_size,
            target_stage=target.stage,
            state_bytes=self.nbytes,
            params=sum(len(part.params) for part in self.saved.parts),
            sub_groups=target.layout.num_sub_groups,
            files=target.num_files,
            extras=tuple(sorted([*self.sidecar_files.copied, *self.sidecar_files.derived])),
            notes=self.notes,
        )


def plan_reshard(source: Source, options: ReshardOptions) -> ReshardPlan:
    """Open and check every header of the source, and compute the target's layout; nothing is written.

    Raises CheckpointError, UnsupportedError, UsageError.
    """
    state = open_state(open_committed(source.tag_dir))
    options.check(state.head.stage if options.stage is None else options.stage)
    saved = reshard_source(state)
    topology = saved.slicing.topology
    sizes = (data_parallel_size(options.world_size, options.tp or topology.tensor_size), topology.data_size)
    return complete_plan(source, saved, options, misfit_notes(saved.train_batch_size, *sizes, state.head.ds_config))


def complete_plan(source: Source, saved: ReshardSource, options: ReshardOptions, notes: Sequence[str]) -> ReshardPlan:
    """The plan for tensors and trees that ranks of ZeRO saved; ``notes`` are on them. Raises as ``make_plan_for``."""
    plan = make_plan_for(source, saved, options, notes)
    target, size = plan.target, saved.checkpoint.world_size
    files = plan_sidecar_files(source, saved_world_size=size, world_size=options.world_size)
    left: list[str] = []
    if target.format == "rigid" and entry(saved.inner, "zeroelastic", "grad_scaler") is not None:
        left = ["not carried: the state of torch's GradScaler, for which DeepSpeed's own files have no place"]
    all_notes = (*target.notes([*options.zero_options]), *plan.notes, *left, *files.notes)
    return replace(plan, sidecar_files=files, notes=all_notes)


def make_plan_for(source: Source, saved: ReshardSource, options: ReshardOptions, notes: Sequence[str]) -> ReshardPlan:
    """Compute the layout of the target, without sidecar files. Raises UnsupportedError, UsageError."""
    stage = saved.stage if options.stage is None else options.stage
    options.check(stage)
    saved = with_options(saved, {"zero_optimization": options.zero_options})
    if stage == 3 and options.sub_group_size is None:
        options = replace(options, sub_group_size=saved_sub_group_size(saved))
    like = None if options.like is None else slicing_of(open_committed(find_source(options.like).tag_dir))
    params = [param for part in saved.parts for param in part.params]
    try:
        slicing = target_slicing(saved.slicing, params, options, stage, like)
        cut = slicing_notes(saved.slicing, slicing, params, like=like is not None)
        saved = for_slicing(saved, slicing)
        sink = Stage3Sink(saved, slicing, options) if stage == 3 else GroupSink(saved, slicing, stage)
    except UnsupportedError as error:
        raise UnsupportedError(f"{source.tag_dir}: {error}") from None
    return ReshardPlan(source, sink, SidecarFiles({}, {}, ()), options, (*cut, *notes))
