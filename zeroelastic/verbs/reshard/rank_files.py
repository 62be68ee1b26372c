"""The pickle graphs of one rank's files, rigid or elastic, as DeepSpeed's stage 3 would write them at a world size.

Source: ``DeepSpeedEngine._save_checkpoint``, ``_save_zero_checkpoint`` and
``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (DeepSpeed 0.19.8), docs/concepts/format.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, SAME_ON_ALL_RANKS, elastic_table, scalar_bytes
from zeroelastic.core.digest import ScalarValue
from zeroelastic.errors import CheckpointError
from zeroelastic.torch_file.graph import (
    Node,
    Storage,
    called,
    entry,
    instance,
    new_storage,
    ordered_dict,
    pairs_of,
    tensor,
    torch_size,
)
from zeroelastic.verbs.reshard.source import ReshardSource
from zeroelastic.verbs.reshard.target import ReshardTarget

_SCALER_OF_BF16 = ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False})
"""What stage 3 has as loss scaler of a bf16 run; ``BF16_Optimizer`` of stage 1 has none."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The graphs of one rank's files, and which of their storages are filled from where.

    ``model`` is None for a rank that writes no module states, ``optim`` where there are no optimizer files.
    ``flats[i, key]`` is the storage of flat buffer i of a state key, ``fragments[p]`` that of frozen parameter p's
    part, ``weights[name]`` that of a whole weight, made from the master weights; ``known`` are storages whose bytes are
    known; ``digests`` takes int64 by parameter, in elastic files; every other storage of the graphs has an ``extent``
    to be copied.
    """

    optim: dict[object, object] | None
    model: dict[object, object] | None
    flats: Mapping[tuple[int, str], Storage]
    fragments: tuple[Storage, ...]
    known: Mapping[Storage, bytes]
    digests: Storage | None
    weights: Mapping[str, Storage] = field(default_factory=dict)


def rank_files(source: ReshardSource, target: ReshardTarget, rank: int, *, save_id: str) -> RankFiles:
    """The graphs of one target rank's files."""
    flats = flat_storages(target)
    known: dict[Storage, bytes] = {}
    digests = new_storage("int64", target.layout.num_params) if target.format == "elastic" else None
    optim = _optim_root(source, target, rank, flats, known, digests, save_id)
    fragments: list[Storage] = []
    model = _model_root(source, target, rank, fragments)
    return RankFiles(optim, model, flats, tuple(fragments), known, digests)


def flat_storages(target: ReshardTarget) -> dict[tuple[int, str], Storage]:
    """The storages of one rank's flat buffers, padding included, by buffer and state key."""
    return {
        (i, key): new_storage(dtype, int(target.layout.sub_group_numel[i]))
        for i, keys in enumerate(target.keys)
        for key, dtype in keys.items()
    }


def _optim_root(
    source: ReshardSource,
    target: ReshardTarget,
    rank: int,
    flats: Mapping[tuple[int, str], Storage],
    known: dict[Storage, bytes],
    digests: Storage | None,
    save_id: str,
) -> dict[object, object]:
    layout = target.layout
    inner = pairs_of(source.optim_root["optimizer_state_dict"])
    values: list[dict[object, object]] = []
    for i in range(layout.num_sub_groups):
        values.append({key: scalar_node(value, known) for key, value in target.scalars[i].items()})

    def flat(i: int, key: str, *, requires_grad: bool = False) -> Node:
        storage = flats[i, key]
        return tensor(storage, 0, (storage.numel,), requires_grad=requires_grad)

    nested = {
        "state": {
            i: {**values[i], **{key: flat(i, key) for key in keys if key != FP32}}
            for i, keys in enumerate(target.keys)
            if len(keys) > 1 or values[i]
        },
        "param_groups": [
            {**group.options, "params": [i for i, owner in enumerate(target.group_of) if owner == g] * group.repeats}
            for g, group in enumerate(source.groups)
        ],
    }
    state: dict[object, object] = {"zero_stage": inner.get("zero_stage")} if "zero_stage" in inner else {}
    if source.whole_model:
        state["zero_stage"] = zero_stage(3)
    state |= loss_scaler(source)
    state["partition_count"] = layout.world_size
    state["optimizer_state_dict"] = nested
    state["fp32_flat_groups"] = [
        flat(i, FP32, requires_grad=keys[FP32].startswith(("float", "bfloat"))) for i, keys in enumerate(target.keys)
    ]
    if target.format == "elastic":
        assert digests is not None
        length = layout.owned(rank)[1]
        members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]
        state["base_optimizer_state"] = [
            {
                **values[i],
                **{
                    key: [tensor(flats[i, key], int(layout.offset[p]), (int(length[p]),)) for p in members[i]]
                    for key in keys
                    if key != FP32
                },
            }
            for i, keys in enumerate(target.keys)
        ]
        rest: dict[str, object] = {
            "digests": tensor(digests, 0, (layout.num_params,)),
            "param_groups": [{**group.options, "params": list(group.params)} for group in source.groups],
            **{key: value for key in SAME_ON_ALL_RANKS if (value := entry(inner, "zeroelastic", key)) is not None},
        }
        state["zeroelastic"] = elastic_table(
            layout, rank, save_id=save_id, train_batch_size=source.train_batch_size, rest=rest
        )
    return {**source.optim_root, "optimizer_state_dict": state}


