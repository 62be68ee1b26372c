"""A plan's segments as rows of bytes: which bytes of which file fill which elements of which target tensor.

Between the plan, which speaks of flat buffers and elements, and the executors, which speak of files and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zeroelastic.core.digest import UInt64Array, combine, stream_seed
from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import Plan, StridedRuns
from zeroelastic.core.slices import numbered
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_exactly
from zeroelastic.torch_file.header import DTYPE_BYTES

_WINDOW_ROWS = 1 << 17
"""The most rows of an extent table: 8 MiB of columns, and less than five times as much while it is made."""

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorExtents:
    """Where one state key of one shard is: byte offset and dtype of each parameter's part, -1 where there is none.

    ``offset`` has shape ``(num_params,)``; part i holds the shard's owned elements of parameter i as one run. All parts
    are in the file ``path``, but where ``param_paths`` gives each parameter one of its own. ``dtype`` is by sub-group.
    """

    path: FilePath
    dtype: Mapping[int, str]
    offset: Int64Array
    param_paths: tuple[FilePath, ...] | None = None

    def among(self, number: Int64Array, num_params: int) -> TensorExtents:
        """Return the places in a layout of more parameters, where parameter i has the number ``number[i]``."""
        if len(number) == num_params:
            return self
        offset = np.full(num_params, -1, dtype=np.int64)
        offset[number] = self.offset
        paths = None
        if self.param_paths is not None:
            by_number = dict(zip(number.tolist(), self.param_paths, strict=True))
            paths = tuple(by_number.get(i, self.path) for i in range(num_params))
        return replace(self, offset=offset, param_paths=paths)


class ExtentsOnDemand(Mapping[int, Mapping[str, TensorExtents]]):
    """The extents of each of ``world_size`` saved ranks by state key, found by ``find`` when they are asked for."""

    def __init__(self, world_size: int, find: Callable[[int], Mapping[str, TensorExtents]]) -> None:
        self._ranks, self._find = range(world_size), find
        self._found: dict[int, Mapping[str, TensorExtents]] = {}

    def __getitem__(self, rank: int) -> Mapping[str, TensorExtents]:
        if rank not in self._found:
            self._found[rank] = self._find(rank)
        return self._found[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def extents_over_ranks(layout: Layout, rank: int, extents: Mapping[str, TensorExtents]) -> Mapping[str, TensorExtents]:
    """The extents of one rank's files, whose parameters are ``layout.on_rank(rank)``, numbered as ``layout`` does."""
    own = layout.numbers_on(rank)
    return {key: places.among(own, layout.num_params) for key, places in extents.items()}


class TensorSlot(NamedTuple):
    """A flat tensor of the plan's target: which state key of which target sub-group, in the dtype that files hold."""

    key: str
    sub_group: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ExtentTable:
    """Segments of several targets in file order.

    Columns of shape ``(num_rows,)``: ``file`` is an index into ``paths``, ``file_offset`` in bytes, ``target`` an
    index into the targets that were asked for, ``target_offset``, ``numel`` and ``start`` (the global position of the
    first element in its parameter) in elements, ``param`` an index into the target layout's parameters.
    """

    paths: tuple[FilePath, ...]
    file: Int64Array
    file_offset: Int64Array
    target: Int64Array
    target_offset: Int64Array
    numel: Int64Array
    itemsize: Int64Array
    param: Int64Array
    start: Int64Array

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.numel)

    @property
    def nbytes(self) -> Int64Array:
        """Bytes of each row: shape ``(num_rows,)``."""
        return self.numel * self.itemsize

    @property
    def _columns(self) -> list[Int64Array]:
        return [getattr(self, field.name) for field in fields(self)[1:]]

    def take(self, index: Int64Array) -> ExtentTable:
        """Some of the rows, in the order given."""
        return ExtentTable(self.paths, *(column[index] for column in self._columns))

    def where(self, chosen: npt.NDArray[np.bool_]) -> ExtentTable:
        """The rows that are chosen."""
        return self if chosen.all() else self.take(np.flatnonzero(chosen))

    def joined(self, other: ExtentTable) -> ExtentTable:
        """The rows of both tables, of the same targets."""
        paths = dict.fromkeys((*self.paths, *other.paths))
        number = {path: i for i, path in enumerate(paths)}
        renumbered = np.array([number[path] for path in other.paths], dtype=np.int64)[other.file]
        theirs = replace(other, file=renumbered)
        columns = zip(self._columns, theirs._columns, strict=True)
        return ExtentTable(tuple(paths), *(np.concatenate(pair) for pair in columns))

    def pieces(self, row: Int64Array, begin: Int64Array, numel: Int64Array) -> ExtentTable:
        """Pieces of rows: piece i is ``numel[i]`` elements of a row, from its element ``begin[i]`` on."""
        whole = self.take(row)
        return replace(
            whole,
            file_offset=whole.file_offset + begin * whole.itemsize,
            target_offset=whole.target_offset + begin,
            numel=numel,
            start=whole.start + begin,
        )


