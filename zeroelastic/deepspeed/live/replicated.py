"""Values that must be equal on every rank, because one saved copy is restored on all: checked before a save."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.distributed.collective import all_gather
from zeroelastic.errors import UnsupportedError, some

_MAX_LISTED = 4


def replicated_facts(live: LiveOptimizer) -> dict[str, str]:
    """Scalars of optimizer state, hyper-parameters and GradScaler state of this rank: a text by description.

    Raises UnsupportedError for state that is neither cut like the weights nor a scalar, and for hyper-parameters that
    are not plain values.
    """
    facts: dict[str, str] = {}
    for i in range(live.layout.num_sub_groups):
        _, scalars = live.split_state(i)
        name = type(live.stepper(i)).__name__
        facts |= {f"{name}'s state {key!r} of sub-group {i}": value.canonical() for key, value in scalars.items()}
    for g, group in enumerate(live.base.param_groups):
        for key, value in group.items():
            if key != "params":
                facts[f"{key!r} of optimizer group {g}"] = _text(value, f"{key!r} of optimizer group {g}")
    if live.grad_scaler is not None:
        facts |= {f"{key!r} of torch's GradScaler": repr(value) for key, value in live.grad_scaler.state_dict().items()}
    return facts


Token = tuple[int, str]
"""The tensor parallel rank of a rank, and a hash of its facts."""


def token_of(facts: Mapping[str, str], tp_rank: int = 0) -> Token:
    """What ``difference`` compares first."""
    return tp_rank, hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()


def difference(facts: dict[str, str], tokens: Sequence[Token]) -> UnsupportedError | None:
    """An error that names the values that differ between ranks, the same on each; None when they agree. Collective.

    ``tokens`` are those of all ranks. Tensor parallel ranks are not compared with one another: each has sub-groups of
    its own.
    """
    firsts: dict[int, int] = {}  # the first rank of each tensor parallel rank
    first_of = [firsts.setdefault(tp_rank, rank) for rank, (tp_rank, _) in enumerate(tokens)]
    if all(token == tokens[first] for token, first in zip(tokens, first_of, strict=True)):
        return None
    tables = all_gather(facts)
    named: list[str] = []
    for what in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(what, "none") for table in tables]
        other = next((rank for rank, first in enumerate(first_of) if values[rank] != values[first]), None)
        if other is not None:
            first = first_of[other]
            named.append(f"{what} is {values[first]} on rank {first} and {values[other]} on rank {other}")
    return UnsupportedError(
        f"{some(named, _MAX_LISTED, separator='; ')}. Values that follow from a rank's own part of the weights cannot "
        "be resharded: save with elastic_checkpoint off and resume at the same world size."
    )


def _text(value: object, where: str, depth: int = 0) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.hex() if isinstance(value, float) else repr(value)
    if isinstance(value, (list, tuple)) and depth < 3:
        return ",".join(_text(item, where, depth + 1) for item in value)
    raise UnsupportedError(
        f"{where} is a {type(value).__name__}, not a plain value, which cannot be restored. Save with "
        "elastic_checkpoint off and resume at the same world size."
    )
