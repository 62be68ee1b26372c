"""Frozen experts of a save at ZeRO stages 1 and 2, which no other file has: one file for each expert of a layer.

Trained experts are made from the optimizer files. Files are numbered by layer and by the expert's number in the layer,
so that in the layout of frozen parameters a rank stands for the experts of a number, whatever ranks saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.optimizer_file import checked_param, checked_params, damaged
from zeroelastic.checkpoint.saved_layout import SavedMaps
from zeroelastic.checkpoint.tag_files import expert_file_name
from zeroelastic.checkpoint.topology import numbered_expert
from zeroelastic.core.layout import Layout, Param, joined_layouts, layout_from_sub_groups, with_slices
from zeroelastic.core.slices import RankSet, Strip
from zeroelastic.errors import CheckpointError, brief
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import TensorRef, TorchFile, read_torch_file


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
