"""``zeroelastic inspect`` and ``show``: what a checkpoint is, from its headers, and what its tensors contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import FAILED, INVALID, ForceOption, HtmlOption, JsonOption, QuietOption, TagOption, reports
from zeroelastic.cli.terminal import NO_BREAK, print_columns, print_styled, print_wrapped
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.inspect.report import InspectedParam, InspectedTopology, InspectReport
    from zeroelastic.verbs.report import Number
    from zeroelastic.verbs.show import ShownTensor, ShowReport

_LISTED = 24
_PLACES_SHOWN = 16
_FRAMEWORKS = {"hf-trainer": "the Hugging Face Trainer", "accelerate": "accelerate", "lightning": "Lightning"}
_STATISTICS = ("min", "max", "mean", "std", "norm", "zeros", "NaN", "Inf")


def _show_inspection(found: InspectReport, params: str | None) -> None:
    """The inspection for people, on stdout."""
    from zeroelastic.core.global_batch import listed_world_sizes

    def line(label: str, *texts: object) -> None:
        known = [str(text) for text in texts if text not in (None, "")]
        if known:
            print_wrapped(", ".join(known), first=f"  {label:<14}  ", rest=" " * 18)

    def heading(text: str) -> None:
        print_styled((f"\n{text}", "bold"))

    print_styled((found.path, "bold"))
    totals, files = found.totals, found.files
    if not totals.files:  # nothing was opened: the problems say why
        _show_findings(found)
        return
    ranks = None if found.world_size is None else counted(found.world_size, "rank")
    is_shown = found.tp_size in (None, 1) or found.topology is not None
    tensor_parallel = None if is_shown else f"{found.tp_size} tensor parallel"
    stage = f"ZeRO stage {found.stage}" if found.stage not in (None, 3) else None
    made_by = None if found.format is None else f"by {_FRAMEWORKS.get(found.framework, 'DeepSpeed')}"
    line("saved as", found.format, stage, ranks, tensor_parallel, made_by)
    skipped = f"{found.skipped_steps} skipped" if found.skipped_steps else None
    samples = None if found.samples is None else f"{found.samples:,} samples"
    if (topology := found.topology) is not None:
        line("topology", topology.sizes)
    line("step", found.step, skipped, samples)
    line("save id", found.save_id)
    line("written by", *(f"{name} {version}" for name, version in found.versions if version))
    precision = ((found.model_dtype, "model"), (found.master_dtype, "master weights"))
    line("precision", *(f"{dtype} {what}" for dtype, what in precision if dtype))
    batch = found.train_batch_size
    line("batch size", batch, f"for world sizes {listed_world_sizes(batch)}" if batch else None)
    if found.sub_group_size is not None:
        sub_groups = None if found.num_sub_groups is None else f"{counted(found.num_sub_groups, 'sub-group')} a rank"
        line("sub-group size", f"{found.sub_group_size:,}", sub_groups)
    if found.record.state == "present":
        line("commit record", f"content root {str(found.record.content_root)[:12]}")
    else:
        absent = "none: what it holds cannot be verified"
        line("commit record", absent if found.record.state == "absent" else found.record.state)
    line("client state", *(found.client_state or ()))
    line(
        "scheduler", {True: "saved", False: "none"}.get(bool(found.scheduler)) if found.scheduler is not None else None
    )

    heading("Contents")
    trained, frozen, tied = totals.trained_params, totals.frozen_params, totals.tied_params
    line("trained", _amount(trained, totals.trained_numel) if trained else None)
    line("frozen", _amount(frozen, totals.frozen_numel) if frozen else None)
    if found.topology is not None and (experts := found.topology.experts):
        total = sum(layer.num_experts for layer in experts)
        line("experts", f"{total:,} in {counted(len(experts), 'layer')}")
    line("tied", f"{tied} more {'name' if tied == 1 else 'names'}" if tied else None)
    for key, state in found.state.items():
        line(key, " and ".join(state.dtypes), format_size(state.bytes), _not_all(state.num_params, key, trained))
    for key, values in found.scalars.items():
        line(key, " and ".join(f"{value.value} ({value.kind})" for value in values))
    line("state", None if totals.state_bytes is None else format_size(totals.state_bytes))
    line("on disk", f"{format_size(totals.disk_bytes)} in {counted(totals.files, 'file')}")
    if found.loss_scaler is not None:
        scale = found.loss_scaler.attributes.get("cur_scale")
        line("loss scaler", found.loss_scaler.class_name, None if scale is None else f"scale {scale}")
    for number, group in enumerate(found.groups):
        used = {key: value for key, value in group.options.items() if value is not None and value is not False}
        options = ", ".join(f"{key} {value}".replace(" ", NO_BREAK) for key, value in used.items())
        line(f"group {number}", f"{_amount(group.num_params, group.numel)}: {options}")

    _show_params(found, params)
    if found.topology is not None and params is None:
        _show_cuts(found.topology)
    if found.buffers and params is None:
        heading("Buffers")
        _print_first([(buffer.name, str(list(buffer.shape)), buffer.dtype) for buffer in found.buffers])
    labels = {"missing": files.missing, "of no rank": files.stale + files.odd + files.leftovers}
    for label, names in labels.items():
        if names:
            heading(f"Files {label}")
            _print_first([(name,) for name in names], files.num_missing if label == "missing" else 0)
    _show_findings(found)


def _show_findings(found: InspectReport) -> None:
    """Notes and problems, and what to do about them."""
    for title, style, texts in (
        ("Notes", "yellow", found.notes),
        ("Not supported", "bold red", found.unsupported),
        (f"{len(found.problems)} problems" if len(found.problems) > 1 else "Problem", "bold red", found.problems),
    ):
        if texts:
            print_styled((f"\n{title}", style))
            for text in texts:
                print_wrapped(text, first="  - ", rest="    ")
    if found.remedy is not None:
        print_wrapped(found.remedy, first="", rest="")


def _amount(num_params: int, numel: int) -> str:
    return f"{counted(num_params, 'parameter')}, {counted(numel, 'element')}"


def _not_all(num_params: int, key: str, num_trained: int) -> str | None:
    return None if key == "frozen" or num_params == num_trained else f"of {counted(num_params, 'parameter')}"


def _show_params(found: InspectReport, pattern: str | None) -> None:
    params, total = found.params, found.totals.params + found.totals.tied_params
    if not total:
        return
    title = "Parameters" if pattern is None else f"Parameters like {pattern}: {len(params):,} of {total:,}"
    print_styled((f"\n{title}", "bold"))
    shown = params if pattern is not None else params[:_LISTED]
    if not shown:
        print_styled("  none")
        return
    rows = [("name", "shape", "elements", "state", "")]
    rows += [
        (
            param.name,
            str(list(param.shape)),
            f"{param.numel:,}" if param.kind != "tied" else "",
            "" if param.bytes is None or param.kind == "tied" else format_size(param.bytes),
            _role(param),
        )
        for param in shown
    ]
    print_columns(rows, right=frozenset({2, 3}))
    if len(shown) < len(params):
        print_styled(f"  ... and {len(params) - len(shown):,} more; --params '*' lists them all")


def _show_cuts(topology: InspectedTopology) -> None:
    """The parameters that ranks have slices of."""
    print_styled(("\nSlices", "bold"))
    if topology.num_whole and topology.cuts:
        print_styled(f"  {counted(topology.num_whole, 'parameter')} on each rank as a whole")
    rows = [(cut.name, str(list(cut.shape)), cut.sentence) for cut in topology.cuts]
    _print_first(rows or [("every parameter is whole on each rank",)])


def _role(param: InspectedParam) -> str:
    if param.kind == "tied":
        return f"is {param.tied_to}"
    return param.kind if param.group is None else f"group {param.group}"


def _print_first(rows: Sequence[tuple[str, ...]], count: int = 0) -> None:
    """Print the first rows, and how many of them, or of ``count``, are left out."""
    print_columns(rows[:_LISTED])
    if (more := max(len(rows), count) - _LISTED) > 0:
        print_styled(f"  ... and {more:,} more")


def _show_one(report: ShowReport, tensor: ShownTensor) -> None:
    def line(label: str, *texts: str | None) -> None:
        known = [text for text in texts if text]
        if known:
            print_styled(f"  {label:<8}  {', '.join(known)}")

    print_styled((report.path, "bold"), f"  step {report.step}, {counted(report.world_size, 'rank')}")
    print_styled((tensor.name, "bold"), "" if tensor.kind == "weight" else f"  {tensor.kind}")
    line("tied to", tensor.tied_to)
    stats = tensor.statistics
    if stats is None:
        line("value", f"{tensor.value}")
    else:
        line("dtype", tensor.dtype, {"frozen": "frozen", "buffer": "a buffer"}.get(tensor.key))
        line("shape", str(list(tensor.shape)), counted(stats.numel, "element"), format_size(tensor.bytes))
    line("group", None if tensor.group is None else str(tensor.group))
    line("also", "--kind " + ", ".join(tensor.other_kinds) if tensor.other_kinds else None)
    if stats is None:
        return
    for label, text in zip(_STATISTICS, _figures(tensor), strict=True):
        line(label, text)
    line("digest", *_digest(tensor))
    values = " ".join(map(_number, tensor.first))
    line("first", values)
    line("last", " ".join(map(_number, tensor.last)) if stats.numel > len(tensor.first) else None)
    print_styled("  places")
    rows = [
        (
            f"rank {place.rank}",
            place.file,
            f"{place.bytes:,} bytes from {place.offset:,}",
            _elements(place.start, place.numel),
        )
        for place in tensor.places[:_PLACES_SHOWN]
    ]
    print_columns(rows, indent="    ")
    more = len(tensor.places) - _PLACES_SHOWN
    if more > 0:
        print_styled(f"    and {more} more; --json lists them all")


def _show_many(report: ShowReport) -> None:
    print_styled((report.path, "bold"), f"  step {report.step}, {counted(len(report.tensors), 'tensor')}")
    head = ("name", "dtype", "shape", *_STATISTICS, "digest")
    rows = [
        (tensor.name, tensor.dtype, str(list(tensor.shape)), *_figures(tensor), _digest(tensor)[0] or "")
        for tensor in report.tensors
    ]
    print_columns([head, *rows], right=frozenset(range(3, 3 + len(_STATISTICS))))
    damaged = [tensor.name for tensor in report.tensors if not tensor.ok]
    if damaged:
        print_styled(("not as saved: ", "bold red"), ", ".join(damaged))


def _figures(tensor: ShownTensor) -> tuple[str, ...]:
    stats = tensor.statistics
    if stats is None:
        return (str(tensor.value), *([""] * (len(_STATISTICS) - 1)))
    values = tuple("-" if value is None else _number(value) for value in (stats.min, stats.max, stats.mean, stats.std))
    return (*values, _number(stats.norm), *(f"{count:,}" for count in (stats.zeros, stats.nans, stats.infs)))


def _digest(tensor: ShownTensor) -> tuple[str | None, str | None]:
    if tensor.digest is None:
        return None, None
    if tensor.recorded_digest is None:
        return tensor.digest, "none is recorded"
    same = "the recorded one"
    return tensor.digest, same if tensor.ok else f"NOT {same}, {tensor.recorded_digest}"


def _number(value: Number) -> str:
    return f"{float(value):.6g}"


def _elements(start: int, numel: int) -> str:
    return f"element {start:,}" if numel == 1 else f"elements {start:,} to {start + numel - 1:,}"


def _show(report: ShowReport, param: str) -> None:
    if len(report.tensors) == 1 and report.tensors[0].name == param:
        _show_one(report, report.tensors[0])
    else:
        _show_many(report)


def _inspect_code(report: InspectReport) -> int:
    return INVALID if report.problems else FAILED if report.unsupported else 0


@reports("zeroelastic.verbs.inspect.inspect", _show_inspection, code=_inspect_code)
def inspect(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A tag directory, or the directory above.")],
    tag: TagOption = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="List the parameters whose names match a glob, or contain this text."),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Open every rank's headers, and say where they disagree.")
    ] = False,
    html: HtmlOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
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


@reports("zeroelastic.verbs.show", _show)
def show(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A tag directory, the directory above, or a URL.")],
    param: Annotated[
        str, typer.Argument(metavar="PARAM", help="The name of a parameter or buffer, or a glob in quotes for many.")
    ],
    tag: TagOption = None,
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="weight, or a key of the optimizer's state: exp_avg, step.")
    ] = "weight",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a tensor: dtype, shape, files and byte ranges, statistics, digest, first and last values.

    For a glob, one line for each tensor. Reads every byte of what is shown once, and compares its digest with the
    commit record. Statistics are those of the finite elements.
    Exit code 0: shown; 1: it could not be read; 2: wrong usage, or no such tensor; 3: it is damaged.

    \b
    Examples:
        zeroelastic show ckpt model.norm.weight
        zeroelastic show ckpt model.norm.weight --kind exp_avg --json
        zeroelastic show ckpt *norm* --tag global_step2
    """
