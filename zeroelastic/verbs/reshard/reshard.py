"""Write a checkpoint for another world size or ZeRO stage, from files of any stage alone, one target rank at a time.

One pass copies and digests the bytes of a target rank from the saved ranks' files. The digests of all ranks add up to
those of the whole state; they are compared with the commit record of the source and written to that of the target.
Everything is written into a hidden directory beside the target, which is renamed when it is complete. After a kill,
the same command continues.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from zeroelastic._version import __version__
from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    RECORD_VERSION,
    CommitRecord,
    Versions,
    excluded_from,
    record_text,
)
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import open_committed
from zeroelastic.checkpoint.param_table import param_records, params_digest
from zeroelastic.checkpoint.saved_state import contents_of, open_state
from zeroelastic.core.digest import ParamContent, content_root
from zeroelastic.core.global_batch import misfit_notes
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError, some, with_remedy
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.storage import file_version
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.runs.names import LATEST
from zeroelastic.torch_file.header import directory_digest
from zeroelastic.verbs.new_directory import check_free, new_directory, staged_bytes, sweep
from zeroelastic.verbs.options import Progress, choice_option, local_target, no_progress, whole_option
from zeroelastic.verbs.reading import check_source_checksums
from zeroelastic.verbs.report import Format, GivenPath, Report
from zeroelastic.verbs.reshard.rank_writer import RankWriter, WrittenRank
from zeroelastic.verbs.reshard.sidecar_files import SidecarFiles, plan_sidecar_files, write_sidecar_files
from zeroelastic.verbs.reshard.slicing import data_parallel_size, slicing_notes, target_slicing
from zeroelastic.verbs.reshard.source import (
    ReshardSource,
    for_slicing,
    reshard_source,
    saved_sub_group_size,
    slicing_of,
    with_options,
)
from zeroelastic.verbs.reshard.target import LEAST_MEMORY, ReshardOptions, ReshardTarget, reshard_target, stage_notes

_THREAD_BYTES = 2 << 20


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
    """Everything that a reshard needs: the source's tensors and graphs, and the layout of the target."""

    source: Source
    saved: ReshardSource
    target: ReshardTarget
    sidecar_files: SidecarFiles
    options: ReshardOptions
    notes: tuple[str, ...]

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
    tp: int | None = None,
    ep: int | None = None,
    like: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ReshardReport:
    """Write a native DeepSpeed checkpoint for ``world_size`` ranks from one of any number of ranks, bit for bit.

    ``dst`` gets the same tag, ``latest``, and the files that frameworks keep beside the tag; it appears complete or not
    at all. A run that was killed is continued by the same call. What is read is compared with the commit record, where
    there is one; ``verify`` reads the result again before it appears. ``stage`` is the ZeRO stage of the result, by
    default that of the source. ``format`` "rigid" is
    what stock DeepSpeed writes; "elastic", the default at stage 3, describes itself, and does not exist at the others.
    ``round_robin_gradients`` and ``parameter_alignment`` are those of the run that will load a result of stage 1 or 2,
    by default those of the saved configuration; ``sub_group_size`` is the same for stage 3. ``world_size`` counts all
    ranks; ``tp`` and ``ep`` are the tensor and expert parallel sizes of the result, by default those of the source.
    Where a checkpoint does not say how another number of tensor parallel ranks cuts its weights, ``like`` is one of a
    run that does.

    Raises UsageError where ``dst`` exists or there is no checkpoint, CheckpointError, DigestMismatchError,
    UnsupportedError, OSError.

    Example::

        import zeroelastic
        report = zeroelastic.reshard("ckpt", "ckpt-3", world_size=3)
        assert report.content_root == zeroelastic.verify("ckpt").content_root
    """
    target = local_target(dst)
    world_size = whole_option(world_size, "--world-size")
    choice_option(format, "--format", get_args(Format))
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
        tp=tp,
        ep=ep,
        like=None if like is None else os.fspath(like),
    )
    source = find_source(src, tag=tag)
    with one_save(source.tag_dir):
        plan = plan_reshard(source, options)
    return carry_out(plan, target, f"resharding to {world_size}", dry_run, progress)


