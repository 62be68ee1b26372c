"""Make the golden checkpoint of FSDP2, ``fsdp2``: saved by torch's own DCP on 2 ranks, without zeroelastic.

    python tests/golden/make_fsdp2.py

``expected.json`` has every tensor of the state dict as hexadecimal bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zeroelastic.testing import run_ranks

HERE = Path(__file__).resolve().parent / "fsdp2"


class Model(torch.nn.Module):
    """A trained and a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.frozen = torch.nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)
        self.register_buffer("seen", torch.tensor([3, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.frozen).square().sum()


def train_and_save() -> dict[str, str]:
    """Two steps and a save; returns every tensor."""
    torch.manual_seed(5)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.125)
    for _ in range(2):
        model(torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=HERE / "ckpt")
    named = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, own in state["optim"]["state"].items():
        named |= {f"optim.state.{name}.{key}": tensor for key, tensor in own.items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes().hex() for name, value in whole.items()}


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    expected = run_ranks(train_and_save, 2)[0]
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
