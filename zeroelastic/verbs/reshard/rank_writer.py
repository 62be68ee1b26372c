"""Write the files of target ranks one by one: each is filled from the saved ranks' files in one pass, then flushed.

While the files of one rank are flushed, those of the next are filled. A note about each finished rank lets a later run
skip it.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import Destination, ExtentTable, extent_windows, stream_seeds
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.plan import make_plan, match_params
from zeroelastic.distributed.processes import Processes
from zeroelastic.executors.dispatch import CopyTable, DigestRows, UInt32Array, join_crc32, move_segments
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.executors.tables import CASTS, Cast, cast_between, cast_itemsizes
from zeroelastic.io.atomic import write_at, write_atomically
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.graph import Archive, Storage
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.reshard.group_files import group_files
from zeroelastic.verbs.reshard.rank_files import RankFiles, rank_files
from zeroelastic.verbs.reshard.source import ReshardSource
from zeroelastic.verbs.reshard.target import ReshardTarget, file_names
from zeroelastic.verbs.reshard.whole_file import whole_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenRank:
    """A written target rank: the sizes of its files, and the partial digest of each stream, uint64."""

    rank: int
    files: Mapping[str, int]
    digests: UInt64Array
    bytes_moved: int
    resumed: bool


class RankWriter:
    """Writes the files of target ranks into ``staging / "root" / tag``; notes about them go to ``staging / "done"``.

    ``streams`` are the (parameter, state key) that every ``WrittenRank.digests`` runs parallel to.
    """

    def __init__(
        self,
        saved: ReshardSource,
        target: ReshardTarget,
        staging: Path,
        tag: str,
        save_id: str,
        *,
        threads: int | None = None,
        fsync: bool = True,
        progress: ProgressFunction | None = None,
    ) -> None:
        self._saved, self._target, self._staging, self._save_id = saved, target, staging, save_id
        self._threads, self._fsync, self._progress = threads, fsync, progress
        self.tag_dir = staging / "root" / tag
        self.streams = [
            (param.name, key)
            for part in saved.parts
            for p, param in enumerate(part.layout.params)
            for key in sorted(part.dtypes[p])
        ]
        self._seeds = stream_seeds(self.streams)
        self._first: list[Int64Array] = []  # number of the first stream of each parameter, by part
        count = 0
        for part in saved.parts:
            numbers = np.cumsum([0] + [len(dtypes) for dtypes in part.dtypes], dtype=np.int64)
            self._first.append(count + numbers[:-1])
            count += int(numbers[-1])

    def write_ranks(self, processes: Processes) -> list[WrittenRank]:
        """This process's share of the target ranks."""
        self.tag_dir.mkdir(parents=True, exist_ok=True)
        (self._staging / "done").mkdir(exist_ok=True)
        done: list[WrittenRank] = []
        with ThreadPoolExecutor(1) as flusher:
            flushing: Future[WrittenRank] | None = None
            for rank in processes.mine(self._target.layout.world_size):
                found = self._resumed(rank)
                if found is not None:
                    done.append(found)
                    if self._progress is not None:
                        self._progress(found.bytes_moved)
                    continue
                finish = self._fill(rank)
                if flushing is not None:
                    done.append(flushing.result())
                flushing = flusher.submit(finish)
            if flushing is not None:
                done.append(flushing.result())
        return done

    def _resumed(self, rank: int) -> WrittenRank | None:
        """The note of an earlier run about this rank; None where there is none, or the files are not as it says."""
        note = self._staging / "done" / f"{rank}.json"
        try:
            saved = json.loads(note.read_text())
            files = {str(name): int(size) for name, size in saved["files"].items()}
            if any((self.tag_dir / name).stat().st_size != size for name, size in files.items()):
                raise ValueError("the files have other sizes")
            digests = np.frombuffer(base64.b64decode(saved["digests"]), dtype="<u8").astype(np.uint64)
            if len(digests) != len(self.streams) or set(files) != set(file_names(self._saved, self._target, rank)):
                raise ValueError("it names other files or tensors")
            return WrittenRank(rank, files, digests, int(saved["bytes_moved"]), resumed=True)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            if note.exists():
                logger.warning("%s: %r; the files of rank %d are written again", note, error, rank)
            return None

    def _fill(self, rank: int) -> Callable[[], WrittenRank]:
        """Copy the payload of one rank. The returned function finishes the files and writes the note."""
        saved, target = self._saved, self._target
        if target.stage == 3:
            files = rank_files(saved, target, rank, save_id=self._save_id)
        elif target.stage == 0:
            files = whole_file(saved, target)
        else:
            files = group_files(saved, target, rank)
        names = file_names(saved, target, rank)
        graphs = [graph for graph in (files.optim, files.model) if graph is not None]
        archives = [Archive(self.tag_dir / name, graph) for name, graph in zip(names, graphs, strict=True)]
        payload = _Payload(archives)
        digests = np.zeros(len(self.streams), dtype=np.uint64)
        moved = 0
        for number, rows, storages in self._row_sets(files, rank):
            first, part = self._first[number], saved.parts[number]
            layout = (target.layout, target.frozen)[number]
            assert layout is not None
            order = match_params(part.layout, layout)
            position = np.array(
                [sorted(part.dtypes[order[p]]).index(key) for p, key in storages.of_target], dtype=np.int64
            )
            digest = DigestRows(
                seeds=self._seeds,
                stream=first[order[rows.param]] + position[rows.target],
                start=rows.start,
                itemsize=rows.itemsize,
            )
            totals = payload.move(
                rows.paths,
                rows.file,
                rows.file_offset,
                storages.storages,
                rows.target,
                rows.target_offset * rows.itemsize,
                rows.nbytes,
                digest=digest,
                threads=self._threads,
                progress=self._progress,
            )
            digests += totals
            moved += int(rows.nbytes.sum())
        self._make_weights(files, payload)
        payload.copy_extents(threads=self._threads)
        for storage, data in files.known.items():
            payload.write(storage, data)
        if files.digests is not None:
            payload.write(files.digests, self._own_sums(digests, match_params(saved.trained.layout, target.layout)))

        def finish() -> WrittenRank:
            checksums = payload.checksums()
            for archive in archives:
                archive.finish(checksums, sync=self._fsync)
            done = WrittenRank(
                rank, {name: a.nbytes for name, a in zip(names, archives, strict=True)}, digests, moved, False
            )
            self._note(done)
            return done

        return finish

    def _row_sets(self, files: RankFiles, rank: int) -> Iterator[tuple[int, ExtentTable, _Targets]]:
        """The rows of trained and of frozen parameters, with the storages that they fill."""
        saved, target = self._saved, self._target
        firsts = np.unique(target.layout.sub_group, return_index=True)[1].tolist()
        asked = [Destination(key, i, dtype) for i, keys in enumerate(target.keys) for key, dtype in keys.items()]
        storages = [files.flats[row_target.sub_group, row_target.key] for row_target in asked]
        targets = _Targets(storages, [(firsts[row_target.sub_group], row_target.key) for row_target in asked])
        plan = make_plan(saved.trained.layout, target.layout, rank)
        for rows in extent_windows(plan, saved.trained.extents, asked):
            yield 0, rows, targets
        if target.frozen is None or saved.frozen is None or files.model is None:
            return
        order = match_params(saved.frozen.layout, target.frozen)
        numels = target.frozen.numel.tolist()
        present = [p for p in range(target.frozen.num_params) if numels[p] > 0]
        asked = [Destination(FROZEN, p, saved.frozen.dtypes[int(order[p])][FROZEN]) for p in present]
        targets = _Targets([files.fragments[p] for p in present], [(p, FROZEN) for p in present])
        plan = make_plan(saved.frozen.layout, target.frozen, rank)
        for rows in extent_windows(plan, saved.frozen.extents, asked):
            yield 1, rows, targets

    def _make_weights(self, files: RankFiles, payload: _Payload) -> None:
        """Fill the whole weights by rounding the master weights to their dtypes, on the way from file to file."""
        part = self._saved.trained
        numbers = [p for p, param in enumerate(part.layout.params) if param.name in files.weights]
        if not numbers:
            return
        tensors, rows = part.whole_rows(numbers, keys=(FP32,))
        storages = [files.weights[saved.param.name] for saved in tensors]
        casts = [cast_between(saved.dtype, storage.dtype) for saved, storage in zip(tensors, storages, strict=True)]
        for cast in CASTS:
            chosen = np.array([found == cast for found in casts], dtype=np.bool_)
            some_rows = rows.take(np.flatnonzero(chosen[rows.target]))
            number = np.cumsum(chosen) - 1
            own = [storage for storage, mine in zip(storages, chosen.tolist(), strict=True) if mine]
            itemsize = np.array([DTYPE_BYTES[storage.dtype] for storage in own], dtype=np.int64)
            target = number[some_rows.target]
            payload.move(
                some_rows.paths,
                some_rows.file,
                some_rows.file_offset,
                own,
                target,
                some_rows.target_offset * itemsize[target],
                some_rows.nbytes,
                cast=cast,
                threads=self._threads,
            )

    def _own_sums(self, digests: UInt64Array, order: Int64Array) -> bytes:
        """For each trained parameter of the target, the sum of its streams' partial digests: int64 on disk."""
        part = self._saved.trained
        counts = np.array([len(dtypes) for dtypes in part.dtypes], dtype=np.int64)
        begins = self._first[0]
        sums = np.array(
            [digests[b : b + n].sum(dtype=np.uint64) for b, n in zip(begins.tolist(), counts.tolist(), strict=True)],
            dtype=np.uint64,
        )
        return sums[order].astype("<u8").tobytes()

    def _note(self, done: WrittenRank) -> None:
        note = {
            "files": dict(done.files),
            "digests": base64.b64encode(done.digests.astype("<u8").tobytes()).decode(),
            "bytes_moved": done.bytes_moved,
        }
        write_atomically(self._staging / "done" / f"{done.rank}.json", json.dumps(note).encode())


