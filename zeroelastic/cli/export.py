"""``zeroelastic export``: a checkpoint's weights as safetensors, for from_pretrained and everything that loads them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.cli.distributed import DistributedOption, processes_of
from zeroelastic.cli.show import harmless, print_document
from zeroelastic.cli.sizes import format_size, parse_size
from zeroelastic.cli.target import local_target

if TYPE_CHECKING:
    from zeroelastic.export import ExportPlan
    from zeroelastic.source import Source

_SHOWN_FILES = 12


def export(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a tag directory, or the one above it.")],
    dst: Annotated[
        Path,
        typer.Argument(metavar="DST", callback=local_target, help="The directory to make. Nothing is overwritten."),
    ],
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Take this tag instead of the latest.")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
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
    shard_nbytes = size_option(max_shard_size, "--max-shard-size", 1)
    memory = memory_option(max_memory)

    from zeroelastic.checkpoint import open_checkpoint
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.export import plan_export, run_export
    from zeroelastic.one_save import one_save
    from zeroelastic.publish import check_free
    from zeroelastic.source import find_source
    from zeroelastic.state import open_state

    def look() -> ExportPlan:
        check_free(dst.absolute(), sources=local_sources(source))
        state = open_state(open_checkpoint(source.tag_dir))
        return plan_export(
            state, dtype=dtype, max_shard_size=shard_nbytes, optimizer=optimizer, tied=tied, model_dir=source.root
        )

    with processes_of(distributed=distributed) as processes:
        began = time.monotonic()
        source = processes.settle(lambda: find_source(src, tag=tag))
        compared: int | None = None
        with one_save(source.tag_dir):
            plan = processes.settle(look)
            if not dry_run:
                with progress_bar("exporting", plan.source_nbytes // processes.size) as advance:
                    compared = run_export(plan, dst, max_memory=memory, advance=advance, processes=processes)
    if processes.rank != 0:
        return  # rank 0 speaks for all
    document = to_document(plan, source, dst, compared, time.monotonic() - began)
    if as_json:
        print_document(document)
    else:
        _show(plan, document)


def to_document(plan: ExportPlan, source: Source, dst: Path, compared: int | None, seconds: float) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    from zeroelastic.storage import file_size

    return {
        "source": str(source.tag_dir),
        "tag": source.tag,
        "target": str(dst),
        "dry_run": compared is None,
        "world_size": plan.state.checkpoint.world_size,
        "bytes": plan.nbytes,
        "bytes_read": plan.source_nbytes,
        "trained": len(plan.tensors("trained")),
        "frozen": len(plan.tensors("frozen")),
        "buffers": len(plan.tensors("buffer")),
        "optimizer_tensors": len(plan.tensors("state")),
        "tied": dict(plan.tied),
        "files": [{"name": f.name, "bytes": f.nbytes, "tensors": len(f.entries)} for f in plan.files]
        + [{"name": name, "bytes": len(text), "tensors": 0} for name, text in plan.texts.items()]
        + [{"name": path.name, "bytes": file_size(path), "tensors": 0} for path in plan.copied],
        "digests_compared": compared,
        "left_out": list(plan.left_out),
        "seconds": round(seconds, 3),
    }


def size_option(text: str, name: str, minimum: int) -> int:
    """An option's size in bytes. Raises typer.BadParameter."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{name}'") from None
    if nbytes < minimum:
        raise typer.BadParameter(f"at least {format_size(minimum)} is needed.", param_hint=f"'{name}'")
    return nbytes


def memory_option(text: str) -> int:
    """``--max-memory`` in bytes. Raises typer.BadParameter."""
    from zeroelastic.transfer import MINIMUM_MEMORY

    return size_option(text, "--max-memory", MINIMUM_MEMORY)


def local_sources(source: Source) -> tuple[Path, ...]:
    """The directory of the tag where it is on this machine, in which nothing may be written."""
    return (source.tag_dir,) if isinstance(source.tag_dir, Path) else ()


def _show(plan: ExportPlan, document: dict[str, object]) -> None:
    what = "would write" if document["dry_run"] else "wrote"
    files = document["files"]
    assert isinstance(files, list)
    _line(f"{document['source']} ({plan.state.checkpoint.world_size} ranks)")
    _line(f"{what} {document['target']}, {format_size(plan.nbytes)}")
    for file in files[:_SHOWN_FILES]:
        tensors = f"  {file['tensors']} tensors" if file["tensors"] else ""
        _line(f"  {file['name']:<36}  {format_size(file['bytes']):>9}{tensors}")
    if len(files) > _SHOWN_FILES:
        _line(f"  and {len(files) - _SHOWN_FILES} more files")
    for alias, name in plan.tied.items():
        _line(f"tied: {alias} is {name}")
    for sentence in plan.left_out:
        _line(f"left out: {sentence}")
    if not document["dry_run"]:
        compared = document["digests_compared"]
        proof = f"{compared} digests agree with the commit record" if compared else "no commit record to compare with"
        _line(f"{proof}; {document['seconds']} s")


def _line(text: str) -> None:
    typer.echo(harmless(text))
