"""One rank's optimizer file as data: flat buffers, optimizer state by sub-group, groups and scalars, with extents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.values import OptionValue
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DType, Extent

FP32 = "fp32"
"""The state key of the master weights; every other key is the optimizer's own."""

FROZEN = "frozen"
"""The state key of a frozen parameter."""

_SCALERS_AT = "deepspeed.runtime.fp16.loss_scaler"
SCALERS = {
    (_SCALERS_AT, "LossScalerBase"): ("cur_scale",),
    (_SCALERS_AT, "LossScaler"): ("cur_scale",),
    (_SCALERS_AT, "DynamicLossScaler"): (
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


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One optimizer group as saved: its hyper-parameters and the names of its parameters, in order."""

    options: Mapping[str, OptionValue]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScalerState:
    """DeepSpeed's loss scaler as saved: class name, attributes, and the flags beside it."""

    class_name: str
    attributes: Mapping[str, OptionValue | DType]
    dynamic: bool
    overflow: bool


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's optimizer state: which tensors and scalars each flat buffer has and where the tensors are.

    A flat buffer is a sub-group at ZeRO ``stage`` 3, an optimizer group at stages 1 and 2.

    Invariants: every flat buffer and lean tensor has exactly the size that the layout implies, and every extent lies
    inside its file. ``tensor_keys[i]`` and ``scalars[i]`` belong to sub-group i; ``tensor_keys`` includes "fp32".
    ``digests`` is where the file keeps, for each parameter, the sum over its state keys of the partial digests of this
    shard's own part (int64); only elastic files that a save wrote have it. Elastic files alone say the class of the
    ``optimizer`` and, under fp16 autocast, the state of torch's ``grad_scaler``. ``directory`` is the file's digest of
    its zip directory.
    """

    path: FilePath
    size: int
    rank: int
    stage: int
    format: CheckpointFormat
    save_id: str | None
    layout: Layout
    groups: tuple[ParamGroup, ...]
    tensor_keys: tuple[tuple[str, ...], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    extents: Mapping[str, TensorExtents]
    digests: Extent | None
    scaler: ScalerState | None
    ds_config: Mapping[str, object]
    train_batch_size: int | None
    header_bytes: int
    optimizer: str | None = None
    grad_scaler: Mapping[str, OptionValue] | None = None
    directory: str = ""


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


def configured_sub_group_size(config: Mapping[str, object]) -> int:
    """The ``sub_group_size`` of a saved DeepSpeed configuration, in elements; DeepSpeed's default where it has none."""
    size = zero_option(config, "sub_group_size")
    return int(size) if isinstance(size, (int, float)) and 1 <= size < 1 << 62 else DEFAULT_SUB_GROUP_SIZE


def steps_with_bf16_optimizer(config: Mapping[str, object]) -> bool:
    """Whether a run with a DeepSpeed configuration has a ``BF16_Optimizer`` at stage 1.

    Source: ``DeepSpeedEngine._do_optimizer_sanity_check`` (DeepSpeed 0.19.8).
    """
    bf16, dtypes = config.get("bf16"), config.get("data_types")
    offload = zero_option(config, "offload_optimizer")
    on_cpu = isinstance(offload, dict) and str(offload.get("device")) == "cpu"
    gradients = dtypes.get("grad_accum_dtype") if isinstance(dtypes, dict) else None
    return isinstance(bf16, dict) and bool(bf16.get("enabled")) and gradients in _FLOAT32_NAMES and not on_cpu


_FLOAT32_NAMES = ("fp32", "float32", "float", "torch.float32")
"""What DeepSpeed's configuration calls float32."""


def zero_option(config: object, key: str) -> object:
    """An entry of ``zero_optimization`` in a saved DeepSpeed configuration; None where it is missing."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero.get(key) if isinstance(zero, dict) else None
