"""The pages of ``plan`` and ``diff``: the sentence at the top, figures, rows of tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.pages.figures import (
    Bar,
    Bars,
    Cell,
    Chart,
    Piece,
    Strip,
    Table,
    Tone,
    byte_ticks,
    columns,
    matrix,
    number_ticks,
    strips,
    table,
)
from zeroelastic.errors import counted
from zeroelastic.verbs.diff.diff import Difference, DiffReport
from zeroelastic.verbs.diff.tensors import ComparedTensor
from zeroelastic.verbs.plan.plan import PlanReport

_DRAWN = 12


def plan_view(plan: PlanReport) -> dict[str, object]:
    """What it costs, how many bytes go from where to where, what each rank reads."""
    costs = plan.load if plan.verb == "load" else plan.reshard
    read = [rank.bytes_read + rank.header_bytes for rank in plan.ranks]
    bars = [
        Bar(f"rank {rank.rank:,}", nbytes / max(read) if nbytes else 0.0, format_size(nbytes))
        for rank, nbytes in zip(plan.ranks, read, strict=True)
    ]
    seconds = _seconds(costs.seconds)
    return {
        "title": plan.path,
        "tone": "note" if plan.notes else "good",
        "sentence": _plan_answer(plan, seconds),
        "costs": costs,
        "seconds": seconds,
        "traffic": _traffic(plan),
        "read": columns(bars, byte_ticks(max(read)), title="target rank"),
        "few": len(plan.ranks) <= 40,
        "ranks": _plan_ranks(plan),
    }


def _plan_answer(plan: PlanReport, seconds: str | None) -> str:
    ranks = counted(plan.target_world_size, "rank")
    time = "" if seconds is None else f", which takes {seconds} s at the bandwidth given below"
    if plan.verb == "load":
        worst = max(plan.ranks, key=lambda rank: rank.bytes_read + rank.header_bytes)
        most = format_size(worst.bytes_read + worst.header_bytes)
        files = counted(worst.optimizer_files + worst.model_files, "file")
        return (
            f"A load on {ranks} reads {format_size(plan.load.bytes_read)} in all: the state {plan.amplification:.2f} "
            f"times, and headers; the rank that reads most reads {most} from {files}{time}."
        )
    return (
        f"A reshard to {ranks} reads {format_size(plan.reshard.bytes_read)} from "
        f"{counted(plan.reshard.files_read, 'file')} and writes {format_size(plan.reshard.bytes_written)} to "
        f"{counted(plan.reshard.files_written, 'file')}{time}."
    )


def _seconds(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "less than 0.001"


def _traffic(plan: PlanReport) -> Chart:
    entries = [
        (source.rank, rank.rank, source.optimizer_bytes + source.frozen_bytes)
        for rank in plan.ranks
        for source in rank.sources
    ]
    source, target, nbytes = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    return matrix(source, target, nbytes, num_sources=plan.world_size, num_targets=plan.target_world_size)


def _plan_ranks(plan: PlanReport) -> Table | None:
    """The ranks in order where they are few, those that read most first where they are many."""
    most = sorted(plan.ranks, key=lambda rank: (-(rank.bytes_read + rank.header_bytes), rank.rank))
    rows = [
        (
            f"{rank.rank:,}",
            format_size(rank.bytes_owned),
            format_size(rank.bytes_read),
            format_size(rank.header_bytes),
            f"{rank.optimizer_files + rank.model_files:,}",
            f"{rank.segments:,}",
            f"{rank.requests:,}",
            format_size(rank.memory),
        )
        for rank in (plan.ranks if len(plan.ranks) <= 40 else most[:2000])
    ]
    titles = ("rank", "owns", "reads", "headers", "files", "segments", "requests", "memory")
    return table(dict.fromkeys(titles, "right"), rows, total=len(plan.ranks))


def diff_view(found: DiffReport) -> dict[str, object]:
    """Whether the two are equal, which tensors differ and how far, and what else differs."""
    tone, sentence = _diff_answer(found)
    worst = sorted(found.tensors, key=_badness)
    norms = [(tensor, tensor.relative_norm) for tensor in worst if tensor.relative_norm][:_DRAWN]
    most = max((norm for _, norm in norms), default=0.0)
    bars = [Bar(f"{tensor.param} · {tensor.key}", norm / most, f"{norm:.3g}") for tensor, norm in norms]
    only = [
        (one.param, one.key, Cell(f"only in {side}", "bad"))
        for side, alone in (("A", found.only_a), ("B", found.only_b))
        for one in alone
    ]
    return {
        "title": f"{found.a} and {found.b}",
        "tone": tone,
        "sentence": sentence,
        "counts": _tensor_counts(found),
        "most": "" if len(norms) == len(worst) else f": the {len(norms)} tensors with the largest",
        "norms": Bars(tuple(bars), long=True) if bars else None,
        "tensors": _tensors(worst),
        "only": table({"parameter": "name", "key": "", "where": ""}, only),
        "state": _values(found.state),
        "saving": _values(found.saving),
    }


def _diff_answer(found: DiffReport) -> tuple[Tone, str]:
    if found.ok:
        return "good", f"Equal: all {counted(found.num_tensors, 'tensor')} bit for bit, and all other state."
    others = counted(len(found.state), "other value")
    if found.weights_equal:
        what = [f"{counted(len(found.tensors), 'tensor')} of optimizer state"] if found.tensors else []
        what += [others] if found.state else []
        what += ["what only one side has"] if found.only_a or found.only_b else []
        return "bad", f"The weights are equal bit for bit; different are {' and '.join(what)}."
    weights = [tensor for tensor in found.tensors if tensor.key in ("fp32", "frozen")]
    elements = sum(tensor.num_elements or 0 for tensor in weights)
    different = sum(tensor.num_different or 0 for tensor in weights)
    most = max((tensor.max_abs for tensor in weights if tensor.max_abs is not None), default=None)
    far = "" if most is None else f", by {most:.3g} at most"
    sentence = (
        f"The weights differ in {counted(len(weights), 'parameter')}: {different:,} of {elements:,} elements{far}"
    )
    if not weights:
        sentence = "The weights differ: some are on one side only"
    return "bad", sentence + (f"; {others} differ, too." if found.state else ".")


def _badness(tensor: ComparedTensor) -> tuple[bool, float, float, str, str]:
    """What sorts the worst difference first: what cannot be compared, then by relative norm, then by elements."""
    norm = tensor.relative_norm
    share = (tensor.num_different or 0) / tensor.num_elements if tensor.num_elements else 0.0
    return (norm is not None, -(norm or 0.0), -share, tensor.param, tensor.key)


def _tensor_counts(found: DiffReport) -> Chart | None:
    counts = (
        ("part-c", "equal bit for bit", found.num_equal),
        ("hue-2", "different", len(found.tensors)),
        ("hue-4", "only in A", len(found.only_a)),
        ("hue-5", "only in B", len(found.only_b)),
    )
    pieces: list[Piece] = []
    place = 0
    for style, what, count in counts:
        if count:
            pieces.append(Piece(place, place + count, style, f"{counted(count, 'tensor')} {what}"))
        place += count
    legend = [(style, f"{what}: {count:,}") for style, what, count in counts if count]
    return strips([Strip("tensors", pieces)], end=place, ticks=number_ticks(place), legend=legend) if place else None


def _tensors(worst: list[ComparedTensor]) -> Table | None:
    rows = [
        (
            tensor.param,
            tensor.key,
            "" if tensor.num_different is None else f"{tensor.num_different:,}",
            "" if tensor.num_elements is None else f"{tensor.num_elements:,}",
            "" if tensor.max_abs is None else f"{tensor.max_abs:.3g}",
            "" if tensor.max_ulp is None else f"{tensor.max_ulp:,}",
            "" if tensor.relative_norm is None else f"{tensor.relative_norm:.3g}",
            _notes(tensor),
        )
        for tensor in worst[:2000]
    ]
    numbers = dict.fromkeys(("different", "of", "largest", "in ulp", "relative norm"), "right")
    return table({"parameter": "name", "key": "", **numbers, "notes": ""}, rows, total=len(worst))


def _notes(tensor: ComparedTensor) -> str:
    notes = []
    if tensor.shape.a != tensor.shape.b:
        notes.append(f"shape {tensor.shape.a} and {tensor.shape.b}")
    if tensor.dtype.a != tensor.dtype.b:
        notes.append(f"{tensor.dtype.a} and {tensor.dtype.b}")
    if tensor.num_nonfinite:
        notes.append(f"{tensor.num_nonfinite:,} NaN or infinite")
    if tensor.num_sign_changed:
        notes.append(f"{tensor.num_sign_changed:,} of another sign")
    return "; ".join(notes)


def _values(values: Sequence[Difference]) -> Table | None:
    return table({"what": "", "A": "", "B": ""}, [(one.what, one.a or "none", one.b or "none") for one in values])
