"""Train a small transformer with Lightning and DeepSpeed ZeRO; on other ranks it goes on where it stopped.

    torchrun --nproc_per_node 4 train.py --steps 6
    torchrun --nproc_per_node 3 train.py --steps 12

Everything about checkpoints is Lightning's own: ``Trainer.save_checkpoint``, ``fit(ckpt_path=...)``. What is
zeroelastic's is marked; it can be left out and the script started with ``-m zeroelastic.run train.py`` instead.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from corpus import Corpus, Transformer, parameter_groups, split_batch
from cpu_accelerator import TrainerOnCPU
from lightning.pytorch.strategies import DeepSpeedStrategy

import zeroelastic

zeroelastic.install()  # elastic: before the engine is built


class Model(pl.LightningModule):
    def __init__(self, total_steps: int) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.total_steps = total_steps

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        tokens, indices = batch
        loss = self.transformer(tokens)
        return {"loss": loss, "value": loss.detach().float(), "indices": indices}  # Lightning divides "loss"

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(parameter_groups(self), lr=5e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class History(pl.Callback):
    """Writes a line for each optimizer step: loss and samples over all ranks, and the learning rate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[float] = []
        self.samples: list[int] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.losses.append(module.all_gather(outputs["value"]).mean().item())
        self.samples += module.all_gather(outputs["indices"]).flatten().tolist()
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            if trainer.is_global_zero:
                loss = sum(self.losses) / len(self.losses)
                line = {"step": trainer.global_step, "loss": loss, "lr": self.rate, "samples": sorted(self.samples)}
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps({**line, "processes": trainer.world_size}) + "\n")
            self.losses, self.samples = [], []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=12, help="the optimizer step to stop at")
    parser.add_argument("--total-steps", type=int, default=12, help="the length of the learning rate schedule")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="ZeRO stage; may change on a resume")
    parser.add_argument("--max-micro", type=int, default=4)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="bf16-mixed")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    micro, accumulation = split_batch(args.global_batch, world_size=world_size, max_micro=args.max_micro)
    pl.seed_everything(7)
    zero = {"stage": args.stage, "round_robin_gradients": True}
    if args.stage == 3:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "zeroelastic": {"format": "elastic", "strict": True},
    }
    trainer = pl.Trainer(
        accelerator="cuda" if torch.cuda.is_available() else TrainerOnCPU(),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=DeepSpeedStrategy(config=config),
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=accumulation,
        callbacks=[History(args.out / "history.jsonl")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = args.out / "last.ckpt"
    loader = torch.utils.data.DataLoader(Corpus(args.samples), batch_size=micro, shuffle=True)
    trainer.fit(Model(args.total_steps), loader, ckpt_path=str(checkpoint) if checkpoint.exists() else None)
    trainer.save_checkpoint(checkpoint)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
