"""``zeroelastic reshard``, ``export`` and ``convert``: another checkpoint from one that is saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import DstArgument, EpOption, JsonOption, LikeOption, QuietOption, TagOption, TpOption, reports
from zeroelastic.cli.terminal import print_line
from zeroelastic.errors import buffer_kind, counted

if TYPE_CHECKING:
    from zeroelastic.verbs.convert.convert import ConvertReport, ExportReport
    from zeroelastic.verbs.reshard.plan import ReshardReport

SrcArgument = Annotated[
    str, typer.Argument(metavar="SRC", help="The checkpoint: a tag directory, or the one above it.")
]

FormatOption = Annotated[
    Literal["elastic", "rigid"] | None,
    typer.Option(
        help="elastic (default at stage 3) describes itself; rigid (always below 3) is what DeepSpeed writes. Stock "
        "DeepSpeed loads both."
    ),
]

SubGroupSizeOption = Annotated[
    int | None, typer.Option(metavar="N", help="sub_group_size of the run that will load it, if not the saved one.")
]

StageOption = Annotated[
    int | None, typer.Option(metavar="S", min=1, max=3, help="ZeRO stage of the result; default: the source's.")
]

RoundRobinOption = Annotated[
    bool | None,
    typer.Option(
        "--round-robin-gradients/--no-round-robin-gradients",
        help="At stages 1 and 2: the setting of the run that will load it; default: the saved one.",
    ),
]

AlignmentOption = Annotated[
    bool | None,
    typer.Option("--parameter-alignment/--no-parameter-alignment", help="The same for parameter_alignment."),
]

MaxMemoryOption = Annotated[str, typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB.")]

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")]

_SHOWN_FILES = 12
_BY_CHECKSUM = "no commit record to compare with: the files of the source have the CRC-32 that they state"


def _show_reshard(report: ReshardReport) -> None:
    kind = report.format if report.target_stage == 3 else f"stage {report.target_stage}"
    ranks = f"{report.world_size} -> {counted(report.target_world_size, 'rank')}"
    where = f"{report.target}/{report.tag} ({kind}), {ranks}"
    if report.file_bytes is None or report.content_root is None:  # a dry run
        print_line(f"would write {where}")
        buffers = counted(report.sub_groups, buffer_kind(report.target_stage))
        print_line(f"  {format_size(report.state_bytes)} of state in {counted(report.files, 'file')}, {buffers}")
        if report.extras:
            print_line(f"  beside it: {', '.join(report.extras)}")
    else:
        print_line(f"wrote {where}, {format_size(report.file_bytes)}")
        unknown = "; the source has no commit record: its files have the CRC-32 that they state"
        proof = unknown if report.recorded_root is None else " is the source's"
        print_line(f"  content root {report.content_root[:12]}{proof}")
        if report.verified:
            print_line("  read again: every byte is as it was written")
        if report.resumed_ranks:
            print_line(f"  there already, from a run that had been ended: {counted(report.resumed_ranks, 'rank')}")
    for note in report.notes:
        print_line(f"  note: {note}")


@reports("zeroelastic.verbs.reshard.reshard", _show_reshard)
def reshard(
    src: SrcArgument,
    dst: DstArgument,
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", help="Ranks that will load it.")],
    tag: TagOption = None,
    format: FormatOption = None,
    sub_group_size: SubGroupSizeOption = None,
    stage: StageOption = None,
    round_robin_gradients: RoundRobinOption = None,
    parameter_alignment: AlignmentOption = None,
    max_memory: MaxMemoryOption = "1GiB",
    verify: Annotated[bool, typer.Option("--verify", help="Read the result again before it appears.")] = False,
    tp: TpOption = None,
    ep: EpOption = None,
    like: LikeOption = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a native DeepSpeed checkpoint for M ranks from one of any number of ranks, bit for bit.

    DST gets the same tag, latest, and what frameworks keep beside it; it appears complete or not at all. After a
    kill, the same command continues. If the source has a commit record, the data is compared with it.

    M counts all ranks, in tensor parallel groups of T and expert parallel groups of E. Weights that were cut evenly are
    cut evenly again; other cuts, and those of a source with T 1, come from --like.

    \b
    Examples:
        zeroelastic reshard ckpt ckpt-3 --world-size 3
        zeroelastic reshard ckpt/global_step2 old-6 -n 6 --format rigid
        zeroelastic reshard ckpt ckpt-8 --world-size 8 --dry-run --json
        zeroelastic reshard ckpt ckpt-stage2 --world-size 4 --stage 2
        zeroelastic reshard ckpt dealt -n 4 --stage 2 --round-robin-gradients
    """


