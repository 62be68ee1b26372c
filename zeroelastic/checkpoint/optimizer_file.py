"""One rank's optimizer file as data: flat buffers, optimizer state by sub-group, groups and scalars, with extents."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param
from zeroelastic.errors import CheckpointError, UnsupportedError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DType, Extent, Stub, TensorRef, TorchFile, paused_collector
from zeroelastic.torch_file.tree import entry

OptionValue = int | float | bool | str | None | tuple[object, ...] | list[object]

OF_THE_PARAMS = frozenset(("params", "param_names"))
"""Entries of an optimizer group that are no hyper-parameters: its parameters, and their names where torch was given
``model.named_parameters()``."""

_MAX_OPTION_DEPTH = 3
_MAX_OPTION_ITEMS = 1024
_MAX_NUMEL = 1 << 60
_MAX_DIMENSIONS = 64
_SHAPE = operator.attrgetter("shape")
_NUMPY_DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "<u1",
    "bool": "?",
}


def damaged(path: FilePath, problem: str) -> CheckpointError:
    """The error about a file that is not what its writer left."""
    return CheckpointError(f"{path}: {problem}. The file is damaged or not from this tag.")


def read_scalar(file: TorchFile, value: object, where: str) -> ScalarValue:
    """A replicated value of a file: a Python number, or a tensor of one element, which is read.

    Raises UnsupportedError, which says ``where``, for anything else.
    """
    if isinstance(value, TensorRef) and value.numel == 1 and value.dtype in (*_NUMPY_DTYPES, "bfloat16"):
        raw = file.read(value)
        if value.dtype == "bfloat16":
            return ScalarValue("bfloat16", float((raw.view("<u2").astype("<u4") << 16).view("<f4")[0]))
        return ScalarValue(value.dtype, raw.view(_NUMPY_DTYPES[value.dtype])[0].item())
    if value is None or isinstance(value, (bool, int, float)):
        return ScalarValue.of_python(value)
    raise UnsupportedError(f"{file.path}: {where} is {shown(value)}, which cannot be resharded.")


def scalar_bytes(value: ScalarValue) -> bytes | None:
    """The bytes of the tensor of one element that a value was read from; None for a Python value."""
    if value.kind == "bfloat16":
        return np.array([value.value], dtype="<f4").tobytes()[2:]
    dtype = _NUMPY_DTYPES.get(value.kind)
    return None if dtype is None else np.array([value.value], dtype=dtype).tobytes()


def read_group(file: TorchFile, group: Mapping[object, object], where: str, params: tuple[str, ...] = ()) -> ParamGroup:
    """An optimizer group, whose entries but ``OF_THE_PARAMS`` are hyper-parameters.

    Raises CheckpointError for a name that is no text, UnsupportedError for a value that is not plain.
    """
    if not all(isinstance(key, str) for key in group):
        raise damaged(file.path, f"{where} has a hyper-parameter whose name is not text")
    own = {str(key): value for key, value in group.items() if key not in OF_THE_PARAMS}
    options = {key: read_option(file, value, f"{where}: {key}") for key, value in own.items()}
    tensors = {key: TensorForm(ref.dtype, ref.shape) for key, ref in own.items() if isinstance(ref, TensorRef)}
    return ParamGroup(options, params, tensors)


def read_option(file: TorchFile, value: object, where: str, depth: int = 0) -> OptionValue:
    """A hyper-parameter: a plain value, a short list or tuple of them, or a tensor of one element, as its number.

    Raises UnsupportedError.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and depth < _MAX_OPTION_DEPTH and len(value) <= _MAX_OPTION_ITEMS:
        items: list[object] = [read_option(file, item, where, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, TensorRef) and value.numel == 1:
        return read_scalar(file, value, where).value
    raise UnsupportedError(f"{file.path}: {where} is {shown(value)}, which is not a plain value.")


def checked_param(name: object, shape: object, path: FilePath) -> Param:
    """A parameter from a file's name and shape. Raises CheckpointError when they are not one."""
    if not isinstance(name, str) or not isinstance(shape, (tuple, list)):
        raise CheckpointError(f"{path}: a parameter table holds {shown(name)}: {shown(shape)}. The file is damaged.")
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < _MAX_NUMEL for size in shape):
        raise CheckpointError(f"{path}: parameter {brief(name)} has shape {shown(shape)}. The file is damaged.")
    return Param(name, tuple(int(size) for size in shape))


def checked_table(names: Collection[object], shapes: Collection[object], path: FilePath) -> list[Param]:
    """The parameters of two columns of a file, of the same length. Raises CheckpointError when they are not ones."""
    with paused_collector():
        return [checked_param(name, shape, path) for name, shape in zip(names, shapes, strict=True)]


def checked_params(params: Sequence[Param], path: FilePath) -> Sequence[Param]:
    """Return the parameters. Raises CheckpointError for more elements than 64-bit offsets can address."""
    if sum(map(math.prod, map(_SHAPE, params))) >= _MAX_NUMEL:
        raise CheckpointError(f"{path}: its parameters have more elements than any file holds. The file is damaged.")
    return params


