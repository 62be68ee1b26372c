"""Kinds of jobs: stage, precision, optimizer and its groups for all jobs of a sequence, the rest for each job.

A kind and a variant are fields of ``training.Job``.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

CPU = {"offload_optimizer": {"device": "cpu"}}
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    *({"optimizer": name} for name in ("adamw", "adam", "amsgrad", "sgd", "plain_sgd", "rmsprop", "adamax", "nadam")),
    *({"optimizer": name} for name in ("radam", "adadelta", "rprop", "asgd", "fused_adam", "cpu_adam")),
    {"optimizer": "lamb", "stage": 3},
    {"optimizer": "adagrad", "groups": 1, "stage": 3},
    {"optimizer": "adamw", "groups": 1, "frozen": False},
    {"optimizer": "adamw", "zero": CPU},
    {"optimizer": "cpu_adam", "zero": CPU},
    {"optimizer": "cpu_lion", "zero": CPU},
    {"optimizer": "muon", "zero": {"reduce_scatter": False}, "stage": 3},
)
STAGES = (3, 3, 2, 1, None, None)
"""None: each job has its own."""
PRECISIONS = ("bf16", "bf16", "fp16", "fp32")

KINDS = st.tuples(st.sampled_from(STAGES), st.sampled_from(PRECISIONS), st.sampled_from(OPTIMIZERS)).map(
    lambda drawn: {"precision": drawn[1], **({"stage": drawn[0]} if drawn[0] else {}), **drawn[2]}
)

AT_3: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"overlap_comm": True},
    {"contiguous_gradients": False},
    {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 50, "stage3_max_live_parameters": 100},
    {"stage3_param_persistence_threshold": 1000},
    {"stage3_param_persistence_threshold": 0},
)
BELOW_3: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"round_robin_gradients": True},
    {"parameter_alignment": True},
    {"contiguous_gradients": False},
    {"reduce_bucket_size": 100},
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"verify": "read"},
    {"io_engine": "numpy"},
    {"fsync": False},
    {"weights_only_load": True},
)


def variant(kind: dict[str, Any], number: int) -> dict[str, Any]:
    """What one job has of its own, chosen by a number."""
    choice = random.Random(number).choice
    stage = kind.get("stage") or choice((1, 2, 3))
    return {
        "stage": stage,
        "zero": choice(AT_3 if stage == 3 else BELOW_3),
        "micro": choice((None, None, 1)),
        "options": choice(OPTIONS),
    }
