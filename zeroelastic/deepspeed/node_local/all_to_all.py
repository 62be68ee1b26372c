"""Sends bytes between ranks over the process group, in rounds of bounded size.

Every rank takes part in every round. While a round is sent, a rank fills its part of the next one and takes what came
in the one before. The rounds follow from how much each rank sends to each other, which all ranks
know before the first round, so that no rank waits for a message that is not sent. An error on a rank between rounds is
raised after the last one; until then the rank sends zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from zeroelastic.core.digest import ByteArray
from zeroelastic.distributed.peers import DefaultPeers, Peers

ROUND_BYTES = 8 << 20
"""At most so much is sent, and at most so much received, by a rank in one round."""

ALIGNMENT = 8
"""Rounds end at its multiples, so no element is cut in a stream whose parts begin at such multiples."""

_LEAST_BYTES = 64 << 10  # of one message, but where it is the last: so a round has at most ROUND_BYTES / this peers


class Piece(NamedTuple):
    """Bytes ``begin`` to ``begin + nbytes`` of the stream to or from a peer are at ``at`` of the buffer."""

    peer: int
    begin: int
    nbytes: int
    at: int


Fill = Callable[[Sequence[Piece], ByteArray], None]
"""Puts bytes of streams into a buffer."""

Take = Callable[[Sequence[Piece], ByteArray], None]
"""Takes bytes of streams from a buffer that is reused afterwards."""


class TransferCost(NamedTuple):
    """Bytes that this rank sent and received."""

    sent: int
    received: int


def all_to_all_stream(sizes: Mapping[int, int], fill: Fill, take: Take, *, peers: Peers | None = None) -> TransferCost:
    """Send ``sizes[peer]`` bytes to each peer. Collective over ``peers``, which are all ranks if none are given.

    ``fill`` is called once in a round with the pieces to send, ``take`` with those that came; streams arrive in order.
    Memory: four buffers of ``ROUND_BYTES``, on a GPU four more where the process group moves its memory. Raises what
    ``fill`` and ``take`` raised first, after the last round.
    """
    peers = peers or DefaultPeers()
    rank, world_size = peers.rank, peers.size
    table = {
        (src, dst): nbytes
        for src, row in enumerate(peers.all_gather({dst: nbytes for dst, nbytes in sizes.items() if nbytes}))
        for dst, nbytes in row.items()
    }
    failure: Exception | None = None

    def attempt(action: Callable[[], None]) -> None:
        nonlocal failure
        if failure is None:
            try:
                action()
            except Exception as error:  # raised when nobody waits for this rank any more
                failure = error

    def take_from(arrived: _Round) -> None:
        if arrived.incoming:
            attempt(partial(take, arrived.incoming, arrived.target.numpy()))

    memory = (_Memory(), _Memory())
    sent = received = 0
    under_way: _Round | None = None
    for number, messages in enumerate(_rounds(table, world_size)):
        outgoing = _pieces(messages, rank, src=True)
        incoming = _pieces(messages, rank, src=False)
        source, target = memory[number % 2].take(_nbytes(outgoing), _nbytes(incoming))
        if outgoing:
            attempt(partial(fill, outgoing, source.numpy()))
        before = under_way
        if before is not None:
            before.wait()
        under_way = _Round(peers, incoming, source, target, outgoing)
        if before is not None:
            take_from(before)
        sent += len(source)
        received += len(target)
    if under_way is not None:
        under_way.wait()
        take_from(under_way)
    if failure is not None:
        raise failure
    return TransferCost(sent, received)


def all_to_all_bytes(outgoing: Mapping[int, bytes], *, peers: Peers | None = None) -> dict[int, bytes]:
    """Send each peer some bytes; what the peers sent here, by rank. Collective. Memory: what is sent and received."""
    arrived: dict[int, bytearray] = {}

    def fill(pieces: Sequence[Piece], buffer: ByteArray) -> None:
        for piece in pieces:
            data = outgoing[piece.peer][piece.begin : piece.begin + piece.nbytes]
            buffer[piece.at : piece.at + piece.nbytes] = np.frombuffer(data, dtype=np.uint8)

    def take(pieces: Sequence[Piece], buffer: ByteArray) -> None:
        for piece in pieces:
            arrived.setdefault(piece.peer, bytearray()).extend(buffer[piece.at : piece.at + piece.nbytes].tobytes())

    all_to_all_stream({peer: len(data) for peer, data in outgoing.items()}, fill, take, peers=peers)
    return {peer: bytes(data) for peer, data in arrived.items()}


def _rounds(table: Mapping[tuple[int, int], int], world_size: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """The messages (source, destination, first byte, bytes) of each round: the same on every rank.

    In a round no rank sends or receives more than ``ROUND_BYTES``. Peers that are far apart in number have rounds of
    their own where there are more of them than a round has room for.
    """
    at_once = ROUND_BYTES // _LEAST_BYTES
    slots: dict[int, list[tuple[int, int]]] = {}
    for src, dst in sorted(table):
        slots.setdefault((dst - src) % world_size // at_once, []).append((src, dst))
    for _, left in sorted(slots.items()):
        done = dict.fromkeys(left, 0)
        while left:
            sources, destinations = ([pair[side] for pair in left] for side in (0, 1))
            degree = int(max(np.bincount(sources).max(), np.bincount(destinations).max()))
            most = ROUND_BYTES // degree // ALIGNMENT * ALIGNMENT
            messages = [(*pair, done[pair], min(most, table[pair] - done[pair])) for pair in left]
            for src, dst, _, nbytes in messages:
                done[src, dst] += nbytes
            yield messages
            left = [pair for pair in left if done[pair] < table[pair]]


def _pieces(messages: Sequence[tuple[int, int, int, int]], rank: int, *, src: bool) -> list[Piece]:
    """This rank's side of a round, by peer, one after the other in the buffer."""
    pieces: list[Piece] = []
    at = 0
    for source, destination, begin, nbytes in messages:
        if rank == (source if src else destination):
            pieces.append(Piece(destination if src else source, begin, nbytes, at))
            at += nbytes
    return pieces


class _Memory:
    """Two buffers that round after round uses again: new pages take as long as two copies of them."""

    def __init__(self) -> None:
        self._source = self._target = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes_sent: int, nbytes_received: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory to send from and that to receive into."""
        if len(self._source) < nbytes_sent:
            self._source = torch.zeros(nbytes_sent, dtype=torch.uint8)
        if len(self._target) < nbytes_received:
            self._target = torch.zeros(nbytes_received, dtype=torch.uint8)
        return self._source[:nbytes_sent], self._target[:nbytes_received]


class _Round:
    """A round that is under way: what comes is in ``target`` after ``wait``. Making one is collective."""

    def __init__(
        self,
        peers: Peers,
        incoming: Sequence[Piece],
        source: torch.Tensor,
        target: torch.Tensor,
        outgoing: Sequence[Piece],
    ) -> None:
        self.incoming, self.target = incoming, target
        device, world_size = peers.device, peers.size
        self._sent = source.to(device)
        self._moved = torch.empty_like(target, device=device) if device.type != "cpu" else target
        splits = _splits(incoming, world_size), _splits(outgoing, world_size)
        self._work = peers.all_to_all(self._moved, self._sent, *splits)

    def wait(self) -> None:
        """Until all has come and is sent. Raises RuntimeError where a peer is gone."""
        self._work.wait()
        if self._moved is not self.target:
            self.target.copy_(self._moved)


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _splits(pieces: Sequence[Piece], world_size: int) -> list[int]:
    splits = [0] * world_size
    for piece in pieces:
        splits[piece.peer] = piece.nbytes
    return splits
