"""What a tag takes from files that several tags of a run share: frozen parameters, and large frozen buffers.

Each module states file of a lean tag has an entry that says in which shared file each of them is, and at which byte.
docs/concepts/format.md describes it. It is read as hostile input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents, digest_in_file
from zeroelastic.checkpoint.optimizer_file import FROZEN, checked_param, checked_params
from zeroelastic.checkpoint.shared_files import SharedFile, check_shared_files, digest_from_text
from zeroelastic.core.layout import Layout, unpacked_layout
from zeroelastic.errors import CheckpointError, DigestMismatchError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import Extent
from zeroelastic.torch_file.safetensors import DTYPE_NAMES, TensorPlace

SHARED_KEY = "zeroelastic_shared"
"""The entry of a module states file that says where the tensors are that it does not have."""

BUFFER = "buffer"
"""The state key under which a shared buffer is digested; that of a parameter is ``FROZEN``."""

_VERSIONS = (1, 2)
"""Of the entry. Buffers have an empty tensor in the module's state in 1, and None in 2, written where there are any."""

_MAX_FILES = 1 << 12
_MAX_DIMENSIONS = 64
_ENTRIES = ("version", "files", "params", "buffers", "left_out")


class SharedTensor(NamedTuple):
    """Where a tensor is: the number of its file, its first byte there, its dtype, its shape and its digest."""

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    digest: int

    @property
    def place(self) -> TensorPlace:
        """The tensor as the header of its file describes it."""
        return TensorPlace(self.dtype, self.shape, self.offset)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What a tag takes from shared files: frozen parameters and buffers by name.

    ``left_out`` are the names in the module's state whose tensors the module states file does not have, which are also
    those of trained weights at stages 1 and 2, and of tied ones.
    """

    files: tuple[SharedFile, ...]
    params: Mapping[str, SharedTensor]
    buffers: Mapping[str, SharedTensor]
    left_out: frozenset[str]

    def entry(self) -> dict[str, object]:
        """As a module states file has it: plain values, a digest as text."""
        tables = {
            kind: {name: (*tensor[:4], f"{tensor.digest:016x}") for name, tensor in table.items()}
            for kind, table in (("params", self.params), ("buffers", self.buffers))
        }
        files = [(file.path, file.nbytes, file.digest) for file in self.files]
        return {"version": _VERSIONS[bool(self.buffers)], "files": files, **tables, "left_out": sorted(self.left_out)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are shared."""
        return sum(tensor.place.nbytes for table in (self.params, self.buffers) for tensor in table.values())

    @property
    def nbytes_of_params(self) -> int:
        """Bytes of the frozen parameters."""
        return sum(tensor.place.nbytes for tensor in self.params.values())

    def in_file(self, number: int) -> dict[tuple[str, str], SharedTensor]:
        """The tensors that are in a file, by name and the state key under which they are digested."""
        tables = (FROZEN, self.params), (BUFFER, self.buffers)
        return {(name, key): tensor for key, table in tables for name, tensor in table.items() if tensor.file == number}

    def extent(self, tensor: SharedTensor, tag_dir: FilePath) -> Extent:
        """The bytes of one of the tensors."""
        return Extent(self.files[tensor.file].at(tag_dir), tensor.offset, tensor.place.nbytes, tensor.dtype)

    def check(self, tag_dir: FilePath, *, params: bool) -> None:
        """Raise unless the files are there, and the buffers in them are what was saved; with ``params`` those too.

        Commit records have the digests of frozen parameters, and not those of buffers. Raises MissingFileError,
        CheckpointError, DigestMismatchError.
        """
        check_shared_files(self.files, tag_dir)
        for kind, key, table in (("buffer", BUFFER, self.buffers), ("parameter", FROZEN, self.params)):
            for name, tensor in table.items() if params or key == BUFFER else ():
                path, numel = self.files[tensor.file].at(tag_dir), math.prod(tensor.shape)
                if digest_in_file(path, tensor.dtype, tensor.offset, numel, name=name, key=key) != tensor.digest:
                    raise DigestMismatchError(f"{path}: {kind} {name} is not what was saved. It is damaged.")

    def frozen(
        self, tag_dir: FilePath, at: Callable[[SharedFile], FilePath] | None = None
    ) -> tuple[Layout, TensorExtents]:
        """The frozen parameters as a layout of one rank, and where they are: in files that are ``at`` their places."""
        where = tag_dir / SHARED_KEY
        params = [checked_param(name, tensor.shape, where) for name, tensor in self.params.items()]
        layout = unpacked_layout(checked_params(params, where), 1)
        paths = [at(file) if at is not None else file.at(tag_dir) for file in self.files]
        tensors = [*self.params.values()]
        offset = np.array([t.offset if t.place.nbytes else -1 for t in tensors], dtype=np.int64)
        extents = TensorExtents(
            paths[0] if paths else tag_dir,
            {i: tensor.dtype for i, tensor in enumerate(tensors)},
            offset,
            tuple(paths[tensor.file] for tensor in tensors),
        )
        return layout, extents


def shared_weights_of(root: Mapping[object, object], path: FilePath) -> SharedWeights | None:
    """What the module states file ``path`` says of shared weights; None where it says nothing.

    Raises CheckpointError for an entry that no save has written.
    """
    entry = root.get(SHARED_KEY)
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or entry.get("version") not in _VERSIONS:
        raise CheckpointError(f"{path}: {SHARED_KEY} is {shown(entry)}. The file is damaged, or of a newer version.")
    files, params, buffers, left_out = (entry.get(key) for key in _ENTRIES[1:])
    try:
        if not isinstance(files, (list, tuple)) or len(files) > _MAX_FILES:
            raise ValueError(f"files is {shown(files)}")
        found = tuple(SharedFile(path=where, nbytes=nbytes, digest=digest) for where, nbytes, digest in files)
        tables = [_checked_tensors(table, found) for table in (params, buffers)]
        if not isinstance(left_out, (list, tuple)) or not all(isinstance(name, str) for name in left_out):
            raise ValueError(f"left_out is {shown(left_out)}")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {SHARED_KEY} cannot be understood: {brief(str(error))}. It is damaged."
        ) from None
    return SharedWeights(found, tables[0], tables[1], frozenset(left_out))


def _checked_tensors(table: object, files: tuple[SharedFile, ...]) -> dict[str, SharedTensor]:
    """The rows of a table. Raises TypeError, ValueError."""
    if not isinstance(table, Mapping):
        raise TypeError("a table of tensors is missing")
    found: dict[str, SharedTensor] = {}
    for name, row in table.items():
        file, offset, dtype, shape, digest = row
        if (
            not isinstance(name, str)
            or type(file) is not int
            or not 0 <= file < len(files)
            or not isinstance(dtype, str)
            or dtype not in DTYPE_NAMES
            or not isinstance(shape, (tuple, list))
            or len(shape) > _MAX_DIMENSIONS
            or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
            or type(offset) is not int
        ):
            raise ValueError(f"{shown(name)} is {shown(row)}")
        tensor = SharedTensor(file, offset, dtype, tuple(shape), digest_from_text(digest))
        if offset <= 0 or offset + tensor.place.nbytes > files[file].nbytes:
            raise ValueError(f"{name} is outside of its file")
        found[name] = tensor
    return found
