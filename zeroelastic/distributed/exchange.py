"""The exchange of bytes between ranks, in rounds of bounded size.

``all_to_all_stream`` sends a stream to each peer; ``exchange_rows`` asks peers for rows of bytes and serves the rows
that others ask of this rank; ``run_transfers`` sends ranges of memory that both ends know.

Every rank takes part in every round of a stream. While a round is sent, a rank fills its part of the next one and takes
what came in the one before. The rounds follow from how much each rank sends to each other, which all ranks know before
the first round, so that no rank waits for a message that is not sent. An error on a rank between rounds is raised after
the last one; until then the rank sends zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import Int64Array
from zeroelastic.distributed.collective import all_gather, collective_device

ROUND_BYTES = 8 << 20
"""At most so much is sent, and at most so much received, by a rank in one round."""

ALIGNMENT = 8
"""Rounds end at its multiples, so no element is cut in a stream whose parts begin at such multiples."""

_LEAST_BYTES = 64 << 10
"""Of one message, but the last of its stream: a rank has at most ``ROUND_BYTES / _LEAST_BYTES`` peers in one round."""


class Piece(NamedTuple):
    """Bytes ``begin`` to ``begin + nbytes`` of the stream to or from a peer are at ``at`` of the buffer."""

    peer: int
    begin: int
    nbytes: int
    at: int


RoundBuffer: TypeAlias = "ByteArray | torch.Tensor"
"""Bytes of a round: an array in host memory, a flat uint8 tensor on a GPU."""

Fill = Callable[[Sequence[Piece], Any], None]
"""Puts bytes of streams into a ``RoundBuffer``."""

Take = Callable[[Sequence[Piece], Any], None]
"""Takes bytes of streams from a ``RoundBuffer`` that is reused afterwards."""

HOST = torch.device("cpu")


class TransferCost(NamedTuple):
    """Bytes that this rank sent and received."""

    sent: int
    received: int


def all_to_all_stream(
    sizes: Mapping[int, int],
    fill: Fill,
    take: Take,
    *,
    filled_on: torch.device = HOST,
    taken_on: torch.device = HOST,
) -> TransferCost:
    """Send ``sizes[peer]`` bytes to each peer. Collective.

    ``fill`` is called once in a round with the pieces to send, ``take`` with those that came; streams arrive in order.
    Their buffers are on ``filled_on`` and ``taken_on``, which each rank chooses for itself. Memory: four buffers of
    ``ROUND_BYTES``, and as many again of a side that is on another device than the process group's. Raises what
    ``fill`` and ``take`` raised first, after the last round.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    table = {
        (src, dst): nbytes
        for src, row in enumerate(all_gather({dst: nbytes for dst, nbytes in sizes.items() if nbytes}))
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
            attempt(partial(take, arrived.incoming, _buffer(arrived.target)))

    memory = [_Memory(filled_on, taken_on) for _ in range(2)]
    sent = received = 0
    under_way: _Round | None = None
    for number, messages in enumerate(_rounds(table, world_size, ROUND_BYTES)):
        outgoing = _pieces(messages, rank, src=True)
        incoming = _pieces(messages, rank, src=False)
        source, target = memory[number % 2].take(_nbytes(outgoing), _nbytes(incoming))
        if outgoing:
            attempt(partial(fill, outgoing, _buffer(source)))
        before = under_way
        if before is not None:
            before.wait()
        under_way = _Round(incoming, source, target, outgoing)
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


def device_of(tensors: Iterable[torch.Tensor | None]) -> torch.device:
    """The one device that all of them are on, on which a round is best filled or taken; the host for several."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    return devices.pop() if len(devices) == 1 else HOST


def all_to_all_bytes(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
    """Send each peer some bytes; returns what peers sent here, by rank. Collective. Memory: all of these bytes."""
    arrived: dict[int, bytearray] = {}

    def fill(pieces: Sequence[Piece], buffer: ByteArray) -> None:
        for piece in pieces:
            data = outgoing[piece.peer][piece.begin : piece.begin + piece.nbytes]
            buffer[piece.at : piece.at + piece.nbytes] = np.frombuffer(data, dtype=np.uint8)

    def take(pieces: Sequence[Piece], buffer: ByteArray) -> None:
        for piece in pieces:
            arrived.setdefault(piece.peer, bytearray()).extend(buffer[piece.at : piece.at + piece.nbytes].tobytes())

    all_to_all_stream({peer: len(data) for peer, data in outgoing.items()}, fill, take)
    return {peer: bytes(data) for peer, data in arrived.items()}


class Arrived(NamedTuple):
    """Bytes of rows in a buffer: ``nbytes[i]`` of row ``row[i]`` from its byte ``skip[i]`` on, at ``at[i]``."""

    row: Int64Array
    skip: Int64Array
    nbytes: Int64Array
    at: Int64Array

    @staticmethod
    def joined(parts: Sequence[Arrived]) -> Arrived:
        """All of several."""
        return Arrived(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class RowStream:
    """Rows ``[file, offset, nbytes]`` one after the other, each from a multiple of ``ALIGNMENT`` on."""

    rows: Int64Array
    start: Int64Array

    @staticmethod
    def of(rows: Int64Array) -> RowStream:
        padded = -(-rows[:, 2] // ALIGNMENT) * ALIGNMENT
        return RowStream(rows, np.concatenate(([0], np.cumsum(padded))))

    @property
    def nbytes(self) -> int:
        return int(self.start[-1])

    def cut(self, piece: Piece) -> Arrived:
        """The parts of rows that a piece of the stream consists of."""
        end = piece.begin + piece.nbytes
        first = int(np.searchsorted(self.start, piece.begin, side="right")) - 1
        row = np.arange(first, int(np.searchsorted(self.start[:-1], end, side="left")), dtype=np.int64)
        low = np.maximum(self.start[row], piece.begin)
        high = np.minimum(self.start[row] + self.rows[row, 2], end)
        some = high > low
        row, low, high = row[some], low[some], high[some]
        return Arrived(row, low - self.start[row], high - low, low - piece.begin + piece.at)


def exchange_rows(
    rows: Int64Array,
    owner: Int64Array,
    serve: Callable[[Int64Array, Arrived, Any], None],
    put: Callable[[Arrived, Any], None],
    *,
    taken_on: torch.device = HOST,
) -> TransferCost:
    """Have peer ``owner[i]`` send row i of ``rows``, and send the rows that others ask of this rank. Collective.

    Each row is ``[source, offset, nbytes]``, shape ``(num_rows, 3)``; the rows asked of one peer are one stream.
    ``serve`` fills a buffer with parts of the rows that its first argument has, ``put`` takes parts of the rows of this
    rank from a buffer, round by round. Memory and errors as of ``all_to_all_stream``.
    """
    mine = {peer: np.flatnonzero(owner == peer) for peer in np.unique(owner).tolist()}
    wanted = {peer: RowStream.of(rows[index]) for peer, index in mine.items()}
    asked = all_to_all_bytes({peer: rows[index].tobytes() for peer, index in mine.items()})
    served = {peer: RowStream.of(np.frombuffer(data, dtype=np.int64).reshape(-1, 3)) for peer, data in asked.items()}

    def fill(pieces: Sequence[Piece], buffer: RoundBuffer) -> None:
        cuts = [(served[piece.peer].rows, served[piece.peer].cut(piece)) for piece in pieces]
        parts = Arrived.joined([cut for _, cut in cuts])
        serve(np.concatenate([rows[cut.row] for rows, cut in cuts]), parts, buffer)

    def take(pieces: Sequence[Piece], buffer: RoundBuffer) -> None:
        cuts = [(mine[piece.peer], wanted[piece.peer].cut(piece)) for piece in pieces]
        put(Arrived.joined([cut._replace(row=index[cut.row]) for index, cut in cuts]), buffer)

    sizes = {peer: stream.nbytes for peer, stream in served.items()}
    return all_to_all_stream(sizes, fill, take, taken_on=taken_on)


class _Messages(NamedTuple):
    """The messages of one round: each column has one entry for each message, shape ``(num_messages,)``."""

    src: Int64Array
    dst: Int64Array
    begin: Int64Array
    nbytes: Int64Array


def _rounds(table: Mapping[tuple[int, int], int], world_size: int, round_bytes: int) -> Iterator[_Messages]:
    """The messages of each round, from the bytes of each (source, destination): the same on every rank.

    In a round no rank sends or receives more than ``round_bytes``. A rank with more peers than a round has room for
    begins with the nearest, which is the same from both sides, so a round has a message as long as one is left.
    A pair's messages are as long as the busier of the two has room for, whatever others have.
    """
    src, dst = np.array(list(table), dtype=np.int64).reshape(-1, 2).T
    left = np.array(list(table.values()), dtype=np.int64)
    nearest = np.lexsort((src, (dst - src) % world_size))
    src, dst, left = src[nearest], dst[nearest], left[nearest]
    begin = np.zeros_like(left)
    at_once = round_bytes // _LEAST_BYTES
    while len(left):
        chosen = np.arange(len(left))
        if max(np.bincount(src).max(), np.bincount(dst).max()) > at_once:
            chosen = np.flatnonzero((_place_among(src) < at_once) & (_place_among(dst) < at_once))
        source, destination = src[chosen], dst[chosen]
        peers = np.maximum(np.bincount(source)[source], np.bincount(destination)[destination])
        nbytes = np.minimum(left[chosen], round_bytes // peers // ALIGNMENT * ALIGNMENT)
        yield _Messages(source, destination, begin[chosen], nbytes)
        begin[chosen] += nbytes
        left[chosen] -= nbytes
        unfinished = left > 0
        src, dst, begin, left = (column[unfinished] for column in (src, dst, begin, left))


def _place_among(values: Int64Array) -> Int64Array:
    """For each value, how many equal ones are before it."""
    order = np.argsort(values, kind="stable")
    _, first, count = np.unique(values[order], return_index=True, return_counts=True)
    place = np.empty_like(values)
    place[order] = np.arange(len(values)) - np.repeat(first, count)
    return place


def _pieces(messages: _Messages, rank: int, *, src: bool) -> list[Piece]:
    """This rank's side of a round, one after the other in the buffer by peer, as ``all_to_all_single`` has them."""
    own, peers = (messages.src, messages.dst) if src else (messages.dst, messages.src)
    mine = np.flatnonzero(own == rank)
    mine = mine[np.argsort(peers[mine])]
    nbytes = messages.nbytes[mine]
    columns = peers[mine], messages.begin[mine], nbytes, np.cumsum(nbytes) - nbytes
    return list(map(Piece._make, np.stack(columns, axis=1).tolist()))


class _Memory:
    """Two buffers that round after round uses again: new pages take as long as two copies of them."""

    def __init__(self, filled_on: torch.device, taken_on: torch.device) -> None:
        self._source = torch.empty(0, dtype=torch.uint8, device=filled_on)
        self._target = torch.empty(0, dtype=torch.uint8, device=taken_on)

    def take(self, nbytes_sent: int, nbytes_received: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory to send from and that to receive into."""
        if len(self._source) < nbytes_sent:
            self._source = torch.zeros(nbytes_sent, dtype=torch.uint8, device=self._source.device)
        if len(self._target) < nbytes_received:
            self._target = torch.zeros(nbytes_received, dtype=torch.uint8, device=self._target.device)
        return self._source[:nbytes_sent], self._target[:nbytes_received]


class _Round:
    """A round that is under way: what comes is in ``target`` after ``wait``. Making one is collective."""

    def __init__(
        self,
        incoming: Sequence[Piece],
        source: torch.Tensor,
        target: torch.Tensor,
        outgoing: Sequence[Piece],
    ) -> None:
        self.incoming, self.target = incoming, target
        device, world_size = collective_device(), dist.get_world_size()
        self._sent = source if source.device.type == device.type else source.to(device)
        self._moved = target if target.device.type == device.type else torch.empty_like(target, device=device)
        splits = _splits(incoming, world_size), _splits(outgoing, world_size)
        self._work = dist.all_to_all_single(self._moved, self._sent, *splits, async_op=True)

    def wait(self) -> None:
        """Until all has come and is sent. Raises RuntimeError where a peer is gone."""
        self._work.wait()
        if self._moved is not self.target:
            self.target.copy_(self._moved)


def _buffer(memory: torch.Tensor) -> RoundBuffer:
    return memory.numpy() if memory.device.type == "cpu" else memory


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _splits(pieces: Sequence[Piece], world_size: int) -> list[int]:
    splits = [0] * world_size
    for piece in pieces:
        splits[piece.peer] = piece.nbytes
    return splits


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes from rank ``src`` to rank ``dst``: ``data`` is this rank's memory for them, flat uint8 on the host."""

    src: int
    dst: int
    data: torch.Tensor


def run_transfers(transfers: Sequence[Transfer], group: dist.ProcessGroup) -> None:
    """Run the transfers of this rank, by messages of ``ROUND_BYTES`` and no collective.

    Two ranks list the transfers between them in the same order. Of each transfer one message is on its way at a time.
    ``group`` has all ranks and a backend that sends host memory. Raises RuntimeError where a peer is gone.
    """
    rank = dist.get_rank()
    tags = Counter[tuple[int, int]]()
    tagged: list[tuple[int, Transfer]] = []
    for transfer in transfers:
        pair = transfer.src, transfer.dst
        tagged.append((tags[pair], transfer))
        tags[pair] += 1
    at = 0
    while pending := [(tag, transfer) for tag, transfer in tagged if len(transfer.data) > at]:
        works = []
        for tag, transfer in pending:
            data = transfer.data[at : at + ROUND_BYTES]
            if transfer.src == rank:
                works.append(dist.isend(data, transfer.dst, group=group, tag=tag))
            else:
                works.append(dist.irecv(data, transfer.src, group=group, tag=tag))
        for work in works:
            assert work is not None
            work.wait()
        at += ROUND_BYTES