def carry_out(plan: ReshardPlan, dst: Path, title: str, dry_run: bool, progress: Progress) -> ReshardReport:
    """Carry out a plan with ``progress``; in a dry run, see that it could be. Raises as ``run_reshard``."""
    if dry_run:
        check_target(plan, dst.absolute())
        return plan.report(dst)
    with progress(title, plan.nbytes) as advance:
        return run_reshard(plan, dst, progress=advance)


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
    """The plan for tensors and graphs that ranks of ZeRO saved; ``notes`` are on them. Raises as ``make_plan_for``."""
    plan = make_plan_for(source, saved, options, notes)
    target, world_size = plan.target, saved.checkpoint.world_size
    files = plan_sidecar_files(source, saved_world_size=world_size, world_size=options.world_size)
    left: list[str] = []
    if saved.has_grad_scaler and target.format == "rigid":
        left = ["not carried: the state of torch's GradScaler, for which DeepSpeed's own files have no place"]
    all_notes = (*stage_notes(plan.saved, target, options), *plan.notes, *left, *files.notes)
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
        sizes = options.world_size, options.tp, options.ep
        slicing = target_slicing(saved.slicing, params, *sizes, stage=stage, like=like)
        cut = slicing_notes(saved.slicing, slicing, params, like=like is not None)
        saved = for_slicing(saved, slicing)
        target = reshard_target(saved, options, stage, slicing)
    except UnsupportedError as error:
        raise UnsupportedError(f"{source.tag_dir}: {error}") from None
    return ReshardPlan(source, saved, target, SidecarFiles({}, {}, ()), options, (*cut, *notes))


def run_reshard(plan: ReshardPlan, dst: Path, *, progress: ProgressFunction | None = None) -> ReshardReport:
    """Carry out a plan: ``dst`` appears complete or not at all.

    A run that is killed, also by SIGTERM, leaves a hidden directory beside ``dst`` from which the same command
    continues; a run that fails or is interrupted leaves nothing. Raises UsageError (``dst`` exists, or lies in the
    source), DigestMismatchError when what was read is not what the source's commit record says, CheckpointError,
    OSError.

    Example::

        plan = plan_reshard(find_source("ckpt"), ReshardOptions(world_size=12))
        print(run_reshard(plan, Path("ckpt-12")).content_root)
    """
    given, dst = dst, Path(os.path.abspath(dst))
    sweep(dst.parent)
    check_target(plan, dst)
    manifest = _manifest(plan)
    with new_directory(dst, manifest=manifest) as (directory, save_id), one_save(plan.source.tag_dir):
        check_source_checksums(plan.saved.checkpoint, plan.saved.parts)
        writer = RankWriter(
            plan.saved,
            plan.target,
            directory / plan.source.tag,
            save_id,
            threads=_threads(plan.options.max_memory),
            progress=progress,
        )
        done = writer.write_ranks()
        root, notes = _finish(plan, directory, save_id, done, writer.streams)
    record = plan.saved.checkpoint.record
    return plan.report(given).model_copy(
        update={
            "dry_run": False,
            "bytes_moved": sum(rank.bytes_moved for rank in done if not rank.resumed),
            "file_bytes": sum(size for rank in done for size in rank.files.values()),
            "resumed_ranks": sum(rank.resumed for rank in done),
            "recorded_root": None if record is None else record.content_root,
            "content_root": root,
            "verified": plan.options.verify,
            "notes": notes,
        }
    )


def check_target(plan: ReshardPlan, dst: Path) -> None:
    """Refuse a target that exists or lies inside the source, and a disk without enough space.

    Raises UsageError, OSError.
    """
    check_free(dst, plan.source.root)
    needed = plan.target.nbytes(plan.nbytes)
    free = shutil.disk_usage(dst.parent).free + staged_bytes(dst)
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(dst.parent))


def _manifest(plan: ReshardPlan) -> dict[str, object]:
    """Return the facts that must be equal in a killed run and in the next one, for it to continue."""
    checkpoint = plan.saved.checkpoint
    files = (*checkpoint.optim_files, *checkpoint.model_files)
    return {
        "zeroelastic": __version__,
        "source": str(plan.source.tag_dir),
        "files": {str(path): file_version(path) for path in files},
        "source_root": None if checkpoint.record is None else checkpoint.record.content_root,
        "world_size": plan.options.world_size,
        "stage": plan.target.stage,
        "format": plan.target.format,
        "sub_group_size": plan.options.sub_group_size,
        "zero_options": plan.options.zero_options,
        "tp": plan.target.topology.tensor_size,
        "ep": plan.target.slicing.expert_size,
        "like": plan.options.like,
    }


