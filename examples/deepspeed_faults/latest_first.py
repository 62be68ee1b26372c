"""save_checkpoint: rank 0 writes `latest` before the files of other ranks exist, so that a crash leaves no checkpoint.

torchrun --nproc_per_node 2 latest_first.py DIR
"""

import os
import sys
import threading
import time

import deepspeed
import torch
import torch.distributed as dist

folder = sys.argv[1]
model = torch.nn.Linear(8, 8)
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # else a gathering of small parameters hides it
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={"train_batch_size": 2, "zero_allow_untested_optimizer": True, "zero_optimization": zero},
)
if dist.get_rank() == 1:  # whose disk is slow
    save = engine._save_zero_checkpoint
    engine._save_zero_checkpoint = lambda *args: (time.sleep(5), save(*args))


def watch():
    while not os.path.exists(f"{folder}/latest"):
        time.sleep(0.01)
    print(f"RESULT latest names the tag, and these files are there: {sorted(os.listdir(f'{folder}/t'))}", flush=True)


if dist.get_rank() == 0:
    threading.Thread(target=watch, daemon=True).start()
engine.save_checkpoint(folder, tag="t")
dist.barrier()
