"""The pickle graphs of one rank's files as DeepSpeed would write them at a world size and ZeRO stage.

At stage 3 every rank has a file of the optimizer, rigid or elastic, and one of module states. At stages 1 and 2 data
parallel rank 0 alone has module states, with the whole weights, or all that its tensor parallel rank has of them; the
weights of each expert are in a file of their own.

Source (DeepSpeed 0.19.8): ``DeepSpeedEngine._save_checkpoint`` and ``_save_zero_checkpoint``;
``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict``; ``state_dict`` of ``DeepSpeedZeroOptimizer`` with
``elastic_checkpoint`` off, and ``BF16_Optimizer``; and ``torch.optim.Optimizer.state_dict``. docs/concepts/format.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, SAME_ON_ALL_RANKS, elastic_table, scalar_bytes
from zeroelastic.checkpoint.optimizer_reader import lean_numel
from zeroelastic.checkpoint.tag_files import SAVE_ID, expert_file_name
from zeroelastic.checkpoint.topology import numbered_expert
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param
from zeroelastic.core.slices import Strip
from zeroelastic.errors import CheckpointError
from zeroelastic.torch_file.header import read_tree
from zeroelastic.torch_file.tree import (
    Dict,
    Size,
    Storage,
    TensorRef,
    entry,
    instance,
    new_global,
    new_storage,
    pairs_of,
    storage_of,
    tensor,
)
from zeroelastic.verbs.reshard.slice_tables import described, partition_groups
from zeroelastic.verbs.reshard.slicing import EXPERT_WEIGHTS, INFO, strips_by_param
from zeroelastic.verbs.reshard.source import ReshardSource, names_in_module, whole_module
from zeroelastic.verbs.reshard.target import ReshardTarget

Root: TypeAlias = dict[object, object]
Flats: TypeAlias = Mapping[tuple[int, str], Storage]
"""The storages of flat buffers, by the number of the buffer and the state key."""

ZERO_STAGE = new_global("deepspeed.runtime.zero.config", "ZeroStageEnum")
LOSS_SCALER = new_global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_FRAGMENT_ADDRESS = new_global("deepspeed.utils.tensor_fragment", "fragment_address")


class Weight(NamedTuple):
    """A weight that is made of master weights: those in the ``strips`` of a whole tensor, and where it goes."""

    tensor: Param
    strips: tuple[Strip, ...]
    storage: Storage


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The graphs of one rank's files, in the order of ``file_names``, and from where their storages are filled.

    ``flats[i, key]`` is the storage of flat buffer i of a state key, ``frozen[p, "frozen"]`` that of the rank's part of
    frozen parameter p, and ``weights`` are those of whole modules and of experts; ``digests`` takes int64 by parameter,
    in elastic files; every other storage of the graphs has its ``data``, or an ``extent`` to be copied.
    """

    graphs: tuple[Root, ...]
    flats: Flats
    frozen: Flats
    weights: Sequence[Weight]
    digests: Storage | None


def rank_files(source: ReshardSource, target: ReshardTarget, rank: int, *, save_id: str) -> RankFiles:
    """The graphs of one target rank's files."""
    target = target.on_rank(rank)
    layout = target.layout
    flats = {
        (i, key): new_storage(dtype, int(layout.sub_group_numel[i]))
        for i, keys in enumerate(target.keys)
        for key, dtype in keys.items()
    }
    weights: dict[str, Weight] = {}
    frozen: dict[str, Storage] = {}
    if target.has_model(rank):
        weights = _module_weights(source, target)
        dtypes = {param.name: keys for param, keys in zip(source.frozen.params, source.frozen.dtypes, strict=True)}
        frozen = {
            param.name: new_storage(dtypes[param.name][FROZEN], numel)
            for param, numel in zip(target.frozen.params, target.frozen.part.tolist(), strict=True)
        }
    digests = new_storage("int64", layout.num_params) if target.format == "elastic" else None
    graphs: list[Root] = []
    expert_weights: list[Weight] = []
    if target.stage == 3:
        state = _sub_group_state(source, target, rank, flats, digests, save_id)
        graphs = [{**source.optim_root, "optimizer_state_dict": state}, _sharded_model(source, target, rank, frozen)]
    else:
        graphs = [{**source.optim_root, "optimizer_state_dict": _group_state(source, target, rank, flats)}]
        if target.has_model(rank):
            graphs.append(_whole_model(source, target, rank, weights, frozen))
        files, expert_weights = _expert_files(source, target, rank)
        graphs += files
    for graph in graphs[: 1 + target.has_model(rank)]:
        graph[SAVE_ID] = save_id
    parts = {(p, FROZEN): storage for p, storage in enumerate(frozen.values())}
    return RankFiles(tuple(graphs), flats, parts, (*weights.values(), *expert_weights), digests)


