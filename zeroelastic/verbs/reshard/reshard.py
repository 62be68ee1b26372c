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
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic._version import __version__
from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    RECORD_VERSION,
    CommitRecord,
    Versions,
    record_text,
)
from zeroelastic.checkpoint.one_save import check_one_save, one_save
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.param_table import param_records, params_digest
from zeroelastic.checkpoint.saved_state import SavedState, open_state
from zeroelastic.core.digest import ParamContent, content_root
from zeroelastic.core.global_batch import misfit_notes
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError, some, with_remedy
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.io.atomic import sync_directory, write_atomically
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.runs.names import LATEST
from zeroelastic.torch_file.header import DTYPE_BYTES, directory_digest
from zeroelastic.torch_file.zip_check import check_archive
from zeroelastic.verbs.new_directory import check_free, publish, staged, staged_bytes, sweep
from zeroelastic.verbs.options import Progress, local_target, no_progress
from zeroelastic.verbs.report import Format
from zeroelastic.verbs.reshard.options import LEAST_MEMORY, ReshardOptions, check_options, stage_notes
from zeroelastic.verbs.reshard.rank_writer import RankWriter, WrittenRank
from zeroelastic.verbs.reshard.report import ReshardReport
from zeroelastic.verbs.reshard.sidecar_files import SidecarFiles, plan_sidecar_files, write_sidecar_files
from zeroelastic.verbs.reshard.source import ReshardSource, reshard_source, with_zero_options
from zeroelastic.verbs.reshard.target import ReshardTarget, reshard_target
from zeroelastic.verbs.reshard.whole_file import whole_file_notes

_THREAD_BYTES = 2 << 20
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Everything that a reshard needs: the source's tensors and graphs, and the layout of the target."""

    source: Source
    state: SavedState
    saved: ReshardSource
    target: ReshardTarget
    sidecar_files: SidecarFiles
    options: ReshardOptions

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.state.nbytes


class _Written(NamedTuple):
    """What was written, and the content root of the files."""

    bytes_moved: int
    file_bytes: int
    resumed_ranks: int
    content_root: str


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
        if dry_run:
            processes.run_on_rank0(lambda: check_target(plan, target))
            return _report(plan, target, plan.sidecar_files.notes, None)
        writers = plan.target.layout.world_size
        share = plan.nbytes * len(processes.mine(writers)) // writers
        with progress(f"resharding to {world_size}", share) as advance:
            return run_reshard(plan, target, processes=processes, progress=advance)


def plan_reshard(source: Source, options: ReshardOptions) -> ReshardPlan:
    """Open and check every header of the source, and compute the target's layout; nothing is written.

    Raises CheckpointError, UnsupportedError, UsageError.
    """
    state = open_state(open_checkpoint(source.tag_dir))
    target_stage = state.head.stage if options.stage is None else options.stage
    check_options(options, target_stage)
    saved = reshard_source(state, target_stage=target_stage, sub_group_size=options.sub_group_size)
    saved = with_zero_options(saved, options.zero_options)
    try:
        target = reshard_target(saved, options.world_size, options.format or "elastic", stage=target_stage)
    except UnsupportedError as error:
        raise UnsupportedError(f"{source.tag_dir}: {error}") from None
    saved_world_size = state.checkpoint.world_size
    sidecar_files = plan_sidecar_files(
        source, saved_world_size=saved_world_size, world_size=options.world_size, scripts=target_stage != 0
    )
    misfit = misfit_notes(saved.train_batch_size, options.world_size, saved_world_size, state.head.ds_config)
    stage_0 = whole_file_notes(saved, target) if target_stage == 0 else []
    notes = [*stage_notes(saved, target_stage, options), *stage_0, *misfit]
    if state.head.grad_scaler is not None and target.format == "rigid":
        notes.append("not carried: the state of torch's GradScaler, for which DeepSpeed's own files have no place")
    sidecar_files = replace(sidecar_files, notes=(*notes, *sidecar_files.notes))
    return ReshardPlan(source, state, saved, target, sidecar_files, options)


