"""``zeroelastic plan``: what a load or a reshard at another world size would do, before anything is done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zeroelastic.cli.sizes import format_size, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from zeroelastic.checkpoint import Checkpoint
    from zeroelastic.cli.bandwidth import Bandwidth
    from zeroelastic.forecast import Forecast
    from zeroelastic.layout import Int64Array
    from zeroelastic.source import Source
    from zeroelastic.universal_cost import UniversalCost

Verb = Literal["load", "reshard"]

_MOST_RANKS_SHOWN = 8


def plan(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: its tag directory, or the one above.")],
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, help="Ranks to plan for.")],
    verb: Annotated[
        Verb, typer.Option("--verb", help="Plan a load in training, or the offline reshard into new files.")
    ] = "load",
    tag: Annotated[str | None, typer.Option(help="Which tag, where SRC holds several.")] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second, such as 2GB, to compute with; nothing is measured then."),
    ] = None,
    write_bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The same for writing; --bandwidth, if it is not given.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the plan: a new .png or .svg (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Say what a load or a reshard on M ranks would read, open, need and take; no payload is looked at.

    Reads headers only, and compares with what Universal Checkpoint would do.
    Without --bandwidth, about 256 MiB of the checkpoint are read, and 64 MiB written, to see how fast its disk is.
    Exit code 0: planned; 2: wrong usage; 3: not a checkpoint that can be loaded.

    \b
    Examples:
        zeroelastic plan ckpt --world-size 3
        zeroelastic plan ckpt --world-size 6 --verb reshard --tag global_step2
        zeroelastic plan ckpt --world-size 3 --bandwidth 2GB --json
        zeroelastic plan ckpt --world-size 3 --bandwidth 2GB --plot plan.svg
    """
    given = _given(bandwidth, write_bandwidth)
    if plot is not None:
        from zeroelastic.cli.plot_file import check_plot

        check_plot(plot, "a plan")
    from zeroelastic.checkpoint import open_checkpoint
    from zeroelastic.forecast import make_forecast, read_head
    from zeroelastic.global_batch import misfit_notes
    from zeroelastic.native import train_batch_size
    from zeroelastic.one_save import one_save
    from zeroelastic.source import find_source
    from zeroelastic.universal_cost import universal_cost

    found = find_source(source, tag=tag)
    with one_save(found.tag_dir):
        checkpoint = open_checkpoint(found.tag_dir)
        head = read_head(checkpoint)
    forecast = make_forecast(head, world_size)
    universal = universal_cost(head, world_size)
    speed = given if given is not None else _measure(checkpoint, found)
    batch = train_batch_size(checkpoint.record, head.shard, head.world_size)
    notes = misfit_notes(batch, world_size, head.world_size, head.shard.ds_config)
    document = plan_document(found, forecast, universal, speed, verb, notes)
    if plot is not None:
        from zeroelastic.cli.plan_plot import draw_plan

        draw_plan(plot, forecast, universal)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _show(found, forecast, universal, speed, verb, document)
        if plot is not None:
            typer.echo(f"\nDrawn: {plot}")


def _given(read: str | None, write: str | None) -> Bandwidth | None:
    """What the user says of the file system, or None when it is to be measured."""
    from zeroelastic.cli.bandwidth import Bandwidth

    if read is None and write is None:
        return None
    if read is None:
        raise typer.BadParameter("needs --bandwidth, which is for reading.", param_hint="'--write-bandwidth'")
    speeds = []
    for option, text in (("--bandwidth", read), ("--write-bandwidth", write if write is not None else read)):
        try:
            speed = parse_size(text.strip().removesuffix("/s"))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None
        if speed <= 0:
            raise typer.BadParameter("must be more than 0 bytes per second.", param_hint=f"'{option}'")
        speeds.append(float(speed))
    return Bandwidth(speeds[0], speeds[1], "given")


def _measure(checkpoint: Checkpoint, found: Source) -> Bandwidth:
    from zeroelastic.cli.bandwidth import Bandwidth, measure_bandwidth

    files = [path for path in checkpoint.optim_files if isinstance(path, Path)]
    if len(files) < checkpoint.world_size or not isinstance(found.root, Path):
        return Bandwidth(None, None, "none", notes=("the checkpoint is not on this machine; give --bandwidth",))
    return measure_bandwidth(files, found.root)


def _seconds(read: int, written: int, speed: Bandwidth) -> float | None:
    """How long the bytes alone take; None when a speed that is needed is not known."""
    if (read and speed.read is None) or (written and speed.write is None):
        return None
    return (read / speed.read if speed.read else 0.0) + (written / speed.write if speed.write else 0.0)


