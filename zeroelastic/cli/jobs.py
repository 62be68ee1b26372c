"""``zeroelastic prove`` and ``timeline``: a training script at two world sizes, and the event log of a job."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.command import FAILED, ForceOption, HtmlOption, JsonOption, PlotForceOption, QuietOption, TagOption
from zeroelastic.cli.terminal import (
    log_line,
    print_columns,
    print_document,
    print_styled,
    print_written,
    progress_of,
    spread,
)
from zeroelastic.errors import UsageError, counted
from zeroelastic.json_document import document

if TYPE_CHECKING:
    from zeroelastic.job_log.timeline import Incarnation, RestartCost, Timeline
    from zeroelastic.proving.records import RunSpec

_MOST_POINTS = 4000  # of all starts together; the log has them all
_PHASES = ("noticing", "rendezvous", "imports", "engine", "load", "first_step")


def prove(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint that the script resumes from.")],
    script: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT [ARGS]...", help="The training script, or -m MODULE; unchanged.")
    ],
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", help="The size to resume at.")],
    from_world_size: Annotated[
        int | None, typer.Option(metavar="N", help="The size to compare with; default: the one that saved SRC.")
    ] = None,
    tag: TagOption = None,
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="Optimizer steps to compare.")] = 5,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The report's directory; must not exist.")] = Path("proof"),
    tolerance: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Relative tolerance of losses; default: by precision.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat/--no-repeat", help="Run the size to compare with twice, to see its noise.")
    ] = True,
    time_limit: Annotated[str, typer.Option(metavar="TIME", help="For each run: 90s, 15m, 2h.")] = "1h",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoint saved at the other size.")] = False,
    signed_off_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Your name, written into the report.")
    ] = None,
    html: HtmlOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prove with your own training script that a checkpoint resumes at another world size.

    Runs the script under torchrun on this machine, twice at the size that saved SRC and once at M: compares the state
    after the load bit for bit and the losses of K steps, saves at M and loads that save at the first size. Writes
    DIR/report.json and report.md. SRC is not changed, and saves of the script are skipped.
    Exit code 0: proved; 1: not proved, or the script fails; 2: wrong usage; 3: SRC is damaged.

    \b
    Examples:
        zeroelastic prove run --world-size 1 --steps 2 --no-repeat -- train.py
    """
    from zeroelastic.checkpoint.one_save import one_save
    from zeroelastic.cli.pages.render import check_report
    from zeroelastic.cli.pages.render import write_report as write_html
    from zeroelastic.extras import require_torch
    from zeroelastic.io.storage import file_sizes
    from zeroelastic.proving.driver import (
        ProofRequest,
        environment,
        failure_of,
        launch,
        prepare,
        prove,
        sizes,
        verify_source,
    )
    from zeroelastic.proving.report import document, write_report
    from zeroelastic.runs.locate import find_source
    from zeroelastic.verbs.options import seconds_option

    require_torch("prove")
    check_report(html, force=force)
    limit = seconds_option(time_limit, "--time-limit")
    if not limit:
        raise UsageError("--time-limit: must be more than 0. Give a time such as 15m.")
    _check_script(script)
    found = find_source(src, tag=tag)
    say = _Steps(6 if repeat else 5, quiet=quiet)
    nbytes = sum(file_sizes(found.tag_dir).values())
    say.begin(f"verifying every byte of {found.tag_dir} ({format_size(nbytes)})")
    with one_save(found.tag_dir), progress_of(quiet=quiet)("verifying", nbytes) as advance:
        verified = verify_source(found, progress=advance)
    request = ProofRequest(found, world_size, from_world_size, steps, out, repeat, tolerance, keep)
    first, second = sizes(request, verified)
    env, device = environment(max(first, second), verified.bytes_read)
    request = ProofRequest(found, world_size, from_world_size, steps, prepare(out), repeat, tolerance, keep)

    def run(spec: RunSpec) -> str | None:
        status = launch(spec, script, time_limit_s=limit, env=env, waiting=say.still)
        if status is None:
            return f"it took longer than {time_limit}; its output is in {spec.log_path}"
        return failure_of(spec) if status else None

    outcome = prove(request, verified, run, log=say.begin)
    command = ["zeroelastic", *sys.argv[1:]]
    report = document(outcome, script=script, command=command, device=device, signed_off_by=signed_off_by)
    write_report(request.out, report)
    write_html(html, "prove", lambda: report, force=force)
    if as_json:
        print_document(report)
    else:
        _show_proof(report, request.out)
        print_written(html)
    if not outcome.verdict.proved:
        raise typer.Exit(FAILED)


class _Steps:
    """A line on stderr for each step as it begins, and one every 10 s while it lasts; none if ``quiet``."""

    def __init__(self, count: int, *, quiet: bool) -> None:
        self._count, self._quiet, self._done = count, quiet, 0

    def begin(self, what: str) -> None:
        self._done += 1
        if not self._quiet:
            log_line(f"step {self._done} of {self._count}: {what}")

    def still(self, seconds: float) -> None:
        if not self._quiet:
            log_line(f"  {seconds:.0f} s")


def _check_script(script: list[str]) -> None:
    if script[0] == "-m":
        if len(script) < 2:
            raise UsageError("-m needs the name of a module. Give it after -m.")
    elif not os.path.isfile(script[0]):
        raise UsageError(f"{script[0]}: no such script. Give the script and its arguments after --.")


def _show_proof(report: dict[str, Any], out: Path) -> None:
    print_styled((report["source"]["path"], "bold"))
    for check in report["checks"]:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[check["ok"]]
        print_styled("  ", (mark, style), "  ", check["sentence"])
    style = "green" if not report["reasons"] else "bold red"
    print_styled((report["verdict"], style), f"; {out / 'report.md'}, sha256 {report['digest'][:12]}")


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
        from zeroelastic.monitoring.prometheus import job_samples, prometheus_text

        typer.echo(prometheus_text(job_samples(made)), nl=False)
    elif as_json:
        print_document(found)
    else:
        _show_timeline(made, log.num_torn)
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


def _show_timeline(made: Timeline, num_torn: int) -> None:
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
