"""train_plain.py as a job that changes size in its processes: nodes may come and leave between any two steps.

    torchrun --nnodes=1:4 --nproc-per-node=2 --rdzv-backend=zeroelastic-in-place \\
        --rdzv-endpoint=HOST:29400 --rdzv-id=job --max-restarts=100 train_in_place.py --ckpt /shared/ckpt
"""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset

from zeroelastic.elastic import ElasticDistributedSampler, batch_plan, every, worlds

CONFIG = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "elastic_checkpoint": True},
    "zeroelastic": {"memory": {"every": 1, "copies": 1}},
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ckpt", default="ckpt")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--global-batch", type=int, default=24)
args = parser.parse_args()

torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 64))


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = batch_plan(args.global_batch, max_micro=4).apply(CONFIG)  # for the ranks of this world
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


sampler = ElasticDistributedSampler(data, args.global_batch, seed=0)
for world in worlds(build, args.ckpt, data=sampler, saving=every(seconds=600), log="events.jsonl"):
    with world as engine:
        loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
        done = engine.global_steps >= args.steps
        while not done:
            for (batch,) in loader:
                loss = engine(batch.to(engine.device)).pow(2).mean()
                engine.backward(loss)
                engine.step()
                world.log.step(loss)
                done = world.ends() or engine.global_steps >= args.steps
                if done:
                    break
        if engine.global_steps >= args.steps:
            world.save()
