"""The layout over all ranks of a checkpoint with slices, and of frozen experts, by what its files say of them.

Model states files have the maps of AutoTP and AutoEP and the parameters of each flat buffer; optimizer files say how
many ranks share each buffer. The experts of DeepSpeed's own MoE layers have no maps: their names and the sizes of their
groups say which they are.

Trained experts are made from the optimizer files; frozen ones, at ZeRO stages 1 and 2, are in one file for each expert
of a layer alone. These are numbered by layer and by the expert's number in the layer, so that in the layout of frozen
parameters a rank stands for the experts of a number, whatever ranks saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModuleHeader, trained_tables
from zeroelastic.checkpoint.module_names import module_names, places_of
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader, ParamGroup, checked_param, checked_params, damaged
from zeroelastic.checkpoint.optimizer_reader import OptimizerFile
from zeroelastic.checkpoint.rank_layout import RankSlices
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE, expert_file_name
from zeroelastic.checkpoint.topology import (
    MAX_EXPERT_RANKS,
    MAX_STRIPS,
    SliceMaps,
    Topology,
    even_map,
    expert_maps,
    in_order_of_experts,
    layout_over_ranks,
    local_experts,
    native_expert_maps,
    numbered_expert,
    pattern_maps,
    tensor_maps,
)
from zeroelastic.core.layout import Layout, Param, joined_layouts, layout_from_sub_groups, with_slices
from zeroelastic.core.slices import RankSet, Strip
from zeroelastic.errors import CheckpointError, UndescribedSlicesError, UnsupportedError, brief, shown, some
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import TensorRef, TorchFile, read_torch_file

DATA_FIRST = "use_data_before_expert_parallelism"
"""The entry of a DeepSpeed configuration that is ``Topology.data_first``."""

_FOLDING = "folding"
"""The entry of the model states of a run with AutoEP and AutoTP (``FOLDING_METADATA_KEY``, DeepSpeed 0.19.8)."""


@dataclass(frozen=True, slots=True)
class SavedMaps:
    """The slices of all ranks, as a model states file describes them.

    ``maps`` are the maps of AutoTP and AutoEP, by the names that parameters have on a rank, and ``ep`` the expert
    parallel size of AutoEP. ``num_experts`` counts the experts of each mixture-of-experts layer, ``buffers`` the names
    of the module's buffers on rank 0.
    """

    maps: SliceMaps
    ep: int
    num_experts: tuple[int, ...]
    buffers: frozenset[str] = frozenset()


def saved_maps(root: object, tensor_size: int, path: FilePath) -> SavedMaps:
    """The maps in a model states file, whose tree is ``root``.

    Raises UndescribedSlicesError for slices of tensor parallel ranks without maps, CheckpointError for maps that are
    damaged, UnsupportedError for experts with tensor parallelism.
    """
    if not isinstance(root, Mapping):
        return SavedMaps({}, 1, ())
    experts, ep = expert_maps(root.get("ds_autoep_layers"), path)
    counts, buffers = (root.get(key) for key in ("num_experts", "buffer_names"))
    num_experts = tuple(count for count in counts if type(count) is int) if isinstance(counts, list) else ()
    if tensor_size == 1:
        names = frozenset(map(str, buffers)) if isinstance(buffers, list) else frozenset[str]()
        return SavedMaps(experts, ep, num_experts, names)
    if num_experts or experts or root.get(_FOLDING) is not None:
        raise UnsupportedError(
            f"{path}: was saved with experts (MoE) and {tensor_size} tensor parallel ranks. Experts are loaded at any "
            "expert parallel size without tensor parallelism only. DeepSpeed alone loads it, in the arrangement that "
            "saved."
        )
    return SavedMaps(_maps_of_tensor_ranks(root, tensor_size, path), 1, ())


def _maps_of_tensor_ranks(root: Mapping[object, object], tensor_size: int, path: FilePath) -> SliceMaps:
    """The maps of all parameters, trained and frozen, by affine maps or by patterns."""
    info = root.get("universal_checkpoint_info")
    trained = [param for table in trained_tables(root, path) for param in table]
    try:
        maps = tensor_maps(info, tensor_size, path)
        if maps is not None:
            check_described(maps, [param.name for param in trained], path)
            return maps
        params = [*trained, *_frozen_params(root, {param.name for param in trained}, path)]
        maps = pattern_maps(info, params, tensor_size, path)
    except UnsupportedError as error:
        raise UndescribedSlicesError(str(error)) from None
    if maps is None:
        raise UndescribedSlicesError(f"{path}: does not say which slices of tensors it has.")
    return {param.name: maps.get(param.name) or even_map(param, None, tensor_size) for param in params}


def _frozen_params(root: Mapping[object, object], trained: Collection[str], path: FilePath) -> list[Param]:
    """The frozen parameters that a model states file lists, or whose weights it has."""
    listed, saved = (root.get(key) for key in ("frozen_param_shapes", "module"))
    shapes = {**listed} if isinstance(listed, Mapping) else {}
    module: Mapping[object, object] = saved if isinstance(saved, Mapping) else {}
    names = module_names(root, module, places_of(module), is_whole=WHOLE_MODEL_FILE.match(path.name) is not None)
    others = names.no_params.union(trained)
    for name, ref in module.items():
        if isinstance(ref, TensorRef) and ref.numel and name not in others:
            shapes.setdefault(name, ref.shape)
    return [checked_param(name, shape, path) for name, shape in shapes.items()]


def check_described(maps: SliceMaps, names: Iterable[str], path: FilePath) -> None:
    """Raise UndescribedSlicesError for a parameter of which DeepSpeed's maps say nothing."""
    missing = [name for name in names if name not in maps]
    if missing:
        raise UndescribedSlicesError(f"{path}: does not say which slices of {some(map(brief, missing))} it has.")


