"""The same with Fabric: ``fabric.save`` and ``fabric.load``, and the script keeps the position in the data.

    torchrun --nproc_per_node 4 train_fabric.py --steps 6
    torchrun --nproc_per_node 3 train_fabric.py --steps 12

Each call of ``optimizer.step()`` is an optimizer step: Fabric 2.6 calls DeepSpeed's optimizer past its engine, which
then never accumulates. So the micro batch alone follows the world size.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from corpus import Corpus, Transformer, parameter_groups
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
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="ZeRO stage; may change on a resume")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    micro, rest = divmod(args.global_batch, world_size)
    if rest:
        parser.error(f"--global-batch {args.global_batch} does not divide by {world_size} processes")
    zero = {"stage": args.stage, "round_robin_gradients": True}
    if args.stage == 3:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    config = {
        "train_micro_batch_size_per_gpu": micro,  # Fabric says 1 otherwise, and the global batch seems to change
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "zeroelastic": {"format": "elastic", "strict": True},
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
        ahead = torch.utils.data.Subset(corpus, order[done * args.global_batch :].tolist())
        # Fabric deals a loader's samples out to the ranks in turns: the next global batch is the same at any world size
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(ahead, batch_size=micro))
        for tokens, indices in loader:
            loss = model(tokens)
            fabric.backward(loss)
            optimizer.step()
            state["step"] += 1
            value = fabric.all_gather(loss.detach()).mean().item()
            samples = sorted(fabric.all_gather(indices).flatten().tolist())
            if fabric.is_global_zero:
                args.out.mkdir(parents=True, exist_ok=True)
                line = {"step": state["step"], "loss": value, "lr": 5e-3, "samples": samples}
                with (args.out / "history.jsonl").open("a") as file:
                    file.write(json.dumps({**line, "processes": world_size}) + "\n")
            if state["step"] >= args.steps:
                break
    fabric.save(checkpoint, state)
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
