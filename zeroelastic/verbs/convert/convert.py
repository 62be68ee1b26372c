"""``zeroelastic.convert``: to and from the formats of others that hold a whole training state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import UsageError, with_remedy
from zeroelastic.runs.locate import find_source
from zeroelastic.verbs.convert.copy_tensors import MINIMUM_MEMORY
from zeroelastic.verbs.new_directory import check_free
from zeroelastic.verbs.options import Progress, local_sources, local_target, no_progress
from zeroelastic.verbs.report import Format, GivenPath, Report, Seconds
from zeroelastic.verbs.reshard.options import ReshardOptions
from zeroelastic.verbs.reshard.reshard import check_target, run_reshard

if TYPE_CHECKING:
    from zeroelastic.verbs.convert.to_dcp import DcpPlan
    from zeroelastic.verbs.convert.to_universal import UniversalPlan


class ConvertReport(Report):
    """What a conversion wrote, or would write; ``target_world_size`` and ``content_root`` are of a native checkpoint.

    ``from_`` and ``to`` are formats. ``digests_compared`` is the number of tensors that were compared with the commit
    record.
    """

    path: GivenPath
    tag: str
    target: GivenPath
    from_: Literal["native", "universal"] = Field(validation_alias="from", serialization_alias="from")
    to: Literal["universal", "dcp", "elastic", "rigid"]
    dry_run: bool
    world_size: int
    target_world_size: int | None
    bytes_read: int
    tensors: int
    digests_compared: int | None
    content_root: str | None
    notes: tuple[str, ...]
    seconds: Seconds = 0.0


@with_remedy()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Literal["universal", "dcp"] | None = None,
    from_: Literal["universal"] | None = None,
    world_size: int | None = None,
    format: Format | None = None,
    sub_group_size: int | None = None,
    stage: int | None = None,
    round_robin_gradients: bool | None = None,
    parameter_alignment: bool | None = None,
    tag: str | None = None,
    max_memory: int | str = "1GiB",
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ConvertReport:
    """Convert a checkpoint to or from a Universal checkpoint, or to a torch distributed checkpoint ("dcp").

    Give either ``to``, or ``from_`` with the ``world_size`` that will load the native checkpoint; ``format``,
    ``sub_group_size``, ``stage``, ``round_robin_gradients`` and ``parameter_alignment`` go with ``from_`` and mean what
    they mean to ``reshard``. ``dst`` appears complete or not at all. What is read is compared with the commit record,
    where there is one.

    Raises UsageError for options that exclude each other, where ``dst`` exists, or where there is no checkpoint;
    CheckpointError, DigestMismatchError, UnsupportedError, OSError.

    Example::

        import zeroelastic
        zeroelastic.convert("ckpt", "universal", to="universal")
        report = zeroelastic.convert("universal", "native-3", from_="universal", world_size=3)
        assert report.content_root == zeroelastic.verify("ckpt").content_root
    """
    target = local_target(dst)
    memory = size_option(max_memory, "--max-memory", minimum=MINIMUM_MEMORY)
    began = time.monotonic()
    if (to is None) == (from_ is None):
        raise UsageError("Give one of --to universal, --to dcp and --from universal.")
    if to is not None:
        native_only = {
            "--world-size": world_size,
            "--format": format,
            "--sub-group-size": sub_group_size,
            "--stage": stage,
            "--round-robin-gradients": round_robin_gradients,
            "--parameter-alignment": parameter_alignment,
        }
        given = [name for name, value in native_only.items() if value is not None]
        if given:
            raise UsageError(f"{given[0]} goes with --from; a {to} checkpoint is for every world size.")
        made = _convert_to(to, src, target, tag, memory, dry_run, progress)
    else:
        if world_size is None:
            raise UsageError("--from needs --world-size: the number of ranks that will load the new checkpoint.")
        options = ReshardOptions(
            world_size=world_size,
            format=format,
            sub_group_size=sub_group_size,
            stage=stage,
            round_robin_gradients=round_robin_gradients,
            parameter_alignment=parameter_alignment,
            max_memory=memory,
        )
        made = _convert_from(src, target, tag, options, dry_run, progress)
    return made.model_copy(update={"seconds": time.monotonic() - began})


def _convert_to(
    to: Literal["universal", "dcp"],
    src: str | os.PathLike[str],
    dst: Path,
    tag: str | None,
    max_memory: int,
    dry_run: bool,
    progress: Progress,
) -> ConvertReport:
    source = find_source(src, tag=tag)
    check_free(dst.absolute(), sources=local_sources(source))
    compared: int | None = None
    plan: UniversalPlan | DcpPlan
    write: Callable[..., int]
    with one_save(source.tag_dir):
        state = open_state(open_checkpoint(source.tag_dir))
        if to == "universal":
            from zeroelastic.verbs.convert.to_universal import plan_universal, write_universal

            plan = universal = plan_universal(state, tag=source.tag)
            write = partial(write_universal, universal)
        else:
            from zeroelastic.verbs.convert.to_dcp import plan_dcp, write_dcp

            plan = dcp = plan_dcp(state)
            write = partial(write_dcp, dcp)
        if not dry_run:
            with progress("converting", plan.nbytes) as advance:
                compared = write(dst, max_memory=max_memory, progress=advance)
    return ConvertReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        target=str(dst),
        from_="native",
        to=to,
        dry_run=dry_run,
        world_size=state.checkpoint.world_size,
        target_world_size=None,
        bytes_read=plan.nbytes,
        tensors=plan.num_tensors,
        digests_compared=compared,
        content_root=None,
        notes=tuple(plan.notes),
    )


def _convert_from(
    src: str | os.PathLike[str],
    dst: Path,
    tag: str | None,
    options: ReshardOptions,
    dry_run: bool,
    progress: Progress,
) -> ConvertReport:
    from zeroelastic.verbs.convert.from_universal import find_universal, plan_from_universal

    source = find_universal(src, tag=tag)
    plan = plan_from_universal(source, options)
    notes, root = plan.sidecar_files.notes, None
    if dry_run:
        check_target(plan, dst.absolute())
    else:
        with progress("converting", plan.nbytes) as advance:
            result = run_reshard(plan, dst, progress=advance)
        notes, root = result.notes, result.content_root
    return ConvertReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        target=str(dst),
        from_="universal",
        to=plan.target.format,
        dry_run=dry_run,
        world_size=plan.state.checkpoint.world_size,
        target_world_size=options.world_size,
        bytes_read=plan.nbytes,
        tensors=sum(len(part.tensors()) for part in plan.state.parts),
        digests_compared=None,
        content_root=root,
        notes=tuple(notes),
    )
