"""The chunks of tensors as a layout and as extents, so that plans and executors read them.

A file of DCP is a row of torch.save archives, one for each chunk and each object. An archive is opened in place,
through a window of the file; objects are inert.

FSDP2 cuts dimension 0 as ``torch.chunk`` does: every rank has so many rows, the last ones fewer or none. That is one
range of the flattened tensor, so such tensors are in a plain layout whose ``part`` is a number of whole rows. Chunks of
any other kind, as 2-D meshes and tensor parallelism leave them, are boxes: the layout has slices, and each chunk is
whole on one rank. Source: torch.distributed.tensor.placement_types.Shard._split_tensor (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.extents import ExtentsOnDemand, TensorExtents
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param, unpacked_layout
from zeroelastic.core.slice_plan import check_slices
from zeroelastic.core.slices import RankSet, Strip, slices_of, strips_of_box
from zeroelastic.dcp.metadata import Chunk, ChunkedTensor, StoredBytes
from zeroelastic.errors import CheckpointError, UnsupportedError, brief
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import Blocks, open_blocks
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile, read_torch_file
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


StateKeys = Mapping[str, ChunkedTensor]
"""The tensors of a parameter by state key, all in its shape."""


class _PlacedChunk(NamedTuple):
    """A rank's part of the layout's tensor ``number``: a chunk, and how many elements of it come before the part."""

    number: int
    chunk: Chunk
    skipped: int
    dtype: str
    what: str


def _extents_of_chunks(
    layout: Layout, dtypes: Mapping[str, Mapping[int, str]], places: Mapping[tuple[int, str], list[_PlacedChunk]]
) -> ExtentsOnDemand:
    """By rank and state key where the chunks are. The archives of a rank's chunks are opened when it is asked for."""
    first = next(iter(places.values()))[0].chunk.place.path if places else Path()
    begins: dict[StoredBytes, int] = {}

    def find(rank: int) -> Mapping[str, TensorExtents]:
        with ChunkArchives() as archives:
            return {key: extents(rank, key, archives) for key in dtypes}

    def extents(rank: int, key: str, archives: ChunkArchives) -> TensorExtents:
        offset = np.full(layout.num_params, -1, dtype=np.int64)
        paths = [first] * layout.num_params
        for number, chunk, skipped, dtype, what in places.get((rank, key), ()):
            place = chunk.place
            if place not in begins:
                begins[place] = archives.payload(place, dtype, chunk.shape, what)
            offset[number] = begins[place] + skipped * DTYPE_BYTES[dtype]
            paths[number] = place.path
        return TensorExtents(first, dtypes[key], offset, tuple(paths))

    return ExtentsOnDemand(layout.world_size, find)


class _ParamPiece(NamedTuple):
    """A part of a parameter that is one run of bytes for each state key.

    ``strips`` are what it is of the whole parameter; ``runs`` are by state key the chunk that it is in, and the number
    of elements of the chunk before it.
    """

    shape: tuple[int, ...]
    strips: tuple[Strip, ...]
    runs: Mapping[str, tuple[Chunk, int]]


def tensor_set(
    params: Mapping[str, StateKeys], parts: int, scalars: Mapping[str, Mapping[str, ScalarValue]]
) -> TensorSet:
    """The parameters that are in the chunks of a DCP directory, with their ``scalars`` where they have some.

    ``parts`` is the number of ranks that saved it. A rank of the layout stands for the chunks of one number; every
    tensor has at most as many chunks as there are ranks. Raises CheckpointError, UnsupportedError for a parameter whose
    state is cut in another way than its weight, not along dimension 0.
    """
    firsts = {name: next(iter(keys.values())) for name, keys in params.items()}
    whole = tuple(Param(name, tensor.shape) for name, tensor in firsts.items())
    rows = [_rows_of_chunks(keys) for keys in params.values()]
    if None in rows:
        pieces = [_pieces(name, keys) for name, keys in params.items()]
        layout = _sliced_layout(whole, pieces, parts)
        counts = [len(own) for own in pieces]
        numbers = [[*range(end - count, end)] for end, count in zip(np.cumsum(counts).tolist(), counts, strict=True)]
    else:
        pieces = [_chunks_as_pieces(keys) for keys in params.values()]
        layout = _plain_layout(whole, [part or 0 for part in rows], parts)
        numbers = [[i] * len(own) for i, own in enumerate(pieces)]
    dtypes: dict[str, dict[int, str]] = {}
    places: dict[tuple[int, str], list[_PlacedChunk]] = {}
    for (name, keys), own, its_pieces in zip(params.items(), numbers, pieces, strict=True):
        for key, tensor in keys.items():
            dtypes.setdefault(key, {}).update(dict.fromkeys(layout.sub_group[own].tolist(), tensor.dtype))
        for rank, (number, piece) in enumerate(zip(own, its_pieces, strict=True)):
            for key, (chunk, skipped) in piece.runs.items():
                place = _PlacedChunk(number, chunk, skipped, keys[key].dtype, f"{key} of {brief(name)}")
                places.setdefault((rank, key), []).append(place)
    return TensorSet(
        layout,
        whole,
        tuple({key: tensor.dtype for key, tensor in keys.items()} for keys in params.values()),
        tuple(scalars.get(name, {}) for name in params),
        _extents_of_chunks(layout, dtypes, places),
    )


