"""The state of this rank, copied into shared memory between two steps, without a collective.

The pickled part of each file is written by torch (``torch_file.skeleton``); storages are copied straight to their
places in the file, which is in shared memory. What takes longer, checksums and digests, is done by ``complete_files``
in another thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import live_streams
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.local_files import write_local_files
from zeroelastic.deepspeed.save.shard_writer import HostMemory, Snapshot
from zeroelastic.errors import SaveError
from zeroelastic.torch_file.image import FileImage, ImageBlocks
from zeroelastic.torch_file.skeleton import write_skeleton
from zeroelastic.torch_file.zip_format import read_directory


@dataclass(frozen=True, slots=True)
class CompleteFile:
    """One file of a rank: its bytes in shared memory, and the digest of its zip directory."""

    name: str
    data: torch.Tensor
    directory: str


class MemorySnapshot(Snapshot):
    """Keeps what it gets in files of shared memory, which ``take`` gives by name and size, pinned or not."""

    def __init__(
        self,
        original: Any,
        live: LiveOptimizer,
        options: Options,
        take: Callable[[str, int, bool], torch.Tensor],
    ) -> None:
        super().__init__(original, live, live_streams(live, with_frozen=True), options, HostMemory())
        self._take = take
        self._files: list[tuple[FileImage, Path, str]] = []

    def save(self, state_dict: Any, path: str) -> None:
        """Copy one file: torch writes its pickled part to ``path``. Raises SaveError, UnsupportedError."""
        name, skeleton_path = Path(path).name, Path(path)
        try:
            skeleton = write_skeleton(state_dict, skeleton_path)
            memory = self._take(name, skeleton.nbytes, skeleton.on_gpu)
            image = FileImage(skeleton, memory, digest_ranges=self._runs, last=[self.table])
        except OSError as error:
            skeleton_path.unlink(missing_ok=True)
            raise SaveError(f"{error.filename or path}: {error.strerror}") from error
        self._keep(image)
        self._files.append((image, skeleton_path, name))

    def complete_files(self) -> tuple[CompleteFile, ...]:
        """Read what was not copied, digest and checksum all of it. Raises SaveError."""
        done = []
        for image, skeleton_path, name in self._files:
            try:
                self._learn(image.complete(before_last=self._fill_table, executor=self._options.host_io_engine))
                skeleton_path.unlink()
            except OSError as error:
                raise SaveError(f"{error.filename or name}: {error.strerror}") from error
            blocks = ImageBlocks(image.data)
            directory = hashlib.sha256(read_directory(blocks.read, blocks.size).data).hexdigest()
            done.append(CompleteFile(name, torch.from_numpy(image.data), directory))
        return tuple(done)


def capture(
    engine: Engine,
    live: LiveOptimizer,
    options: Options,
    take: Callable[[str, int, bool], torch.Tensor],
    *,
    directory: Path,
    save_id: str,
    client_state: Mapping[str, Any],
    writes_module: bool,
    tied: Mapping[str, str],
) -> MemorySnapshot:
    """Copy the state of this rank; ``directory`` is a private one of this rank, for what torch writes.

    The state may change when this returns. Raises SaveError where memory is lacking, and UnsupportedError.
    """
    os.makedirs(directory, exist_ok=True)
    shard = MemorySnapshot(engine.checkpoint_engine, live, options, take)
    write_local_files(
        engine,
        live,
        shard,
        directory=directory,
        save_id=save_id,
        client_state=client_state,
        writes_module=writes_module,
        tied=tied,
    )
    shard.complete()
    return shard
