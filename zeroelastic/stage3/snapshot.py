"""A copy of what a save writes, taken while training waits: the files are laid out, their payload is kept in memory.

What is pickled is on the disk when ``save`` returns (``writer.LaidOut``), so only storages are copied, each once, into
host memory that is kept for the next save. Memory: the payload of this rank's two files, which is its part of the
optimizer's state, of frozen parameters, and the buffers; where a GPU is used it is pinned, and torch rounds each
storage up to a power of two.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroelastic.errors import UnsupportedError
from zeroelastic.stage3.contents import LiveStreams, digest_tensor
from zeroelastic.stage3.hand_over import not_written
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.shard_writer import ShardWriter, runs_of
from zeroelastic.writer import LaidOut, lay_out_torch_file

logger = logging.getLogger(__name__)

_THREADS = 1


class HostMemory:
    """Copies of storages on the host. What one snapshot used the next one uses again; it is freed with this object."""

    def __init__(self) -> None:
        self._used: list[torch.UntypedStorage] = []
        self._spare: dict[int, list[torch.UntypedStorage]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(storage.nbytes() for storage in self._used)

    def begin(self) -> None:
        """Forget the last snapshot: nothing reads its copies any more."""
        self._spare = {}
        for storage in self._used:
            self._spare.setdefault(storage.nbytes(), []).append(storage)
        self._used = []

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy, complete when ``end`` has returned."""
        spare = self._spare.get(storage.nbytes())
        if spare:
            made = spare.pop()
        else:
            pinned = torch.cuda.is_available()
            made = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        self._used.append(made)
        made.copy_(storage, non_blocking=storage.device.type == "cuda")
        return made

    def end(self) -> None:
        """Wait for copies from a GPU, and free what this snapshot did not need."""
        self._spare = {}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class Snapshot(ShardWriter):
    """Keeps what ``TorchCheckpointEngine.save`` is given as it is now; ``write`` writes it later, in any thread."""

    def __init__(
        self, original: Any, live: LiveState, streams: LiveStreams, options: Options, memory: HostMemory
    ) -> None:
        super().__init__(original, live, streams, options)
        self._memory, self._files = memory, list[LaidOut]()
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
        copies = [storage if self._is_own(storage) else self._memory.copy(storage) for storage in laid.storages]
        self._keep({live._cdata: copy for live, copy in zip(laid.storages, copies, strict=True)})
        self._files.append(laid.of(copies))

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
        """Write the payload of all files, with a digest of it. Raises SaveError naming the file."""
        for laid in self._files:
            try:
                found = laid.fill(
                    runs=self._runs,
                    last=[self.table],
                    before_last=self._fill_table,
                    sync=self._options.fsync,
                    threads=_THREADS,
                    executor=self._options.host_executor,
                )
            except OSError as error:
                raise not_written(laid.path, error) from error
            self._learn(found)

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        return bool(storage._cdata == self.table.untyped_storage()._cdata)

    def _keep(self, copies: dict[int, torch.UntypedStorage]) -> None:
        """Take the pieces that are digested from the copies."""
        for i, piece in enumerate(self._pieces):
            copy = None if self._kept[i] else copies.get(piece.untyped_storage()._cdata)
            if copy is not None:
                self._pieces[i] = _view(copy, piece)
                self._kept[i] = True


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(storage, like.storage_offset(), like.shape, like.stride())
