"""A copy of what a save writes, taken while training waits: the files are laid out, their payload is kept in memory.

What is pickled is on the disk when ``save`` returns (``laid_out``), so only storages are copied, each once, to their
places in images of the files (``file_image``), whose host memory is kept for the next save. Memory: this rank's two
files, which is its part of the optimizer's state, of frozen parameters, and the buffers; where a GPU is used it is
pinned, and torch rounds each file up to a power of two.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroelastic.errors import UnsupportedError
from zeroelastic.file_image import FileImage, host_memory
from zeroelastic.laid_out import lay_out_torch_file
from zeroelastic.stage3.contents import LiveStreams, digest_tensor
from zeroelastic.stage3.hand_over import not_written
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.shard_writer import ShardWriter, runs_of

logger = logging.getLogger(__name__)

_SLACK = 64 << 10


class HostMemory:
    """Memory for images on the host. What one snapshot used the next one uses again; it is freed with this object."""

    def __init__(self) -> None:
        self._used: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what the last snapshot used."""
        return sum(memory.numel() for memory in self._used)

    def begin(self) -> None:
        """Forget the last snapshot: nothing reads its images any more."""
        self._spare, self._used = self._used, []

    def take(self, nbytes: int) -> torch.Tensor:
        """At least as many bytes, at the beginning of a page: the smallest that fits of what is there, or new ones."""
        fitting = [i for i, memory in enumerate(self._spare) if memory.numel() >= nbytes]
        if fitting:
            found = self._spare.pop(min(fitting, key=lambda i: self._spare[i].numel()))
        else:
            found = host_memory(nbytes + nbytes // 64 + _SLACK)  # what is pickled may grow a little
        self._used.append(found)
        return found

    def end(self) -> None:
        """Wait for copies from a GPU, and free what this snapshot did not need."""
        self._spare = []
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class Snapshot(ShardWriter):
    """Keeps what ``TorchCheckpointEngine.save`` is given as it is now; ``write`` writes it later, in any thread."""

    def __init__(
        self, original: Any, live: LiveState, streams: LiveStreams, options: Options, memory: HostMemory
    ) -> None:
        super().__init__(original, live, streams, options)
        self._memory, self._images = memory, list[FileImage]()
        self._pieces = list(streams.pieces)
        self._kept = [False] * len(self._pieces)
        memory.begin()

    def save(self, state_dict: Any, path: str) -> None:
        """Lay out one file and copy its payload; a layout of torch that is not known here is written by torch, now."""
        try:
            laid = lay_out_torch_file(state_dict, Path(path))
        except UnsupportedError as error:
            logger.warning("saving through torch alone, and not in the background: %s", error)
            self._fill_table(self._known)
            self._original.save(state_dict, path)
            return
        image = FileImage(laid, self._memory.take(laid.nbytes), runs=self._runs, last=[self.table])
        self._keep(image)
        self._images.append(image)

    def complete(self) -> None:
        """Digest what is in neither file; from here on nothing of the live state is used."""
        self._memory.end()
        streams = self._streams
        for i, ((name, key), piece, start) in enumerate(
            zip(streams.streams, streams.pieces, streams.starts, strict=True)
        ):
            if not self._kept[i] and self._known[i] is None:
                self._known[i] = digest_tensor(piece, name, key, start)
        self._streams = replace(streams, pieces=tuple(self._pieces))
        self._runs = runs_of(self._streams)

    def write(self) -> None:
        """Digest and write all files. Raises SaveError naming the file."""
        for image in self._images:
            try:
                self._learn(image.complete(before_last=self._fill_table, executor=self._options.host_executor))
                image.write(sync=self._options.fsync)
            except OSError as error:
                raise not_written(image.path, error) from error

    def _keep(self, image: FileImage) -> None:
        """Take the pieces that are digested from the copies."""
        for i, piece in enumerate(self._pieces):
            copy = None if self._kept[i] else image.view(piece)
            if copy is not None:
                self._pieces[i] = copy
                self._kept[i] = True
