"""The files of a lost rank, made again from parity and the files of the other ranks of its set.

The first rank that sees files of the set makes them, in its node's shared memory, beside what is there. The others send
their chunks in the rounds of ``run_transfers``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.exchange import ROUND_BYTES, Transfer, run_transfers
from zeroelastic.errors import SaveError
from zeroelastic.memory.generation import MemoryNote, lacking, parity_name
from zeroelastic.memory.memory_file import require_memory
from zeroelastic.memory.parity import Stripes, pieces, total
from zeroelastic.memory.protect import stripes_of

_PART = ".part"


def rebuildable(note: MemoryNote, seen: Mapping[str, int]) -> bool:
    """Whether every rank whose files are on no node can be made again."""
    for rank in lacking(note, seen):
        members = next((members for members in note.sets if rank in members), ())
        if not members:
            return False
        others = [member for member in members if member != rank]
        chunk = stripes_of(note.files, members).chunk
        for member in others:
            if not note.files[member].items() <= seen.items() or seen.get(parity_name(member)) != chunk:
                return False
    return True


@dataclass(frozen=True, slots=True)
class _Source:
    """A range of a rank's data, or of its parity, that goes into the lost rank's data at ``place``."""

    holder: int
    member: int | None
    """The saved rank whose data it is; None: the parity."""
    parity: str
    begin: int
    nbytes: int
    place: int


def rebuild(
    note: MemoryNote, tag_dir: Path, on_nodes: Mapping[int, Mapping[str, int]], group: dist.ProcessGroup
) -> int:
    """Make the files of all lost ranks again; ``on_nodes`` is what each node has in its ``tag_dir``. Collective.

    The nodes are by their first rank.

    Returns the bytes that this rank sent. Raises SaveError on every rank where memory is lacking.
    """
    seen = {name: size for files in on_nodes.values() for name, size in files.items()}
    sent = 0
    for lost in lacking(note, seen):
        sent += _rebuild(lost, note, tag_dir, on_nodes, group)
    return sent


def _rebuild(
    lost: int, note: MemoryNote, tag_dir: Path, on_nodes: Mapping[int, Mapping[str, int]], group: dist.ProcessGroup
) -> int:
    members = next(members for members in note.sets if lost in members)
    stripes, own = stripes_of(note.files, members), members.index(lost)
    sources = [
        source
        for stripe in range(stripes.size)
        if stripe != own
        for source in _sources_of(stripe, own, note, members, stripes, on_nodes)
    ]
    maker, rank = sources[0].holder, dist.get_rank()
    sizes = note.files[lost]
    made: torch.Tensor | None = None

    def prepare() -> torch.Tensor | None:
        if rank != maker:
            return None
        with _as_save_error(tag_dir, lost):
            require_memory(tag_dir, 2 * total(sizes))
        return torch.zeros(stripes.chunk * (stripes.size - 1), dtype=torch.uint8)

    made = all_or_raise(prepare)
    transfers = [Transfer(source.holder, maker, source.nbytes) for source in sources if source.holder != maker]
    remote = [source for source in sources if source.holder != maker]
    files = _Files(tag_dir, note)
    buffers: dict[int, torch.Tensor] = {}

    def buffer(number: int, nbytes: int) -> torch.Tensor:
        return buffers.setdefault(number, torch.empty(ROUND_BYTES, dtype=torch.uint8))[:nbytes]

    def add(source: _Source, offset: int, data: torch.Tensor) -> None:
        assert made is not None
        made[source.place + offset : source.place + offset + len(data)].bitwise_xor_(data)

    sent = run_transfers(
        transfers,
        group,
        send=lambda number, offset, nbytes: files.read(remote[number], offset, buffer(number, nbytes)),
        receive=lambda number, offset, nbytes: buffer(number, nbytes),
        received=lambda number, offset, data: add(remote[number], offset, data),
    )
    if rank == maker:
        for number, source in enumerate(sources):
            if source.holder == maker:
                for offset in range(0, source.nbytes, ROUND_BYTES):
                    nbytes = min(ROUND_BYTES, source.nbytes - offset)
                    add(source, offset, files.read(source, offset, buffer(len(sources) + number, nbytes)))

    def write() -> None:
        if rank != maker:
            return
        assert made is not None
        begin = 0
        for name, size in sizes.items():
            with _as_save_error(tag_dir, lost):
                (tag_dir / f"{name}{_PART}").write_bytes(made[begin : begin + size].numpy().data)
                os.chmod(tag_dir / f"{name}{_PART}", 0o600)
                os.rename(tag_dir / f"{name}{_PART}", tag_dir / name)
            begin += size

    all_or_raise(write)
    return sent


@contextmanager
def _as_save_error(tag_dir: Path, lost: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"{tag_dir}: rank {lost}'s files cannot be made again: {error.strerror}") from error


def _sources_of(
    stripe: int,
    lost: int,
    note: MemoryNote,
    members: tuple[int, ...],
    stripes: Stripes,
    on_nodes: Mapping[int, Mapping[str, int]],
) -> list[_Source]:
    """What the lost member's chunk of a stripe is the XOR of."""
    place, keeper = stripes.begin(lost, stripe), members[stripe]
    parity = parity_name(keeper)
    found = [_Source(_holder(on_nodes, {parity: stripes.chunk}), None, parity, 0, stripes.chunk, place)]
    for other in stripes.others(stripe):
        if other != lost:
            files = note.files[members[other]]
            begin = stripes.begin(other, stripe)
            found.append(_Source(_holder(on_nodes, files), members[other], "", begin, stripes.chunk, place))
    return found


def _holder(on_nodes: Mapping[int, Mapping[str, int]], files: Mapping[str, int]) -> int:
    """The first rank of the first node that has all of some files."""
    return next(rank for rank, seen in sorted(on_nodes.items()) if files.items() <= seen.items())


class _Files:
    """Ranges of the files of a tag, mapped when they are first read."""

    def __init__(self, tag_dir: Path, note: MemoryNote) -> None:
        self._tag_dir, self._note = tag_dir, note
        self._mapped: dict[str, torch.Tensor] = {}

    def read(self, source: _Source, offset: int, out: torch.Tensor) -> torch.Tensor:
        """Copy a range of a source into ``out``, zeros where the data ends before."""
        if source.member is None:
            out.copy_(self._map(source.parity)[offset : offset + len(out)])
            return out
        out.zero_()
        for name, begin, nbytes, place in pieces(self._note.files[source.member], source.begin + offset, len(out)):
            out[place : place + nbytes] = self._map(name)[begin : begin + nbytes]
        return out

    def _map(self, name: str) -> torch.Tensor:
        if name not in self._mapped:
            with open(self._tag_dir / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
            self._mapped[name] = torch.frombuffer(data, dtype=torch.uint8)
        return self._mapped[name]
