"""Samplers whose position does not depend on the world size; each sample comes once per epoch, at any sizes.

One permutation per epoch (seed + epoch, as ``torch.utils.data.DistributedSampler`` draws it) is cut into global
batches; rank r of W takes elements r, r + W, ... of each. So a step trains on the same samples at every world size, in
the order of DistributedSampler, and the position is one number: the samples consumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from zeroelastic.elastic.batch_plan import BatchPlan, current_rank, current_world_size
from zeroelastic.errors import ConfigError, StrictError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STATE = ("epoch", "consumed", "seed", "length", "global_batch", "shuffle", "drop_last")


def is_position(state: object) -> bool:
    """Whether a state is that of an ``ElasticDistributedSampler``, which fits any world size."""
    return isinstance(state, Mapping) and {*_STATE} <= state.keys()


class ElasticDistributedSampler(Sampler[int]):
    """This rank's sample indices, from the current position to the end of the epoch; its state fits any world size.

    An epoch is a whole number of global batches: with ``drop_last`` the samples after the last whole batch are left
    out, otherwise the last batch is filled up from the beginning of the permutation. Call ``advance`` after training on
    a global batch (prefetching loaders draw more indices than that). Where the global batch is a multiple of the world
    size and divides the dataset, the indices are those of ``DistributedSampler(dataset, seed=seed, shuffle=shuffle)``::

        sampler = ElasticDistributedSampler(dataset, global_batch=512, seed=0)
        loader = DataLoader(dataset, batch_size=plan.micro_batch, sampler=sampler)
        for epoch in range(sampler.epoch, epochs):
            for step, batch in enumerate(loader, 1):
                ...
                if step % plan.accumulation == 0:
                    sampler.advance()
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.length, self.global_batch = len(dataset), global_batch
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = self.consumed = 0
        self._is_loaded = False  # and no epoch was begun since
        self._rank, self._world_size = rank, world_size
        self._drawn: tuple[int, torch.Tensor] | None = None
        if global_batch < 1 or self.length < 1:
            raise ConfigError(
                f"a dataset of {self.length} samples and a global batch of {global_batch}: both must be 1 or more."
            )
        if self.num_batches == 0:
            raise ConfigError(
                f"{self.length} samples are less than a global batch of {global_batch}, and drop_last leaves them out. "
                "Make the batch smaller, or turn drop_last off."
            )

    @property
    def num_batches(self) -> int:
        """Global batches in an epoch."""
        return self.length // self.global_batch if self.drop_last else -(-self.length // self.global_batch)

    @property
    def rank(self) -> int:
        """This rank; by default that of the process group."""
        return current_rank() if self._rank is None else self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks; by default that of the process group."""
        return current_world_size() if self._world_size is None else self._world_size

    @property
    def global_step(self) -> int:
        """Global batches trained on since the beginning of the first epoch."""
        return self.epoch * self.num_batches + self.consumed // self.global_batch

    def advance(self, num_batches: int = 1) -> None:
        """Count ``num_batches`` more global batches as trained on; after the last of an epoch the next epoch begins."""
        step = self.global_step + num_batches
        if num_batches < 0:
            raise ValueError(f"advance by {num_batches}: a run does not go back; load_state_dict sets a position.")
        self.epoch, batches = divmod(step, self.num_batches)
        self.consumed = batches * self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. If the run is already in it, the position stays.

        Logs a warning where that leaves a position that was loaded for an earlier epoch: a loop over
        ``range(num_epochs)`` begins with epoch 0, one over ``range(sampler.epoch, num_epochs)`` where the run stopped.
        """
        if epoch < self.epoch and self._is_loaded and self.rank == 0:
            logger.warning(
                "set_epoch(%d) goes back from epoch %d, %d samples, of a run that was resumed: what was trained on "
                "since comes again. Begin the loop over epochs at sampler.epoch.",
                *(epoch, self.epoch, self.consumed),
            )
        if epoch != self.epoch:
            self.epoch, self.consumed, self._is_loaded = epoch, 0, False

    def batch(self, number: int) -> torch.Tensor:
        """The indices of a global batch of the current epoch, for all ranks: int64, shape ``(global_batch,)``."""
        if not 0 <= number < self.num_batches:
            raise IndexError(f"global batch {number} of an epoch of {self.num_batches}")
        return next(self._batches(number))

    def global_batches(self) -> Iterator[torch.Tensor]:
        """The indices of each global batch from here to the end of the epoch, for all ranks."""
        return self._batches(self.consumed // self.global_batch)

    def __iter__(self) -> Iterator[int]:
        rank, world_size = self.rank, self.world_size
        _check_rank(rank, world_size)
        if self.global_batch % world_size:
            raise ConfigError(
                f"a global batch of {self.global_batch} cannot be divided evenly among {world_size} ranks. Use an "
                'ElasticBatchSampler with batch_plan(..., misfit="pad"), or another number of ranks.'
            )
        for batch in self.global_batches():
            yield from batch[rank::world_size].tolist()

    def __len__(self) -> int:
        """This rank's indices from here to the end of the epoch."""
        return (self.num_batches - self.consumed // self.global_batch) * self.global_batch // self.world_size

    def state_dict(self) -> dict[str, Any]:
        """The position and the order that it refers to; the same on every rank, at every world size."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go to a saved position. Raises StrictError when it refers to other data or other batches.

        A changed seed or order would train some samples twice and others not at all, so it is refused as well. Unless
        ``strict``, the global batch may be another: the samples that fill no whole one of these come again.
        """
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise StrictError(
                f"the saved position has no {', '.join(missing)}; it is not of this sampler. Resume with the "
                "sampler that saved it."
            )
        free = ("epoch", "consumed") if strict else ("epoch", "consumed", "global_batch")
        changed = [
            f"{name} was {state[name]!r} and is {getattr(self, name)!r}"
            for name in _STATE
            if name not in free and state[name] != getattr(self, name)
        ]
        if changed:
            raise StrictError(
                f"the saved position is in another order of samples: {'; '.join(changed)}. Build the sampler as it "
                "was, or begin a new epoch without this state."
            )
        batches, rest = divmod(state["consumed"], self.global_batch)
        is_whole = rest == 0 and batches < self.num_batches
        if batches < 0 or (state["global_batch"] == self.global_batch and not is_whole):
            raise StrictError(
                f"the saved position, {state['consumed']} samples, is not the end of a global batch. Resume with "
                "the global batch of the save."
            )
        self.epoch, self.consumed, self._is_loaded = state["epoch"], 0, True
        self.advance(min(batches, self.num_batches))

    def _batches(self, first: int) -> Iterator[torch.Tensor]:
        """Global batches of the epoch that is current when the first one is requested."""
        order = self._order()
        for number in range(first, self.num_batches):
            places = torch.arange(number * self.global_batch, (number + 1) * self.global_batch, device="cpu")
            yield order[places % self.length]

    def _order(self) -> torch.Tensor:
        if self._drawn is None or self._drawn[0] != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            in_order = torch.arange(self.length, device="cpu")
            order = torch.randperm(self.length, generator=generator, device="cpu") if self.shuffle else in_order
            self._drawn = (self.epoch, order)
        return self._drawn[1]


class ElasticBatchSampler(Sampler[list[int]]):
    """The micro batches of this rank, for ``DataLoader(dataset, batch_sampler=...)``: ``plan.accumulation`` per step.

    With a padded plan the last micro batches of a global batch are shorter. A rank that has no sample there repeats
    one; ``plan.loss_weight`` is then 0.
    """

    def __init__(self, sampler: ElasticDistributedSampler, plan: BatchPlan) -> None:
        if plan.global_batch != sampler.global_batch:
            raise ConfigError(
                f"the plan is for a global batch of {plan.global_batch}, the sampler has {sampler.global_batch}. "
                "Make both from one."
            )
        self.sampler, self.plan = sampler, plan

    def __iter__(self) -> Iterator[list[int]]:
        plan, rank = self.plan, self.sampler.rank
        _check_rank(rank, plan.world_size)
        for whole in self.sampler.global_batches():
            mine = whole[rank :: plan.world_size].tolist()
            for step in range(plan.accumulation):
                micro = mine[step * plan.micro_batch : (step + 1) * plan.micro_batch]
                yield micro or [int(whole[0])]

    def __len__(self) -> int:
        """This rank's micro batches from here to the end of the epoch."""
        return (self.sampler.num_batches - self.sampler.consumed // self.plan.global_batch) * self.plan.accumulation


class ElasticIterableDataset(IterableDataset[T]):
    """A stream divided among the ranks by sample number: position and order are the same at every world size.

    ``stream()`` returns the samples of the run from the first one, the same in the same order on every rank. With
    ``can_skip``, ``stream(skip)`` returns them from number ``skip`` on; otherwise skipped samples are read and dropped.
    Every rank and every worker reads the whole stream and keeps its share, so this suits streams that are cheap to read
    beside training. A loader with ``batch_size=plan.micro_batch`` gets whole micro batches in order, with any number of
    workers. Samples after the last whole global batch of a finite stream are left out.
    """

    def __init__(
        self,
        stream: Callable[..., Iterable[T]],
        plan: BatchPlan,
        *,
        can_skip: bool = False,
        rank: int | None = None,
    ) -> None:
        if plan.padding:
            raise ConfigError(
                f"a stream cannot fill a batch with empty places: {plan.text()}. Choose a batch that the ranks divide."
            )
        self.stream, self.plan, self.can_skip, self._rank = stream, plan, can_skip, rank
        self.consumed = 0

    def advance(self, num_batches: int = 1) -> None:
        """Count ``num_batches`` more global batches as trained on."""
        self.consumed += num_batches * self.plan.global_batch

    def state_dict(self) -> dict[str, int]:
        """The position; the same on every rank, at every world size."""
        return {"consumed": self.consumed, "global_batch": self.plan.global_batch}

    def load_state_dict(self, state: Mapping[str, int], *, strict: bool = True) -> None:
        """Go to a saved position. Raises StrictError when its global batch differs from this run's, if ``strict``."""
        is_other = state.get("global_batch") != self.plan.global_batch
        if (is_other and strict) or not isinstance(state.get("consumed"), int):
            raise StrictError(
                f"the saved position is for a global batch of {state.get('global_batch')}; this run has "
                f"{self.plan.global_batch}. Resume with the saved one."
            )
        self.consumed = state["consumed"]

    def __iter__(self) -> Iterator[T]:
        plan, rank = self.plan, current_rank() if self._rank is None else self._rank
        _check_rank(rank, plan.world_size)
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        samples = iter(self.stream(self.consumed) if self.can_skip else self.stream())
        if not self.can_skip:
            for _ in zip(range(self.consumed), samples, strict=False):
                pass
        first_micro = 0
        while True:
            mine: list[T] = []
            for place in range(plan.global_batch):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
                if place % plan.world_size == rank:
                    mine.append(sample)
            for step in range(plan.accumulation):
                if (first_micro + step) % count == number:
                    yield from mine[step * plan.micro_batch : (step + 1) * plan.micro_batch]
            first_micro += plan.accumulation


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} has no samples: the plan is for {world_size} ranks. Make a plan for the ranks of this run."
        )
