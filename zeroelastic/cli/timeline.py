"""``zeroelastic timeline``: the starts, steps and restart costs of an elastic job, from its event log."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import HtmlOption, JsonOption, PlotForceOption
from zeroelastic.cli.output.show import print_columns, print_document, print_styled, print_written
from zeroelastic.cli.output.thinning import spread
from zeroelastic.errors import UsageError, counted
from zeroelastic.json_document import document

if TYPE_CHECKING:
    from zeroelastic.job_log.timeline import Incarnation, RestartCost, Timeline

_MOST_POINTS = 4000  # of all starts together; the log has them all
_PHASES = ("noticing", "rendezvous", "imports", "engine", "load", "first_step")


def timeline(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVENTS...", help="The event log of a job; several, where nodes kept logs of their own."
        ),
    ],
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, as .png, .svg or .pdf.")] = None,
    html: HtmlOption = None,
    force: PlotForceOption = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print the metrics of the job as text for Prometheus.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every start of an elastic job: its ranks and steps, the steps that were lost, and what each restart cost.

    zeroelastic.elastic.events writes the log. Half lines, which a kill may leave, are skipped and counted.

    \b
    Examples:
        zeroelastic timeline events.jsonl
        zeroelastic timeline events.jsonl --plot timeline.png
        zeroelastic timeline events.jsonl --prometheus
        zeroelastic timeline events.jsonl --json
    """
    from zeroelastic.cli.pages.render import check_report, write_report
    from zeroelastic.cli.plots import check_plot
    from zeroelastic.job_log.event_log import read_events
    from zeroelastic.job_log.timeline import make_timeline

    if prometheus and (as_json or plot is not None):
        other = "--json" if as_json else "--plot"
        raise UsageError(f"--prometheus and {other} are both given, and print different things. Give one of them.")
    if plot is not None:
        check_plot(plot, "a timeline", force=force)
    check_report(html, force=force)
    log = read_events(logs)
    made = make_timeline(log)
    if plot is not None:
        from zeroelastic.cli.plots import draw_timeline

        draw_timeline(plot, made, force=force)
    found = document(_document(made, log.num_torn, plot), ok=True)
    write_report(html, "timeline", lambda: found, force=force)
    if prometheus:
        from zeroelastic.monitoring.job_metrics import job_samples
        from zeroelastic.monitoring.prometheus import prometheus_text

        typer.echo(prometheus_text(job_samples(made)), nl=False)
    elif as_json:
        print_document(found)
    else:
        _show(made, log.num_torn)
        print_written(html)


def _document(made: Timeline, num_torn: int, plot: Path | None) -> dict[str, object]:
    most = max(_MOST_POINTS // len(made.incarnations), 2)
    return {
        "began": made.began,
        "lost_steps": made.lost_steps,
        "torn_lines": num_torn,
        "plot": None if plot is None else os.path.abspath(plot),
        "starts": [
            {
                "time": one.start.time,
                "ended": one.last_time,
                "world_size": one.start.world_size,
                "nodes": one.start.num_nodes,
                "host": one.start.host,
                "restart_count": one.start.restart,
                "in_place": one.start.in_place,
                "tag": None if one.resume is None else one.resume.tag,
                "tier": None if one.resume is None else one.resume.tier,
                "moved_bytes": None if one.resume is None else one.resume.moved_bytes,
                "resumed_at": None if one.resume is None else one.resume.step,
                "proved": None if one.resume is None else one.resume.proved,
                "last_step": one.steps[-1].step if one.steps else None,
                "lost_steps": one.lost_steps,
                "saves": len(one.saves),
                "save_seconds": sum(save.stalled for save in one.saves),
                "save_times": [one.saves[i].time for i in spread(len(one.saves), most)],
                "memory_stall_seconds": one.memory[-1].stall_seconds if one.memory else None,
                "memory_bytes": one.memory[-1].node_bytes if one.memory else None,
                "points": [
                    {"time": event.time, "step": event.step, "loss": event.loss}
                    for event in (one.steps[i] for i in spread(len(one.steps), most))
                ],
                "end": one.end,
                "error": next((end.error for end in one.ends if end.error), None),
                "restart": None if one.restart is None else _cost(one.restart),
            }
            for one in made.incarnations
        ],
        "nodes": [{"time": one.time, "change": one.change, "cause": one.cause} for one in made.nodes],
    }


def _cost(cost: RestartCost) -> dict[str, object]:
    return {**asdict(cost), "total": cost.total, "our_share": cost.our_share}


def _show(made: Timeline, num_torn: int) -> None:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.began))
    last = max(one.last_time for one in made.incarnations) - made.began
    starts = len(made.incarnations)
    in_place = sum(one.how == "in place" for one in made.incarnations)
    kept = f", {in_place} of them in place" if in_place else ""
    lost = counted(made.lost_steps, "step")
    print_styled(f"began {began}, {last:.0f} s, {counted(starts, 'start')}{kept}, {lost} lost")
    head: tuple[str, ...] = ("after", "ranks", "from", "tier", "to step", "lost", "saves", "ended")
    rows = [_row(one, made.began, one is made.incarnations[-1]) for one in made.incarnations]
    print_columns([head, *rows], right=frozenset({0, 1, 2, 4, 5, 6}))
    restarts = [one for one in made.incarnations if one.restart is not None]
    if restarts:
        print_styled("")
        print_styled(("Restarts", "bold"), ", in seconds; load is zeroelastic's part")
        head = ("after", "ranks", "how", *(phase.replace("_", " ") for phase in _PHASES), "total", "ours")
        right = frozenset(range(len(head))) - {2}
        print_columns([head, *(_cost_row(one, made.began) for one in restarts)], right=right)
    moved = [one.resume.moved_bytes for one in made.incarnations if one.resume is not None and one.resume.moved_bytes]
    if moved:
        print_styled("")
        print_styled(f"in place: {format_size(sum(moved))} went from process to process")
    memory = [event for one in made.incarnations for event in one.memory]
    if memory:
        stall, nbytes = max(event.stall_seconds for event in memory), max(event.node_bytes for event in memory)
        print_styled("")
        print_styled(f"checkpoints in memory: up to {stall:.3f} s of waiting, {format_size(nbytes)} of a node's memory")
    if num_torn:
        print_styled(f"{counted(num_torn, 'half line')} left out")


def _row(one: Incarnation, began: float, last_one: bool) -> tuple[str, ...]:
    resumed = "-" if one.resume is None else "new" if one.resume.fresh else f"step {one.resume.step}"
    where = "-" if one.resume is None or one.resume.tier is None else one.resume.tier
    last = str(one.steps[-1].step) if one.steps else "-"
    error = next((end.error for end in one.ends if end.error), None)
    end = one.end or ("-" if last_one else "killed")
    return (
        f"{one.start.time - began:.1f} s",
        str(one.start.world_size),
        resumed,
        where,
        last,
        str(one.lost_steps),
        str(len(one.saves)),
        f"{end}: {error[:60]}" if error else end,
    )


def _cost_row(one: Incarnation, began: float) -> tuple[str, ...]:
    cost = one.restart
    assert cost is not None
    figures = [getattr(cost, phase) for phase in _PHASES]
    return (
        f"{one.start.time - began:.1f} s",
        str(one.start.world_size),
        one.how or "-",
        *("-" if seconds is None else f"{seconds:.2f}" for seconds in figures),
        f"{cost.total:.2f}",
        f"{cost.our_share:.1%}",
    )
