"""A plain ZeRO-3 training script.

    torchrun --nproc-per-node=2 train_plain.py

train_in_place.py is the same one as a job whose number of nodes changes while it runs.
"""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3},
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ckpt", default="ckpt")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--micro-batch", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 64))


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {**CONFIG, "train_micro_batch_size_per_gpu": args.micro_batch}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


engine = build()
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
done = False
while not done:
    for (batch,) in loader:
        loss = engine(batch.to(engine.device)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        done = engine.global_steps >= args.steps
        if done:
            break
    sampler.set_epoch(sampler.epoch + 1)
engine.save_checkpoint(args.ckpt)
