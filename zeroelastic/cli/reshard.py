"""``zeroelastic reshard``: a checkpoint for another number of ranks, without a training job."""

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
    from zeroelastic.verbs.reshard.report import ReshardReport


def reshard(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a directory or a URL such as s3://...")],
    dst: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The directory to make; it must not be there yet."),
    ],
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", help="Ranks that will load it.")],
    tag: TagOption = None,
    format: Annotated[
        Literal["elastic", "rigid"] | None,
        typer.Option(
            help="elastic (default at stage 3) describes itself; rigid (always below 3) is what DeepSpeed writes. "
            "Stock DeepSpeed loads both."
        ),
    ] = None,
    sub_group_size: Annotated[
        int | None, typer.Option(metavar="N", help="That of the run that will load it, if it is not the saved one's.")
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=0,
            max=3,
            help="ZeRO stage of the result, 0 for none; default: the source's.",
        ),
    ] = None,
    round_robin_gradients: Annotated[
        bool | None,
        typer.Option(
            "--round-robin-gradients/--no-round-robin-gradients",
            help="At stages 1 and 2: that of the run that will load it; default: the saved configuration's.",
        ),
    ] = None,
    parameter_alignment: Annotated[
        bool | None,
        typer.Option("--parameter-alignment/--no-parameter-alignment", help="The same for parameter_alignment."),
    ] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB.")] = "1GiB",
    verify: Annotated[bool, typer.Option("--verify", help="Read the result again before it appears.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    distributed: DistributedOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a native DeepSpeed checkpoint for M ranks out of one of any number of ranks, bit for bit.

    DST gets the same tag, latest, and what frameworks keep beside it; it appears complete or not at all. A run
    that was killed goes on where it was when the same command is given again. What is read is compared with the
    commit record, where there is one. With --distributed, the processes of one torchrun or srun share the work.

    \b
    Examples:
        zeroelastic reshard ckpt ckpt-3 --world-size 3
        zeroelastic reshard ckpt/global_step2 old-6 -n 6 --format rigid
        zeroelastic reshard ckpt ckpt-8 --world-size 8 --dry-run --json
        zeroelastic reshard ckpt ckpt-stage2 --world-size 4 --stage 2
        zeroelastic reshard ckpt dealt -n 4 --stage 2 --round-robin-gradients
        zeroelastic reshard ckpt plain -n 2 --stage 0
    """
    from zeroelastic.verbs.reshard.reshard import reshard as run

    with processes_of(distributed=distributed) as processes:
        report = run(
            src,
            dst,
            world_size=world_size,
            tag=tag,
            format=format,
            sub_group_size=sub_group_size,
            stage=stage,
            round_robin_gradients=round_robin_gradients,
            parameter_alignment=parameter_alignment,
            max_memory=max_memory,
            verify=verify,
            dry_run=dry_run,
            processes=processes,
            progress=progress_of(quiet=quiet, rank=processes.rank),
        )
        if processes.rank == 0:
            if as_json:
                print_report(report)
            else:
                _show(report)


def _show(report: ReshardReport) -> None:
    kind = report.format if report.target_stage == 3 else f"stage {report.target_stage}"
    ranks = f"{report.world_size} -> {counted(report.target_world_size, 'rank')}"
    where = f"{report.target}/{report.tag} ({kind}), {ranks}"
    if report.file_bytes is None or report.content_root is None:  # a dry run
        print_line(f"would write {where}")
        buffers = counted(report.sub_groups, "sub-group" if report.target_stage == 3 else "optimizer group")
        print_line(f"  {format_size(report.state_bytes)} of state in {counted(report.files, 'file')}, {buffers}")
        if report.extras:
            print_line(f"  beside it: {', '.join(report.extras)}")
    else:
        print_line(f"wrote {where}, {format_size(report.file_bytes)}")
        unknown = "; the source has no commit record to compare with"
        proof = unknown if report.recorded_root is None else " is the source's"
        print_line(f"  content root {report.content_root[:12]}{proof}")
        if report.verified:
            print_line("  read again: every byte is as it was written")
        if report.resumed_ranks:
            print_line(f"  there already, from a run that had been ended: {counted(report.resumed_ranks, 'rank')}")
    for note in report.notes:
        print_line(f"  note: {note}")
