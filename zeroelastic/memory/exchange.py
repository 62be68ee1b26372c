"""Sends ranges of memory between ranks in rounds, by messages from rank to rank and no collective.

Every rank knows the transfers that it takes part in, so that no rank waits for a message that is not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUND_BYTES = 8 << 20
"""The longest message; of each transfer one is on its way at a time."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """``nbytes`` from rank ``src`` to rank ``dst``."""

    src: int
    dst: int
    nbytes: int


Send = Callable[[int, int, int], torch.Tensor]
"""``send(transfer, offset, nbytes)`` is what to send: uint8, on the host, unchanged until the next round."""

Receive = Callable[[int, int, int], torch.Tensor]
"""``receive(transfer, offset, nbytes)`` is the memory that a message is received into."""

Received = Callable[[int, int, torch.Tensor], None]
"""``received(transfer, offset, data)`` is called when a message has come."""


def exchange(
    transfers: Sequence[Transfer],
    group: dist.ProcessGroup,
    *,
    send: Send,
    receive: Receive,
    received: Received | None = None,
) -> int:
    """Run the transfers of this rank; returns the bytes that it sent.

    Those of other ranks may be listed too. Two ranks list what is between them in the same order.
    ``group`` has all ranks and a backend that sends host memory. Raises RuntimeError where a peer is gone.
    """
    rank = dist.get_rank()
    tags = Counter[tuple[int, int]]()
    own: list[tuple[int, int, Transfer]] = []
    for number, transfer in enumerate(transfers):
        pair = transfer.src, transfer.dst
        if rank in pair:
            own.append((number, tags[pair], transfer))
            tags[pair] += 1
    sent = at = 0
    while any(transfer.nbytes > at for _, _, transfer in own):
        works, arrived = [], []
        for number, tag, transfer in own:
            nbytes = min(ROUND_BYTES, transfer.nbytes - at)
            if nbytes <= 0:
                continue
            if transfer.src == rank:
                works.append(dist.isend(send(number, at, nbytes), transfer.dst, group=group, tag=tag))
                sent += nbytes
            else:
                data = receive(number, at, nbytes)
                works.append(dist.irecv(data, transfer.src, group=group, tag=tag))
                arrived.append((number, data))
        for work in works:
            assert work is not None
            work.wait()
        for number, data in arrived:
            if received is not None:
                received(number, at, data)
        at += ROUND_BYTES
    return sent