def _module_weights(source: ReshardSource, target: ReshardTarget) -> dict[str, Weight]:
    """The weights of the module that are made, by name; ``target`` has the layouts of one rank."""
    layout, weights = target.layout, dict[str, Weight]()
    names = target.slicing.file_names()
    for param, whole, strips in zip(layout.params, layout.tensors, strips_by_param(layout), strict=True):
        if param.name in target.weights and not target.slicing.is_expert(names.get(param.name, param.name)):
            weights[param.name] = Weight(whole, strips, new_storage(target.weights[param.name], param.numel))
    return weights


def _expert_files(source: ReshardSource, target: ReshardTarget, rank: int) -> tuple[list[Root], list[Weight]]:
    """The files of the experts that a rank writes: what the saved ones have, and weights that are made; these."""
    experts = target.experts(rank)
    graphs: dict[tuple[str, int], Root] = {(layer.prefix, expert): {} for layer, expert in experts}
    for layer, expert in experts if source.whole_model else ():  # at stage 3 they have no files
        path = source.checkpoint.tag_dir / expert_file_name(layer.number, expert)
        graphs[layer.prefix, expert].update(pairs_of(read_tree(path)))
    weights: list[Weight] = []
    for whole in source.trained.params if experts else ():
        own = numbered_expert(whole.name)
        prefix, _, last = whole.name.rpartition(".")
        if own is not None:
            entries = [(own.prefix, own.number, whole.name, 0, whole.shape)]
        elif last in EXPERT_WEIGHTS:
            shape = whole.shape[1:]
            numel = math.prod(shape)
            numbers = range(whole.shape[0] if whole.shape else 0)
            entries = [(prefix, number, f"{whole.name}.{number}", number * numel, shape) for number in numbers]
        else:
            continue
        for prefix, number, name, start, shape in entries:
            if (prefix, number) in graphs:
                numel = math.prod(shape)
                storage = new_storage(target.weights[whole.name], numel)
                weights.append(Weight(whole, (Strip(start, 0, numel),) if numel else (), storage))
                graphs[prefix, number][name] = tensor(storage, 0, shape)
    return [*graphs.values()], weights


def _flat(storage: Storage, shape: Sequence[int] | None = None, *, requires_grad: bool = False) -> TensorRef:
    """The tensor at the beginning of a storage; by default all of it, flat."""
    return tensor(storage, 0, (storage.numel,) if shape is None else shape, requires_grad=requires_grad)


def scalar_node(value: ScalarValue) -> object:
    """A scalar as it was saved: a Python value, or a 0-dim tensor."""
    data = scalar_bytes(value)
    return value.value if data is None else tensor(new_storage(value.kind, 1, data), 0, ())


def _scalars(target: ReshardTarget) -> list[Root]:
    """The scalars of each flat buffer."""
    return [{key: scalar_node(value) for key, value in scalars.items()} for scalars in target.scalars]