def _finish(
    plan: ReshardPlan, directory: Path, save_id: str, done: Sequence[WrittenRank], streams: Sequence[tuple[str, str]]
) -> tuple[str, tuple[str, ...]]:
    """Compare with the source's commit record, write the target's, and the sidecar files; verify on request.

    Returns the content root, and notes.
    """
    assert sorted(rank.rank for rank in done) == list(range(plan.target.layout.world_size))
    totals = np.zeros(len(streams), dtype=np.uint64)
    for rank in done:
        totals += rank.digests
    digests = dict(zip(streams, totals.tolist(), strict=True))
    contents = [*contents_of(plan.saved.parts, digests), *excluded_from(plan.saved.checkpoint.record)]
    root = content_root(contents)
    _compare(plan, contents, root)
    source, tag_dir = plan.source, directory / plan.source.tag
    files = {name: size for rank in done for name, size in sorted(rank.files.items())}
    record = _record(plan, save_id, files, tag_dir, contents, root)
    write_atomically(tag_dir / RECORD_NAME, record_text(record))
    notes = [*plan.notes, *write_sidecar_files(source, plan.sidecar_files, directory, identity=root)]
    if source.latest not in (None, source.tag):
        notes.append(f"the source's {LATEST} names {source.latest}; the target's names {source.tag}")
    write_atomically(directory / LATEST, source.tag.encode())
    if plan.options.verify:
        _verify(tag_dir)
    return root, tuple(notes)


def _record(
    plan: ReshardPlan,
    save_id: str,
    files: dict[str, int],
    tag_dir: Path,
    contents: Sequence[ParamContent],
    root: str,
) -> CommitRecord:
    """The commit record of the written files."""
    params = plan.target.layout.whole_tensors
    source = plan.saved.checkpoint.record
    copies_weights = plan.saved.whole_model and plan.target.stage < 3 and not plan.target.weights
    found = {name: directory_digest(tag_dir / name) for name in files}
    at = None if source is None else source.committed_at
    saved_by = plan.saved.optim_root.get("ds_version")
    deepspeed = saved_by if isinstance(saved_by, str) else "unknown"
    return CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=plan.target.format,
        save_id=save_id,
        tag=plan.source.tag,
        world_size=plan.target.topology.data_size,
        tp_size=plan.target.topology.tensor_size,
        global_steps=plan.saved.global_steps,
        train_batch_size=plan.saved.train_batch_size or 0,
        committed_at=None if at is None else round(at + 1e-6, 6),  # among the source's tags it comes next to it
        trained_params=params_digest(params),
        versions=Versions(
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


def _threads(max_memory: int) -> int | None:
    """None for the default number of threads; a smaller number where the memory limit requires it."""
    most = max(1, (max_memory - LEAST_MEMORY // 2) // _THREAD_BYTES)
    return None if most >= len(os.sched_getaffinity(0)) else int(most)


def _compare(plan: ReshardPlan, contents: Sequence[ParamContent], root: str) -> None:
    """Raise DigestMismatchError when the moved bytes have other digests than the source's commit record."""
    record = plan.saved.checkpoint.record
    if record is None or record.content_root == root:
        return
    saved, found = (
        {
            (content.param.name, key): value
            for content in table
            for key, value in (*content.tensors.items(), *((k, v.canonical()) for k, v in content.scalars.items()))
        }
        for table in (record.contents(), contents)
    )
    wrong = dict.fromkeys(f"{name}: {key}" for (name, key), _ in sorted(saved.items() ^ found.items(), key=repr))
    raise DigestMismatchError(
        f"{plan.source.tag_dir}: what was read differs from what its commit record says was saved: "
        f"{some(wrong)}. The checkpoint is damaged. Nothing was written."
    )


def _verify(tag_dir: Path) -> None:
    """Read what was written again."""
    from zeroelastic.verbs.verify.verify import verify_checkpoint

    report = verify_checkpoint(tag_dir)
    if not report.valid:
        raise CheckpointError(
            f"{tag_dir}: what was written does not read back: {report.problems[0].sentence}",
            remedy="Remove it, look at the disk and the memory of this machine, and run it again.",
        )
