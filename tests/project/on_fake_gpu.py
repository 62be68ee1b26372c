"""Runs a script of one process as if there were a GPU: ``python tests/project/on_fake_gpu.py SCRIPT ARGUMENTS``.

Tensors on "cuda" lie in the fake runtime's memory (``engines``), where torch works on them as on the host's, and the
CUDA engine is the one that is compiled for the host; there is no nvcc. What is timed means nothing.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))

from engines import Engine, OnFakeGpu, open_fake_gpu, to_fake_gpu


class Event:
    """``torch.cuda.Event``; work is done when it is asked for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded = 0.0

    def record(self, stream: object = None) -> None:
        self._recorded = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, never 0."""
        return (other._recorded - self._recorded) * 1e3 + 1e-6


def made_there(make: Callable[..., torch.Tensor], gpu: Engine) -> Callable[..., torch.Tensor]:
    """A function that makes tensors, also on the fake GPU, and in memory that is said to be pinned."""

    def made(*args: Any, device: object = None, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        tensor = make(*args, **more)
        return to_fake_gpu(gpu, tensor) if str(device).startswith("cuda") else tensor

    return made


def main() -> None:
    script, *arguments = sys.argv[1:]
    stream = SimpleNamespace(cuda_stream=0)
    like, which = torch.zeros_like, shutil.which
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(open_fake_gpu())

        def patch(target: object, **names: object) -> None:
            stack.enter_context(mock.patch.multiple(target, **names))

        patch(torch, **{name: made_there(getattr(torch, name), gpu) for name in ("empty", "zeros", "rand")})
        patch(torch, zeros_like=lambda tensor, **more: to_fake_gpu(gpu, like(tensor.as_subclass(torch.Tensor), **more)))
        patch(torch.Tensor, cuda=lambda tensor: to_fake_gpu(gpu, tensor))
        patch(OnFakeGpu, cpu=OnFakeGpu.as_on_host)
        patch(
            torch.cuda,
            Event=Event,
            is_available=lambda: True,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            current_device=lambda: 0,
            current_stream=lambda: stream,
            get_device_name=lambda: "fake",
        )
        patch(shutil, which=lambda name, *more, **names: None if name == "nvcc" else which(name, *more, **names))
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(script))  # as python does for a script
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
