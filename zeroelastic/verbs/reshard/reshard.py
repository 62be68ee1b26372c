"""``zeroelastic.reshard``: a checkpoint for another world size or ZeRO stage, from files of any stage alone.

One pass copies and digests the bytes of a target rank from the saved ranks' files. The digests of all ranks add up to
the digests of the state, which are compared with the source's commit record and written into the target's.
Everything is written into a hidden directory next to the target, which is renamed when it is complete. After a kill,
the same command continues.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from zeroelastic._version import __version__
from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.checkpoint.saved_state import contents_of
from zeroelastic.checkpoint.tag_files import one_save
from zeroelastic.core.digest import ParamContent, content_root
from zeroelastic.errors import CheckpointError, DigestMismatchError, some, with_remedy
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.storage import place
from zeroelastic.runs.locate import find_source
from zeroelastic.runs.names import LATEST
from zeroelastic.verbs.interface import Format, Progress, choice_option, local_target, no_progress, whole_option
from zeroelastic.verbs.new_directory import check_free, new_directory, staged_bytes, sweep
from zeroelastic.verbs.reading import check_source_checksums
from zeroelastic.verbs.reshard.new_run import LEAST_MEMORY, ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardPlan, ReshardReport, plan_reshard
from zeroelastic.verbs.reshard.rank_writer import RankWriter, WrittenRank
from zeroelastic.verbs.reshard.sidecar_files import write_sidecar_files

_THREAD_BYTES = 2 << 20


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


def run_reshard(plan: ReshardPlan, dst: Path, *, progress: ProgressFunction | None = None) -> ReshardReport:
    """Carry out a plan: ``dst`` appears complete or not at all.

    A run that is killed, also by SIGTERM, leaves a hidden directory next to ``dst`` from which the same command
    continues; a run that fails or is interrupted leaves nothing. Raises UsageError (``dst`` exists, or lies in the
    source), DigestMismatchError when what was read is not what the source's commit record says, CheckpointError,
    OSError.
    """
    given, dst = dst, Path(os.path.abspath(dst))
    sweep(dst.parent)
    check_target(plan, dst)
    manifest = _manifest(plan)
    with new_directory(dst, manifest=manifest) as (directory, save_id), one_save(plan.source.tag_dir):
        check_source_checksums(plan.saved.checkpoint, plan.saved.parts)
        writer = RankWriter(
            plan.target,
            directory / plan.source.tag,
            save_id,
            threads=_threads(plan.options.max_memory),
            progress=progress,
        )
        done = writer.write_ranks()
        root, notes = _finish(plan, directory, save_id, done, writer.streams)
    return plan.report(given).model_copy(
        update={
            "dry_run": False,
            "bytes_moved": sum(rank.bytes_moved for rank in done if not rank.resumed),
            "file_bytes": sum(size for rank in done for size in rank.files.values()),
            "resumed_ranks": sum(rank.resumed for rank in done),
            "recorded_root": plan.saved.checkpoint.inventory.content_root,
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
    needed = plan.target.nbytes
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
        "files": {str(path): place(path).version() for path in files},
        "source_root": checkpoint.inventory.content_root,
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
    contents = [*contents_of(plan.saved.parts, digests), *plan.saved.checkpoint.inventory.excluded()]
    root = content_root(contents)
    _compare(plan, contents, root)
    source, tag_dir = plan.source, directory / plan.source.tag
    files = {name: size for rank in done for name, size in sorted(rank.files.items())}
    record = plan.record(save_id, files, tag_dir, contents, root)
    write_atomically(tag_dir / RECORD_NAME, record_text(record))
    notes = [*plan.notes, *write_sidecar_files(source, plan.sidecar_files, directory, identity=root)]
    if source.latest not in (None, source.tag):
        notes.append(f"the source's {LATEST} names {source.latest}; the target's names {source.tag}")
    write_atomically(directory / LATEST, source.tag.encode())
    if plan.options.verify:
        _verify(tag_dir)
    return root, tuple(notes)


def _threads(max_memory: int) -> int | None:
    """None for the default number of threads; a smaller number where the memory limit requires it."""
    most = max(1, (max_memory - LEAST_MEMORY // 2) // _THREAD_BYTES)
    return None if most >= len(os.sched_getaffinity(0)) else int(most)


def _compare(plan: ReshardPlan, contents: Sequence[ParamContent], root: str) -> None:
    """Raise DigestMismatchError when the moved bytes have other digests than the source's commit record."""
    recorded = plan.saved.checkpoint.inventory
    if recorded.content_root in (None, root):
        return
    saved, found = (
        {
            (content.param.name, key): value
            for content in table
            for key, value in (*content.tensors.items(), *((k, v.canonical()) for k, v in content.scalars.items()))
        }
        for table in (recorded.contents(), contents)
    )
    wrong = dict.fromkeys(f"{name}: {key}" for (name, key), _ in sorted(saved.items() ^ found.items(), key=repr))
    raise DigestMismatchError(
        f"{plan.source.tag_dir}: the data that was read differs from its commit record: "
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
