"""``zeroelastic inspect``: what a checkpoint is, from its headers, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.outcome import FAILED, INVALID
from zeroelastic.cli.show import columns, print_document, say
from zeroelastic.cli.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from zeroelastic.digest import ScalarValue
    from zeroelastic.findings import BufferView, Inspection, ParamView
    from zeroelastic.shard import ScalerState
    from zeroelastic.storage import FilePath

_LISTED = 24


def inspect(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A tag directory, or the directory above.")],
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="The tag, where SRC is the directory above.")] = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="List the parameters whose names match a glob, or contain this text."),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Open every rank's headers, and say where they disagree.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Say what a checkpoint is: who saved it, what it holds, and what is missing or wrong.

    Reads the commit record and the headers of one rank; no weights. A damaged checkpoint is shown as far as it can be.
    Exit code 0: it is whole as far as was looked; 1: not one that zeroelastic works on; 2: wrong usage; 3: invalid.

    \b
    Examples:
        zeroelastic inspect ckpt
        zeroelastic inspect ckpt --tag global_step2 --all-ranks
        zeroelastic inspect ckpt/global_step4 --params norm
        zeroelastic inspect ckpt --json
    """
    found = _look(source, tag, all_ranks)
    chosen = found.params if params is None else found.matching(params)
    if as_json:
        print_document(to_document(found, chosen))
    else:
        _show(found, chosen, pattern=params)
    if found.problems:
        raise typer.Exit(INVALID)
    if found.unsupported:
        raise typer.Exit(FAILED)


def _look(text: str, tag: str | None, all_ranks: bool) -> Inspection:
    from zeroelastic.census import is_universal, take_census
    from zeroelastic.errors import CheckpointError, UsageError
    from zeroelastic.findings import Inspection
    from zeroelastic.inspection import inspect_source, refuse_other_kinds
    from zeroelastic.save_place import open_tag
    from zeroelastic.source import Source, find_source
    from zeroelastic.storage import RemotePath, as_path

    try:
        return inspect_source(find_source(text, tag=tag), all_ranks=all_ranks)
    except UsageError:
        path = as_path(text)
        chosen = path if tag is None else path / tag
        if is_universal(chosen):
            refuse_other_kinds(take_census(chosen))
        raise
    except CheckpointError as error:
        path = as_path(text) if isinstance(as_path(text), RemotePath) else Path(os.path.abspath(text))
        if tag is None and _holds_rank_files(path):  # what is beside a tag does not make it worse
            source = Source(path.parent, path.name, open_tag(path), None, "deepspeed")
            found = inspect_source(source, all_ranks=all_ranks)
            found.notes.append(str(error))
            return found
        return Inspection(path=str(path), tag=tag or "", problems=[str(error)])


def _holds_rank_files(path: FilePath) -> bool:
    from zeroelastic.checkpoint import is_rank_file
    from zeroelastic.errors import CheckpointError, UnreadableError
    from zeroelastic.storage import file_sizes

    try:
        return any(map(is_rank_file, file_sizes(path)))
    except (CheckpointError, UnreadableError):
        return False


