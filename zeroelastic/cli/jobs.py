"""``zeroelastic prove`` and ``timeline``: a training script at two world sizes, and the event log of a job."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import FAILED, ForceOption, HtmlOption, JsonOption, QuietOption, TagOption
from zeroelastic.cli.terminal import (
    check_plot,
    log_line,
    print_columns,
    print_report,
    print_styled,
    print_written,
    progress_of,
    write_figure,
)
from zeroelastic.errors import UsageError, counted

if TYPE_CHECKING:
    from zeroelastic.job_log.timeline import Incarnation, Restart, Timeline
    from zeroelastic.proving.records import RunSpec
    from zeroelastic.proving.report import Prove

_LOST, _KILL, _JOIN = "0.75", "tab:red", "tab:green"
_MARKERS = {"memory": ("^", "tab:purple")}


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
    from zeroelastic.cli.pages import check_report
    from zeroelastic.cli.pages import write_report as write_html
    from zeroelastic.extras import require_torch
    from zeroelastic.io.storage import file_sizes
    from zeroelastic.proving import driver
    from zeroelastic.proving.report import write_report
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
        verified = driver.verify_source(found, progress=advance)
    first = verified.world_size if from_world_size is None else from_world_size
    driver.check_sizes(world_size, first)
    env, device = driver.environment(max(first, world_size), verified.bytes_read)
    request = driver.ProofRequest(
        found,
        world_size,
        first,
        steps,
        driver.prepare(out),
        repeat=repeat,
        tolerance=tolerance,
        keep=keep,
        device=device,
        script=script,
        command=["zeroelastic", *sys.argv[1:]],
        signed_off_by=signed_off_by,
    )

    def run(spec: RunSpec) -> str | None:
        status = driver.launch(spec, script, time_limit_s=limit, env=env, waiting=say.still)
        if status is None:
            return f"it took longer than {time_limit}; its output is in {spec.log_path}"
        return driver.failure_of(spec) if status else None

    report = driver.prove(request, verified, run, log=say.begin)
    write_report(request.out, report)
    write_html(html, "prove", report.to_json, force=force)
    if as_json:
        print_report(report)
    else:
        _show_proof(report, request.out)
        print_written(html)
    if not report.ok:
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


def _show_proof(report: Prove, out: Path) -> None:
    print_styled((report.source.path, "bold"))
    for check in report.checks:
        mark, style = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}[check.ok]
        print_styled("  ", (mark, style), "  ", check.sentence)
    style = "green" if not report.reasons else "bold red"
    print_styled((report.verdict, style), f"; {out / 'report.md'}, sha256 {report.digest[:12]}")


def timeline(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVENTS...", help="The event log of a job; several, where nodes kept logs of their own."
        ),
    ],
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, as .png, .svg or .pdf.")] = None,
    html: HtmlOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of --plot and --html.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every start of an elastic job: its ranks and steps, the steps that were lost, and what each restart cost.

    zeroelastic.elastic.events writes the log. Half lines, which a kill may leave, are skipped and counted.

    \b
    Examples:
        zeroelastic timeline events.jsonl
        zeroelastic timeline events.jsonl --plot timeline.png
        zeroelastic timeline events.jsonl --json
    """
    from zeroelastic.cli.pages import check_report, write_report
    from zeroelastic.job_log.event_log import read_events
    from zeroelastic.job_log.timeline import make_timeline

    if plot is not None:
        check_plot(plot, force=force)
    check_report(html, force=force)
    log = read_events(logs)
    made = make_timeline(log)
    if plot is not None:
        draw_timeline(plot, made, force=force)
    if as_json or html is not None:
        from zeroelastic.monitoring.job_report import timeline_report

        report = timeline_report(made, num_torn=log.num_torn, plot=plot)
        write_report(html, "timeline", report.to_json, force=force)
    if as_json:
        print_report(report)
    else:
        _show_timeline(made, log.num_torn)
        print_written(html)


