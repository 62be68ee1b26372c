"""Tensors that say that they are on a GPU: their memory is the fake runtime's (tests/engines.py)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any
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


class RefusesTheHost(OnFakeGpu):
    """Also refuses what torch refuses of a tensor on a GPU: numpy, and work together with tensors of host memory."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func is torch.Tensor.cpu:
            return args[0].as_on_host().clone()
        if func is torch.Tensor.to and isinstance(args[0], cls) and len(args) > 1 and _names_a_device(args[1]):
            on_gpu = torch.device(args[1]).type == "cuda"
            return args[0] if on_gpu else args[0].as_on_host().clone()
        if func not in _BOTH_DEVICES:
            given = [*args, *kwargs.values()]
            flat = [item for value in given for item in (value if isinstance(value, (list, tuple)) else (value,))]
            tensors = [value for value in flat if isinstance(value, torch.Tensor)]
            if any(isinstance(t, cls) for t in tensors) and any(not isinstance(t, cls) and t.dim() for t in tensors):
                raise RuntimeError("Expected all tensors to be on the same device, but found at least two: cuda:0, cpu")
        return super().__torch_function__(func, types, args, kwargs)


_BOTH_DEVICES = (torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.data.__set__, torch.Tensor.grad.__set__)


def _names_a_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"))


@contextlib.contextmanager
def on_gpu_in_place(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """These very tensors say that they are on a GPU meanwhile, and refuse the host; so do those made there."""
    former = [(tensor, type(tensor)) for tensor in tensors]

    def made(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def there(*args: Any, device: Any = None, **more: Any) -> torch.Tensor:
            tensor = make(*args, **more)
            return tensor.as_subclass(RefusesTheHost) if str(device).startswith("cuda") else tensor

        return there

    makers = {name: made(getattr(torch, name)) for name in ("empty", "zeros", "ones", "tensor", "randint", "arange")}
    with mock.patch.multiple(torch, **makers):
        try:
            for tensor in tensors:
                tensor.__class__ = RefusesTheHost
            yield
        finally:
            for tensor, kind in former:
                tensor.__class__ = kind
