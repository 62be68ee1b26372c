"""The model states file of one rank, ``*_model_states.pt``: the parts of it that belong to the layout.

These are parameter shapes, frozen parameters, counters, and which entries are client state; the module's tensors are
not read. At ZeRO stage 3 every rank writes a file, with its parts of the frozen parameters; at stages 1 and 2 rank 0
writes the only one, ``mp_rank_XX_model_states.pt``, with the whole module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.module_names import module_names, places_of
from zeroelastic.checkpoint.optimizer_file import TensorForm, checked_params, checked_table, zero_option
from zeroelastic.checkpoint.tag_files import (
    SAVE_ID,
    WHOLE_MODEL_FILE,
    TensorParallel,
    expert_file_name,
    other_tp_size,
    parse_rank_file,
    saved_as,
)
from zeroelastic.core.layout import Int64Array, Layout, Param, partition_numel, unpacked_layout
from zeroelastic.errors import CheckpointError, UnsupportedError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DTYPE_BYTES, Stub, TensorRef, TorchFile, read_torch_file, walk_refs

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The counters of an engine that DeepSpeed loads."""

_NO_RANGES = np.empty((0, 2), dtype=np.int64)
_MAX_WORLD_SIZE = 1 << 24
_MAX_TENSOR_SIZE = 1 << 16
_MAX_EXPERTS = 1 << 16
_STATES = ("lr_scheduler", "random_ltd", "data_sampler")
_OF_DEEPSPEED = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "num_experts",
        "autoep_layers",
        SAVE_ID,
    ]
)


@dataclass(frozen=True, slots=True)
class ModuleHeader:
    """The header of one rank's ``*_model_states.pt``; the payload of the module is not read.

    ``world_size`` are the data parallel ranks, and ``tensor_size`` the tensor parallel ones. Names and shapes are those
    on the rank: of slices, under the names that DeepSpeed has there. ``sub_groups`` are the trained parameters in flat
    order, by sub-group at stage 3 and by optimizer group at stages 1 and 2; ``frozen`` those that the optimizer does
    not have, and ``frozen_extents`` where this rank's parts of them are: none where they were excluded from the save,
    and then ``names_frozen`` is False. ``directory`` is the digest of the file's zip directory. ``values`` are the
    counters and states that DeepSpeed loads from there; ``others`` the forms of the entries in the module's state that
    are no parameters, None for an entry that is no tensor. ``weights`` are the (offset, nbytes) of the trained
    parameters in a file of the whole module, which a load makes from the master weights where these say what they are;
    ``weight_places`` are the dtype and offset of those that have the shape of their parameter. ``params_alone`` are the
    (offset, nbytes) of all payload that nothing but a parameter uses; storages that a parameter shares with a buffer,
    or with client state, are not in it. Both ascend, with shape ``(num_ranges, 2)``. ``expert_files`` are the names of
    the files that have the weights of the experts of mixture-of-experts layers, and ``may_freeze_experts`` whether some
    of these may be frozen: DeepSpeed lists frozen parameters at stage 2 and not at stage 1. ``save_id`` is the id of
    the save, which DeepSpeed's own files do not have. ``tied`` are further names of parameters, as in ``ParamSet``; at
    stage 3 only rank 0 saves them.
    """

    path: FilePath
    size: int
    rank: int
    world_size: int
    tensor_size: int
    global_steps: int
    sub_groups: tuple[tuple[Param, ...], ...]
    frozen: Layout
    frozen_extents: TensorExtents
    names_frozen: bool
    header_bytes: int
    directory: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    others: Mapping[str, TensorForm | None] = field(default_factory=dict)
    weights: Int64Array = field(default_factory=lambda: _NO_RANGES)
    weight_places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    params_alone: Int64Array = field(default_factory=lambda: _NO_RANGES)
    expert_files: tuple[str, ...] = ()
    may_freeze_experts: bool = False
    save_id: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    def fragments(self) -> list[tuple[int, int]]:
        """(offset, nbytes) in the file of this rank's part of each frozen parameter that has elements."""
        return [
            (int(self.frozen_extents.offset[i]), int(self.frozen.part[i]) * DTYPE_BYTES[self.frozen_extents.dtype[i]])
            for i in range(self.frozen.num_params)
            if self.frozen_extents.offset[i] >= 0
        ]


