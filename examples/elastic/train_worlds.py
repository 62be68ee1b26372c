"""train.py as a job that changes size in its processes, for cluster.py; train_in_place.py shows no more than is needed.

    torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=100 --rdzv-backend=zeroelastic-in-place \\
        --rdzv-endpoint=HOST:29400 --rdzv-id=job train_worlds.py --ckpt /shared/ckpt

It has the options, the model, the data and the trace of train.py. A node that is asked to leave (SIGTERM) gives its
part of the state to the others, one that comes gets its part from them, and all others keep their processes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from train import Text, build, held, options, trace

from zeroelastic.elastic import ElasticDistributedSampler, World, every, set_collective_timeout, worlds


def main() -> None:
    args = options(__doc__)
    set_collective_timeout(args.timeout)
    data = Text(argparse.__file__)
    sampler = ElasticDistributedSampler(data, args.global_batch, seed=0)
    saving = every(steps=args.save_steps)
    for world in worlds(lambda: build(args)[0], args.ckpt, data=sampler, saving=saving, log=args.events, status=True):
        with world as engine:
            train(args, world, engine, data)


def train(args: argparse.Namespace, world: World, engine: Any, data: Text) -> None:
    rank, size, start, report = dist.get_rank(), dist.get_world_size(), world.start, world.report
    loaded = start.report
    trace(args.trace, event="resume", world_size=size, rank=rank, tag=start.tag, tier=start.tier,
          step=start.global_steps, nbytes=loaded.total_bytes_read if loaded else 0,
          exact=report.root is not None if report else loaded.root_matches if loaded else None,
          moved=report.bytes_moved if report else None)  # fmt: skip
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=world.data)
    ended = engine.global_steps >= args.steps
    while not ended:
        samples: list[int] = []
        for indices, tokens in loader:  # from where the sampler is to the end of the epoch
            loss = engine(tokens)
            engine.backward(loss)
            before = engine.global_steps
            engine.step()
            world.log.step(loss)
            samples += indices.tolist()
            if engine.global_steps > before:
                time.sleep(args.step_seconds)
                trace(args.trace, event="step", world_size=size, rank=rank, step=engine.global_steps,
                      samples=samples, loss=float(loss))  # fmt: skip
                samples = []
                while held(args.hold, engine.global_steps):
                    time.sleep(0.1)
            ended = world.ends() or engine.global_steps >= args.steps
            if ended:
                break
    if engine.global_steps >= args.steps and not world.stopped:
        world.save()


if __name__ == "__main__":
    main()
