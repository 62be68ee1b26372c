"""Read the tensors of a checkpoint, and compare them with the commit record, or the files with their CRC-32."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from zeroelastic.checkpoint.extents import ExtentTable, stream_seeds
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.read_ranges import ArchivesOf, ReadFiles, check_files
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import ByteArray, UInt64Array
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError
from zeroelastic.executors.dispatch import CopyTable, DigestRows, read_segments
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.torch_file.zip_check import check_records
from zeroelastic.verbs.model_tensors import ModelTensor, PartTensor, StoredBuffer

NO_LIMIT = 1 << 62

logger = logging.getLogger(__name__)


class Reading:
    """Reads tensors of a checkpoint, of which each is read whole, once or in parts, but where ``check`` is False.

    ``end`` compares their digests with the commit record. Without digests, the records of the files are compared with
    their CRC-32, unless ``by_checksum`` is False. ``max_memory`` is what a verb may use; ``progress`` is
    called with bytes of the files. ``num_compared`` tensors have the recorded digests.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_memory: int = NO_LIMIT,
        progress: ProgressFunction | None = None,
        by_checksum: bool = True,
        archives: ArchivesOf | None = None,
    ) -> None:
        self.max_memory, self.progress, self.num_compared = max_memory, progress, 0
        self.is_recorded = checkpoint.inventory.is_recorded
        self._tag_dir, self._inventory = checkpoint.tag_dir, checkpoint.inventory
        self._by_checksum, self._archives = by_checksum, archives or checkpoint.archives
        self._digests: Counter[ModelTensor] = Counter()
        self._read = ReadFiles()

    def read(self, tensor: ModelTensor, start: int = 0, stop: int | None = None, *, check: bool = True) -> ByteArray:
        """The elements of a flattened tensor from ``start`` to ``stop``: shape ``(nbytes,)``.

        Raises UnsupportedError for a buffer that needs too much memory, CheckpointError for a file that has ended.
        """
        source, size = tensor.source, DTYPE_BYTES[tensor.dtype]
        stop = tensor.numel if stop is None else stop
        if isinstance(source, StoredBuffer) and max(tensor.nbytes, source.extent.nbytes) > self.max_memory // 4:
            raise UnsupportedError(
                f"buffer {tensor.name}: has {max(tensor.nbytes, source.extent.nbytes)} bytes, which go through memory. "
                "Give --max-memory at least 4 times as many."
            )
        if stop <= start:
            return np.empty(0, dtype=np.uint8)
        if isinstance(source, PartTensor) or source.stride is None:
            return self._rows(tensor, tensor.rows(start, stop), check, self.progress)
        data = self._rows(tensor, tensor.rows(), check, None)
        if self.progress is not None:
            self.progress((stop - start) * size)
        strides = [stride * size for stride in source.stride]
        view = np.lib.stride_tricks.as_strided(data.view(f"V{size}"), tensor.shape, strides)
        return np.ascontiguousarray(view).reshape(-1).view(np.uint8)[start * size : stop * size]

    def windows(self, tensor: ModelTensor, nbytes: int) -> Iterator[ByteArray]:
        """Yield the bytes of a tensor, of a parameter at most ``nbytes`` at a time."""
        size = DTYPE_BYTES[tensor.dtype]
        step = max(1, nbytes // size) if isinstance(tensor.source, PartTensor) else max(1, tensor.numel)
        for start in range(0, tensor.numel, step):
            yield self.read(tensor, start, min(start + step, tensor.numel))

    def _rows(
        self, tensor: ModelTensor, rows: ExtentTable, check: bool, progress: ProgressFunction | None
    ) -> ByteArray:
        data = np.empty(int(rows.nbytes.sum()), dtype=np.uint8)
        zeros, begin = np.zeros_like(rows.file), rows.target_offset * rows.itemsize
        table = CopyTable(rows.file, rows.file_offset, zeros, begin, rows.nbytes)
        digest = self.digest_rows(rows, [tensor]) if check else None
        crc32 = np.zeros(rows.num_rows, dtype=np.uint32) if check and digest is None and self._by_checksum else None
        found = read_segments(table, rows.paths, [data], digest=digest, crc32=crc32, progress=progress).digests
        self.add([tensor], found)
        if crc32 is not None:
            self._read.add(rows.paths, rows.file, rows.file_offset, rows.nbytes, crc32)
        return data

    def digest_rows(self, rows: ExtentTable, tensors: Sequence[ModelTensor]) -> DigestRows | None:
        """How rows of ``tensors``, by ``rows.target``, are digested while they are read; None without digests."""
        places = [tensor.source for tensor in tensors if isinstance(tensor.source, PartTensor)]
        if not self.is_recorded or not places:
            return None
        seeds = stream_seeds([(place.name, place.key) for place in places])
        return DigestRows(seeds, rows.target, rows.start, rows.itemsize)

    def add(self, tensors: Sequence[ModelTensor], digests: UInt64Array | None) -> None:
        """Add the digests of parts of tensors that were read."""
        if digests is not None:
            self._digests.update(dict(zip(tensors, digests.tolist(), strict=True)))

    def end(self) -> None:
        """Raise DigestMismatchError where a tensor or a record is not what was saved; CheckpointError."""
        recorded = self._inventory.digests
        for tensor, total in self._digests.items():
            place, digest = tensor.source, total % (1 << 64)
            assert isinstance(place, PartTensor), "buffers have no digests"
            name, key = place.name, place.key
            expected = recorded.get((name, key))
            if expected is None or expected[0] != tensor.dtype:
                raise CheckpointError(
                    f"{self._tag_dir}: {name}: the files hold {key} in {tensor.dtype}, the commit record "
                    f"{'does not have it' if expected is None else f'says {expected[0]}'}. Files of two saves are "
                    "mixed."
                )
            if expected[1] != digest:
                raise DigestMismatchError(
                    f"{self._tag_dir}: {name}: {key} has digest {digest:016x}; the commit record says "
                    f"{expected[1]:016x}. The files have changed since they were saved."
                )
        self.num_compared += len(self._digests)
        check_files(self._read, self._archives)


def check_source_checksums(checkpoint: Checkpoint, parts: Sequence[TensorSet]) -> None:
    """Compare the files of a checkpoint without a commit record with the CRC-32 that they state.

    They have no digests that could be compared in the pass that copies, so they are read once more. A file that states
    no checksums is named in a warning. Raises CheckpointError with the file and the record.
    """
    if checkpoint.inventory.is_recorded:
        return
    experts = (checkpoint.tag_dir / name for name in checkpoint.expert_files)
    files: dict[FilePath, None] = dict.fromkeys((*checkpoint.optim_files, *checkpoint.model_files, *experts))
    for places in (places for part in parts for rank in part.extents for places in part.extents[rank].values()):
        files.update(dict.fromkeys(places.param_paths or (places.path,)))

    for path in files:
        for begin, records in checkpoint.archives(path):
            check_records(path, records, np.arange(len(records)), at=begin)
            if not records.directory.states_checksums:
                logger.warning("%s: states no CRC-32, so what is read of it is not checked", path)
