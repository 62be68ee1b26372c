"""The executors as tests see them: a name, and memory of the kind that it moves, put there and looked at.

``staged`` is a host engine for memory that it does not reach; tensors on the CPU stand for such memory. ``cuda`` needs
a GPU. ``fake-cuda`` is the same library, compiled for the host on the fake runtime in csrc/tests/cuda/fake: it shows on
any machine with a compiler that what Python hands over arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from zeroelastic.executors import build_info, cuda_executor, dispatch
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import OPERATIONS, Buffer, DeviceBuffer

REPOSITORY = Path(__file__).resolve().parent.parent
ENGINES = ("numpy", "staged", "native", pytest.param("cuda", marks=pytest.mark.gpu), "fake-cuda")


@dataclass
class Engine:
    """One executor; memory given out is valid until ``free``."""

    label: str
    fake: ctypes.CDLL | None = None
    held: list[object] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What calls it: the executor's own name."""
        return "numpy" if self.label == "staged" else self.label.removeprefix("fake-")

    @property
    def on_device(self) -> bool:
        return self.name == "cuda"

    def can(self, operation: str) -> bool:
        return operation in OPERATIONS["cuda" if self.label == "staged" else self.name]

    def put(self, data: np.ndarray, misaligned: int = 0) -> Buffer:
        """A copy of these bytes where the engine moves them, that many bytes behind an aligned address."""
        if self.label == "fake-cuda":
            assert self.fake is not None
            base = self.fake.fake_cuda_malloc(len(data) + misaligned)
            assert base
            self.held.append(base)
            ctypes.memmove(base + misaligned, data.ctypes.data, len(data))
            return DeviceBuffer(base + misaligned, len(data))
        room = np.zeros(len(data) + misaligned, dtype=np.uint8)
        view = room[misaligned:]
        view[:] = data
        if self.label == "cuda":
            tensor = torch.from_numpy(room).cuda()[misaligned:]
            self.held.append(tensor)
            return tensor
        return torch.from_numpy(view) if self.label == "staged" else view

    def get(self, buffer: Buffer) -> np.ndarray:
        """The bytes that are there now."""
        if isinstance(buffer, DeviceBuffer):
            return np.frombuffer(ctypes.string_at(buffer.address, buffer.nbytes), dtype=np.uint8)
        return buffer.cpu().numpy() if isinstance(buffer, torch.Tensor) else buffer

    def free(self) -> None:
        for base in self.held:
            if self.fake is not None:
                self.fake.fake_cuda_free(base)
        self.held.clear()


@contextlib.contextmanager
def open_engine(label: str) -> Iterator[Engine]:
    """An engine, or a skipped test that says why there is none here."""
    if label in ("native", "cuda") and not describe_build(label).usable:  # type: ignore[arg-type]
        pytest.skip(f"the {label} engine is not built: {describe_build(label).reason}")  # type: ignore[arg-type]
    if label == "staged":
        with mock.patch.object(dispatch, "_kind", lambda buffer: "host" if isinstance(buffer, np.ndarray) else "other"):
            yield Engine(label)
        return
    if label != "fake-cuda":
        yield Engine(label)
        return
    library = _fake_library()
    patch = pytest.MonkeyPatch()
    found = build_info._load
    patch.setattr(build_info, "_load", lambda name: (library, "") if name == "cuda" else found(name))
    cuda_executor._library.cache_clear()
    library.fake_cuda_put_copies_off()
    try:
        yield Engine(label, library)
    finally:
        patch.undo()
        cuda_executor._library.cache_clear()


@functools.cache
def _fake_library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX", sysconfig.get_config_var("CXX") or "c++").split()[0]
    if not (shutil.which(compiler) and shutil.which("make")):
        pytest.skip("there is no compiler to build the fake with")
    command = ["make", "-s", "-j2", "-C", str(REPOSITORY / "csrc"), "build/fake/_cuda.so"]
    with (REPOSITORY / "csrc" / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest-xdist builds the same files
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    library = ctypes.CDLL(str(REPOSITORY / "csrc" / "build" / "fake" / "_cuda.so"))
    library.ze_abi_version.restype = ctypes.c_int32
    assert library.ze_abi_version() == build_info.ABI_VERSION
    library.ze_build_info.restype = ctypes.c_char_p
    library.fake_cuda_malloc.restype = ctypes.c_void_p
    library.fake_cuda_malloc.argtypes = [ctypes.c_size_t]
    library.fake_cuda_free.argtypes = [ctypes.c_void_p]
    return library
