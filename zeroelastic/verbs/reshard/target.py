"""The layout of every buffer of the new ranks, at their world size and ZeRO stage.

At stage 3 the layout follows from the optimizer groups and ``sub_group_size``, as ``_create_fp16_sub_groups`` makes it;
at stages 1 and 2 from the groups, ``round_robin_gradients`` and ``parameter_alignment``, as
``DeepSpeedZeroOptimizer.__init__`` does, or as ``BF16_Optimizer`` without these two (DeepSpeed 0.19.8).
docs/concepts/format.md describes all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.optimizer_file import steps_with_bf16_optimizer, zero_option
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.checkpoint.tag_files import expert_file_name, model_file_name
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout
from zeroelastic.errors import UnsupportedError, UsageError, rank_list
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.reshard.slicing import MoeLayer, Slicing
from zeroelastic.verbs.reshard.source import (
    ReshardSource,
    check_module,
    made_weights,
    refuse_own_weights,
    weight_dtypes,
)

LEAST_MEMORY = 64 << 20
"""The smallest ``max_memory``: buffers of a few threads and the tables of one rank."""

_TO_STAGE_3 = "Choose stage 3, with --stage 3."
_APART = "--sub-group-size that keeps them apart; 1 gives each parameter a sub-group of its own."
_ZERO_OPTIONS = ("round_robin_gradients", "parameter_alignment")


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The options of a reshard.

    ``world_size`` counts all ranks. ``stage`` is the ZeRO stage of the result, ``tp`` its tensor parallel and ``ep``
    its expert parallel size, by default those of the source; ``like`` is a checkpoint of a run that cuts weights as the
    result shall. ``format`` is by default elastic at stage 3, and always rigid below it. ``sub_group_size`` overrides
    that of the saved configuration, and at stages 1 and 2 ``round_robin_gradients`` and ``parameter_alignment`` theirs;
    ``verify`` reads the result back before it is published. Raises UsageError for invalid values.
    """

    world_size: int
    format: CheckpointFormat | None = None
    sub_group_size: int | None = None
    stage: int | None = None
    round_robin_gradients: bool | None = None
    parameter_alignment: bool | None = None
    max_memory: int = 1 << 30
    verify: bool = False
    tp: int | None = None
    ep: int | None = None
    like: str | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"a world size of {self.world_size} makes no sense; give 1 or more.")
        for name, size in (("tensor", self.tp), ("expert", self.ep)):
            if size is not None and size < 1:
                raise UsageError(f"{size} {name} parallel ranks make no sense; give 1 or more.")
        if self.sub_group_size is not None and self.sub_group_size < 1:
            raise UsageError(f"a sub_group_size of {self.sub_group_size} makes no sense; give 1 or more.")
        if self.stage not in (None, 1, 2, 3):
            raise UsageError(f"there is no ZeRO stage {self.stage} to reshard to; give 1, 2 or 3.")
        if self.max_memory < LEAST_MEMORY:
            raise UsageError(
                f"--max-memory: at least {LEAST_MEMORY >> 20} MiB are needed, got {format_size(self.max_memory)}."
            )

    @property
    def zero_options(self) -> dict[str, bool]:
        """The entries of ``zero_optimization`` that are given instead of the saved configuration's."""
        return {key: value for key in _ZERO_OPTIONS if (value := getattr(self, key)) is not None}

    def check(self, stage: int) -> None:
        """Raise UsageError for an option that the ZeRO stage of the result does not have."""
        if stage == 3 and self.zero_options:
            raise UsageError(
                f"{' and '.join(self.zero_options)} makes no difference at ZeRO stage {stage}. Leave it out, or give "
                "--stage 1 or 2."
            )
        if stage != 3 and self.format == "elastic":
            raise UsageError(
                f"there is no elastic format of ZeRO stage {stage}: DeepSpeed's own, with elastic_checkpoint, has no "
                "hyper-parameters. Leave --format out, or give rigid."
            )
        if stage != 3 and self.sub_group_size is not None:
            raise UsageError(f"there are no sub-groups at ZeRO stage {stage}. Leave --sub-group-size out.")


