"""``zeroelastic convert``: to and from the formats of others that hold a whole training state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.cli.export import local_sources, memory_option
from zeroelastic.cli.show import harmless, print_document
from zeroelastic.cli.sizes import format_size
from zeroelastic.cli.target import local_target

if TYPE_CHECKING:
    from zeroelastic.dcp import DcpPlan
    from zeroelastic.source import Source
    from zeroelastic.universal import UniversalPlan


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a tag directory, or the one above it.")],
    dst: Annotated[
        Path,
        typer.Argument(metavar="DST", callback=local_target, help="The directory to make; it must not be there yet."),
    ],
    to: Annotated[
        Literal["universal", "dcp"] | None,
        typer.Option("--to", help="To DeepSpeed's Universal checkpoint, or to torch.distributed.checkpoint."),
    ] = None,
    from_: Annotated[
        Literal["universal"] | None,
        typer.Option("--from", help="From a Universal checkpoint of ZeRO-3 to a native one for --world-size ranks."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", metavar="M", help="With --from: ranks that will load it.")
    ] = None,
    format: Annotated[
        Literal["elastic", "rigid"] | None,
        typer.Option(help="With --from: elastic (the default) describes itself; rigid is what stock DeepSpeed writes."),
    ] = None,
    sub_group_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --from: that of the run that will load it, if it is not the saved one's."),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="The tag to take; default: the latest.")] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory to stay within, such as 512MiB.")] = "1GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Convert a checkpoint to or from a Universal checkpoint, or to a torch distributed checkpoint.

    Weights, optimizer state and hyper-parameters of all ranks are brought together, every byte read once; where the
    checkpoint has a commit record, what was read is compared with it. DST appears complete or not at all. Exit code 0:
    done; 1: the state does not fit into that format; 2: wrong usage, or DST exists; 3: the checkpoint is damaged.

    \b
    Examples:
        zeroelastic convert ckpt universal --to universal
        zeroelastic convert universal native-3 --from universal --world-size 3
        zeroelastic convert ckpt dcp --to dcp --json
        zeroelastic convert ckpt other --to universal --tag global_step2 --dry-run
    """
    from zeroelastic.errors import UsageError

    memory = memory_option(max_memory)
    if (to is None) == (from_ is None):
        raise UsageError("Give one of --to universal, --to dcp and --from universal.")
    began = time.monotonic()
    if to is not None:
        extra = {"--world-size": world_size, "--format": format, "--sub-group-size": sub_group_size}
        given = [name for name, value in extra.items() if value is not None]
        if given:
            raise UsageError(f"{given[0]} goes with --from; a {to} checkpoint is of no world size.")
        document = _convert_to(to, src, dst, tag, memory, dry_run=dry_run)
    else:
        if world_size is None:
            raise UsageError("--from needs --world-size: the number of ranks that will load what is made.")
        document = _convert_from(
            src, dst, tag, memory, world_size, format or "elastic", sub_group_size, dry_run=dry_run
        )
    document["seconds"] = round(time.monotonic() - began, 3)
    if as_json:
        print_document(document)
    else:
        _show(document)


def _convert_to(
    to: Literal["universal", "dcp"], src: str, dst: Path, tag: str | None, max_memory: int, *, dry_run: bool
) -> dict[str, object]:
    from zeroelastic.checkpoint import open_checkpoint
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.one_save import one_save
    from zeroelastic.publish import check_free
    from zeroelastic.source import find_source
    from zeroelastic.state import open_state

    source = find_source(src, tag=tag)
    check_free(dst.absolute(), sources=local_sources(source))
    compared: int | None = None
    plan: UniversalPlan | DcpPlan
    with one_save(source.tag_dir):
        state = open_state(open_checkpoint(source.tag_dir))
        if to == "universal":
            from zeroelastic.universal import plan_universal, write_universal

            plan = plan_universal(state, tag=source.tag)
            if not dry_run:
                with progress_bar("converting", plan.nbytes) as advance:
                    compared = write_universal(plan, dst, max_memory=max_memory, advance=advance)
        else:
            from zeroelastic.dcp import plan_dcp, write_dcp

            plan = plan_dcp(state)
            if not dry_run:
                with progress_bar("converting", plan.nbytes) as advance:
                    compared = write_dcp(plan, dst, max_memory=max_memory, advance=advance)
    return _document(source, dst, "native", to, state.checkpoint.world_size) | {
        "dry_run": dry_run,
        "bytes_read": plan.nbytes,
        "tensors": plan.num_tensors,
        "digests_compared": compared,
        "notes": list(plan.notes),
    }


def _convert_from(
    src: str,
    dst: Path,
    tag: str | None,
    max_memory: int,
    world_size: int,
    format: Literal["elastic", "rigid"],
    sub_group_size: int | None,
    *,
    dry_run: bool,
) -> dict[str, object]:
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.reshard import ReshardOptions, check_target, reshard
    from zeroelastic.universal_source import find_universal, plan_from_universal

    options = ReshardOptions(world_size=world_size, format=format, sub_group_size=sub_group_size, max_memory=max_memory)
    source = find_universal(src, tag=tag)
    plan = plan_from_universal(source, options)
    notes, root = plan.extras.notes, None
    if dry_run:
        check_target(plan, dst.absolute())
    else:
        with progress_bar("converting", plan.nbytes) as advance:
            report = reshard(plan, dst, progress=advance)
        notes, root = report.notes, report.root
    return _document(source, dst, "universal", format, plan.state.checkpoint.world_size) | {
        "dry_run": dry_run,
        "world_size": world_size,
        "bytes_read": plan.nbytes,
        "tensors": sum(len(part.tensors()) for part in plan.state.parts),
        "content_root": root,
        "notes": list(notes),
    }


def _document(source: Source, dst: Path, from_: str, to: str, saved_world_size: int) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    return {
        "source": str(source.tag_dir),
        "tag": source.tag,
        "target": str(dst),
        "from": from_,
        "to": to,
        "dry_run": False,
        "saved_world_size": saved_world_size,
        "world_size": None,
        "bytes_read": 0,
        "tensors": 0,
        "digests_compared": None,
        "content_root": None,
        "notes": [],
        "seconds": 0.0,
    }


def _show(document: Mapping[str, object]) -> None:
    what = "would write" if document["dry_run"] else "wrote"
    nbytes, notes = document["bytes_read"], document["notes"]
    assert isinstance(nbytes, int) and isinstance(notes, list)
    ranks = "" if document["world_size"] is None else f" for {document['world_size']} ranks"
    _line(f"{document['source']} ({document['saved_world_size']} ranks)")
    _line(f"{what} {document['target']}{ranks}: {document['tensors']} tensors, {format_size(nbytes)}")
    for note in notes:
        _line(f"note: {note}")
    if document["dry_run"]:
        return
    compared, root = document["digests_compared"], document["content_root"]
    if root is not None:
        _line(f"content root {str(root)[:12]}; {document['seconds']} s")
    elif compared:
        _line(f"{compared} digests agree with the commit record; {document['seconds']} s")
    else:
        _line(f"no commit record to compare with; {document['seconds']} s")


def _line(text: str) -> None:
    typer.echo(harmless(text))
