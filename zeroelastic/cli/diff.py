"""``zeroelastic diff``: how two checkpoints differ, whatever the number of ranks and the format of each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import ForceOption, HtmlOption, JsonOption, QuietOption
from zeroelastic.cli.output.outcome import FAILED
from zeroelastic.cli.output.progress import progress_of
from zeroelastic.cli.output.show import print_report, print_styled, print_written, whole_table_console
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.verbs.diff.diff import DiffReport
    from zeroelastic.verbs.diff.tensors import ComparedTensor

_MOST_SHOWN = 15


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its tag directory, or the one above.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    params: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only parameters whose name fits, such as '*.bias'.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every tensor, not the worst few.")] = False,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for the tensors of both.")] = "256MiB",
    html: HtmlOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: every tensor bit for bit, hyper-parameters, counters, client state.

    They may have been saved at different steps, by different numbers of ranks and in different formats; the last two do
    not make them differ.
    Exit code 0: equal; 1: they differ; 2: wrong usage; 3: one of them is invalid.

    \b
    Examples:
        zeroelastic diff ckpt/global_step4 ckpt
        zeroelastic diff ckpt ckpt/global_step4 --params *.norm.weight --json
    """
    from zeroelastic.cli.pages.render import check_report, write_report
    from zeroelastic.verbs.diff.diff import diff as run

    check_report(html, force=force)
    report = run(a, b, params=params, max_memory=max_memory, progress=progress_of(quiet=quiet))
    write_report(html, "diff", report.to_json, force=force)
    if as_json:
        print_report(report)
    else:
        _show(report, show_all)
        print_written(html)
    if not report.equal:
        raise typer.Exit(FAILED)


def _show(found: DiffReport, show_all: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    out = whole_table_console(folds=True)

    def table(title: str, *columns: str, rows: list[tuple[str, ...]]) -> None:
        made = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
        for number, column in enumerate(columns):
            made.add_column(
                column,
                overflow="fold",
                no_wrap=column == "key" or column in _NUMBERS,
                justify="right" if column in _NUMBERS and number else "left",
            )
        shown = rows if show_all else rows[:_MOST_SHOWN]
        for row in shown:
            made.add_row(*(Text(cell) for cell in row))
        out.print(made)
        if len(shown) < len(rows):
            print_styled(f"  and {len(rows) - len(shown)} more; --all shows them")

    print_styled(("Weights: ", "bold"), _about_weights(found))
    print_styled(("A  ", "bold"), found.a)
    print_styled(("B  ", "bold"), found.b)
    differing = sorted(found.differing, key=_badness)
    shown = [*differing, *found.equal_tensors] if show_all else differing
    if shown:
        table(
            "Tensors" if show_all else "Tensors, the worst first",
            "parameter", "key", "different", "of", "max abs", "max ulp", "relative norm", "",
            rows=[_tensor_row(tensor) for tensor in shown],
        )  # fmt: skip
    for side, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            table(f"Only in {side}", "parameter", "key", rows=[(one.param, one.key) for one in only])
    for title, values in (("State", found.state), ("How they were saved, which does not count", found.saving)):
        if values:
            table(title, "what", "A", "B", rows=[(v.what, v.a or "-", v.b or "-") for v in values])
    roots = found.content_root
    if roots.a is not None and roots.a == roots.b:
        print_styled("content root ", roots.a[:12], " in the commit records of both")
        if found.tensors:
            print_styled(
                ("note", "yellow"),
                ": the same was saved, so one of them was damaged later; zeroelastic verify says which",
            )
    elif roots.a is not None and roots.b is not None:
        print_styled(f"content roots {roots.a[:12]} and {roots.b[:12]} in the commit records")
    count = f"{found.num_equal} of {found.num_tensors} common tensors are equal bit for bit"
    print_styled(
        ("Equal: ", "green") if found.equal else ("Different: ", "bold red"),
        count,
        f" ({format_size(found.bytes_read)})",
    )


def _about_weights(found: DiffReport) -> str:
    """One line: whether the weights are equal, and else how many of them differ and how far."""
    from zeroelastic.verbs.diff.element_stats import ElementStats

    weights = found.weights
    if found.weights_equal:
        return f"equal bit for bit ({counted(len(weights), 'parameter')})" if weights else "none compared"
    known = [tensor.stats for tensor in weights if tensor.stats is not None]
    total = sum(known, ElementStats())
    differing = sum(not tensor.equal for tensor in weights)
    line = f"different in {differing} of {counted(len(weights), 'parameter')} that both have"
    line += f", {total.num_different:,} of {counted(total.num, 'element')}, by {total.max_abs:.3g} at most"
    relative = math.sqrt(total.square / total.left_square) if total.left_square else None
    line += "" if relative is None else f"; the norm of the difference is {relative:.2g} of that of A"
    only = len({one.param for one in (*found.only_a, *found.only_b) if one.key in ("fp32", "frozen")})
    return line + (f"; {counted(only, 'parameter')} on one side only" if only else "")


_NUMBERS = {"different", "of", "max abs", "max ulp", "relative norm"}


def _badness(tensor: ComparedTensor) -> tuple[float, float, str, str]:
    """What sorts the worst difference first: other shapes and dtypes, then by relative norm."""
    relative = tensor.relative_norm
    stats = tensor.stats
    different = 0.0 if stats is None or not stats.num else stats.num_different / stats.num
    rank = math.inf if relative is None or not math.isfinite(relative) or (stats and stats.num_nonfinite) else relative
    return (-rank, -different, tensor.param, tensor.key)


def _tensor_row(tensor: ComparedTensor) -> tuple[str, ...]:
    notes = []
    if tensor.shape.a != tensor.shape.b:
        notes.append(f"shape {tensor.shape.a} and {tensor.shape.b}")
    if tensor.dtype.a != tensor.dtype.b:
        notes.append(f"{tensor.dtype.a} and {tensor.dtype.b}")
    stats = tensor.stats
    if stats is None:
        return tensor.param, tensor.key, "", "", "", "", "", "; ".join(notes)
    if stats.num_nonfinite:
        notes.append(f"{stats.num_nonfinite} of them NaN or infinite")
    if stats.num_sign_changed:
        notes.append(f"{stats.num_sign_changed} of them of another sign")
    relative = tensor.relative_norm
    return (
        tensor.param,
        tensor.key,
        str(stats.num_different),
        str(stats.num),
        f"{stats.max_abs:.3g}",
        "" if stats.max_ulp is None or (stats.num_sign_changed and not stats.max_ulp) else str(stats.max_ulp),
        "" if relative is None else f"{relative:.3g}",
        "; ".join(notes),
    )