@dataclass(frozen=True, slots=True)
class _Targets:
    """For each target of some rows: its storage, and one (parameter, state key) of the target layout in it."""

    storages: Sequence[Storage]
    of_target: Sequence[tuple[int, str]]


class _Runs(NamedTuple):
    """Runs of bytes in one storage: where each begins, its length, and its CRC-32; shape ``(num_runs,)`` each."""

    begin: Int64Array
    nbytes: Int64Array
    crc32: UInt32Array


class _Payload:
    """The payload of some archives: where each storage lies, and the CRC-32 of every run that was written into it."""

    def __init__(self, archives: Sequence[Archive]) -> None:
        self._archives = archives
        self._at = {
            storage: (number, offset)
            for number, archive in enumerate(archives)
            for storage, offset in archive.offsets.items()
        }
        self._runs: dict[Storage, list[_Runs]] = {storage: [] for storage in self._at}

    def move(
        self,
        paths: Sequence[FilePath],
        file: Int64Array,
        file_offset: Int64Array,
        storages: Sequence[Storage],
        storage: Int64Array,
        within: Int64Array,
        nbytes: Int64Array,
        *,
        digest: DigestRows | None = None,
        cast: Cast = "none",
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> UInt64Array | int:
        """Move rows of files to byte positions ``within`` storages; returns the digests, or 0 without.

        ``nbytes`` are those of the files, which a conversion changes.
        """
        if not len(nbytes):
            return 0
        at = np.array([self._at[s] for s in storages], dtype=np.int64).reshape(len(storages), 2)
        table = CopyTable(
            src=file,
            src_offset=file_offset,
            dst=np.ascontiguousarray(at[storage, 0]),
            dst_offset=at[storage, 1] + within,
            nbytes=nbytes,
        )
        crc32 = np.zeros(len(nbytes), dtype=np.uint32)
        totals = move_segments(
            table,
            paths,
            [archive.path for archive in self._archives],
            digest=digest,
            crc32=crc32,
            cast=cast,
            threads=threads,
            progress=progress,
        )
        src_itemsize, dst_itemsize = cast_itemsizes(cast)
        written = nbytes // src_itemsize * dst_itemsize
        order = np.lexsort((within, storage))
        bounds = np.searchsorted(storage[order], np.arange(len(storages) + 1))
        for s, begin, end in zip(storages, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            own = order[begin:end]
            self._runs[s].append(_Runs(within[own], written[own], crc32[own]))
        return 0 if totals is None else totals

    def copy_extents(self, *, threads: int | None) -> None:
        """Copy every storage that was read from another file and is kept: buffers, client state, hyper-parameters."""
        found = [(s, s.extent) for s in self._at if s.nbytes > 0 and not s.is_new]
        kept = [storage for storage, _ in found]
        paths: dict[FilePath, int] = {}
        rows = [(paths.setdefault(e.path, len(paths)), e.offset, e.nbytes) for _, e in found if e is not None]
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
        file, offset, nbytes = (np.ascontiguousarray(column) for column in columns)
        numbers = np.arange(len(kept), dtype=np.int64)
        self.move(list(paths), file, offset, kept, numbers, np.zeros_like(numbers), nbytes, threads=threads)

    def write(self, storage: Storage, data: bytes) -> None:
        """Write a storage whose bytes are known, if it is in one of the archives."""
        if storage not in self._at or not data:
            return
        number, offset = self._at[storage]
        write_at(self._archives[number].path, data, offset)
        length, crc32 = np.array([len(data)], dtype=np.int64), np.array([zlib.crc32(data)], dtype=np.uint32)
        self._runs[storage].append(_Runs(np.zeros(1, dtype=np.int64), length, crc32))

    def checksums(self) -> dict[Storage, int]:
        """The CRC-32 of every storage, zeros between the runs included."""
        return {storage: self._checksum(storage) for storage in self._at if storage.nbytes > 0}

    def _checksum(self, storage: Storage) -> int:
        none = np.zeros(0, dtype=np.int64)
        runs = [_Runs(none, none, none.astype(np.uint32)), *self._runs[storage]]
        begin, nbytes, crc32 = (np.concatenate(column) for column in zip(*runs, strict=True))
        order = np.argsort(begin, kind="stable")
        begin, nbytes, crc32 = begin[order], nbytes[order], crc32[order]
        end = begin + nbytes
        gaps = np.append(begin, storage.nbytes) - np.insert(end, 0, 0)
        assert (gaps >= 0).all(), "runs of a storage overlap"
        sums = np.empty(2 * len(nbytes) + 1, dtype=np.uint32)
        lengths = np.empty(2 * len(nbytes) + 1, dtype=np.int64)
        sums[1::2], lengths[1::2] = crc32, nbytes
        sums[0::2], lengths[0::2] = [_zeros_crc32(int(gap)) for gap in gaps], gaps
        return join_crc32(sums, lengths)


def _zeros_crc32(count: int) -> int:
    """The checksum of ``count`` zero bytes."""
    known, length = zlib.crc32(bytes(min(count, 1 << 16))), min(count, 1 << 16)
    while length < count:
        more = min(length, count - length)
        tail = known if more == length else _zeros_crc32(more)
        known = join_crc32(np.array([known, tail], dtype=np.uint32), np.array([length, more], dtype=np.int64))
        length += more
    return known
