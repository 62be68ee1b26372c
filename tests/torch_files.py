"""An object of every kind that torch.save writes, what it makes of it, and archives laid out as it lays them out."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroelastic.executors.dispatch import Executor, describe_build
from zeroelastic.torch_file.header import TensorRef

EXECUTORS = ["numpy", "native"]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "native" and not describe_build("native").usable:
        pytest.skip(f"the native engine is not built: {describe_build('native').reason}")
    return request.param


class Scaler:
    """A class of the user's, with a tensor inside."""

    def __init__(self) -> None:
        self.scale = 65536.0
        self.history = torch.arange(5)


def sample() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    flat = torch.randn(100_003, generator=generator)
    return {
        "flat": flat,
        "views of one storage": [flat[:1], flat[5:77], flat[77:]],
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.0),
        "transposed": torch.randn(7, 11, generator=generator).t(),
        "parameter": torch.nn.Parameter(torch.randn(3, 4, generator=generator)),
        "storage": torch.arange(9, dtype=torch.int16).untyped_storage(),
        "nested": OrderedDict(x=(torch.ones(3, dtype=torch.bool), None, "text", 1 << 70)),
        "object": Scaler(),
        **{str(dtype): torch.arange(1000).to(dtype) for dtype in DTYPES},
    }


def saved_by_torch(obj: object, folder: Path, name: str = "x.pt") -> bytes:
    """What torch.save writes under the same name, which is part of a file's content."""
    (folder / "torch").mkdir(exist_ok=True)
    torch.save(obj, folder / "torch" / name)
    return (folder / "torch" / name).read_bytes()


def filled(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary bits; of bool, of its two values; of wide floats, of numbers whose squares they hold."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in ("float32", "float64", "complex64", "complex128"):
        return torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))
    nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return bits.view(getattr(torch, dtype)).view(shape)


def bits_of_tensor(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_saved(dtype: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.save(filled(dtype, (3,)), io.BytesIO())
        except (KeyError, RuntimeError, NotImplementedError):
            return False
    return True


SAVED_DTYPES = tuple(
    dtype
    for dtype in sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})
    if not dtype.startswith("q") and _is_saved(dtype)
)
"""Every dtype whose tensors torch.save writes, but for the quantized ones, whose tensors have scales too."""


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