def _show_timeline(made: Timeline, num_torn: int) -> None:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.began))
    last = max(one.last_time for one in made.incarnations) - made.began
    starts = len(made.incarnations)
    lost = counted(made.lost_steps, "step")
    print_styled(f"began {began}, {last:.0f} s, {counted(starts, 'start')}, {lost} lost")
    head: tuple[str, ...] = ("after", "ranks", "from", "tier", "to step", "lost", "saves", "ended")
    rows = [_row(one, made.began, one is made.incarnations[-1]) for one in made.incarnations]
    print_columns([head, *rows], right=frozenset({0, 1, 2, 4, 5, 6}))
    restarts = [(one, one.restart) for one in made.incarnations if one.restart is not None]
    if restarts:
        print_styled("")
        print_styled(("Restarts", "bold"), ", in seconds; load is zeroelastic's part")
        phases = (phase.replace("_", " ") for phase in restarts[0][1].by_phase)
        head = ("after", "ranks", *phases, "total", "ours")
        costs = [_cost_row(one, cost, made.began) for one, cost in restarts]
        print_columns([head, *costs], right=frozenset(range(len(head))))
    memory = [event for one in made.incarnations for event in one.memory]
    if memory:
        stall, nbytes = max(event.stall_seconds for event in memory), max(event.node_bytes for event in memory)
        print_styled("")
        print_styled(f"checkpoints in memory: up to {stall:.3f} s of waiting, {format_size(nbytes)} of a node's memory")
    if num_torn:
        print_styled(f"{counted(num_torn, 'half line')} left out")


def _row(one: Incarnation, began: float, last_one: bool) -> tuple[str, ...]:
    resume, end = one.resume, one.end or ("-" if last_one else "killed")
    return (
        f"{one.start.time - began:.1f} s",
        str(one.start.world_size),
        "-" if resume is None else "new" if resume.fresh else f"step {resume.step}",
        "-" if resume is None or resume.tier is None else resume.tier,
        str(one.steps[-1].step) if one.steps else "-",
        str(one.lost_steps),
        str(len(one.saves)),
        f"{end}: {one.error[:60]}" if one.error else end,
    )


def _cost_row(one: Incarnation, cost: Restart, began: float) -> tuple[str, ...]:
    return (
        f"{one.start.time - began:.1f} s",
        str(one.start.world_size),
        *("-" if seconds is None else f"{seconds:.2f}" for seconds in cost.by_phase.values()),
        f"{cost.total:.2f}",
        f"{cost.our_share:.1%}",
    )


def draw_timeline(path: Path, timeline: Timeline, *, force: bool = False) -> None:
    """Write the picture as a file in the format of its suffix. Raises UsageError when it exists, without ``force``.

    Lost steps, which were trained again later, are grey. Resumes from a disk are orange, those from memory purple,
    those from the processes of the world before cyan.
    """
    from matplotlib.figure import Figure

    began = timeline.began
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    ranks, losses, saves = figure.subplots(3, 1, sharex=True, height_ratios=[2, 4, 1])
    runs = timeline.incarnations
    for number, one in enumerate(runs):
        since = (one.resume.time if one.resume is not None else one.start.time) - began
        worked = max((event.time for event in (*one.steps, *one.saves)), default=one.last_time)
        until = max(worked - began, since)
        ranks.fill_between([since, until], one.start.world_size, color="tab:blue", alpha=0.5, step="pre")
        ranks.annotate(str(one.start.world_size), ((since + until) / 2, one.start.world_size), ha="center", va="bottom")
        if one.restart is not None:
            ranks.axvspan(
                one.steps[0].time - began - one.restart.total, one.steps[0].time - began, color="0.92", zorder=0
            )
        reached = min((later.resume.step for later in runs[number + 1 :] if later.resume is not None), default=None)
        points = [(event.time - began, event.loss, event.step) for event in one.steps if event.loss is not None]
        kept = [(x, y) for x, y, step in points if reached is None or step <= reached]
        lost = [(x, y) for x, y, step in points if reached is not None and step > reached]
        for line, color in ((kept, "tab:blue"), (lost, _LOST)):
            losses.plot([x for x, _ in line], [y for _, y in line], ".-", color=color, markersize=3, linewidth=1)
        saves.vlines([event.time - began for event in one.saves], 0, 1, color="tab:blue", linewidth=1)
        if one.resume is not None and not one.resume.fresh:
            marker, color = _MARKERS.get(one.resume.tier or "directory", (">", "tab:orange"))
            saves.plot([one.resume.time - began], [0.5], marker=marker, color=color, markersize=7, zorder=3)
    for event in timeline.nodes:
        for axes in (ranks, losses, saves):
            axes.axvline(event.time - began, color=_KILL if event.change < 0 else _JOIN, linestyle="--", linewidth=1)
    most = max(one.start.world_size for one in runs)
    ranks.set(ylabel="ranks", ylim=(0, most * 1.25), yticks=range(0, most + 1, max(1, most // 4)))
    starts, lost_steps = counted(len(runs), "start"), counted(timeline.lost_steps, "step")
    ranks.set_title(f"{starts}, {lost_steps} lost; nodes lost (red), nodes new (green)")
    losses.set(ylabel="loss")
    saves.set(xlabel="seconds", yticks=[], ylabel="saves and\nresumes")
    write_figure(path, figure, force=force)
