"""The files of a Universal checkpoint: its model states, and the tensors of each parameter.

Of a checkpoint of stage 1 or 2 also the module: what is not trained gets files too, each entry in float32: frozen
parameters, buffers, tied names and parameters without elements. Source: the end of ``ds_to_universal.main`` (DeepSpeed
0.19.8), which gives every entry of the module that has no ``fp32.pt`` yet one.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates, open_model_states
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, read_scalar
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE, model_file_name
from zeroelastic.core.digest import ByteArray, ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, brief, shown, some
from zeroelastic.executors.dispatch import move_segments
from zeroelastic.executors.tables import cast_between
from zeroelastic.io.atomic import write_at
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.graph import Archive, new_storage, tensor
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile, read_torch_file
from zeroelastic.verbs.convert.copy_tensors import convert_elements, one_row
from zeroelastic.verbs.convert.model_tensors import Buffer, ModelTensor, read_buffer, stored_tensor

WHOLE_MODEL = model_file_name(0, 0, whole=True)
"""The model states of a checkpoint of stage 1 or 2."""

MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")

_NUMBERS = {
    "bool": "?",
    "uint8": "u1",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float64": "<f8",
}
"""The dtypes that numpy converts, as numpy calls them."""
_KEY = re.compile(r"[^/\x00]{1,250}")


def universal_models(tag_dir: Path) -> tuple[ModelStates, ...]:
    """The module states of all ranks that saved it; of rank 0 alone where no others are there and none is needed.

    At stages 1 and 2 there is one file, under two names where ``to_universal`` wrote it.
    """
    names: dict[int, str] = {}
    if (tag_dir / WHOLE_MODEL).exists():
        others = {name for name in os.listdir(tag_dir) if WHOLE_MODEL_FILE.match(name)} - {WHOLE_MODEL}
        if others:
            raise UnsupportedError(f"{tag_dir}: {min(others)} is of a tensor parallel rank, which cannot be taken yet.")
        return (open_model_states(tag_dir / WHOLE_MODEL, 0, world_size=None),)
    for name in sorted(os.listdir(tag_dir)):
        match = MODEL_FILE.fullmatch(name)
        if match is not None:
            if int(match[2]) != 0:
                raise UnsupportedError(f"{tag_dir}: {name} is of a tensor parallel rank, which cannot be taken yet.")
            names[int(match[1])] = name
    if 0 not in names:
        raise MissingFileError(f"{tag_dir}: zero_pp_rank_0_mp_rank_00_model_states.pt is missing.")
    first = open_model_states(tag_dir / names[0], 0, world_size=None)
    missing = [rank for rank in range(first.world_size) if rank not in names]
    if missing:
        if first.frozen is not None and first.frozen.num_params:
            raise MissingFileError(
                f"{tag_dir}: {first.world_size} ranks saved it; the module states of rank {missing[0]} are missing, "
                "which hold a part of each frozen parameter."
            )
        return (first,)
    return (
        first,
        *(
            open_model_states(tag_dir / names[rank], rank, world_size=first.world_size)
            for rank in range(1, first.world_size)
        ),
    )


def universal_tensors(
    zero: Path, layout: Layout, *, rest: frozenset[str], steps: bool
) -> tuple[tuple[Mapping[str, str], ...], dict[str, TensorExtents], tuple[Path, ...]]:
    """By parameter the dtype of each state key; where they are; and all their files.

    ``rest`` are the folders that need not be there, ``steps`` tells whether ``step.pt`` holds the step.
    """
    wanted = {param.name for param in layout.params}
    there = {name for name in os.listdir(zero) if (zero / name).is_dir()} - (rest - wanted)
    if wanted != there:
        what = (
            f"{some(sorted(wanted - there))} missing"
            if wanted - there
            else f"{some(sorted(there - wanted))} not in param_shapes"
        )
        raise CheckpointError(f"{zero}: {what}. The Universal checkpoint is incomplete, or two are mixed.")
    dtypes: list[Mapping[str, str]] = []
    offsets: dict[str, Int64Array] = {}
    paths: dict[str, list[FilePath]] = {}
    files: list[Path] = []
    for p, param in enumerate(layout.params):
        found: dict[str, str] = {}
        names = sorted(name for name in os.listdir(zero / param.name) if name.endswith(".pt"))
        keys = [key for name in names if (key := name.removesuffix(".pt")) != "step" or not steps]
        if FP32 not in keys:
            raise MissingFileError(f"{zero / param.name / FP32}.pt: no such file. The checkpoint is incomplete.")
        for key in sorted(keys, key=lambda key: (key != FP32, key)):
            if key == FROZEN or _KEY.fullmatch(key) is None:
                raise UnsupportedError(f"{zero / param.name}: {shown(key)} is not the name of a state.")
            path = zero / param.name / f"{key}.pt"
            file = read_torch_file(path)
            ref = _whole_tensor(file, param)
            found[key] = ref.dtype
            offsets.setdefault(key, np.full(layout.num_params, -1, dtype=np.int64))[p] = file.extent(ref).offset
            paths.setdefault(key, [path] * layout.num_params)[p] = path
            files.append(path)
        dtypes.append(found)
    extents = {
        key: TensorExtents(
            paths[key][0],
            {p: found[key] for p, found in enumerate(dtypes) if key in found},
            offset,
            tuple(paths[key]),
        )
        for key, offset in offsets.items()
    }
    return tuple(dtypes), extents, tuple(files)


def saved_step(folder: Path) -> dict[str, ScalarValue]:
    """The step of a parameter, where it has one."""
    path = folder / "step.pt"
    if not path.exists():
        return {}
    file = read_torch_file(path)
    file.locate()
    return {"step": read_scalar(file, file.root, "the step")}


def _whole_tensor(file: TorchFile, param: Param) -> TensorRef:
    """The tensor of a state file: alone, or under "param" as other stages' converters write it."""
    root = file.root
    if isinstance(root, dict):
        if root.get("is_expert_param"):
            raise UnsupportedError(f"{file.path}: holds AutoEP expert parameters, which cannot be taken yet.")
        root = root.get("param")
    if not isinstance(root, TensorRef) or root.dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file.path}: holds {shown(root)}, not a tensor. The file is damaged.")
    if root.numel != param.numel:
        raise CheckpointError(
            f"{file.path}: has {root.numel} elements; {brief(param.name)} has {param.numel} of shape "
            f"{list(param.shape)}. The file is damaged, or was saved with tensor parallelism."
        )
    return root


