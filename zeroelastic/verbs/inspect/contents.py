"""The contents of a checkpoint, from its headers: parameters, buffers, state, groups, and how ranks share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from zeroelastic.checkpoint.module_names import autoep_layers, module_names, places_of
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader, ParamGroup
from zeroelastic.checkpoint.saved_state import TensorSet, frozen_part, trained_part
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE, TagListing
from zeroelastic.checkpoint.tag_headers import TagHeaders
from zeroelastic.checkpoint.topology import Topology, expert_sizes, local_experts
from zeroelastic.core.layout import Layout, Param
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, TensorRef
from zeroelastic.torch_file.tree import pairs_of
from zeroelastic.verbs.inspect.report import (
    CutTensor,
    ExpertLayer,
    InspectedBuffer,
    InspectedGroup,
    InspectedParam,
    InspectedTopology,
    InspectedTotals,
    LossScaler,
    ParamKind,
    SavedLayout,
    SavedVersions,
    Scalar,
    StateKey,
)

_OWN_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."


def inspected_params(checked: TagHeaders) -> list[InspectedParam]:
    """The trained and the frozen parameters, then the further names of tied ones."""
    params, model = list(_saved_params(checked)), checked.first_model
    is_whole = model is not None and WHOLE_MODEL_FILE.match(model.path.name) is not None
    return params + _tied(checked.root, params, is_whole=is_whole)


def totals(params: Sequence[InspectedParam], listing: TagListing) -> InspectedTotals:
    """Count parameters, elements, bytes and files."""
    num, numel = Counter[ParamKind](), Counter[ParamKind]()
    for param in params:
        num[param.kind] += 1
        numel[param.kind] += param.numel
    sizes = [param.bytes for param in params if param.bytes is not None]
    return InspectedTotals(
        params=num["trained"] + num["frozen"],
        numel=numel["trained"] + numel["frozen"],
        trained_params=num["trained"],
        trained_numel=numel["trained"],
        frozen_params=num["frozen"],
        frozen_numel=numel["frozen"],
        tied_params=num["tied"],
        state_bytes=sum(sizes) if params and len(sizes) == len(params) else None,
        files=len(listing.sizes),
        disk_bytes=sum(listing.sizes.values()),
    )


def model_dtype(root: Mapping[object, object], buffers: Sequence[InspectedBuffer]) -> str | None:
    """The dtype that most tensors of the module have which are no buffers."""
    known, entries = {buffer.name for buffer in buffers}, pairs_of(root.get("module")).items()
    dtypes = Counter(ref.dtype for name, ref in entries if name not in known and isinstance(ref, TensorRef))
    return max(dtypes, key=lambda dtype: (dtypes[dtype], dtype)) if dtypes else None


def saved_layout(shard: OptimizerHeader | None) -> SavedLayout | None:
    """How the trained parameters are cut; None where no header says so, and where ranks have slices of them."""
    if shard is None or shard.layout.slices is not None:
        return None
    split: Literal["param", "group"] = "param" if shard.stage == 3 else "group"
    return SavedLayout(split=split, sub_group_numel=shard.layout.sub_group_numel.tolist())


def saved_by(checked: TagHeaders) -> SavedVersions:
    saved = SavedVersions() if checked.record is None else SavedVersions(**checked.record.versions.model_dump())
    version = checked.root.get("ds_version")
    return saved.model_copy(update={"deepspeed": version}) if isinstance(version, str) else saved


def inspected_buffers(root: Mapping[object, object]) -> list[InspectedBuffer]:
    module, names = root.get("module"), root.get("buffer_names")
    if not isinstance(module, Mapping) or not isinstance(names, (list, tuple, set)):
        return []
    found = [(name, module.get(name)) for name in names if isinstance(name, str)]
    return [
        InspectedBuffer(name=name, shape=list(tensor.shape), dtype=tensor.dtype)
        for name, tensor in found
        if isinstance(tensor, TensorRef)
    ]


def _over_ranks(checked: TagHeaders, shard: OptimizerHeader) -> tuple[Layout, tuple[ParamGroup, ...]]:
    """The layout of the trained parameters and the optimizer's groups; over all ranks where these have slices."""
    sliced = checked.sliced
    return (shard.layout, shard.groups) if sliced is None else (sliced.layout, sliced.groups(shard))


def inspected_groups(checked: TagHeaders) -> list[InspectedGroup]:
    shard = checked.first_shard
    if shard is None:
        return []
    layout, groups = _over_ranks(checked, shard)
    numel = {param.name: param.numel for param in layout.whole_tensors}
    return [
        InspectedGroup(
            options=dict(group.options),
            num_params=len(group.params),
            numel=sum(numel.get(name, 0) for name in group.params),
        )
        for group in groups
    ]


