"""Lightning's DeepSpeed strategy asks for an accelerator of class CUDAAccelerator. These two let it train on CPUs.

For trying the examples on a laptop, and for tests; on a machine with GPUs nothing of it is used. It has nothing to do
with zeroelastic: DeepSpeed trains on CPUs, and so does the rest of the strategy.
"""

from __future__ import annotations

import torch
from lightning.fabric.accelerators import CUDAAccelerator as FabricCUDAAccelerator
from lightning.pytorch.accelerators import CUDAAccelerator


class _OnCPU:
    """A device number per rank, which the strategy compares with local ranks, and no call of CUDA."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        return True


class TrainerOnCPU(_OnCPU, CUDAAccelerator):
    """For ``Trainer(accelerator=TrainerOnCPU())``."""


class FabricOnCPU(_OnCPU, FabricCUDAAccelerator):
    """For ``Fabric(accelerator=FabricOnCPU())``."""
