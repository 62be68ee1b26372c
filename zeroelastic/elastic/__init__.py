"""Elastic torchrun jobs: what keeps a ZeRO-3 run the same run while its number of ranks changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroelastic.elastic.batch import BatchPlan, batch_plan
from zeroelastic.elastic.events import Events, events
from zeroelastic.elastic.preemption import EXIT_PREEMPTED, Every, Preemption, every, preemption
from zeroelastic.elastic.resume import Resumed, resume
from zeroelastic.elastic.sampler import ElasticBatchSampler, ElasticDistributedSampler, ElasticIterableDataset
from zeroelastic.elastic.timeout import set_collective_timeout
from zeroelastic.global_batch import world_sizes

if TYPE_CHECKING:
    from zeroelastic.elastic.loader import ElasticStatefulDataLoader

__all__ = [
    "EXIT_PREEMPTED",
    "BatchPlan",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticIterableDataset",
    "ElasticStatefulDataLoader",
    "Events",
    "Every",
    "Preemption",
    "Resumed",
    "batch_plan",
    "events",
    "every",
    "preemption",
    "resume",
    "set_collective_timeout",
    "world_sizes",
]


def __getattr__(name: str) -> Any:
    """What needs torchdata is imported when it is asked for."""
    if name != "ElasticStatefulDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from zeroelastic.elastic.loader import ElasticStatefulDataLoader
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchdata":
            raise
        raise ImportError("ElasticStatefulDataLoader needs torchdata: pip install 'zeroelastic[data]'.") from error
    return ElasticStatefulDataLoader
