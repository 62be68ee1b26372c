"""What travels between nodes for one generation: copies of files, or the chunks of stripes whose XOR is kept.

They follow from the files of all ranks and the placement alone, so that two ranks agree on what is between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroelastic.distributed.exchange import ROUND_BYTES, Transfer, run_transfers
from zeroelastic.memory.generation import parity_name
from zeroelastic.memory.parity import Stripes, largest, pieces
from zeroelastic.memory.placement import Placement

Take = Callable[[str, int], torch.Tensor]
"""Gives the memory of a file by name and size."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One file of rank ``src``, to be kept by rank ``dst``."""

    src: int
    dst: int
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The chunk of ``stripe`` of member ``src`` of a set; both by rank."""

    src: int
    dst: int
    begin: int
    nbytes: int


def protect(
    files: Sequence[Mapping[str, int]],
    placement: Placement,
    own: Mapping[str, torch.Tensor],
    take: Take,
    group: dist.ProcessGroup,
) -> tuple[dict[str, torch.Tensor], Callable[[], int]]:
    """What this rank is going to keep of others, by file name, in memory that ``take`` gives; and what fills it.

    ``files`` are those of each rank that others keep, with their sizes; ``own`` are those of this rank. The second
    value runs the transfers of this rank, as all ranks do, and returns the bytes that it sent. Raises OSError where
    memory is lacking.
    """
    rank = dist.get_rank()
    pairs = [*((rank, dst) for dst in placement.keepers(rank)), *((src, rank) for src in placement.kept(rank))]
    copies = [_Copy(src, dst, name, nbytes) for src, dst in pairs for name, nbytes in files[src].items()]
    kept = {copy.name: take(copy.name, copy.nbytes) for copy in copies if copy.dst == rank}
    chunks, parity, members = list[_Chunk](), None, placement.set_of(rank)
    if members:
        stripes = stripes_of(files, members)
        parity = kept[parity_name(rank)] = take(parity_name(rank), stripes.chunk)
        for stripe, dst in enumerate(members):
            sources = [m for m in stripes.others(stripe) if rank in (members[m], dst)]
            chunks += [_Chunk(members[m], dst, stripes.begin(m, stripe), stripes.chunk) for m in sources]

    def run() -> int:
        if parity is not None:
            parity.zero_()
        transfers = [Transfer(one.src, one.dst, one.nbytes) for one in copies]
        transfers += [Transfer(one.src, one.dst, one.nbytes) for one in chunks]
        buffers: dict[int, torch.Tensor] = {}

        def buffer(number: int, nbytes: int) -> torch.Tensor:
            found = buffers.setdefault(number, torch.empty(ROUND_BYTES, dtype=torch.uint8))
            return found[:nbytes]

        def send(number: int, offset: int, nbytes: int) -> torch.Tensor:
            if number < len(copies):
                return own[copies[number].name][offset : offset + nbytes]
            return data_range(own, files[rank], chunks[number - len(copies)].begin + offset, buffer(number, nbytes))

        def receive(number: int, offset: int, nbytes: int) -> torch.Tensor:
            if number < len(copies):
                return kept[copies[number].name][offset : offset + nbytes]
            return buffer(number, nbytes)

        def received(number: int, offset: int, data: torch.Tensor) -> None:
            if number >= len(copies):
                assert parity is not None
                parity[offset : offset + len(data)].bitwise_xor_(data)

        return run_transfers(transfers, group, send=send, receive=receive, received=received)

    return kept, run


def stripes_of(files: Sequence[Mapping[str, int]], members: tuple[int, ...]) -> Stripes:
    """The stripes of a set of ranks; ``files`` are those of each rank, with their sizes."""
    return Stripes(len(members), largest([files[member] for member in members]))


def data_range(
    files: Mapping[str, torch.Tensor], sizes: Mapping[str, int], begin: int, out: torch.Tensor
) -> torch.Tensor:
    """Copy a range of a rank's data into all of ``out``, zeros where the data ends before; returns ``out``."""
    out.zero_()
    for name, offset, nbytes, place in pieces(sizes, begin, len(out)):
        out[place : place + nbytes] = files[name][offset : offset + nbytes]
    return out
