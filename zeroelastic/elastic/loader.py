"""torchdata's ``StatefulDataLoader`` with a state that fits any world size and any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from zeroelastic.elastic.batch_plan import BatchPlan
from zeroelastic.elastic.sampler import ElasticBatchSampler, ElasticDistributedSampler
from zeroelastic.errors import ConfigError

_FIXED = ("batch_size", "batch_sampler", "drop_last", "sampler", "shuffle")


class ElasticStatefulDataLoader(StatefulDataLoader):  # type: ignore[misc]
    """Micro batches of a map-style dataset, ``plan.accumulation`` per step; the loader keeps the position itself.

    A global batch counts as consumed when its last micro batch is yielded, whatever the workers have prefetched, so
    there is no ``advance`` to call. In the middle of an accumulation, ``state_dict`` is the position before it, since
    no checkpoint has its gradients. The length is what remains of the epoch, or all of it if ``has_whole_length``, for
    Lightning. The stock ``StatefulDataLoader`` saves the batches yielded by this rank and a snapshot of each worker,
    which fits only that number of ranks and workers (torchdata 0.11). Further arguments go to
    ``StatefulDataLoader``. Raises ConfigError for data that cannot be elastic: a stream, or a dataset with state of its
    own, of which every worker has another copy::

        loader = ElasticStatefulDataLoader(dataset, sampler, plan, num_workers=4)
        start = resume(engine, "ckpt", data=loader)
        for batch in loader: ...
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: ElasticDistributedSampler, plan: BatchPlan, **options: Any
    ) -> None:
        clash = sorted(set(options) & set(_FIXED))
        if clash:
            raise ConfigError(f"{', '.join(clash)}: given by the sampler and the plan; leave it out.")
        if isinstance(dataset, IterableDataset):
            raise ConfigError("a stream has no sampler: put an ElasticIterableDataset under torch's DataLoader.")
        if hasattr(dataset, "state_dict"):
            raise ConfigError(
                f"{type(dataset).__name__} has a state_dict. Each worker of each rank would have a state of its own, "
                "which fits no other number of them; make what it returns a function of the index alone."
            )
        super().__init__(dataset, batch_sampler=ElasticBatchSampler(sampler, plan), **options)
        self._position, self._plan, self.has_whole_length = sampler, plan, False

    def __len__(self) -> int:
        if self.has_whole_length:
            return self._position.num_batches * self._plan.accumulation
        return int(super().__len__())

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__(), 1):
            if number % self._plan.accumulation == 0:
                self._position.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position after the global batches that were yielded; the same on every rank."""
        return self._position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go to a saved position; the next iteration begins there. Raises as the sampler's ``load_state_dict``."""
        self._position.load_state_dict(state_dict, strict=strict)