def to_document(found: Inspection, params: Iterable[ParamView]) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    trained, frozen, tied = found.count("trained"), found.count("frozen"), found.count("tied")
    return {
        "ok": not found.problems and not found.unsupported,
        "problems": found.problems,
        "unsupported": found.unsupported,
        "notes": found.notes,
        "path": found.path,
        "tag": found.tag,
        "latest": found.latest,
        "framework": found.framework,
        "format": found.format,
        "world_size": found.world_size,
        "tp_size": found.tp_size,
        "step": found.step,
        "skipped_steps": found.skipped_steps,
        "samples": found.samples,
        "save_id": found.save_id,
        "versions": found.versions,
        "model_dtype": found.model_dtype,
        "master_dtype": found.master_dtype,
        "train_batch_size": found.train_batch_size,
        "sub_group_size": found.sub_group_size,
        "num_sub_groups": found.num_sub_groups,
        "quarantine": None if found.quarantine is None else asdict(found.quarantine),
        "record": {"state": found.record, "content_root": found.content_root},
        "totals": {
            "params": trained[0] + frozen[0],
            "numel": trained[1] + frozen[1],
            "trained_params": trained[0],
            "trained_numel": trained[1],
            "frozen_params": frozen[0],
            "frozen_numel": frozen[1],
            "tied_params": tied[0],
            "state_nbytes": found.state_bytes,
            "files": found.num_files,
            "disk_nbytes": found.disk_bytes,
        },
        "state": {key: asdict(state) for key, state in found.state.items()},
        "scalars": {
            key: [{"kind": value.kind, "value": value.value} for value in values]
            for key, values in found.scalars.items()
        },
        "groups": [
            {"options": group.options, "num_params": group.num_params, "numel": group.numel} for group in found.groups
        ],
        "loss_scaler": _scaler_document(found.scaler),
        "params": [
            {
                "name": param.name,
                "kind": param.kind,
                "shape": param.shape,
                "numel": param.numel,
                "nbytes": param.nbytes,
                "group": param.group,
                "dtypes": param.dtypes,
                "tied_to": param.tied_to,
            }
            for param in params
        ],
        "buffers": [asdict(buffer) for buffer in found.buffers],
        "scheduler": found.scheduler,
        "client_state": found.client_state,
        "files": {
            "num_missing": found.num_missing,
            "missing": found.missing,
            "stale": found.stale,
            "odd": found.odd,
            "leftovers": found.leftovers,
            "folders": found.folders,
        },
        "headers_read": found.headers_read,
    }


def _scaler_document(scaler: ScalerState | None) -> dict[str, object] | None:
    from zeroelastic.torchfile import DType

    if scaler is None:
        return None
    attributes = {key: value.name if isinstance(value, DType) else value for key, value in scaler.attributes.items()}
    return {
        "class_name": scaler.class_name,
        "dynamic": scaler.dynamic,
        "overflow": scaler.overflow,
        "attributes": attributes,
    }


def _show(found: Inspection, params: tuple[ParamView, ...], *, pattern: str | None) -> None:
    """The inspection for people, on stdout."""
    from rich.console import Console

    from zeroelastic.global_batch import listed_world_sizes

    out = Console(highlight=False)

    def line(label: str, *texts: object) -> None:
        known = [str(text) for text in texts if text not in (None, "")]
        if known:
            say(out, f"  {label:<14}  ", ", ".join(known))

    def heading(text: str) -> None:
        say(out, (f"\n{text}", "bold"))

    say(out, (found.path, "bold"))
    ranks = None if found.world_size is None else f"{found.world_size} ranks"
    tensor_parallel = f"{found.tp_size} tensor parallel" if found.tp_size not in (None, 1) else None
    line("saved as", found.format, ranks, tensor_parallel, None if found.format is None else _laid_out(found.framework))
    skipped = f"{found.skipped_steps} skipped" if found.skipped_steps else None
    samples = None if found.samples is None else f"{found.samples:,} samples"
    line("step", found.step, skipped, samples)
    line("save id", found.save_id)
    line("written by", *(f"{name} {version}" for name, version in found.versions.items() if version))
    line("precision", found.model_dtype and f"{found.model_dtype} model", _master(found))
    batch = found.train_batch_size
    line("batch size", batch, f"for world sizes {listed_world_sizes(batch)}" if batch else None)
    sub_groups = None if found.num_sub_groups is None else f"{found.num_sub_groups} sub-groups a rank"
    line("sub-group size", None if found.sub_group_size is None else f"{found.sub_group_size:,}", sub_groups)
    if found.record == "present":
        line("commit record", f"content root {str(found.content_root)[:12]}")
    else:
        line("commit record", {"absent": "none: what it holds cannot be verified"}.get(found.record, found.record))
    line("client state", *(found.client_state or ()))
    line(
        "scheduler", {True: "saved", False: "none"}.get(bool(found.scheduler)) if found.scheduler is not None else None
    )

    heading("Contents")
    trained, frozen, tied = found.count("trained"), found.count("frozen"), found.count("tied")
    line("trained", _amount(*trained) if trained[0] else None)
    line("frozen", _amount(*frozen) if frozen[0] else None)
    line("tied", f"{tied[0]} more {'name' if tied[0] == 1 else 'names'}" if tied[0] else None)
    for key, state in found.state.items():
        line(key, " and ".join(state.dtypes), format_size(state.nbytes), _not_all(state.num_params, key, trained[0]))
    for key, values in found.scalars.items():
        line(key, " and ".join(_scalar(value) for value in values))
    line("state", None if found.state_bytes is None else format_size(found.state_bytes))
    line("on disk", f"{format_size(found.disk_bytes)} in {found.num_files} files")
    if found.scaler is not None:
        scale = found.scaler.attributes.get("cur_scale")
        line("loss scaler", found.scaler.class_name, None if scale is None else f"scale {scale}")
    for number, group in enumerate(found.groups):
        options = ", ".join(f"{key} {value}" for key, value in group.options.items())
        line(f"group {number}", f"{_amount(group.num_params, group.numel)}: {options}")

    _show_params(out, found, params, pattern)
    if found.buffers and pattern is None:
        heading("Buffers")
        _show_buffers(out, found.buffers)
    labels = {"missing": found.missing, "of no rank": found.stale + found.odd + found.leftovers}
    for label, names in labels.items():
        if names:
            heading(f"Files {label}")
            _list(out, names, max(len(names), found.num_missing if label == "missing" else 0))
    for title, style, texts in (
        ("Notes", "yellow", found.notes),
        ("Not supported", "bold red", found.unsupported),
        (f"{len(found.problems)} problems" if len(found.problems) > 1 else "Problem", "bold red", found.problems),
    ):
        if texts:
            say(out, (f"\n{title}", style))
            for text in texts:
                say(out, f"  - {text}")


