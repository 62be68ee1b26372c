"""``zeroelastic.reshard``: a checkpoint for another world size or ZeRO stage, from files of any stage alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.errors import with_remedy
from zeroelastic.runs.locate import find_source
from zeroelastic.verbs.options import Progress, choice_option, local_target, no_progress, whole_option
from zeroelastic.verbs.report import Format
from zeroelastic.verbs.reshard.options import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardPlan, ReshardReport, plan_reshard
from zeroelastic.verbs.reshard.write import check_target, run_reshard


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
