"""The layout of safetensors files: which tensors are in which file, headers, and the index of several.

Shards are ordered and indexed as by ``huggingface_hub.save_torch_state_dict``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.model_tensors import ModelTensor
from zeroelastic.verbs.new_files import TensorCopy

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
"""The names that safetensors has for dtypes of torch."""

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # safetensors reads no larger one


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file to be: ``header`` with its length in front, then the entries without gaps."""

    name: str
    header: bytes
    entries: tuple[TensorCopy, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def lay_out(
    base: str, wanted: Sequence[tuple[ModelTensor, str]], aliases: Mapping[str, str], max_shard_size: int
) -> tuple[list[SafetensorsFile], dict[str, bytes]]:
    """The files that hold some tensors, and the index where there are more than one."""
    for tensor, _ in wanted:
        _check_name(tensor.name)
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedError(f"{tensor.name}: safetensors files cannot hold {tensor.dtype}.")
    for alias in aliases:
        _check_name(alias)
        if alias == "format":
            raise UnsupportedError(f"{alias} is a tied name that the metadata of safetensors files has no place for.")
    shards: list[list[tuple[ModelTensor, str]]] = [[]]
    filled = 0
    for tensor, dtype in wanted:
        nbytes = tensor.numel * DTYPE_BYTES[dtype]
        if shards[-1] and filled + nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append((tensor, dtype))
        filled += nbytes
    files: list[SafetensorsFile] = []
    for number, shard in enumerate(shards, start=1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        names = {tensor.name for tensor, _ in shard}
        metadata = {alias: name for alias, name in aliases.items() if name in names}
        files.append(_one_file(f"{base}{of}.safetensors", shard, metadata))
    if len(shards) == 1:
        return files, {}
    index = {
        "metadata": {"total_size": sum(entry.nbytes for file in files for entry in file.entries), **aliases},
        "weight_map": {entry.tensor.name: file.name for file in files for entry in file.entries},
    }
    return files, {f"{base}.safetensors.index.json": json_text(index)}


def _one_file(name: str, shard: Sequence[tuple[ModelTensor, str]], metadata: Mapping[str, str]) -> SafetensorsFile:
    """One file: header length in 8 bytes, JSON header padded to 8 bytes, tensors without gaps (safetensors 0.8).

    Larger elements come first, so that each tensor is aligned to its elements. Raises UnsupportedError for a header
    that safetensors refuses to read.
    """
    header: dict[str, object] = {_METADATA: {**metadata, "format": "pt"}}
    entries: list[TensorCopy] = []
    end = 0
    for tensor, dtype in sorted(shard, key=lambda one: -DTYPE_BYTES[one[1]]):
        entries.append(entry := TensorCopy(tensor, dtype, len(entries)))
        offsets = [end, end := end + entry.nbytes]
        header[tensor.name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedError(f"{name}: its header would have {len(text)} bytes, which safetensors refuses to read.")
    return SafetensorsFile(name, len(text).to_bytes(8, "little") + text, tuple(entries))


def _check_name(name: str) -> None:
    """Raise UnsupportedError for a name that no tensor of a file can have."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"{name!r} is not Unicode text, so no safetensors file can hold it.") from None
    if name == _METADATA:
        raise UnsupportedError(f"{name} is a name that safetensors files keep for themselves.")


def json_text(document: object) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
