"""Elastic torchrun jobs: a ZeRO-3 run that continues unchanged while its number of ranks changes.

    batch_plan  the micro batch and the accumulation that keep the global batch
    sampler     samplers that fit every world size; ``loader`` does the same for torchdata
    resume      loads the newest checkpoint that loads
    preemption  saves and stops all ranks together
    leaving     the signals that ask a process to leave, and the timeout for one that was lost
    memory/     checkpoints in the memory of the nodes
    position    the position in the data and the random generators, in the client state

Imports ``deepspeed`` (inside functions) and below. Read ``resume``, then ``preemption``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zeroelastic.core.world_size import world_sizes
from zeroelastic.errors import require_torch, torch_is_there

if not torch_is_there():
    require_torch("zeroelastic.elastic")

from zeroelastic.elastic.batch_plan import BatchPlan, batch_plan
from zeroelastic.elastic.leaving import EXIT_PREEMPTED, set_collective_timeout
from zeroelastic.elastic.preemption import Every, Preemption, every, preemption
from zeroelastic.elastic.resume import ResumedRun, resume
from zeroelastic.elastic.sampler import ElasticBatchSampler, ElasticDistributedSampler, ElasticIterableDataset

if TYPE_CHECKING:
    from zeroelastic.elastic.loader import ElasticStatefulDataLoader

__all__ = [
    "EXIT_PREEMPTED",
    "BatchPlan",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticIterableDataset",
    "Every",
    "Preemption",
    "ResumedRun",
    "batch_plan",
    "every",
    "preemption",
    "resume",
    "set_collective_timeout",
    "world_sizes",
]
if find_spec("torchdata") is not None:
    __all__ += ["ElasticStatefulDataLoader"]


def __getattr__(name: str) -> Any:
    """Import the class that needs torchdata on first use."""
    if name != "ElasticStatefulDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from zeroelastic.elastic.loader import ElasticStatefulDataLoader
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchdata":
            raise
        raise ImportError("ElasticStatefulDataLoader needs torchdata: pip install 'zeroelastic[data]'.") from error
    return ElasticStatefulDataLoader
