"""The plan of a reshard: the source, the files of the target, and notes on everything that is not carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import RECORD_VERSION, CommitRecord, SavedWith, param_records, params_digest
from zeroelastic.checkpoint.open import open_committed
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.core.digest import ParamContent
from zeroelastic.core.world_size import misfit_notes
from zeroelastic.errors import UnsupportedError
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.torch_file.header import directory_digest
from zeroelastic.torch_file.tree import entry
from zeroelastic.verbs.interface import Format, GivenPath, Report
from zeroelastic.verbs.reshard.new_run import ReshardOptions, data_parallel_size, slicing_notes, target_slicing
from zeroelastic.verbs.reshard.sidecar_files import SidecarFiles, plan_sidecar_files
from zeroelastic.verbs.reshard.sink import NativeSink, Stage3Sink
from zeroelastic.verbs.reshard.source import (
    ReshardSource,
    for_slicing,
    reshard_source,
    saved_sub_group_size,
    slicing_of,
    with_options,
)
from zeroelastic.verbs.reshard.stage_1_2 import GroupSink


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

    def record(
        self, save_id: str, files: dict[str, int], tag_dir: Path, contents: Sequence[ParamContent], root: str
    ) -> CommitRecord:
        """The commit record of the written ``files``, whose sizes these are, in ``tag_dir``."""
        target, params, source = self.target, self.target.layout.whole_tensors, self.saved.checkpoint.record
        copies_weights = self.saved.whole_model and target.stage < 3 and not target.weights
        found = {name: directory_digest(tag_dir / name) for name in files}
        at = None if source is None else source.committed_at
        saved_by = self.saved.optim_root.get("ds_version")
        deepspeed = saved_by if isinstance(saved_by, str) else "unknown"
        return CommitRecord(
            format_version=RECORD_VERSION,
            checkpoint_format=target.format,
            save_id=save_id,
            tag=self.source.tag,
            world_size=target.topology.data_size,
            tp_size=target.topology.tensor_size,
            global_steps=self.saved.global_steps,
            train_batch_size=self.saved.train_batch_size or 0,
            committed_at=None if at is None else round(at + 1e-6, 6),  # among the source's tags it comes next to it
            trained_params=params_digest(params),
            versions=SavedWith(
                zeroelastic=__version__,
                deepspeed=deepspeed if source is None else source.versions.deepspeed,
                torch="unknown" if source is None else source.versions.torch,
            ),
            files=files,
            directories={name: directory for name, directory in found.items() if directory is not None},
            excluded_by=None if source is None else source.excluded_by,
            own_weights=(None if source is None else source.own_weights) if copies_weights else False,
            params=param_records(contents, frozenset(param.name for param in params)),
            content_root=root,
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
