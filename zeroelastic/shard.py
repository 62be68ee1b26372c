"""One rank's optimizer file as data: flat buffers, optimizer state by sub-group, groups and scalars, with extents.

Reads what stock DeepSpeed writes ("rigid": nested ``optimizer_state_dict`` over padded flat buffers) and the elastic
format (``base_optimizer_state``: one lean tensor per parameter), see docs/format.md. Header only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, UnsupportedError, brief, shown
from zeroelastic.layout import Int64Array, Layout, Param, layout_from_sub_groups
from zeroelastic.record import CheckpointFormat
from zeroelastic.storage import FilePath
from zeroelastic.torchfile import DTYPE_BYTES, Blocks, DType, Extent, Stub, TensorRef, TorchFile, read_torch_file

FP32 = "fp32"
"""The state key of the master weights; every other key is the optimizer's own."""

FROZEN = "frozen"
"""The state key of a frozen parameter."""

ELASTIC_VERSION = 1

CARRIED = ("optimizer", "grad_scaler")
"""Keys of the zeroelastic table that are the same in every file of a save, at every world size."""

GRAD_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
"""What the state of torch's GradScaler holds."""

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

_MAX_OPTION_DEPTH = 3
_MAX_OPTION_ITEMS = 1024
_MAX_NUMEL = 1 << 60
_MAX_DIMENSIONS = 64

