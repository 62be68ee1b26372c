"""``zeroelastic inspect`` and ``plan``: describe a checkpoint, and who would read it at another world size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import (
    FAILED,
    INVALID,
    EpOption,
    ForceOption,
    HtmlOption,
    JsonOption,
    LikeOption,
    TagOption,
    TpOption,
    reports,
)
from zeroelastic.cli.view import Severity, Table, View, facts, row, sentences, what_moves, who_holds_what
from zeroelastic.errors import counted, some

if TYPE_CHECKING:
    from zeroelastic.verbs.inspect.report import InspectedParam, InspectedTensor, InspectReport
    from zeroelastic.verbs.plan import PlannedRank, PlanReport

_FRAMEWORKS = {"hf-trainer": "the Hugging Face Trainer", "accelerate": "accelerate", "lightning": "Lightning"}


def _inspect_view(found: InspectReport, params: str | None) -> View:
    """Return what the terminal and the page show of an inspection."""
    severity, sentence = _answer(found)
    problems = [
        sentences("Notes", found.notes, "note"),
        sentences("Not supported", found.unsupported, "bad"),
        sentences("Problems", found.problems, "bad"),
    ]
    if found.tensor is not None:
        return View(found.path, [*_tensor(found.tensor), *problems], sentence, severity)
    if not found.totals.files:  # nothing was opened: the problems say why
        return View(found.path, problems, sentence, severity)
    tables = [_save(found), _contents(found), _params(found, params)]
    if params is None:
        tables += _layout(found)
    return View(found.path, [*tables, *problems], sentence, severity, who_holds_what(found))


def _answer(found: InspectReport) -> tuple[Severity, str]:
    if found.problems:
        return "bad", f"Invalid: {counted(len(found.problems), 'problem')}. {found.remedy or ''}".rstrip()
    if found.unsupported:
        return "bad", f"zeroelastic does not work on this checkpoint: {found.unsupported[0]}"
    if found.tensor is not None:
        return "good", "Every byte of the tensor was read."
    return "good", "Whole, as far as names, sizes and headers say. No weights were read."


def _save(found: InspectReport) -> Table:
    """How and by whom it was saved."""
    from zeroelastic.core.world_size import listed_world_sizes

    is_shown = found.tp_size in (None, 1) or found.topology is not None
    batch = found.train_batch_size
    sub_groups = None if found.num_sub_groups is None else f"{counted(found.num_sub_groups, 'sub-group')} a rank"
    record = {
        "present": f"content root {str(found.record.content_root)[:12]}",
        "absent": "none: what it holds cannot be verified",
    }
    precision = ((found.model_dtype, "model"), (found.master_dtype, "master weights"))
    return facts(
        "",
        [
            (
                "saved as",
                [
                    found.format,
                    f"ZeRO stage {found.stage}" if found.stage not in (None, 3) else None,
                    None if found.world_size is None else counted(found.world_size, "rank"),
                    None if is_shown else f"{found.tp_size} tensor parallel",
                    None if found.format is None else f"by {_FRAMEWORKS.get(found.framework, 'DeepSpeed')}",
                ],
            ),
            ("topology", None if found.topology is None else found.topology.sizes),
            (
                "step",
                [
                    None if found.step is None else str(found.step),
                    f"{found.skipped_steps} skipped" if found.skipped_steps else None,
                    None if found.samples is None else f"{found.samples:,} samples",
                ],
            ),
            ("save id", found.save_id),
            ("written by", [f"{name} {version}" for name, version in found.versions if version]),
            ("precision", [f"{dtype} {what}" for dtype, what in precision if dtype]),
            ("batch size", [str(batch), f"for world sizes {listed_world_sizes(batch)}"] if batch else None),
            ("sub-group size", None if found.sub_group_size is None else [found.sub_group_size, sub_groups]),
            ("commit record", record.get(found.record.state, found.record.state)),
            ("client state", found.client_state),
            ("scheduler", None if found.scheduler is None else "saved" if found.scheduler else "none"),
        ],
    )


def _contents(found: InspectReport) -> Table:
    """Return the contents: parameters, state keys, scalars, groups, bytes."""
    totals = found.totals
    trained, frozen, tied = totals.trained_params, totals.frozen_params, totals.tied_params
    experts = [] if found.topology is None else found.topology.experts
    num_experts = sum(layer.num_experts for layer in experts)
    values: list[tuple[str, object]] = [
        ("trained", _amount(trained, totals.trained_numel) if trained else None),
        ("frozen", _amount(frozen, totals.frozen_numel) if frozen else None),
        ("experts", f"{num_experts:,} in {counted(len(experts), 'layer')}" if experts else None),
        ("tied", f"{tied} more {'name' if tied == 1 else 'names'}" if tied else None),
    ]
    for key, state in found.state.items():
        is_all = key == "frozen" or state.num_params == trained
        of = None if is_all else f"of {counted(state.num_params, 'parameter')}"
        values.append((key, [" and ".join(state.dtypes), format_size(state.bytes), of]))
    values += [
        (key, " and ".join(f"{value.value} ({value.kind})" for value in some)) for key, some in found.scalars.items()
    ]
    values += [
        ("state", None if totals.state_bytes is None else format_size(totals.state_bytes)),
        ("on disk", f"{format_size(totals.disk_bytes)} in {counted(totals.files, 'file')}"),
    ]
    if found.loss_scaler is not None:
        scale = found.loss_scaler.attributes.get("cur_scale")
        values.append(("loss scaler", [found.loss_scaler.class_name, None if scale is None else f"scale {scale}"]))
    for number, group in enumerate(found.groups):
        used = {key: value for key, value in group.options.items() if value is not None and value is not False}
        options = ", ".join(f"{key} {value}" for key, value in used.items())
        values.append((f"group {number}", f"{_amount(group.num_params, group.numel)}: {options}"))
    return facts("Contents", values)


def _amount(num_params: int, numel: int) -> str:
    return f"{counted(num_params, 'parameter')}, {counted(numel, 'element')}"


def _params(found: InspectReport, pattern: str | None) -> Table:
    total = found.totals.params + found.totals.tied_params
    title = "Parameters" if pattern is None else f"Parameters like {pattern}: {len(found.params):,} of {total:,}"
    rows = [
        row(
            param.name,
            str(list(param.shape)),
            None if param.tied_to else param.numel,
            None if param.bytes is None or param.tied_to else format_size(param.bytes),
            _role(param),
        )
        for param in found.params
    ]
    columns = ("name", "shape", "elements", "state", "")
    if pattern is None:
        return Table(title, tuple(rows), columns, frozenset({2, 3}), more="--params '*' lists them all")
    return Table(
        title, tuple(rows) or (row("none", "", "", "", ""),), columns, frozenset({2, 3}), most=max(len(rows), 1)
    )


def _role(param: InspectedParam) -> str:
    if param.tied_to is not None:
        return f"is {param.tied_to}"
    return param.kind if param.group is None else f"group {param.group}"


def _layout(found: InspectReport) -> list[Table]:
    """Return the slices of ranks, buffers, and files that stand out."""
    files, topology = found.files, found.topology
    tables = []
    if topology is not None:
        rows = [row(cut.name, str(list(cut.shape)), cut.sentence) for cut in topology.cuts]
        whole = f"{counted(topology.num_whole, 'parameter')} whole on each rank"
        if topology.num_whole:
            rows.append(row(whole if rows else "every parameter is whole on each rank", "", ""))
        tables.append(Table("Slices", tuple(rows)))
    tables.append(_names("Buffers", ((one.name, str(list(one.shape)), one.dtype) for one in found.buffers)))
    tables.append(_names("Files missing", ((name,) for name in files.missing), "bad", files.num_missing))
    tables.append(_names("Files of no rank", ((name,) for name in files.stale + files.odd + files.leftovers), "note"))
    return tables


def _names(title: str, rows: Iterable[tuple[str, ...]], severity: Severity = "plain", total: int = 0) -> Table:
    return Table(title, tuple(row(*cells, severity=severity) for cells in rows), total=total)


def _tensor(tensor: InspectedTensor) -> list[Table]:
    """Return the values of a tensor by state key, and where it lies."""
    values = [
        ("tensor", tensor.name),
        ("kind", tensor.kind),
        ("shape", str(list(tensor.shape))),
        ("tied to", tensor.tied_to),
        *((key, str(value)) for key, value in tensor.scalars.items()),
    ]
    rows = [
        row(one.key, one.dtype, format_size(one.bytes), *map(_number, (one.min, one.max, one.mean)), one.nans,
            " ".join(map(_number, one.first)))
        for one in tensor.stored
    ]  # fmt: skip
    places = [
        row(one.key, f"rank {place.rank}", place.file, f"{place.bytes:,} bytes from {place.offset:,}",
            f"{counted(place.numel, 'element')} from {place.start:,}")
        for one in tensor.stored
        for place in one.places
    ]  # fmt: skip
    columns = ("key", "dtype", "bytes", "min", "max", "mean", "NaN", "first")
    return [
        facts("", values),
        Table("Values", tuple(rows), columns, frozenset({2, 3, 4, 5, 6})),
        Table("Places", tuple(places)),
    ]


def _number(value: float | str | None) -> str:
    return "-" if value is None else f"{float(value):.6g}"


def _code(report: InspectReport) -> int:
    return INVALID if report.problems else FAILED if report.unsupported else 0


@reports("zeroelastic.verbs.inspect.inspect", _inspect_view, code=_code)
def inspect(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A tag directory, or the directory above.")],
    tag: TagOption = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="List the parameters whose names match a glob, or contain this text."),
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show a parameter or buffer: where it lies, statistics, the first values."),
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Open every rank's headers, and show where they disagree.")
    ] = False,
    html: HtmlOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show who saved a checkpoint, its contents, and anything that is missing or wrong.

    Reads the commit record and the headers of one rank, and weights only for --tensor. Shows a damaged checkpoint as
    far as possible.
    Exit code 0: nothing wrong was found; 1: zeroelastic does not work on this kind; 2: wrong usage; 3: invalid.

    \b
    Examples:
        zeroelastic inspect ckpt
        zeroelastic inspect ckpt --tag global_step2 --all-ranks
        zeroelastic inspect ckpt/global_step4 --params norm
        zeroelastic inspect ckpt --tensor model.norm.weight
        zeroelastic inspect ckpt --json
    """


