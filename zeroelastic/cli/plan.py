"""``zeroelastic plan``: what a load or a reshard at another world size would do, before anything is done."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import (
    EpOption,
    ForceOption,
    HtmlOption,
    JsonOption,
    LikeOption,
    TagOption,
    TpOption,
    reports,
)
from zeroelastic.cli.terminal import whole_table_console
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from zeroelastic.verbs.plan.bandwidth import Bandwidth
    from zeroelastic.verbs.plan.forecast import Forecast, Traffic
    from zeroelastic.verbs.plan.plan import PlannedLoad, PlannedReshard, PlanReport

Verb = Literal["load", "reshard"]

_MOST_RANKS_SHOWN = 8
_MOST_ROWS = 16
_MOST_NUMBERS = 5  # up to this many columns are shown as numbers, more as shades
_CORNER, _GAP = "saved rank", 2
_NUMBER_WIDTH, _SUM_WIDTH = 10, 12
_MOST_CELL = 3
_SIGNS, _PLAIN_SIGNS = "·░▒▓█", ".-+*#"
"""For no bytes, and for each quarter up to the most; the plain ones are for a terminal that has no others."""
_COLOURS = ("", "blue", "cyan", "yellow", "bold red")


def _show(report: PlanReport) -> None:
    """Print the plan for people on stdout."""
    from rich.text import Text

    out = whole_table_console()
    forecast, verb = report.forecast, report.verb
    stages = {report.stage, report.target_stage} != {3}
    kind = f"stage {report.stage}" if stages else report.format
    saved = f"{kind}, {counted(report.world_size, 'rank')}, step {report.step}"
    target = counted(report.target_world_size, "rank") + (f" at stage {report.target_stage}" if stages else "")
    out.print(Text(report.path, "bold"), soft_wrap=True)
    sizes = "" if report.topology is None else f" ({report.topology.sentence})"
    out.print(Text(f"{saved}; to {verb} on {target}{sizes}"), soft_wrap=True)
    state = report.state
    frozen = f", and {state.frozen_params} frozen" if state.frozen_params else ""
    what = f"{counted(state.params, 'parameter')} ({', '.join(state.state_keys)}){frozen}"
    out.print(Text(f"state: {format_size(state.bytes)} of {what}"), soft_wrap=True)
    for note in report.notes:
        out.print(Text(f"note: {note}", "yellow"), soft_wrap=True)

    out.print(Text("\nWhat each target rank does", "bold"))
    out.print(_rank_table(forecast))
    ratio = Text(f"  read / state: {report.amplification:.2f}", "green" if report.amplification <= 1 else "yellow")
    out.print(ratio)

    out.print(Text("\nWhere it comes from, frozen parameters included", "bold"))
    width = shutil.get_terminal_size((80, 0)).columns
    for drawn in heat_map(
        forecast.traffic, report.world_size, report.target_world_size, width=width, encoding=out.encoding
    ):
        out.print(drawn, soft_wrap=True)

    out.print(Text("\nWhat it takes in all", "bold"))
    out.print(_cost_table(report.load if verb == "load" else report.reshard))
    for line in _bandwidth_lines(report.bandwidth):
        out.print(Text(line), soft_wrap=True)


def _rank_table(forecast: Forecast) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), header_style="dim")
    for name in ("rank", "owns", "reads", "headers", "files", "segments", "requests", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    columns = (forecast.bytes_owned, forecast.bytes_read, forecast.header_bytes, forecast.files)
    counts = (forecast.segments, forecast.requests)

    def row(name: str, values: list[int], memory: str) -> None:
        sizes = [format_size(value) for value in values[:3]]
        table.add_row(name, *sizes, *(f"{value:,}" for value in values[3:]), memory)

    every = [*columns, *counts]
    if forecast.world_size <= _MOST_RANKS_SHOWN:
        for rank in range(forecast.world_size):
            row(str(rank), [int(values[rank]) for values in every], format_size(int(forecast.memory[rank])))
    row("worst", [int(values.max()) for values in every], format_size(int(forecast.memory.max())))
    row("all", [int(values.sum()) for values in every], "")
    return table


def _cost_table(costs: PlannedLoad | PlannedReshard) -> Table:
    """Bytes, files, memory and seconds of the chosen verb, over all ranks."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for label, key, is_size in (
        ("bytes read", "bytes_read", True),
        ("  by the worst rank", "bytes_read_worst_rank", True),
        ("bytes written", "bytes_written", True),
        ("files opened by the worst rank", "files_worst_rank", False),
        ("files opened", "files_read", False),
        ("files written", "files_written", False),
        ("peak memory", "memory", True),
        ("  at most", "memory_limit", True),
    ):
        if (value := getattr(costs, key, None)) is not None:
            table.add_row(label, format_size(value) if is_size else f"{value:,}")
    for label, key in (("seconds, bandwidth shared", "seconds"), ("seconds, each rank has it", "seconds_separate")):
        if time := _time(getattr(costs, key, None)):
            table.add_row(label, time)
    return table


def _time(seconds: object) -> str:
    if not isinstance(seconds, float):
        return ""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "< 0.001"


