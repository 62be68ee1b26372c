"""``zeroelastic convert``: to and from the formats of others that hold a whole training state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.cli.export import local_directory, memory_option
from zeroelastic.cli.show import harmless, print_document
from zeroelastic.cli.sizes import format_size

if TYPE_CHECKING:
    from zeroelastic.dcp import DcpPlan
    from zeroelastic.source import Source
    from zeroelastic.universal import UniversalPlan


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a tag directory, or the one above it.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make. Nothing is overwritten.")],
    to: Annotated[
        Literal["universal", "dcp"] | None,
        typer.Option("--to", help="DeepSpeed's Universal checkpoint, or torch.distributed.checkpoint."),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Take this tag instead of the latest.")] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that may be used.")] = "1GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Convert a checkpoint to a Universal checkpoint or to a torch distributed checkpoint.

    Weights, optimizer state and hyper-parameters of all ranks are brought together, every byte read once; where the
    checkpoint has a commit record, what was read is compared with it. DST appears complete or not at all. Exit code 0:
    done; 1: the state does not fit into that format; 2: wrong usage, or DST exists; 3: the checkpoint is damaged.

    \b
    Examples:
        zeroelastic convert ckpt universal --to universal
        zeroelastic convert ckpt dcp --to dcp --json
        zeroelastic convert ckpt other --to universal --tag global_step2 --dry-run
    """
    memory = memory_option(max_memory)
    if to is None:
        raise typer.BadParameter("universal or dcp?", param_hint="'--to'")

    from zeroelastic.checkpoint import open_checkpoint
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.source import find_source
    from zeroelastic.staging import check_free
    from zeroelastic.state import open_state

    began = time.monotonic()
    source = find_source(src, tag=tag)
    tag_dir = local_directory(source) / source.tag
    check_free(dst.absolute(), sources=(tag_dir,))
    state = open_state(open_checkpoint(tag_dir))
    compared: int | None = None
    plan: UniversalPlan | DcpPlan
    if to == "universal":
        from zeroelastic.universal import plan_universal, write_universal

        plan = plan_universal(state, tag=source.tag)
        if not dry_run:
            with progress_bar("converting", plan.nbytes) as advance:
                compared = write_universal(plan, dst, max_memory=memory, advance=advance)
    else:
        from zeroelastic.dcp import plan_dcp, write_dcp

        plan = plan_dcp(state)
        if not dry_run:
            with progress_bar("converting", plan.nbytes) as advance:
                compared = write_dcp(plan, dst, max_memory=memory, advance=advance)
    document = to_document(plan, source, dst, to, compared, time.monotonic() - began)
    if as_json:
        print_document(document)
    else:
        _show(document)


def to_document(
    plan: UniversalPlan | DcpPlan, source: Source, dst: Path, to: str, compared: int | None, seconds: float
) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    return {
        "source": str(source.tag_dir),
        "tag": source.tag,
        "target": str(dst),
        "to": to,
        "dry_run": compared is None,
        "world_size": plan.state.checkpoint.world_size,
        "bytes_read": plan.nbytes,
        "tensors": plan.num_tensors,
        "digests_compared": compared,
        "notes": list(plan.notes),
        "seconds": round(seconds, 3),
    }


def _show(document: dict[str, object]) -> None:
    what = "would write" if document["dry_run"] else "wrote"
    nbytes = document["bytes_read"]
    assert isinstance(nbytes, int)
    _line(f"{document['source']} ({document['world_size']} ranks)")
    _line(f"{what} {document['target']}: {document['tensors']} tensors, {format_size(nbytes)}")
    notes = document["notes"]
    assert isinstance(notes, list)
    for note in notes:
        _line(f"note: {note}")
    if not document["dry_run"]:
        compared = document["digests_compared"]
        proof = f"{compared} digests agree with the commit record" if compared else "no commit record to compare with"
        _line(f"{proof}; {document['seconds']} s")


def _line(text: str) -> None:
    typer.echo(harmless(text))
