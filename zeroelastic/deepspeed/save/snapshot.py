"""The snapshot of an asynchronous save, taken while training waits.

The pickled part of each file is on the disk when ``save`` returns (``torch_file.skeleton``). Only storages are copied,
each once, to their places in memory images of the files (``torch_file.image``). The memory is kept for the next save.
Memory: the size of this rank's two files, which hold its part of the optimizer state and of frozen parameters, and the
buffers. Where any of it is on a GPU, the memory is pinned.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroelastic.deepspeed.live.digests import LiveStreams, digest_pieces
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.engine_proxy import not_written
from zeroelastic.deepspeed.save.shard_writer import ShardWriter, runs_of
from zeroelastic.errors import UnsupportedError
from zeroelastic.torch_file.image import FileImage, host_memory
from zeroelastic.torch_file.skeleton import write_skeleton

logger = logging.getLogger(__name__)

_SLACK = 64 << 10


class HostMemory:
    """Host memory for images. The next snapshot uses it again; it is freed with this object."""

    def __init__(self) -> None:
        self._used: list[tuple[torch.Tensor, bool]] = []  # and whether it was to be pinned
        self._spare: list[tuple[torch.Tensor, bool]] = []

    @property
    def nbytes(self) -> int:
        """The bytes that the last snapshot used."""
        return sum(memory.numel() for memory, _ in self._used)

    def begin(self) -> None:
        """Begin a snapshot: nothing reads the images of the last one any more."""
        self._spare, self._used = self._used, []

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """At least ``nbytes``, from the beginning of a page: the smallest spare block that fits, or a new one."""
        fitting = [i for i, (memory, was) in enumerate(self._spare) if memory.numel() >= nbytes and was == pinned]
        if fitting:
            found = self._spare.pop(min(fitting, key=lambda i: self._spare[i][0].numel()))
        else:  # what is pickled may grow a little
            found = host_memory(nbytes + nbytes // 64 + _SLACK, pinned=pinned), pinned
        self._used.append(found)
        return found[0]

    def end(self) -> None:
        """Wait for copies from a GPU, and free what this snapshot did not need."""
        self._spare = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()


class Snapshot(ShardWriter):
    """Keeps what ``TorchCheckpointEngine.save`` is given as it is now; ``write`` writes it later, in any thread."""

    def __init__(
        self, original: Any, live: LiveOptimizer, streams: LiveStreams, options: Options, memory: HostMemory
    ) -> None:
        super().__init__(original, live, streams, options)
        self._memory, self._images = memory, list[FileImage]()
        self._pieces = list(streams.pieces)
        self._kept = [False] * len(self._pieces)
        memory.begin()

    def save(self, state_dict: Any, path: str) -> None:
        """Lay out one file and copy its payload; a layout of torch that is not known here is written by torch, now."""
        try:
            laid = write_skeleton(state_dict, Path(path))
        except UnsupportedError as error:
            logger.warning("saving through torch alone, and not in the background: %s", error)
            self._fill_table(self._known)
            self._original.save(state_dict, path)
            return
        memory = self._memory.take(laid.nbytes, pinned=laid.on_gpu)
        image = FileImage(laid, memory, digest_ranges=self._runs, last=[self.table])
        self._keep(image)
        self._images.append(image)

    def complete(self) -> None:
        """Digest what is in neither file; from here on nothing of the live state is used."""
        self._memory.end()
        lost = [i for i, found in enumerate(self._known) if found is None and not self._kept[i]]
        for i, digest in zip(lost, digest_pieces([self._streams.pieces[i] for i in lost]), strict=True):
            self._known[i] = digest
        self._streams = replace(self._streams, pieces=tuple(self._pieces))
        self._runs = runs_of(self._streams)

    def write(self) -> None:
        """Digest and write all files. Raises SaveError naming the file."""
        for image in self._images:
            try:
                self._learn(image.complete(before_last=self._fill_table, executor=self._options.host_io_engine))
                image.write(sync=self._options.fsync)
            except OSError as error:
                raise not_written(image.path, error) from error

    def _keep(self, image: FileImage) -> None:
        """Take the pieces that are digested from the copies."""
        for i, piece in enumerate(self._pieces):
            copy = None if self._kept[i] else image.view(piece.tensor)
            if copy is not None:
                self._pieces[i] = piece._replace(tensor=copy)
                self._kept[i] = True