def _bandwidth_lines(speed: Bandwidth) -> list[str]:
    if speed.origin == "none" and not speed.notes:
        return ["  How long it takes: give --bandwidth, such as 2GB, or --measure to find it out."]
    read, write = (f"{format_size(value)}/s" if value else "unknown" for value in (speed.read, speed.write))
    how = {
        "given": "as given",
        "measured": f"measured with {format_size(speed.bytes_measured)}",
        "none": "not measured",
    }
    lines = [f"  Bandwidth ({how[speed.origin]}): read {read}, write {write}."]
    lines += [f"  Note: {note}." for note in speed.notes]
    if speed.read is not None:
        lines.append("  Seconds are what the bytes alone take: no opening of files, no collectives, no start of a job.")
    return lines


def heat_map(
    traffic: Traffic, num_sources: int, num_targets: int, *, width: int = 80, encoding: str = "utf-8"
) -> list[Text]:
    """How many bytes each target rank reads from each saved rank's files, as lines for a terminal.

    A row per saved rank, a column per target rank; neighbours are summed where needed. ``width`` and ``encoding``
    describe the terminal; the picture takes 40 columns or more, and 80 at most.
    """
    from rich.text import Text

    signs = _SIGNS if _has(encoding, _SIGNS) else _PLAIN_SIGNS
    shades = f" {signs[1:]}"

    source_step = -(-num_sources // _MOST_ROWS)
    labels = [_span(first, source_step, num_sources) for first in range(0, num_sources, source_step)]
    label_width = max(len(_CORNER), *map(len, labels))
    room = max(40, min(width, 80)) - label_width - _GAP - _SUM_WIDTH
    numbers = num_targets <= min(_MOST_NUMBERS, room // _NUMBER_WIDTH)
    target_step = 1 if numbers else -(-num_targets // room)
    columns = -(-num_targets // target_step)
    cell = _NUMBER_WIDTH if numbers else min(_MOST_CELL, room // columns)
    matrix = traffic.binned(num_sources, num_targets, source_step=source_step, target_step=target_step)
    most = int(matrix.max(initial=0))
    axis = _axis([column * target_step for column in range(columns)], cell, numbers)
    lines = [Text(f"{_CORNER:<{label_width}}{'':{_GAP}}{axis}", style="dim")]
    for label, row in zip(labels, matrix, strict=True):
        line = Text(f"{label:>{label_width}}{'':{_GAP}}")
        for nbytes in row.tolist():
            shade = _shade(nbytes, most)
            text = f"{format_size(nbytes) if nbytes else signs[0]:>{cell}}" if numbers else shades[shade] * cell
            line.append(text, style=_COLOURS[shade])
        line.append(f"{format_size(int(row.sum())):>{_SUM_WIDTH}}", style="dim")
        lines.append(line)
    if not numbers:
        each = f"; a cell is {source_step} x {target_step} ranks" if (source_step, target_step) != (1, 1) else ""
        legend = f"{signs[1:]} are the quarters up to {format_size(most)}{each}"
        lines.append(Text(f"{'':{label_width + _GAP}}{legend}", style="dim"))
    return lines


def _has(encoding: str, signs: str) -> bool:
    try:
        signs.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _shade(nbytes: int, most: int) -> int:
    """0 for no bytes, else 1 to 4 by quarters of the largest cell."""
    return 0 if nbytes == 0 else min(4, 1 + nbytes * 4 // most)


def _span(first: int, step: int, count: int) -> str:
    """The ranks that a row stands for."""
    last = min(first + step, count) - 1
    return str(first) if first == last else f"{first}-{last}"


def _axis(targets: list[int], cell: int, numbers: bool) -> str:
    """The target ranks above the columns, as many as there is room for."""
    if numbers:
        return "".join(f"{f'to {rank}':>{cell}}" for rank in targets)
    line = ""
    for column, rank in enumerate(targets):
        at = column * cell
        if not line:
            line = f"to {rank}"
        elif at >= len(line) + 3 and at + len(str(rank)) <= len(targets) * cell:
            line = f"{line:<{at}}{rank}"
    return line


@reports("zeroelastic.verbs.plan.plan", _show)
def plan(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: its tag directory, or the one above.")],
    world_size: Annotated[int, typer.Option("--world-size", "-n", metavar="M", min=1, help="Ranks to plan for.")],
    stage: Annotated[
        int | None,
        typer.Option(metavar="S", min=1, max=3, help="ZeRO stage to plan for; default: that of the checkpoint."),
    ] = None,
    tp: TpOption = None,
    ep: EpOption = None,
    like: LikeOption = None,
    verb: Annotated[
        Verb, typer.Option("--verb", help="Plan a load in training, or the offline reshard into new files.")
    ] = "load",
    tag: TagOption = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second, such as 2GB: compute how many seconds it takes."),
    ] = None,
    write_bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The same for writing; --bandwidth, if it is not given.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Find out the bandwidth: read up to 256 MiB of the checkpoint, and write up to 64 MiB beside it.",
        ),
    ] = False,
    html: HtmlOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a load or a reshard on M ranks would read, open, need and take; no payload is looked at.

    Only headers are read, and nothing is written, but with --measure.
    Exit code 0: planned; 2: wrong usage; 3: not a checkpoint that can be loaded.

    \b
    Examples:
        zeroelastic plan ckpt --world-size 3
        zeroelastic plan ckpt --world-size 6 --verb reshard --tag global_step2
        zeroelastic plan ckpt --world-size 3 --stage 2
        zeroelastic plan ckpt --world-size 3 --measure
        zeroelastic plan ckpt --world-size 3 --bandwidth 2GB --json
        zeroelastic plan ckpt --world-size 3 --bandwidth 2GB --html plan.html
    """