def plan_document(
    source: Source,
    forecast: Forecast,
    universal: UniversalCost,
    speed: Bandwidth,
    verb: Verb,
    notes: Sequence[str] = (),
) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    import numpy as np

    from zeroelastic.forecast import LOAD_MEMORY_LIMIT, RESHARD_MEMORY_LIMIT

    head, columns = forecast.head, _columns(forecast)
    lists = {name: values.tolist() for name, values in columns.items()}
    names = list(lists)
    sources: list[list[dict[str, int]]] = [[] for _ in range(forecast.world_size)]
    saved, optimizer, frozen = forecast.saved_world_size, forecast.optimizer, forecast.frozen
    traffic = forecast.traffic
    pieces = {
        kind: dict(zip((part.target * saved + part.source).tolist(), part.nbytes.tolist(), strict=True))
        for kind, part in (("optimizer_bytes", optimizer), ("frozen_bytes", frozen))
    }
    for target, rank in zip(traffic.target.tolist(), traffic.source.tolist(), strict=True):
        sources[target].append({"rank": rank, **{k: v.get(target * saved + rank, 0) for k, v in pieces.items()}})
    ranks = [
        {"rank": rank, **dict(zip(names, values, strict=True)), "sources": sources[rank]}
        for rank, values in enumerate(zip(*lists.values(), strict=True))
    ]
    read = forecast.bytes_read + forecast.header_bytes
    reshard_read = int(forecast.bytes_read.sum()) + forecast.reshard_header_bytes
    return {
        "source": str(source.tag_dir),
        "tag": source.tag,
        "framework": source.framework,
        "format": head.shard.format,
        "global_steps": head.model.global_steps,
        "saved_world_size": saved,
        "world_size": forecast.world_size,
        "verb": verb,
        "state": {
            "bytes": forecast.state_bytes,
            "params": head.shard.layout.num_params,
            "frozen_params": 0 if head.frozen is None else head.frozen.num_params,
            "state_keys": list(head.state_keys),
        },
        "bandwidth": asdict(speed),
        "ranks": ranks,
        "worst": {
            name: {"rank": int(np.argmax(values)), "value": int(values.max())} for name, values in columns.items()
        },
        "total": {name: int(values.sum()) for name, values in columns.items() if name != "memory"},
        "amplification": forecast.amplification,
        "load": {
            "bytes_read": int(read.sum()),
            "bytes_read_worst_rank": int(read.max()),
            "files_worst_rank": int(forecast.files.max()),
            "memory": int(forecast.memory.max()),
            "memory_limit": LOAD_MEMORY_LIMIT,
            "seconds": _seconds(int(read.sum()), 0, speed),
            "seconds_separate": _seconds(int(read.max()), 0, speed),
        },
        "reshard": {
            "bytes_read": reshard_read,
            "bytes_written": forecast.reshard_bytes_written,
            "files_read": 2 * saved,
            "files_written": 2 * forecast.world_size,
            "memory_limit": RESHARD_MEMORY_LIMIT,
            "seconds": _seconds(reshard_read, forecast.reshard_bytes_written, speed),
        },
        "universal": _universal_document(forecast, universal, speed),
        "notes": list(notes),
    }


def _columns(forecast: Forecast) -> dict[str, Int64Array]:
    """What there is to say of each target rank."""
    return {
        "bytes_owned": forecast.bytes_owned,
        "bytes_read": forecast.bytes_read,
        "header_bytes": forecast.header_bytes,
        "optimizer_files": forecast.optimizer_files,
        "model_files": forecast.model_files,
        "segments": forecast.segments,
        "requests": forecast.requests,
        "memory": forecast.memory,
    }


def _universal_document(forecast: Forecast, universal: UniversalCost, speed: Bandwidth) -> dict[str, object]:
    document: dict[str, object] = {
        "supported": universal.supported,
        "reason": universal.reason,
        "losses": list(universal.losses),
        "convert": None,
        "load": None,
        "bytes_read": None,
        "amplification": None,
        "seconds": None,
        "seconds_separate": None,
    }
    convert, load = universal.convert, universal.load
    if convert is None or load is None:
        return document
    converting = _seconds(convert.bytes_read, convert.bytes_written, speed)
    loading = _seconds(load.bytes_read, 0, speed)
    separate = _seconds(load.bytes_read_per_rank, 0, speed)
    total = convert.bytes_read + load.bytes_read
    document |= {
        "convert": {**asdict(convert), "seconds": converting},
        "load": {**asdict(load), "seconds": loading, "seconds_separate": separate},
        "bytes_read": total,
        "amplification": total / forecast.state_bytes if forecast.state_bytes else None,
        "seconds": None if converting is None or loading is None else converting + loading,
        "seconds_separate": None if converting is None or separate is None else converting + separate,
    }
    return document


