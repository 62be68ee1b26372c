"""The tensors of the saved model: trained and frozen parameters, buffers, and tied names; only headers are read.

Parameters come from all ranks' headers (``saved_state``). Buffers and tied names come from rank 0's module states, as
in DeepSpeed's ``zero_to_fp32`` (``buffer_names``, ``shared_params``; DeepSpeed 0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.checkpoint.module_names import autoep_layers, module_names, places_of
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, OptionValue, ParamGroup
from zeroelastic.checkpoint.saved_state import SavedState, TensorSet
from zeroelastic.checkpoint.tag_files import EXPERT_FILE
from zeroelastic.checkpoint.topology import numbered_expert
from zeroelastic.errors import CheckpointError, shown
from zeroelastic.torch_file.header import DTYPE_BYTES, Extent, TensorRef, TorchFile, read_torch_file

Kind = Literal["trained", "frozen", "buffer", "state"]


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """Where a buffer's elements are, in rank 0's module states.

    ``extent`` spans from the first element to the last; ``stride``, in elements, is None where they are one contiguous
    run in row-major order.
    """

    extent: Extent
    stride: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PartTensor:
    """Where a parameter's tensor is: a part of the saved state, the number of the parameter there, and a state key."""

    part: TensorSet = field(compare=False, repr=False)
    param: int
    key: str

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.part.params[self.param].name


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor: its name, and the shape and dtype in which it was saved."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    source: PartTensor | StoredBuffer

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, in the dtype in which it was saved."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def digest_name(self) -> tuple[str, str]:
        """The parameter and the state key by which a commit record has the digest; buffers have none."""
        assert isinstance(self.source, PartTensor), f"{self.name}: buffers have no digests"
        return self.source.name, self.source.key

    def rows(self, start: int = 0, stop: int | None = None) -> ExtentTable:
        """Where the files have the elements from ``start`` to ``stop``, from which ``target_offset`` counts.

        Of a buffer with strides it is one row, of all elements from the first to the last.
        """
        source, size = self.source, DTYPE_BYTES[self.dtype]
        if isinstance(source, PartTensor):
            return source.part.tensor_rows(source.param, source.key, start, stop)
        extent = source.extent
        if source.stride is not None:
            start, stop = 0, extent.nbytes // size
        numel = (self.numel if stop is None else stop) - start
        row = (0, extent.offset + start * size, 0, 0, numel, size, 0, start)
        return ExtentTable((extent.path,), *(np.array([value], dtype=np.int64) for value in row))


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """A model's tensors, each once, in state dict order; ``tied`` maps further names to a tensor's name.

    ``left_out`` has a sentence for each name of the module states that has no tensor here. ``autoep_blocks`` are the
    names of the modules that AutoEP replaced by its layers.
    """

    tensors: tuple[ModelTensor, ...]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]
    autoep_blocks: tuple[str, ...] = ()

    def by_name(self) -> dict[str, ModelTensor]:
        """The tensors by name, and after them those by their further names."""
        found = {tensor.name: tensor for tensor in self.tensors}
        return found | {alias: found[name] for alias, name in self.tied.items()}

    def only(self, tensors: Iterable[ModelTensor]) -> ModelTensors:
        """Some of the tensors, with their further names."""
        kept = tuple(tensors)
        names = {tensor.name for tensor in kept}
        return replace(self, tensors=kept, tied={alias: name for alias, name in self.tied.items() if name in names})


def model_tensors(state: SavedState) -> ModelTensors:
    """The tensors of the saved model. Raises CheckpointError naming rank 0's module states if they are damaged."""
    path = state.checkpoint.model_files[0]
    file = read_torch_file(path, foreign="inert")
    root = file.root
    module = root.get("module") if isinstance(root, dict) else None
    names = root.get("buffer_names") if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(module, dict) or not isinstance(names, list):
        raise CheckpointError(f"{path}: holds no module and buffer_names. It is not a ZeRO model states file.")
    found: dict[str, ModelTensor] = {}
    for part in state.parts:
        for i, param in enumerate(part.params):
            key = FP32 if FP32 in part.dtypes[i] else FROZEN
            kind: Kind = "trained" if key == FP32 else "frozen"
            place = PartTensor(part, i, key)
            found[param.name] = ModelTensor(param.name, param.shape, part.dtypes[i][key], kind, place)
    left_out: list[str] = []
    for name in names:
        value = module.get(name) if isinstance(name, str) else None
        if not isinstance(name, str) or name in found:
            raise CheckpointError(f"{path}: buffer_names holds {shown(name)}. The file is damaged.")
        if isinstance(value, TensorRef):
            found[name] = stored_tensor(name, value, file)
        elif name in module:
            left_out.append(f"buffer {name}: it is of a kind that is not read ({shown(value)})")
    left_out += _expert_buffers(state, found)
    saved = state.checkpoint.inventory
    left_out += [
        f"frozen parameter {content.param.name}: its weights are not in the checkpoint ({saved.excluded_how})"
        for content in saved.excluded()
    ]
    if not state.models[0].names_frozen and not saved.excluded():
        left_out.append(
            "frozen parameters, if the run has any: a save of ZeRO stage 1 does not say whether it left them out"
            if state.head.stage == 1
            else "frozen parameters: the checkpoint was saved without them (exclude_frozen_parameters)"
        )
    tied = _tied(file, module, found, left_out, state)
    order = {name: number for number, name in enumerate(module)}
    tensors = sorted(found.values(), key=lambda tensor: order.get(tensor.name, len(order)))
    prefixes = (layer.get("expert_key_prefix") for layer in autoep_layers(root))
    blocks = tuple(prefix.removesuffix(".experts") for prefix in prefixes if isinstance(prefix, str))
    return ModelTensors(tuple(tensors), tied, tuple(left_out), blocks)


