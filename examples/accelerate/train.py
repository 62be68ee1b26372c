"""Train a small Llama with accelerate and DeepSpeed ZeRO; started again on other ranks, it goes on where it stopped.

    torchrun --nproc_per_node 4 train.py --steps 6
    torchrun --nproc_per_node 3 train.py --steps 12

Everything about checkpoints is accelerate's own: ``save_state``, ``load_state``, ``skip_first_batches``. What is
zeroelastic's is marked; it can be left out and the script started with ``-m zeroelastic.run train.py`` instead. The
global batch, and with it the samples of each step, is the same at every number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import zeroelastic

zeroelastic.install()  # elastic: before the engine is built


class Corpus(torch.utils.data.Dataset):
    """``num_samples`` sequences of 16 tokens that follow a simple rule; each knows its index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (1 + index % 7) + index) % 64
        return {"input_ids": tokens, "index": torch.tensor(index)}


def split_batch(global_batch: int, *, world_size: int, max_micro: int) -> tuple[int, int]:
    """The largest micro batch, and the accumulation, that make the same global batch at this number of processes."""
    share, rest = divmod(global_batch, world_size)
    if rest:
        raise SystemExit(f"--global-batch {global_batch} does not divide by {world_size} processes")
    micro = max(size for size in range(1, max_micro + 1) if share % size == 0)
    return micro, share // micro


def build_model(lora: bool) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def parameter_groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Matrices decay, norms do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=12, help="the optimizer step to stop at")
    parser.add_argument("--total-steps", type=int, default=12, help="the length of the learning rate schedule")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="ZeRO stage; may change on a resume")
    parser.add_argument("--max-micro", type=int, default=4)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    micro, accumulation = split_batch(args.global_batch, world_size=world_size, max_micro=args.max_micro)
    zero = {"stage": args.stage, "round_robin_gradients": True}
    if args.stage == 3:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 100}
    ds_config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": zero,
        "bf16": {"enabled": args.mixed_precision == "bf16"},
        "zeroelastic": {"format": "elastic", "strict": True},
    }
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7),
        kwargs_handlers=[InitProcessGroupKwargs(backend="nccl" if torch.cuda.is_available() else "gloo")],
    )
    set_seed(7)
    model = build_model(args.lora)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=5e-3)
    # accelerate steps a scheduler once per process, so its lengths are multiplied, as in accelerate's own examples
    schedule = get_linear_schedule_with_warmup(optimizer, 3 * world_size, args.total_steps * world_size)
    loader = torch.utils.data.DataLoader(Corpus(args.samples), batch_size=micro, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    checkpoint = args.out / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    step = model.global_steps  # DeepSpeed's counter of optimizer steps: the position in the data follows from it
    steps_per_epoch = args.samples // args.global_batch
    history = args.out / "history.jsonl"
    while step < args.steps:
        epoch, done = divmod(step, steps_per_epoch)
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, done * accumulation) if done else loader
        losses, samples, rate = [], [], 0.0
        for batch in batches:
            indices = batch.pop("index")
            with accelerator.accumulate(model):
                loss = model(**batch, labels=batch["input_ids"]).loss
                rate = optimizer.param_groups[0]["lr"]
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().float()).mean().item())
            samples += accelerator.gather(indices).tolist()
            if accelerator.sync_gradients:
                step += 1
                if accelerator.is_main_process:
                    line = {"step": step, "loss": sum(losses) / len(losses), "lr": rate, "samples": sorted(samples)}
                    args.out.mkdir(parents=True, exist_ok=True)
                    with history.open("a") as file:
                        file.write(json.dumps({**line, "processes": world_size}) + "\n")
                losses, samples = [], []
                if step >= args.steps:
                    break
    accelerator.save_state(str(checkpoint))
    accelerator.end_training()


if __name__ == "__main__":
    main()