def _show(
    source: Source,
    forecast: Forecast,
    universal: UniversalCost,
    speed: Bandwidth,
    verb: Verb,
    document: dict[str, object],
) -> None:
    """The plan for people, on stdout."""
    from rich.console import Console
    from rich.text import Text

    from zeroelastic.cli.heat_map import heat_map

    out = Console()
    head, num_ranks = forecast.head, forecast.world_size
    saved = f"{head.shard.format}, {_count(forecast.saved_world_size, 'rank')}, step {head.model.global_steps}"
    out.print(Text(str(source.tag_dir), "bold"), soft_wrap=True)
    out.print(Text(f"{saved}; to {verb} on {_count(num_ranks, 'rank')}"), soft_wrap=True)
    frozen = "" if head.frozen is None else f", and {head.frozen.num_params} frozen"
    what = f"{_count(head.shard.layout.num_params, 'parameter')} ({', '.join(head.state_keys)}){frozen}"
    out.print(Text(f"state: {format_size(forecast.state_bytes)} of {what}"), soft_wrap=True)
    notes = document["notes"]
    assert isinstance(notes, list)
    for note in notes:
        out.print(Text(f"note: {note}", "yellow"), soft_wrap=True)

    out.print(Text("\nWhat each target rank does", "bold"))
    out.print(_rank_table(forecast))
    ratio = Text(f"  read / state: {forecast.amplification:.2f}", "green" if forecast.amplification <= 1 else "yellow")
    out.print(ratio)

    out.print(Text("\nWhere it comes from, frozen parameters included", "bold"))
    for drawn in heat_map(forecast.traffic, forecast.saved_world_size, num_ranks):
        out.print(drawn, soft_wrap=True)

    out.print(Text("\nAgainst Universal Checkpoint (UC, an estimate)", "bold"))
    if not universal.supported:
        out.print(Text(f"  It cannot take this checkpoint: {universal.reason}.", "yellow"), soft_wrap=True)
    out.print(_comparison(document, verb))
    for loss in universal.losses:
        out.print(Text(f"  Universal Checkpoint loses {loss}.", "yellow"), soft_wrap=True)
    for line in _bandwidth_lines(speed):
        out.print(Text(line), soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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


def _comparison(document: dict[str, object], verb: Verb) -> Table:
    """The chosen verb beside conversion and load of Universal Checkpoint."""
    from rich.table import Table

    ours, universal = document[verb], document["universal"]
    assert isinstance(ours, dict) and isinstance(universal, dict)
    columns: list[tuple[str, dict[str, object]]] = [(verb, ours)]
    convert, load = universal["convert"], universal["load"]
    if isinstance(convert, dict) and isinstance(load, dict):
        both = {key: universal[key] for key in ("bytes_read", "seconds", "seconds_separate")}
        columns += [("convert", convert), ("load", load), ("together", both)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1), header_style="dim")
    table.add_column("")
    for i, (name, _) in enumerate(columns):
        table.add_column(name if i == 0 else f"UC {name}", justify="right", no_wrap=True)
    lines: list[tuple[str, tuple[str, ...], bool]] = [
        ("bytes read", ("bytes_read",), True),
        ("  by the worst rank", ("bytes_read_worst_rank", "bytes_read_per_rank"), True),
        ("bytes written", ("bytes_written",), True),
        ("temporary disk", ("temporary_bytes",), True),
        ("files opened", ("files_worst_rank", "files_per_rank", "files_read"), False),
        ("files written", ("files_written",), False),
        ("peak memory", ("memory",), True),
        ("  at most", ("memory_limit",), True),
    ]
    for label, keys, is_size in lines:
        cells = []
        for _, values in columns:
            value = next((values[key] for key in keys if key in values), None)
            cells.append("" if not isinstance(value, int) else format_size(value) if is_size else f"{value:,}")
        if any(cells):
            table.add_row(label, *cells)
    for label, key in (("seconds, bandwidth shared", "seconds"), ("seconds, each rank has it", "seconds_separate")):
        cells = [_time(values.get(key)) for _, values in columns]
        if any(cells):
            table.add_row(label, *cells)
    return table


def _time(seconds: object) -> str:
    if not isinstance(seconds, float):
        return ""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "< 0.001"


def _bandwidth_lines(speed: Bandwidth) -> list[str]:
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