def _expert_buffers(state: SavedState, found: Mapping[str, ModelTensor]) -> list[str]:
    """A sentence for each tensor of an expert of DeepSpeed's own layers that is no parameter: its own file has it."""
    files = map(EXPERT_FILE.match, state.checkpoint.expert_files)
    firsts = [match[0] for match in files if match is not None and int(match[2]) == 0]
    roots = [read_torch_file(state.checkpoint.tag_dir / name, foreign="inert").root for name in firsts]
    names = [str(name) for root in roots if isinstance(root, Mapping) for name in root]
    return [
        f"{name}, and those of the other experts: buffers of experts, which are not read from their files"
        for name in names
        if name not in found and numbered_expert(name) is not None
    ]


def part_tensors(part: TensorSet, keys: Collection[str] | None = None) -> list[ModelTensor]:
    """The tensors of a part of the saved state by parameter, named ``PARAM.STATE_KEY``; ``keys`` chooses some."""
    return [
        ModelTensor(f"{param.name}.{key}", param.shape, dtype, "state", PartTensor(part, i, key))
        for i, param in enumerate(part.params)
        for key, dtype in part.dtypes[i].items()
        if keys is None or key in keys
    ]


def model_groups(state: SavedState) -> tuple[ParamGroup, ...]:
    """The optimizer's groups, in which the experts are back in the groups from which DeepSpeed split them off."""
    made: list[ParamGroup] = []
    for group in state.groups:
        plain = _without_experts(group)
        number = next((i for i, before in enumerate(made) if _without_experts(before) == plain), None)
        if not group.options.get("moe"):
            made.append(group)
        elif number is None:
            made.append(ParamGroup(plain, group.params))
        else:
            made[number] = ParamGroup(made[number].options, (*made[number].params, *group.params))
    return tuple(made)


def _without_experts(group: ParamGroup) -> dict[str, OptionValue]:
    """The options but those by which DeepSpeed tells a group of experts (deepspeed.moe.utils, 0.19.8)."""
    return {key: value for key, value in group.options.items() if key not in ("name", "moe")}


def stored_tensor(name: str, ref: TensorRef, file: TorchFile) -> ModelTensor:
    """A tensor that is whole in one file, such as a buffer in the module states."""
    if ref.is_contiguous:
        return ModelTensor(name, ref.shape, ref.dtype, "buffer", StoredBuffer(file.extent(ref), None))
    last = sum((size - 1) * stride for size, stride in zip(ref.shape, ref.stride, strict=True))
    span = replace(ref, shape=(last + 1,), stride=(1,))
    return ModelTensor(name, ref.shape, ref.dtype, "buffer", StoredBuffer(file.extent(span), ref.stride))


def _tied(
    file: TorchFile,
    module: Mapping[object, object],
    found: Mapping[str, ModelTensor],
    left_out: list[str],
    state: SavedState,
) -> dict[str, str]:
    """Further name -> the name of the tensor, resolved in order as ``zero_to_fp32`` does.

    A name of the module's state that has no tensor here gets a sentence in ``left_out``.
    """
    path, root = file.path, file.root
    assert isinstance(root, dict)
    shared = root.get("shared_params")
    if not isinstance(shared, (dict, type(None))):
        raise CheckpointError(f"{path}: shared_params is {shown(shared)}. The file is damaged.")
    for alias, name in (shared or {}).items():
        if not isinstance(alias, str) or not isinstance(name, str):
            raise CheckpointError(f"{path}: shared_params holds {shown(alias)}: {shown(name)}. The file is damaged.")
    names = module_names(root, module, places_of(module), is_whole=state.checkpoint.whole_model)
    tied: dict[str, str] = {}
    for alias, name in (*names.tied.items(), *names.buffers.items()):
        if alias in found and alias in names.tied:
            raise CheckpointError(f"{path}: shared_params holds {shown(alias)}: {shown(name)}. The file is damaged.")
        if alias in found:
            continue
        if name in found or name in tied:
            tied[alias] = tied.get(name, name)
        elif alias in names.tied:
            left_out.append(f"parameter {alias}: it is tied to {name}, which was not saved")
    left_out += [
        f"{name}: what get_extra_state of a module returned, which is neither a parameter nor a buffer"
        for name in module
        if name in names.extra_states
    ]
    return tied
