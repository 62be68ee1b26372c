"""The torch.save archives inside the files of a DCP directory: where a chunk's elements are, and objects as inert data.

A file of DCP is a row of archives, one for each chunk and each object. An archive is opened in place, through a window
of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from zeroelastic.dcp.metadata import StoredBytes
from zeroelastic.errors import CheckpointError
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import Blocks, open_blocks
from zeroelastic.torch_file.header import TensorRef, TorchFile, read_torch_file
from zeroelastic.torch_file.zip_check import ZipRecords, read_zip_records


class _ArchiveInFile(Blocks):
    """Some bytes of a file as if they were one: what the header of an archive is read through."""

    def __init__(self, file: Blocks, place: StoredBytes) -> None:
        self._file, self._offset, self.size, self.bytes_read = file, place.offset, place.nbytes, 0
        self.has_cache, self.capacity = file.has_cache, file.capacity

    def read(self, offset: int, nbytes: int) -> bytes:
        data = self._file.read(self._offset + offset, max(0, min(nbytes, self.size - offset)))
        self.bytes_read += len(data)
        return data

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._file.prefetch((self._offset + offset, nbytes) for offset, nbytes in ranges)


class ChunkArchives(ExitStack):
    """The archives of a DCP directory; a context within which files stay open."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[FilePath, Blocks] = {}

    def open(self, place: StoredBytes) -> TorchFile:
        """One archive, whose objects are inert. Raises MissingFileError, CheckpointError, UnsafePickleError."""
        return read_torch_file(place.path, foreign="inert", through=_ArchiveInFile(self._file(place.path), place))

    def records(self, place: StoredBytes) -> ZipRecords:
        """The records of one archive. Raises MissingFileError, CheckpointError."""
        return read_zip_records(place.path, place.nbytes, through=_ArchiveInFile(self._file(place.path), place))

    def payload(self, place: StoredBytes, dtype: str, shape: Sequence[int], what: str) -> int:
        """The byte of the file where the elements of a chunk begin, as one run in row-major order.

        Raises CheckpointError for an archive that does not hold such a tensor.
        """
        file = self.open(place)
        ref = file.root
        if not isinstance(ref, TensorRef) or (ref.dtype, ref.shape) != (dtype, tuple(shape)):
            found = f"{ref.dtype} of shape {ref.shape}" if isinstance(ref, TensorRef) else "no tensor"
            raise CheckpointError(
                f"{place.path}: at byte {place.offset} there is {found}; {what} is {dtype} of shape {tuple(shape)}. "
                "The file is damaged, or of another save."
            )
        return place.offset + file.extent(ref).offset

    def _file(self, path: FilePath) -> Blocks:
        if path not in self._files:
            self._files[path] = self.enter_context(open_blocks(path))
        return self._files[path]
