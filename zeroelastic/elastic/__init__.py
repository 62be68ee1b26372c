"""Elastic torchrun jobs: what keeps a ZeRO-3 run the same run while its number of ranks changes."""

from __future__ import annotations

from zeroelastic.elastic.batch import BatchPlan, batch_plan, world_sizes
from zeroelastic.elastic.events import Events, events
from zeroelastic.elastic.preemption import EXIT_PREEMPTED, Every, Preemption, every, preemption
from zeroelastic.elastic.resume import Resumed, resume
from zeroelastic.elastic.sampler import ElasticBatchSampler, ElasticDistributedSampler, ElasticIterableDataset
from zeroelastic.elastic.timeout import set_collective_timeout

__all__ = [
    "EXIT_PREEMPTED",
    "BatchPlan",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticIterableDataset",
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