def _optimizer_state(source: ReshardSource, target: ReshardTarget, flats: Flats, scalars: Sequence[Root]) -> Root:
    """Return ``torch.optim.Optimizer.state_dict`` of the flat buffers."""
    states: dict[int, Root] = {}
    for i, keys in enumerate(target.keys):
        own: Root = {**scalars[i]}
        own |= {key: _flat(flats[i, key]) for key in keys if key != FP32}
        if own:
            states[i] = own
    groups = [
        {**group.options, "params": [*members] * (group.repeats if target.stage == 3 else 1)}
        for group, members in zip(source.groups, target.members, strict=True)
    ]
    return {"state": states, "param_groups": groups}


def _sub_group_state(
    source: ReshardSource, target: ReshardTarget, rank: int, flats: Flats, digests: Storage | None, save_id: str
) -> Root:
    """The optimizer's state at stage 3."""
    layout = target.layout
    inner = source.inner
    scalars = _scalars(target)
    state: Root = {"zero_stage": inner.get("zero_stage")} if "zero_stage" in inner else {}
    if source.whole_model:
        state["zero_stage"] = ZERO_STAGE(3)
    state |= _loss_scaler(source)
    state["partition_count"] = target.topology.data_size
    if (shared := partition_groups(target.slicing, layout, rank)) is not None:
        state["ds_zero_partition_groups"] = shared
    state["optimizer_state_dict"] = _optimizer_state(source, target, flats, scalars)
    state["fp32_flat_groups"] = [
        _flat(flats[i, FP32], requires_grad=keys[FP32].startswith(("float", "bfloat")))
        for i, keys in enumerate(target.keys)
    ]
    if digests is None:
        return state
    offset, length = layout.offset.tolist(), layout.owned(rank)[1].tolist()
    members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]

    def lean(i: int, key: str) -> list[TensorRef]:
        return [tensor(flats[i, key], offset[p], (length[p],)) for p in members[i]]

    state["base_optimizer_state"] = [
        {**scalars[i], **{key: lean(i, key) for key in keys if key != FP32}} for i, keys in enumerate(target.keys)
    ]
    tensor_size, (_, tensor_rank) = target.topology.tensor_size, target.topology.place(rank)
    rest: dict[str, object] = {
        **({} if tensor_size == 1 else {"tp_rank": tensor_rank, "tp_size": tensor_size}),
        "digests": tensor(digests, 0, (layout.num_params,)),
        "param_groups": [{**group.options, "params": list(group.params)} for group in source.groups],
        **{key: value for key in SAME_ON_ALL_RANKS if (value := entry(inner, "zeroelastic", key)) is not None},
    }
    state["zeroelastic"] = elastic_table(
        layout,
        rank,
        save_id=save_id,
        train_batch_size=source.train_batch_size,
        rest=rest,
        topology=target.topology,
    )
    return state


def _group_state(source: ReshardSource, target: ReshardTarget, rank: int, flats: Flats) -> Root:
    """The optimizer's state at stages 1 and 2, with the padding at the end, and master weights without it.

    A ``BF16_Optimizer`` leaves it in both, has no loss scaler, and names no stage.
    """
    layout, is_bf16_optimizer = target.layout, target.of_bf16_optimizer
    padded, (number, parts) = layout.sub_group_numel, _shares(layout, rank)
    lean = lean_numel(layout, rank)
    paddings = padded - lean
    if is_bf16_optimizer:  # books all padding on the last rank
        numel = np.bincount(layout.sub_group, weights=layout.numel, minlength=layout.num_sub_groups).astype(np.int64)
        paddings = (padded * parts - numel) * (number == parts - 1)
    state: Root = {} if is_bf16_optimizer else _loss_scaler(source)
    if (clip_grad := _clip_grad(source)) is not None:  # where it is missing, a run keeps its own
        state["clip_grad"] = clip_grad
    state["base_optimizer_state"] = _optimizer_state(source, target, flats, _scalars(target))
    state["single_partition_of_fp32_groups"] = [
        _flat(flats[i, FP32], (numel,), requires_grad=True)
        for i, numel in enumerate((padded if is_bf16_optimizer else lean).tolist())
    ]
    if not is_bf16_optimizer:
        state["zero_stage"] = ZERO_STAGE(target.stage)
    state["group_paddings"] = paddings.tolist()
    if not is_bf16_optimizer:
        state["param_alignment_paddings"] = [list(gaps) for gaps in target.gaps]
    state["partition_count"] = parts.tolist()
    state["ds_version"] = _version(source)
    state["param_slice_mappings"] = _slice_mappings(source, target, rank)
    if not is_bf16_optimizer and target.slicing.info is not None:
        state[INFO] = target.slicing.info
    return state