def rest_of_module(state: SavedState, trained: Collection[str]) -> tuple[list[ModelTensor], list[str]]:
    """The entries of the module's state that are not trained; and a sentence for each that is not written.

    Raises CheckpointError for a file without a module.
    """
    file = read_torch_file(state.checkpoint.model_files[0], foreign="inert")
    module = file.root.get("module") if isinstance(file.root, dict) else None
    if not isinstance(module, dict):
        raise CheckpointError(f"{file.path}: holds no module. It is not a file of ZeRO stage 1 or 2.")
    rest = {str(name): value for name, value in module.items() if name not in trained}
    file.locate(value.storage.key for value in rest.values() if isinstance(value, TensorRef))
    found: list[ModelTensor] = []
    left_out: list[str] = []
    for name, value in rest.items():
        if isinstance(value, TensorRef) and (value.dtype in _NUMBERS or cast_between(value.dtype, "float32")):
            found.append(stored_tensor(name, value, file))
        else:
            what = value.dtype if isinstance(value, TensorRef) else "no tensor"
            left_out.append(f"{name} of the module: it is {what}, which has no float32 file; the module states have it")
    return found, left_out


def write_module(rest: Sequence[ModelTensor], zero: Path, *, max_memory: int) -> None:
    """Write ``fp32.pt`` of each entry: ``{"param": tensor}``.

    Raises UnsupportedError for a buffer that is not contiguous, or of whole numbers, and too large for ``max_memory``.
    """
    for entry in rest:
        (zero / entry.name).mkdir(exist_ok=True)
        _write_float32(entry, zero / entry.name / "fp32.pt", max_memory)


def _write_float32(entry: ModelTensor, path: Path, max_memory: int) -> None:
    storage = new_storage("float32", entry.numel)
    archive = Archive(path, {"param": tensor(storage, 0, entry.shape)})
    offset, place = archive.offsets[storage], entry.source
    assert isinstance(place, Buffer)
    cast, checksum = cast_between(entry.dtype, "float32"), zlib.crc32(b"")
    if entry.numel and cast is not None and place.stride is None:
        crc32 = np.zeros(1, dtype=np.uint32)
        row = one_row(place.extent.offset, offset, entry.nbytes)
        move_segments(row, [place.extent.path], [path], crc32=crc32, cast=cast)
        checksum = int(crc32[0])
    elif entry.numel:
        data = _as_float32(read_buffer(entry, limit=max_memory // 4), entry.dtype).tobytes()
        write_at(path, data, offset)
        checksum = zlib.crc32(data)
    archive.finish({storage: checksum})


def _as_float32(data: ByteArray, dtype: str) -> ByteArray:
    if dtype not in _NUMBERS:
        return convert_elements(data, dtype, "float32")
    with np.errstate(over="ignore"):
        return data.view(_NUMBERS[dtype]).astype("<f4").view(np.uint8)