@dataclass(frozen=True, slots=True)
class SlicedLayout:
    """The layout over all ranks, and the maps of all parameters, also in DeepSpeed's own MoE layers."""

    topology: Topology
    layout: Layout
    maps: SliceMaps

    def of_rank(self, rank: int) -> RankSlices:
        """Which slices a rank has."""
        names: dict[str, str] = {}
        for name, one in self.maps.items():
            if one.axis == "expert":
                whole = one.view(self.topology, rank).tensor.name
                if whole != name:
                    names[name] = whole
        return RankSlices(self.topology, rank, self.layout.on_rank(rank), names)

    def groups(self, head: OptimizerHeader) -> tuple[ParamGroup, ...]:
        """The optimizer groups of one rank's file, with the parameters of all ranks.

        Those that the rank does not have are in the group whose buffers have them elsewhere. Experts of a layer follow
        each other, as on one rank that has all.
        """
        group_of_name = {name: g for g, group in enumerate(head.groups) for name in group.params}
        group_of_buffer = {
            int(buffer): group_of_name[param.name]
            for param, buffer in zip(head.layout.params, head.layout.sub_group, strict=True)
            if param.name in group_of_name
        }
        members = [list(group.params) for group in head.groups]
        for param, buffer in zip(self.layout.params, self.layout.sub_group.tolist(), strict=True):
            if param.name not in group_of_name and buffer in group_of_buffer:
                group_of_name[param.name] = group_of_buffer[buffer]
                members[group_of_buffer[buffer]].append(param.name)
        return tuple(
            replace(group, params=tuple(in_order_of_experts(names)))
            for group, names in zip(head.groups, members, strict=True)
        )


def sliced_layout(
    models: Sequence[ModuleHeader], opened: OptimizerFile, topology: Topology, saved: SavedMaps
) -> SlicedLayout:
    """The layout of the trained parameters; ``models`` is a model states header of each tensor parallel rank.

    ``SlicedLayout.topology`` has ``Topology.data_first`` by the configuration that ``opened`` has.

    Raises CheckpointError where files contradict each other, UnsupportedError for experts that nothing describes.
    """
    path, buffers = models[0].path, models[0].sub_groups
    data_first = isinstance(opened.config, dict) and bool(opened.config.get(DATA_FIRST))
    topology = replace(topology, data_first=data_first)
    parts = opened.num_parts or (topology.data_size,) * len(buffers)
    if len(parts) != len(buffers):
        raise CheckpointError(
            f"{opened.file.path}: has {len(parts)} flat buffers, and {path} has parameters of {len(buffers)}. Files of "
            "two saves are mixed in this directory."
        )
    if topology.data_size % saved.ep:
        raise CheckpointError(
            f"{path}: has maps of {saved.ep} expert parallel ranks, and {topology.data_size} ranks are no groups of as "
            "many. The file is damaged, or files of two saves are mixed in this directory."
        )
    sizes = [topology.data_size // count for count in parts]
    maps = _with_native_experts(buffers, sizes, opened.stage, saved, path)
    for model in models:
        _check_shapes(model, maps, topology)
        checked_params([param for members in model.sub_groups for param in members], model.path)
    try:
        layout = layout_over_ranks(
            lambda t: models[t].sub_groups,
            topology,
            maps,
            stage=opened.stage,
            expert_sizes=sizes,
            gaps=opened.gaps,
        )
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}. The file is damaged.") from None
    return SlicedLayout(topology, layout, maps)


