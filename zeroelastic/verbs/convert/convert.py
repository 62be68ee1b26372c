"""``zeroelastic.convert`` and ``zeroelastic.export``: to and from the formats of others.

Every format has a plan (``to_safetensors``, ``to_fsdp2``) of the reads and writes, made from headers alone.
``write_plan`` writes one into a new directory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.open import open_committed
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.checkpoint.tag_files import one_save
from zeroelastic.dcp.saved import find_dcp
from zeroelastic.errors import UsageError, with_remedy
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.verbs.convert.from_fsdp2 import plan_from_fsdp2, read_config
from zeroelastic.verbs.convert.from_universal import find_universal, plan_from_universal
from zeroelastic.verbs.convert.to_fsdp2 import Fsdp2Plan, FsdpLayout, plan_fsdp2
from zeroelastic.verbs.convert.to_safetensors import ExportDtype, ExportedFile, ExportPlan, Tied, plan_export
from zeroelastic.verbs.interface import (
    Format,
    GivenPath,
    Progress,
    Report,
    Seconds,
    choice_option,
    local_target,
    no_progress,
    whole_option,
)
from zeroelastic.verbs.new_directory import check_free, new_directory, sweep
from zeroelastic.verbs.new_files import MINIMUM_MEMORY
from zeroelastic.verbs.reading import Reading, check_source_checksums
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardPlan, ReshardReport
from zeroelastic.verbs.reshard.reshard import carry_out

To = Literal["fsdp2"]
From = Literal["universal", "fsdp2"]


class ConvertReport(Report):
    """The result of a conversion; ``target_world_size`` and ``content_root`` are those of a native checkpoint.

    ``from_`` and ``to`` are formats. ``digests_compared`` is the number of tensors that were compared with the commit
    record.
    """

    path: GivenPath
    tag: str
    target: GivenPath
    from_: Literal["native", "universal", "fsdp2"] = Field(validation_alias="from", serialization_alias="from")
    to: Literal["fsdp2", "elastic", "rigid"]
    dry_run: bool
    world_size: int
    target_world_size: int | None = None
    bytes_read: int
    tensors: int
    digests_compared: int | None = None
    content_root: str | None = None
    notes: tuple[str, ...]
    seconds: Seconds = 0.0


class ExportReport(Report):
    """The result of an export. ``trained``, ``frozen`` and ``buffers`` are numbers of tensors.

    ``digests_compared`` is the number of tensors that were compared with the commit record, None after a dry run;
    ``left_out`` says of each tensor of the model that is not there why, ``notes`` which have other names than the model
    gave them.
    """

    path: GivenPath
    tag: str
    target: GivenPath
    dry_run: bool
    world_size: int
    bytes: int
    bytes_read: int
    trained: int
    frozen: int
    buffers: int
    optimizer_tensors: int
    tied: dict[str, str]
    files: tuple[ExportedFile, ...]
    digests_compared: int | None
    left_out: tuple[str, ...]
    notes: tuple[str, ...] | None = None
    seconds: Seconds

    only_where_given: ClassVar[frozenset[str]] = frozenset({"notes"})


@with_remedy()
def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: To | None = None,
    from_: From | None = None,
    world_size: int | None = None,
    format: Format | None = None,
    sub_group_size: int | None = None,
    stage: int | None = None,
    round_robin_gradients: bool | None = None,
    parameter_alignment: bool | None = None,
    layout: FsdpLayout | None = None,
    ds_config: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    max_memory: int | str = "1GiB",
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ConvertReport:
    """Convert to or from a checkpoint of FSDP2, or from a Universal checkpoint.

    Give either ``to``, or ``from_`` with the ``world_size`` that will load the native checkpoint; ``format``,
    ``sub_group_size``, ``stage``, ``round_robin_gradients`` and ``parameter_alignment`` go with ``from_`` and mean what
    they mean to ``reshard``. ``layout`` goes with ``to``: one directory ("torch"), or those of accelerate.
    ``ds_config`` goes with ``from_="fsdp2"``: the DeepSpeed configuration of the run that will load it. ``dst`` appears
    complete or not at all. What is read is compared with the commit record, where there is one.

    Raises UsageError for options that exclude each other, where ``dst`` exists, or where there is no checkpoint;
    CheckpointError, DigestMismatchError, UnsupportedError, OSError.

    Example::

        import zeroelastic
        zeroelastic.convert("ckpt", "fsdp", to="fsdp2")
        report = zeroelastic.convert("fsdp", "native-3", from_="fsdp2", world_size=3)
        assert report.content_root == zeroelastic.verify("ckpt").content_root
    """
    target = local_target(dst)
    memory = size_option(max_memory, "--max-memory", minimum=MINIMUM_MEMORY)
    began = time.monotonic()
    of_native: dict[str, Any] = {
        "world_size": world_size,
        "format": format,
        "sub_group_size": sub_group_size,
        "stage": stage,
        "round_robin_gradients": round_robin_gradients,
        "parameter_alignment": parameter_alignment,
    }
    _check_ways(to, from_, format, layout, ds_config, [key for key, value in of_native.items() if value is not None])
    if to is not None:
        report = _to_fsdp2(find_source(src, tag=tag), target, layout or "torch", memory, dry_run, progress)
    else:
        assert from_ is not None, "one of the two is given"
        if world_size is None:
            raise UsageError("--from needs --world-size: the number of ranks that will load the new checkpoint.")
        of_native["world_size"] = whole_option(world_size, "--world-size")
        options = ReshardOptions(**of_native, max_memory=memory)
        if from_ == "universal":
            plan = plan_from_universal(find_universal(src, tag=tag), options)
        elif tag is None:
            config = None if ds_config is None else read_config(Path(ds_config))
            plan = plan_from_fsdp2(find_dcp(src), options, config=config)
        else:
            raise UsageError("--tag: a checkpoint of FSDP2 has no tags. Give the path of the one to convert.")
        report = _to_native(plan, from_, carry_out(plan, target, "converting", dry_run, progress))
    return report.model_copy(update={"target": str(dst), "seconds": time.monotonic() - began})


def _check_ways(
    to: str | None, from_: str | None, format: str | None, layout: str | None, ds_config: object, of_native: list[str]
) -> None:
    """Raise UsageError for values that do not exist, and for options that do not go together."""
    if str(to) == "universal":
        raise UsageError(
            "--to universal: Universal checkpoints are not written. Use DeepSpeed's own converter, which reads the "
            "files of zeroelastic: python -m deepspeed.checkpoint.ds_to_universal --input_folder TAG_DIR "
            "--output_folder DST/TAG. It gives wrong values after round_robin_gradients, and loses state other than "
            "Adam's; in these cases load the checkpoint with zeroelastic."
        )
    choice_option(to, "--to", get_args(To))
    choice_option(from_, "--from", get_args(From))
    choice_option(format, "--format", get_args(Format))
    choice_option(layout, "--layout", get_args(FsdpLayout))
    if (to is None) == (from_ is None):
        raise UsageError("Give one of --to fsdp2, --from fsdp2 and --from universal.")
    if layout is not None and to is None:
        raise UsageError("--layout goes with --to fsdp2.")
    if ds_config is not None and from_ != "fsdp2":
        raise UsageError("--ds-config goes with --from fsdp2.")
    if to is not None and of_native:
        option = of_native[0].replace("_", "-")
        raise UsageError(f"--{option} goes with --from; a checkpoint of FSDP2 is for every world size.")


def _to_native(plan: ReshardPlan, from_: From, written: ReshardReport) -> ConvertReport:
    same = {"ok", "path", "tag", "target", "dry_run", "world_size", "target_world_size", "content_root", "notes"}
    return ConvertReport(
        **written.model_dump(include=same),
        from_=from_,
        to=written.format,
        bytes_read=plan.nbytes,
        tensors=sum(len(part.tensors()) for part in plan.saved.parts),
    )


def _to_fsdp2(
    source: Source, target: Path, layout: FsdpLayout, max_memory: int, dry_run: bool, progress: Progress
) -> ConvertReport:
    check_free(target.absolute(), source.tag_dir)
    with one_save(source.tag_dir):
        plan = plan_fsdp2(open_state(open_committed(source.tag_dir)), layout=layout)
    compared = _write_unless_dry(plan, target, "converting", max_memory, dry_run, progress)
    return ConvertReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        target=str(target),
        from_="native",
        to="fsdp2",
        dry_run=dry_run,
        world_size=plan.state.checkpoint.world_size,
        bytes_read=plan.nbytes,
        tensors=plan.num_tensors,
        digests_compared=compared,
        notes=plan.notes,
    )


@with_remedy()
def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: ExportDtype | None = None,
    max_shard_size: int | str = "5GB",
    optimizer: bool = False,
    tied: Tied = "once",
    adapters: bool = False,
    adapter: str | None = None,
    max_memory: int | str = "1GiB",
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ExportReport:
    """Write the weights of a checkpoint as safetensors files into the new directory ``dst``.

    ``dst`` gets model.safetensors, or several files and their index, and the configuration and tokenizer of a Hugging
    Face checkpoint; it appears complete or not at all. ``dtype`` ("fp32", "bf16", "fp16") converts all floating-point
    tensors of the model; ``optimizer`` writes the optimizer's state too. ``adapters`` writes the trained weights alone;
    where they are those of PEFT, as adapter_model.safetensors with its names, which ``PeftModel.from_pretrained`` takes
    with the adapter_config.json that the Trainer leaves beside a tag; ``adapter`` names one of several. What is read is
    compared with the commit record, where there is one.

    Raises UsageError where ``dst`` exists or there is no checkpoint, CheckpointError, DigestMismatchError,
    UnsupportedError, OSError.

    Example::

        import zeroelastic
        report = zeroelastic.export("ckpt", "weights", dtype="bf16")
        print([file.name for file in report.files], report.digests_compared)
    """
    target = local_target(dst)
    choice_option(dtype, "--dtype", get_args(ExportDtype))
    choice_option(tied, "--tied", get_args(Tied))
    shard_nbytes = size_option(max_shard_size, "--max-shard-size", minimum=1)
    memory = size_option(max_memory, "--max-memory", minimum=MINIMUM_MEMORY)
    began = time.monotonic()
    source = find_source(src, tag=tag)

    check_free(target.absolute(), source.tag_dir)
    with one_save(source.tag_dir):
        plan = plan_export(
            open_state(open_committed(source.tag_dir), resizable=False),
            dtype=dtype,
            max_shard_size=shard_nbytes,
            optimizer=optimizer,
            tied=tied,
            adapters=adapters if adapter is None else adapter,
            model_dir=source.root,
        )
    compared = _write_unless_dry(plan, target, "exporting", memory, dry_run, progress)
    files, kinds = plan.written_files(), plan.kinds()
    return ExportReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        target=str(dst),
        dry_run=dry_run,
        world_size=plan.state.checkpoint.world_size,
        bytes=sum(file.bytes for file in files),
        bytes_read=plan.nbytes,
        trained=kinds["trained"],
        frozen=kinds["frozen"],
        buffers=kinds["buffer"],
        optimizer_tensors=kinds["state"],
        tied=dict(plan.tied),
        files=files,
        digests_compared=compared,
        left_out=tuple(plan.left_out),
        notes=plan.notes or None,
        seconds=time.monotonic() - began,
    )


def _write_unless_dry(
    plan: ExportPlan | Fsdp2Plan, target: Path, title: str, max_memory: int, dry_run: bool, progress: Progress
) -> int | None:
    """Return what ``write_plan`` does; None for a dry run."""
    if dry_run:
        return None
    with progress(title, plan.nbytes) as advance:
        return write_plan(plan, target, max_memory=max_memory, progress=advance)


def write_plan(
    plan: ExportPlan | Fsdp2Plan,
    target: Path,
    *,
    max_memory: int = 1 << 30,
    progress: ProgressFunction | None = None,
) -> int:
    """Write what was planned into the new directory ``target``; returns how many digests agreed with the commit record.

    Raises UsageError where the target exists, DigestMismatchError for state that is not what was saved, OSError; then
    nothing is left.
    """
    checkpoint = plan.state.checkpoint
    reading = Reading(checkpoint, max_memory=max_memory, progress=progress, by_checksum=False)
    sweep(target.absolute().parent)
    with new_directory(target) as (directory, _), one_save(checkpoint.tag_dir):
        check_source_checksums(checkpoint, plan.state.parts)
        plan.write(directory, reading)
        reading.end()
    return reading.num_compared
