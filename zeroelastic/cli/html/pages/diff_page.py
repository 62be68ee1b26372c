"""The report of ``zeroelastic diff``."""

from __future__ import annotations

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.documents.checkpoints import Diff, Difference, DifferingTensor
from zeroelastic.cli.html.figures.bars import Bar, draw_bars
from zeroelastic.cli.html.figures.plot import key
from zeroelastic.cli.html.figures.scale import number_ticks
from zeroelastic.cli.html.figures.strips import Piece, Strip, draw_strips
from zeroelastic.cli.html.page import Cell, Figure, Page, Section, Table, Tone, cells, facts, items, sections, table
from zeroelastic.errors import counted

_WEIGHTS = ("fp32", "frozen")
_DRAWN = 12


def diff_page(found: Diff) -> Page:
    """The page: whether the two are equal, which tensors differ and how far, and what else differs."""
    tone, sentence = _answer(found)
    worst = sorted(found.tensors, key=_badness)
    roots = found.content_root
    return Page(
        "diff",
        f"{found.a} and {found.b}",
        tone,
        sentence,
        facts(
            ("A", found.a),
            ("B", found.b),
            ("tensors that both have", f"{found.num_tensors:,}"),
            ("equal bit for bit", f"{found.num_equal:,}"),
            ("bytes compared", format_size(found.bytes_read)),
            ("recorded root of A", None if roots.a is None else roots.a[:12]),
            ("recorded root of B", None if roots.b is None else roots.b[:12]),
        ),
        sections(
            Section("Notes", items("note", _about_records(found))),
            Section("Tensors", (*_overview(found), *_drawn(worst), *_tensors(worst))),
            Section("Only on one side", _only(found)),
            Section("Other state", _values("What a resumed run would feel", found.state)),
            Section("How they were saved", _values("This does not make them differ", found.saving)),
        ),
    )


def _about_records(found: Diff) -> list[str]:
    if found.tensors and found.content_root.a is not None and found.content_root.a == found.content_root.b:
        return ["The commit records have the same content root, so one of the two is not what was saved: verify both."]
    return []


def _answer(found: Diff) -> tuple[Tone, str]:
    if found.ok:
        return "good", f"Equal: all {counted(found.num_tensors, 'tensor')} bit for bit, and all other state."
    others = counted(len(found.state), "other value")
    if found.weights_equal:
        what = [f"{counted(len(found.tensors), 'tensor')} of optimizer state"] if found.tensors else []
        what += [others] if found.state else []
        what += ["what only one side has"] if found.only_a or found.only_b else []
        return "bad", f"The weights are equal bit for bit; different are {' and '.join(what)}."
    weights = [tensor for tensor in found.tensors if tensor.key in _WEIGHTS]
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


def _badness(tensor: DifferingTensor) -> tuple[bool, float, float, str, str]:
    """What sorts the worst difference first: what cannot be compared, then by relative norm."""
    share = _share(tensor)
    norm = tensor.relative_norm
    return (norm is not None, -(norm or 0.0), -(share or 0.0), tensor.param, tensor.key)


def _share(tensor: DifferingTensor) -> float | None:
    """Different elements as a share of all."""
    if tensor.num_different is None or not tensor.num_elements:
        return None
    return tensor.num_different / tensor.num_elements


def _overview(found: Diff) -> tuple[Figure, ...]:
    counts = (
        ("part-c", "equal bit for bit", found.num_equal),
        ("hue-2", "different", len(found.tensors)),
        ("hue-4", "only in A", len(found.only_a)),
        ("hue-5", "only in B", len(found.only_b)),
    )
    end = sum(count for *_, count in counts)
    if not end:
        return ()
    pieces: list[Piece] = []
    place = 0
    for style, what, count in counts:
        if count:
            pieces.append(Piece(place, place + count, style, f"{counted(count, 'tensor')} {what}"))
        place += count
    legend = key(*((style, f"{what}: {count:,}") for style, what, count in counts if count))
    name = "How many tensors are equal"
    return (draw_strips(name, [Strip("tensors", tuple(pieces))], end=end, ticks=number_ticks(end), legend=legend),)


def _drawn(worst: list[DifferingTensor]) -> tuple[Figure, ...]:
    norms = [(tensor, tensor.relative_norm) for tensor in worst if tensor.relative_norm][:_DRAWN]
    most = max((norm for _, norm in norms if norm is not None), default=0.0)
    if not most:
        return ()
    bars = [Bar(f"{tensor.param} · {tensor.key}", (norm or 0.0) / most, f"{norm:.3g}") for tensor, norm in norms]
    name = "Norm of the difference, relative to that of A" + (
        "" if len(norms) == len(worst) else f": the {len(norms)} tensors with the largest"
    )
    return (draw_bars(name, bars, long_labels=True),)


def _tensors(worst: list[DifferingTensor]) -> tuple[Table, ...]:
    if not worst:
        return ()
    rows = [
        (
            Cell(tensor.param, name=True),
            Cell(tensor.key),
            Cell("" if tensor.num_different is None else f"{tensor.num_different:,}"),
            Cell("" if tensor.num_elements is None else f"{tensor.num_elements:,}"),
            Cell("" if tensor.max_abs is None else f"{tensor.max_abs:.3g}"),
            Cell("" if tensor.max_ulp is None else f"{tensor.max_ulp:,}"),
            Cell("" if tensor.relative_norm is None else f"{tensor.relative_norm:.3g}"),
            Cell(_notes(tensor)),
        )
        for tensor in worst[:2000]
    ]
    columns = ["parameter", "key", ">different", ">of", ">largest", ">in ulp", ">relative norm", "notes"]
    return (table("Tensors that differ, the worst first", columns, rows, order="worst", total=len(worst)),)


def _notes(tensor: DifferingTensor) -> str:
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


def _only(found: Diff) -> tuple[Table, ...]:
    rows = [
        (Cell(one.param, name=True), Cell(one.key), Cell(f"only in {side}", "bad"))
        for side, only in (("A", found.only_a), ("B", found.only_b))
        for one in only
    ]
    return (table("Tensors that one side alone has", ["parameter", "key", "where"], rows),) if rows else ()


def _values(caption: str, values: list[Difference]) -> tuple[Table, ...]:
    rows = [cells(value.what, value.a or "none", value.b or "none") for value in values]
    return (table(caption, ["what", "A", "B"], rows),) if rows else ()
