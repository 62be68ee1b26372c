"""AutoEP's layers under the names and in the shapes of the model that was trained.

DeepSpeed replaces a mixture-of-experts block by a layer of its own (deepspeed.module_inject.auto_ep_layer and
moe.ep_repack, 0.19.8), whose experts are w1, w2 and w3 of shape (num_experts, ...). A checkpoint says where the layers
are, but not what they were made of: the preset of the configuration does, or the model type in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from zeroelastic.errors import counted, printable
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, read_whole
from zeroelastic.verbs.model_tensors import ModelTensor, ModelTensors

_SHARED = {"shared_experts": "shared_expert", "shared_experts_gate": "shared_expert_gate"}
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {},
    "qwen2_moe": _SHARED,
    "qwen3_moe": _SHARED,
    "qwen3_5_moe": _SHARED,
    "qwen3_5_moe_text": _SHARED,
    "deepseek_v2": {},
}
"""The presets and model types whose blocks have ``experts.gate_up_proj``, gate rows before up rows, and
``experts.down_proj``, and what such a block calls the modules that AutoEP renames. DeepSeek-V3 is not among them: its
experts are one module each in some models of this type."""

_ROUTER = "gate"
"""What the blocks of all these families call the router."""

_MAX_CONFIG_BYTES = 1 << 24
_OWN_NAMES = ("moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3")
"""Entries of ``expert_parallel`` by which a run names the modules of a block that no preset knows."""


@dataclass(frozen=True, slots=True)
class PartOf:
    """A tensor of the checkpoint as a part of one of the model.

    Its elements are in runs of ``run``, which begin ``step`` apart, the first at ``start``.
    """

    tensor: ModelTensor
    start: int
    run: int
    step: int


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the model: its name and shape there, and what of the checkpoint it is made of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[PartOf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what it is made of."""
        return sum(part.tensor.nbytes for part in self.parts)

    @property
    def first(self) -> ModelTensor:
        """The first tensor, whose kind and dtype all have."""
        return self.parts[0].tensor


def as_saved(tensor: ModelTensor, name: str | None = None) -> NamedTensor:
    """A tensor as the checkpoint has it, possibly under another name."""
    return NamedTensor(name or tensor.name, tensor.shape, (PartOf(tensor, 0, tensor.numel, tensor.numel),))


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model's tensors under its own names, in the order of the checkpoint's; ``tied`` as of ``ModelTensors``."""

    tensors: tuple[NamedTensor, ...]
    tied: Mapping[str, str]
    notes: tuple[str, ...] = ()


def named_model(model: ModelTensors, config: Mapping[str, object], model_type: str | None) -> NamedModel:
    """The tensors of a saved model as it had them before AutoEP replaced blocks of it.

    ``config`` is the saved DeepSpeed configuration. Where the family of the model is not known, the names of DeepSpeed
    are kept, and a note says so.
    """
    blocks = model.autoep_blocks
    if not blocks:
        return NamedModel(tuple(map(as_saved, model.tensors)), model.tied)
    renamed = _family(config, model_type)
    if renamed is None:
        note = (
            f"the experts of {counted(len(blocks), 'layer')} have DeepSpeed's names and shapes, as in "
            f"{printable(blocks[0])}.experts.w1: neither preset_model of expert_parallel nor config.json beside the "
            "tag says how AutoEP made them"
        )
        return NamedModel(tuple(map(as_saved, model.tensors)), model.tied, (note,))
    prefixes = {
        f"{block}.{theirs}.": f"{block}.{own}."
        for block in blocks
        for theirs, own in ({"router.gate": _ROUTER, "router": _ROUTER} | dict(renamed)).items()
    }
    by_name = {tensor.name: tensor for tensor in model.tensors}
    made: dict[str, NamedTensor] = {}
    for block in blocks:
        gate, down, up = (by_name.get(f"{block}.experts.w{i}") for i in (1, 2, 3))
        if gate is None or down is None or up is None or _differ(gate, up):
            continue
        made[gate.name] = _joined(f"{block}.experts.gate_up_proj", gate, up)
        made[down.name] = as_saved(down, f"{block}.experts.down_proj")
    inside = {f"{block}.experts.w3" for block in blocks if f"{block}.experts.w1" in made}
    tensors = tuple(
        made.get(tensor.name) or as_saved(tensor, _renamed(tensor.name, prefixes))
        for tensor in model.tensors
        if tensor.name not in inside
    )
    # The router has a second name, for hooks: that of the block's own router in front of its weight.
    second = tuple(f"{block}.{_ROUTER}.gate." for block in blocks)
    tied = {alias: _renamed(name, prefixes) for alias, name in model.tied.items() if not alias.startswith(second)}
    return NamedModel(tensors, tied)


def model_type_of(model_dir: FilePath | None) -> str | None:
    """The ``model_type`` of config.json in ``model_dir``; None where there is none."""
    if model_dir is None or "config.json" not in file_sizes(model_dir):
        return None
    try:
        found = json.loads(read_whole(model_dir / "config.json", limit=_MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        return None
    model_type = found.get("model_type") if isinstance(found, dict) else None
    return model_type if isinstance(model_type, str) else None


def _family(config: Mapping[str, object], model_type: str | None) -> Mapping[str, str] | None:
    """What the family of the model calls the modules that AutoEP renames; None where the family is not known."""
    options = config.get("expert_parallel")
    if not isinstance(options, Mapping) or any(options.get(name) is not None for name in _OWN_NAMES):
        return None
    preset = options.get("preset_model")
    return FAMILIES.get(preset if isinstance(preset, str) else model_type or "")


def _differ(gate: ModelTensor, up: ModelTensor) -> bool:
    return (gate.shape, gate.dtype, gate.kind) != (up.shape, up.dtype, up.kind) or len(gate.shape) != 3


def _joined(name: str, gate: ModelTensor, up: ModelTensor) -> NamedTensor:
    """Of each expert the rows of ``gate`` and then those of ``up``."""
    experts, rows, columns = gate.shape
    run = rows * columns
    return NamedTensor(
        name, (experts, 2 * rows, columns), (PartOf(gate, 0, run, 2 * run), PartOf(up, run, run, 2 * run))
    )


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """A name with the first of these beginnings that it has replaced."""
    for theirs, own in prefixes.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name
