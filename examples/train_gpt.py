"""A small byte-level GPT trained with DeepSpeed ZeRO-3, that resumes on any number of ranks.

It is an ordinary training script. Three things in it serve resuming at another world size, each marked "elastic":
`zeroelastic.install()`, the flag in the DeepSpeed configuration, and a data order that depends on the step alone.
The text is the Python standard library's own source, so nothing is downloaded.

    torchrun --nproc_per_node 4 examples/train_gpt.py --steps 60 --save-at 30 --checkpoint-dir ckpt --metrics four.json
    torchrun --nproc_per_node 3 examples/train_gpt.py --steps 60 --resume --checkpoint-dir ckpt --metrics three.json

Set `DS_ACCELERATOR=cpu OMP_NUM_THREADS=1` to train without a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sysconfig
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn

import zeroelastic

logger = logging.getLogger("train_gpt")

SEED = 1234
CORPUS_BYTES = 4 * 1024 * 1024
NUM_BYTE_VALUES = 256


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))
        return x


class GPT(nn.Module):
    """Bytes in, the mean next-byte cross-entropy (nats) out; the head shares the embedding's parameter."""

    def __init__(self, *, width: int, depth: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(NUM_BYTE_VALUES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTE_VALUES, bias=False)
        self.head.weight = self.token_embedding.weight
        for name, param in self.named_parameters():
            if param.dim() >= 2:
                residual = name.endswith(("projection.weight", "contract.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def read_corpus(max_bytes: int = CORPUS_BYTES) -> np.ndarray:
    """The standard library's sources in the order of their file names, cut at `max_bytes`; 1-D uint8."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in paths)[:max_bytes]
    return np.frombuffer(text, dtype=np.uint8)


def read_sample(corpus: np.ndarray, *, step: int, index: int, length: int) -> np.ndarray:
    """Sample `index` of the global batch of `step`: `length` bytes from a place that these two numbers alone decide."""
    start = np.random.default_rng((SEED, step, index)).integers(len(corpus) - length + 1)
    return corpus[start : start + length]


def micro_batch(
    corpus: np.ndarray, *, step: int, micro_step: int, micro_size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets, each [micro_size, context], for one micro-step of one step.

    Elastic: over all ranks and micro-steps the indices 0 .. global_batch - 1 come up once each, at any world size.
    """
    first = (micro_step * dist.get_world_size() + dist.get_rank()) * micro_size
    rows = [read_sample(corpus, step=step, index=first + i, length=context + 1) for i in range(micro_size)]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64)).to(get_accelerator().current_device_name())
    return tokens[:, :-1], tokens[:, 1:]


def split_batch(global_batch: int, *, world_size: int, accumulation: int) -> int:
    """The micro batch that keeps the global batch at this world size.

    Raises SystemExit where the global batch cannot be cut evenly.
    """
    micro_size, rest = divmod(global_batch, world_size * accumulation)
    if rest or not micro_size:
        raise SystemExit(
            f"--global-batch {global_batch} cannot be cut into {world_size} ranks x {accumulation} micro-steps; "
            f"choose a multiple of {world_size * accumulation}, or another number of ranks."
        )
    return micro_size


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices decay, 1-D parameters (biases, norms) do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(optimizer: torch.optim.Optimizer, *, steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine from the peak down to a tenth of it at `steps`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def deepspeed_config(*, global_batch: int, micro_size: int, accumulation: int) -> dict[str, object]:
    """The DeepSpeed configuration."""
    return {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 100_000,
            "stage3_param_persistence_threshold": 2_000,
        },
        "zeroelastic": {"format": "elastic"},  # elastic
    }


def train_step(
    engine: deepspeed.DeepSpeedEngine,
    corpus: np.ndarray,
    *,
    step: int,
    micro_size: int,
    accumulation: int,
    context: int,
) -> float:
    """One optimizer step; the loss is the mean over the global batch, the same number on every rank."""
    total = torch.zeros((), device=engine.device)
    for micro_step in range(accumulation):
        tokens, targets = micro_batch(corpus, step=step, micro_step=micro_step, micro_size=micro_size, context=context)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    dist.all_reduce(total)
    return total.item() / (accumulation * dist.get_world_size())


def parse_args() -> argparse.Namespace:
    """The command line; `torchrun` adds nothing to it, it speaks through the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="the step to train up to")
    parser.add_argument("--global-batch", type=int, default=24, help="samples per step, at any world size")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps per step")
    parser.add_argument("--checkpoint-dir", type=Path, default=None)
    parser.add_argument("--save-at", type=int, default=None, help="save when this many steps are done")
    parser.add_argument("--resume", action="store_true", help="start from the latest checkpoint")
    parser.add_argument(
        "--drop-moments", action="store_true", help="resume the weights without the optimizer's moments"
    )
    parser.add_argument("--metrics", type=Path, default=None, help="write losses and the resume report here")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()
    if (args.resume or args.save_at is not None) and args.checkpoint_dir is None:
        parser.error("--resume and --save-at need --checkpoint-dir")
    return args


def main() -> None:
    """Train from scratch or from the latest checkpoint, and write the metrics on rank 0."""
    args = parse_args()
    started = time.perf_counter()
    zeroelastic.install()  # elastic: before deepspeed.initialize
    deepspeed.init_distributed()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    micro_size = split_batch(args.global_batch, world_size=world_size, accumulation=args.accumulation)

    torch.manual_seed(SEED)
    model = GPT(width=args.width, depth=args.depth, num_heads=args.heads, context=args.context)
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, steps=args.steps, warmup=args.warmup),
        config=deepspeed_config(global_batch=args.global_batch, micro_size=micro_size, accumulation=args.accumulation),
    )

    report = None
    if args.resume:
        path, _ = engine.load_checkpoint(str(args.checkpoint_dir), load_optimizer_states=not args.drop_moments)
        if path is None:
            raise SystemExit(f"{args.checkpoint_dir}: no checkpoint to resume from")
        report = engine.zeroelastic_report.to_dict()

    corpus = read_corpus()
    losses: list[tuple[int, float]] = []
    for step in range(engine.global_steps, args.steps):  # elastic: the step decides the samples
        loss = train_step(
            engine,
            corpus,
            step=step,
            micro_size=micro_size,
            accumulation=args.accumulation,
            context=args.context,
        )
        losses.append((step, loss))
        logger.info("step %d loss %.4f lr %.2e", step, loss, engine.get_lr()[0])
        if engine.global_steps == args.save_at:
            engine.save_checkpoint(str(args.checkpoint_dir))

    if rank == 0 and args.metrics is not None:
        metrics = {
            "world_size": world_size,
            "global_batch": args.global_batch,
            "num_params": num_params,
            "losses": losses,
            "report": report,
            "seconds": time.perf_counter() - started,
        }
        args.metrics.parent.mkdir(parents=True, exist_ok=True)
        args.metrics.write_text(json.dumps(metrics, indent=1) + "\n")
    dist.barrier()  # gloo's threads let go of the last step's tensors before the interpreter ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
