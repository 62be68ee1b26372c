"""The pages on training jobs, of ``prove`` and ``timeline``: the sentence at the top, figures, rows of tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import zip_longest

from zeroelastic.cli.pages.figures import (
    DAMAGE,
    Cell,
    Chart,
    Line,
    Piece,
    Strip,
    Table,
    Tone,
    lines,
    number_ticks,
    strips,
    table,
)
from zeroelastic.errors import counted
from zeroelastic.job_log.timeline import Restart
from zeroelastic.monitoring.job_report import Start, Timeline
from zeroelastic.proving.report import Prove
from zeroelastic.verbs.report import Number

_FIRST, _AGAIN, _OTHER = "reference size", "reference size again", "other size"
_STYLES = {_FIRST: "hue-1", _AGAIN: "hue-3", _OTHER: "hue-2"}
_PHASES = (
    ("noticing", "noticing", "hue-5"),
    ("rendezvous", "rendezvous", "hue-4"),
    ("imports", "imports", "hue-3"),
    ("engine", "engine", "hue-6"),
    ("load", "load (zeroelastic)", "hue-1"),
    ("first_step", "first step", "hue-2"),
)
_MOST_STARTS = 40
_MOST_TICKS = 300


def prove_view(report: Prove) -> dict[str, object]:
    """Whether the resume is proved, each check, the losses of the two sizes and their difference."""
    sizes: dict[str, int] = {run.role: run.world_size for run in report.runs}
    rows = [
        (run.role, run.world_size, f"{run.seconds:.1f}", run.finished, run.saves_skipped, run.precision, run.device,
         run.record)
        for run in report.runs
    ]  # fmt: skip
    numbers = {"ranks": "right", "seconds": "right", "finished": "", "saves skipped": "right"}
    return {
        "title": report.source.path,
        "tone": "good" if report.ok else "bad",
        "sentence": _prove_answer(report, sizes),
        "sizes": [sizes[role] for role in (_FIRST, _OTHER) if role in sizes],
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "roots": _roots(report),
        "runs": table({"run": "", **numbers, "precision": "", "device": "", "record": ""}, rows),
        **_prove_losses(report, sizes),
    }


def _prove_answer(report: Prove, sizes: dict[str, int]) -> str:
    other = f" on {counted(sizes[_OTHER], 'rank')}" if _OTHER in sizes else " at the other size"
    saved = f"a checkpoint of {counted(report.source.world_size, 'rank')}"
    if not report.ok:
        reason = report.reasons[0] if report.reasons else "no reason is known"
        more = len(report.reasons) - 1
        end = f" ({more:,} more reasons below)." if more > 0 else "."
        return f"Not proved: {saved}, resumed{other}: {reason}{end}"
    finite = [gap for _, gap in _gaps(report, _OTHER) if math.isfinite(gap)]
    steps = counted(len(finite), "step")
    most = f", and the losses of {steps} differ by at most {max(finite):.2g} of their size" if finite else ""
    return f"Proved: {saved} resumes{other} with the same state bit for bit{most}."


def _number(value: Number | None) -> float:
    return math.nan if value is None else float(value)


def _gaps(report: Prove, role: str) -> list[tuple[int, float]]:
    """By step from 1: the difference of a run's loss to that of the reference size, relative to the latter."""
    first, other = (map(_number, report.losses.get(one, ())) for one in (_FIRST, role))
    pairs = enumerate(zip(first, other, strict=False), start=1)
    return [(step, abs(a - b) / abs(a) if a else abs(a - b)) for step, (a, b) in pairs]


def _prove_losses(report: Prove, sizes: dict[str, int]) -> dict[str, Chart | Table | None]:
    losses = report.losses
    if not any(losses.values()):
        return {"losses": None, "differences": None, "by_step": None}
    titles = {role: f"{role}, {counted(sizes[role], 'rank')}" if role in sizes else role for role in losses}
    shown = [
        Line(titles[role], _STYLES.get(role, "hue-6"), tuple((i, _number(y)) for i, y in enumerate(values, start=1)))
        for role, values in losses.items()
        if values
    ]
    apart = [
        Line(titles[role], _STYLES[role], tuple(gaps)) for role in (_OTHER, _AGAIN) if (gaps := _gaps(report, role))
    ]
    x_name = "step after the load"
    limit = ("tolerance", report.tolerance)
    difference = dict(_gaps(report, _OTHER))
    rows = [
        (
            str(step),
            *(None if value is None else str(value) for value in values),
            f"{difference[step]:.2e}" if step in difference else None,
        )
        for step, values in enumerate(zip_longest(*losses.values()), start=1)
    ]
    return {
        "losses": lines(shown, x_name=x_name, y_name="loss"),
        "differences": lines(apart, x_name=x_name, y_name="difference", from_zero=True, limit=limit) if apart else None,
        "by_step": table(dict.fromkeys(("step", *titles.values(), "difference"), "right"), rows),
    }