def open_model_states(path: FilePath, rank: int, *, world_size: int | None) -> ModuleHeader:
    """Parse what a model states file says about the layout; objects of unknown classes in it stay inert."""
    return model_states_of(read_torch_file(path, foreign="inert"), rank, world_size=world_size)


def model_states_of(
    file: TorchFile, rank: int, *, world_size: int | None, tp: TensorParallel | None = None
) -> ModuleHeader:
    """``open_model_states`` of a file that was read already.

    With ``world_size`` given, the data parallel ranks, a file that says otherwise raises CheckpointError; with ``tp``,
    a file of another tensor parallel size UnsupportedError.
    """
    with file.one_open():
        return _model_states(file, rank, world_size=world_size, tp=tp)


def _model_states(file: TorchFile, rank: int, *, world_size: int | None, tp: TensorParallel | None) -> ModuleHeader:
    path, root = file.path, file.root
    if not isinstance(root, dict):
        raise CheckpointError(f"{path}: is not a DeepSpeed model states file.")
    misplaced = saved_as(file.folder, path.name)
    if misplaced is not None:
        raise CheckpointError(f"{path}: was saved as {misplaced}. Files of different ranks have changed places.")
    count, tensor_size = _num_ranks(path, root, world_size, tp)
    params = trained_tables(root, path)
    tables = root["param_shapes"]
    module = root.get("module")
    if not isinstance(module, (Mapping, type(None))):
        raise CheckpointError(f"{path}: holds no state of the module: {shown(module)}. The file is damaged.")
    steps, save_id = root.get("global_steps"), root.get(SAVE_ID)
    weights, places = _NO_RANGES, dict[str, tuple[str, int]]()
    module = {} if module is None else module
    trained: set[object] = {name for table in tables for name in table}
    frozen_shapes, fragments = root.get("frozen_param_shapes"), root.get("frozen_param_fragments")
    others_of: list[tuple[Mapping[object, object], Collection[object]]] = []
    if isinstance(fragments, Mapping):
        others_of.append((fragments, ()))
    is_part = WHOLE_MODEL_FILE.match(path.name) is None
    names = module_names(root, module, {} if is_part else places_of(module), is_whole=not is_part)
    if is_part:
        others = _entries(module, but=trained)
        names_frozen = isinstance(frozen_shapes, Mapping) and isinstance(fragments, Mapping)
        frozen, extents = _frozen_parts(file, trained, count)
    else:
        trained |= names.tied.keys()
        others = _entries(module, but=trained)
        weights, places = _weights(file, _entries(module, but=others), params)
        frozen, extents = _whole_frozen_params(file, _entries(others, but=names.no_params))
        names_frozen = frozen.num_params > 0 or isinstance(frozen_shapes, Mapping)
        others = _entries(others, but={param.name for param in frozen.params})
    if isinstance(frozen_shapes, Mapping):
        others = _entries(others, but=frozen_shapes)
    expert_files = () if is_part else _expert_files(root, path)
    lists_frozen = isinstance(frozen_shapes, Mapping) and any(name not in module for name in frozen_shapes)
    is_stage_1 = zero_option(root.get("ds_config"), "stage") == 1
    may_freeze_experts = bool(expert_files) and (lists_frozen or is_stage_1)
    others_of.append((module, module if is_part else others))
    params_alone = _used_by_params_alone(file, others_of)
    return ModuleHeader(
        path=path,
        size=file.size,
        rank=rank,
        world_size=count,
        tensor_size=tensor_size,
        global_steps=steps if type(steps) is int else 0,
        sub_groups=params,
        frozen=frozen,
        frozen_extents=extents,
        names_frozen=names_frozen,
        header_bytes=file.header_bytes,
        directory=file.directory,
        values={key: root[key] for key in (*COUNTERS, *_STATES) if key in root},
        others={
            str(name): TensorForm(value.dtype, value.shape) if isinstance(value, TensorRef) else None
            for name, value in others.items()
            if not isinstance(value, Stub)
        },
        weights=weights,
        weight_places=places,
        params_alone=params_alone,
        expert_files=expert_files,
        may_freeze_experts=may_freeze_experts,
        save_id=save_id if isinstance(save_id, str) else None,
        tied=names.tied,
    )


