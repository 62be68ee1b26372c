"""A training job on stock DeepSpeed, run by torchrun: zeroelastic cannot be imported here.

    torchrun --nproc_per_node M tests/stock_resume.py DIRECTORY OUT JOB

Loads DIRECTORY, writes what rank 0 sees and the losses of the steps that follow to OUT as JSON.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


class NotHere(importlib.abc.MetaPathFinder):
    """zeroelastic is not installed."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] == "zeroelastic":
            raise ImportError(f"{name} is not installed")


sys.meta_path.insert(0, NotHere())

GATHER = Path(__file__).parents[1] / "zeroelastic/testing/state.py"

import deepspeed  # noqa: E402
import torch.distributed as dist  # noqa: E402
from stage_0 import stepped_params  # noqa: E402
from training import Job, build_model, build_optimizer, ds_config, gathered, sub_group_steps, train_step  # noqa: E402


def main(directory: str, out: str, changes: dict[str, Any]) -> None:
    assert not any(name.startswith("zeroelastic") for name in sys.modules)
    try:
        importlib.util.find_spec("zeroelastic")
        raise AssertionError("zeroelastic can be imported")
    except ImportError:
        pass
    import torch

    job = Job(installed=False, **changes)
    model = build_model(job)
    optimizer = build_optimizer(job, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(job), lr_scheduler=schedule)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    if job.stage == 0:
        steps = [float(scalars["step"]) for _, _, _, scalars in stepped_params(engine)]
        distinct = len(steps)
    else:
        steps, distinct = sub_group_steps(engine)
    seen = {
        # A module that imports nothing of zeroelastic, read by its path.
        "gathered": gathered(engine, runpy.run_path(str(GATHER))["gather_state"](engine) if job.stage else None),
        "groups": [
            {key: value for key, value in group.items() if key != "params" and isinstance(value, (int, float, list))}
            for group in engine.optimizer.optimizer.param_groups
        ],
        "steps": steps,
        "distinct_steps": distinct,
        "buffers": {name: value.tolist() for name, value in engine.module.named_buffers()},
        "global_steps": engine.global_steps,
        "scheduler": engine.lr_scheduler.last_epoch,
        "note": client_state["note"],
        "losses": [train_step(engine, step) for step in range(3, 5)],
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch with gloo now and then aborts at an interpreter's exit


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
