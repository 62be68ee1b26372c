"""ZeRO-3: a checkpoint cannot be loaded into an engine without an optimizer, as one has it to evaluate a model.

torchrun --nproc_per_node 1 no_optimizer.py DIR
"""

import sys

import deepspeed
import torch

folder = sys.argv[1]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}
model = torch.nn.Linear(8, 8)
training, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=dict(config)
)
training.save_checkpoint(folder)
evaluation, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=dict(config))
for flags in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
    try:
        path, _ = evaluation.load_checkpoint(folder, **flags)
        same = all(
            torch.equal(a.ds_tensor, b.ds_tensor)
            for a, b in zip(training.module.parameters(), evaluation.module.parameters(), strict=True)
        )
        print(
            f"RESULT {flags}: loaded {path}, weights are {'those of the checkpoint' if same else 'wrong'}", flush=True
        )
    except Exception as error:
        print(f"RESULT {flags}: {type(error).__name__}: {str(error)[:150]}", flush=True)