def _with_native_experts(
    buffers: Sequence[Sequence[Param]], sizes: Sequence[int], stage: int, saved: SavedMaps, path: FilePath
) -> SliceMaps:
    """Add the maps of the experts of DeepSpeed's own MoE layers, which files do not have."""
    maps = dict(saved.maps)
    for ep in sorted({*sizes} - {1}):
        members = [param for params, size in zip(buffers, sizes, strict=True) if size == ep for param in params]
        others = [param for param in members if param.name not in saved.maps]
        if ep > MAX_EXPERT_RANKS or ep * len(others) > MAX_STRIPS:
            raise UnsupportedError(
                f"{path}: has groups of {ep} expert parallel ranks, which have {len(others)} parameters each. At most "
                f"{MAX_EXPERT_RANKS} ranks and {MAX_STRIPS} parameters are read. DeepSpeed alone loads it, in the "
                "arrangement that saved."
            )
        if len(others) < len(members) and ep != saved.ep:
            raise CheckpointError(
                f"{path}: has maps of {saved.ep} expert parallel ranks, and the optimizer files have groups of {ep}. "
                "Files of two saves are mixed in this directory."
            )
        native = native_expert_maps(others, ep) if stage != 3 else {}
        unknown = [param.name for param in others if param.name not in native]
        if unknown:
            raise UnsupportedError(
                f"{path}: has parameters in groups of {ep} expert parallel ranks of which nothing says which experts "
                f"they are: {some(map(brief, unknown))}. DeepSpeed alone loads it, in the arrangement that saved."
            )
        for layer, num_local in local_experts(native).items():
            if num_local * ep not in saved.num_experts:
                raise UnsupportedError(
                    f"{path}: trains {num_local * ep} experts of {layer}, and its layers have "
                    f"{shown(list(saved.num_experts))}. DeepSpeed alone loads it, in the arrangement that saved."
                )
        maps |= native
    return maps


def _check_shapes(model: ModuleHeader, maps: SliceMaps, topology: Topology) -> None:
    """Raise CheckpointError where parameters in a file have other shapes than the maps give to the rank."""
    for param in (*(param for members in model.sub_groups for param in members), *model.frozen.params):
        found = maps.get(param.name)
        if found is None:
            continue
        shape = found.view(topology, model.rank).shape
        if shape != param.shape:
            raise CheckpointError(
                f"{model.path}: {brief(param.name)} has shape {list(param.shape)}; the maps say {list(shape)}. "
                "The file is damaged or not from this tag."
            )


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A whole tensor in files of a layer: that of one ``expert``, or of all, each with one row of dimension 0."""

    layer: int
    tensor: Param
    expert: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that one expert's file has of it."""
        return self.tensor.shape if self.expert is not None else self.tensor.shape[1:]

    @property
    def experts(self) -> range:
        """The experts whose files have some of it."""
        return range(self.tensor.shape[0]) if self.expert is None else range(self.expert, self.expert + 1)

    def name(self, expert: int) -> str:
        """Its name in the file of an expert."""
        return self.tensor.name if self.expert is not None else f"{self.tensor.name}.{expert}"


@dataclass(frozen=True, slots=True)
class FrozenExperts:
    """The frozen parameters of a save with frozen experts: ``dense`` in the model states file, then ``experts``.

    Each is a buffer of ``layout``. Rank 0 has all of ``dense``, too.
    """

    directory: FilePath
    layout: Layout
    dense: TensorExtents
    num_dense: int
    experts: tuple[_Frozen, ...]

    def extents(self, rank: int) -> TensorExtents:
        """Where a rank's parameters are; opens its experts' files. Raises CheckpointError, naming the entry."""
        number = self.layout.numbers_on(rank)
        offset = np.full(len(number), -1, dtype=np.int64)
        dtype, paths = dict(self.dense.dtype), [self.dense.path] * len(number)
        files: dict[int, TorchFile] = {}
        for i, buffer in enumerate(self.layout.sub_group[number].tolist()):
            if buffer < self.num_dense:
                offset[i] = self.dense.offset[buffer]
                continue
            frozen = self.experts[buffer - self.num_dense]
            if frozen.layer not in files:
                files[frozen.layer] = _read(self.directory, frozen.layer, rank)
            file = files[frozen.layer]
            ref = _entries(file).get(frozen.name(rank))
            if not isinstance(ref, TensorRef) or ref.shape != frozen.shape:
                raise damaged(file.path, f"has no {brief(frozen.name(rank))} of shape {list(frozen.shape)}")
            dtype[buffer], paths[i] = ref.dtype, file.path
            offset[i] = file.extent(ref).offset if ref.numel else -1
        own = TensorExtents(self.dense.path, dtype, offset, tuple(paths))
        return own.among(number, self.layout.num_params)


