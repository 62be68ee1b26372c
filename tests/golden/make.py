"""Make the golden checkpoints: a tiny model trained by DeepSpeed on CPU, saved stock and elastic, on 2 and 3 ranks.

    python tests/golden/make.py [NAME ...]

Each folder holds ``latest``, one tag, and ``expected.json``: every full parameter and state as hexadecimal bytes. At
stage 3 (``rigid``, ``elastic``) they are what DeepSpeed itself gathers; at stages 1 and 2 they are gathered from the
flat buffers, since ``safe_get_full_fp32_param`` is wrong there under ``round_robin_gradients`` (DeepSpeed 0.19.8). All
but the elastic ones of stage 3 are saved without zeroelastic installed.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroelastic.testing import run_ranks

HERE = Path(__file__).resolve().parent
STEPS = 2


@dataclass(frozen=True)
class Run:
    """How a golden checkpoint is saved: ``zero`` and ``config`` are further entries of the DeepSpeed configuration."""

    world_size: int
    stage: int = 3
    elastic: bool = False
    cpu_adam: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


RUNS = {
    **{f"rigid{ranks}": Run(ranks) for ranks in (2, 3)},
    **{f"elastic{ranks}": Run(ranks, elastic=True) for ranks in (2, 3)},
    "stage1_rank2": Run(2, stage=1),
    "stage1_bf16_optimizer_rank2": Run(2, stage=1, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage2_rank2": Run(2, stage=2),
    "stage2_round_robin_aligned_rank3": Run(
        3, stage=2, zero={"round_robin_gradients": True, "parameter_alignment": True}
    ),
    "stage2_elastic_rank2": Run(2, stage=2, elastic=True, cpu_adam=True, zero={"offload_optimizer": {"device": "cpu"}}),
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "sub_group_size": 10, "stage3_param_persistence_threshold": 8},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 1.0,
}


class Tiny(torch.nn.Module):
    """Parameters of 20, 5, 1, 3 and 12 elements, and a frozen one of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 5)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.tail = torch.nn.Linear(4, 3)
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.gain
        return self.tail(y[:, :4]).square().sum() + y.square().sum() * self.frozen.square().sum()


def build(run: Run) -> Any:
    """The engine of a run on this rank."""
    import deepspeed

    torch.manual_seed(0)
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam if run.cpu_adam else torch.optim.AdamW
    optimizer = adam(groups, lr=0.01, betas=(0.9, 0.95))
    zero = dict(CONFIG["zero_optimization"]) if run.stage == 3 else {"stage": run.stage}
    zero |= {"elastic_checkpoint": run.elastic, **run.zero}
    config = {**CONFIG, **run.config, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_and_save(folder: str, run: Run) -> dict[str, dict[str, object]] | None:
    """Train two steps, save, and return what DeepSpeed gathers; runs on every rank, returns it on rank 0."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    import zeroelastic
    from zeroelastic.testing import gather_state

    if run.elastic and run.stage == 3:
        zeroelastic.install()

    engine = build(run)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(2, 4, dtype=torch.bfloat16)))
        engine.step()
    engine.save_checkpoint(folder)

    expected: dict[str, dict[str, object]] = {}
    gathered = gather_state(engine) if run.stage != 3 else {}

    def hexed(tensor: torch.Tensor) -> str:
        return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()

    for name, param in engine.module.named_parameters():
        tensors: dict[str, str] = {}
        if gathered and param.requires_grad:
            tensors["fp32"] = hexed(gathered[f"master/{name}"])
            tensors |= {key: hexed(gathered[f"state/{name}/{key}"]) for key in ("exp_avg", "exp_avg_sq")}
            dtype = "float32"
        elif gathered:
            tensors["frozen"] = hexed(gathered[f"weight/{name}"])
            dtype = "bfloat16"
        elif param.requires_grad:
            tensors["fp32"] = hexed(safe_get_full_fp32_param(param))
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[key] = hexed(safe_get_full_optimizer_state(param, key))
            dtype = "float32"
        else:
            with deepspeed.zero.GatheredParameters([param]):
                tensors["frozen"] = hexed(param)
            dtype = "bfloat16"
        expected[name] = {"shape": list(getattr(param, "ds_shape", param.shape)), "dtype": dtype, "tensors": tensors}
    return expected if dist.get_rank() == 0 else None


def main() -> None:
    """Make those that are named, or all, replacing what is there."""
    for name in sys.argv[1:] or RUNS:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        expected = run_ranks(train_and_save, RUNS[name].world_size, str(folder), RUNS[name], timeout=300)[0]
        for script in folder.glob("zero_to_*.py"):
            script.unlink()
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        sys.stdout.write(f"{folder.name}: {size} bytes\n")


if __name__ == "__main__":
    main()
