"""The report of ``zeroelastic prove``."""

from __future__ import annotations

import math

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.documents.common import Number
from zeroelastic.cli.documents.jobs import Check, Prove
from zeroelastic.cli.html.figures.lines import Limit, Line, draw_lines
from zeroelastic.cli.html.page import Cell, Figure, Item, Page, Section, Table, Tone, cells, facts, sections, table
from zeroelastic.errors import counted

_FIRST, _AGAIN, _OTHER = "reference size", "reference size again", "other size"
_STYLES = {_FIRST: "hue-1", _AGAIN: "hue-3", _OTHER: "hue-2"}
_TONES: dict[bool | None, Tone] = {True: "good", False: "bad", None: "note"}


def prove_page(report: Prove) -> Page:
    """The page: whether the resume is proved, each check, the losses of the two sizes and their difference."""
    sizes: dict[str, int] = {run.role: run.world_size for run in report.runs}
    machine = report.machine
    return Page(
        "prove",
        report.source.path,
        "good" if report.ok else "bad",
        _answer(report, sizes),
        facts(
            ("verdict", report.verdict),
            ("saved by", counted(report.source.world_size, "rank")),
            ("at step", report.source.step),
            ("compared sizes", " and ".join(f"{sizes[role]}" for role in (_FIRST, _OTHER) if role in sizes)),
            ("optimizer steps", report.steps),
            ("tolerance of losses", f"{report.tolerance:.1e}"),
            ("read", f"{format_size(report.source.bytes_read)} in {counted(report.source.num_files, 'file')}"),
            ("machine", f"{machine.host}, {machine.cores} cores, {machine.device}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
            ("written", report.written),
            ("signed off by", report.signed_off_by),
            ("digest of the report", report.digest[:12]),
            ("script", " ".join(report.script)),
        ),
        sections(
            Section("Checks", tuple([tuple(map(_check, report.checks))] if report.checks else [])),
            Section("Losses", _losses(report, sizes)),
            Section("Content roots", (_roots(report),)),
            Section("Runs", (_runs(report),)),
        ),
    )


def _answer(report: Prove, sizes: dict[str, int]) -> str:
    other = f" on {counted(sizes[_OTHER], 'rank')}" if _OTHER in sizes else " at the other size"
    saved = f"a checkpoint of {counted(report.source.world_size, 'rank')}"
    if not report.ok:
        reason = report.reasons[0] if report.reasons else "no reason is known"
        more = len(report.reasons) - 1
        return f"Not proved: {saved}, resumed{other}: {reason}" + (
            f" ({more:,} more reasons below)." if more > 0 else "."
        )
    gaps = _gaps(report.losses.get(_FIRST, []), report.losses.get(_OTHER, []))
    finite = [gap for _, gap in gaps if math.isfinite(gap)]
    most = (
        f", and the losses of {counted(len(finite), 'step')} differ by at most {max(finite):.2g} of their size"
        if finite
        else ""
    )
    return f"Proved: {saved} resumes{other} with the same state bit for bit{most}."


def _check(check: Check) -> Item:
    text = check.sentence if check.sentence.startswith(check.name) else f"{check.name}: {check.sentence}"
    return Item(text, _TONES[check.ok], tuple(check.details[:20]))


def _number(value: Number | None) -> float:
    return math.nan if value is None else float(value)


def _gaps(first: list[Number | None], other: list[Number | None]) -> list[tuple[int, float]]:
    """The difference of each step's losses relative to the first, by step from 1."""
    gaps = []
    for step, (a, b) in enumerate(zip(map(_number, first), map(_number, other), strict=False), start=1):
        gaps.append((step, abs(a - b) / abs(a) if a else abs(a - b)))
    return gaps


def _losses(report: Prove, sizes: dict[str, int]) -> tuple[Figure | Table, ...]:
    losses = report.losses
    if not any(losses.values()):
        return ()
    titles = {role: f"{role}, {counted(sizes[role], 'rank')}" if role in sizes else role for role in losses}
    lines = [
        Line(
            titles[role],
            _STYLES.get(role, "hue-6"),
            tuple((step, _number(y)) for step, y in enumerate(values, start=1)),
        )
        for role, values in losses.items()
        if values
    ]
    blocks: list[Figure | Table] = [
        draw_lines("Losses after the load", lines, x_name="step after the load", y_name="loss")
    ]
    differences = [
        Line(titles[role], _STYLES[role], tuple(_gaps(losses[_FIRST], losses[role])))
        for role in (_OTHER, _AGAIN)
        if losses.get(_FIRST) and losses.get(role)
    ]
    if differences:
        blocks.append(
            draw_lines(
                "Difference to the reference size, relative to its loss",
                differences,
                x_name="step after the load",
                y_name="difference",
                from_zero=True,
                limit=Limit("tolerance", report.tolerance),
            )
        )
    gaps = dict(_gaps(losses.get(_FIRST, []), losses.get(_OTHER, [])))
    rows = [
        cells(
            str(step + 1),
            *("" if step >= len(values) or values[step] is None else f"{values[step]}" for values in losses.values()),
            f"{gaps[step + 1]:.2e}" if step + 1 in gaps else "",
        )
        for step in range(max(map(len, losses.values())))
    ]
    columns = [">step", *(f">{titles[role]}" for role in losses), ">difference"]
    return (*blocks, table("Losses by step", columns, rows))


def _roots(report: Prove) -> Table:
    known = {name: root for name, root in report.content_roots if root is not None}
    same = len(set(known.values())) == 1
    rows: list[tuple[Cell, ...]] = []
    for name, root in report.content_roots:
        tone: Tone | None = None if root is None else "good" if same or root == report.content_roots.files else "bad"
        rows.append((Cell(name.replace("_", " ")), Cell(root or "none", tone, name=True)))
    return table("Equal roots mean the same state, bit for bit", ["of", "content root"], rows)


def _runs(report: Prove) -> Table:
    rows = [
        cells(
            run.role,
            f"{run.world_size:,}",
            f"{run.seconds:.1f}",
            "yes" if run.finished else "no",
            "" if run.saves_skipped is None else str(run.saves_skipped),
            run.precision or "",
            run.device or "",
            run.record or "",
        )
        for run in report.runs
    ]
    columns = ["run", ">ranks", ">seconds", "finished", ">saves skipped", "precision", "device", "record"]
    return table("Runs of the script", columns, rows)
