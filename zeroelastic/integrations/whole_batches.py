"""An epoch of whole global batches, so that its end does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

from torch.utils.data import Sampler

from zeroelastic.errors import UsageError


class WholeBatches(Sampler[int]):
    """The indices of another sampler, cut or filled up to a multiple of the global batch.

    With ``drop_last`` an incomplete last batch is dropped; without, it is filled up with the epoch's first samples. So
    at every world size, step k of an epoch has the samples ``[k * global_batch, (k + 1) * global_batch)`` of the order.
    """

    def __init__(self, order: Sampler[int], global_batch: int, *, drop_last: bool) -> None:
        samples = len(order)  # type: ignore[arg-type]
        if samples == 0 or (drop_last and samples < global_batch):
            raise UsageError(
                f"the data has {samples} samples, fewer than one global batch of {global_batch}, and an incomplete "
                "batch is dropped: there is nothing to train on. Make the batch smaller, or turn drop_last off."
            )
        self.order, self.global_batch, self.drop_last = order, global_batch, drop_last
        self.num_batches = samples // global_batch if drop_last else -(-samples // global_batch)

    def __len__(self) -> int:
        return self.num_batches * self.global_batch

    def __iter__(self) -> Iterator[int]:
        first: list[int] = []
        given = 0
        for index in islice(self.order, len(self)):
            if len(first) < self.global_batch:
                first.append(index)
            given += 1
            yield index
        yield from islice(cycle(first), len(self) - given)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch's number to the order, if it has ``set_epoch``."""
        set_epoch = getattr(self.order, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