def _cuts(tensor: ChunkedTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(chunk.begin, chunk.shape) for chunk in tensor.chunks]


def _rows_of_chunks(keys: StateKeys) -> int | None:
    """The elements of each chunk but the last, where all tensors are cut into equal parts of dimension 0; else None."""
    tensor, *others = keys.values()
    if any(_cuts(other) != _cuts(tensor) for other in others):
        return None
    if not tensor.shape or not tensor.numel:
        return tensor.numel
    rows = tensor.chunks[0].shape[0]
    for number, chunk in enumerate(tensor.chunks):
        begin = (number * rows, *(0 for _ in tensor.shape[1:]))
        if chunk.begin != begin or chunk.shape != (min(rows, tensor.shape[0] - begin[0]), *tensor.shape[1:]):
            return None
    return rows * math.prod(tensor.shape[1:])


def _plain_layout(params: Sequence[Param], parts: Sequence[int], world_size: int) -> Layout:
    """The layout in which every rank has so many elements of each parameter, in a buffer for each."""
    part = np.array(parts, dtype=np.int64)
    return replace(unpacked_layout(params, world_size), part=part, sub_group_numel=part)


def _chunks_as_pieces(keys: StateKeys) -> list[_ParamPiece]:
    """The chunks of a parameter all of whose tensors are cut in the same way."""
    tensor = next(iter(keys.values()))
    return [
        _ParamPiece(
            chunk.shape,
            strips_of_box(tensor.shape, [*zip(chunk.begin, chunk.shape, strict=True)]),
            {key: (other.chunks[i], 0) for key, other in keys.items()},
        )
        for i, chunk in enumerate(tensor.chunks)
    ]


def _pieces(name: str, keys: StateKeys) -> list[_ParamPiece]:
    """The pieces of a parameter. Raises UnsupportedError for tensors cut differently into boxes that are no runs."""
    tensor, *others = keys.values()
    try:
        if all(_cuts(other) == _cuts(tensor) for other in others):
            return _chunks_as_pieces(keys)
        runs = {key: sorted(_run(tensor.shape, chunk) for chunk in other.chunks) for key, other in keys.items()}
    except ValueError:
        raise UnsupportedError(
            f"{brief(name)}: the tensors of its optimizer state are cut into other chunks than its weight. Save the "
            "model and the optimizer from one device mesh."
        ) from None
    for own in runs.values():
        if [run.begin for run in own] != [0, *(run.end for run in own[:-1])]:
            raise CheckpointError(f"the chunks of {brief(name)} overlap, or leave a gap. The table is damaged.")
    ends = sorted({run.end for own in runs.values() for run in own})
    found: list[_ParamPiece] = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        within = {key: next(run for run in own if run.begin <= begin < run.end) for key, own in runs.items()}
        places = {key: (run.chunk, begin - run.begin) for key, run in within.items()}
        found.append(_ParamPiece((end - begin,), (Strip(begin, 0, end - begin),), places))
    return found


class _ChunkRange(NamedTuple):
    """A chunk that is one range of the flattened tensor."""

    begin: int
    end: int
    chunk: Chunk


def _run(shape: Sequence[int], chunk: Chunk) -> _ChunkRange:
    """Raises ValueError for a chunk that is no range."""
    strips = strips_of_box(shape, [*zip(chunk.begin, chunk.shape, strict=True)])
    if len(strips) != 1 or strips[0].num_runs != 1:
        raise ValueError("a chunk is not one range")
    return _ChunkRange(strips[0].start, strips[0].start + strips[0].numel, chunk)


def _sliced_layout(params: Sequence[Param], pieces: Sequence[Sequence[_ParamPiece]], world_size: int) -> Layout:
    """The layout whose slices are the pieces, each whole on one rank, in a buffer for each parameter.

    Raises CheckpointError where they overlap.
    """
    listed = [(param, rank, piece) for param, own in zip(params, pieces, strict=True) for rank, piece in enumerate(own)]
    numbered = [Param(f"{number}", piece.shape) for number, (_, _, piece) in enumerate(listed)]
    flat = unpacked_layout(numbered, 1)
    buffer = np.repeat(np.arange(len(params)), [len(own) for own in pieces])
    lengths = np.zeros(len(params), dtype=np.int64)
    np.maximum.at(lengths, buffer, flat.numel)
    layout = replace(
        flat,
        sub_group=buffer,
        sub_group_numel=lengths,
        world_size=max([world_size, *map(len, pieces)]),
        params=tuple(Param(param.name, piece.shape) for param, _, piece in listed),
        slices=slices_of(
            [param for param, _, _ in listed],
            [RankSet(rank, 1, 1) for _, rank, _ in listed],
            [piece.strips for _, _, piece in listed],
        ),
    )
    try:
        check_slices(layout)
    except ValueError as error:
        raise CheckpointError(f"the chunks of a tensor overlap, or leave a gap: {error}.") from None
    return layout