def _shares(own: Layout, rank: int) -> tuple[Int64Array, Int64Array]:
    """Which part of each flat buffer a rank has, and how many ranks have one, from the rank's layout."""
    first = np.unique(own.sub_group, return_index=True)[1]
    if own.slices is None:
        return np.full_like(first, rank), np.full_like(first, own.world_size)
    return own.slices.part_number(rank)[first], own.slices.num_parts[first]


def _loss_scaler(source: ReshardSource) -> Root:
    """The loss scaler as it was saved, with the flags beside it; a ``BF16_Optimizer`` has none and gets one."""
    keys = ("loss_scaler", "dynamic_loss_scale", "overflow")
    found: Root = {key: source.inner[key] for key in keys if key in source.inner}
    if source.whole_model and "loss_scaler" not in found:
        scaler = instance(LOSS_SCALER, {"cur_scale": 1.0, "dynamic": False})
        return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}
    return found


def _clip_grad(source: ReshardSource) -> int | float | None:
    found = source.inner.get("clip_grad", source.config.get("gradient_clipping"))
    return found if isinstance(found, (int, float)) else None


def _version(source: ReshardSource) -> str:
    """The version of DeepSpeed that saved it, without which DeepSpeed loads no file of stages 1 and 2."""
    for root in (source.inner, source.optim_root, source.model_root(0)):
        if isinstance(found := root.get("ds_version"), str):
            return found
    raise CheckpointError("the checkpoint names no version of DeepSpeed (ds_version), which stages 1 and 2 need.")


def _slice_mappings(source: ReshardSource, target: ReshardTarget, rank: int) -> list[Dict]:
    """``param_slice_mappings``: by group, where the rank's buffer has its part of each parameter.

    A resume does not read it, ``ds_to_universal`` does. Under ``round_robin_gradients`` DeepSpeed writes the places of
    another order than the buffer's; here they are always the buffer's.
    """
    number, names = target.layout.index(), target.slicing.file_names()
    length, offset = target.layout.owned(rank)[1].tolist(), target.layout.buffer_offset(rank).tolist()
    mappings: list[Dict] = []
    for group in source.groups:
        own = [(name, number[name]) for name in group.params if name in number]
        held = ((names.get(name, name), p) for name, p in own if length[p] > 0)
        places = ((name, {"numel": length[p], "start": offset[p]}) for name, p in held)
        mappings.append(Dict((name, instance(_FRAGMENT_ADDRESS, place)) for name, place in places))
    return mappings


def _model_root(source: ReshardSource, target: ReshardTarget, rank: int) -> Root:
    """Return the module states that every stage of ZeRO has."""
    layout, topology, names = target.layout, target.topology, target.slicing.file_names()
    root = dict(source.model_root(_saved_model(source, target, rank)))
    if source.slicing.has_slices or target.slicing.has_slices:
        root = described(target.slicing, root, rank, target.stage)
    if rank > 0 and root.get("shared_params"):
        root["shared_params"] = {}  # rank 0 alone has them
    root["dp_world_size"] = topology.data_size
    root["param_shapes"] = [
        Dict(
            (names.get(name := layout.params[p].name, name), Size(layout.params[p].shape))
            for p in np.flatnonzero(layout.sub_group == i).tolist()
        )
        for i in range(layout.num_sub_groups)
    ]
    return root


