"""What one or some ranks have, brought to all that need it, faster than a collective of the backend would.

``multicast`` sends what one rank has read to the ranks that ask for it, along a tree, so that no rank sends many
copies. When a job grows, every new rank asks for the same header, of the first or the last saved rank. The rank that
reads it sends it to the first that ask, which send it on, and so forth: the steps grow with the logarithm of the ranks.

``gather_from_peers`` copies memory from other processes of this machine, where the kernel lets it, in place of sending
it by sockets. Linux copies between two processes of a user at the speed of a plain copy (``process_vm_readv``; MPI
libraries call it cross-memory attach), in a third of the time that gloo takes for the same bytes. It refuses that where
Yama or seccomp restrict ptrace, and between containers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.distributed.collective import all_gather, all_gather_of_or_raise, all_or_raise
from zeroelastic.distributed.exchange import Arrived, TransferCost, exchange_rows
from zeroelastic.distributed.process_identity import machine

FAN_OUT = 8
"""A rank sends one content to at most so many others."""

_TOKEN_BYTES = 8


class Request(NamedTuple):
    """A file whose header a rank asks for, and the rank that reads it."""

    reader: int
    name: str


class Hop(NamedTuple):
    """One content on its way from a rank to another."""

    src: int
    dst: int
    request: Request


def multicast(
    requests: Sequence[Request], read: Callable[[Sequence[str]], Mapping[str, bytes]]
) -> tuple[Mapping[str, bytes | bytearray], TransferCost]:
    """Get the files that this rank asks for, by name, and what they cost it to send and receive. Collective.

    Each name is asked of one reader, maybe the rank itself. ``read`` is called once, with the names that are asked of
    this rank. Raises on every rank what it raises on any. Memory: what this rank reads or asks for, and the buffers of
    ``all_to_all_stream``.
    """
    rank = dist.get_rank()
    askers: dict[Request, list[int]] = {}
    for asker, asked in enumerate(all_gather(tuple(requests))):
        for request in asked:
            askers.setdefault(request, []).extend([asker] if asker != request.reader else [])
    asked_here = [request.name for request in askers if request.reader == rank]
    own, lengths = all_gather_of_or_raise(
        lambda: read(asked_here), lambda found: {name: len(data) for name, data in found.items()}
    )
    content: dict[str, bytes | bytearray] = {**own}
    for request in requests:
        if request.reader != rank:
            content[request.name] = bytearray(lengths[request.reader][request.name])
    sent = received = 0
    for hops in tree_steps(askers, FAN_OUT):
        cost = all_or_raise(partial(_send, [hop for hop in hops if hop.dst == rank], list(askers), content))
        sent, received = sent + cost.sent, received + cost.received
    return {request.name: content[request.name] for request in requests}, TransferCost(sent, received)


def _send(
    incoming: Sequence[Hop], requests: Sequence[Request], content: Mapping[str, bytes | bytearray]
) -> TransferCost:
    """One step: fill the contents that come to this rank, and send what other ranks ask of it. Collective."""
    number = {request: i for i, request in enumerate(requests)}
    rows = np.array(
        [(number[hop.request], 0, len(content[hop.request.name])) for hop in incoming], dtype=np.int64
    ).reshape(-1, 3)

    def places(asked: Int64Array, parts: Arrived, buffer: ByteArray) -> Iterator[tuple[ByteArray, ByteArray]]:
        """Each part of a content, and its place in the buffer."""
        for i, skip, nbytes, at in zip(asked[:, 0].tolist(), *(c.tolist() for c in parts[1:]), strict=True):
            data = np.frombuffer(content[requests[i].name], dtype=np.uint8)
            yield data[skip : skip + nbytes], buffer[at : at + nbytes]

    def serve(asked: Int64Array, parts: Arrived, buffer: ByteArray) -> None:
        for data, place in places(asked, parts, buffer):
            place[:] = data

    def put(parts: Arrived, buffer: ByteArray) -> None:
        for data, place in places(rows[parts.row], parts, buffer):
            data[:] = place

    return exchange_rows(rows, np.array([hop.src for hop in incoming], dtype=np.int64), serve, put)


def tree_steps(askers: Mapping[Request, Sequence[int]], fan_out: int) -> Iterator[list[Hop]]:
    """The hops of each step, from the ranks that ask for each content: the same on every rank.

    A tree has its reader at place 0 and the rank ``askers[request][place - 1]`` at each other place; the children of
    place ``p`` are at ``fan_out * p + 1`` to ``fan_out * (p + 1)``.
    """
    first, width = 1, fan_out  # places of one depth
    while any(len(ranks) >= first for ranks in askers.values()):
        yield [
            Hop(request.reader if place <= fan_out else ranks[(place - 1) // fan_out - 1], ranks[place - 1], request)
            for request, ranks in askers.items()
            for place in range(first, min(first + width, len(ranks) + 1))
        ]
        first, width = first + width, width * fan_out


class _Range(ctypes.Structure):
    """A range of memory: the kernel's ``struct iovec``."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def gather_from_peers(whole: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Fill ``whole``, flat and in host memory: equal parts, of which each rank of the group has its own. Collective.

    Returns whether that was done, the same on all ranks. If not, the parts of other ranks are undefined, and this
    rank's own is as it was. ``group`` has a backend that reduces host memory.
    """
    rank, size = dist.get_rank(group=group), dist.get_world_size(group=group)
    part_bytes = whole.nbytes // size
    here = int.from_bytes(hashlib.sha256(machine().encode()).digest()[:8], "little", signed=True)
    # Machines that were cloned have one name: there, a process of the same id may be another, which lacks the token.
    token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.int64)
    table = torch.zeros(size, 5, dtype=torch.int64, device="cpu")
    own = [here, os.getpid(), int(token), token.data_ptr(), whole.data_ptr()]
    table[rank] = torch.tensor(own, device="cpu")
    dist.all_reduce(table, group=group)
    found = torch.zeros_like(token)
    done = bool((table[:, 0] == here).all())
    for number in ((rank + step) % size for step in range(1, size)):
        _, process, expected, token_address, address = table[number].tolist()
        begin = number * part_bytes
        done = (
            done
            and _copy(process, token_address, found.data_ptr(), _TOKEN_BYTES)
            and int(found) == expected
            and _copy(process, address + begin, whole.data_ptr() + begin, part_bytes)
        )
    on_all = torch.tensor([int(done)], device="cpu")
    dist.all_reduce(on_all, op=dist.ReduceOp.MIN, group=group)  # and no rank changes its part before others have it
    return bool(on_all)


def _copy(process: int, src: int, dst: int, nbytes: int) -> bool:
    """Copy memory of another process to an address of this one; whether the kernel did all of it."""
    read = ctypes.CDLL(None).process_vm_readv
    read.restype = ctypes.c_ssize_t
    done = 0
    while done < nbytes:
        here, there = (ctypes.byref(_Range(begin + done, nbytes - done)) for begin in (dst, src))
        copied = read(process, here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0))
        if copied <= 0:
            return False
        done += copied
    return True