def _roots(report: Prove) -> Table | None:
    known = {name: root for name, root in report.content_roots if root is not None}
    same = len(set(known.values())) == 1
    rows = []
    for name, root in report.content_roots:
        tone: Tone | None = None if root is None else "good" if same or root == report.content_roots.files else "bad"
        rows.append((name.replace("_", " "), Cell(root or "none", tone)))
    return table({"of": "", "content root": "name"}, rows)


def timeline_view(job: Timeline) -> dict[str, object]:
    """What the job lost, its starts over time, its restarts by phase, its losses."""
    last = max(start.ended for start in job.starts)
    restarts = [start.restart for start in job.starts if start.restart is not None]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began))
    sizes = {start.world_size for start in job.starts}
    end = job.starts[-1].end
    nodes = [
        (f"{one.time - job.began:,.1f} s", Cell(f"{one.change:+,}", "bad" if one.change < 0 else None), one.cause)
        for one in job.nodes
    ]
    return {
        "title": f"Job of {counted(len(job.starts), 'start')}, began {began}",
        "tone": "bad" if end == "error" else "good" if end == "done" and not job.lost_steps else "note",
        "sentence": _timeline_answer(job, last - job.began, restarts),
        "began": began,
        "seconds": last - job.began,
        "sizes": f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}",
        "last_step": next((start.last_step for start in reversed(job.starts) if start.last_step is not None), None),
        "spent": sum(one.total for one in restarts),
        "over_time": _over_time(job, last),
        "phases": _phases(job),
        "restarts": _restarts(job),
        "losses": _timeline_losses(job),
        "starts": _starts(job),
        "nodes": table({"after": "right", "nodes": "right", "cause": ""}, nodes),
    }


def _timeline_answer(job: Timeline, seconds: float, restarts: Sequence[Restart]) -> str:
    ended = {"done": "It ended with its work done", "stopped": "It was stopped", "error": "It ended with an error"}
    lost = counted(job.lost_steps, "step")
    spent = sum(one.total for one in restarts)
    ours = sum(one.load for one in restarts)
    share = f"{spent / seconds:.0%}" if seconds else ""
    cost = ""
    if restarts:
        each = counted(len(restarts), "restart")
        cost = f" {each} took {spent:.1f} s ({share} of the time), of which {ours:.1f} s were spent on loading."
    end = ended.get(job.starts[-1].end or "", "How it ended is not in the log")
    return f"The job ran {seconds:,.1f} s in {counted(len(job.starts), 'start')} and trained {lost} again.{cost} {end}."


def _over_time(job: Timeline, last: float) -> Chart:
    span = last - job.began
    first = max(len(job.starts) - _MOST_STARTS, 0)
    rows = [_nodes_strip(job, span)] if job.nodes else []
    rows += [_start_strip(job, number, last) for number in range(first, len(job.starts))]
    notes = ["Each strip is a start with its number of ranks; thin lines are saves."]
    notes += [f"The last {_MOST_STARTS} of {len(job.starts):,} starts."] if first else []
    legend = [("hue-5", "starting or restarting"), ("part-a", "training"), ("padding", "trained again later")]
    legend += [("hue-3", "save")]
    legend += [(DAMAGE, "nodes lost"), ("hue-4", "nodes new")] if job.nodes else []
    return strips(rows, end=span, ticks=number_ticks(span, unit=" s"), grid=True, legend=legend, notes=notes)


def _reached(job: Timeline, number: int) -> int | None:
    """The last step of a start that counts: a later start resumed there and trained the steps after it again."""
    return min((one.resumed_at for one in job.starts[number + 1 :] if one.resumed_at is not None), default=None)


