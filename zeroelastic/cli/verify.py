"""``zeroelastic verify`` and ``diff``: whether every byte is right, and whether two checkpoints are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import FAILED, INVALID, ForceOption, HtmlOption, JsonOption, QuietOption, TagOption, reports
from zeroelastic.cli.view import Row, Severity, Table, View, facts, row
from zeroelastic.errors import counted, some

if TYPE_CHECKING:
    from zeroelastic.verbs.diff import ComparedTensor, Difference, DiffReport
    from zeroelastic.verbs.interface import Number
    from zeroelastic.verbs.verify.findings import VerifyAllReport, VerifyReport


def _verify_view(report: VerifyReport) -> View:
    """Return what the terminal and the page show of a verification."""
    severity, sentence = _verify_answer(report)
    matches = "the saved one" if report.content_root == report.recorded_root else "not the saved one"
    values: list[tuple[str, object]] = [
        ("saved as", [report.format, counted(report.world_size, "rank") if report.world_size else None]),
        ("read", _rate(report)),
    ]
    if report.content_root is not None:
        compared = None if report.recorded_root is None else matches
        values.append(("content root", [report.content_root[:12], compared]))
    sound: Severity = "good" if report.valid else "plain"
    checked = [row("ok" if report.valid else "", clause, severity=sound) for clause in report.checked]
    checked += [row("note", clause, severity="note") for clause in report.unchecked]
    checked += [row("not supported", clause, severity="note") for clause in report.unsupported]
    tables = [
        facts("", values),
        Table("Checked", tuple(checked), most=len(checked)),
        Table("Problems", tuple(row("FAIL", one.sentence, severity="bad") for one in report.problems), most=20),
    ]
    return View(report.path, tables, sentence, severity)


def _verify_answer(report: VerifyReport) -> tuple[Severity, str]:
    if report.valid and report.unsupported:
        sound = "Sound by its checksums" if report.mode == "full" else "Nothing is wrong with names and sizes"
        return "note", f"{sound}; not supported: only a training job resumes it, as said above."
    if report.valid and report.mode == "quick":
        return "good", "Nothing is wrong with names and sizes."
    if report.valid:
        return "good", "Valid."
    files = sorted({problem.file for problem in report.problems if problem.file})
    where = f" in {some(files, 3)}" if files else ""
    return "bad", f"Invalid: {counted(len(report.problems), 'problem')}{where}. {report.remedy or ''}".rstrip()


def _rate(report: VerifyReport | VerifyAllReport) -> str | None:
    if report.mode != "full" or not report.bytes_read:
        return None
    rate = format_size(report.bytes_read / max(report.read_seconds, 1e-9))
    return f"{format_size(report.bytes_read)} in {report.read_seconds:.2f} s, {rate}/s"


def _all_view(report: VerifyAllReport) -> View:
    """Return the view of all tags of a run: a line for each tag, and its problems."""
    rows = []
    for tag in report.tags:
        root = None if tag.content_root is None else f"content root {tag.content_root[:12]}"
        severity: Severity = "bad" if tag.problems else "note" if tag.unsupported or not tag.valid else "good"
        state = "FAIL" if tag.problems else "ok" if tag.valid else "not checked"
        rows.append(row(state, f"{tag.path}: {counted(tag.num_files, 'file')}", root, severity=severity))
        rows += [row("", text, "", severity=severity) for text in tag.unsupported]
        rows += [row("", problem.sentence, "", severity=severity) for problem in tag.problems]
    valid = sum(tag.valid for tag in report.tags)
    what = "valid" if report.mode == "full" else "with nothing wrong with names and sizes"
    tables = [facts("", [("read", _rate(report))]), Table("Checkpoints", tuple(rows), most=len(rows))]
    sentence = f"{valid} of {counted(len(report.tags), 'checkpoint')} {what}."
    return View(report.path, tables, sentence, "good" if report.ok else "bad")


def _verify_code(report: VerifyReport | VerifyAllReport) -> int:
    from zeroelastic.verbs.verify.findings import VerifyReport

    reports = (report,) if isinstance(report, VerifyReport) else report.tags
    return 0 if report.ok else INVALID if any(one.problems for one in reports) else FAILED


def _diff_view(found: DiffReport) -> View:
    """Return what the terminal and the page show of a comparison: the tensors that differ most come first."""
    from zeroelastic.verbs.diff import WEIGHTS

    roots = [None if root is None else root[:12] for root in (found.content_root.a, found.content_root.b)]
    tensors = sorted(found.tensors, key=_how_far, reverse=True)
    weights = [tensor for tensor in found.tensors if tensor.key in WEIGHTS]
    different = f"different in {counted(len(weights), 'parameter')}" if weights else "different: some are on one side"
    columns = ("parameter", "key", "different", "of", "largest", "at", "A", "B", "")
    tables = [
        facts(
            "",
            [
                ("A", found.a),
                ("B", found.b),
                ("weights", "equal" if found.weights_equal else different),
                ("content roots", [f"{roots[0] or 'none'} and {roots[1] or 'none'}"]),
                ("by digest", f"{counted(found.num_by_digest, 'tensor')} of {found.num_tensors:,}"),
                ("read", f"{format_size(found.bytes_read // 2)} of each"),
            ],
        ),
        Table("Tensors that differ", tuple(map(_tensor_row, tensors)), columns, frozenset({2, 3, 4}), most=15),
        *(
            Table(f"Only in {side}", tuple(row(one.param, one.key) for one in only), ("parameter", "key"), most=15)
            for side, only in (("A", found.only_a), ("B", found.only_b))
        ),
        Table("Other state", tuple(map(_value_row, found.state)), ("what", "A", "B"), most=15),
    ]
    count = f"{found.num_equal:,} of {found.num_tensors:,} common tensors are equal"
    if found.equal:
        return View("A and B", tables, f"Equal: {count}, and so is all other state.", "good")
    others = f"; {counted(len(found.state), 'other value')} differ" if found.state else ""
    return View("A and B", tables, f"Different: {count}{others}.", "bad")


def _how_far(tensor: ComparedTensor) -> tuple[float, int]:
    return (float("inf") if tensor.max_abs is None else float(tensor.max_abs), tensor.num_different or 0)


def _tensor_row(tensor: ComparedTensor) -> Row:
    forms = (("shape", tensor.shape.a, tensor.shape.b), ("dtype", tensor.dtype.a, tensor.dtype.b))
    notes = "; ".join(f"{what} {a} and {b}" for what, a, b in forms if a != b)
    at = None if tensor.index is None else str(tensor.index)
    largest, a, b = map(_number, (tensor.max_abs, tensor.a, tensor.b))
    return row(tensor.param, tensor.key, tensor.num_different, tensor.num_elements, largest, at, a, b, notes)


def _value_row(value: Difference) -> Row:
    return row(value.what, value.a or "none", value.b or "none")


def _number(value: Number | None) -> str | None:
    return None if value is None else f"{float(value):.9g}"


@reports(
    "zeroelastic.verbs.verify.verify",
    _verify_view,
    code=_verify_code,
    show_all=_all_view,
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
    """Check that a checkpoint is complete, undamaged and of one save.

    Reads every byte of every rank's files once: headers, checksums of all records, digests of all tensors against the
    commit record. Damage is named by file, parameter, state key and byte.
    With --all, every checkpoint of the run is checked.
    Exit code 0: valid, or sound and not supported; 1: it could not be checked; 2: wrong usage; 3: invalid.

    \b
    Examples:
        zeroelastic verify ckpt
        zeroelastic verify ckpt --tag global_step2 --json
        zeroelastic verify ckpt/global_step4 --quick
        zeroelastic verify ckpt --all
    """


@reports("zeroelastic.verbs.diff", _diff_view, code=lambda report: 0 if report.equal else FAILED)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its tag directory, or the one above.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare A with.")],
    params: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only parameters whose names match, such as '*.bias'.")
    ] = None,
    html: HtmlOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: every tensor, hyper-parameters, counters, client state.

    They may have been saved at different steps, by different numbers of ranks and in different formats; the last two do
    not make them differ. Tensors are compared by their recorded digests, and bit for bit if one side has none. For
    tensors that differ, the largest difference is shown.
    Exit code 0: equal; 1: they differ; 2: wrong usage; 3: a file that was read is damaged.

    \b
    Examples:
        zeroelastic diff ckpt/global_step4 ckpt
        zeroelastic diff ckpt ckpt/global_step4 --params *.norm.weight --json
    """