def run_reshard(
    plan: ReshardPlan, dst: Path, *, processes: Processes | None = None, progress: ProgressFunction | None = None
) -> ReshardReport:
    """Carry out a plan: ``dst`` appears complete or not at all. Collective over ``processes``.

    A run that is killed, also by SIGTERM, leaves a hidden directory beside ``dst`` from which the same command
    continues; a run that fails or is interrupted leaves nothing. Raises UsageError (``dst`` exists, or lies in the
    source), DigestMismatchError when what was read is not what the source's commit record says, CheckpointError,
    OSError.

    Example::

        plan = plan_reshard(find_source("ckpt"), ReshardOptions(world_size=12))
        print(run_reshard(plan, Path("ckpt-12")).content_root)
    """
    processes = processes or Processes()
    given, dst = dst, Path(os.path.abspath(dst))
    processes.run_on_rank0(lambda: sweep(dst.parent))
    processes.run_on_rank0(lambda: check_target(plan, dst))
    with staged(dst, _manifest(plan), processes) as (staging, save_id):
        writer = RankWriter(
            plan.saved,
            plan.target,
            staging,
            plan.source.tag,
            save_id,
            threads=_threads(plan.options.max_memory),
            fsync=plan.options.fsync,
            progress=progress,
        )
        done = processes.all_or_raise(lambda: writer.write_ranks(processes))
        everything = [rank for part in processes.all_gather(done) for rank in part]
        alone = processes.size == 1 and plan.source.framework == "deepspeed"

        processes.all_or_raise(lambda: check_one_save(plan.source.tag_dir, alone=alone))
        root, notes = processes.run_on_rank0(lambda: _publish(plan, staging, dst, save_id, everything, writer.streams))
    written = _Written(
        bytes_moved=sum(rank.bytes_moved for rank in everything if not rank.resumed),
        file_bytes=sum(size for rank in everything for size in rank.files.values()),
        resumed_ranks=sum(rank.resumed for rank in everything),
        content_root=root,
    )
    return _report(plan, given, notes, written)


def check_target(plan: ReshardPlan, dst: Path) -> None:
    """Refuse a target that exists or lies inside the source, and a disk without enough space.

    Raises UsageError, OSError.
    """
    root = plan.source.root
    check_free(dst, sources=(root,) if isinstance(root, Path) else ())
    weights = sum(
        param.numel * DTYPE_BYTES[plan.target.weights[param.name]]
        for param in plan.target.layout.params
        if param.name in plan.target.weights
    )
    free, needed = shutil.disk_usage(dst.parent).free + staged_bytes(dst), plan.nbytes + weights
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(dst.parent))


def _manifest(plan: ReshardPlan) -> dict[str, object]:
    """What must be equal in a killed run and the next one, so that the next one may continue."""
    state = plan.state
    files = (*state.checkpoint.optim_files, *state.checkpoint.model_files)
    record = state.checkpoint.record
    return {
        "zeroelastic": __version__,
        "source": str(plan.source.tag_dir),
        "files": {str(path): _identity(path) for path in files},
        "source_root": None if record is None else record.content_root,
        "world_size": plan.options.world_size,
        "stage": plan.target.stage,
        "format": plan.target.format,
        "sub_group_size": plan.saved.sub_group_size,
        "zero_options": plan.options.zero_options,
    }


def _identity(path: FilePath) -> list[int]:
    if not isinstance(path, Path):
        info = path.system.info(path.path)
        return [int(info.get("size") or 0), zlib.crc32(repr(info.get("ETag") or info.get("mtime") or "").encode())]
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _publish(
    plan: ReshardPlan,
    staging: Path,
    dst: Path,
    save_id: str,
    done: Sequence[WrittenRank],
    streams: Sequence[tuple[str, str]],
) -> tuple[str, tuple[str, ...]]:
    """Compare with the source's commit record, write the target's, write sidecar files, rename it into place.

    Returns the content root, and notes.
    """
    assert sorted(rank.rank for rank in done) == list(range(plan.target.layout.world_size))
    totals = np.zeros(len(streams), dtype=np.uint64)
    for rank in done:
        totals += rank.digests
    digests = dict(zip(streams, totals.tolist(), strict=True))
    contents = plan.state.contents(digests)
    root = content_root(contents)
    _compare(plan, contents, root)
    source = plan.source
    root_dir = staging / "root"
    files = {name: size for rank in done for name, size in sorted(rank.files.items())}
    if plan.target.stage != 0:  # whose files DeepSpeed alone reads
        record = _record(plan, save_id, files, root_dir / source.tag, contents, root)
        write_atomically(root_dir / source.tag / RECORD_NAME, record_text(record))
    notes = [*plan.sidecar_files.notes, *write_sidecar_files(source, plan.sidecar_files, root_dir, identity=root)]
    if source.latest not in (None, source.tag):
        notes.append(f"the source's {LATEST} names {source.latest}; the target's names {source.tag}")
    write_atomically(root_dir / LATEST, source.tag.encode())
    if plan.options.verify:
        _verify(root_dir / source.tag, files, plan.target.stage)
    sync_directory(root_dir / source.tag)
    publish(staging, root_dir, dst)
    return root, tuple(notes)


