"""What the new ranks will hold: the layout of every buffer at the target's world size and ZeRO stage, rebuilt.

At stage 3 the layout follows from the optimizer groups and ``sub_group_size``, as ``_create_fp16_sub_groups`` makes it;
at stages 1 and 2 from the groups, ``round_robin_gradients`` and ``parameter_alignment``, as
``DeepSpeedZeroOptimizer.__init__`` does, or as ``BF16_Optimizer`` without these two (DeepSpeed 0.19.8).
docs/concepts/format.md describes all three. At stage 0 nothing is cut: one file has every tensor whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.checkpoint.tag_files import model_file_name
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import (
    Layout,
    Param,
    group_split_of_run,
    layout_from_sub_groups,
    pack_sub_groups,
    unpacked_layout,
)
from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.reshard.source import (
    ReshardSource,
    check_entries,
    check_module,
    configured_dtype,
    made_weights,
    weight_dtypes,
)

OptimizerWrapper = Literal["none", "FP16_UnfusedOptimizer", "FP16_Optimizer"]
"""DeepSpeed's class around the optimizer at stage 0. "none": the optimizer steps the weights of the module itself."""


@dataclass(frozen=True, slots=True)
class ReshardTarget:
    """The layouts at the target's world size, and the contents of its flat buffers.

    A flat buffer is a sub-group at ``stage`` 3, an optimizer group at stages 1 and 2. ``keys[i]`` is the dtype of each
    state key of flat buffer i, "fp32" first; ``scalars[i]`` its scalars; ``group_of[i]`` the number of its optimizer
    group. Below stage 3 ``frozen`` is the layout of one rank, and ``weights`` are the dtypes of the trained weights
    that are made from master weights. At stages 1 and 2 ``gaps[i]`` are the elements that are left free behind each
    parameter of group i, in buffer order. ``bf16_optimizer``: the files are a ``BF16_Optimizer``'s, which deals and
    aligns nothing.

    ``world_size`` ranks will load it. At stage 0 they all load one file, so the layouts are of one rank; a flat buffer
    is a parameter, or an optimizer group where the ``wrapper`` is ``FP16_Optimizer``.
    """

    stage: int
    world_size: int
    format: CheckpointFormat
    layout: Layout
    frozen: Layout | None
    keys: tuple[Mapping[str, str], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    group_of: tuple[int, ...]
    gaps: tuple[tuple[int, ...], ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    bf16_optimizer: bool = False
    wrapper: OptimizerWrapper = "none"

    @property
    def num_files(self) -> int:
        """The files of all ranks."""
        if self.stage == 0:
            return 1
        return 2 * self.world_size if self.stage == 3 else self.world_size + 1


def file_names(source: ReshardSource, target: ReshardTarget, rank: int) -> tuple[str, ...]:
    """DeepSpeed's names of one rank's files: the optimizer's, then the module states', if the rank writes them."""
    if target.stage == 0:
        return (model_file_name(0, 0, whole=True),)
    prefix = "bf16_" if source.bf16_names else ""
    optim = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    whole = target.stage != 3
    return (optim,) if whole and rank > 0 else (optim, model_file_name(rank, 0, whole=whole))


def reshard_target(
    source: ReshardSource, world_size: int, format: CheckpointFormat, *, stage: int = 3
) -> ReshardTarget:
    """The layout at another world size.

    Raises UnsupportedError when parameters that share a flat buffer there were saved with different kinds of state, and
    for what DeepSpeed does not run at the stage.
    """
    if stage == 3:
        return _sub_group_target(source, world_size, format)
    return _whole_target(source, world_size) if stage == 0 else _group_target(source, world_size, stage)


def _sub_group_target(source: ReshardSource, world_size: int, format: CheckpointFormat) -> ReshardTarget:
    table = {param.name: param for param in source.trained.layout.params}
    sub_groups = pack_sub_groups(
        [[table[name] for name in group.params if name in table] for group in source.groups],
        world_size=world_size,
        sub_group_size=source.sub_group_size,
    )
    keys, scalars = _contents(
        source, sub_groups, f"a sub-group on {world_size} ranks", "Choose a --sub-group-size that keeps them apart."
    )
    group_number = {name: g for g, group in enumerate(source.groups) for name in group.params}
    return ReshardTarget(
        stage=3,
        world_size=world_size,
        format=format,
        layout=layout_from_sub_groups(sub_groups, world_size),
        frozen=None if source.frozen is None else unpacked_layout(source.frozen.layout.params, world_size),
        keys=keys,
        scalars=scalars,
        group_of=tuple(group_number[members[0].name] for members in sub_groups),
    )


def _group_target(source: ReshardSource, world_size: int, stage: int) -> ReshardTarget:
    _check_optimizer(source, stage)
    table = {param.name: param for param in source.trained.layout.params if param.numel > 0}
    groups = [[table[name] for name in group.params if name in table] for group in source.groups]
    for number, members in enumerate(groups):
        if not members:
            raise UnsupportedError(
                f"optimizer group {number} has no trained parameters: DeepSpeed does not start with such a group at "
                "stages 1 and 2. Reshard to stage 3, with --stage 3."
            )
    check_module(source)
    keys, scalars = _contents(source, groups, "an optimizer group", "Reshard to stage 3, with --stage 3.")
    dtypes = weight_dtypes(source)
    # DeepSpeed takes the dtype of the parameter that the optimizer lists first.
    itemsizes = [DTYPE_BYTES[dtypes[members[0].name]] for members in groups] if source.param_alignment else None
    round_robin = source.round_robin
    if bf16_optimizer := stage == 1 and source.steps_with_bf16_optimizer:
        round_robin, itemsizes = False, None
    layout, gaps = group_split_of_run(groups, world_size, round_robin=round_robin, itemsizes=itemsizes)
    return ReshardTarget(
        stage=stage,
        world_size=world_size,
        format="rigid",
        layout=layout,
        frozen=None if source.frozen is None else unpacked_layout(source.frozen.layout.params, 1),
        keys=keys,
        scalars=scalars,
        group_of=tuple(range(len(groups))),
        gaps=tuple(map(tuple, gaps)),
        weights=made_weights(source),
        bf16_optimizer=bf16_optimizer,
    )


def _whole_target(source: ReshardSource, world_size: int) -> ReshardTarget:
    _check_optimizer(source, 0)
    wrapper = _optimizer_wrapper(source)
    table = {param.name: param for param in source.trained.layout.params if param.numel > 0}
    groups = [[table[name] for name in group.params if name in table] for group in source.groups]
    for number, members in enumerate(groups):
        if not members and wrapper != "FP16_UnfusedOptimizer":
            raise UnsupportedError(
                f"optimizer group {number} has no trained parameters: such a group has frozen ones at stage 0, which "
                "the checkpoint does not name. Reshard to stage 3, with --stage 3."
            )
    buffers, what = [[param] for members in groups for param in members], "a parameter"
    if wrapper == "FP16_Optimizer":
        buffers, what = groups, "an optimizer group"
    keys, scalars = _contents(source, buffers, what, "Reshard to stage 3, with --stage 3.")
    _check_state_dtypes(source, wrapper)
    frozen = () if source.frozen is None else source.frozen.layout.params
    check_entries(source, [param.name for param in (*frozen, *(table.values() if wrapper == "none" else ()))])
    group_number = {name: g for g, group in enumerate(source.groups) for name in group.params}
    return ReshardTarget(
        stage=0,
        world_size=world_size,
        format="rigid",
        layout=layout_from_sub_groups(buffers, 1),
        frozen=None if source.frozen is None else unpacked_layout(frozen, 1),
        keys=keys,
        scalars=scalars,
        group_of=tuple(group_number[members[0].name] for members in buffers),
        weights={} if wrapper == "none" else made_weights(source),
        wrapper=wrapper,
    )


def _optimizer_wrapper(source: ReshardSource) -> OptimizerWrapper:
    """DeepSpeed's class around the saved optimizer at stage 0, which its hyper-parameters show.

    ``FusedAdam`` alone, DeepSpeed's or apex's, is stepped on flat buffers. Source:
    ``DeepSpeedEngine._do_optimizer_sanity_check`` and ``_configure_fp16_optimizer`` (DeepSpeed 0.19.8).
    """
    if configured_dtype(source.config) == "float32":
        return "none"
    others = {"amsgrad", "max_coeff"}  # of DeepSpeedCPUAdam and FusedLamb, which correct their bias too
    fused = all("bias_correction" in group.options and not others & group.options.keys() for group in source.groups)
    return "FP16_Optimizer" if fused else "FP16_UnfusedOptimizer"


def _check_state_dtypes(source: ReshardSource, wrapper: OptimizerWrapper) -> None:
    """Raise UnsupportedError for dtypes that a load at stage 0 would convert.

    ``torch.optim.Optimizer.load_state_dict`` converts all state but ``step`` to the dtype of the parameter that is
    stepped: the weight of the module, or a float32 copy of it.
    """
    part = source.trained
    weights = weight_dtypes(source)
    for param, saved, scalars in zip(part.layout.params, part.dtypes, part.scalars, strict=True):
        stepped = weights[param.name] if wrapper == "none" else "float32"
        kinds = {key: scalar.kind for key, scalar in scalars.items() if key != "step" and scalar.kind in DTYPE_BYTES}
        for key, dtype in {**saved, **kinds}.items():
            if dtype != stepped:
                name = "master weights" if key == FP32 else key
                raise UnsupportedError(
                    f"{param.name}: its {name} are {dtype}; DeepSpeed at stage 0 has {stepped} alone. Reshard to stage "
                    "3, with --stage 3."
                )


def _check_optimizer(source: ReshardSource, stage: int) -> None:
    """Raise UnsupportedError for an optimizer whose state DeepSpeed keeps in another form at the stage."""
    if any(group.options.get("moe") for group in source.groups) or source.model_root(0).get("num_experts"):
        why = f"whose groups are cut for other numbers of ranks at stage {stage}"
        if stage == 0:
            why = "which DeepSpeed saves in files of their own at stage 0"
        raise UnsupportedError(
            f"has experts (MoE), {why}: such checkpoints are not written. Reshard to stage 3, with --stage 3."
        )
    adagrad = any("sum" in keys for keys in source.trained.dtypes)
    if stage == 0 and adagrad and configured_dtype(source.config) != "float32":
        raise UnsupportedError(
            "was saved with Adagrad in 16 bits, with which DeepSpeed does not start at stage 0. Reshard to stage 3, "
            "with --stage 3."
        )
    # torch.optim.Adagrad is made anew over all flat buffers, as one group, by initialize_optimizer_states.
    if stage != 0 and (adagrad or any(group.repeats > 1 for group in source.groups)):
        raise UnsupportedError(
            f"was saved with Adagrad, whose optimizer groups DeepSpeed joins at stage {stage}: such checkpoints are "
            "not written. Reshard to stage 3, with --stage 3."
        )
    if any(group.options.get("use_muon") for group in source.groups):
        raise UnsupportedError(
            f"was saved with Muon, whose momentum DeepSpeed keeps in another form at stage {stage}: such checkpoints "
            "are not written. Reshard to stage 3, with --stage 3."
        )


def _contents(
    source: ReshardSource, buffers: Sequence[Sequence[Param]], what: str, advice: str
) -> tuple[tuple[Mapping[str, str], ...], tuple[Mapping[str, ScalarValue], ...]]:
    """The state keys with their dtypes, and the scalars, of each flat buffer, from those of its parameters."""
    part = source.trained
    number = part.layout.index()
    firsts: list[int] = []
    for members in buffers:
        first = number[members[0].name]
        for param in members[1:]:
            other = number[param.name]
            if part.dtypes[other] != part.dtypes[first] or _canonical(part.scalars[other]) != _canonical(
                part.scalars[first]
            ):
                raise UnsupportedError(
                    f"{members[0].name} and {param.name} share {what} but were saved with different optimizer state or "
                    f"steps. {advice}"
                )
        firsts.append(first)
    return tuple(part.dtypes[first] for first in firsts), tuple(part.scalars[first] for first in firsts)


def _canonical(scalars: Mapping[str, ScalarValue]) -> dict[str, str]:
    return {key: value.canonical() for key, value in scalars.items()}
