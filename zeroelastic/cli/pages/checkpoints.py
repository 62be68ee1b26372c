"""The pages on checkpoints, of ``inspect``, ``verify``, ``plan`` and ``diff``: a sentence, figures, tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.tag_files import parse_rank_file
from zeroelastic.checkpoint.tag_headers import Problem
from zeroelastic.cli.pages.figures import (
    DAMAGE,
    DAMAGED_SOMEWHERE,
    Bar,
    Bars,
    Bins,
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
    rank_map,
    strips,
    table,
)
from zeroelastic.core.layout import Int64Array, Layout, Param
from zeroelastic.errors import counted, some
from zeroelastic.verbs.diff.diff import Difference, DiffReport
from zeroelastic.verbs.diff.tensors import ComparedTensor
from zeroelastic.verbs.inspect.report import InspectedParam, InspectedTopology, InspectReport, SavedLayout
from zeroelastic.verbs.plan.plan import PlanReport
from zeroelastic.verbs.verify.report import VerifiedFile, VerifyReport

_MOST_RANKS = 24  # with a strip in the layout
_MOST_PIECES = (
    120  # in a strip of the layout: neighbouring parameters that are smaller than this share are put together
)
_MOST_SUB_GROUPS = 40  # more have one colour
_MOST_FILES = 16
_MOST_DAMAGES = 200  # of a file
_MOST_NORMS = 12  # that are drawn of a diff


def inspect_view(found: InspectReport) -> dict[str, object]:
    """What the checkpoint is, the buffers of its ranks, its state, its parameters."""
    tone, sentence = _inspect_answer(found)
    precision = [(found.model_dtype, "model"), (found.master_dtype, "master weights")]
    record = {
        "present": f"content root {str(found.record.content_root)[:12]}",
        "absent": "none: the contents cannot be verified",
    }
    most = max((state.bytes for state in found.state.values()), default=0)
    bars = [
        Bar(f"{key} ({', '.join(state.dtypes)})", state.bytes / most, format_size(state.bytes))
        for key, state in found.state.items()
        if most
    ]
    return {
        "title": found.path,
        "tone": tone,
        "sentence": sentence,
        "precision": ", ".join(f"{dtype} {what}" for dtype, what in precision if dtype),
        "versions": ", ".join(f"{name} {version}" for name, version in found.versions if version),
        "record": record.get(found.record.state, found.record.state),
        "remedy": _without_code(found.remedy),
        "state": Bars(tuple(bars)) if bars else None,
        "groups": table(
            {"group": "", "parameters": "right", "elements": "right", "hyper-parameters": ""},
            [
                (number, group.num_params, group.numel, _options(group.options))
                for number, group in enumerate(found.groups)
            ],
        ),
        "scalars": table(
            {"key": "", "value": ""},
            [(key, ", ".join(f"{one.value} ({one.kind})" for one in values)) for key, values in found.scalars.items()],
        ),
        "params": _params(found.params),
        "cuts": _cuts(found.topology),
        "files": _standing_out(found),
        **_layout_figures(found),
    }


def _options(options: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if value not in (None, False))


def _without_code(remedy: str | None) -> list[str]:
    return [] if remedy is None else [remedy.replace("`", "")]


def _inspect_answer(found: InspectReport) -> tuple[Tone, str]:
    if found.problems:
        more = len(found.problems) - 1
        return "bad", f"This checkpoint is invalid: {found.problems[0]}" + (f" ({more:,} more below.)" if more else "")
    if found.unsupported:
        return "bad", f"zeroelastic does not work on this checkpoint: {found.unsupported[0]}"
    saved = {None: "a checkpoint", "elastic": "an elastic checkpoint", "rigid": "a rigid checkpoint"}[found.format]
    by = "" if found.world_size is None else f", saved by {counted(found.world_size, 'rank')}"
    stage = "" if found.stage is None else f" at ZeRO stage {found.stage}"
    step = "" if found.step is None else f" of step {found.step:,}"
    size = "" if found.totals.state_bytes is None else f" with {format_size(found.totals.state_bytes)} of state"
    params = counted(found.totals.params, "parameter")
    return (
        "good",
        f"This is {saved}{step}{by}{stage}: {params}{size}. Its headers show no problem; no weights were read.",
    )


def _cuts(topology: InspectedTopology | None) -> Table | None:
    """The parameters that ranks have slices of."""
    cuts = [] if topology is None else topology.cuts
    rows = [
        (cut.name, "\N{MULTIPLICATION SIGN}".join(map(str, cut.shape)), cut.sentence, cut.ranks) for cut in cuts[:2000]
    ]
    return table({"name": "name", "shape": "", "slices": "", "ranks": "right"}, rows, total=len(cuts))


def _params(params: list[InspectedParam]) -> Table | None:
    largest = sorted(params, key=lambda param: (-(param.bytes or 0), -param.numel))
    rows = [
        (
            param.name,
            param.kind,
            "\N{MULTIPLICATION SIGN}".join(map(str, param.shape)) or "scalar",
            None if param.tied_to else param.numel,
            None if param.bytes is None or param.tied_to else format_size(param.bytes),
            param.group,
            None if param.sub_group is None else str(param.sub_group),
            param.tied_to,
        )
        for param in largest[:2000]
    ]
    columns = {"name": "name", "kind": "", "shape": "", "elements": "right", "state": "right", "group": "right"}
    return table({**columns, "sub-group": "right", "tied to": "name"}, rows, total=len(params))


def _standing_out(found: InspectReport) -> Table | None:
    files = found.files
    rows: list[tuple[object, ...]] = [(name, Cell("missing", "bad")) for name in files.missing]
    kinds = {"of no rank": files.stale, "not known": files.odd, "left over": files.leftovers, "folder": files.folders}
    rows += [(name, kind) for kind, names in kinds.items() for name in names]
    more = max(files.num_missing - len(files.missing), 0)
    return table({"name": "name", "what it is": ""}, rows, total=len(rows) + more)


def _layout_figures(found: InspectReport) -> dict[str, Chart | None]:
    """A map of the ranks whose files are missing, where not all ranks have a strip, and the strips."""
    world_size = found.world_size or 0
    tensor_size = 1 if found.topology is None else found.topology.tensor_parallel
    missing: dict[int, list[str]] = defaultdict(list)
    for name in found.files.missing:
        file = parse_rank_file(name)
        rank = -1 if file is None else file.rank * tensor_size + file.tp_rank
        if 0 <= rank < world_size:
            missing[rank].append(name)
    no_optimizer = {rank for rank, names in missing.items() if any("optim_states" in name for name in names)}
    mapped = layout = None
    if missing and (found.layout is None or world_size > _MOST_RANKS):
        mapped = rank_map(world_size, {rank: f"{' and '.join(names)} missing" for rank, names in missing.items()})
    if world_size and found.layout is not None and any(param.offset is not None for param in found.params):
        layout = layout_chart(found.layout, found.params, world_size, missing=no_optimizer, marked=missing)
    return {"missing_ranks": mapped, "layout": layout}


def layout_chart(
    layout: SavedLayout,
    params: Sequence[InspectedParam],
    world_size: int,
    *,
    missing: Collection[int],
    marked: Collection[int],
) -> Chart:
    """Which parameters the buffers of each rank hold, and where: a strip for each rank.

    Ranks in ``missing`` have no optimizer file, the ``marked`` lack some file.
    """
    held = _held(layout, params, world_size)
    bases = np.cumsum(held.sub_group_numel) - held.sub_group_numel
    end = int(held.sub_group_numel.sum())
    every = Bins.at_most(world_size, _MOST_RANKS).step
    shown = sorted({*range(0, world_size, every), world_size - 1, *sorted(marked)[: _MOST_RANKS // 2]})
    drawn = []
    for rank in shown:
        if rank in missing:
            piece = Piece(0, end, DAMAGE, f"rank {rank:,}: its optimizer file is missing")
            drawn.append(Strip(f"rank {rank:,}", (piece,), bad=True))
            continue
        pieces = [*_padding(rank, held, bases), *_pieces(rank, held, bases, end)]
        drawn.append(Strip(f"rank {rank:,}", pieces, bad=rank in marked))
    notes = [
        f"All sub-groups of a rank end to end, {end:,} elements; a colour changes where a parameter ends, and its hue "
        "from sub-group to sub-group. Frozen parameters are not in it."
    ]
    notes += [f"{len(shown)} of {world_size:,} ranks are drawn."] if len(shown) < world_size else []
    notes += ["A rank with a sign lacks files, which are listed below."] if marked else []
    notes += ["Neighbouring small parameters are put together."] if held.num_params > _MOST_PIECES else []
    legend = [("part-a", "parameters")]
    legend += [("part-c", "of every second sub-group")] if held.num_sub_groups > 1 else []
    legend += [("padding", "padding")]
    legend += [(DAMAGE, "missing")] if missing else []
    return strips(drawn, end=end, ticks=number_ticks(end), title="elements", legend=legend, notes=notes)


def _held(layout: SavedLayout, params: Sequence[InspectedParam], world_size: int) -> Layout:
    """The layout of the parameters whose places are known, by sub-group and place."""
    known = [
        (one.sub_group, one.offset, one.numel, Param(one.name, tuple(one.shape)))
        for one in params
        if one.sub_group is not None and one.offset is not None
    ]
    known.sort(key=lambda one: one[:2])
    sub_group, place, numel = np.array([one[:3] for one in known], dtype=np.int64).reshape(-1, 3).T
    sizes = np.array(layout.sub_group_numel, dtype=np.int64)
    start = np.zeros_like(place)
    origin, part, offset = (
        (start, -(-numel // world_size), place) if layout.split == "param" else (place, sizes[sub_group], start)
    )
    return Layout(world_size, tuple(one[3] for one in known), numel, sub_group, origin, part, offset, sizes)


def _padding(rank: int, held: Layout, bases: Int64Array) -> list[Piece]:
    """The sub-groups that are not full; their parameters are drawn above."""
    sizes, owned = held.sub_group_numel.tolist(), held.owned_numels(rank)
    if len(sizes) > _MOST_SUB_GROUPS:
        sizes, owned, bases = [sum(sizes)], [sum(owned)], bases[:1]
    return [
        Piece(base, base + size, "padding", f"rank {rank:,}: {counted(size - have, 'element')} of padding")
        for base, size, have in zip(bases.tolist(), sizes, owned, strict=True)
        if have < size
    ]


def _pieces(rank: int, held: Layout, bases: Int64Array, end: int) -> list[Piece]:
    """The parameters of one rank, neighbours put together where they are too small to be seen alone."""
    sub_group, num_sub_groups = held.sub_group, held.num_sub_groups
    begin, length = bases[sub_group] + held.buffer_offset(rank), held.owned(rank)[1]
    have = np.flatnonzero(length)
    if not len(have):
        return []
    together = begin[have] * _MOST_PIECES // max(end, 1) if len(have) > _MOST_PIECES else np.arange(len(have))
    if num_sub_groups <= _MOST_SUB_GROUPS:
        together = together * num_sub_groups + sub_group[have]
    first = np.flatnonzero(np.r_[True, np.diff(together) != 0])
    last = np.r_[first[1:], len(have)] - 1
    elements = np.add.reduceat(length[have], first)
    pieces = []
    for number, (one, other, count) in enumerate(
        zip(have[first].tolist(), have[last].tolist(), elements.tolist(), strict=True)
    ):
        odd = int(sub_group[one]) % 2 if num_sub_groups <= _MOST_SUB_GROUPS else 0
        style = ("part-a", "part-b", "part-c", "part-d")[2 * odd + number % 2]
        num = int(last[number] - first[number]) + 1
        what, last_name = held.params[one].name, held.params[other].name
        if num > 1:
            what = f"{num:,} parameters from {what} to {last_name}"
        if num_sub_groups > 1:
            what = f"sub-group {int(sub_group[one]):,}, {what}"
        tip = f"rank {rank:,}, {what}: {counted(count, 'element')}"
        pieces.append(Piece(int(begin[one]), int(begin[other] + length[other]), style, tip))
    return pieces


def verify_view(found: VerifyReport) -> dict[str, object]:
    """Whether the checkpoint is valid, its files with damage at its place, what was checked."""
    tone, sentence = _verify_answer(found)
    rows = [(Cell(one.sentence, "bad"), one.param, one.key, one.offset, one.bytes) for one in found.problems]
    columns = {"problem": "", "parameter": "name", "state key": "", "at byte": "right", "bytes": "right"}
    return {
        "title": found.path,
        "tone": tone,
        "sentence": sentence,
        "rate": found.bytes_read / found.read_seconds if found.read_seconds else 0.0,
        "remedy": _without_code(found.remedy),
        "problems": table(columns, rows),
        **_damage(found.files, found.problems, found.world_size),
    }


def _verify_answer(found: VerifyReport) -> tuple[Tone, str]:
    if found.ok and found.mode == "quick":
        return "note", "Nothing is wrong with names and sizes; the contents of the files were not read (--quick)."
    if found.ok and found.unsupported:
        return "note", "Sound by its checksums, and not supported: only a training job resumes it, as said below."
    if found.ok:
        compared = "" if found.recorded_root is None else ", and the contents are those of the commit record"
        files = counted(found.num_files, "file")
        return "good", f"Valid: every byte of {files} was read; nothing is damaged or missing{compared}."
    files_named = sorted({problem.file for problem in found.problems if problem.file})
    params = sorted({problem.param for problem in found.problems if problem.param})
    where = f" in {some(files_named, 2)}" if files_named else ""
    what = f"; {counted(len(params), 'parameter')} concerned: {some(params, 2)}" if params else ""
    return "bad", f"Invalid: {counted(len(found.problems), 'problem')}{where}{what}. {found.problems[0].sentence}"


def _damage(files: Iterable[VerifiedFile], problems: Iterable[Problem], world_size: int) -> dict[str, Chart | None]:
    """A map of all ranks, where there are many, and the files with problems, or all where there are few."""
    by_file: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        if problem.file:
            by_file[problem.file].append(problem)
    known = {file.name: file for file in files}
    mapped = rank_map(world_size, _by_rank(by_file)) if len(known) > _MOST_FILES and world_size else None
    names = sorted({*known, *by_file}, key=_file_order)
    if len(names) > _MOST_FILES:
        names = [name for name in names if name in by_file]
    shown = names[:_MOST_FILES]
    if not shown:
        return {"ranks": mapped, "files": None}
    end = max((known[name].bytes for name in shown if name in known), default=0) or 1
    legend = [("part-a", "bytes of a file")]
    if any(name in by_file for name in shown):
        legend += [(DAMAGE, "damaged bytes"), (DAMAGED_SOMEWHERE, "missing, or damaged where it is not known")]
    few = len(shown) < len(names)
    drawn = strips(
        [_file_strip(name, known.get(name), by_file.get(name, ()), end) for name in shown],
        end=end,
        ticks=byte_ticks(end),
        title="bytes of the file",
        legend=legend,
        notes=[f"{len(shown)} of {len(names):,} files with problems are drawn."] if few else [],
    )
    return {"ranks": mapped, "files": drawn}


def _file_order(name: str) -> tuple[bool, int, str]:
    file = parse_rank_file(name)
    return (file is None, 0 if file is None else file.rank, name)


def _by_rank(by_file: Mapping[str, Sequence[Problem]]) -> dict[int, str]:
    found: dict[int, list[str]] = defaultdict(list)
    for name, problems in by_file.items():
        file = parse_rank_file(name)
        if file is not None:
            params = sorted({problem.param for problem in problems if problem.param})
            found[file.rank].append(f"{name}, {params[0]}" if params else name)
    return {rank: " and ".join(texts) for rank, texts in found.items()}


def _file_strip(name: str, file: VerifiedFile | None, problems: Sequence[Problem], end: int) -> Strip:
    named = parse_rank_file(name)
    label = name if named is None else f"{named.rank:,} {named.kind.removeprefix('whole_')}"
    label = f"{label[:19]}…" if len(label) > 20 else label
    pieces = []
    size = end if file is None else file.bytes
    placed = [problem for problem in problems if problem.offset is not None and file is not None]
    others = [problem.sentence for problem in problems if problem not in placed]
    if others:
        pieces.append(Piece(0, size, DAMAGED_SOMEWHERE, " ".join(others[:3])))
    elif file is not None:
        state = counted(len(problems), "problem") if problems else "no problem"
        pieces.append(Piece(0, size, "part-a", f"{name}: {format_size(size)}, {state}"))
    for problem in placed[:_MOST_DAMAGES]:
        begin = min(problem.offset or 0, size)
        pieces.append(Piece(begin, min(begin + max(problem.bytes or 0, 1), size), DAMAGE, problem.sentence))
    return Strip(label, pieces, bad=bool(problems))


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
            rank.rank,
            *map(format_size, (rank.bytes_owned, rank.bytes_read, rank.header_bytes)),
            rank.optimizer_files + rank.model_files,
            rank.segments,
            rank.requests,
            format_size(rank.memory),
        )
        for rank in (plan.ranks if len(plan.ranks) <= 40 else most[:2000])
    ]
    titles = ("rank", "owns", "reads", "headers", "files", "segments", "requests", "memory")
    return table(dict.fromkeys(titles, "right"), rows, total=len(plan.ranks))


def diff_view(found: DiffReport) -> dict[str, object]:
    """Whether the two are equal, which tensors differ and how far, and what else differs."""
    tone, sentence = _diff_answer(found)
    worst = sorted(found.tensors, key=attrgetter("difference_key"))
    norms = [(tensor, tensor.relative_norm) for tensor in worst if tensor.relative_norm][:_MOST_NORMS]
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
            tensor.num_different,
            tensor.num_elements,
            None if tensor.max_abs is None else f"{tensor.max_abs:.3g}",
            tensor.max_ulp,
            None if tensor.relative_norm is None else f"{tensor.relative_norm:.3g}",
            _notes(tensor),
        )
        for tensor in worst[:2000]
    ]
    numbers = dict.fromkeys(("different", "of", "largest", "in ulp", "relative norm"), "right")
    return table({"parameter": "name", "key": "", **numbers, "notes": ""}, rows, total=len(worst))


def _notes(tensor: ComparedTensor) -> str:
    notes = tensor.other_forms
    if tensor.num_nonfinite:
        notes.append(f"{tensor.num_nonfinite:,} NaN or infinite")
    if tensor.num_sign_changed:
        notes.append(f"{tensor.num_sign_changed:,} of another sign")
    return "; ".join(notes)


def _values(values: Sequence[Difference]) -> Table | None:
    return table({"what": "", "A": "", "B": ""}, [(one.what, one.a or "none", one.b or "none") for one in values])
