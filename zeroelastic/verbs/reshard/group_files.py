"""The pickle graphs of one rank's files as DeepSpeed's stages 1 and 2 would write them at a world size.

Rank 0 alone has module states, with the whole weights. Source: ``DeepSpeedZeroOptimizer.state_dict`` with
``elastic_checkpoint`` off, ``BF16_Optimizer.state_dict``, ``DeepSpeedEngine._save_checkpoint`` and
``_save_zero_checkpoint`` (DeepSpeed 0.19.8), docs/concepts/format.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.checkpoint.optimizer_reader import lean_numel
from zeroelastic.errors import CheckpointError
from zeroelastic.torch_file.graph import (
    Node,
    Storage,
    instance,
    new_storage,
    ordered_dict,
    pairs_of,
    tensor,
    torch_size,
)
from zeroelastic.verbs.reshard.rank_files import RankFiles, flat_storages, loss_scaler, scalar_node, zero_stage
from zeroelastic.verbs.reshard.source import ReshardSource, whole_module
from zeroelastic.verbs.reshard.target import ReshardTarget


def group_files(source: ReshardSource, target: ReshardTarget, rank: int) -> RankFiles:
    """The graphs of one target rank's files."""
    flats = flat_storages(target)
    known: dict[Storage, bytes] = {}
    optim = {**source.optim_root, "optimizer_state_dict": _optimizer_state(source, target, rank, flats, known)}
    if rank > 0:
        return RankFiles(optim, None, flats, (), known, None)
    weights, fragments = weight_storages(target), frozen_storages(source, target)
    model = _model_root(source, target, weights, fragments)
    return RankFiles(optim, model, flats, fragments, known, None, weights)


def weight_storages(target: ReshardTarget) -> dict[str, Storage]:
    """The storages of the whole weights that are made from master weights, by name."""
    params = [param for param in target.layout.params if param.name in target.weights]
    return {param.name: new_storage(target.weights[param.name], param.numel) for param in params}


def frozen_storages(source: ReshardSource, target: ReshardTarget) -> tuple[Storage, ...]:
    """The storages of the whole frozen parameters, in the order of ``target.frozen``."""
    if source.frozen is None or target.frozen is None:
        return ()
    dtypes = [source.frozen.dtypes[p][FROZEN] for p in range(target.frozen.num_params)]
    return tuple(new_storage(dtype, param.numel) for dtype, param in zip(dtypes, target.frozen.params, strict=True))


def whole_tensors(
    target: ReshardTarget, weights: Mapping[str, Storage], fragments: Sequence[Storage]
) -> tuple[dict[str, Node], dict[str, Node]]:
    """The tensors of trained and of frozen parameters in these storages, by name."""
    trained = {param.name: param for param in target.layout.params}
    frozen = () if target.frozen is None else target.frozen.params
    return (
        {name: tensor(storage, 0, trained[name].shape) for name, storage in weights.items()},
        {param.name: tensor(storage, 0, param.shape) for param, storage in zip(frozen, fragments, strict=True)},
    )


