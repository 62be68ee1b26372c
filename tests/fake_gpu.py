"""Tensors that say that they are on a GPU: their memory is the fake runtime's (tests/engines.py)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from unittest import mock

import torch
from engines import Engine, open_engine

from zeroelastic.executors import dispatch, staged
from zeroelastic.executors.dispatch import DeviceBuffer


class OnFakeGpu(torch.Tensor):
    """A tensor in the fake's memory."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    def as_on_host(self) -> torch.Tensor:
        """The same memory, as a tensor that torch works on."""
        return self.as_subclass(torch.Tensor)


@contextlib.contextmanager
def open_fake_gpu() -> Iterator[Engine]:
    """The CUDA engine on the fake runtime, which "auto" takes for tensors on the fake GPU meanwhile."""
    dispatch._fastest.cache_clear()
    with mock.patch.object(staged, "current_stream", lambda device: 0), open_engine("fake-cuda") as engine:
        yield engine
        engine.free()
    dispatch._fastest.cache_clear()


def to_fake_gpu(engine: Engine, values: torch.Tensor) -> OnFakeGpu:
    """A copy of a contiguous tensor, valid until ``engine.free``."""
    buffer = engine.put(values.contiguous().view(-1).view(torch.uint8).numpy() if values.numel() else values.numpy())
    assert isinstance(buffer, DeviceBuffer)
    memory = (ctypes.c_ubyte * max(buffer.nbytes, 1)).from_address(buffer.address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)[: buffer.nbytes].view(values.dtype)
    return torch.Tensor._make_subclass(OnFakeGpu, flat.view(values.shape))
