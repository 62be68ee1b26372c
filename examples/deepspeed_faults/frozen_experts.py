"""Frozen experts with ZeRO-2: a load at the size that saved gives every rank those of rank 0, without an error.

torchrun --nproc_per_node 2 frozen_experts.py DIR
"""

import sys

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer


def make_engine():
    moe = MoE(16, torch.nn.Linear(16, 16), num_experts=4, ep_size=2, use_rts=False, drop_tokens=False)
    model, experts = torch.nn.Sequential(moe), moe.deepspeed_moe.experts.deepspeed_experts
    for expert in experts:
        expert.bias.requires_grad = False
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = split_params_into_different_moe_groups_for_optimizer([{"params": trained, "name": "all"}])
    options = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
    config = {"train_micro_batch_size_per_gpu": 1, **options}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(groups), config=config)
    return engine, experts


deepspeed.init_distributed()
torch.manual_seed(torch.distributed.get_rank())
engine, experts = make_engine()
engine.backward(engine(torch.randn(1, 8, 16))[0].pow(2).mean())
engine.step()
saved = [expert.bias.clone() for expert in experts]
engine.save_checkpoint(sys.argv[1], tag="t")
engine, experts = make_engine()
assert engine.load_checkpoint(sys.argv[1], tag="t")[0] is not None
own = [engine.global_rank * len(saved) + i for i in range(len(saved))]  # the numbers of this rank's experts
wrong = [number for i, number in enumerate(own) if not torch.equal(saved[i], experts[i].bias)]
print(f"RESULT rank {engine.global_rank}: of the frozen experts {own} these are wrong: {wrong}", flush=True)
