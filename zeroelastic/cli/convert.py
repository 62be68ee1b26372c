"""``zeroelastic convert``: to and from the formats of others that hold a whole training state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import JsonOption, QuietOption, TagOption
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import print_line, print_report
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.convert.convert import ConvertReport


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a tag directory, or the one above it.")],
    dst: Annotated[
        Path,
        typer.Argument(metavar="DST", help="The directory to make; it must not be there yet."),
    ],
    to: Annotated[
        Literal["universal", "dcp"] | None,
        typer.Option("--to", help="To DeepSpeed's Universal checkpoint, or to torch.distributed.checkpoint."),
    ] = None,
    from_: Annotated[
        Literal["universal"] | None,
        typer.Option("--from", help="From a Universal checkpoint to a native one for --world-size ranks."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", metavar="M", help="With --from: ranks that will load it.")
    ] = None,
    format: Annotated[
        Literal["elastic", "rigid"] | None,
        typer.Option(
            help="With --from: elastic (default at stage 3) describes itself; rigid (always at 1 and 2) is what stock "
            "DeepSpeed writes."
        ),
    ] = None,
    sub_group_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --from: that of the run that will load it, if it is not the saved one's."),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            metavar="S", min=1, max=3, help="With --from: ZeRO stage of the result; default: that which was saved."
        ),
    ] = None,
    round_robin_gradients: Annotated[
        bool | None,
        typer.Option(
            "--round-robin-gradients/--no-round-robin-gradients",
            help="With --from, at stages 1 and 2: that of the run that will load it, if it is not the saved one's.",
        ),
    ] = None,
    parameter_alignment: Annotated[
        bool | None,
        typer.Option("--parameter-alignment/--no-parameter-alignment", help="The same for parameter_alignment."),
    ] = None,
    tag: TagOption = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB.")] = "1GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to or from a Universal checkpoint, or to a torch distributed checkpoint.

    Weights, optimizer state and hyper-parameters of all ranks are brought together, every byte read once; where the
    checkpoint has a commit record, what was read is compared with it. DST appears complete or not at all. Exit code 0:
    done; 1: the state does not fit into that format; 2: wrong usage, or DST exists; 3: the checkpoint is damaged.

    \b
    Examples:
        zeroelastic convert ckpt universal --to universal
        zeroelastic convert universal native-3 --from universal --world-size 3
        zeroelastic convert universal old-2 --from universal -n 2 --stage 2
        zeroelastic convert ckpt dcp --to dcp --json
        zeroelastic convert ckpt other --to universal --tag global_step2 --dry-run
    """
    from zeroelastic.verbs.convert.convert import convert as run

    report = run(
        src,
        dst,
        to=to,
        from_=from_,
        world_size=world_size,
        format=format,
        sub_group_size=sub_group_size,
        stage=stage,
        round_robin_gradients=round_robin_gradients,
        parameter_alignment=parameter_alignment,
        tag=tag,
        max_memory=max_memory,
        dry_run=dry_run,
        progress=progress_of(quiet=quiet),
    )
    if as_json:
        print_report(report)
    else:
        _show(report)


def _show(report: ConvertReport) -> None:
    ranks = "" if report.target_world_size is None else f" for {counted(report.target_world_size, 'rank')}"
    verb = "would write" if report.dry_run else "wrote"
    print_line(f"{report.path} ({counted(report.world_size, 'rank')})")
    print_line(f"{verb} {report.target}{ranks}: {counted(report.tensors, 'tensor')}, {format_size(report.bytes_read)}")
    for note in report.notes:
        print_line(f"note: {note}")
    if report.dry_run:
        return
    if report.content_root is not None:
        proof = f"content root {report.content_root[:12]}"
    elif report.digests_compared:
        proof = f"{report.digests_compared} digests agree with the commit record"
    else:
        proof = "no commit record to compare with"
    print_line(f"{proof}; {round(report.seconds, 3)} s")
