"""Files that torch.save writes, and archives laid out as it lays them out."""

from __future__ import annotations

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