def extent_table(
    plan: Plan, extents: Mapping[int, Mapping[str, TensorExtents]], targets: Sequence[TensorSlot]
) -> ExtentTable:
    """Return the rows that fill every target as ``plan`` says, from ``extents[source rank][key]``, sorted by place.

    Every source rank that the plan names must be among the extents, with every key that a target asks of it. Each run
    of a row of the plan is a row.
    """
    paths: dict[FilePath, int] = {}
    source = plan.src_param
    within = plan.src_offset - plan.src.offset[source]
    by_sub_group = _members(plan.dst_sub_group, plan.dst.num_sub_groups)
    empty = np.empty(0, dtype=np.int64)
    columns, segments = [(empty,) * 8], [empty]
    for t, target in enumerate(targets):
        mine = by_sub_group[target.sub_group]
        segments.append(mine)
        itemsize = DTYPE_BYTES[target.dtype]
        base = np.empty(len(mine), dtype=np.int64)
        file = np.empty(len(mine), dtype=np.int64)
        for rank in np.flatnonzero(np.bincount(plan.src_rank[mine])).tolist():
            here = plan.src_rank[mine] == rank
            piece = extents[rank][target.key]
            base[here] = piece.offset[source[mine][here]]
            file[here] = _files_of(piece, source[mine][here], paths)
        assert (base >= 0).all(), f"{target.key} has no extent for a segment"
        dst_offset, length, param, start = (c[mine] for c in (plan.dst_offset, plan.length, plan.param, plan.start))
        place = file, base + within[mine] * itemsize, np.full_like(mine, t), dst_offset
        columns.append((*place, length, np.full_like(mine, itemsize), param, start))
    rows = ExtentTable(tuple(paths), *map(np.concatenate, zip(*columns, strict=True)))
    order = np.lexsort((rows.file_offset, rows.file))
    rows = rows.take(order)
    if plan.runs is None:
        return rows
    rows = _run_by_run(rows, plan.runs.take(np.concatenate(segments)[order]))
    follows = (rows.file[1:] > rows.file[:-1]) | (rows.file_offset[1:] >= rows.file_offset[:-1])
    return rows if follows.all() else rows.take(np.lexsort((rows.file_offset, rows.file)))


def _run_by_run(rows: ExtentTable, runs: StridedRuns) -> ExtentTable:
    """The rows, each repeated as ``runs`` says."""
    row, run = numbered(np.zeros_like(runs.count), runs.count)
    rows, runs = rows.take(row), runs.take(row)
    return replace(
        rows,
        file_offset=rows.file_offset + run * runs.src_step * rows.itemsize,
        target_offset=rows.target_offset + run * runs.dst_step,
        start=rows.start + run * runs.stride,
    )


def extent_windows(
    plan: Plan, extents: Mapping[int, Mapping[str, TensorExtents]], targets: Sequence[TensorSlot]
) -> Iterator[ExtentTable]:
    """The rows of ``extent_table`` in tables of at most ``_WINDOW_ROWS``, each sorted by place; at least one table.

    A run of the plan becomes a row for each state key, so that a table of a million parameters would take a gigabyte.
    """
    keys = max(1, len({target.key for target in targets}))
    for window in plan.windows(max(1, _WINDOW_ROWS // keys)):
        yield extent_table(window, extents, targets)


def _members(sub_group: Int64Array, count: int) -> list[Int64Array]:
    """The positions of each value below ``count``, ascending."""
    order = np.argsort(sub_group, kind="stable")
    bounds = np.searchsorted(sub_group[order], np.arange(count + 1))
    return [order[begin:end] for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def _files_of(piece: TensorExtents, params: Int64Array, paths: dict[FilePath, int]) -> Int64Array:
    if piece.param_paths is None:
        return np.full(len(params), paths.setdefault(piece.path, len(paths)), dtype=np.int64)
    numbers = [paths.setdefault(piece.param_paths[p], len(paths)) for p in params.tolist()]
    return np.array(numbers, dtype=np.int64)


def stream_seeds(names: Sequence[tuple[str, str]]) -> UInt64Array:
    """The digest seed of each (parameter, state key): shape ``(num_streams,)``, uint64."""
    return np.fromiter((stream_seed(name, key) for name, key in names), dtype=np.uint64, count=len(names))


def digest_in_file(path: FilePath, dtype: str, offset: int, numel: int, *, name: str, key: str, start: int = 0) -> int:
    """The digest of ``numel`` elements of a tensor from element ``start`` on, which are at byte ``offset`` of a file.

    Memory: 4 MiB. Raises as ``read_exactly``.
    """
    itemsize, seed, total = DTYPE_BYTES[dtype], stream_seed(name, key), 0
    for done in range(0, numel * itemsize, _CHUNK_BYTES):
        nbytes = min(_CHUNK_BYTES, numel * itemsize - done)
        data = np.frombuffer(read_exactly(path, offset + done, nbytes), dtype=np.uint8)
        total = combine(total, digest_range(data, itemsize, seed=seed, start=start + done // itemsize))
    return total