def _plan_view(plan: PlanReport) -> View:
    """Return what the terminal and the page show of a plan."""
    state = plan.state
    stages = None if {plan.stage, plan.target_stage} == {3} else f"ZeRO stage {plan.stage} to {plan.target_stage}"
    values = [
        ("ranks", f"{plan.world_size:,} to {plan.target_world_size:,}"),
        ("saved as", [plan.format, f"step {plan.step}", stages]),
        ("topology", None if plan.topology is None else plan.topology.sentence),
        (
            "state",
            f"{format_size(state.bytes)} of {counted(state.params, 'parameter')} ({', '.join(state.state_keys)})",
        ),
        ("frozen", counted(state.frozen_params, "parameter") if state.frozen_params else None),
    ]
    rows = [
        row(rank.rank, format_size(rank.bytes_owned), format_size(rank.bytes_read), rank.files, _sources(rank))
        for rank in plan.ranks
    ]
    columns = ("rank", "owns", "reads", "files", "from saved ranks")
    read = sum(rank.bytes_read for rank in plan.ranks)
    owned = sum(rank.bytes_owned for rank in plan.ranks)
    worst = max(plan.ranks, key=lambda rank: rank.bytes_read)
    most = f"rank {worst.rank:,} reads most, {format_size(worst.bytes_read)} from {counted(worst.files, 'file')}"
    sentence = f"{format_size(read)} read for {format_size(owned)} of state; {most}."
    tables = [
        facts("", values),
        sentences("Notes", plan.notes, "note"),
        Table("Who reads how much from where", tuple(rows), columns, frozenset({0, 1, 2, 3}), most=16),
    ]
    return View(plan.path, tables, sentence, "note" if plan.notes else "good", what_moves(plan))


def _sources(rank: PlannedRank) -> str:
    return some([f"{source.rank}: {format_size(source.bytes)}" for source in rank.sources], 8)


@reports("zeroelastic.verbs.plan", _plan_view)
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
    tag: TagOption = None,
    html: HtmlOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how much each of M ranks reads in a load or a reshard, and from which saved ranks.

    Reads headers only. --html draws it.
    Exit code 0: planned; 2: wrong usage; 3: not a checkpoint that can be loaded.

    \b
    Examples:
        zeroelastic plan ckpt --world-size 3
        zeroelastic plan ckpt --world-size 6 --tag global_step2
        zeroelastic plan ckpt --world-size 3 --stage 2
        zeroelastic plan ckpt --world-size 3 --json
        zeroelastic plan ckpt --world-size 3 --html plan.html
    """