def different_scalars(shard: OptimizerHeader | None) -> dict[str, list[Scalar]]:
    """The different values of each scalar."""
    found: dict[str, dict[str, Scalar]] = {}
    for scalars in shard.scalars if shard is not None else ():
        for key, value in scalars.items():
            found.setdefault(key, {}).setdefault(value.canonical(), Scalar(kind=value.kind, value=value.value))
    return {key: [*values.values()] for key, values in found.items()}


def loss_scaler(shard: OptimizerHeader | None) -> LossScaler | None:
    if shard is None or shard.scaler is None:
        return None
    scaler = shard.scaler
    attributes = {key: value.name if isinstance(value, DType) else value for key, value in scaler.attributes.items()}
    return LossScaler(
        class_name=scaler.class_name, dynamic=scaler.dynamic, overflow=scaler.overflow, attributes=attributes
    )


def state_keys(params: Iterable[InspectedParam]) -> dict[str, StateKey]:
    sizes: dict[str, dict[str, list[int]]] = {}  # bytes of each parameter, by state key and dtype
    for param in params:
        for key, dtype in param.dtypes.items():
            sizes.setdefault(key, {}).setdefault(dtype, []).append(param.numel * DTYPE_BYTES[dtype])
    return {
        key: StateKey(
            dtypes=sorted(by_dtype), num_params=sum(map(len, by_dtype.values())), bytes=sum(map(sum, by_dtype.values()))
        )
        for key, by_dtype in sizes.items()
    }


def _saved_params(checked: TagHeaders) -> Iterator[InspectedParam]:
    """The trained and the frozen parameters, from headers or, where none tells them, from the commit record."""
    model, shard = checked.first_model, checked.first_shard
    trained: list[tuple[Param, Mapping[str, str]]] = []
    frozen: list[tuple[Param, Mapping[str, str]]] = []
    groups: dict[str, int] = {}
    places: dict[str, tuple[int, int]] = {}
    if shard is not None:
        layout, saved = _over_ranks(checked, shard)
        part = trained_part({}, shard, layout)
        trained = list(zip(part.params, part.dtypes, strict=True))
        if checked.sliced is None:
            rows = zip(layout.params, layout.sub_group.tolist(), layout.in_buffer.tolist(), strict=True)
            places = {param.name: (sub_group, offset) for param, sub_group, offset in rows}
        groups = {name: number for number, group in enumerate(saved) for name in group.params}
    elif model is not None:
        trained = [(param, {}) for members in model.sub_groups for param in members]
    if model is not None:
        own = checked.parts[1:] if checked.shards else checked.parts
        part = own[0] if own and own[0].layout.slices is not None else frozen_part({model.rank: model})
        frozen = list(zip(part.params, part.dtypes, strict=True))
    else:
        known, names = {param for param, _ in trained}, checked.saved.trained
        for content in checked.saved.contents():
            if content.param not in known:
                keys = {key: dtype for key, (dtype, _) in content.tensors.items()}
                (trained if content.param.name in names else frozen).append((content.param, keys))
    kinds: tuple[ParamKind, ParamKind] = ("trained", "frozen")
    for kind, found in zip(kinds, (trained, frozen), strict=True):
        for param, dtypes in found:
            sub_group, offset = places.get(param.name, (None, None))
            yield InspectedParam(
                name=param.name,
                kind=kind,
                shape=list(param.shape),
                numel=param.numel,
                bytes=param.numel * sum(DTYPE_BYTES[dtype] for dtype in dtypes.values()) if dtypes else None,
                group=groups.get(param.name),
                dtypes=dict(dtypes),
                sub_group=sub_group,
                offset=offset,
            )


def _tied(root: Mapping[object, object], params: Sequence[InspectedParam], *, is_whole: bool) -> list[InspectedParam]:
    """The further names of tied parameters."""
    shapes = {param.name: param.shape for param in params}
    entries = pairs_of(root.get("module"))
    shared = module_names(root, entries, places_of(entries), is_whole=is_whole).tied
    return [
        InspectedParam(
            name=name,
            kind="tied",
            shape=shapes.get(owner, []),
            numel=0,
            bytes=0,
            tied_to=owner,
        )
        for name, owner in shared.items()
        if name not in shapes
    ]


def inspected_topology(part: TensorSet, topology: Topology, root: Mapping[object, object]) -> InspectedTopology | None:
    """Return how ranks share the trained parameters; None where all have parts of whole tensors.

    ``root`` is the tree of a model states file.
    """
    sizes = expert_sizes(part.layout, topology)
    experts = _expert_layers(part, root)
    if topology.tensor_size == 1 and not experts:
        return None
    cuts = _cuts(part, topology)
    return InspectedTopology(
        data_parallel=topology.data_size,
        tensor_parallel=topology.tensor_size,
        expert_parallel=list(sizes) or ([1] if experts else []),
        experts=experts,
        num_whole=len(part.params) - len(cuts),
        cuts=cuts,
    )


def _expert_layers(part: TensorSet, root: Mapping[object, object]) -> list[ExpertLayer]:
    """The layers with experts, of AutoEP or DeepSpeed's own."""
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
    if slices is None:
        return []
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