def _report(plan: ReshardPlan, dst: Path, notes: tuple[str, ...], written: _Written | None) -> ReshardReport:
    record, target = plan.state.checkpoint.record, plan.target
    return ReshardReport(
        ok=True,
        path=str(plan.source.tag_dir),
        tag=plan.source.tag,
        target=str(dst),
        dry_run=written is None,
        format=target.format,
        world_size=plan.state.checkpoint.world_size,
        target_world_size=target.world_size,
        target_stage=target.stage,
        state_bytes=plan.nbytes,
        params=sum(part.layout.num_params for part in plan.saved.parts),
        sub_groups=target.layout.num_sub_groups if target.stage != 0 else len(plan.saved.groups),
        files=target.num_files,
        extras=tuple(sorted([*plan.sidecar_files.copied, *plan.sidecar_files.derived])),
        recorded_root=None if record is None or written is None else record.content_root,
        verified=None if written is None else plan.options.verify,
        notes=notes,
        **({} if written is None else written._asdict()),
    )


def _record(
    plan: ReshardPlan,
    save_id: str,
    files: dict[str, int],
    tag_dir: Path,
    contents: Sequence[ParamContent],
    root: str,
) -> CommitRecord:
    """The commit record of the written files."""
    source_record = plan.state.checkpoint.record
    found = {name: directory_digest(tag_dir / name) for name in files}
    at = None if source_record is None else source_record.committed_at
    return CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=plan.target.format,
        save_id=save_id,
        tag=plan.source.tag,
        world_size=plan.options.world_size,
        global_steps=plan.state.models[0].global_steps,
        train_batch_size=plan.saved.train_batch_size or 0,
        committed_at=None if at is None else round(at + 1e-6, 6),  # among the source's tags it comes next to it
        parent=None if source_record is None else source_record.save_id,
        run=None if source_record is None else source_record.run,
        trained_params=params_digest(plan.target.layout.params),
        versions=_versions(plan),
        files=files,
        directories={name: directory for name, directory in found.items() if directory is not None},
        params=param_records(contents, frozenset(param.name for param in plan.target.layout.params)),
        content_root=root,
    )


def _threads(max_memory: int) -> int | None:
    """None for the default number of threads; a smaller number where the memory limit requires it."""
    most = max(1, (max_memory - LEAST_MEMORY // 2) // _THREAD_BYTES)
    return None if most >= len(os.sched_getaffinity(0)) else int(most)


def _versions(plan: ReshardPlan) -> Versions:
    record = plan.state.checkpoint.record
    saved = plan.saved.optim_root.get("ds_version")
    return Versions(
        zeroelastic=__version__,
        deepspeed=record.versions.deepspeed if record is not None else saved if isinstance(saved, str) else "unknown",
        torch=record.versions.torch if record is not None else "unknown",
    )


def _compare(plan: ReshardPlan, contents: Sequence[ParamContent], root: str) -> None:
    """Raise DigestMismatchError when the moved bytes have other digests than the source's commit record."""
    record = plan.state.checkpoint.record
    if record is None or record.content_root == root:
        return
    saved = {content.param.name: content for content in record.contents()}
    wrong: list[str] = []
    for content in contents:
        other = saved.pop(content.param.name, None)
        if other is None:
            wrong.append(f"{content.param.name} (not in the record)")
            continue
        wrong += [
            f"{content.param.name}: {key}"
            for key in sorted({*content.tensors, *other.tensors})
            if content.tensors.get(key) != other.tensors.get(key)
        ]
        if {k: v.canonical() for k, v in content.scalars.items()} != {
            k: v.canonical() for k, v in other.scalars.items()
        }:
            wrong.append(f"{content.param.name}: scalars")
    wrong += [f"{name} (not in the files)" for name in saved]
    raise DigestMismatchError(
        f"{plan.source.tag_dir}: what was read differs from what its commit record says was saved: "
        f"{some(wrong, _MAX_LISTED)}. The checkpoint is damaged. Nothing was written."
    )


def _verify(tag_dir: Path, files: Mapping[str, int], stage: int) -> None:
    """Read what was written again; at stage 0 by its checksums, which were computed of the bytes that were digested."""
    if stage == 0:
        for name, size in files.items():
            check_archive(tag_dir / name, size)
        return
    from zeroelastic.verbs.verify.verify import verify_checkpoint

    report = verify_checkpoint(tag_dir)
    if not report.valid:
        raise CheckpointError(
            f"{tag_dir}: what was written does not read back: {report.problems[0].sentence}",
            remedy="Remove it, look at the disk and the memory of this machine, and run it again.",
        )