FP32 = "fp32"
"""The state key of the master weights; every other key is the optimizer's own."""

FROZEN = "frozen"
"""The state key of a frozen parameter."""

WEIGHTS = "weights"
"""The state key of a trained weight in a file of the whole module."""

_MODULE_OF_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_SCALERS = {
    (_MODULE_OF_SCALERS, "LossScalerBase"): ("cur_scale",),
    (_MODULE_OF_SCALERS, "LossScaler"): ("cur_scale",),
    (_MODULE_OF_SCALERS, "DynamicLossScaler"): (
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "scale_factor",
        "scale_window",
        "min_scale",
        "delayed_shift",
        "cur_hysteresis",
    ),
}
"""DeepSpeed's loss scalers by module and name, and the numbers that each steps with."""

DEFAULT_SUB_GROUP_SIZE = 10**9
"""``sub_group_size`` of deepspeed.runtime.zero.config.DeepSpeedZeroConfig, in elements of one rank's parts."""


class TensorForm(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One optimizer group as saved: its hyper-parameters and its parameters' names, in order.

    ``tensors`` are the forms of the hyper-parameters that are tensors of one element in the file.
    """

    options: Mapping[str, OptionValue]
    params: tuple[str, ...]
    tensors: Mapping[str, TensorForm] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScalerState:
    """DeepSpeed's loss scaler as saved: class name, attributes, and DeepSpeed's two flags."""

    class_name: str
    attributes: Mapping[str, OptionValue | DType]
    dynamic: bool
    overflow: bool


class CommonParams(NamedTuple):
    """The parameters of an optimizer file that are the same on all ranks: by flat buffer, and by optimizer group.

    Empty where ranks have slices, which are compared with the maps of slices.
    """

    params: tuple[Param, ...]
    sub_group_numel: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class OptimizerHeader:
    """One rank's optimizer state: which tensors and scalars each flat buffer has and where the tensors are.

    A flat buffer is a sub-group at ZeRO ``stage`` 3, an optimizer group at stages 1 and 2. ``rank`` is counted over all
    ranks; of a checkpoint with slices, ``layout`` is that of the rank, and parameters go by the names of whole tensors.

    Invariants: every flat buffer and lean tensor has exactly the size that the layout implies, and every extent lies
    inside its file. ``tensor_keys[i]`` and ``scalars[i]`` belong to sub-group i; ``tensor_keys`` includes "fp32".
    ``digests`` is where the file keeps, for each parameter, the sum over its state keys of the partial digests of this
    shard's own part (int64); only elastic files that a save wrote have it. Elastic files alone say the class of the
    ``optimizer`` and, under fp16 autocast, the state of torch's ``grad_scaler``. ``directory`` is the file's digest of
    its zip directory. ``clip_grad`` is the norm to which gradients were clipped, which files of stages 1 and 2 state.
    """

    path: FilePath
    size: int
    rank: int
    stage: int
    format: CheckpointFormat
    layout: Layout
    groups: tuple[ParamGroup, ...]
    tensor_keys: tuple[tuple[str, ...], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    extents: Mapping[str, TensorExtents]
    scaler: ScalerState | None
    ds_config: Mapping[str, object]
    header_bytes: int
    save_id: str | None = None
    digests: Extent | None = None
    train_batch_size: int | None = None
    optimizer: str | None = None
    grad_scaler: Mapping[str, OptionValue] | None = None
    directory: str = ""
    clip_grad: float | None = None

    @property
    def common_params(self) -> CommonParams:
        """The parameters that all ranks have."""
        if self.layout.slices is not None:
            return CommonParams((), (), ((),) * len(self.groups))
        lengths = tuple(self.layout.sub_group_numel.tolist())
        return CommonParams(self.layout.params, lengths, tuple(group.params for group in self.groups))


def read_loss_scaler(file: TorchFile, state: Mapping[str, object]) -> ScalerState | None:
    """The loss scaler of a file's state; None where it has none. Raises CheckpointError, UnsupportedError."""
    stub = state.get("loss_scaler")
    if stub is None:
        return None
    if not isinstance(stub, Stub) or (stub.module, stub.qualname) not in _SCALERS:
        kind = f"a {stub.module}.{stub.qualname}" if isinstance(stub, Stub) else shown(stub)
        raise UnsupportedError(
            f"{file.path}: its loss_scaler is {kind}, and none of DeepSpeed's. Its state cannot be restored."
        )
    attributes: dict[str, OptionValue | DType] = {
        key: value if isinstance(value, DType) else read_option(file, value, f"loss_scaler.{key}")
        for key, value in stub.attributes.items()
    }
    for key in _SCALERS[stub.module, stub.qualname]:
        number = attributes.get(key)
        if type(number) not in (int, float) or (key == "cur_scale" and not 0 < float(str(number)) < math.inf):
            raise damaged(file.path, f"its loss_scaler has {key} {shown(number)}")
    return ScalerState(
        class_name=stub.qualname,
        attributes=attributes,
        dynamic=bool(state.get("dynamic_loss_scale")),
        overflow=bool(read_scalar(file, state.get("overflow"), "overflow").value),
    )


def nested_state(
    file: TorchFile, nested: object, num_flats: int
) -> tuple[list[tuple[ParamGroup, list[int]]], list[Mapping[object, object]]]:
    """The state dict of a torch optimizer that steps flat buffers.

    Returns each optimizer group, its parameters not named yet, with the positions of its flat buffers, and the state of
    each flat buffer. Raises CheckpointError, UnsupportedError for state that is not of a parameter.
    """
    nested = nested if isinstance(nested, dict) else {}
    groups_raw, states_raw = nested.get("param_groups"), nested.get("state")
    if not isinstance(groups_raw, list) or not isinstance(states_raw, dict):
        raise damaged(file.path, "holds no optimizer state (param_groups and state)")
    groups: list[tuple[ParamGroup, list[int]]] = []
    flat_of_index: dict[int, int] = {}
    for g, group in enumerate(groups_raw):
        indices = group.get("params") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(indices, list):
            raise damaged(file.path, f"optimizer group {g} is not a group")
        if not all(type(index) is int for index in indices):
            raise damaged(file.path, f"optimizer group {g} refers to parameters by something other than numbers")
        positions: list[int] = []
        for index in dict.fromkeys(indices):
            position = len(flat_of_index)
            if position >= num_flats or index in flat_of_index:
                raise damaged(
                    file.path, f"optimizer group {g} refers to {shown(index)}; there are {num_flats} flat groups"
                )
            flat_of_index[index] = position
            positions.append(position)
        groups.append((read_group(file, group, f"optimizer group {g}"), positions))
    if len(flat_of_index) != num_flats:
        raise damaged(file.path, f"optimizer groups hold {len(flat_of_index)} flat groups of {num_flats}")
    values: list[Mapping[object, object]] = [{} for _ in range(num_flats)]
    own_entries = (key for key in nested if key not in ("param_groups", "state"))
    for key in (*own_entries, *(index for index in states_raw if isinstance(index, str))):
        raise UnsupportedError(
            f"{file.path}: the optimizer keeps {shown(key)} beside the state of its parameters, which has no "
            "place at another world size. Resume at the saved world size, through DeepSpeed alone."
        )
    for index, state in states_raw.items():
        if index not in flat_of_index or not isinstance(state, dict):
            raise damaged(file.path, f"optimizer state {shown(index)} belongs to no flat group")
        values[flat_of_index[index]] = {
            key: value
            for key, value in state.items()
            if not (isinstance(key, str) and key.endswith("_offload_buffer"))  # copies that offload_states() leaves
        }
    return groups, values


def configured_batch(config: Mapping[str, object], world_size: int) -> int | None:
    """The global batch of a saved DeepSpeed configuration, where it says enough."""
    batch = config.get("train_batch_size")
    if type(batch) is int:
        return batch
    micro, steps = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    shared = config.get("sequence_parallel_size", 1)  # ranks that take one batch together
    if type(micro) is not int or type(steps) is not int or type(shared) is not int or shared < 1:
        return None
    return micro * steps * (world_size // shared)


def configured_dtype(config: Mapping[str, object]) -> str:
    """The dtype in which a run with a DeepSpeed configuration has its weights."""
    if entry(config, "bf16", "enabled"):
        return "bfloat16"
    return "float16" if entry(config, "fp16", "enabled") else "float32"


def configured_sub_group_size(config: Mapping[str, object]) -> int:
    """The ``sub_group_size`` of a saved DeepSpeed configuration, in elements; DeepSpeed's default where it has none."""
    size = zero_option(config, "sub_group_size")
    return int(size) if isinstance(size, (int, float)) and 1 <= size < 1 << 62 else DEFAULT_SUB_GROUP_SIZE


def steps_with_bf16_optimizer(config: Mapping[str, object]) -> bool:
    """Return whether a run with a DeepSpeed configuration has a ``BF16_Optimizer`` at stage 1.

    Source: ``DeepSpeedEngine._do_optimizer_sanity_check`` (DeepSpeed 0.19.8).
    """
    bf16, dtypes = config.get("bf16"), config.get("data_types")
    offload = zero_option(config, "offload_optimizer")
    on_cpu = isinstance(offload, dict) and str(offload.get("device")) == "cpu"
    gradients = dtypes.get("grad_accum_dtype") if isinstance(dtypes, dict) else None
    return isinstance(bf16, dict) and bool(bf16.get("enabled")) and gradients in _FLOAT32_NAMES and not on_cpu


_FLOAT32_NAMES = ("fp32", "float32", "float", "torch.float32")
"""The names of float32 in a DeepSpeed configuration."""


def zero_option(config: object, key: str) -> object:
    """An entry of ``zero_optimization`` in a saved DeepSpeed configuration; None where it is missing."""
    return entry(config, "zero_optimization", key)
