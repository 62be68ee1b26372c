"""Elastic torchrun jobs: what keeps a ZeRO-3 run the same run while its number of ranks changes."""

from __future__ import annotations

from zeroelastic.elastic.batch import BatchPlan, batch_plan, world_sizes
from zeroelastic.elastic.sampler import ElasticBatchSampler, ElasticDistributedSampler, ElasticIterableDataset

__all__ = [
    "BatchPlan",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticIterableDataset",
    "batch_plan",
    "world_sizes",
]
