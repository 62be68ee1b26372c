"""``zeroelastic show``: a tensor of a checkpoint, or many: where it lies, its statistics, its digest, some values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import JsonOption, QuietOption, TagOption
from zeroelastic.cli.output.outcome import INVALID
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import print_columns, print_report, print_styled
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.report import Number
    from zeroelastic.verbs.show import ShownTensor, ShowReport

_PLACES_SHOWN = 16


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
    from zeroelastic.verbs.show import show as run

    report = run(src, param, tag=tag, kind=kind, progress=progress_of(quiet=quiet))
    if as_json:
        print_report(report)
    elif len(report.tensors) == 1 and report.tensors[0].name == param:
        _show_one(report, report.tensors[0])
    else:
        _show_many(report)
    if not report.ok:
        raise typer.Exit(INVALID)


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


_STATISTICS = ("min", "max", "mean", "std", "norm", "zeros", "NaN", "Inf")


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
