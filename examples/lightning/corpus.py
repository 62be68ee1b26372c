"""What both examples train: sequences that know their index, a small transformer, a batch for any world size."""

from __future__ import annotations

import torch
from torch import nn


class Corpus(torch.utils.data.Dataset):
    """``num_samples`` sequences of 16 tokens that follow a simple rule; each comes with its index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return (torch.arange(16) * (1 + index % 7) + index) % 64, index


class Transformer(nn.Module):
    """One layer, tied to nothing: it returns the loss of predicting each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1] - 1
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=tokens.device), diagonal=1)
        hidden = self.layer(self.embedding(tokens[:, :-1]), src_mask=mask)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, biases and norms do not."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


def split_batch(global_batch: int, *, world_size: int, max_micro: int) -> tuple[int, int]:
    """The largest micro batch, and the accumulation, that make the same global batch at this number of processes."""
    share, rest = divmod(global_batch, world_size)
    if rest:
        raise SystemExit(f"--global-batch {global_batch} does not divide by {world_size} processes")
    micro = max(size for size in range(1, max_micro + 1) if share % size == 0)
    return micro, share // micro