def _laid_out(framework: str) -> str:
    names = {"hf-trainer": "the Hugging Face Trainer", "accelerate": "accelerate", "lightning": "Lightning"}
    return f"by {names.get(framework, 'DeepSpeed')}"


def _master(found: Inspection) -> str | None:
    return None if found.master_dtype is None else f"{found.master_dtype} master weights"


def _amount(num_params: int, numel: int) -> str:
    return f"{num_params:,} {'parameter' if num_params == 1 else 'parameters'}, {numel:,} elements"


def _not_all(num_params: int, key: str, num_trained: int) -> str | None:
    return None if key == "frozen" or num_params == num_trained else f"of {num_params:,} parameters"


def _scalar(value: ScalarValue) -> str:
    return f"{value.value} ({value.kind})"


def _show_params(out: Console, found: Inspection, params: tuple[ParamView, ...], pattern: str | None) -> None:
    if not found.params:
        return
    title = "Parameters" if pattern is None else f"Parameters like {pattern}: {len(params):,} of {len(found.params):,}"
    say(out, (f"\n{title}", "bold"))
    shown = params if pattern is not None else params[:_LISTED]
    if not shown:
        say(out, "  none")
        return
    rows = [("name", "shape", "elements", "state", "")]
    rows += [
        (
            param.name,
            str(list(param.shape)),
            f"{param.numel:,}" if param.kind != "tied" else "",
            "" if param.nbytes is None or param.kind == "tied" else format_size(param.nbytes),
            _role(param),
        )
        for param in shown
    ]
    _print_lines(out, columns(rows, right=frozenset({2, 3})))
    if len(shown) < len(params):
        say(out, f"  ... and {len(params) - len(shown):,} more; --params * lists them all")


def _role(param: ParamView) -> str:
    if param.kind == "tied":
        return f"is {param.tied_to}"
    return param.kind if param.group is None else f"group {param.group}"


def _show_buffers(out: Console, buffers: tuple[BufferView, ...]) -> None:
    rows = [(buffer.name, str(list(buffer.shape)), buffer.dtype) for buffer in buffers[:_LISTED]]
    _print_lines(out, columns(rows))
    if len(buffers) > _LISTED:
        say(out, f"  ... and {len(buffers) - _LISTED:,} more")


def _list(out: Console, names: tuple[str, ...], count: int) -> None:
    for name in names[:_LISTED]:
        say(out, f"  {name}")
    if count > _LISTED:
        say(out, f"  ... and {count - _LISTED:,} more")


def _print_lines(out: Console, lines: Iterable[str]) -> None:
    """Many lines at once: they have no styles, and rich would take its time with each."""
    out.file.write("".join(f"  {line}\n" for line in lines))
