"""How a saved run shared its tensors: tensor and expert parallel ranks, experts, and what is cut how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from zeroelastic.checkpoint.module_names import autoep_layers
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.checkpoint.topology import Topology, expert_sizes, local_experts
from zeroelastic.verbs.inspect.report import CutTensor, ExpertLayer, InspectedTopology

_OWN_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."


def inspected_topology(part: TensorSet, topology: Topology, root: Mapping[object, object]) -> InspectedTopology | None:
    """Return how ranks share the trained parameters; None where all have parts of whole tensors.

    ``root`` is the tree of a model states file.
    """
    sizes = expert_sizes(part.layout, topology)
    experts = _expert_layers(part, root)
    if topology.tensor_size == 1 and not experts:
        return None
    cuts = _cuts(part, topology) if part.layout.slices is not None else []
    return InspectedTopology(
        data_parallel=topology.data_size,
        tensor_parallel=topology.tensor_size,
        expert_parallel=list(sizes) or ([1] if experts else []),
        experts=experts,
        num_whole=len(part.params) - len(cuts),
        cuts=cuts,
    )


def _expert_layers(part: TensorSet, root: Mapping[object, object]) -> list[ExpertLayer]:
    """The layers with experts: those of AutoEP, or DeepSpeed's own."""
    found: list[ExpertLayer] = []
    for layer in autoep_layers(root):
        name, count = layer.get("module_path"), layer.get("num_experts")
        if isinstance(name, str) and type(count) is int:
            found.append(ExpertLayer(name=name, kind="autoep", num_experts=count))
    own = local_experts(param.name for param in part.params)
    return found + [
        ExpertLayer(name=prefix.removesuffix(_OWN_EXPERTS), kind="deepspeed", num_experts=count)
        for prefix, count in own.items()
    ]


def _cuts(part: TensorSet, topology: Topology) -> list[CutTensor]:
    """The tensors of which a rank has a part only, or that only some of the data parallel ranks have."""
    layout, slices = part.layout, part.layout.slices
    assert slices is not None
    strips = slices.strips
    bounds = np.searchsorted(strips.param, np.arange(layout.num_params + 1)).tolist()
    columns = np.stack((strips.start, strips.numel, strips.num_runs, strips.stride), axis=1)
    by_tensor: dict[int, list[int]] = {}
    for i, number in enumerate(part.numbers().tolist()):
        by_tensor.setdefault(number, []).append(i)
    found: list[CutTensor] = []
    for number, members in by_tensor.items():
        tensor, shapes = part.params[number], {layout.params[i].shape for i in members}
        sharers = int(slices.num_parts[members[0]])
        by: Literal["tensor", "expert"] = "expert" if sharers < topology.data_size else "tensor"
        if shapes == {tensor.shape} and by == "tensor":
            continue
        dims = {dim for shape in shapes for dim, size in enumerate(shape) if size != tensor.shape[dim]}
        own = [columns[bounds[i] : bounds[i + 1]] for i in members]
        found.append(
            CutTensor(
                name=tensor.name,
                shape=list(tensor.shape),
                by=by,
                dim=dims.pop() if len(dims) == 1 else None,
                slices=len({rows.tobytes() for rows in own}),
                pieces=max(map(len, own)),
                ranks=sharers * len(members),
            )
        )
    return found
