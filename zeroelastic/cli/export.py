"""``zeroelastic export``: a checkpoint's weights as safetensors, for from_pretrained and everything that loads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.distributed import DistributedOption, processes_of
from zeroelastic.cli.output.options import JsonOption, QuietOption, TagOption
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import print_line, print_report
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.convert.export import ExportReport

_SHOWN_FILES = 12


def export(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a tag directory, or the one above it.")],
    dst: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The directory to make. Nothing is overwritten."),
    ],
    tag: TagOption = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Convert all floating-point tensors of the model; without it, each keeps its own."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Begin another file at this size.")] = "5GB",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also write the optimizer's state.")] = False,
    tied: Annotated[
        Literal["once", "all"], typer.Option(help="Store a tied weight once, or under each of its names.")
    ] = "once",
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that may be used.")] = "1GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    distributed: DistributedOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the weights of a checkpoint as safetensors files.

    DST gets model.safetensors, or several files and their index, and the configuration and tokenizer of a Hugging Face
    checkpoint. It appears complete or not at all. Every byte is read once, by all cores, without torch; where the
    checkpoint has a commit record, what was read is compared with it. Exit code 0: done; 2: wrong usage, or DST exists;
    3: the checkpoint is damaged. With --distributed, the processes of one torchrun or srun share the work.

    \b
    Examples:
        zeroelastic export ckpt weights
        zeroelastic export ckpt weights-bf16 --dtype bf16 --max-shard-size 100KB
        zeroelastic export ckpt everything --tag global_step2 --optimizer --json
        zeroelastic export ckpt elsewhere --dry-run
    """
    from zeroelastic.verbs.convert.export import export as run

    with processes_of(distributed=distributed) as processes:
        report = run(
            src,
            dst,
            tag=tag,
            dtype=dtype,
            max_shard_size=max_shard_size,
            optimizer=optimizer,
            tied=tied,
            max_memory=max_memory,
            dry_run=dry_run,
            processes=processes,
            progress=progress_of(quiet=quiet, rank=processes.rank),
        )
    if processes.rank != 0:
        return  # rank 0 reports for all
    if as_json:
        print_report(report)
    else:
        _show(report)


def _show(report: ExportReport) -> None:
    print_line(f"{report.path} ({counted(report.world_size, 'rank')})")
    print_line(f"{'would write' if report.dry_run else 'wrote'} {report.target}, {format_size(report.bytes)}")
    for file in report.files[:_SHOWN_FILES]:
        tensors = f"  {counted(file.tensors, 'tensor')}" if file.tensors else ""
        print_line(f"  {file.name:<36}  {format_size(file.bytes):>9}{tensors}")
    if len(report.files) > _SHOWN_FILES:
        print_line(f"  and {len(report.files) - _SHOWN_FILES} more files")
    for alias, name in report.tied.items():
        print_line(f"tied: {alias} is {name}")
    for sentence in report.left_out:
        print_line(f"left out: {sentence}")
    if not report.dry_run:
        compared = report.digests_compared
        proof = f"{compared} digests agree with the commit record" if compared else "no commit record to compare with"
        print_line(f"{proof}; {round(report.seconds, 3)} s")
