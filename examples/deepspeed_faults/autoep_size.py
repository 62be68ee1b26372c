"""AutoEP with ZeRO-2: a checkpoint of autoep_size 2 loads with autoep_size 1, without an error, and experts are wrong.

torchrun --nproc_per_node 2 autoep_size.py DIR save 2 && torchrun --nproc_per_node 2 autoep_size.py DIR load 1
"""

import sys
from types import SimpleNamespace

import deepspeed
import torch

folder, what, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, layer, block = (torch.nn.Module() for _ in range(3))
model.config = SimpleNamespace(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, hidden_size=16)
layer.mlp, block.gate, block.top_k = block, torch.nn.Linear(16, 4, bias=False), 2
block.experts = torch.nn.ParameterDict({"gate_up_proj": torch.randn(4, 32, 16), "down_proj": torch.randn(4, 16, 16)})
model.model, model.forward = torch.nn.Module(), lambda x: model.model.layers[0].mlp(x)
model.model.layers = torch.nn.ModuleList([layer])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "expert_parallel": {"enabled": True, "autoep_size": size, "preset_model": "mixtral"},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
if what == "load":
    assert engine.load_checkpoint(folder, tag="t")[0] is not None
    [group.update(lr=0.0) for group in engine.optimizer.param_groups]  # a step then makes the weights from the state
out = engine(torch.randn(1, 8, 16, dtype=torch.bfloat16))
engine.backward((out[0] if isinstance(out, tuple) else out).float().pow(2).mean())
engine.step()
if what == "save":
    engine.save_checkpoint(folder, tag="t")
else:
    live = engine.module.model.layers[0].mlp.experts.w1.detach()
    own = [engine.global_rank * len(live) % 4 + i for i in range(len(live))]  # the numbers of this rank's experts
    files = {e: torch.load(f"{folder}/t/layer_0_expert_{e}_mp_rank_00_model_states.pt") for e in own}
    wrong = [e for i, e in enumerate(own) if not torch.equal(live[i], next(iter(files[e].values())))]
    print(f"RESULT rank {engine.global_rank}: of the experts {own} these are wrong: {wrong}", flush=True)
