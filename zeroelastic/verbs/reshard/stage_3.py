"""The files of ranks at ZeRO stage 3: every rank has one of the optimizer, rigid or elastic, and one of module states.

The layout follows from the optimizer groups and ``sub_group_size``, as ``_create_fp16_sub_groups`` makes it.

Source (DeepSpeed 0.19.8): ``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict``.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.checkpoint.rank_layout import SAME_ON_ALL_RANKS, elastic_table
from zeroelastic.core.layout import Layout
from zeroelastic.torch_file.tree import Dict, TensorRef, entry, new_storage, pairs_of, storage_of, tensor
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.sink import APART, ZERO_STAGE, NativeSink, RankFiles, Root, flat, loss_scaler, shapes_of
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import ReshardSource, names_in_module, refuse_own_weights


class Stage3Sink(NativeSink):
    """The files of stage 3."""

    times_listed = True

    def __init__(self, source: ReshardSource, slicing: Slicing, options: ReshardOptions) -> None:
        refuse_own_weights(source)
        groups = source.grouped(source.trained.params)
        size = options.sub_group_size
        layout, _ = slicing.layout(groups, 3, source.config, itemsizes=(), sub_group_size=size)
        buffer, advice = f"a sub-group on {slicing.topology.world_size} ranks", f"Choose a {APART}"
        super().__init__(source, slicing, 3, layout, buffer=buffer, advice=advice)
        self.format, self.weights = options.format or "elastic", {}

    def optimizer_state(self, files: RankFiles) -> Root:
        """The state dict of DeepSpeed's optimizer, elastic or rigid."""
        source, inner, scalars = self.source, self.source.inner, self.scalar_nodes()
        state: Root = {"zero_stage": inner.get("zero_stage")} if "zero_stage" in inner else {}
        if source.whole_model:
            state["zero_stage"] = ZERO_STAGE(3)
        state |= loss_scaler(source)
        state["partition_count"] = self.topology.data_size
        if (shared := _partition_groups(self.slicing, files.layout, files.rank)) is not None:
            state["ds_zero_partition_groups"] = shared
        state["optimizer_state_dict"] = self.torch_state(files, scalars)
        state["fp32_flat_groups"] = [
            flat(files.flats[i, FP32], requires_grad=keys[FP32].startswith(("float", "bfloat")))
            for i, keys in enumerate(self.keys)
        ]
        return state | self._elastic(files, scalars) if self.format == "elastic" else state

    def _elastic(self, files: RankFiles, scalars: list[Root]) -> Root:
        """The entries that the elastic format adds; ``digests`` are filled later."""
        source, layout, rank, topology = self.source, files.layout, files.rank, self.topology
        files.digests = new_storage("int64", layout.num_params)
        offset, length = layout.offset.tolist(), layout.owned(rank)[1].tolist()
        members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]

        def lean(i: int, key: str) -> list[TensorRef]:
            return [tensor(files.flats[i, key], offset[p], (length[p],)) for p in members[i]]

        base = [
            {**scalars[i], **{key: lean(i, key) for key in keys if key != FP32}} for i, keys in enumerate(self.keys)
        ]
        tp = {} if topology.tensor_size == 1 else {"tp_rank": topology.place(rank)[1], "tp_size": topology.tensor_size}
        rest: dict[str, object] = {
            **tp,
            "digests": tensor(files.digests, 0, (layout.num_params,)),
            "param_groups": [{**group.options, "params": list(group.params)} for group in source.groups],
            **{k: value for k in SAME_ON_ALL_RANKS if (value := entry(source.inner, "zeroelastic", k)) is not None},
        }
        batch = source.train_batch_size
        table = elastic_table(layout, rank, save_id=files.save_id, train_batch_size=batch, rest=rest, topology=topology)
        return {"base_optimizer_state": base, "zeroelastic": table}

    def model_states(self, files: RankFiles) -> Root:
        """The module states: parameters without elements, and the rank's parts of frozen ones."""
        root, source = self.model_root(files), self.source
        trained = set(files.layout.index())
        if source.whole_model:
            _shard_module(root, source, trained)
        for key in ("frozen_param_shapes", "frozen_param_fragments"):
            if (listed := pairs_of(root.get(key))) and trained & listed.keys():  # frozen after deepspeed.initialize
                root[key] = Dict([(name, value) for name, value in listed.items() if name not in trained])
        if params := files.frozen_layout.params:
            parts = zip(params, files.frozen.values(), strict=True)
            root["frozen_param_fragments"] = Dict((param.name, flat(storage)) for param, storage in parts)
            root["frozen_param_shapes"] = shapes_of(params)
        return root


def _shard_module(root: Root, source: ReshardSource, trained: Collection[str]) -> None:
    """Turn module states of stages 1 and 2 into those of stage 3, with frozen parameters listed."""
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
    root["frozen_param_shapes"] = shapes_of(frozen) if frozen else None
    root["frozen_param_fragments"] = None


def _partition_groups(run: Slicing, own: Layout, rank: int) -> list[dict[str, object]] | None:
    """``ds_zero_partition_groups`` of a rank with the layout ``own``; None for a run without AutoEP."""
    if own.slices is None or not run.has_experts:
        return None
    first, step, count, number = (
        column.tolist()
        for column in (own.slices.first_rank, own.slices.rank_step, own.slices.num_parts, own.slices.part_number(rank))
    )
    found: list[dict[str, object]] = []
    for i, p in enumerate(np.unique(own.sub_group, return_index=True)[1].tolist()):
        is_expert = run.is_expert(own.params[p].name)
        found.append(
            {
                "sub_group": i,
                "partition_count": count[p],
                "partition_rank": number[p],
                "partition_ranks": [*range(first[p], first[p] + step[p] * count[p], step[p])],
                "families": ["autoep_expert" if is_expert else "replicated"],
                "group_names": [f"ep_size_{run.expert_size}" if is_expert else "replicated"],
            }
        )
    return found
