"""The report of ``zeroelastic plan``."""

from __future__ import annotations

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.documents.copies import Plan, PlannedLoad
from zeroelastic.cli.html.figures.bars import Bar, draw_columns
from zeroelastic.cli.html.figures.matrix import draw_matrix
from zeroelastic.cli.html.figures.scale import byte_ticks
from zeroelastic.cli.html.page import Figure, Page, Section, Table, cells, facts, items, sections, table
from zeroelastic.errors import counted


def plan_page(plan: Plan) -> Page:
    """The page: what it costs, how many bytes go from where to where, what each rank reads."""
    costs = plan.load if plan.verb == "load" else plan.reshard
    stage = f"{plan.stage}" if plan.stage == plan.target_stage else f"{plan.stage} to {plan.target_stage}"
    speed = plan.bandwidth
    limit = format_size(costs.memory_limit)
    return Page(
        "plan",
        plan.path,
        "note" if plan.notes else "good",
        _answer(plan),
        facts(
            ("ranks", f"{plan.world_size:,} to {plan.target_world_size:,}"),
            ("ZeRO stage", stage),
            ("step", plan.step),
            ("state", format_size(plan.state.bytes)),
            ("parameters", f"{plan.state.params + plan.state.frozen_params:,}"),
            ("state keys", ", ".join(plan.state.state_keys)),
            ("bytes read", format_size(costs.bytes_read)),
            ("bytes written", None if isinstance(costs, PlannedLoad) else format_size(costs.bytes_written)),
            ("read for each byte of state", f"{plan.amplification:.2f}"),
            (
                "peak memory",
                f"{format_size(costs.memory)}, at most {limit}"
                if isinstance(costs, PlannedLoad)
                else f"at most {limit}",
            ),
            ("seconds", _seconds(costs.seconds)),
            ("bandwidth", None if speed.read is None else f"{format_size(speed.read)}/s, {speed.origin}"),
        ),
        sections(
            Section("Notes", items("note", [*plan.notes, *speed.notes])),
            Section("Where it comes from", (_matrix(plan),)),
            Section("What each target rank reads", (_columns(plan), _table(plan))),
        ),
    )


def _answer(plan: Plan) -> str:
    ranks = counted(plan.target_world_size, "rank")
    worst = max(plan.ranks, key=lambda rank: rank.bytes_read + rank.header_bytes)
    most = format_size(worst.bytes_read + worst.header_bytes)
    files = counted(worst.optimizer_files + worst.model_files, "file")
    if plan.verb == "load":
        took = _seconds(plan.load.seconds)
        time = "" if took is None else f", which takes {took} s at the bandwidth given below"
        return (
            f"A load on {ranks} reads {format_size(plan.load.bytes_read)} in all: the state {plan.amplification:.2f} "
            f"times, and headers; the rank that reads most reads {most} from {files}{time}."
        )
    took = _seconds(plan.reshard.seconds)
    time = "" if took is None else f", which takes {took} s at the bandwidth given below"
    return (
        f"A reshard to {ranks} reads {format_size(plan.reshard.bytes_read)} from "
        f"{counted(plan.reshard.files_read, 'file')} and writes {format_size(plan.reshard.bytes_written)} to "
        f"{counted(plan.reshard.files_written, 'file')}{time}."
    )


def _seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "less than 0.001"


def _matrix(plan: Plan) -> Figure:
    entries = [
        (source.rank, rank.rank, source.optimizer_bytes + source.frozen_bytes)
        for rank in plan.ranks
        for source in rank.sources
    ]
    source, target, nbytes = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    return draw_matrix(
        "Bytes that each target rank reads from each saved rank's files",
        source,
        target,
        nbytes,
        num_sources=plan.world_size,
        num_targets=plan.target_world_size,
    )


def _columns(plan: Plan) -> Figure:
    read = [rank.bytes_read + rank.header_bytes for rank in plan.ranks]
    most = max(read)
    bars = [
        Bar(f"rank {rank.rank:,}", nbytes / most if most else 0.0, format_size(nbytes))
        for rank, nbytes in zip(plan.ranks, read, strict=True)
    ]
    return draw_columns(
        "Bytes that each target rank reads, headers included", bars, byte_ticks(most), title="target rank"
    )


def _table(plan: Plan) -> Table:
    most = sorted(plan.ranks, key=lambda rank: (-(rank.bytes_read + rank.header_bytes), rank.rank))
    few = len(plan.ranks) <= 40
    rows = [
        cells(
            f"{rank.rank:,}",
            format_size(rank.bytes_owned),
            format_size(rank.bytes_read),
            format_size(rank.header_bytes),
            f"{rank.optimizer_files + rank.model_files:,}",
            f"{rank.segments:,}",
            f"{rank.requests:,}",
            format_size(rank.memory),
        )
        for rank in (plan.ranks if few else most[:2000])
    ]
    columns = [">rank", ">owns", ">reads", ">headers", ">files", ">segments", ">requests", ">memory"]
    caption = "Target ranks" if few else "Target ranks, those that read most first"
    return table(caption, columns, rows, order="that read most", total=len(plan.ranks))