def _start_strip(job: Timeline, number: int, last: float) -> Strip:
    start = job.starts[number]
    began, ended = start.time - job.began, start.ended - job.began
    name = f"start {number + 1}, {counted(start.world_size, 'rank')}"
    first = start.points[0].time - job.began if start.points else ended
    if start.restart is not None:
        begin = max(first - start.restart.total, 0.0)
        pieces = [Piece(begin, first, "hue-5", f"{name}: restarting took {start.restart.total:.1f} s")]
    else:
        pieces = [Piece(began, first, "hue-5", f"{name}: {first - began:.1f} s from its start to its first step")]
    reached = _reached(job, number)
    kept = [point for point in start.points if reached is None or point.step <= reached]
    until = ended if len(kept) == len(start.points) else (kept[-1].time - job.began if kept else first)
    steps = f"steps {start.points[0].step:,} to {start.points[-1].step:,}" if start.points else "no step"
    if until > first:
        tip = f"{name}: trained {steps}, {_end(start, is_last=number + 1 == len(job.starts))}"
        pieces.append(Piece(first, until, "part-a", tip))
    if ended > until:
        pieces.append(Piece(until, ended, "padding", f"{name}: steps after {reached:,} were trained again later"))
    width = (last - job.began) / 400
    saves = [saved - job.began for saved in start.save_times[:: max(1, len(start.save_times) // _MOST_TICKS)]]
    pieces += [Piece(at - width / 2, at + width / 2, "hue-3", f"{name}: saved after {at:,.1f} s") for at in saves]
    return Strip(f"{number + 1}: {counted(start.world_size, 'rank')}", pieces)


def _nodes_strip(job: Timeline, span: float) -> Strip:
    width = span / 150
    pieces = []
    for change in job.nodes[:_MOST_TICKS]:
        at = min(max(change.time - job.began, 0.0), span)
        what = f"{counted(abs(change.change), 'node')} {'lost' if change.change < 0 else 'new'}"
        cause = f" ({change.cause})" if change.cause else ""
        style = DAMAGE if change.change < 0 else "hue-4"
        pieces.append(Piece(at - width / 2, at + width / 2, style, f"after {at:,.1f} s: {what}{cause}"))
    return Strip("nodes", pieces)


def _restarted(job: Timeline) -> list[tuple[int, Start, Restart]]:
    return [(number, start, start.restart) for number, start in enumerate(job.starts, start=1) if start.restart]


def _phases(job: Timeline) -> Chart | None:
    found = _restarted(job)
    drawn = found[-_MOST_STARTS:]
    if not drawn:
        return None
    rows = []
    for number, start, restart in drawn:
        place, pieces = 0.0, []
        for field, name, style in _PHASES:
            seconds = getattr(restart, field) or 0.0
            if seconds:
                tip = f"start {number}, {name}: {seconds:.2f} s of {restart.total:.2f} s"
                pieces.append(Piece(place, place + seconds, style, tip))
            place += seconds
        rows.append(Strip(f"{number}: {counted(start.world_size, 'rank')}", pieces))
    most = max(restart.total for *_, restart in drawn)
    legend = [(style, name) for _, name, style in _PHASES]
    notes = [f"The last {len(drawn)} of {len(found):,} restarts."] if len(drawn) < len(found) else []
    return strips(rows, end=most, ticks=number_ticks(most, unit=" s"), grid=True, legend=legend, notes=notes)


def _restarts(job: Timeline) -> Table | None:
    rows = [
        (
            str(number),
            start.world_size,
            *(None if (spent := getattr(restart, field)) is None else f"{spent:.2f}" for field, *_ in _PHASES),
            f"{restart.total:.2f}",
            f"{restart.our_share:.1%}",
        )
        for number, start, restart in _restarted(job)
    ]
    phases = {field.replace("_", " "): "right" for field, *_ in _PHASES}
    before = {"start": "right", "ranks": "right"}
    return table({**before, **phases, "total": "right", "share of load": "right"}, rows)


def _timeline_losses(job: Timeline) -> Chart | None:
    kept: list[tuple[float, float]] = []
    again: list[tuple[float, float]] = []
    for number, start in enumerate(job.starts):
        reached = _reached(job, number)
        for point in start.points:
            if point.loss is not None:
                side = kept if reached is None or point.step <= reached else again
                side.append((point.step, float(point.loss)))
    if not kept and not again:
        return None
    shown = [Line("kept", "hue-1", tuple(sorted(kept)))]
    shown += [Line("trained again later", "hue-6", tuple(sorted(again)))] if again else []
    return lines(shown, x_name="step", y_name="loss")


def _end(start: Start, *, is_last: bool) -> str:
    if start.end is None:
        return "no word of its end" if is_last else "killed"
    return f"{start.end}: {start.error}" if start.error else start.end


def _starts(job: Timeline) -> Table | None:
    rows = [
        (
            str(number),
            f"{start.time - job.began:,.1f} s",
            start.world_size,
            start.nodes,
            start.host,
            "new" if start.tag is None else f"step {start.resumed_at}",
            start.tier,
            start.last_step,
            start.lost_steps,
            start.saves,
            Cell(_end(start, is_last=number == len(job.starts)), "bad" if start.end == "error" else None),
        )
        for number, start in enumerate(job.starts, start=1)
    ]
    columns = dict.fromkeys(("start", "after", "ranks", "nodes"), "right")
    columns |= dict.fromkeys(("host", "from", "tier"), "")
    columns |= dict.fromkeys(("to step", "lost before it", "saves"), "right")
    return table({**columns, "ended": ""}, rows)
