"""The run that a reshard is for: its options, the slices of its ranks, and its files' tables of them.

There are as many ranks as are asked for, cut as the saved ones were. Source:
``DeepSpeedEngine._save_moe_checkpoint``, ``DeepSpeedZeroOptimizer_Stage3._zero3_partition_group_metadata``,
deepspeed.checkpoint.affine and autoep_affine (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.topology import SliceMap, SliceMaps, Topology, even_map, even_shape
from zeroelastic.core.layout import Param
from zeroelastic.core.slices import row_major_strides
from zeroelastic.errors import UnsupportedError, UsageError, counted, some
from zeroelastic.torch_file.tree import entry, pairs_of
from zeroelastic.verbs.reshard.slicing import EXPERT_WEIGHTS, INFO, LAYERS, Root, Slicing

LEAST_MEMORY = 64 << 20
"""The smallest ``max_memory``: buffers of a few threads and the tables of one rank."""

ORDER_OPTIONS = ("round_robin_gradients", "parameter_alignment")
"""The entries of ``zero_optimization`` on which the order of parameters in the buffers of stages 1 and 2 depends."""


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
        return {key: value for key in ORDER_OPTIONS if (value := getattr(self, key)) is not None}

    def check(self, stage: int) -> None:
        """Raise UsageError for an option that the ZeRO stage of the result does not have."""
        if stage == 3 and self.zero_options:
            raise UsageError(
                f"{' and '.join(self.zero_options)} has no effect at ZeRO stage {stage}. Leave it out, or give "
                "--stage 1 or 2."
            )
        if stage != 3 and self.format == "elastic":
            raise UsageError(
                f"there is no elastic format of ZeRO stage {stage}: DeepSpeed's own, with elastic_checkpoint, has no "
                "hyper-parameters. Leave --format out, or give rigid."
            )
        if stage != 3 and self.sub_group_size is not None:
            raise UsageError(f"there are no sub-groups at ZeRO stage {stage}. Leave --sub-group-size out.")


MAP_VERSION = 1
_OTHER = -1
_MOST_IN_GROUP = 178956971
"""``max_group_size`` of ``split_params_into_different_moe_groups_for_optimizer`` (deepspeed.moe.utils, 0.19.8)."""

_PARTITIONED, _PARTITIONED_VERSION = "zero3_partitioned", 1


def described(run: Slicing, root: Root, rank: int, stage: int) -> dict[object, object]:
    """The module states ``root`` with what one rank's file says of the slices and of the ranks.

    A run with whole tensors says what it said.
    """
    tensor_size = run.topology.tensor_size
    found = dict(root)
    found["mp_world_size"] = tensor_size
    if isinstance(degrees := root.get("checkpoint_parallel_dimensions"), dict):
        found["checkpoint_parallel_dimensions"] = {**degrees, "tp_degree": tensor_size}
    info = None if run.info is None else dict(run.info)
    if run.has_experts and not run.has_own_experts:
        found[LAYERS] = layers_of(run, rank, stage)
        info = {**pairs_of(root.get(INFO)), **(info or {}), LAYERS: found[LAYERS]}
    if info is not None:
        found[INFO] = info
    elif INFO in found:
        del found[INFO]
    return found


def layers_of(run: Slicing, rank: int, stage: int) -> list[dict[object, object]]:
    """``ds_autoep_layers`` in the file of a rank."""
    size = run.expert_size
    expert_rank = run.topology.expert_rank(rank, size)
    first, step, sharers = run.topology.sharers(0, expert_rank, size)
    layers: list[dict[object, object]] = []
    for layer in run.layers:
        count, local = layer.num_experts, layer.num_experts // size
        names = [name for weight in EXPERT_WEIGHTS if (name := f"{layer.prefix}.{weight}") in run.maps]
        placement = [{"rank": e, "experts": [*range(e * local, (e + 1) * local)]} for e in range(size)]
        layers.append(
            {
                **pairs_of(layer.table),
                "num_local_experts": local,
                "ep_size": size,
                "expert_placement": {"version": 1, "num_experts": count, "ep_size": size, "ranks": placement},
                "affine_maps": {
                    "version": MAP_VERSION,
                    "params": {name: even_cut(run.maps[name].views[0].tensor.shape, 0, size) for name in names},
                },
                "checkpoint_format": _PARTITIONED if stage == 3 else "per_expert_files",
                "checkpoint_format_version": _PARTITIONED_VERSION if stage == 3 else None,
                "ep_group_name": f"ep_size_{size}",
                "ep_rank": expert_rank,
                "expert_data_parallel_rank": (rank - first) // step,
                "expert_data_parallel_world_size": sharers,
                "global_expert_start": expert_rank * local,
                "global_expert_end": (expert_rank + 1) * local,
            }
        )
    return layers


def even_cut(shape: Sequence[int], dim: int | None, size: int) -> dict[str, object]:
    """The affine map of a tensor that ``size`` ranks cut evenly along a dimension, or that each has (``dim`` None)."""
    local = even_shape(shape, dim, size)
    strides = row_major_strides(shape)
    ranks: dict[int, object] = {}
    for rank in range(size):
        at = 0 if dim is None else rank * local[dim] * strides[dim]
        piece = {
            "shape": [*local],
            "source": [at, strides],
            "dest": [0, row_major_strides(local)],
            "locations": [*range(size)] if dim is None else [rank],
        }
        ranks[rank] = {"shard_shape": [*local], "pieces": [piece]}
    return {"logical_shape": [*shape], "ranks": ranks}


def _cut_dimension(found: SliceMap) -> int | None:
    """The dimension along which a tensor is cut evenly; None where all ranks have all of it, else ``_OTHER``."""
    tensor, size = found.views[0].tensor, len(found.views)
    for dim in (None, *(d for d, n in enumerate(tensor.shape) if n % size == 0)):
        if even_map(tensor, dim, size).views == found.views:
            return dim
    return _OTHER


def data_parallel_size(world_size: int, tensor_size: int) -> int:
    """The number of ranks that hold the same slices. Raises UsageError where the tensor parallel ranks do not fit."""
    if world_size % tensor_size:
        raise UsageError(
            f"--world-size {world_size} counts all ranks and is not a multiple of the tensor parallel size "
            f"{tensor_size}. Give another --world-size or --tp."
        )
    return world_size // tensor_size


def target_slicing(
    saved: Slicing, params: Sequence[Param], options: ReshardOptions, stage: int, like: Slicing | None
) -> Slicing:
    """The slicing of the run that is asked for, by default with the saved tensor and expert parallel sizes.

    ``params`` are all whole parameters. The maps are those of ``like``, a run of that tensor parallel size; or those
    that were saved; or made of them. Raises UsageError for sizes that are none, UnsupportedError for a run that
    DeepSpeed does not have, and for slices that are not known.
    """
    tensor_size, expert_size = options.tp or saved.topology.tensor_size, options.ep or saved.expert_size
    data_size = data_parallel_size(options.world_size, tensor_size)
    topology = replace(saved.topology, data_size=data_size, tensor_size=tensor_size)
    if like is not None and tensor_size == 1:
        raise UsageError("--like says how tensor parallel ranks cut weights. Leave it out, or give --tp.")
    if saved.has_experts:
        return _experts_for(saved, topology, expert_size, stage)
    if expert_size > 1:
        raise UnsupportedError(
            "has no experts that DeepSpeed distributes (AutoEP or its own MoE layers): leave --ep out."
        )
    if tensor_size == 1:
        return Slicing(topology)
    if like is not None:
        return Slicing(topology, _maps_like(like, params, topology), info=like.info)
    if tensor_size == saved.topology.tensor_size:
        return replace(saved, topology=topology)
    return _recut(saved, topology)


def _experts_for(saved: Slicing, topology: Topology, size: int, stage: int) -> Slicing:
    tensors = [*{view.tensor.name: view.tensor for found in saved.maps.values() for view in found.views}.values()]
    if topology.tensor_size > 1:
        raise UnsupportedError("has experts, which are not written for tensor parallel ranks. Leave --tp out.")
    if saved.has_own_experts and stage == 3:
        raise UnsupportedError(
            "has experts of DeepSpeed's own MoE layers, with which DeepSpeed does not start at stage 3. Give --stage 1 "
            "or 2."
        )
    uneven = [f"{layer.prefix} ({layer.num_experts})" for layer in saved.layers if layer.num_experts % size]
    if uneven:
        raise UnsupportedError(
            f"has experts that {counted(size, 'expert parallel rank')} cannot share evenly: "
            f"{some(uneven)}. Give an --ep that divides their number."
        )
    if topology.data_size % size:
        raise UsageError(
            f"{counted(topology.data_size, 'rank')} cannot form groups of {size} expert parallel ranks. Give an --ep "
            "that divides --world-size."
        )
    return replace(saved, topology=topology).with_experts(tensors, size)


def _maps_like(like: Slicing, params: Sequence[Param], topology: Topology) -> SliceMaps:
    """The maps of a run for parameters of the same names and shapes."""
    if like.topology.tensor_size != topology.tensor_size:
        raise UsageError(
            f"--like: was saved with tensor parallel size {like.topology.tensor_size}, and {topology.tensor_size} is "
            "asked for. Give a checkpoint of that size."
        )
    wrong = [
        param.name
        for param in params
        if (found := like.maps.get(param.name)) is None or found.views[0].tensor.shape != param.shape
    ]
    if wrong:
        raise UnsupportedError(
            f"--like: has no slices of {some(wrong)}, or those of another shape. Give a checkpoint of the same model."
        )
    return {param.name: like.maps[param.name] for param in params}


def _recut(saved: Slicing, topology: Topology) -> Slicing:
    """The slicing for another tensor parallel size, of cuts that are even."""
    size = topology.tensor_size
    advice = f"Give --like with a checkpoint of a run of tensor parallel size {size}, which says how it cuts."
    if saved.topology.tensor_size == 1:
        raise UnsupportedError(
            f"was saved without tensor parallelism, and does not say how {size} ranks cut its weights. {advice}"
        )
    maps: dict[str, SliceMap] = {}
    entries: dict[str, object] = {}
    for name, found in saved.maps.items():
        tensor = found.views[0].tensor
        dim = _cut_dimension(found)
        if dim is _OTHER or (dim is not None and tensor.shape[dim] % size):
            raise UnsupportedError(
                f"{name} {list(tensor.shape)} was not cut evenly along one dimension, or cannot be by {size} ranks: "
                f"how they cut it is not known. {advice}"
            )
        maps[name] = even_map(tensor, dim, size)
        entries[f"^{re.escape(name)}$"] = even_cut(tensor.shape, dim, size)
    listed = pairs_of(entry(saved.info, "affine_map", "params"))
    in_order = {str(key): entries.pop(str(key)) for key in listed if key in entries}
    affine_map = {"version": MAP_VERSION, "params": in_order | entries}
    return Slicing(topology, maps, info={**(saved.info or {}), "affine_map": affine_map})


def slicing_notes(saved: Slicing, target: Slicing, params: Sequence[Param], *, like: bool) -> list[str]:
    """Sentences on other tensor and expert parallel sizes than the saved ones, and on the runs that have them.

    ``params`` are all whole parameters.
    """
    notes: list[str] = []
    before, size = saved.topology.tensor_size, target.topology.tensor_size
    if size != before:
        notes.append(f"saved with tensor parallel size {before}; the result is of {size}")
        if size > 1 and not like:
            notes.append(
                "weights are cut evenly, along the dimensions along which they were: for a run that cuts so. DeepSpeed "
                "does where heads divide, and refuses the files by their sizes where not; --like gives its own cut"
            )
    if target.expert_size != saved.expert_size:
        notes.append(f"saved with expert parallel size {saved.expert_size}; the result is of {target.expert_size}")
    names = target.file_names()
    numel = sum(param.numel for param in params if target.is_expert(names.get(param.name, param.name)))
    if numel // target.expert_size > _MOST_IN_GROUP:
        notes.append(
            f"a rank has more than {_MOST_IN_GROUP:,} elements of experts, which DeepSpeed puts into several optimizer "
            "groups by default: the result has the groups of the source"
        )
    return notes