def zero_stage(stage: int) -> Node:
    """DeepSpeed's ``ZeroStageEnum`` of a stage."""
    return called("deepspeed.runtime.zero.config", "ZeroStageEnum", stage)


def loss_scaler(source: ReshardSource) -> dict[object, object]:
    """The loss scaler as it was saved, with the flags beside it; a ``BF16_Optimizer`` has none and gets one."""
    inner = pairs_of(source.optim_root["optimizer_state_dict"])
    keys = ("loss_scaler", "dynamic_loss_scale", "overflow")
    found: dict[object, object] = {key: inner[key] for key in keys if key in inner}
    if source.whole_model and "loss_scaler" not in found:
        module, name, attributes = _SCALER_OF_BF16
        return {"loss_scaler": instance(module, name, attributes), "dynamic_loss_scale": False, "overflow": False}
    return found


def scalar_node(value: ScalarValue, known: dict[Storage, bytes]) -> object:
    """A scalar as it was saved: a Python value, or a 0-dim tensor, whose bytes are put into ``known``."""
    data = scalar_bytes(value)
    if data is None:
        return value.value
    storage = new_storage(value.kind, 1)
    known[storage] = data
    return tensor(storage, 0, ())


def _model_root(
    source: ReshardSource, target: ReshardTarget, rank: int, fragments: list[Storage]
) -> dict[object, object]:
    layout = target.layout
    root = dict(source.model_root(rank))
    if "dp_world_size" not in root:
        raise CheckpointError("a module states file has no dp_world_size. It is not one of ZeRO-3.")
    root["dp_world_size"] = layout.world_size
    root["param_shapes"] = [
        ordered_dict(
            (layout.params[p].name, torch_size(layout.params[p].shape))
            for p in np.flatnonzero(layout.sub_group == i).tolist()
        )
        for i in range(layout.num_sub_groups)
    ]
    trained = set(layout.index())
    if source.whole_model:
        _shard_module(root, source, trained)
    if rank > 0 and root.get("shared_params"):
        root["shared_params"] = {}  # rank 0 alone has them
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if (listed := pairs_of(root.get(key))) and trained & listed.keys():  # frozen after deepspeed.initialize
            root[key] = ordered_dict([(name, value) for name, value in listed.items() if name not in trained])
    if target.frozen is not None and source.frozen is not None:
        part = target.frozen.part
        pieces: list[tuple[object, object]] = []
        for p, param in enumerate(target.frozen.params):
            storage = new_storage(source.frozen.dtypes[p][FROZEN], int(part[p]))
            fragments.append(storage)
            pieces.append((param.name, tensor(storage, 0, (storage.numel,))))
        root["frozen_param_fragments"] = ordered_dict(pieces)
    return root


def _shard_module(root: dict[object, object], source: ReshardSource, trained: Collection[str]) -> None:
    """Turn the module states of stages 1 and 2 into those of stage 3: parameters without elements, frozen ones listed.

    The elements are in the optimizer files and, for frozen parameters, in ``frozen_param_fragments``.
    """
    frozen = () if source.frozen is None else source.frozen.layout.params
    names = {*trained, *(param.name for param in frozen), *pairs_of(root.get("shared_params"))}

    def without_elements(value: object) -> object:
        storage = value.args[0] if isinstance(value, Node) and value.args else None
        return tensor(new_storage(storage.dtype, 0), 0, (0,)) if isinstance(storage, Storage) else value

    root["module"] = ordered_dict(
        (name, without_elements(value) if name in names else value)
        for name, value in pairs_of(root.get("module")).items()
    )
    if source.frozen is not None:
        root["frozen_param_shapes"] = ordered_dict((param.name, torch_size(param.shape)) for param in frozen)
    else:
        root["frozen_param_shapes"] = root["frozen_param_fragments"] = None
