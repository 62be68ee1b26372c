"""``zeroelastic verify`` and ``diff``: whether every byte is right, and whether two checkpoints are equal."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import (
    FAILED,
    INVALID,
    ForceOption,
    HtmlOption,
    JsonOption,
    QuietOption,
    TagOption,
    Variant,
    reports,
)
from zeroelastic.cli.terminal import print_styled, print_wrapped, whole_table_console
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.checkpoint.tag_headers import Problem
    from zeroelastic.verbs.diff.diff import DiffReport
    from zeroelastic.verbs.diff.tensors import ComparedTensor
    from zeroelastic.verbs.verify.report import VerifyAllReport, VerifyReport

_MOST_PROBLEMS = 20
_MOST_TENSORS = 15
_NUMBERS = {"different", "of", "max abs", "max ulp", "relative norm"}


def _show_verified(report: VerifyReport) -> None:
    facts = [report.format, counted(report.world_size, "rank")] if report.world_size else []
    print_styled((report.path, "bold"), "  ", ", ".join(fact for fact in facts if fact))
    for clause in report.checked:
        print_styled("  ", ("ok  " if report.valid else "    ", "green"), "  ", clause)
    for clause in report.unchecked:
        print_styled("  ", ("note", "yellow"), "  ", clause)
    for clause in report.unsupported:
        print_styled("  ", ("not supported", "yellow"), "  ", clause)
    if report.content_root is not None:
        compared = report.recorded_root is not None
        matches = "the saved one" if report.content_root == report.recorded_root else "not the saved one"
        print_styled("        content root ", report.content_root[:12], f", {matches}" if compared else "")
    _show_rate(report)
    if report.valid and report.unsupported:
        sound = "Sound by its checksums" if report.mode == "full" else "Nothing is wrong with names and sizes"
        print_styled((sound, "green"), "; not supported: only a training job resumes it, as said above.")
        return
    if report.valid:
        print_styled(("Valid" if report.mode == "full" else "Nothing is wrong with names and sizes", "green"), ".")
        return
    for problem in report.problems[:_MOST_PROBLEMS]:
        print_styled("  ", ("FAIL", "bold red"), "  ", problem.sentence)
    more = len(report.problems) - _MOST_PROBLEMS
    if more > 0:
        print_styled(f"        and {more} more; --json lists them all")
    print_styled(("Invalid: ", "bold red"), _blame(report.problems))
    if report.remedy is not None:
        print_wrapped(report.remedy, first="", rest="")


def _show_rate(report: VerifyReport | VerifyAllReport) -> None:
    if report.mode == "full" and report.bytes_read:
        rate = format_size(report.bytes_read / max(report.read_seconds, 1e-9))
        print_styled(f"        {format_size(report.bytes_read)} read in {report.read_seconds:.2f} s, {rate}/s")


def _show_all(report: VerifyAllReport) -> None:
    for tag in report.tags:
        if tag.valid and not tag.unsupported:
            root = "" if tag.content_root is None else f", content root {tag.content_root[:12]}"
            print_styled("  ", ("ok  ", "green"), "  ", f"{tag.path}: {counted(tag.num_files, 'file')}{root}")
        elif tag.valid or tag.problems:
            _show_verified(tag)
        else:
            print_styled("  ", ("not checked", "yellow"), "  ", " ".join(tag.unsupported))
    _show_rate(report)
    valid = sum(tag.valid for tag in report.tags)
    every = f"{valid} of {counted(len(report.tags), 'checkpoint')} "
    what = "valid" if report.mode == "full" else "with nothing wrong with names and sizes"
    print_styled((f"{every}{what}", "green" if report.ok else "bold red"), ".")


def _verify_code(report: VerifyReport | VerifyAllReport) -> int:
    from zeroelastic.verbs.verify.report import VerifyReport

    reports = (report,) if isinstance(report, VerifyReport) else report.tags
    return 0 if report.ok else INVALID if any(one.problems for one in reports) else FAILED


def _blame(problems: tuple[Problem, ...]) -> str:
    """How many problems, and in which files."""
    files = sorted({problem.file for problem in problems if problem.file})
    count = counted(len(problems), "problem")
    if not files:
        return f"{count}."
    return f"{count} in {', '.join(files[:3])}" + (
        f" and {counted(len(files) - 3, 'more file')}." if len(files) > 3 else "."
    )


def _show_differences(found: DiffReport, show_all: bool) -> None:
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
        shown = rows if show_all else rows[:_MOST_TENSORS]
        for row in shown:
            made.add_row(*(Text(cell) for cell in row))
        out.print(made)
        if len(shown) < len(rows):
            print_styled(f"  and {len(rows) - len(shown)} more; --all shows them")

    print_styled(("Weights: ", "bold"), _about_weights(found))
    print_styled(("A  ", "bold"), found.a)
    print_styled(("B  ", "bold"), found.b)
    differing = sorted(found.differing, key=attrgetter("difference_key"))
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


def _tensor_row(tensor: ComparedTensor) -> tuple[str, ...]:
    notes = tensor.other_forms
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


@reports(
    "zeroelastic.verbs.verify.verify",
    _show_verified,
    code=_verify_code,
    variant=Variant("all_tags", "--all", "verify_all", _show_all),
)
def verify(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: its tag directory, or the one above.")],
    tag: TagOption = None,
    all_tags: Annotated[bool, typer.Option("--all", help="Every checkpoint of the run in SRC, newest first.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look at names, sizes and the commit record only; open no payload.")
    ] = False,
    html: HtmlOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a checkpoint is what its save left: complete, undamaged, of one save.

    Reads every byte of every rank's files once: headers, checksums of all records, digests of all tensors against the
    commit record. What is damaged is named by file, parameter, state key and byte.
    With --all, every checkpoint of the run is checked.
    Exit code 0: valid, or sound and not supported; 1: it could not be checked; 2: wrong usage; 3: invalid.

    \b
    Examples:
        zeroelastic verify ckpt
        zeroelastic verify ckpt --tag global_step2 --json
        zeroelastic verify ckpt/global_step4 --quick
        zeroelastic verify ckpt --all
    """


@reports("zeroelastic.verbs.diff.diff", _show_differences, code=lambda report: 0 if report.equal else FAILED)
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