def _num_ranks(
    path: FilePath, root: Mapping[object, object], world_size: int | None, tp: TensorParallel | None
) -> tuple[int, int]:
    """How many data parallel and tensor parallel ranks saved it. Raises as ``model_states_of``."""
    count = root.get("dp_world_size")
    if type(count) is not int or not 1 <= count <= _MAX_WORLD_SIZE:
        raise CheckpointError(f"{path}: dp_world_size is {shown(count)}. It is not a ZeRO model states file.")
    if world_size is not None and count != world_size:
        raise CheckpointError(
            f"{path}: was saved by {count} ranks, the rest of the checkpoint by {world_size}. Files of two saves are "
            "mixed in this directory."
        )
    tensor_size = root.get("mp_world_size", 1)
    if type(tensor_size) is not int or not 1 <= tensor_size <= _MAX_TENSOR_SIZE:
        raise CheckpointError(f"{path}: mp_world_size is {shown(tensor_size)}. It is not a ZeRO model states file.")
    if tp is not None and tensor_size != tp.size:
        raise other_tp_size(path, tensor_size, tp)
    return count, tensor_size


def _expert_files(root: Mapping[object, object], path: FilePath) -> tuple[str, ...]:
    """The files with the weights of experts, which a file of the whole module counts by layer and does not have."""
    file = parse_rank_file(path.name)
    tp_rank = 0 if file is None else file.tp_rank
    counts = root.get("num_experts")
    if not isinstance(counts, list) or not all(type(count) is int for count in counts) or sum(counts) > _MAX_EXPERTS:
        return ()
    return tuple(
        expert_file_name(layer, expert, tp_rank) for layer, count in enumerate(counts) for expert in range(count)
    )


def trained_tables(root: Mapping[object, object], path: FilePath) -> tuple[tuple[Param, ...], ...]:
    """The trained parameters of a model states file, by its ``param_shapes``. Raises CheckpointError."""
    tables = root.get("param_shapes")
    if {"module", "dp_world_size"} <= root.keys() and not {"param_shapes", "ds_version"} & root.keys():
        raise UnsupportedError(
            f"{path}: was written by an early DeepSpeed (up to 0.3), whose module states do not say which parameters "
            "are trained: they are not supported. Load it with the DeepSpeed that wrote it."
        )
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise CheckpointError(f"{path}: holds no param_shapes. It is not a ZeRO model states file.")
    return tuple(tuple(checked_table(table.keys(), table.values(), path)) for table in tables)


def _entries(module: Mapping[object, object], *, but: Collection[object]) -> dict[object, object]:
    """The entries of other names than these."""
    return {name: value for name, value in module.items() if name not in but}


def _weights(
    file: TorchFile, entries: Mapping[object, object], params: Sequence[Sequence[Param]]
) -> tuple[Int64Array, dict[str, tuple[str, int]]]:
    """``ModuleHeader.weights`` and ``weight_places`` of these entries. Raises CheckpointError if one is not contiguous.

    A tied weight has several names, one of which is its parameter's.
    """
    refs = {str(name): ref for name, ref in entries.items() if isinstance(ref, TensorRef) and ref.numel}
    ranges = file.ranges([*refs.values()])
    offsets = dict(zip(refs, ranges[:, 0].tolist(), strict=True))
    there = [param for group in params for param in group if param.name in refs]
    fitting = [param.name for param in there if refs[param.name].shape == param.shape]
    return _distinct(ranges), {name: (refs[name].dtype, offsets[name]) for name in fitting}


def _distinct(ranges: Int64Array) -> Int64Array:
    begin, nbytes = ranges.T
    if (begin[1:] <= begin[:-1]).any():
        ranges = ranges[np.lexsort((nbytes, begin))]
        begin, nbytes = ranges.T
        ranges = ranges[np.append(True, (begin[1:] != begin[:-1]) | (nbytes[1:] != nbytes[:-1]))]
    return ranges