class SavedFrozen(NamedTuple):
    """The frozen parameters of a save: their ``layout`` over the ranks that saved some.

    At stages 1 and 2 one data parallel rank has all. Where ``experts`` with files of their own are among them, rank i
    stands for the experts of number i.
    """

    layout: Layout
    experts: FrozenExperts | None = None

    @classmethod
    def of(cls, models: Sequence[ModuleHeader], topology: Topology, saved: SavedMaps | None) -> SavedFrozen:
        """Those of a model states header of each tensor parallel rank. Raises CheckpointError.

        ``saved`` is None where tensor parallel ranks do not say which slices they have.
        """
        first = models[0]
        if topology.tensor_size == 1:
            maps = saved if first.may_freeze_experts else None
            experts = None if maps is None else frozen_experts(first, maps)
            return cls(first.frozen) if experts is None else cls(experts.layout, experts)
        assert saved is not None, "read with the first model states"
        if WHOLE_MODEL_FILE.match(first.path.name) is not None:
            topology = Topology(1, topology.tensor_size)
        for model in models:
            check_described(saved.maps, (param.name for param in model.frozen.params), model.path)
        buffers = [[[param] for param in model.frozen.params] for model in models]
        try:
            return cls(layout_over_ranks(lambda t: buffers[t], topology, saved.maps, stage=3))
        except (ValueError, OverflowError) as error:
            raise CheckpointError(f"{first.path}: {error}. The file is damaged.") from None


def frozen_experts(model: ModuleHeader, maps: SavedMaps) -> FrozenExperts | None:
    """The frozen parameters where some are experts; None where none are.

    ``model`` is the model states header of a save without tensor parallelism. Opens the file of expert 0 of each layer.
    Raises CheckpointError.
    """
    directory = model.path.parent
    trained = {param.name for members in model.sub_groups for param in members}
    experts = tuple(
        frozen
        for layer, count in enumerate(maps.num_experts)
        for frozen in _of_layer(_read(directory, layer, 0), layer, count, trained, maps)
    )
    if not experts:
        return None
    checked_params([frozen.tensor for frozen in experts], model.path)
    dense = model.frozen.params
    size = max(frozen.experts.stop for frozen in experts)
    try:
        layout = joined_layouts([_on_rank(rank, size, dense, experts) for rank in range(size)])
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{directory}: {error}. A file is damaged or not from this tag.") from None
    return FrozenExperts(directory, layout, model.frozen_extents, len(dense), experts)


def _of_layer(file: TorchFile, layer: int, count: int, trained: set[str], maps: SavedMaps) -> Iterator[_Frozen]:
    """The frozen tensors of the experts of a layer, by the file of expert 0."""
    for name, ref in _entries(file).items():
        if not isinstance(ref, TensorRef):
            continue
        fused, _, number = str(name).rpartition(".")
        shape = checked_param(name, ref.shape, file.path).shape
        if number == "0" and fused in maps.maps:
            tensor = maps.maps[fused].views[0].tensor
            if fused not in trained:
                if tensor.shape != (count, *shape):
                    raise damaged(file.path, f"{brief(str(name))} is {list(shape)} of {list(tensor.shape)}")
                yield _Frozen(layer, tensor, None)
        elif name not in trained and name not in maps.buffers:
            expert = numbered_expert(str(name))
            if expert is None:
                raise damaged(file.path, f"{brief(str(name))} is of no expert")
            names = (f"{expert.prefix}{number}{expert.suffix}" for number in range(count))
            yield from (_Frozen(layer, Param(name, shape), number) for number, name in enumerate(names))


def _on_rank(rank: int, size: int, dense: Sequence[Param], experts: Sequence[_Frozen]) -> Layout:
    """The layout of one rank of ``size``."""
    buffers: list[list[Param]] = [[param] if rank == 0 else [] for param in dense]
    tensors: dict[str, tuple[Param, Sequence[Strip]]] = {}
    for frozen in experts:
        is_here = rank in frozen.experts
        shape = frozen.shape if frozen.expert is not None else (1, *frozen.shape)
        param = Param(frozen.tensor.name, shape)
        buffers.append([param] if is_here else [])
        if is_here and param.numel:
            begin = 0 if frozen.expert is not None else rank * param.numel
            tensors[param.name] = frozen.tensor, (Strip(begin, 0, param.numel),)
    layout = layout_from_sub_groups(buffers, size, num_parts=[1] * len(buffers))
    return with_slices(layout, [RankSet(rank, 1, 1)] * len(buffers), tensors)


def _read(directory: FilePath, layer: int, expert: int) -> TorchFile:
    return read_torch_file(directory / expert_file_name(layer, expert), foreign="inert")


def _entries(file: TorchFile) -> Mapping[object, object]:
    """The tensors of an expert's file by name."""
    if not isinstance(file.root, Mapping):
        raise damaged(file.path, "holds no weights of an expert")
    return file.root