OptionValue = int | float | bool | str | None | tuple[object, ...]


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
class Pieces:
    """Where one state key of one shard lies: byte offset and dtype of each parameter's part, -1 where there is none.

    ``offset`` has shape ``(num_params,)``; part i holds the shard's owned elements of parameter i as one run. All parts
    are in the file ``path``, but where ``param_paths`` gives each parameter one of its own. ``dtype`` is by sub-group.
    """

    path: FilePath
    dtype: Mapping[int, str]
    offset: Int64Array
    param_paths: tuple[FilePath, ...] | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's optimizer state: which tensors and scalars each sub-group has and where the tensors are.

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
    format: CheckpointFormat
    save_id: str | None
    layout: Layout
    groups: tuple[ParamGroup, ...]
    tensor_keys: tuple[tuple[str, ...], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    pieces: Mapping[str, Pieces]
    digests: Extent | None
    scaler: ScalerState | None
    ds_config: Mapping[str, object]
    train_batch_size: int | None
    header_bytes: int
    optimizer: str | None = None
    grad_scaler: Mapping[str, OptionValue] | None = None
    directory: str = ""


def open_shard(
    path: FilePath,
    rank: int,
    *,
    world_size: int,
    rigid_params: Sequence[Sequence[Param]] | None,
    tp_rank: int = 0,
    through: Blocks | None = None,
) -> Shard:
    """Parse one optimizer file of a ``world_size``-rank save, that of tensor parallel rank ``tp_rank``.

    ``rigid_params`` are the parameters by sub-group, which a rigid optimizer file does not name (they come from a
    ``*_model_states.pt``); elastic files name them themselves. ``through`` as of ``read_torch_file``. Raises
    CheckpointError, UnsupportedError.
    """
    file = read_torch_file(path, through=through)
    root = file.root
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no optimizer_state_dict. It is not a ZeRO optimizer file.")
    stage = state.get("zero_stage")
    if stage != 3:
        raise UnsupportedError(
            f"{path}: was saved with ZeRO stage {shown(stage)}; only stage 3 checkpoints are loaded into a "
            "stage 3 run. Convert the weights with zero_to_fp32.py, or resume with the stage that saved it."
        )
    if state.get("ds_zero_partition_groups") is not None:
        raise UnsupportedError(f"{path}: holds AutoEP expert parameters, which cannot be resharded yet.")
    count = state.get("partition_count")
    if count != world_size:
        raise CheckpointError(
            f"{path}: was saved by {shown(count)} ranks, the rest of the checkpoint by {world_size}. Files of "
            "two saves are mixed in this directory."
        )
    file.locate()
    reader = _ShardReader(file, state, rank, world_size, tp_rank)
    config = root.get("ds_config")
    return reader.elastic(config) if "base_optimizer_state" in state else reader.rigid(rigid_params, config)


class _ShardReader:
    def __init__(self, file: TorchFile, state: Mapping[str, object], rank: int, world_size: int, tp_rank: int) -> None:
        self.file, self.state, self.rank, self.world_size = file, state, rank, world_size
        self.tp_rank = tp_rank

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {problem}. The file is damaged or not from this tag.")

    def rigid(self, sub_groups: Sequence[Sequence[Param]] | None, config: object) -> Shard:
        if sub_groups is None:
            raise self.fail("names no parameters and no model states file does")
        layout = _layout(sub_groups, self.world_size, self.file.path)
        flats = self._flats(layout)
        nested = self.state.get("optimizer_state_dict")
        groups_raw = nested.get("param_groups") if isinstance(nested, dict) else None
        states_raw = nested.get("state") if isinstance(nested, dict) else None
        if not isinstance(groups_raw, list) or not isinstance(states_raw, dict):
            raise self.fail("holds no optimizer state (param_groups and state)")
        groups: list[ParamGroup] = []
        flat_of_index: dict[int, int] = {}
        for g, group in enumerate(groups_raw):
            indices = group.get("params") if isinstance(group, dict) else None
            if not isinstance(group, dict) or not isinstance(indices, list):
                raise self.fail(f"optimizer group {g} is not a group")
            if not all(type(index) is int for index in indices):
                raise self.fail(f"optimizer group {g} refers to parameters by something other than numbers")
            names: list[str] = []
            for index in dict.fromkeys(indices):
                position = len(flat_of_index)
                if position >= len(flats) or index in flat_of_index:
                    raise self.fail(f"optimizer group {g} refers to {shown(index)}; there are {len(flats)} flat groups")
                flat_of_index[index] = position
                names += [param.name for param in sub_groups[position]]
            groups.append(ParamGroup(self._options(group, f"optimizer group {g}"), tuple(names)))
        if len(flat_of_index) != len(flats):
            raise self.fail(f"optimizer groups hold {len(flat_of_index)} flat groups of {len(flats)}")
        values: list[Mapping[str, object]] = [{} for _ in flats]
        for index, entry in states_raw.items():
            if index not in flat_of_index or not isinstance(entry, dict):
                raise self.fail(f"optimizer state {shown(index)} belongs to no flat group")
            values[flat_of_index[index]] = entry
        return self._shard("rigid", None, layout, flats, values, tuple(groups), config)

    def elastic(self, config: object) -> Shard:
        meta = self.state.get("zeroelastic")
        if not isinstance(meta, dict):
            raise self.fail("has base_optimizer_state but no zeroelastic table")
        version = meta.get("format_version")
        if type(version) is not int or version < 1:
            raise self.fail(f"has elastic format version {shown(version)}")
        if version > ELASTIC_VERSION:
            raise CheckpointError(
                f"{self.file.path}: elastic format version {version} is newer than {ELASTIC_VERSION}. Upgrade "
                "zeroelastic to load it."
            )
        rank, world_size = meta.get("rank"), meta.get("world_size")
        if rank != self.rank or world_size != self.world_size:
            raise CheckpointError(
                f"{self.file.path}: was written as rank {shown(rank)} of {shown(world_size)}; its name "
                f"says rank {self.rank} of {self.world_size}. The file is in the wrong place."
            )
        if (tp_rank := meta.get("tp_rank", 0)) != self.tp_rank:
            raise CheckpointError(
                f"{self.file.path}: was written as tensor parallel rank {shown(tp_rank)}; its name says rank "
                f"{self.tp_rank}. The file is in the wrong place."
            )
        save_id = meta.get("save_id")
        if not isinstance(save_id, str):
            raise self.fail("has no save id")
        layout = _layout(self._elastic_params(meta), self.world_size, self.file.path)
        flats = self._flats(layout)
        self._check_owned(meta, layout)
        base = self.state["base_optimizer_state"]
        if not isinstance(base, list) or len(base) != len(flats) or not all(isinstance(e, dict) for e in base):
            raise self.fail(f"base_optimizer_state does not hold one entry for each of {len(flats)} flat groups")
        groups_raw = meta.get("param_groups")
        if not isinstance(groups_raw, list):
            raise self.fail("has no param_groups in its zeroelastic table")
        groups: list[ParamGroup] = []
        for g, group in enumerate(groups_raw):
            names = group.get("params") if isinstance(group, dict) else None
            if not isinstance(group, dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
                raise self.fail(f"optimizer group {g} is not a group")
            groups.append(ParamGroup(self._options(group, f"optimizer group {g}"), tuple(names)))
        batch, optimizer, scaler = (meta.get(key) for key in ("train_batch_size", *CARRIED))
        if not isinstance(optimizer, (str, type(None))):
            raise self.fail(f"names an optimizer {shown(optimizer)}")
        if scaler is not None and (
            not isinstance(scaler, dict)
            or scaler.keys() != GRAD_SCALER
            or not all(isinstance(value, (int, float)) for value in scaler.values())
        ):
            raise self.fail(f"has a grad_scaler {shown(scaler)}")
        return self._shard(
            "elastic",
            save_id,
            layout,
            flats,
            base,
            tuple(groups),
            config,
            batch if type(batch) is int else None,
            self._digests(meta, layout),
            optimizer,
            None if scaler is None else self._options(scaler, CARRIED[1]),
        )

    def _elastic_params(self, meta: Mapping[str, object]) -> list[list[Param]]:
        tables = meta.get("sub_groups")
        if not isinstance(tables, list):
            raise self.fail("has no sub_groups in its zeroelastic table")
        sub_groups: list[list[Param]] = []
        for i, table in enumerate(tables):
            names = table.get("names") if isinstance(table, dict) else None
            shapes = table.get("shapes") if isinstance(table, dict) else None
            if not isinstance(names, list) or not isinstance(shapes, list) or len(names) != len(shapes):
                raise self.fail(f"sub-group {i} of its zeroelastic table is not a table of names and shapes")
            sub_groups.append([self._param(name, shape) for name, shape in zip(names, shapes, strict=True)])
        return sub_groups

    def _param(self, name: object, shape: object) -> Param:
        return checked_param(name, shape, self.file.path)

    def _check_owned(self, meta: Mapping[str, object], layout: Layout) -> None:
        tables = meta["sub_groups"]
        assert isinstance(tables, list)
        start, length = layout.owned(self.rank)
        recorded: dict[str, list[object]] = {"offsets": [], "numels": []}
        for i, table in enumerate(tables):
            for key, column in recorded.items():
                values = table.get(key)
                if not isinstance(values, list) or len(values) != int((layout.sub_group == i).sum()):
                    raise self.fail(f"sub-group {i} of its zeroelastic table has no {key} for each parameter")
                column += values
        if recorded["offsets"] != start.tolist() or recorded["numels"] != length.tolist():
            raise self.fail(f"records other owned ranges than rank {self.rank} of {self.world_size} has")

    def _digests(self, meta: Mapping[str, object], layout: Layout) -> Extent | None:
        digests = meta.get("digests")
        if digests is None:
            return None
        if not isinstance(digests, TensorRef) or digests.dtype != "int64" or digests.shape != (layout.num_params,):
            raise self.fail(f"has digests that are not one int64 for each of {layout.num_params} parameters")
        return self.file.extent(digests)

    def _flats(self, layout: Layout) -> list[TensorRef]:
        flats = self.state.get("fp32_flat_groups")
        if not isinstance(flats, list) or not all(isinstance(flat, TensorRef) for flat in flats):
            raise self.fail("holds no fp32_flat_groups")
        if len(flats) != layout.num_sub_groups:
            raise self.fail(
                f"fp32_flat_groups has {len(flats)} entries; the parameter table implies {layout.num_sub_groups}"
            )
        for i, flat in enumerate(flats):
            want = int(layout.sub_group_numel[i])
            if flat.numel == 0 < want:  # DeepSpeed cannot restore it either, so not a thing to leave to it
                raise CheckpointError(
                    f"{self.file.path}: has no elements in fp32_flat_groups[{i}]: DeepSpeed saved it from a run with "
                    "offload_optimizer on NVMe, and left master weights and optimizer state to raw copies of swap "
                    "files (offloaded_tensors/rankNN), which do not say what is in them. Save such runs with "
                    "elastic_checkpoint on: all of it is then in the files, for any world size."
                )
            if flat.shape != (want,):
                raise CheckpointError(
                    f"{self.file.path}: fp32_flat_groups[{i}] has {flat.numel} elements; {self.world_size} ranks imply "
                    f"{want}. The file is damaged or not from this tag."
                )
        return flats

    def _options(self, group: Mapping[object, object], where: str) -> dict[str, OptionValue]:
        if not all(isinstance(key, str) for key in group):
            raise self.fail(f"{where} has a hyper-parameter whose name is not text")
        return {str(k): self._option(v, f"{where}: {k}") for k, v in group.items() if k != "params"}

    def _option(self, value: object, where: str, depth: int = 0) -> OptionValue:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (tuple, list)) and depth < _MAX_OPTION_DEPTH and len(value) <= _MAX_OPTION_ITEMS:
            return tuple(self._option(item, where, depth + 1) for item in value)
        if isinstance(value, TensorRef) and value.numel == 1:
            return self._scalar(value, where).value
        raise UnsupportedError(f"{self.file.path}: {where} is {shown(value)}, which is not a plain value.")

    def _scalar(self, value: object, where: str) -> ScalarValue:
        return read_scalar(self.file, value, where)

    def _shard(
        self,
        format: CheckpointFormat,
        save_id: str | None,
        layout: Layout,
        flats: Sequence[TensorRef],
        values: Sequence[Mapping[str, object]],
        groups: tuple[ParamGroup, ...],
        config: object,
        train_batch_size: int | None = None,
        digests: Extent | None = None,
        optimizer: str | None = None,
        grad_scaler: Mapping[str, OptionValue] | None = None,
    ) -> Shard:
        members = [np.flatnonzero(layout.sub_group == i) for i in range(layout.num_sub_groups)]
        owned = layout.owned(self.rank)[1]
        offsets: dict[str, Int64Array] = {}
        dtypes: dict[str, dict[int, str]] = {}
        tensor_keys: list[tuple[str, ...]] = []
        scalars: list[dict[str, ScalarValue]] = []

        def place(key: str, i: int, offset: Int64Array, dtype: str) -> None:
            offsets.setdefault(key, np.full(layout.num_params, -1, dtype=np.int64))[members[i]] = offset
            dtypes.setdefault(key, {})[i] = dtype

        for i, flat in enumerate(flats):
            base = self.file.extent(flat)
            place(FP32, i, base.offset + layout.offset[members[i]] * DTYPE_BYTES[flat.dtype], flat.dtype)
            keys, replicated = [FP32], {}
            for key, value in values[i].items():
                where = f"optimizer state {shown(key)} of sub-group {i}"
                if format == "rigid" and isinstance(key, str) and key.endswith("_offload_buffer"):
                    continue  # second copies that DeepSpeed's offload_states() leaves among the state
                if not isinstance(key, str) or key in (FP32, FROZEN):
                    raise UnsupportedError(f"{self.file.path}: {where} has a name that cannot be kept.")
                if isinstance(value, list):
                    extents, dtype = self._lean(value, owned[members[i]], where)
                elif isinstance(value, TensorRef) and value.shape == flat.shape and format == "rigid":
                    dtype = value.dtype
                    extents = self.file.extent(value).offset + layout.offset[members[i]] * DTYPE_BYTES[dtype]
                elif isinstance(value, TensorRef) and value.shape != ():
                    raise UnsupportedError(
                        f"{self.file.path}: {where} has shape {value.shape}, neither that of its flat buffer "
                        f"{flat.shape} nor a scalar. Block-quantised and factored states cannot be resharded."
                    )
                else:
                    replicated[key] = self._scalar(value, where)
                    continue
                keys.append(key)
                place(key, i, extents, dtype)
            tensor_keys.append(tuple(keys))
            scalars.append(replicated)
        return Shard(
            path=self.file.path,
            size=self.file.size,
            rank=self.rank,
            format=format,
            save_id=save_id,
            layout=layout,
            groups=groups,
            tensor_keys=tuple(tensor_keys),
            scalars=tuple(scalars),
            pieces={key: Pieces(self.file.path, dtypes[key], offset) for key, offset in offsets.items()},
            digests=digests,
            scaler=self._scaler(),
            ds_config={str(k): v for k, v in config.items()} if isinstance(config, dict) else {},
            train_batch_size=train_batch_size,
            header_bytes=self.file.header_bytes,
            optimizer=optimizer,
            grad_scaler=grad_scaler,
            directory=self.file.directory,
        )

    def _lean(self, tensors: list[object], owned: Int64Array, where: str) -> tuple[Int64Array, str]:
        if len(tensors) != len(owned):
            raise self.fail(f"{where} has {len(tensors)} tensors; the sub-group has {len(owned)} parameters")
        offsets = np.empty(len(owned), dtype=np.int64)
        dtypes: set[str] = set()
        for i, (tensor, numel) in enumerate(zip(tensors, owned.tolist(), strict=True)):
            if not isinstance(tensor, TensorRef):
                raise self.fail(f"{where} holds something that is not a tensor")
            if tensor.shape != (numel,):
                raise self.fail(f"{where}: part {i} has shape {tensor.shape}; rank {self.rank} owns {numel} elements")
            dtypes.add(tensor.dtype)
            offsets[i] = self.file.extent(tensor).offset
        if len(dtypes) != 1:
            raise self.fail(f"{where} mixes the dtypes {sorted(dtypes)}")
        return offsets, dtypes.pop()

    def _scaler(self) -> ScalerState | None:
        stub = self.state.get("loss_scaler")
        if stub is None:
            return None
        if not isinstance(stub, Stub) or (stub.module, stub.qualname) not in SCALERS:
            kind = f"a {stub.module}.{stub.qualname}" if isinstance(stub, Stub) else shown(stub)
            raise UnsupportedError(
                f"{self.file.path}: its loss_scaler is {kind}, and none of DeepSpeed's. Its state cannot be restored."
            )
        attributes: dict[str, OptionValue | DType] = {}
        for key, value in stub.attributes.items():
            attributes[key] = value if isinstance(value, DType) else self._option(value, f"loss_scaler.{key}")
        for key in SCALERS[stub.module, stub.qualname]:
            number = attributes.get(key)
            if type(number) not in (int, float) or (key == "cur_scale" and not 0 < float(str(number)) < math.inf):
                raise self.fail(f"its loss_scaler has {key} {shown(number)}")
        overflow = self.state.get("overflow")
        return ScalerState(
            class_name=stub.qualname,
            attributes=attributes,
            dynamic=bool(self.state.get("dynamic_loss_scale")),
            overflow=bool(self._scalar(overflow, "overflow").value),
        )


_NUMPY_DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint8": "<u1",
    "bool": "?",
}


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


def checked_param(name: object, shape: object, path: FilePath) -> Param:
    """A parameter from a file's name and shape. Raises CheckpointError when they are not one."""
    if not isinstance(name, str) or not isinstance(shape, (tuple, list)):
        raise CheckpointError(f"{path}: a parameter table holds {shown(name)}: {shown(shape)}. The file is damaged.")
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < _MAX_NUMEL for size in shape):
        raise CheckpointError(f"{path}: parameter {brief(name)} has shape {shown(shape)}. The file is damaged.")
    return Param(name, tuple(int(size) for size in shape))


def checked_params(params: Sequence[Param], path: FilePath) -> Sequence[Param]:
    """The same parameters. Raises CheckpointError when they are more than 64-bit offsets can address."""
    if sum(param.numel for param in params) >= _MAX_NUMEL:
        raise CheckpointError(f"{path}: its parameters have more elements than any file holds. The file is damaged.")
    return params


def _layout(sub_groups: Sequence[Sequence[Param]], world_size: int, path: FilePath) -> Layout:
    checked_params([param for sub_group in sub_groups for param in sub_group], path)
    try:
        return layout_from_sub_groups(sub_groups, world_size)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}. The file is damaged.") from None
