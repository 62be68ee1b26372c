"""The files of ranks with their damage at its place, as drawings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.file_names import parse_rank_file
from zeroelastic.cli.documents.checkpoints import Problem, VerifiedFile
from zeroelastic.cli.html.figures.plot import key
from zeroelastic.cli.html.figures.rank_map import draw_rank_map
from zeroelastic.cli.html.figures.scale import byte_ticks
from zeroelastic.cli.html.figures.strips import DAMAGE, DAMAGED_SOMEWHERE, Piece, Strip, draw_strips
from zeroelastic.cli.html.page import Figure
from zeroelastic.errors import counted

_MOST_FILES = 16
_MOST_PIECES = 200
_KINDS = {"optimizer": "optimizer", "model": "model", "whole_model": "model"}


def draw_damage(files: Sequence[VerifiedFile], problems: Sequence[Problem], world_size: int) -> tuple[Figure, ...]:
    """A map of all ranks, where there are many, and the files with problems, or all where there are few."""
    by_file: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        if problem.file:
            by_file[problem.file].append(problem)
    figures = []
    known = {file.name: file for file in files}
    if len(files) > _MOST_FILES and world_size:
        figures.append(draw_rank_map("Ranks, and those with problems in their files", world_size, _by_rank(by_file)))
    names = sorted({*known, *by_file}, key=lambda name: _order(name))
    if len(names) > _MOST_FILES:
        names = [name for name in names if name in by_file]
    if names:
        figures.append(_draw_files(names[:_MOST_FILES], len(names), known, by_file))
    return tuple(figures)


def _order(name: str) -> tuple[bool, int, str]:
    said = parse_rank_file(name)
    return (said is None, 0 if said is None else said.rank, name)


def _by_rank(by_file: Mapping[str, Sequence[Problem]]) -> dict[int, str]:
    found: dict[int, list[str]] = defaultdict(list)
    for name, problems in by_file.items():
        said = parse_rank_file(name)
        if said is not None:
            params = sorted({problem.param for problem in problems if problem.param})
            found[said.rank].append(f"{name}, {params[0]}" if params else name)
    return {rank: " and ".join(texts) for rank, texts in found.items()}


def _draw_files(
    names: Sequence[str], total: int, known: Mapping[str, VerifiedFile], by_file: Mapping[str, Sequence[Problem]]
) -> Figure:
    end = max((known[name].bytes for name in names if name in known), default=0) or 1
    strips = [_strip(name, known.get(name), by_file.get(name, ()), end) for name in names]
    notes = (f"{len(names)} of {total:,} files with problems are drawn.",) if len(names) < total else ()
    entries = [("part-a", "bytes of a file")]
    if any(name in by_file for name in names):
        entries += [(DAMAGE, "damaged bytes"), (DAMAGED_SOMEWHERE, "missing, or damaged where it is not known")]
    return draw_strips(
        "Files of the ranks, with damage at its place",
        strips,
        end=end,
        ticks=byte_ticks(end),
        title="bytes of the file",
        legend=key(*entries),
        notes=notes,
    )


def _strip(name: str, file: VerifiedFile | None, problems: Sequence[Problem], end: int) -> Strip:
    said = parse_rank_file(name)
    label = name if said is None else f"{said.rank:,} {_KINDS[said.kind]}"
    if len(label) > 20:
        label = f"{label[:19]}…"
    pieces = []
    size = end if file is None else file.bytes
    placed = [problem for problem in problems if problem.offset is not None and file is not None]
    others = [problem.sentence for problem in problems if problem not in placed]
    if others:
        pieces.append(Piece(0, size, DAMAGED_SOMEWHERE, " ".join(others[:3])))
    elif file is not None:
        state = counted(len(problems), "problem") if problems else "no problem"
        pieces.append(Piece(0, size, "part-a", f"{name}: {format_size(size)}, {state}"))
    for problem in placed[:_MOST_PIECES]:
        begin = min(problem.offset or 0, size)
        pieces.append(Piece(begin, min(begin + max(problem.bytes or 0, 1), size), DAMAGE, problem.sentence))
    return Strip(label, tuple(pieces), bad=bool(problems))
