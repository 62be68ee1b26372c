"""ZeRO-2 with round_robin_gradients: ds_to_universal writes parameters with the values of others, without an error.

torchrun --nproc_per_node 2 round_robin.py DIR
"""

import subprocess
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

folder = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(i, o) for i, o in ((4, 8), (8, 6), (6, 4), (4, 2))))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    },
)
engine.backward(engine(torch.randn(2, 4, dtype=torch.bfloat16)).float().pow(2).mean())
engine.step()
engine.save_checkpoint(folder, tag="t")
params = dict(engine.module.named_parameters())
live = {name: safe_get_full_fp32_param(param) for name, param in params.items()}
if dist.get_rank() == 0:
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    subprocess.run([*convert, "--input_folder", f"{folder}/t", "--output_folder", f"{folder}/u"], check=True)
    files = {name: torch.load(f"{folder}/u/zero/{name}/fp32.pt", weights_only=False)["param"] for name in params}
    read = {name: files[name].view(param.shape) for name, param in params.items()}
    for what, found in (("safe_get_full_fp32_param", live), ("Universal Checkpoint", read)):
        wrong = [n for n, p in params.items() if (found[n].float() - p.detach().float()).abs().max() > 0.01]
        print(f"RESULT {what}: {len(wrong)} of {len(params)} parameters are wrong", flush=True)
