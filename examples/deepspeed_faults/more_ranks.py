"""ZeRO-3: a load on more ranks than saved raises an AssertionError without a text on the new ranks.

torchrun --nproc_per_node 1 more_ranks.py DIR && torchrun --nproc_per_node 2 more_ranks.py DIR
"""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist

folder = sys.argv[1]
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    },
)
if dist.get_world_size() == 1:
    engine.save_checkpoint(folder)
else:
    try:
        engine.load_checkpoint(folder)
    except (AssertionError, Exception) as error:  # the ranks do not raise the same
        print(f"RESULT rank {dist.get_rank()}: {type(error).__name__} {str(error)[:120]!r}", flush=True)
    os._exit(0)  # a rank that still waits for the others would never return
