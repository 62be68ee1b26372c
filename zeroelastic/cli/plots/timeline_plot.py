"""The picture of a timeline, as a file: ranks, loss and saves over time, with the kills and the restarts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeroelastic.cli.plots.plot_file import write_figure
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from zeroelastic.job_log.timeline import Timeline

_LOST, _KILL, _JOIN = "0.75", "tab:red", "tab:green"
_MARKERS = {"memory": ("^", "tab:purple"), "in-place": ("o", "tab:cyan")}


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
