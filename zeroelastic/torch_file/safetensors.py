"""The head of a safetensors file: where each tensor is.

A file is 8 bytes of header length, a JSON header padded to 8 bytes, and the tensors' bytes without gaps (safetensors
0.8). Larger elements come first in files that are laid out here, so each tensor is aligned to its elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES

DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What safetensors calls the dtypes of torch that it has."""

METADATA = "__metadata__"
"""The name in the header that no tensor has."""

_MAX_HEADER_BYTES = 100_000_000  # safetensors reads no larger one
_LENGTH_BYTES = 8


class TensorPlace(NamedTuple):
    """A tensor of a file: its dtype as torch has it, its shape, and the offset of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Head(NamedTuple):
    """What a file's header says: the tensors by name, the metadata, and the size in bytes that the file then has."""

    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]
    nbytes: int


def lay_out(
    file_name: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Head]:
    """The header of a file of these (name, dtype, shape), with its length in front, and where each tensor goes.

    Raises UnsupportedError, with the file's name, for a header that safetensors refuses to read.
    """
    header: dict[str, object] = {METADATA: {**metadata, "format": "pt"}}
    places: dict[str, TensorPlace] = {}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor[1]]):
        place = places[name] = TensorPlace(dtype, shape, end)
        end += place.nbytes
        offsets = [place.offset, end]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{file_name}: its header would have {len(text)} bytes, which safetensors refuses to read."
        )
    begin = _LENGTH_BYTES + len(text)
    moved = {name: place._replace(offset=begin + place.offset) for name, place in places.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, Head(moved, metadata, begin + end)


def check_name(name: str) -> None:
    """Raise UnsupportedError for a name that no tensor of a file can have."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"{name!r} is not Unicode text, so no safetensors file can hold it.") from None
    if name == METADATA:
        raise UnsupportedError(f"{name} is a name that safetensors files keep for themselves.")
