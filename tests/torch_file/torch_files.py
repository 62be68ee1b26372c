"""Files that torch.save writes, archives laid out as it lays them out, and the opcodes of pickles."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import torch

from zeroelastic.torch_file.header import TensorRef


def saved(path: Path, value: object, **kwargs: object) -> Path:
    torch.save(value, path, **kwargs)
    return path


def bytes_at(file, ref: TensorRef) -> bytes:
    extent = file.extent(ref)
    assert extent.offset >= 0 and extent.offset + extent.nbytes <= file.size
    return extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes]


def archive(path: Path, pickled: bytes, *, storages=(), name="archive", compression=zipfile.ZIP_STORED) -> Path:
    """A zip archive laid out as torch.save lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as out:
        out.writestr(f"{name}/data.pkl", pickled)
        out.writestr(f"{name}/byteorder", b"little")
        for key, data in storages:
            out.writestr(f"{name}/data/{key}", data)
        out.writestr(f"{name}/version", b"3\n")
    return path


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data))) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


STORAGE = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x08tQ"
"""A storage of 8 elements, by its persistent id."""
