"""Writes a shared file of which each rank has ranges: on a disk, on the disk of each node, or into an object store.

On a disk that all ranks see, each writes what it has. Elsewhere the ranks send what they have to those that write, in
rounds of bounded size: on each node its ranks share the rows of the file among them, and into a store each rank sends
parts of one upload. Either way the file appears as a whole, under its name, when all of it is there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from zeroelastic.checkpoint.shared_files import read_shared_head
from zeroelastic.core.layout import Int64Array
from zeroelastic.deepspeed.live.digests import LivePiece
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.directory import Destination
from zeroelastic.deepspeed.storage_rules import NOT_SEEN, saves_nothing
from zeroelastic.distributed.collective import all_gather, all_or_raise, broadcast_or_raise
from zeroelastic.distributed.exchange import Arrived, RoundBuffer, device_of, exchange_rows
from zeroelastic.errors import CheckpointError, MissingFileError, SaveError, UnreadableError
from zeroelastic.executors.dispatch import CopyTable, copy_segments, write_segments
from zeroelastic.io.atomic import name_in_errors, reserve_space, sync_directory, sync_path, write_fully
from zeroelastic.io.objects import (
    OpenUpload,
    abort_upload,
    begin_upload,
    complete_upload,
    has_parts,
    not_written_error,
    object_stream,
    part_size,
    remove_objects,
    send_part,
)
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.torch_file.safetensors import Head

logger = logging.getLogger(__name__)

_MIB = 1 << 20

_PART_MIB = 8
"""Parts of an upload are no larger, where 10,000 of them suffice: a rank has one, beside the buffers of an exchange."""

_ROUND_BYTES = 2 * _MIB
"""Of the exchange that fills a part: an upload is slower than small rounds."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written at ``path``: the ``header`` that says what ``head`` does, and what this rank has of it.

    ``tag_dir`` is that of the save, which errors name.
    """

    tag_dir: FilePath
    path: FilePath
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

    def check(self, written: FilePath) -> None:
        """Raise SaveError unless what was written has the header that this file has to have."""
        try:
            found = read_shared_head(written)[0].tensors
        except CheckpointError as error:
            raise SaveError(f"{written}: does not read back: {error} Nothing was saved.") from error
        if found != self.head.tensors:
            raise SaveError(f"{written}: its header reads back as another. Nothing was saved.")


def write_shared_file(file: NewFile, destination: Destination, save_id: str, options: Options) -> None:
    """Write the file, of which each rank has some pieces. Collective. Raises SaveError on every rank."""
    if isinstance(file.path, RemotePath):
        _write_to_store(file, file.path, options)
    else:
        _write_to_disks(file, file.path, destination, save_id, options)


def _write_to_disks(file: NewFile, path: Path, destination: Destination, save_id: str, options: Options) -> None:
    """Write the file on the disk of each leader. It appears by a rename when all of it is on the device."""
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


def _write_to_store(file: NewFile, path: RemotePath, options: Options) -> None:
    """Write the object in parts, which all ranks send where the store can take them from several.

    Memory: a part, what the store's client takes for it, and the buffers of an exchange.
    """
    rank, rows, nbytes, many = dist.get_rank(), _Rows.of_all_ranks(file), file.head.nbytes, has_parts(path)
    part_bytes = part_size(nbytes, min(options.store_part_mib, _PART_MIB) * _MIB)
    senders = range(dist.get_world_size() if many else 1)
    part = bytearray(min(part_bytes, nbytes) if rank in senders else 0)  # used for all: less memory than new ones
    with _parts(file, path) if many else _stream(file, path, part_bytes) as send:
        for first in range(0, -(-nbytes // part_bytes), len(senders)):
            begin = min((first + rank) * part_bytes, nbytes) if rank in senders else nbytes
            num_bytes = min(part_bytes, nbytes - begin)
            rows.fill(part, begin, num_bytes)
            body = part if num_bytes == len(part) else part[:num_bytes]
            file.all_or_raise(partial(send, first + rank, body) if num_bytes else lambda: None)


@contextmanager
def _parts(file: NewFile, path: RemotePath) -> Iterator[Callable[[int, bytearray], None]]:
    """A multipart upload of which every rank sends parts by number; the object is there at the end. Collective.

    If it fails, rank 0 aborts the upload, or removes what it has made. Failures of that are logged.
    """
    completed, tags = False, dict[int, str]()

    def begin() -> OpenUpload:
        with saves_nothing(file.tag_dir):
            return begin_upload(path)

    def send(number: int, part: bytearray) -> None:
        tags[number] = send_part(upload, number, part)

    def complete(everywhere: Mapping[int, str]) -> None:
        nonlocal completed
        if dist.get_rank() == 0:
            complete_upload(upload, [everywhere[number] for number in sorted(everywhere)], file.head.nbytes)
            completed = True
            file.check(path)

    upload = broadcast_or_raise(begin)
    try:
        yield send
        everywhere = {number: tag for sent in all_gather(tags) for number, tag in sent.items()}
        file.all_or_raise(partial(complete, everywhere))
    except Exception:
        if dist.get_rank() == 0:
            try:
                if completed:
                    remove_objects([path])
                else:
                    abort_upload(upload)
            except OSError as error:
                logger.warning("%s: what a save has left could not be removed: %s", path, error.strerror)
        raise


@contextmanager
def _stream(file: NewFile, path: RemotePath, part_bytes: int) -> Iterator[Callable[[int, bytearray], None]]:
    """``_parts`` that rank 0 alone sends, in their order, to a store of which fsspec knows one step only. Collective.

    Most stores show the object when it is complete. If it fails, what a store shows of it all the same goes, too.
    """
    open_stream, write = ExitStack(), list[Callable[[bytearray], object]]()

    def on_rank_0(action: Callable[[], object]) -> None:
        if dist.get_rank() == 0:
            try:
                action()
            except Exception as error:  # file systems raise errors of many kinds
                raise not_written_error(path, error) from error

    def begin() -> None:
        write.append(open_stream.enter_context(object_stream(path, part_bytes)))

    try:
        file.all_or_raise(partial(on_rank_0, begin))
        yield lambda number, part: on_rank_0(lambda: write[0](part))
        file.all_or_raise(partial(on_rank_0, open_stream.close))
        file.all_or_raise(lambda: file.check(path) if dist.get_rank() == 0 else None)
    except Exception:
        with suppress(Exception):
            open_stream.__exit__(SaveError, SaveError("the save has failed"), None)
        if dist.get_rank() == 0:
            try:
                read_shared_head(path)
            except (MissingFileError, UnreadableError):
                pass
            except CheckpointError:
                with suppress(OSError):
                    remove_objects([path])
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
        round_bytes: int | None = None,
    ) -> None:
        """Have the bytes of each row from ``begin`` to ``end`` in the file sent here, none where they meet. Collective.

        ``put`` gets where in the file what has arrived belongs. Memory and ``round_bytes``: see ``exchange_rows``.
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
        self.file.all_or_raise(
            lambda: exchange_rows(rows, owner, serve, take, filled_on=source, round_bytes=round_bytes)
        )

    def fill(self, target: bytearray, begin: int, nbytes: int) -> None:
        """Put ``nbytes`` bytes of the file from ``begin`` on, its header among them, into a buffer. Collective."""
        header, end = self.file.header[begin : begin + nbytes], begin + nbytes
        target[: len(header)] = header
        place = np.frombuffer(target, dtype=np.uint8)

        def put(at: Int64Array, arrived: Arrived, buffer: RoundBuffer) -> None:
            zeros = np.zeros_like(at)
            copy_segments(CopyTable(zeros, arrived.at, zeros, at - begin, arrived.nbytes), [buffer], [place])

        low, high = np.maximum(self.offset, begin), np.minimum(self.offset + self.nbytes, end)
        self.gather(low, high, put, _ROUND_BYTES)
