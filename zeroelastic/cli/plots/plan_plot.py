"""The picture of a plan, as a file: bytes from each saved rank to each target rank, and what each rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.plots.plot_file import write_figure
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zeroelastic.verbs.plan.forecast import Forecast

_MOST_CELLS = 256
_MOST_NUMBERS = 8  # up to this many rows and columns, each cell has its number
_MOST_BARS = 64
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


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
