"""Writes a shared file of which each rank has ranges: on a disk, or on the disk of each node.

On a disk that all ranks see, each writes what it has. Elsewhere the ranks send what they have to those that write, in
rounds of bounded size: on each node its ranks share the rows of the file among them. Either way the file appears as a
whole, under its name, when all of it is there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from zeroelastic.checkpoint.shared_files import read_shared_head
from zeroelastic.core.layout import Int64Array
from zeroelastic.deepspeed.live.digests import LivePiece
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.directory import Directory
from zeroelastic.deepspeed.storage_rules import NOT_SEEN, saves_nothing
from zeroelastic.distributed.collective import all_gather, all_or_raise
from zeroelastic.distributed.exchange import Arrived, RoundBuffer, device_of, exchange_rows
from zeroelastic.errors import CheckpointError, SaveError
from zeroelastic.executors.dispatch import CopyTable, copy_segments, write_segments
from zeroelastic.io.atomic import name_in_errors, reserve_space, sync_directory, sync_path, write_fully
from zeroelastic.torch_file.safetensors import Head

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written at ``path``: the ``header`` that says what ``head`` does, and what this rank has of it.

    ``tag_dir`` is that of the save, which errors name.
    """

    tag_dir: Path
    path: Path
    header: bytes
    head: Head
    pieces: Sequence[LivePiece]

    def offsets(self) -> Int64Array:
        """Where in the file each piece begins."""
        places = [self.head.tensors[p.param].offset + p.start * p.tensor.element_size() for p in self.pieces]
        return np.array(places, dtype=np.int64)

    def all_or_raise(self, action: Callable[[], object]) -> None:
        """Run a step on all ranks; one that fails on any raises the same SaveError on every rank. Collective."""

        def act() -> None:
            with saves_nothing(self.tag_dir):
                action()

        all_or_raise(act)

    def check(self, written: Path) -> None:
        """Raise SaveError unless what was written has the header that this file has to have."""
        try:
            found = read_shared_head(written)[0].tensors
        except CheckpointError as error:
            raise SaveError(f"{written}: does not read back: {error} Nothing was saved.") from error
        if found != self.head.tensors:
            raise SaveError(f"{written}: its header reads back as another. Nothing was saved.")


def write_shared_file(file: NewFile, destination: Directory, save_id: str, options: Options) -> None:
    """Write the file on the disk of each leader. Collective. Raises SaveError on every rank.

    It appears by a rename when all of it is on the device.
    """
    path = file.path
    folder, temporary = path.parent, path.with_name(f".{path.name}.{save_id}.tmp")

    def begin() -> None:
        if not destination.is_leader:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with name_in_errors(temporary), open(temporary, "xb", buffering=0) as made:
            reserve_space(made.fileno(), file.head.nbytes)
            made.truncate(file.head.nbytes)
            write_fully(made.fileno(), file.header, 0)

    def write_own() -> None:
        if not temporary.exists():
            raise SaveError(f"{file.tag_dir}: cannot be written: no {temporary}. {NOT_SEEN} Nothing was saved.")
        number = np.arange(len(file.pieces), dtype=np.int64)
        nbytes = np.array([piece.tensor.nbytes for piece in file.pieces], dtype=np.int64)
        table = CopyTable(number, np.zeros_like(number), np.zeros_like(number), file.offsets(), nbytes)
        tensors = [piece.tensor for piece in file.pieces]
        write_segments(table, tensors, [temporary], sync=options.fsync, executor=options.io_engine)

    def put(at: Int64Array, arrived: Arrived, buffer: RoundBuffer) -> None:
        zeros = np.zeros_like(at)
        write_segments(CopyTable(zeros, arrived.at, zeros, at, arrived.nbytes), [buffer], [temporary])

    def finish() -> None:
        if not destination.is_leader:
            return
        if options.fsync:
            sync_path(temporary)
        file.check(temporary)
        os.replace(temporary, path)
        if options.fsync:
            sync_directory(folder)
            sync_directory(folder.parent)

    try:
        file.all_or_raise(begin)
        if any(destination.leaders):
            rank, leaders = dist.get_rank(), destination.leaders
            mates = [other for other, leader in enumerate(leaders) if leader == leaders[rank]]
            rows = _Rows.of_all_ranks(file)
            mine = np.arange(len(rows.offset)) % len(mates) == mates.index(rank)
            rows.gather(rows.offset, np.where(mine, rows.offset + rows.nbytes, rows.offset), put)
        else:
            file.all_or_raise(write_own)
        file.all_or_raise(finish)
    except Exception:
        if destination.is_leader:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Rows:
    """The pieces of all ranks by their place in the file: columns of shape ``(num_rows,)``, in bytes.

    Row i is piece ``number[i]`` of rank ``owner[i]``.
    """

    file: NewFile
    owner: Int64Array
    number: Int64Array
    offset: Int64Array
    nbytes: Int64Array

    @classmethod
    def of_all_ranks(cls, file: NewFile) -> _Rows:
        """Collective."""
        nbytes = np.array([piece.tensor.nbytes for piece in file.pieces], dtype=np.int64)
        tables = all_gather((file.offsets(), nbytes))
        counts = [len(offset) for offset, _ in tables]
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        offset, nbytes = (np.concatenate(column) for column in zip(*tables, strict=True))
        order = np.argsort(offset, kind="stable")
        order = order[nbytes[order] > 0]
        columns = (column[order] for column in (owner, number, offset, nbytes))
        return cls(file, *columns)

    def gather(
        self,
        begin: Int64Array,
        end: Int64Array,
        put: Callable[[Int64Array, Arrived, RoundBuffer], None],
    ) -> None:
        """Have the bytes of each row from ``begin`` to ``end`` in the file sent here, none where they meet. Collective.

        ``put`` gets where in the file what has arrived belongs. Memory: see ``exchange_rows``.
        """
        index = np.flatnonzero(end > begin)
        at = begin[index]
        rows = np.stack((self.number[index], at - self.offset[index], end[index] - at), 1)

        def serve(asked: Int64Array, parts: Arrived, buffer: RoundBuffer) -> None:
            numbers, src = np.unique(asked[:, 0], return_inverse=True)
            table = CopyTable(
                src.reshape(-1), asked[:, 1] + parts.skip, np.zeros_like(parts.at), parts.at, parts.nbytes
            )
            copy_segments(table, [self.file.pieces[number].tensor for number in numbers.tolist()], [buffer])

        def take(arrived: Arrived, buffer: RoundBuffer) -> None:
            put(at[arrived.row] + arrived.skip, arrived, buffer)

        source = device_of(piece.tensor for piece in self.file.pieces)
        owner = self.owner[index]
        self.file.all_or_raise(lambda: exchange_rows(rows, owner, serve, take, filled_on=source))
