"""The tables of AutoTP and AutoEP in a new file, which say what slices of tensors the ranks have.

Source: ``DeepSpeedEngine._save_moe_checkpoint``, ``DeepSpeedZeroOptimizer_Stage3._zero3_partition_group_metadata``,
deepspeed.checkpoint.affine and autoep_affine (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from zeroelastic.torch_file.tree import pairs_of
from zeroelastic.verbs.reshard.slicing import EXPERT_WEIGHTS, INFO, LAYERS, MAP_VERSION, Root, Slicing, even_cut

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