def _optimizer_state(
    source: ReshardSource,
    target: ReshardTarget,
    rank: int,
    flats: Mapping[tuple[int, str], Storage],
    known: dict[Storage, bytes],
) -> dict[object, object]:
    """The state dict of the optimizer: optimizer state with the padding at the end, master weights without it.

    A ``BF16_Optimizer`` leaves it in both, has no loss scaler, and names no stage.
    """
    layout = target.layout
    padded = layout.sub_group_numel.tolist()
    lean = lean_numel(layout, rank).tolist()
    inner = pairs_of(source.optim_root["optimizer_state_dict"])
    states: dict[int, dict[str, object]] = {}
    for i, keys in enumerate(target.keys):
        values = {key: scalar_node(value, known) for key, value in target.scalars[i].items()}
        whole = {key: tensor(flats[i, key], 0, (padded[i],)) for key in keys if key != FP32}
        if values or whole:
            states[i] = {**values, **whole}
    clip_grad = inner.get("clip_grad", source.config.get("gradient_clipping"))
    state = {} if target.bf16_optimizer else loss_scaler(source)
    if isinstance(clip_grad, (int, float)):  # where it is missing, a run keeps its own
        state["clip_grad"] = clip_grad
    state["base_optimizer_state"] = {
        "state": states,
        "param_groups": [{**group.options, "params": [i]} for i, group in enumerate(source.groups)],
    }
    state["single_partition_of_fp32_groups"] = [
        tensor(flats[i, FP32], 0, (numel,), requires_grad=True)
        for i, numel in enumerate(padded if target.bf16_optimizer else lean)
    ]
    paddings = layout.sub_group_numel - lean_numel(layout, rank)
    if target.bf16_optimizer:  # books all padding on the last rank
        numel = np.bincount(layout.sub_group, weights=layout.numel, minlength=layout.num_sub_groups).astype(np.int64)
        paddings = (layout.sub_group_numel * layout.world_size - numel) * (rank == layout.world_size - 1)
    else:
        state["zero_stage"] = zero_stage(target.stage)
    state["group_paddings"] = paddings.tolist()
    if not target.bf16_optimizer:
        state["param_alignment_paddings"] = [list(gaps) for gaps in target.gaps]
    state["partition_count"] = [layout.world_size] * layout.num_sub_groups
    state["ds_version"] = _version(source)
    state["param_slice_mappings"] = _slice_mappings(source, target, rank)
    return state


def _version(source: ReshardSource) -> object:
    """The version of DeepSpeed that saved it, without which DeepSpeed loads no file of stages 1 and 2."""
    inner = pairs_of(source.optim_root["optimizer_state_dict"])
    for found in (inner.get("ds_version"), source.optim_root.get("ds_version"), source.model_root(0).get("ds_version")):
        if isinstance(found, str):
            return found
    raise CheckpointError("the checkpoint names no version of DeepSpeed (ds_version), which stages 1 and 2 need.")


def _slice_mappings(source: ReshardSource, target: ReshardTarget, rank: int) -> list[Node]:
    """``param_slice_mappings``: by group, where the rank's buffer has its part of each parameter.

    A resume does not read it, ``ds_to_universal`` does. Under ``round_robin_gradients`` DeepSpeed writes the places of
    another order than the buffer's; here they are always the buffer's.
    """
    layout = target.layout
    number = layout.index()
    length, offset = layout.owned(rank)[1].tolist(), layout.buffer_offset(rank).tolist()
    mappings: list[Node] = []
    for group in source.groups:
        own = [(name, number[name]) for name in group.params if name in number]
        mappings.append(
            ordered_dict((name, _fragment_address(length[p], offset[p])) for name, p in own if length[p] > 0)
        )
    return mappings


def _fragment_address(numel: int, start: int) -> Node:
    return instance("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": numel, "start": start})


def _model_root(
    source: ReshardSource, target: ReshardTarget, weights: Mapping[str, Storage], fragments: Sequence[Storage]
) -> dict[object, object]:
    layout = target.layout
    root = dict(source.model_root(0))
    if "dp_world_size" not in root:
        raise CheckpointError("a module states file has no dp_world_size. It is not one of ZeRO.")
    frozen_params = () if target.frozen is None else target.frozen.params
    made, frozen = whole_tensors(target, weights, fragments)
    root["dp_world_size"] = layout.world_size
    root["param_shapes"] = [
        ordered_dict(
            (layout.params[p].name, torch_size(layout.params[p].shape))
            for p in np.flatnonzero(layout.sub_group == i).tolist()
        )
        for i in range(layout.num_sub_groups)
    ]
    root["module"] = whole_module(root, {**made, **frozen})
    excluded = root.get("frozen_param_shapes") is None and source.stage != 1 and not frozen
    if target.stage == 1 or excluded:  # stage 1 lists no frozen parameters
        root["frozen_param_shapes"] = root["frozen_param_fragments"] = None
    else:
        root["frozen_param_shapes"] = ordered_dict((param.name, torch_size(param.shape)) for param in frozen_params)
        root["frozen_param_fragments"] = ordered_dict(frozen.items())
    return root
