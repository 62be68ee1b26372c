"""The report of ``zeroelastic inspect``."""

from __future__ import annotations

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.file_names import parse_rank_file
from zeroelastic.cli.documents.checkpoints import Inspect, InspectedParam
from zeroelastic.cli.html.figures.bars import Bar, draw_bars
from zeroelastic.cli.html.figures.rank_map import draw_rank_map
from zeroelastic.cli.html.page import Cell, Figure, Page, Section, Table, Tone, cells, facts, items, sections, table
from zeroelastic.cli.html.pages.saved_layout import draw_layout
from zeroelastic.errors import counted

_RANKS_IN_THE_LAYOUT = 24


def inspect_page(found: Inspect) -> Page:
    """The page: what the checkpoint is, the buffers of its ranks, its state, its parameters."""
    tone, sentence = _answer(found)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions if version)
    totals = found.totals
    return Page(
        "inspect",
        found.path,
        tone,
        sentence,
        facts(
            ("format", found.format),
            ("ZeRO stage", found.stage),
            ("ranks", None if found.world_size is None else f"{found.world_size:,}"),
            ("step", found.step),
            ("samples", None if found.samples is None else f"{found.samples:,}"),
            ("global batch", found.train_batch_size),
            (
                "parameters",
                f"{totals.params:,} ({totals.frozen_params:,} frozen)"
                if totals.frozen_params
                else f"{totals.params:,}",
            ),
            ("elements", f"{totals.numel:,}"),
            ("state", None if totals.state_bytes is None else format_size(totals.state_bytes)),
            ("on disk", f"{format_size(totals.disk_bytes)} in {counted(totals.files, 'file')}"),
            ("sub-groups of a rank", found.num_sub_groups),
            ("precision", _precision(found)),
            ("saved by", found.framework),
            ("versions", versions),
            ("commit record", _record(found)),
            ("scheduler", None if found.scheduler is None else "saved" if found.scheduler else "none"),
            ("client state", ", ".join(found.client_state or ())),
        ),
        sections(
            Section("Problems", (*items("bad", found.problems), *items("bad", found.unsupported))),
            Section("What to do", items("plain", [] if found.remedy is None else [found.remedy.replace("`", "")])),
            Section("Notes", items("note", found.notes)),
            Section("Layout", _layout(found)),
            Section("State", _state(found)),
            Section("Parameters", _params(found.params)),
            Section("Files", _files(found)),
        ),
    )


def _answer(found: Inspect) -> tuple[Tone, str]:
    if found.problems:
        more = len(found.problems) - 1
        return "bad", f"This checkpoint is invalid: {found.problems[0]}" + (f" ({more:,} more below.)" if more else "")
    if found.unsupported:
        return "bad", f"zeroelastic does not work on this checkpoint: {found.unsupported[0]}"
    saved = (
        "a checkpoint"
        if found.format is None
        else f"an {found.format} checkpoint"
        if found.format == "elastic"
        else f"a {found.format} checkpoint"
    )
    by = "" if found.world_size is None else f", saved by {counted(found.world_size, 'rank')}"
    stage = "" if found.stage is None else f" at ZeRO stage {found.stage}"
    step = "" if found.step is None else f" of step {found.step:,}"
    size = "" if found.totals.state_bytes is None else f" with {format_size(found.totals.state_bytes)} of state"
    params = counted(found.totals.params, "parameter")
    return (
        "good",
        f"This is {saved}{step}{by}{stage}: {params}{size}. Its headers show no problem; no weights were read.",
    )


def _precision(found: Inspect) -> str | None:
    parts = [
        f"{found.model_dtype} model" if found.model_dtype else "",
        f"{found.master_dtype} master weights" if found.master_dtype else "",
    ]
    return ", ".join(part for part in parts if part)


def _record(found: Inspect) -> str:
    if found.record.state == "present":
        return f"content root {str(found.record.content_root)[:12]}"
    return "none: the contents cannot be verified" if found.record.state == "absent" else found.record.state


def _layout(found: Inspect) -> tuple[Figure | str, ...]:
    if found.world_size is None:
        return ()
    missing: dict[int, str] = {}
    for name in found.files.missing:
        said = parse_rank_file(name)
        if said is not None and said.rank < found.world_size:
            missing[said.rank] = f"{missing[said.rank]} and {name}" if said.rank in missing else name
    no_optimizer = {rank for rank, names in missing.items() if "optim_states" in names}
    blocks: list[Figure | str] = []
    if missing and (found.layout is None or found.world_size > _RANKS_IN_THE_LAYOUT):
        sentences = {rank: f"{names} missing" for rank, names in missing.items()}
        blocks.append(draw_rank_map("Ranks whose files are missing", found.world_size, sentences))
    if found.layout is not None and any(param.offset is not None for param in found.params):
        blocks.append(draw_layout(found.layout, found.params, found.world_size, missing=no_optimizer, marked=missing))
    return tuple(blocks)


def _state(found: Inspect) -> tuple[Figure | Table, ...]:
    blocks: list[Figure | Table] = []
    most = max((state.bytes for state in found.state.values()), default=0)
    if most:
        blocks.append(
            draw_bars(
                "Bytes of each state key",
                [
                    Bar(f"{key} ({', '.join(state.dtypes)})", state.bytes / most, format_size(state.bytes))
                    for key, state in found.state.items()
                ],
            )
        )
    if found.groups:
        rows = [
            cells(
                str(number),
                f"{group.num_params:,}",
                f"{group.numel:,}",
                ", ".join(f"{key} {value}" for key, value in group.options.items() if value not in (None, False)),
            )
            for number, group in enumerate(found.groups)
        ]
        blocks.append(table("Optimizer groups", ["group", ">parameters", ">elements", "hyper-parameters"], rows))
    if found.scalars:
        rows = [
            cells(key, ", ".join(f"{scalar.value} ({scalar.kind})" for scalar in scalars))
            for key, scalars in found.scalars.items()
        ]
        blocks.append(table("Scalars of the optimizer", ["key", "value"], rows))
    return tuple(blocks)


def _params(params: list[InspectedParam]) -> tuple[Table, ...]:
    if not params:
        return ()
    largest = sorted(params, key=lambda param: (-(param.bytes or 0), -param.numel))
    rows = [
        (
            Cell(param.name, name=True),
            Cell(param.kind),
            Cell("×".join(map(str, param.shape)) or "scalar"),  # noqa: RUF001
            Cell("" if param.tied_to else f"{param.numel:,}"),
            Cell("" if param.bytes is None or param.tied_to else format_size(param.bytes)),
            Cell("" if param.group is None else str(param.group)),
            Cell("" if param.sub_group is None else str(param.sub_group)),
            Cell(param.tied_to or "", name=True),
        )
        for param in largest[:2000]
    ]
    columns = ["name", "kind", "shape", ">elements", ">state", ">group", ">sub-group", "tied to"]
    return (table("Parameters, the largest first", columns, rows, order="largest", total=len(params)),)


def _files(found: Inspect) -> tuple[Table, ...]:
    files = found.files
    rows = [(Cell(name, name=True), Cell("missing", "bad")) for name in files.missing]
    kinds = {"of no rank": files.stale, "not known": files.odd, "left over": files.leftovers, "folder": files.folders}
    rows += [(Cell(name, name=True), Cell(kind)) for kind, names in kinds.items() for name in names]
    more = max(files.num_missing - len(files.missing), 0)
    return (table("Files that stand out", ["name", "what it is"], rows, total=len(rows) + more),) if rows else ()
