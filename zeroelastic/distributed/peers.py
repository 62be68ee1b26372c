"""The processes that exchange bytes: all ranks of the process group, or members of two worlds while a job changes size.

Between two worlds there is no process group that has both the ranks that leave and those that come. ``JoinedPeers`` is
one for that moment alone, beside torch's default group, which DeepSpeed takes to be all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from zeroelastic.distributed.collective import all_gather, collective_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


class UnderWay(Protocol):
    """An exchange that was begun: complete when ``wait`` returns, which raises RuntimeError where a peer is gone."""

    def wait(self) -> Any: ...


class Peers:
    """Some processes, each with a rank among them: all ranks of torch's default process group. Methods are collective.

    ``rank`` is this process, of ``size``; tensors of ``all_to_all`` lie on ``device``.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), collective_device()

    def all_gather(self, value: T) -> list[T]:
        """The value of every process, by rank. Pickled."""
        return all_gather(value)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_numel: Sequence[int], sent_numel: Sequence[int]
    ) -> UnderWay:
        """Send ``sent_numel[peer]`` elements of ``sent`` to each peer, and fill ``received`` with what comes."""
        splits = list(received_numel), list(sent_numel)
        work: UnderWay = dist.all_to_all_single(received, sent, *splits, async_op=True)
        return work


class JoinedPeers(Peers):
    """A gloo group of its own over a store; tensors lie in host memory. Its end closes its connections."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout: timedelta) -> None:
        """Meet the others. Collective. Raises RuntimeError where one does not come within the timeout."""
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def all_gather(self, value: T) -> list[T]:
        data = pickle.dumps(value)
        longest = torch.tensor([len(data)], dtype=torch.int64)
        self._group.allreduce([longest], op=dist.ReduceOp.MAX).wait()
        own = torch.frombuffer(bytearray(data.ljust(int(longest), b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([parts], [own]).wait()
        return [pickle.loads(part.numpy().data) for part in parts]  # which ends where the pickle does

    def broadcast(self, value: T | None, src: int) -> T:
        """The value of one process. Pickled. Collective."""
        data = pickle.dumps(value) if self.rank == src else b""
        nbytes = torch.tensor([len(data)], dtype=torch.int64)
        self._group.broadcast(nbytes, src).wait()
        sent = torch.empty(int(nbytes), dtype=torch.uint8)
        if self.rank == src:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._group.broadcast(sent, src).wait()
        found: T = pickle.loads(sent.numpy().data)
        return found

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_numel: Sequence[int], sent_numel: Sequence[int]
    ) -> UnderWay:
        work: UnderWay = self._group.alltoall_base(received, sent, list(received_numel), list(sent_numel))
        return work
