"""The module of a stage 1 or 2 checkpoint in a Universal checkpoint: what is not trained, each entry in float32.

These are frozen parameters, buffers, tied names and parameters without elements. Source: the end of
``ds_to_universal.main`` (DeepSpeed 0.19.8), which gives every entry of the module that has no ``fp32.pt`` yet one.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.core.digest import ByteArray
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import move_segments
from zeroelastic.executors.tables import cast_between
from zeroelastic.io.atomic import write_at
from zeroelastic.torch_file.graph_writer import Archive
from zeroelastic.torch_file.header import TensorRef, read_torch_file
from zeroelastic.torch_file.pickle_graph import new_storage, tensor
from zeroelastic.verbs.convert.copy_tensors import convert_elements, one_row
from zeroelastic.verbs.convert.model_tensors import Buffer, ModelTensor, read_buffer, stored_tensor

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
