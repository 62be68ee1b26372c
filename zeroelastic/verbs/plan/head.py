"""The facts of a checkpoint from which a forecast is made, and the layout that a run would have of it.

Rank 0's headers and the sizes of the files alone are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import (
    Shard,
    configured_sub_group_size,
    steps_with_bf16_optimizer,
    zero_option,
)
from zeroelastic.core.layout import (
    Int64Array,
    Layout,
    group_split_of_run,
    layout_from_sub_groups,
    pack_sub_groups,
    partition_numel,
)
from zeroelastic.core.plan import match_params
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.columns import NamedColumn
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, read_torch_file


@dataclass(frozen=True, slots=True)
class Head:
    """The facts of a checkpoint that a forecast needs: rank 0's headers and the size of every file, in rank order.

    ``model_sizes`` has one entry where one file has the whole model (stages 1 and 2). ``weight_bytes`` are the bytes
    of an element of each tensor in the module's state.
    """

    shard: Shard
    model: ModelStates
    optimizer_sizes: Int64Array
    model_sizes: Int64Array
    record_bytes: int
    weight_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def whole_model(self) -> bool:
        """Whether one model states file has the whole weights."""
        return self.shard.stage != 3

    @property
    def world_size(self) -> int:
        """Ranks that saved."""
        return len(self.optimizer_sizes)

    @property
    def frozen(self) -> Layout | None:
        """The saved layout of frozen parameters with elements, or None."""
        frozen = self.model.frozen
        return frozen if frozen is not None and self.model.frozen_extents is not None and frozen.numel.any() else None

    def key_bytes(self, key: str) -> Int64Array:
        """Bytes per element of one state key of each trained parameter, 0 where it has none: ``(num_params,)``."""
        shard = self.shard
        sizes = [
            DTYPE_BYTES[shard.extents[key].dtype[i]] if key in keys else 0 for i, keys in enumerate(shard.tensor_keys)
        ]
        return np.array([*sizes, 0], dtype=np.int64)[shard.layout.sub_group]

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Every state key of the trained parameters, in the order of the file."""
        return tuple(dict.fromkeys(key for keys in self.shard.tensor_keys for key in keys))

    @property
    def element_bytes(self) -> Int64Array:
        """Bytes per element of each trained parameter, all its state keys together: ``(num_params,)``."""
        sizes = np.zeros(self.shard.layout.num_params, dtype=np.int64)
        for key in self.state_keys:
            sizes += self.key_bytes(key)
        return sizes

    @property
    def num_keys(self) -> Int64Array:
        """Tensors that each trained parameter has: ``(num_params,)``."""
        counts = np.array([*(len(keys) for keys in self.shard.tensor_keys), 0], dtype=np.int64)
        return counts[self.shard.layout.sub_group]

    @property
    def frozen_bytes(self) -> Int64Array:
        """Bytes per element of each frozen parameter."""
        frozen, extents = self.model.frozen, self.model.frozen_extents
        if frozen is None or extents is None:
            return np.zeros(0, dtype=np.int64)
        return np.array([DTYPE_BYTES[extents.dtype[p]] for p in range(frozen.num_params)], dtype=np.int64)

    def optimizer_payload(self, layout: Layout) -> int:
        """Bytes of tensors in one rank's optimizer file of this layout, padding included."""
        order = match_params(self.shard.layout, layout)
        sizes = np.zeros(layout.num_sub_groups, dtype=np.int64)
        sizes[layout.sub_group] = self.element_bytes[order]
        return int((layout.sub_group_numel * sizes).sum())

    def frozen_payload(self, world_size: int) -> int:
        """Bytes of frozen parameters in one of that many model states files, padding included."""
        frozen = self.frozen
        return 0 if frozen is None else int((partition_numel(frozen.numel, world_size) * self.frozen_bytes).sum())

    @property
    def trained_weights(self) -> int:
        """Bytes of the trained weights in a module that has them whole."""
        sizes = (self.weight_bytes.get(param.name, self.default_weight_bytes) for param in self.shard.layout.params)
        return sum(param.numel * size for param, size in zip(self.shard.layout.params, sizes, strict=True))

    @property
    def default_weight_bytes(self) -> int:
        """Bytes of an element of a weight by the saved configuration."""
        blocks = (self.shard.ds_config.get(name) for name in ("bf16", "fp16"))
        return 2 if any(isinstance(block, dict) and block.get("enabled") for block in blocks) else 4

    def module_bytes(self, world_size: int) -> Int64Array:
        """Bytes that each rank reads of a model states file besides parameters; additional ranks read rank 0's.

        Shape ``(world_size,)``.
        """
        rank = np.arange(world_size)
        weights = int(self.model.weights[:, 1].sum())
        parts = len(self.model_sizes)
        return self.model_sizes[np.where(rank < parts, rank, 0)] - self.frozen_payload(parts) - weights


def read_head(checkpoint: Checkpoint) -> Head:
    """Open rank 0's headers and list the files. Raises as ``Checkpoint.shard``."""
    model = checkpoint.model_states(0)
    shard = checkpoint.shard(0)
    sizes = file_sizes(checkpoint.tag_dir)
    return Head(
        shard=shard,
        model=model,
        optimizer_sizes=np.array([sizes[path.name] for path in checkpoint.optim_files], dtype=np.int64),
        model_sizes=np.array([sizes[path.name] for path in checkpoint.model_files], dtype=np.int64),
        record_bytes=0 if checkpoint.record is None else sizes[RECORD_NAME],
        weight_bytes=_weight_bytes(checkpoint),
    )


def _weight_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    root = read_torch_file(checkpoint.model_files[0], foreign="inert", columns=True).root
    module = root.get("module") if isinstance(root, dict) else None
    if isinstance(module, NamedColumn):
        sizes = module.facts[:, 2][module.form].tolist()
        return {name: size for name, size in zip(module.names, sizes, strict=True) if size}
    pairs = module.items() if isinstance(module, dict) else ()
    return {name: DTYPE_BYTES[ref.dtype] for name, ref in pairs if isinstance(ref, TensorRef)}


def target_layout(head: Head, world_size: int, stage: int) -> Layout:
    """The layout that DeepSpeed would make at another world size, with the options of the saved configuration."""
    shard = head.shard
    by_name = {param.name: param for param in shard.layout.params}
    groups = [[by_name[name] for name in group.params if name in by_name] for group in shard.groups]
    grouped = {param.name for group in groups for param in group}
    groups.append([param for param in shard.layout.params if param.name not in grouped])
    if stage == 3:
        size = configured_sub_group_size(shard.ds_config)
        return layout_from_sub_groups(pack_sub_groups(groups, world_size=world_size, sub_group_size=size), world_size)
    if stage == 1 and steps_with_bf16_optimizer(shard.ds_config):  # which knows neither option
        return group_split_of_run(groups, world_size)[0]
    round_robin = bool(zero_option(shard.ds_config, "round_robin_gradients"))
    itemsizes = None
    if zero_option(shard.ds_config, "parameter_alignment"):
        firsts = (members[0].name if members else "" for members in groups)
        itemsizes = [head.weight_bytes.get(name, head.default_weight_bytes) for name in firsts]
    return group_split_of_run(groups, world_size, round_robin=round_robin, itemsizes=itemsizes)[0]
