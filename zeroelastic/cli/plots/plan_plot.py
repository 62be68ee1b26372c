"""The picture of a plan, as a file: bytes from each saved rank to each target rank, and what each rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeroelastic.cli.plots.plot_file import write_figure

if TYPE_CHECKING:
    from zeroelastic.offline.plan.forecast import Forecast

_MOST_CELLS = 256
_MIB = 1 << 20


def draw_plan(path: Path, forecast: Forecast) -> None:
    """Write the picture as a new file, in the format of its suffix. Raises UsageError when the file exists."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    num_sources, num_targets = forecast.saved_world_size, forecast.world_size
    steps = -(-num_sources // _MOST_CELLS), -(-num_targets // _MOST_CELLS)
    traffic = forecast.traffic
    matrix = traffic.binned(num_sources, num_targets, source_step=steps[0], target_step=steps[1]) / _MIB
    rows, columns = matrix.shape
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    cells, bars = figure.subplots(2, 1, height_ratios=[3, 1])
    most = float(matrix.max()) or 1.0
    least = float(matrix[matrix > 0].min()) if (matrix > 0).any() else most
    drawn = cells.imshow(
        np.where(matrix > 0, matrix, np.nan),
        norm=LogNorm(least, most) if least < most else None,
        cmap="viridis",
        aspect="auto",
        interpolation="none",
        origin="upper",
        extent=(-0.5, columns * steps[1] - 0.5, rows * steps[0] - 0.5, -0.5),
    )
    bins = "" if steps == (1, 1) else f", {steps[0]} x {steps[1]} ranks a cell"
    figure.colorbar(drawn, ax=cells, label=f"MiB{bins}")
    cells.set(
        title=f"{num_sources} saved ranks to {num_targets}: {forecast.amplification:.2f} bytes read per byte of state",
        xlabel="target rank",
        ylabel="saved rank",
        xlim=(-0.5, num_targets - 0.5),
        ylim=(num_sources - 0.5, -0.5),
    )
    ranks = np.arange(num_targets)
    bars.step(ranks, forecast.bytes_read / _MIB, where="mid", label="this plan")
    if num_targets == 1:  # a step needs two points to be seen
        bars.plot(ranks, forecast.bytes_read / _MIB, "o", color="C0")
    bars.set(xlabel="target rank", ylabel="MiB read", xlim=(-0.5, num_targets - 0.5))
    bars.set_ylim(bottom=0)
    bars.legend(loc="center right")
    for axis in (cells.xaxis, cells.yaxis, bars.xaxis):
        axis.get_major_locator().set_params(integer=True)
    write_figure(path, figure)
