"""Write the files of target ranks one by one: each is filled from the saved ranks' files in one pass, then flushed.

While the files of one rank are flushed, those of the next are filled. A note about each finished rank lets a later run
skip it.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import Destination, ExtentTable, extent_windows, stream_seeds
from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import make_plan, match_params
from zeroelastic.distributed.processes import Processes
from zeroelastic.executors.dispatch import DigestRows
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.atomic import write_atomically
from zeroelastic.verbs.model_tensors import optimizer_tensors
from zeroelastic.verbs.new_files import Archives, TensorCopy, copy_tensors
from zeroelastic.verbs.reshard.files import Flats, rank_files
from zeroelastic.verbs.reshard.lean_source import WeightPlace
from zeroelastic.verbs.reshard.source import ReshardSource
from zeroelastic.verbs.reshard.target import ReshardTarget, file_names

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
    """Writes the files of target ranks into ``tag_dir``; notes about them go to the folder ``done`` two levels above.

    ``streams`` are the (parameter, state key) that every ``WrittenRank.digests`` runs parallel to.
    """

    def __init__(
        self,
        saved: ReshardSource,
        target: ReshardTarget,
        tag_dir: Path,
        save_id: str,
        *,
        max_memory: int,
        threads: int | None = None,
        progress: ProgressFunction | None = None,
    ) -> None:
        self._saved, self._target, self._save_id = saved, target, save_id
        self._max_memory, self._threads, self._progress = max_memory, threads, progress
        self._tag_dir, self._notes = tag_dir, tag_dir.parent.parent / "done"
        parts = saved.state.parts
        self.streams = [(tensor.param.name, tensor.key) for part in parts for tensor in part.tensors()]
        self._seeds = stream_seeds(self.streams)

    def write_ranks(self, processes: Processes) -> list[WrittenRank]:
        """This process's share of the target ranks."""
        self._tag_dir.mkdir(parents=True, exist_ok=True)
        self._notes.mkdir(exist_ok=True)
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
        note = self._notes / f"{rank}.json"
        try:
            saved = json.loads(note.read_text())
            names = file_names(self._saved, self._target, rank)
            files = {name: (self._tag_dir / name).stat().st_size for name in names}
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
        saved, target = self._saved, self._target
        files = rank_files(saved, target, rank, save_id=self._save_id)
        names = file_names(saved, target, rank)
        graphs = {self._tag_dir / name: graph for name, graph in zip(names, files.graphs, strict=True)}
        archives = Archives(graphs, threads=self._threads)
        digests = np.zeros(len(self.streams), dtype=np.uint64)
        moved = 0
        for number, (layout, flats) in enumerate(((target.layout, files.flats), (target.frozen, files.frozen))):
            slots = archives.slots(list(flats.values()))
            for rows, digest in self._rows(number, layout, flats, rank):
                found = archives.move(rows, slots, digest=digest, progress=self._progress)
                assert found is not None, "digests were asked for"
                digests += found
                moved += int(rows.nbytes.sum())
        self._make_weights(archives, files.weights)
        if files.digests is not None:
            first, order = self._first_streams(0), match_params(saved.trained.layout, target.layout)
            sums = np.add.reduceat(digests[: len(saved.trained.tensors())], first)[order]
            files.digests.data = sums.astype("<u8").tobytes()
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

    def _rows(
        self, number: int, layout: Layout | None, flats: Flats, rank: int
    ) -> Iterator[tuple[ExtentTable, DigestRows]]:
        """The rows that fill flat buffers from part ``number`` of what was saved, with the streams of their digests."""
        if not flats or layout is None:
            return
        part = self._saved.state.parts[number]
        asked = [Destination(key, i, storage.dtype) for (i, key), storage in flats.items()]
        order = match_params(part.layout, layout)
        a_member = order[np.unique(layout.sub_group, return_index=True)[1]].tolist()
        position = np.array([list(part.dtypes[a_member[i]]).index(key) for i, key in flats], dtype=np.int64)
        first = self._first_streams(number)[order]
        for rows in extent_windows(make_plan(part.layout, layout, rank), part.extents, asked):
            stream = first[rows.param] + position[rows.target]
            yield rows, DigestRows(self._seeds, stream, rows.start, rows.itemsize)

    def _first_streams(self, number: int) -> Int64Array:
        """The number of the first stream of each parameter of a part."""
        parts = self._saved.state.parts
        counts = np.array([len(dtypes) for dtypes in parts[number].dtypes], dtype=np.int64)
        return sum(len(part.tensors()) for part in parts[:number]) + np.cumsum(counts) - counts

    def _make_weights(self, archives: Archives, weights: Mapping[str, WeightPlace]) -> None:
        """Fill the whole weights by rounding the master weights to their dtypes, on the way from file to file."""
        if not weights:
            return
        state, params = self._saved.state, self._saved.trained.params
        masters = optimizer_tensors(state, keys=frozenset([FP32]))
        by_name = {param.name: master for param, master in zip(params, masters, strict=True)}
        slots = archives.slots([place.storage for place in weights.values()]).tolist()
        copies = [
            TensorCopy(by_name[name], place.storage.dtype, slot, place.start)
            for (name, place), slot in zip(weights.items(), slots, strict=True)
        ]
        copy_tensors(archives, copies, state, max_memory=self._max_memory)
