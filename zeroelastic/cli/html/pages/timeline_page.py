"""The report of ``zeroelastic timeline``."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zeroelastic.cli.documents.jobs import Restart, Start, Timeline
from zeroelastic.cli.html.figures.lines import Line, draw_lines
from zeroelastic.cli.html.figures.plot import key
from zeroelastic.cli.html.figures.scale import number_ticks
from zeroelastic.cli.html.figures.strips import DAMAGE, Piece, Strip, draw_strips
from zeroelastic.cli.html.page import Cell, Figure, Page, Section, Table, facts, items, sections, table
from zeroelastic.errors import counted

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


def timeline_page(job: Timeline) -> Page:
    """The page: what the job lost, its starts over time, its restarts by phase, its losses."""
    last = max(start.ended for start in job.starts)
    restarts = [start.restart for start in job.starts if start.restart is not None]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began))
    torn = (
        [f"{counted(job.torn_lines, 'half line')} of the log left out, as a kill leaves them."]
        if job.torn_lines
        else []
    )
    sizes = {start.world_size for start in job.starts}
    in_place = sum(bool(start.in_place) for start in job.starts)
    end = job.starts[-1].end
    return Page(
        "timeline",
        f"Job of {counted(len(job.starts), 'start')}, began {began}",
        "bad" if end == "error" else "good" if end == "done" and not job.lost_steps else "note",
        _answer(job, last - job.began, restarts),
        facts(
            ("began", began),
            ("seconds", f"{last - job.began:,.1f}"),
            ("starts", f"{len(job.starts):,}"),
            ("of them in place", f"{in_place:,}" if in_place else None),
            ("ranks", f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"),
            ("last step", next((f"{s.last_step:,}" for s in reversed(job.starts) if s.last_step is not None), None)),
            ("lost steps", f"{job.lost_steps:,}"),
            ("saves", f"{sum(start.saves for start in job.starts):,}"),
            ("held up by saves", f"{sum(start.save_seconds for start in job.starts):.1f} s"),
            ("spent on restarts", f"{sum(one.total for one in restarts):.1f} s" if restarts else None),
        ),
        sections(
            Section("Notes", items("note", torn)),
            Section("The job over time", (_over_time(job, last),)),
            Section("Restarts", _restarts(job)),
            Section("Losses", _losses(job)),
            Section("Starts", (_starts(job),)),
            Section("Nodes", _nodes(job)),
        ),
    )


def _answer(job: Timeline, seconds: float, restarts: Sequence[Restart]) -> str:
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


def _over_time(job: Timeline, last: float) -> Figure:
    span = last - job.began
    first = max(len(job.starts) - _MOST_STARTS, 0)
    strips = [_nodes_strip(job, span)] if job.nodes else []
    strips += [_start_strip(job, number, last) for number in range(first, len(job.starts))]
    notes = ["Each strip is a start with its number of ranks; thin lines are saves."]
    if first:
        notes.append(f"The last {_MOST_STARTS} of {len(job.starts):,} starts.")
    legend = [("hue-5", "starting or restarting"), ("part-a", "training"), ("padding", "trained again later")]
    legend += [("hue-3", "save")]
    legend += [(DAMAGE, "nodes lost"), ("hue-4", "nodes new")] if job.nodes else []
    return draw_strips(
        "Starts of the job over time",
        strips,
        end=span,
        ticks=number_ticks(span, unit=" s"),
        lines=True,
        legend=key(*legend),
        notes=tuple(notes),
    )


def _start_strip(job: Timeline, number: int, last: float) -> Strip:
    start = job.starts[number]
    began, ended = start.time - job.began, start.ended - job.began
    how = ", in place" if start.in_place else ""
    name = f"start {number + 1}, {counted(start.world_size, 'rank')}{how}"
    first = start.points[0].time - job.began if start.points else ended
    pieces = []
    if start.restart is not None:
        begin = first - start.restart.total
        pieces.append(Piece(max(begin, 0.0), first, "hue-5", f"{name}: restarting took {start.restart.total:.1f} s"))
    else:
        pieces.append(Piece(began, first, "hue-5", f"{name}: {first - began:.1f} s from its start to its first step"))
    again = min((one.resumed_at for one in job.starts[number + 1 :] if one.resumed_at is not None), default=None)
    kept = [point for point in start.points if again is None or point.step <= again]
    until = ended if len(kept) == len(start.points) else (kept[-1].time - job.began if kept else first)
    steps = f"steps {start.points[0].step:,} to {start.points[-1].step:,}" if start.points else "no step"
    if until > first:
        pieces.append(
            Piece(first, until, "part-a", f"{name}: trained {steps}, {_end(start, number + 1 == len(job.starts))}")
        )
    if ended > until:
        pieces.append(Piece(until, ended, "padding", f"{name}: steps after {again:,} were trained again later"))
    width = (last - job.began) / 400
    saves = [saved - job.began for saved in start.save_times[:: max(1, len(start.save_times) // _MOST_TICKS)]]
    pieces += [Piece(at - width / 2, at + width / 2, "hue-3", f"{name}: saved after {at:,.1f} s") for at in saves]
    return Strip(f"{number + 1}: {counted(start.world_size, 'rank')}", tuple(pieces))


def _nodes_strip(job: Timeline, span: float) -> Strip:
    width = span / 150
    pieces = []
    for change in job.nodes[:_MOST_TICKS]:
        at = min(max(change.time - job.began, 0.0), span)
        what = f"{counted(abs(change.change), 'node')} {'lost' if change.change < 0 else 'new'}"
        cause = f" ({change.cause})" if change.cause else ""
        style = DAMAGE if change.change < 0 else "hue-4"
        pieces.append(Piece(at - width / 2, at + width / 2, style, f"after {at:,.1f} s: {what}{cause}"))
    return Strip("nodes", tuple(pieces))


def _restarts(job: Timeline) -> tuple[Figure | Table, ...]:
    found = [(number, start, start.restart) for number, start in enumerate(job.starts, start=1) if start.restart]
    if not found:
        return ()
    drawn = found[-_MOST_STARTS:]
    most = max(restart.total for *_, restart in drawn)
    strips = []
    for number, start, restart in drawn:
        place, pieces = 0.0, []
        for field, name, style in _PHASES:
            seconds = getattr(restart, field) or 0.0
            if seconds:
                tip = f"start {number}, {name}: {seconds:.2f} s of {restart.total:.2f} s"
                pieces.append(Piece(place, place + seconds, style, tip))
            place += seconds
        name = f"{number}: {counted(start.world_size, 'rank')}"
        strips.append(Strip(f"{name}, in place" if start.in_place else name, tuple(pieces)))
    notes = (f"The last {len(drawn)} of {len(found):,} restarts.",) if len(drawn) < len(found) else ()
    figure = draw_strips(
        "Restarts by phase, from the kill or the last line before it to the first step",
        strips,
        end=most,
        ticks=number_ticks(most, unit=" s"),
        lines=True,
        legend=key(*((style, name) for _, name, style in _PHASES)),
        notes=notes,
    )
    rows = [
        (
            Cell(str(number)),
            Cell(f"{start.world_size:,}"),
            Cell(_how(start)),
            *(Cell(_seconds(getattr(restart, field))) for field, *_ in _PHASES),
            Cell(f"{restart.total:.2f}"),
            Cell(f"{restart.our_share:.1%}"),
        )
        for number, start, restart in found
    ]
    columns = [
        ">start",
        ">ranks",
        "processes",
        *(f">{field.replace('_', ' ')}" for field, *_ in _PHASES),
        ">total",
        ">share of load",
    ]
    return figure, table("Seconds of each restart by phase", columns, rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _losses(job: Timeline) -> tuple[Figure, ...]:
    kept: list[tuple[float, float]] = []
    again: list[tuple[float, float]] = []
    for number, start in enumerate(job.starts):
        resumed = [one.resumed_at for one in job.starts[number + 1 :] if one.resumed_at is not None]
        reached = min(resumed, default=None)
        for point in start.points:
            if point.loss is not None:
                side = kept if reached is None or point.step <= reached else again
                side.append((point.step, float(point.loss)))
    if not kept and not again:
        return ()
    lines = [Line("kept", "hue-1", tuple(sorted(kept)))]
    lines += [Line("trained again later", "hue-6", tuple(sorted(again)))] if again else []
    return (draw_lines("Loss by step", lines, x_name="step", y_name="loss"),)


def _end(start: Start, is_last: bool) -> str:
    if start.end is None:
        return "no word of its end" if is_last else "killed"
    return f"{start.end}: {start.error}" if start.error else start.end


def _how(start: Start) -> str:
    """What processes its ranks run in."""
    return "as before" if start.in_place else "warm" if start.warm else "new"


def _starts(job: Timeline) -> Table:
    rows = [
        (
            Cell(str(number)),
            Cell(f"{start.time - job.began:,.1f} s"),
            Cell(f"{start.world_size:,}"),
            Cell(f"{start.nodes:,}"),
            Cell(start.host),
            Cell(_how(start)),
            Cell("new" if start.tag is None and start.tier is None else f"step {start.resumed_at}"),
            Cell(start.tier or ""),
            Cell("" if start.last_step is None else f"{start.last_step:,}"),
            Cell(f"{start.lost_steps:,}"),
            Cell(f"{start.saves:,}"),
            Cell(_end(start, number == len(job.starts)), "bad" if start.end == "error" else None),
        )
        for number, start in enumerate(job.starts, start=1)
    ]
    columns = [
        ">start",
        ">after",
        ">ranks",
        ">nodes",
        "host",
        "processes",
        "from",
        "tier",
        ">to step",
        ">lost before it",
        ">saves",
        "ended",
    ]
    return table("Starts of the job", columns, rows)


def _nodes(job: Timeline) -> tuple[Table, ...]:
    rows = [
        (
            Cell(f"{one.time - job.began:,.1f} s"),
            Cell(f"{one.change:+,}", "bad" if one.change < 0 else None),
            Cell(one.cause),
        )
        for one in job.nodes
    ]
    return (table("Nodes that were lost or came", [">after", ">nodes", "cause"], rows),) if rows else ()