def _used_by_params_alone(
    file: TorchFile, others_of: Sequence[tuple[Mapping[object, object], Collection[object]]]
) -> Int64Array:
    """(offset, nbytes) of the parameters' tensors in storages that no other tensor of the file uses.

    ``others_of`` are dictionaries of the file, and which of their names are no parameters. Those that are not
    contiguous are left out. Shape ``(num_ranges, 2)``.
    """
    if all(len(others) == len(module) for module, others in others_of):
        return _NO_RANGES
    refs: list[TensorRef] = []
    rest: list[object] = []
    for module, others in others_of:
        for name, value in module.items():
            if name in others or not isinstance(value, TensorRef):
                rest.append(value)
            elif value.numel and value.is_contiguous:
                refs.append(value)
    users = chain(walk_refs(rest), walk_refs(file.root, but=[module for module, _ in others_of]))
    shared = {ref.storage.key for ref in users}
    return _distinct(file.ranges([ref for ref in refs if ref.storage.key not in shared]))


def _frozen_parts(file: TorchFile, trained: Collection[object], count: int) -> tuple[Layout, TensorExtents]:
    """The layout of the frozen parameters that were saved, and where this rank's parts of them are.

    ``trained`` are the names of the trained parameters, ``count`` the ranks that saved. Raises CheckpointError.
    """
    path, root = file.path, file.root
    assert isinstance(root, dict)
    shapes, fragments = root.get("frozen_param_shapes"), root.get("frozen_param_fragments")
    if not isinstance(shapes, Mapping) or not isinstance(fragments, Mapping):
        shapes, fragments = {}, {}
    # DeepSpeed lists by requires_grad, which may change.
    entries = _entries(shapes, but=trained)
    params = checked_table(entries.keys(), entries.values(), path)
    refs: list[TensorRef] = []
    for param in checked_params(params, path):
        fragment = fragments.get(param.name)
        want = partition_numel(param.numel, count)
        if not isinstance(fragment, TensorRef) or (param.numel > 0 and fragment.shape != (want,)):
            got = fragment.shape if isinstance(fragment, TensorRef) else shown(fragment)
            raise CheckpointError(
                f"{path}: the part of frozen parameter {brief(param.name)} is {got}; {count} ranks imply "
                f"({want},). The file is damaged, or the parameter was offloaded to NVMe when it was saved."
            )
        refs.append(fragment)
    return _placed(file, params, refs, count)


def _whole_frozen_params(file: TorchFile, entries: Mapping[object, object]) -> tuple[Layout, TensorExtents]:
    """The layout of the frozen parameters in a file with the whole module, and where they are: these entries of it.

    The layout is that of one rank. DeepSpeed lists frozen parameters at stage 2 and not at stage 1, so the list is not
    used.
    """
    found = {str(name): ref for name, ref in entries.items() if isinstance(ref, TensorRef)}
    params = checked_table(found.keys(), [ref.shape for ref in found.values()], file.path)
    for name, ref in found.items():
        if not ref.is_contiguous:
            raise UnsupportedError(
                f"{file.path}: frozen parameter {name} was saved by DeepSpeed alone with the strides {ref.stride}, "
                "which only DeepSpeed reads."
            )
    return _placed(file, checked_params(params, file.path), [*found.values()], 1)


def _placed(
    file: TorchFile, params: Sequence[Param], refs: Sequence[TensorRef], world_size: int
) -> tuple[Layout, TensorExtents]:
    """The layout of frozen parameters, and where the file has the tensor of each that has elements."""
    there = [i for i, param in enumerate(params) if param.numel > 0]
    offset = np.full(len(params), -1, dtype=np.int64)
    offset[there] = file.ranges([refs[i] for i in there])[:, 0]
    dtype = {i: ref.dtype for i, ref in enumerate(refs)}
    return unpacked_layout(params, world_size), TensorExtents(file.path, dtype, offset)


def client_state_keys(root: Mapping[object, object]) -> tuple[str, ...]:
    """The entries of a model states file that DeepSpeed does not make itself."""
    names = [key for key in root if isinstance(key, str)]
    return tuple(key for key in names if key not in _OF_DEEPSPEED and not key.startswith("ds_"))
