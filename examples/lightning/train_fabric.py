"""The same with Fabric: ``fabric.save`` and ``fabric.load``, and the script keeps the position in the data.

torchrun --nproc_per_node 4 train_fabric.py --steps 6
torchrun --nproc_per_node 3 train_fabric.py --steps 12
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

import torch
from corpus import Corpus, Transformer, parameter_groups, split_batch
from cpu_accelerator import FabricOnCPU
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy

import zeroelastic

zeroelastic.install()  # elastic: before the engine is built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=12, help="the optimizer step to stop at")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--max-micro", type=int, default=4)
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    micro, accumulation = split_batch(args.global_batch, world_size=world_size, max_micro=args.max_micro)
    config = {
        # Fabric tells DeepSpeed neither of these: without them a changed global batch would not be noticed
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "elastic_checkpoint": True, "stage3_param_persistence_threshold": 100},
        "zeroelastic": {"strict": True},
    }
    fabric = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else FabricOnCPU(),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=DeepSpeedStrategy(config=config),
        precision="bf16-mixed",
    )
    fabric.launch()
    fabric.seed_everything(7)
    model = Transformer()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(parameter_groups(model), lr=5e-3))
    corpus = Corpus(args.samples)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpoint = args.out / "last.ckpt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    steps_per_epoch = args.samples // args.global_batch
    while state["step"] < args.steps:
        epoch, done = divmod(state["step"], steps_per_epoch)
        order = torch.randperm(args.samples, generator=torch.Generator().manual_seed(epoch))
        rest = torch.utils.data.Subset(corpus, order[done * args.global_batch :].tolist())
        # Fabric deals a loader's samples out to the ranks in turns: the next global batch is the same at any world size
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rest, batch_size=micro))
        batches = iter(loader)
        for _ in range(min(steps_per_epoch - done, args.steps - state["step"])):
            total, samples = 0.0, []
            for tokens, indices in itertools.islice(batches, accumulation):
                loss = model(tokens)
                fabric.backward(loss)
                optimizer.step()  # DeepSpeed counts micro-batches and steps at the last
                total += fabric.all_gather(loss.detach()).mean().item() / accumulation
                samples += fabric.all_gather(indices).flatten().tolist()
            state["step"] += 1
            if fabric.is_global_zero:
                args.out.mkdir(parents=True, exist_ok=True)
                line = {"step": state["step"], "loss": total, "lr": 5e-3, "samples": sorted(samples)}
                with (args.out / "history.jsonl").open("a") as file:
                    file.write(json.dumps({**line, "processes": world_size}) + "\n")
    fabric.save(checkpoint, state)
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
