"""The pages on one checkpoint, of ``inspect`` and ``verify``: the sentence at the top, figures, rows of tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.checker import Problem
from zeroelastic.checkpoint.tag_files import parse_rank_file
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
    number_ticks,
    rank_map,
    strips,
    table,
)
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import counted
from zeroelastic.verbs.inspect.report import InspectedParam, InspectReport, SavedLayout
from zeroelastic.verbs.verify.report import VerifiedFile, VerifyReport

_MOST_RANKS = 24  # with a strip in the layout
_MOST_PIECES = (
    120  # in a strip of the layout: neighbouring parameters that are smaller than this share are put together
)
_MOST_SUB_GROUPS = 40  # more have one colour
_MOST_FILES = 16
_MOST_DAMAGES = 200  # of a file


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
                (
                    str(number),
                    f"{group.num_params:,}",
                    f"{group.numel:,}",
                    ", ".join(f"{key} {value}" for key, value in group.options.items() if value not in (None, False)),
                )
                for number, group in enumerate(found.groups)
            ],
        ),
        "scalars": table(
            {"key": "", "value": ""},
            [(key, ", ".join(f"{one.value} ({one.kind})" for one in values)) for key, values in found.scalars.items()],
        ),
        "params": _params(found.params),
        "files": _standing_out(found),
        **_layout_figures(found),
    }


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


def _params(params: list[InspectedParam]) -> Table | None:
    largest = sorted(params, key=lambda param: (-(param.bytes or 0), -param.numel))
    rows = [
        (
            param.name,
            param.kind,
            "\N{MULTIPLICATION SIGN}".join(map(str, param.shape)) or "scalar",
            "" if param.tied_to else f"{param.numel:,}",
            "" if param.bytes is None or param.tied_to else format_size(param.bytes),
            "" if param.group is None else str(param.group),
            "" if param.sub_group is None else str(param.sub_group),
            param.tied_to or "",
        )
        for param in largest[:2000]
    ]
    columns = {"name": "name", "kind": "", "shape": "", "elements": "right", "state": "right", "group": "right"}
    return table({**columns, "sub-group": "right", "tied to": "name"}, rows, total=len(params))


def _standing_out(found: InspectReport) -> Table | None:
    files = found.files
    rows: list[tuple[str | Cell, ...]] = [(name, Cell("missing", "bad")) for name in files.missing]
    kinds = {"of no rank": files.stale, "not known": files.odd, "left over": files.leftovers, "folder": files.folders}
    rows += [(name, kind) for kind, names in kinds.items() for name in names]
    more = max(files.num_missing - len(files.missing), 0)
    return table({"name": "name", "what it is": ""}, rows, total=len(rows) + more)


def _layout_figures(found: InspectReport) -> dict[str, Chart | None]:
    """A map of the ranks whose files are missing, where not all ranks have a strip, and the strips."""
    world_size = found.world_size or 0
    missing: dict[int, list[str]] = defaultdict(list)
    for name in found.files.missing:
        file = parse_rank_file(name)
        if file is not None and file.rank < world_size:
            missing[file.rank].append(name)
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
    placed = [param for param in params if param.sub_group is not None and param.offset is not None]
    rows = np.array([(param.numel, param.sub_group, param.offset) for param in placed], dtype=np.int64).reshape(-1, 3)
    order = np.lexsort((rows[:, 2], rows[:, 1]))
    names = [placed[i].name for i in order.tolist()]
    numel, sub_group, offset = rows[order].T
    sizes = np.array(layout.sub_group_numel, dtype=np.int64)
    bases = np.cumsum(sizes) - sizes
    end = int(sizes.sum())
    every = Bins.at_most(world_size, _MOST_RANKS).step
    shown = sorted({*range(0, world_size, every), world_size - 1, *sorted(marked)[: _MOST_RANKS // 2]})
    drawn = []
    for rank in shown:
        if rank in missing:
            piece = Piece(0, end, DAMAGE, f"rank {rank:,}: its optimizer file is missing")
            drawn.append(Strip(f"rank {rank:,}", (piece,), bad=True))
            continue
        begin, length = _owned(layout.split, numel, sub_group, offset, sizes[sub_group], rank, world_size)
        pieces = _padding(rank, sub_group, length, sizes, bases)
        pieces += _pieces(rank, names, sub_group, bases[sub_group] + begin, length, end, len(sizes))
        drawn.append(Strip(f"rank {rank:,}", pieces, bad=rank in marked))
    notes = [
        f"All sub-groups of a rank end to end, {end:,} elements; a colour changes where a parameter ends, and its hue "
        "from sub-group to sub-group. Frozen parameters are not in it."
    ]
    notes += [f"{len(shown)} of {world_size:,} ranks are drawn."] if len(shown) < world_size else []
    notes += ["A rank with a sign lacks files, which are listed below."] if marked else []
    notes += ["Neighbouring small parameters are put together."] if len(names) > _MOST_PIECES else []
    legend = [("part-a", "parameters")]
    legend += [("part-c", "of every second sub-group")] if len(sizes) > 1 else []
    legend += [("padding", "padding")]
    legend += [(DAMAGE, "missing")] if missing else []
    return strips(drawn, end=end, ticks=number_ticks(end), title="elements", legend=legend, notes=notes)


def _owned(
    split: str, numel: Int64Array, sub_group: Int64Array, offset: Int64Array, size: Int64Array, rank: int, ranks: int
) -> tuple[Int64Array, Int64Array]:
    """Where a rank's buffers have its part of each parameter, and how many elements that is."""
    if split == "param":
        part = -(-numel // ranks)
        return offset, np.clip(numel - part * rank, 0, part)
    begin = np.clip(offset - size * rank, 0, size)
    return begin, np.clip(offset + numel - size * rank, 0, size) - begin


def _padding(rank: int, sub_group: Int64Array, length: Int64Array, sizes: Int64Array, bases: Int64Array) -> list[Piece]:
    """The sub-groups that are not full; their parameters are drawn above."""
    if len(sizes) > _MOST_SUB_GROUPS:
        sub_group, sizes, bases = np.zeros_like(sub_group), sizes.sum(keepdims=True), bases[:1]
    owned = np.bincount(sub_group, weights=length, minlength=len(sizes)).astype(np.int64)
    return [
        Piece(base, base + size, "padding", f"rank {rank:,}: {counted(size - have, 'element')} of padding")
        for base, size, have in zip(bases.tolist(), sizes.tolist(), owned.tolist(), strict=True)
        if have < size
    ]


def _pieces(
    rank: int,
    names: Sequence[str],
    sub_group: Int64Array,
    begin: Int64Array,
    length: Int64Array,
    end: int,
    num_sub_groups: int,
) -> list[Piece]:
    """The parameters of one rank, neighbours put together where they are too small to be seen alone."""
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
        what = names[one] if num == 1 else f"{num:,} parameters from {names[one]} to {names[other]}"
        if num_sub_groups > 1:
            what = f"sub-group {int(sub_group[one]):,}, {what}"
        tip = f"rank {rank:,}, {what}: {counted(count, 'element')}"
        pieces.append(Piece(int(begin[one]), int(begin[other] + length[other]), style, tip))
    return pieces


def verify_view(found: VerifyReport) -> dict[str, object]:
    """Whether the checkpoint is valid, its files with damage at its place, what was checked."""
    tone, sentence = _verify_answer(found)
    mark = found.quarantine
    marked = (
        [] if mark is None else [f"Marked as damaged at {mark.marked_at} by zeroelastic {mark.version}: {mark.why}"]
    )
    marked += ["The mark was removed, because the checkpoint is valid."] if found.lifted else []
    rows = [
        (
            Cell(problem.sentence, "bad"),
            problem.param or "",
            problem.key or "",
            "" if problem.offset is None else f"{problem.offset:,}",
            "" if problem.bytes is None else f"{problem.bytes:,}",
        )
        for problem in found.problems
    ]
    columns = {"problem": "", "parameter": "name", "state key": "", "at byte": "right", "bytes": "right"}
    return {
        "title": found.path,
        "tone": tone,
        "sentence": sentence,
        "rate": found.bytes_read / found.read_seconds if found.read_seconds else 0.0,
        "remedy": _without_code(found.remedy),
        "marked": marked,
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
    where = f" in {_first_two(files_named)}" if files_named else ""
    what = f"; {counted(len(params), 'parameter')} concerned: {_first_two(params)}" if params else ""
    return "bad", f"Invalid: {counted(len(found.problems), 'problem')}{where}{what}. {found.problems[0].sentence}"


def _first_two(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2:,} more" if len(names) > 2 else "")


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
