"""``--plot``: pictures of plans and timelines as files, by matplotlib; never half a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.command import check_new_file, write_new_file
from zeroelastic.errors import UsageError, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zeroelastic.job_log.timeline import Timeline
    from zeroelastic.verbs.plan.forecast import Forecast

_FORMATS = (".png", ".svg", ".pdf")
_NO_DATE = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

_MOST_CELLS = 256
_MOST_NUMBERS = 8  # up to this many rows and columns, each cell has its number
_MOST_BARS = 64
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_LOST, _KILL, _JOIN = "0.75", "tab:red", "tab:green"
_MARKERS = {"memory": ("^", "tab:purple"), "in-place": ("o", "tab:cyan")}


def check_plot(path: Path, what: str, *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where ``what`` cannot be drawn to ``path``; ``force`` replaces a file."""
    check_new_file(path, f"{what} is drawn", _FORMATS, force=force)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib. Install it: pip install 'zeroelastic[plot]'.") from None


def write_figure(path: Path, figure: Figure, *, force: bool = False) -> None:
    """Write a figure as a file, in the format of its suffix. Raises UsageError when it exists, without ``force``.

    The file is rendered in memory first, and the same figure gives the same bytes.
    """
    import matplotlib

    drawing = io.BytesIO()
    suffix = path.suffix.lower()
    with matplotlib.rc_context({"svg.hashsalt": "zeroelastic"}):
        figure.savefig(drawing, format=suffix[1:], dpi=120, metadata=_NO_DATE[suffix])
    write_new_file(path, drawing.getvalue(), force=force)


def draw_plan(path: Path, forecast: Forecast, *, force: bool = False) -> None:
    """Write the picture as a file in the format of its suffix. Raises UsageError when it exists, without ``force``."""
    write_figure(path, plan_figure(forecast), force=force)


def plan_figure(forecast: Forecast) -> Figure:
    """The picture. Colours and heights are proportional to bytes, so that cells that are nearly equal look equal."""
    import numpy as np
    from matplotlib.figure import Figure

    num_sources, num_targets = forecast.saved_world_size, forecast.world_size
    steps = -(-num_sources // _MOST_CELLS), -(-num_targets // _MOST_CELLS)
    matrix = forecast.traffic.binned(num_sources, num_targets, source_step=steps[0], target_step=steps[1])
    rows, columns = matrix.shape
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    cells, bars = figure.subplots(2, 1, height_ratios=[3, 1])
    most = int(matrix.max(initial=0))
    unit = _unit(most)
    drawn = cells.imshow(
        np.where(matrix > 0, matrix / _UNITS[unit], np.nan),
        vmin=0,
        vmax=most / _UNITS[unit] or 1,
        cmap="viridis_r",
        aspect="auto",
        interpolation="none",
        origin="upper",
        extent=(-0.5, columns * steps[1] - 0.5, rows * steps[0] - 0.5, -0.5),
    )
    if max(rows, columns) <= _MOST_NUMBERS:
        for (source, target), nbytes in np.ndenumerate(matrix):
            if nbytes:
                color = "white" if nbytes > most / 2 else "black"
                cells.text(target, source, format_size(int(nbytes)), ha="center", va="center", color=color)
    bins = "" if steps == (1, 1) else f", {steps[0]} x {steps[1]} ranks a cell"
    figure.colorbar(drawn, ax=cells, label=f"{unit}{bins}")
    ranks_each = f"{counted(num_sources, 'saved rank')} to {num_targets}"
    cells.set(
        title=f"{ranks_each}: {forecast.amplification:.2f} bytes read per byte of state",
        xlabel="target rank",
        ylabel="saved rank",
        xlim=(-0.5, num_targets - 0.5),
        ylim=(num_sources - 0.5, -0.5),
    )
    ranks = np.arange(num_targets)
    unit = _unit(int(forecast.bytes_read.max()))
    read = forecast.bytes_read / _UNITS[unit]
    if num_targets <= _MOST_BARS:
        bars.bar(ranks, read)
    else:
        bars.step(ranks, read, where="mid")
    bars.set(xlabel="target rank", ylabel=f"{unit} read", xlim=(-0.5, num_targets - 0.5))
    bars.set_ylim(bottom=0)
    for axis in (cells.xaxis, cells.yaxis, bars.xaxis):
        axis.get_major_locator().set_params(integer=True)
    return figure


def _unit(most: int) -> str:
    """The largest unit of which there is at least one."""
    return max((unit for unit, size in _UNITS.items() if size <= most), key=_UNITS.__getitem__, default="B")


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
