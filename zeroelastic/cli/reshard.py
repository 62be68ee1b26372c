"""``zeroelastic reshard``: a checkpoint for another number of ranks, without a training job."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.cli.distributed import DistributedOption, processes_of
from zeroelastic.cli.sizes import format_size, parse_size
from zeroelastic.cli.target import local_target

if TYPE_CHECKING:
    from zeroelastic.reshard import ReshardPlan, ReshardReport


def reshard(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a directory or a URL such as s3://...")],
    dst: Annotated[
        Path,
        typer.Argument(metavar="DST", callback=local_target, help="The directory to make; it must not be there yet."),
    ],
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", help="Ranks that will load it.")],
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="The tag to take; default: what latest names.")] = None,
    format: Annotated[
        Literal["elastic", "rigid"],
        typer.Option(
            help="elastic describes itself; rigid is what stock DeepSpeed writes. Stock DeepSpeed loads both."
        ),
    ] = "elastic",
    sub_group_size: Annotated[
        int | None, typer.Option(metavar="N", help="That of the run that will load it, if it is not the saved one's.")
    ] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB.")] = "1GiB",
    verify: Annotated[bool, typer.Option("--verify", help="Read the result again before it appears.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    distributed: DistributedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
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
    """
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.one_save import one_save
    from zeroelastic.reshard import ReshardOptions, check_target, plan_reshard
    from zeroelastic.reshard import reshard as carry_out
    from zeroelastic.source import find_source

    try:
        memory = parse_size(max_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--max-memory'") from None
    options = ReshardOptions(
        world_size=world_size, format=format, sub_group_size=sub_group_size, max_memory=memory, verify=verify
    )
    with processes_of(distributed=distributed) as processes:
        source = processes.settle(lambda: find_source(src, tag=tag))
        with one_save(source.tag_dir):
            plan = processes.settle(lambda: plan_reshard(source, options))
            if dry_run:
                processes.first(lambda: check_target(plan, dst))
                if processes.rank == 0:
                    _show_plan(plan, dst, as_json=as_json)
                return
            share = plan.nbytes * len(processes.mine(world_size)) // world_size
            with progress_bar(f"resharding to {world_size}", share) as advance:
                report = carry_out(plan, dst, processes=processes, progress=advance)
        if processes.rank == 0:
            _show(report, as_json=as_json)


def _show_plan(plan: ReshardPlan, dst: Path, *, as_json: bool) -> None:
    target, saved = plan.target, plan.state.checkpoint.world_size
    if as_json:
        document = {
            "source": str(plan.source.tag_dir),
            "path": str(dst),
            "tag": plan.source.tag,
            "format": target.format,
            "saved_world_size": saved,
            "world_size": target.layout.world_size,
            "nbytes": plan.nbytes,
            "num_params": sum(part.layout.num_params for part in plan.native.parts),
            "num_sub_groups": target.layout.num_sub_groups,
            "files": 2 * target.layout.world_size,
            "extras": sorted([*plan.extras.copied, *plan.extras.derived]),
            "notes": list(plan.extras.notes),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"would write {dst}/{plan.source.tag} ({target.format}), {saved} -> {target.layout.world_size} ranks")
    typer.echo(
        f"  {format_size(plan.nbytes)} of state in {2 * target.layout.world_size} files, "
        f"{target.layout.num_sub_groups} sub-groups"
    )
    beside = sorted([*plan.extras.copied, *plan.extras.derived])
    if beside:
        typer.echo(f"  beside it: {', '.join(beside)}")
    for note in plan.extras.notes:
        typer.echo(f"  note: {note}")


def _show(report: ReshardReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    typer.echo(
        f"wrote {report.path}/{report.tag} ({report.format}), {report.saved_world_size} -> {report.world_size} ranks, "
        f"{format_size(report.file_bytes)}"
    )
    if report.source_root is not None:
        typer.echo(f"  content root {report.root[:12]} is the source's")
    else:
        typer.echo(f"  content root {report.root[:12]}; the source has no commit record to compare with")
    if report.verified:
        typer.echo("  read again: every byte is as it was written")
    if report.resumed_ranks:
        typer.echo(f"  {report.resumed_ranks} ranks were there from a run that had been ended")
    for note in report.notes:
        typer.echo(f"  note: {note}")