@dataclass(frozen=True, slots=True)
class ReshardTarget:
    """The layouts at the target's world size, and the contents of its flat buffers.

    A flat buffer is a sub-group at ``stage`` 3, an optimizer group at stages 1 and 2. ``keys[i]`` is the dtype of each
    state key of flat buffer i, "fp32" first; ``scalars[i]`` its scalars; ``members[g]`` the buffers of optimizer group
    g. Below stage 3 ``frozen`` is the layout of one rank, and ``weights`` are the dtypes of the trained weights that
    are made from master weights. At stages 1 and 2 ``gaps[i]`` are the elements that are left free behind each
    parameter of group i, in buffer order.

    ``slicing`` says which ranks will load it. ``of_bf16_optimizer``: DeepSpeed's class is its ``BF16_Optimizer``, of
    stage 1, which deals and aligns nothing.
    """

    stage: int
    slicing: Slicing
    format: CheckpointFormat
    layout: Layout
    frozen: Layout
    keys: tuple[Mapping[str, str], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    members: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[int, ...], ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    of_bf16_optimizer: bool = False

    @property
    def topology(self) -> Topology:
        """How the ranks are grouped that will load it."""
        return self.slicing.topology

    @property
    def world_size(self) -> int:
        """All ranks that will load it."""
        return self.topology.world_size

    @property
    def num_files(self) -> int:
        """The files of all ranks."""
        if self.stage == 3:
            return 2 * self.world_size
        experts = sum(layer.num_experts for layer in self.slicing.layers)
        return self.world_size + self.topology.tensor_size + experts

    def experts(self, rank: int) -> list[tuple[MoeLayer, int]]:
        """The experts whose files a rank writes, of which DeepSpeed has one for each below stage 3."""
        if self.stage == 3:
            return []
        slicing, size = self.slicing, self.slicing.expert_size
        expert_rank = self.topology.expert_rank(rank, size)
        if self.topology.sharers(0, expert_rank, size).first != rank:
            return []
        return [
            (layer, expert)
            for layer in slicing.layers
            for expert in range(layer.num_experts)
            if expert // (layer.num_experts // size) == expert_rank
        ]

    def nbytes(self, of_state: int) -> int:
        """Bytes that are written of a state of so many: tensor parallel ranks have copies, and weights may be made."""
        numel = sum(tensor.numel for tensor in self.layout.whole_tensors)
        made = [param for param in self.layout.params if param.name in self.weights]
        weights = sum(param.numel * DTYPE_BYTES[self.weights[param.name]] for param in made)
        return weights + (round(of_state * (int(self.layout.numel.sum()) / numel)) if numel else of_state)

    def on_rank(self, rank: int) -> ReshardTarget:
        """Return the target with the layouts of one rank alone."""
        frozen_rank = rank if self.stage == 3 else self.topology.place(rank)[1]
        return replace(self, layout=self.layout.on_rank(rank), frozen=self.frozen.on_rank(frozen_rank))

    def has_model(self, rank: int) -> bool:
        """Return whether a rank writes module states."""
        return self.stage == 3 or self.topology.place(rank)[0] == 0


def file_names(source: ReshardSource, target: ReshardTarget, rank: int) -> tuple[str, ...]:
    """DeepSpeed's names of one rank's files: the optimizer's, then those it writes of module states and experts."""
    prefix = "bf16_" if source.bf16_names else ""
    data_rank, tensor_rank = target.topology.place(rank)
    optim = f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"
    model = model_file_name(data_rank, tensor_rank, whole=target.stage != 3)
    experts = (expert_file_name(layer.number, expert) for layer, expert in target.experts(rank))
    return (optim, *((model,) if target.has_model(rank) else ()), *experts)


def reshard_target(source: ReshardSource, options: ReshardOptions, stage: int, slicing: Slicing) -> ReshardTarget:
    """The layout of the ranks that ``slicing`` is of.

    Raises UnsupportedError when parameters that share a flat buffer there were saved with different kinds of state, and
    for what DeepSpeed does not run at the stage.
    """
    size, weights, dtypes = options.sub_group_size, dict[str, str](), dict[str, str]()
    if stage == 3:
        refuse_own_weights(source)
        groups = source.grouped(source.trained.params)
    else:
        _check_optimizer(source, stage, slicing)
        groups = source.grouped(param for param in source.trained.params if param.numel > 0)
        if not all(groups):
            raise UnsupportedError(
                f"optimizer group {groups.index([])} has no trained parameters: DeepSpeed does not start with such a "
                f"group at stages 1 and 2. {_TO_STAGE_3}"
            )
        check_module(source)
        dtypes, weights = weight_dtypes(source), made_weights(source, slicing)
    # DeepSpeed takes the dtype of the parameter that the optimizer lists first.
    itemsizes = [DTYPE_BYTES[dtypes[members[0].name]] for members in groups if dtypes]
    layout, gaps = slicing.layout(groups, stage, source.config, itemsizes=itemsizes, sub_group_size=size)
    part = source.trained
    firsts = _firsts(part, layout, stage, slicing.topology.world_size)
    owner = {name: g for g, group in enumerate(source.groups) for name in group.params}
    owners = [owner[part.params[first].name] for first in firsts]
    return ReshardTarget(
        stage=stage,
        slicing=slicing,
        format=(options.format or "elastic") if stage == 3 else "rigid",
        layout=layout,
        frozen=slicing.frozen_layout(source.frozen.params, stage),
        keys=tuple(part.dtypes[first] for first in firsts),
        scalars=tuple(part.scalars[first] for first in firsts),
        members=tuple(tuple(i for i, g in enumerate(owners) if g == group) for group in range(len(source.groups))),
        gaps=tuple(map(tuple, gaps)),
        weights=weights,
        of_bf16_optimizer=stage == 1 and steps_with_bf16_optimizer(source.config),
    )


def _firsts(part: TensorSet, layout: Layout, stage: int, world_size: int) -> list[int]:
    """The first parameter of each flat buffer. Raises UnsupportedError for parameters that share one and differ."""
    number = {param.name: i for i, param in enumerate(part.params)}
    firsts: dict[int, int] = {}
    for param, buffer in zip(layout.params, layout.sub_group.tolist(), strict=True):
        first, other = firsts.setdefault(buffer, number[param.name]), number[param.name]
        if differ := _differing(part, first, other):
            what, advice = f"a sub-group on {world_size} ranks", f"Choose a {_APART}"
            if stage != 3:
                what = "an optimizer group"
                advice = (
                    "An optimizer group has one state at stages 1 and 2: choose stage 3, with --stage 3, and a "
                    f"{_APART}"
                )
            raise UnsupportedError(
                f"{part.params[first].name} and {param.name} share {what} but were saved with different optimizer "
                f"state ({', '.join(differ)}). {advice}"
            )
    return [firsts[buffer] for buffer in range(layout.num_sub_groups)]


def _differing(part: TensorSet, first: int, other: int) -> list[str]:
    """In what the optimizer state of two parameters differs: each key, with both values."""
    states = [
        {**part.dtypes[p], **{key: value.canonical() for key, value in part.scalars[p].items()}} for p in (first, other)
    ]
    keys = [key for key in dict.fromkeys([*states[0], *states[1]]) if states[0].get(key) != states[1].get(key)]
    return [f"{key}: {_shown(part, first, key)} and {_shown(part, other, key)}" for key in keys]


def _shown(part: TensorSet, param: int, key: str) -> str:
    if key in part.scalars[param]:
        return f"{part.scalars[param][key].value} ({part.scalars[param][key].kind})"
    return f"a {part.dtypes[param][key]} tensor" if key in part.dtypes[param] else "none"


def _check_optimizer(source: ReshardSource, stage: int, slicing: Slicing) -> None:
    """Raise UnsupportedError for an optimizer whose state DeepSpeed keeps in another form at the stage."""
    if not slicing.has_experts and any(group.options.get("moe") for group in source.groups):
        raise UnsupportedError(
            "has an optimizer group of experts (MoE), and nothing says which experts its parameters are: such "
            f"checkpoints are not written. {_TO_STAGE_3}"
        )
    adagrad = any("sum" in keys for keys in source.trained.dtypes)
    # torch.optim.Adagrad is made anew over all flat buffers, as one group, by initialize_optimizer_states.
    if adagrad or any(group.repeats > 1 for group in source.groups):
        raise UnsupportedError(
            f"was saved with Adagrad, whose optimizer groups DeepSpeed joins at stage {stage}: such checkpoints are "
            f"not written. {_TO_STAGE_3}"
        )
    if any(group.options.get("use_muon") for group in source.groups):
        raise UnsupportedError(
            f"was saved with Muon, whose momentum DeepSpeed keeps in another form at stage {stage}: such checkpoints "
            f"are not written. {_TO_STAGE_3}"
        )


def stage_notes(saved: ReshardSource, target: ReshardTarget, options: ReshardOptions) -> list[str]:
    """Sentences on another stage than the saved one, and on the options that the run which loads it must have."""
    notes: list[str] = []
    if saved.stage != target.stage:
        notes.append(f"saved with ZeRO stage {saved.stage}; the result is of stage {target.stage}")
    if target.stage in (1, 2) and (notes or options.zero_options):
        order = [str(bool(zero_option(saved.config, key))).lower() for key in _ZERO_OPTIONS]
        given = " and ".join(options.zero_options)
        origin = f"{given} as given" if given else "as in the saved configuration"
        notes.append(f"for a run with round_robin_gradients {order[0]} and parameter_alignment {order[1]}, {origin}")
    return notes + _notes_on_ranks(saved, target)


def _notes_on_ranks(saved: ReshardSource, target: ReshardTarget) -> list[str]:
    """A sentence on what each rank of stage 3 saved for itself, where the result has no file for it."""
    kept = target.topology.data_size if target.stage == 3 else 1
    left = range(kept, 1 if saved.whole_model else saved.checkpoint.topology.data_size)
    if not left:
        return []
    root = saved.model_root(0)
    users = {*client_state_keys(root)} - {"zeroelastic"}  # the position in the data, the same on all
    there = {"buffers": root.get("buffer_names"), "client state": users}
    what = " and ".join(name for name, found in there.items() if found)
    return [f"not carried: {what} of saved {rank_list(left)}"] if what else []
