"""The pickle graph of the one file that DeepSpeed writes at stage 0: the module's weights and the optimizer, whole.

In fp32 the optimizer is the user's own, which steps the weights of the module. In 16 bits DeepSpeed wraps it in a class
that keeps float32 copies of the weights. The state is listed by the number of the parameter, and no file says which
parameter a number is. Source: ``DeepSpeedEngine._save_checkpoint``, ``torch.optim.Optimizer.state_dict``, and
``state_dict`` of ``FP16_UnfusedOptimizer`` and ``FP16_Optimizer`` (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.errors import CheckpointError
from zeroelastic.torch_file.graph import Node, Storage, entry, pairs_of, tensor
from zeroelastic.verbs.reshard.group_files import frozen_storages, weight_storages, whole_tensors
from zeroelastic.verbs.reshard.rank_files import RankFiles, flat_storages, scalar_node
from zeroelastic.verbs.reshard.source import ReshardSource, configured_dtype, whole_module
from zeroelastic.verbs.reshard.target import ReshardTarget

_NAMES_OF_DTYPE = {
    "float32": ("fp32", "float32", "float", "torch.float32"),
    "float16": ("fp16", "float16", "half", "torch.float16"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
}
"""What DeepSpeed's configuration calls each dtype: ``DtypeEnum`` of deepspeed.runtime.config_utils."""


def whole_file(source: ReshardSource, target: ReshardTarget) -> RankFiles:
    """The graph of the file of stage 0."""
    flats, known = flat_storages(target), dict[Storage, bytes]()
    weights, fragments = weight_storages(target), frozen_storages(source, target)
    made, frozen = whole_tensors(target, weights, fragments)
    if target.wrapper == "none":  # the weights of the module are the master weights
        made = {param.name: tensor(flats[i, FP32], 0, param.shape) for i, param in enumerate(target.layout.params)}
    root = dict(source.model_root(0))
    root["module"] = whole_module(root, {**made, **frozen})
    root["optimizer"] = _optimizer(source, target, flats, known)
    for key in ("param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"):
        root[key] = None
    root["dp_world_size"] = target.world_size
    root["ds_config"] = _configuration(pairs_of(root.get("ds_config")))
    return RankFiles(None, root, flats, fragments, known, None, weights)


def whole_file_notes(source: ReshardSource, target: ReshardTarget) -> list[str]:
    """Sentences on the run that can load the file, and on what has no place in it."""
    if target.wrapper == "none":
        notes = ["the optimizer's state is as torch has it: at stage 0 in fp32 DeepSpeed does not wrap the optimizer"]
        if target.frozen is not None:
            notes.append("for a run whose optimizer is given the trained parameters alone, not the frozen ones")
    else:
        notes = [f"the optimizer's state is that of {target.wrapper}, in which DeepSpeed wraps the saved optimizer"]
    dtype = configured_dtype(source.config)
    gradients = entry(source.config, "data_types", "grad_accum_dtype")
    if gradients is not None and gradients not in _NAMES_OF_DTYPE[dtype]:
        notes.append(
            f"for a run without grad_accum_dtype {gradients}: DeepSpeed at stage 0 accumulates gradients in {dtype}"
        )
    if dtype == "float16":
        if entry(_loss_scaler(source), "delayed_shift") not in (None, 1):
            notes.append("not carried: the hysteresis of the loss scaler, which DeepSpeed does not have at stage 0")
        notes.append(
            "for a run that passes loss * engine.optimizer.loss_scale to engine.backward: DeepSpeed 0.19.8 at stage 0 "
            "does not scale the loss in fp16, but divides the gradients by the scale"
        )
    notes.append("without a commit record: DeepSpeed alone reads files of stage 0, zeroelastic does not")
    return notes


def _optimizer(
    source: ReshardSource,
    target: ReshardTarget,
    flats: Mapping[tuple[int, str], Storage],
    known: dict[Storage, bytes],
) -> dict[object, object]:
    """The state dict of the optimizer; state i is that of flat buffer i, in the shape of what the optimizer steps."""
    flat = target.wrapper == "FP16_Optimizer"
    numel = target.layout.sub_group_numel.tolist()
    shapes = [(count,) for count in numel] if flat else [param.shape for param in target.layout.params]
    states: dict[int, dict[str, object]] = {}
    for i, keys in enumerate(target.keys):
        values = {key: scalar_node(value, known) for key, value in target.scalars[i].items()}
        tensors = {key: tensor(flats[i, key], 0, shapes[i]) for key in keys if key != FP32}
        if values or tensors:
            states[i] = {**values, **tensors}
    members: list[list[int]] = [[] for _ in source.groups]
    for i, group in enumerate(target.group_of):
        members[group].append(i)
    own: dict[object, object] = {
        "state": states,
        "param_groups": [
            {**group.options, "params": numbers} for group, numbers in zip(source.groups, members, strict=True)
        ],
    }
    if target.wrapper == "none":
        return own
    state = {**_loss_scale(source, target), "optimizer_state_dict": own}
    master = [tensor(flats[i, FP32], 0, shape, requires_grad=True) for i, shape in enumerate(shapes)]
    if not flat:
        state["fp32_groups"] = [[master[i] for i in numbers] for numbers in members]
        return state
    inner = pairs_of(source.optim_root["optimizer_state_dict"])
    clip_grad = inner.get("clip_grad", source.config.get("gradient_clipping"))
    state["fp32_groups_flat"] = master
    state["clip_grad"] = clip_grad if isinstance(clip_grad, (int, float)) else 0.0  # DeepSpeed's default
    return state


def _loss_scale(source: ReshardSource, target: ReshardTarget) -> dict[object, object]:
    """The fields of DeepSpeed's ``LossScaleConfig``; raises CheckpointError where an fp16 run has no loss scaler."""
    steps = source.model_root(0).get("global_steps")
    if configured_dtype(source.config) != "float16":
        unscaled: dict[object, object] = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": steps}
        return {} if target.wrapper == "FP16_Optimizer" else unscaled
    scaler = _loss_scaler(source)
    if "cur_scale" not in scaler:
        raise CheckpointError("the optimizer files of an fp16 run have no loss scaler. They are damaged.")
    dynamic = "cur_iter" in scaler
    found: dict[object, object] = {
        "dynamic_loss_scale": dynamic,
        "cur_scale": scaler["cur_scale"],
        "cur_iter": scaler.get("cur_iter", steps),
    }
    if dynamic:
        found |= {key: scaler.get(key) for key in ("last_overflow_iter", "scale_factor", "scale_window")}
    return found


def _loss_scaler(source: ReshardSource) -> Mapping[object, object]:
    """The attributes of the loss scaler that a run of ZeRO saved, ``DynamicLossScaler`` or ``LossScaler``."""
    found = entry(source.optim_root["optimizer_state_dict"], "loss_scaler")
    return found.state if isinstance(found, Node) and isinstance(found.state, dict) else {}


def _configuration(config: Mapping[object, object]) -> dict[object, object]:
    """The saved configuration as one of stage 0, where nothing else under ``zero_optimization`` applies.

    Gradients are accumulated in the dtype of the weights: DeepSpeed knows no other at stage 0.
    """
    kept: dict[object, object] = {**config, "zero_optimization": {"stage": 0}}
    if isinstance(dtypes := config.get("data_types"), dict):
        kept["data_types"] = {key: value for key, value in dtypes.items() if key != "grad_accum_dtype"}
    return kept
