"""A ZeRO-3 job that survives losing and gaining nodes: any of them may go, and others may come.

    torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=100 \\
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=job train.py --ckpt /shared/ckpt

At each change torchrun stops all workers and starts them again at the new size; this script goes on where the newest
checkpoint is, with the same global batch and the next samples.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, Dataset

import zeroelastic
from zeroelastic.elastic import (
    BatchPlan,
    ElasticDistributedSampler,
    batch_plan,
    every,
    preemption,
    resume,
    set_collective_timeout,
)

CONFIG = {
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


class Text(Dataset):
    """Windows of a text file's bytes."""

    def __init__(self, path: str, length: int = 32, samples: int = 500) -> None:
        data = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.windows = data[: samples * length].view(samples, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.windows[index]


class Model(torch.nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.mix = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(self.embedding(tokens[:, :-1]))
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default="ckpt", help="a directory that all nodes share")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--max-micro", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="wait in each step, to play a larger model")
    parser.add_argument("--memory", type=int, metavar="COPIES", help="keep each step in memory, with copies on nodes")
    parser.add_argument("--events", help="append saves, loads and stops to this file, a line of JSON at a time")
    parser.add_argument("--trace", help="append what each rank trains on to this file, a line of JSON at a time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a silent rank counts as lost")
    parser.add_argument("--hold", help="while this file exists, train no further than the step that it says")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[Any, BatchPlan]:
    """The engine for this number of ranks, and the batch that keeps the global one."""
    plan = batch_plan(args.global_batch, max_micro=args.max_micro)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    memory = {} if args.memory is None else {"memory": {"every": 1, "copies": args.memory}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=plan.apply({**CONFIG, "zeroelastic": {"format": "elastic", **memory}})
    )
    return engine, plan


def main() -> None:
    args = options(__doc__)
    zeroelastic.install()
    set_collective_timeout(args.timeout)  # before anything waits for other ranks
    deepspeed.init_distributed(timeout=datetime.timedelta(seconds=args.timeout))
    engine, plan = build(args)
    data = Text(argparse.__file__)
    sampler = ElasticDistributedSampler(data, plan.global_batch, seed=0)
    if args.events is not None:
        zeroelastic.subscribe(zeroelastic.jsonl(args.events))
    began = time.monotonic()
    start = resume(engine, args.ckpt, data=sampler)
    trace(args.trace, event="resume", world_size=plan.world_size, rank=engine.global_rank, tag=start.tag,
          tier=start.tier, step=start.global_steps, exact=start.report.root_matches if start.report else None,
          nbytes=start.report.total_bytes_read if start.report else 0,
          seconds=time.monotonic() - began)  # fmt: skip
    loader = DataLoader(data, batch_size=plan.micro_batch, sampler=sampler)
    saving = every(steps=args.save_steps)
    with preemption(engine, args.ckpt, data=sampler, saving=saving) as stop:
        while engine.global_steps < args.steps and not stop.stopped:
            samples: list[int] = []
            for indices, tokens in loader:  # from where the sampler is to the end of the epoch
                loss = engine(tokens)
                engine.backward(loss)
                before = engine.global_steps
                engine.step()
                samples += indices.tolist()
                if engine.global_steps > before:
                    time.sleep(args.step_seconds)
                    trace(args.trace, event="step", world_size=plan.world_size, rank=engine.global_rank,
                          step=engine.global_steps, samples=samples, loss=float(loss))  # fmt: skip
                    samples = []
                    while held(args.hold, engine.global_steps) and not stop.signalled:
                        time.sleep(0.1)
                if stop() or engine.global_steps >= args.steps:
                    break
        if not stop.stopped:
            stop.save()
    trace(args.trace, event="end", rank=engine.global_rank, step=engine.global_steps, stopped=stop.stopped)
    if stop.stopped:
        stop.exit()  # a code of its own: whatever started this is to start it again
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def held(path: str | None, step: int) -> bool:
    """Whether to wait for nodes that are slow to start, so that a demonstration is not over before they come."""
    try:
        return path is not None and step >= int(Path(path).read_text())
    except FileNotFoundError:
        return False


def trace(path: str | None, **fields: object) -> None:
    if path is not None:
        line = json.dumps({"time": time.time(), "pid": os.getpid(), **fields}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


if __name__ == "__main__":
    main()