def _show_export(report: ExportReport) -> None:
    print_line(f"{report.path} ({counted(report.world_size, 'rank')})")
    print_line(f"{'would write' if report.dry_run else 'wrote'} {report.target}, {format_size(report.bytes)}")
    for file in report.files[:_SHOWN_FILES]:
        tensors = f"  {counted(file.tensors, 'tensor')}" if file.tensors else ""
        print_line(f"  {file.name:<36}  {format_size(file.bytes):>9}{tensors}")
    if len(report.files) > _SHOWN_FILES:
        print_line(f"  and {len(report.files) - _SHOWN_FILES} more files")
    for alias, name in report.tied.items():
        print_line(f"tied: {alias} is {name}")
    for sentence in report.notes or ():
        print_line(f"note: {sentence}")
    for sentence in report.left_out:
        print_line(f"left out: {sentence}")
    if not report.dry_run:
        compared = report.digests_compared
        proof = f"{compared} digests agree with the commit record" if compared else _BY_CHECKSUM
        print_line(f"{proof}; {round(report.seconds, 3)} s")


@reports("zeroelastic.verbs.convert.convert", _show_export)
def export(
    src: SrcArgument,
    dst: DstArgument,
    tag: TagOption = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Convert all floating-point tensors of the model; without it, each keeps its own."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Start a new file at this size.")] = "5GB",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also write the optimizer's state.")] = False,
    tied: Annotated[
        Literal["once", "all"], typer.Option(help="Store a tied weight once, or under each of its names.")
    ] = "once",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write only the trained weights; PEFT adapters in PEFT's format.")
    ] = False,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write only this one of several adapters.")
    ] = None,
    max_memory: MaxMemoryOption = "1GiB",
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the weights of a checkpoint as safetensors files.

    DST gets model.safetensors, or several files and their index, and the configuration and tokenizer of a Hugging Face
    checkpoint. It appears complete or not at all. Every byte is read once, by all cores, without torch; if the
    checkpoint has a commit record, the data is compared with it. Exit code 0: done; 2: wrong usage, or DST exists;
    3: the checkpoint is damaged.

    \b
    Examples:
        zeroelastic export ckpt weights
        zeroelastic export ckpt weights-bf16 --dtype bf16 --max-shard-size 100KB
        zeroelastic export ckpt everything --tag global_step2 --optimizer --json
        zeroelastic export ckpt trained --adapters
        zeroelastic export ckpt elsewhere --dry-run
    """


def _show_convert(report: ConvertReport) -> None:
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
        proof = _BY_CHECKSUM
    print_line(f"{proof}; {round(report.seconds, 3)} s")


@reports("zeroelastic.verbs.convert.convert", _show_convert)
def convert(
    src: SrcArgument,
    dst: DstArgument,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="fsdp2", help="To a directory of torch.distributed.checkpoint that FSDP2 loads."),
    ] = None,
    from_: Annotated[
        Literal["universal", "fsdp2"] | None,
        typer.Option(
            "--from", help="From a Universal checkpoint or one of FSDP2 to a native one for --world-size ranks."
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", metavar="M", help="With --from: ranks that will load it.")
    ] = None,
    format: FormatOption = None,
    sub_group_size: SubGroupSizeOption = None,
    stage: StageOption = None,
    round_robin_gradients: RoundRobinOption = None,
    parameter_alignment: AlignmentOption = None,
    layout: Annotated[
        Literal["torch", "accelerate"] | None,
        typer.Option(help="With --to fsdp2: one directory (the default), or the two that accelerate has."),
    ] = None,
    ds_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --from fsdp2: DeepSpeed configuration of the run that will load it."),
    ] = None,
    tag: TagOption = None,
    max_memory: MaxMemoryOption = "1GiB",
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert to or from a checkpoint of FSDP2, or from a Universal checkpoint.

    --format, --sub-group-size, --stage, --round-robin-gradients and --parameter-alignment go with --from, as in
    reshard.
    Weights, optimizer state and hyper-parameters of all ranks are brought together, every byte read once; if the
    checkpoint has a commit record, the data is compared with it. DST appears complete or not at all. Exit code 0:
    done; 1: the state does not fit into that format; 2: wrong usage, or DST exists; 3: the checkpoint is damaged.

    \b
    Examples:
        zeroelastic convert universal native-3 --from universal --world-size 3
        zeroelastic convert universal old-2 --from universal -n 2 --stage 2
        zeroelastic convert ckpt fsdp --to fsdp2 --json
        zeroelastic convert fsdp native-4 --from fsdp2 -n 4
        zeroelastic convert ckpt other --to fsdp2 --tag global_step2 --dry-run
    """
