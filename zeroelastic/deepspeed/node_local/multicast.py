"""Sends what one rank has read to the ranks that ask for it, along a tree, so that no rank sends many copies.

When a job grows, every new rank asks for the same header, of the first or the last saved rank. The rank that reads it
sends it to the first that ask, which send it on, and so forth: the steps grow with the logarithm of the ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.deepspeed.node_local.all_to_all import all_to_all_bytes
from zeroelastic.distributed.collective import all_gather, all_or_raise

FAN_OUT = 8
"""A rank sends one content to at most so many others."""


class Request(NamedTuple):
    """A file whose header a rank asks for, and the rank that reads it."""

    reader: int
    name: str


class Hop(NamedTuple):
    """One content on its way from a rank to another."""

    src: int
    dst: int
    request: Request


class Arrived(NamedTuple):
    """What a rank asked for, by name, and the bytes that it sent and received."""

    content: Mapping[str, bytes]
    sent: int
    received: int


def multicast(requests: Sequence[Request], read: Callable[[Sequence[str]], Mapping[str, bytes]]) -> Arrived:
    """What this rank asks for; each name is asked of one reader, which may be the rank itself. Collective.

    ``read`` is called once, with the names that are asked of this rank. Raises on every rank what it raises on any.
    Memory: twice what this rank reads or asks for.
    """
    rank = dist.get_rank()
    askers: dict[Request, list[int]] = {}
    for asker, asked in enumerate(all_gather(tuple(requests))):
        for request in asked:
            askers.setdefault(request, []).extend([asker] if asker != request.reader else [])
    content = all_or_raise(lambda: dict(read([request.name for request in askers if request.reader == rank])))
    num_sent = num_received = 0
    for hops in tree_steps(askers, FAN_OUT):
        outgoing: dict[int, dict[str, bytes]] = {}
        for hop in hops:
            if hop.src == rank:
                outgoing.setdefault(hop.dst, {})[hop.request.name] = content[hop.request.name]
        messages = {dst: pickle.dumps(sent) for dst, sent in outgoing.items()}
        arrived = all_to_all_bytes(messages)
        for data in arrived.values():
            content.update(pickle.loads(data))
        num_sent += sum(map(len, messages.values()))
        num_received += sum(map(len, arrived.values()))
    return Arrived({request.name: content[request.name] for request in requests}, num_sent, num_received)


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
