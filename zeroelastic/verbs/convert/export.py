"""``zeroelastic.export``: a checkpoint's weights as safetensors files."""

from __future__ import annotations

import os
import time
from pathlib import Path

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import with_remedy
from zeroelastic.io.storage import file_size
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.verbs.convert.copy_tensors import MINIMUM_MEMORY
from zeroelastic.verbs.convert.to_safetensors import ExportDtype, ExportPlan, Tied, plan_export, run_export
from zeroelastic.verbs.new_directory import check_free
from zeroelastic.verbs.options import Progress, local_sources, local_target, no_progress
from zeroelastic.verbs.report import GivenPath, Part, Report, Seconds


class ExportedFile(Part):
    """One file of an export."""

    name: str
    bytes: int
    tensors: int


class ExportReport(Report):
    """What an export wrote, or would write. ``trained``, ``frozen`` and ``buffers`` are numbers of tensors.

    ``digests_compared`` is the number of tensors that were compared with the commit record, None after a dry run;
    ``left_out`` says of each tensor of the model that is not there why.
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
    seconds: Seconds


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
    max_memory: int | str = "1GiB",
    dry_run: bool = False,
    processes: Processes | None = None,
    progress: Progress = no_progress,
) -> ExportReport:
    """Write the weights of a checkpoint as safetensors files into the new directory ``dst``.

    ``dst`` gets model.safetensors, or several files and their index, and the configuration and tokenizer of a Hugging
    Face checkpoint; it appears complete or not at all. ``dtype`` ("fp32", "bf16", "fp16") converts all floating-point
    tensors of the model; ``optimizer`` writes the optimizer's state too. What is read is compared with the commit
    record, where there is one. Several ``processes`` share the work; collective.

    Raises UsageError where ``dst`` exists or there is no checkpoint, CheckpointError, DigestMismatchError,
    UnsupportedError, OSError.

    Example::

        import zeroelastic
        report = zeroelastic.export("ckpt", "weights", dtype="bf16")
        print([file.name for file in report.files], report.digests_compared)
    """
    target = local_target(dst)
    shard_nbytes = size_option(max_shard_size, "--max-shard-size", minimum=1)
    memory = size_option(max_memory, "--max-memory", minimum=MINIMUM_MEMORY)
    processes = processes or Processes()
    began = time.monotonic()
    source = processes.all_or_raise(lambda: find_source(src, tag=tag))

    def make_plan() -> ExportPlan:
        check_free(target.absolute(), sources=local_sources(source))
        state = open_state(open_checkpoint(source.tag_dir), resizable=False)
        return plan_export(
            state, dtype=dtype, max_shard_size=shard_nbytes, optimizer=optimizer, tied=tied, model_dir=source.root
        )

    compared: int | None = None
    with one_save(source.tag_dir):
        plan = processes.all_or_raise(make_plan)
        if not dry_run:
            with progress("exporting", plan.source_nbytes // processes.size) as advance:
                compared = run_export(plan, target, max_memory=memory, progress=advance, processes=processes)
    return _report(plan, source, target, compared, time.monotonic() - began)


def _report(plan: ExportPlan, source: Source, dst: Path, compared: int | None, seconds: float) -> ExportReport:
    files = [(file.name, file.nbytes, len(file.entries)) for file in plan.files]
    files += [(name, len(text), 0) for name, text in plan.texts.items()]
    files += [(path.name, file_size(path) or 0, 0) for path in plan.copied]
    return ExportReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        target=str(dst),
        dry_run=compared is None,
        world_size=plan.state.checkpoint.world_size,
        bytes=plan.nbytes,
        bytes_read=plan.source_nbytes,
        trained=len(plan.tensors("trained")),
        frozen=len(plan.tensors("frozen")),
        buffers=len(plan.tensors("buffer")),
        optimizer_tensors=len(plan.tensors("state")),
        tied=dict(plan.tied),
        files=tuple(ExportedFile(name=name, bytes=nbytes, tensors=count) for name, nbytes, count in files),
        digests_compared=compared,
        left_out=tuple(plan.left_out),
        seconds=seconds,
    )