def _saved_model(source: ReshardSource, target: ReshardTarget, rank: int) -> int:
    """The number of the saved module states that a rank takes over: of the same data and tensor parallel rank.

    For a rank that did not save, it is that of another one.
    """
    saved, (data_rank, tensor_rank) = source.slicing.topology, target.topology.place(rank)
    tensor_rank %= saved.tensor_size
    if source.whole_model:
        return tensor_rank
    return saved.rank(data_rank if data_rank < saved.data_size else 0, tensor_rank)


def _sharded_model(source: ReshardSource, target: ReshardTarget, rank: int, frozen: Mapping[str, Storage]) -> Root:
    """The module states at stage 3: parameters without elements, and the rank's parts of frozen ones."""
    root = _model_root(source, target, rank)
    trained = set(target.layout.index())
    if source.whole_model:
        _shard_module(root, source, trained)
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if (listed := pairs_of(root.get(key))) and trained & listed.keys():  # frozen after deepspeed.initialize
            root[key] = Dict([(name, value) for name, value in listed.items() if name not in trained])
    if source.frozen.params:
        root["frozen_param_fragments"] = Dict((name, _flat(storage)) for name, storage in frozen.items())
        root["frozen_param_shapes"] = _shapes(target.frozen.params)
    return root


def _shard_module(root: Root, source: ReshardSource, trained: Collection[str]) -> None:
    """Turn the module states of stages 1 and 2 into those of stage 3, with frozen parameters listed."""
    frozen = source.frozen.params
    tied = names_in_module(source, source.model_root(0)).tied
    names = {*trained, *(param.name for param in frozen), *tied}
    empty: dict[str, TensorRef] = {}

    def without_elements(name: str, value: object) -> object:
        """Return one tensor without elements for all names of a tensor."""
        storage = storage_of(value)
        if storage is None:
            return value
        return empty.setdefault(tied.get(name, name), tensor(new_storage(storage.dtype, 0), 0, (0,)))

    root["module"] = Dict(
        (name, without_elements(str(name), value) if name in names else value)
        for name, value in pairs_of(root.get("module")).items()
    )
    shared = pairs_of(root.get("shared_params"))
    root["shared_params"] = {alias: name for alias, name in shared.items() if alias in tied}
    root["frozen_param_shapes"] = _shapes(frozen) if frozen else None
    root["frozen_param_fragments"] = None


def _shapes(params: Sequence[Param]) -> Dict:
    return Dict((param.name, Size(param.shape)) for param in params)


def _whole_model(
    source: ReshardSource,
    target: ReshardTarget,
    rank: int,
    weights: Mapping[str, Weight],
    frozen: Mapping[str, Storage],
) -> Root:
    """The module states at stages 1 and 2, with all that a tensor parallel rank has of the weights."""
    root = _model_root(source, target, rank)
    pieces = _whole_tensors(target.frozen.params, frozen)
    made = _whole_tensors(target.layout.params, {name: weight.storage for name, weight in weights.items()})
    root["module"] = whole_module(root, {**made, **pieces}, names_in_module(source, source.model_root(0)).tied)
    excluded = root.get("frozen_param_shapes") is None and source.stage != 1 and not frozen
    if target.stage == 1 or excluded:  # stage 1 lists no frozen parameters
        root["frozen_param_shapes"] = root["frozen_param_fragments"] = None
    else:
        root["frozen_param_shapes"] = _shapes(target.frozen.params)
        root["frozen_param_fragments"] = Dict(pieces.items())
    return root


def _whole_tensors(params: Sequence[Param], storages: Mapping[str, Storage]) -> dict[str, TensorRef]:
    return {param.name: tensor(storages[param.name], 0, param.shape) for param in params if param.name in storages}
