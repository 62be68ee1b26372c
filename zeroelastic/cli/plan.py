"""``zeroelastic plan``: who reads how much from where at another world size, before anything is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.app import reports
from zeroelastic.cli.options import EpOption, ForceOption, HtmlOption, JsonOption, LikeOption, TagOption, TpOption
from zeroelastic.cli.tables import Table, View, facts, row, sentences
from zeroelastic.errors import counted, some

if TYPE_CHECKING:
    from zeroelastic.verbs.plan import PlannedRank, PlanReport


def _view(plan: PlanReport) -> View:
    """Return what the terminal and the page show of a plan."""
    from zeroelastic.cli.figures import what_moves

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


@reports("zeroelastic.verbs.plan", _view)
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
    """Say who reads how much from where in a load or a reshard on M ranks; no payload is looked at.

    Only headers are read, and nothing is written but the page of --html, which has the picture.
    Exit code 0: planned; 2: wrong usage; 3: not a checkpoint that can be loaded.

    \b
    Examples:
        zeroelastic plan ckpt --world-size 3
        zeroelastic plan ckpt --world-size 6 --tag global_step2
        zeroelastic plan ckpt --world-size 3 --stage 2
        zeroelastic plan ckpt --world-size 3 --json
        zeroelastic plan ckpt --world-size 3 --html plan.html
    """
