"""Write the files of target ranks one by one: each is filled from the saved ranks' files in one pass, then flushed.

While the files of one rank are flushed, the next ones are filled. A note about each finished rank lets a later run
skip it.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable, TensorSlot, extent_windows, stream_seeds
from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array, Layout, Param, unpacked_layout, with_slices
from zeroelastic.core.plan import make_plan
from zeroelastic.core.slice_plan import slices_of_layout
from zeroelastic.core.slices import RankSet, first_copies, strips_of_runs
from zeroelastic.executors.dispatch import DigestRows
from zeroelastic.executors.tables import ProgressFunction, cast_between
from zeroelastic.io.atomic import write_atomically
from zeroelastic.verbs.new_files import NewArchives
from zeroelastic.verbs.reshard.sink import Flats, NativeSink, Weight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenRank:
    """A written target rank: its files' sizes, and the partial digest of each stream, uint64."""

    rank: int
    files: Mapping[str, int]
    digests: UInt64Array
    bytes_moved: int
    resumed: bool


class RankWriter:
    """Writes the files of target ranks into ``tag_dir``; notes about them go to the folder ``done`` two levels above.

    ``streams`` are the (parameter, state key) that every ``WrittenRank.digests`` runs parallel to.
    """

    def __init__(
        self,
        sink: NativeSink,
        tag_dir: Path,
        save_id: str,
        *,
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> None:
        self._sink, self._saved, self._save_id = sink, sink.source, save_id
        self._threads, self._progress = threads, progress
        self._tag_dir, self._notes = tag_dir, tag_dir.parent.parent / "done"
        parts = sink.source.parts
        self.streams = [(tensor.param.name, tensor.key) for part in parts for tensor in part.tensors()]
        # What is in several ranks' files counts once in the digests of whole tensors: the rest has streams of its own.
        self._seeds = np.tile(stream_seeds(self.streams), 2)

    def write_ranks(self) -> list[WrittenRank]:
        """Write the files of all target ranks."""
        self._tag_dir.mkdir(parents=True, exist_ok=True)
        self._notes.mkdir(exist_ok=True)
        done: list[WrittenRank] = []
        with ThreadPoolExecutor(1) as flusher:
            flushing: Future[WrittenRank] | None = None
            for rank in range(self._sink.layout.world_size):
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
        note = self._notes / f"{rank}.json"
        try:
            saved = json.loads(note.read_text())
            files = {name: (self._tag_dir / name).stat().st_size for name in self._sink.file_names(rank)}
            digests = np.frombuffer(base64.b64decode(saved["digests"]), dtype="<u8").astype(np.uint64)
            if files != saved["files"] or len(digests) != len(self.streams):
                raise ValueError("it names other files, sizes or tensors")
            return WrittenRank(rank, files, digests, int(saved["bytes_moved"]), resumed=True)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            if note.exists():
                logger.warning("%s: %r; the files of rank %d are written again", note, error, rank)
            return None

    def _fill(self, rank: int) -> Callable[[], WrittenRank]:
        """Copy the payload of one rank. The returned function finishes the files and writes the note."""
        sink, saved = self._sink, self._saved
        files = sink.files(rank, save_id=self._save_id)
        trees = {self._tag_dir / name: tree for name, tree in zip(sink.file_names(rank), files.trees, strict=True)}
        archives = NewArchives(trees, threads=self._threads)
        found_digests = np.zeros(len(self._seeds), dtype=np.uint64)
        moved = 0
        parts = ((sink.layout, files.flats, rank), (sink.frozen, files.frozen, sink.frozen_rank(rank)))
        for number, (layout, flats, number_of_rank) in enumerate(parts):
            slots = archives.slots(list(flats.values()))
            for rows, digest in self._rows(number, layout, flats, number_of_rank):
                found = archives.move(rows, slots, digest=digest, progress=self._progress)
                assert found is not None, "digests were asked for"
                found_digests += found
                moved += int(rows.nbytes.sum())
        self._make_weights(archives, files.weights)
        digests, of_copies = found_digests.reshape(2, -1)
        if files.digests is not None:
            order = _numbers(files.layout, saved.trained.params)
            own = (digests + of_copies)[: len(saved.trained.tensors())]
            files.digests.source = np.add.reduceat(own, self._first_streams(0))[order].astype("<u8").tobytes()
        archives.copy_rest()

        def finish() -> WrittenRank:
            archives.finish(sync=True)
            done = WrittenRank(rank, archives.sizes, digests, moved, resumed=False)
            note = {
                "files": done.files,
                "digests": base64.b64encode(digests.astype("<u8").tobytes()).decode(),
                "bytes_moved": moved,
            }
            write_atomically(self._notes / f"{rank}.json", json.dumps(note).encode())
            return done

        return finish

    def _rows(self, number: int, layout: Layout, flats: Flats, rank: int) -> Iterator[tuple[ExtentTable, DigestRows]]:
        """The rows that fill flat buffers from part ``number`` of what was saved, with the streams of their digests."""
        if not flats:
            return
        part = self._saved.parts[number]
        asked = [TensorSlot(key, i, storage.dtype) for (i, key), storage in flats.items()]
        order = _numbers(layout, part.params)
        a_member = order[np.unique(layout.sub_group, return_index=True)[1]].tolist()
        position = np.array([list(part.dtypes[a_member[i]]).index(key) for i, key in flats], dtype=np.int64)
        first = self._first_streams(number)[order]
        copies = None if layout.slices is None else first_copies(layout.slices)
        for rows in extent_windows(make_plan(part.layout, layout, rank), part.extents, asked):
            stream = first[rows.param] + position[rows.target]
            if copies is not None:
                strip = strips_of_runs(slices_of_layout(layout), rows.param, rows.start)
                stream += len(self.streams) * (copies[strip] != strip)
            yield rows, DigestRows(self._seeds, stream, rows.start, rows.itemsize)

    def _first_streams(self, number: int) -> Int64Array:
        """The number of the first stream of each parameter of a part."""
        parts = self._saved.parts
        counts = np.array([len(dtypes) for dtypes in parts[number].dtypes], dtype=np.int64)
        return sum(len(part.tensors()) for part in parts[:number]) + np.cumsum(counts) - counts

    def _make_weights(self, archives: NewArchives, weights: Sequence[Weight]) -> None:
        """Fill whole weights by rounding master weights to their dtypes, on the way from file to file."""
        part = self._saved.trained
        saved = {param.name: dtypes[FP32] for param, dtypes in zip(part.params, part.dtypes, strict=True)}
        alike: dict[tuple[str, str], list[Weight]] = {}
        for weight in weights:
            alike.setdefault((saved[weight.tensor.name], weight.storage.dtype), []).append(weight)
        for (src, dst), some in alike.items():
            cast = cast_between(src, dst)
            assert cast is not None, "made_weights takes dtypes to which master weights can be rounded"
            slots = archives.slots([weight.storage for weight in some])
            asked = [TensorSlot(FP32, i, src) for i in range(len(some))]
            for rows in extent_windows(make_plan(part.layout, _layout_of(some), 0), part.extents, asked):
                archives.move(rows, slots, cast=cast)


def _numbers(layout: Layout, params: Sequence[Param]) -> Int64Array:
    """Which of whole parameters each one of a layout is, or is a slice of: shape ``(layout.num_params,)``."""
    number = {param.name: i for i, param in enumerate(params)}
    return np.array([number[whole.name] for whole in layout.tensors], dtype=np.int64)


def _layout_of(weights: Sequence[Weight]) -> Layout:
    """The layout of one rank with a buffer for each weight."""
    params = [Param(str(i), (sum(s.numel * s.num_runs for s in weight.strips),)) for i, weight in enumerate(weights)]
    tensors = {str(i): (weight.tensor, weight.strips) for i, weight in enumerate(weights)}
    return with_slices(unpacked_layout(params, 1), [RankSet(0, 1, 1)] * len(weights), tensors)
