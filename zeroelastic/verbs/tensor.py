"""A tensor of a checkpoint: shape, dtype and places at once, elements when they are asked for, and only those."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint.extents import Destination, extent_table
from zeroelastic.checkpoint.saved_state import SavedPart
from zeroelastic.core.digest import ByteArray
from zeroelastic.core.layout import unpacked_layout
from zeroelastic.core.plan import Plan, make_plan
from zeroelastic.errors import UnsupportedError, UsageError
from zeroelastic.executors.cast import cast_bytes
from zeroelastic.extras import require_torch
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.convert.model_tensors import Buffer, ModelTensor, Place

if TYPE_CHECKING:
    import torch

_PLAN_COLUMNS = ("param", "start", "length", "src_rank", "src_sub_group", "src_offset", "dst_sub_group", "dst_offset")
_IN_NUMPY = re.compile(r"bool|u?int\d+|float(16|32|64)|complex(64|128)")


@dataclass(frozen=True, slots=True, eq=False)
class TensorHandle:
    """One tensor of a checkpoint, or some of its rows. Holds no elements: each call reads those that it returns.

    ``shape`` and ``dtype`` (torch's name, such as ``"bfloat16"``) are those in the files. ``kind`` is "trained" (the
    fp32 master weights), "frozen", "buffer", "state" (of the optimizer) or "client" (in the client state). An index or
    a slice of the first dimension gives the handle of these rows, and reads nothing.

    Example::

        import zeroelastic
        with zeroelastic.open("ckpt") as ck:
            weight = ck["model.norm.weight"]
            print(weight.shape, weight.dtype)     # (24,) float32
            weight[3:7].numpy()                   # reads 16 bytes
            weight.torch()
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    _read: Callable[[int, int], ByteArray] = field(repr=False)  # first element, number of elements -> their bytes
    _start: int = field(default=0, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the files."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> npt.NDArray[Any]:
        """The elements as a new array. numpy has no bfloat16: such a tensor becomes float32, which is exact.

        Raises CheckpointError when a file ended early, SavedAgainError when the checkpoint was saved again meanwhile,
        UnsupportedError for a dtype such as float8, which numpy does not have either: use ``torch``.
        """
        if self.dtype != "bfloat16" and _IN_NUMPY.fullmatch(self.dtype) is None:
            raise UnsupportedError(f"{self.name}: numpy has no {self.dtype}. Use .torch().")
        raw = self._read(self._start, self.numel)
        if self.dtype == "bfloat16":
            wide = np.empty(2 * len(raw), dtype=np.uint8)
            cast_bytes("bfloat16->float32", raw, wide)
            return wide.view(np.float32).reshape(self.shape)
        return raw.view(np.dtype(self.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """The elements as a new CPU tensor, of the same dtype as in the files. Raises as ``numpy``, and
        MissingPackageError where torch is not installed.
        """
        require_torch("torch()")
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.numel:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self._read(self._start, self.numel)).view(dtype).reshape(self.shape)

    def windows(self, nbytes: int = 16 << 20) -> Iterator[ByteArray]:
        """The elements as raw bytes in row-major order, at most ``nbytes`` at a time. Raises as ``numpy``."""
        size = DTYPE_BYTES[self.dtype]
        step = max(1, nbytes // size)
        for at in range(0, self.numel, step):
            yield self._read(self._start + at, min(step, self.numel - at))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """What ``np.asarray`` calls."""
        if copy is False:
            raise UsageError(
                f"{self.name}: its elements are in files; an array of them is always a copy. Leave copy=False out."
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a 0-dim tensor, which has no length")
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> TensorHandle:
        """The handle of one row, or of some that follow each other. Raises IndexError, UsageError."""
        num_rows = len(self)
        row_numel = math.prod(self.shape[1:])
        if isinstance(index, slice):
            start, stop, step = index.indices(num_rows)
            if step != 1:
                raise UsageError(
                    f"{self.name}: a step of {step}; only rows that follow each other are read. Use a step of 1, "
                    "and numpy's slicing afterwards."
                )
            shape: tuple[int, ...] = (max(0, stop - start), *self.shape[1:])
        else:
            start = operator.index(index)
            if not -num_rows <= start < num_rows:
                raise IndexError(f"{self.name}: there is no row {start}; its shape is {self.shape}")
            start, shape = start % num_rows, self.shape[1:]
        return replace(self, shape=shape, _start=self._start + start * row_numel)

    def __iter__(self) -> Iterator[TensorHandle]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A run of a tensor's elements in a file: ``numel`` from element ``start`` on are ``nbytes`` bytes from ``offset``.

    ``rank`` is the saved rank whose file it is.
    """

    rank: int
    path: FilePath
    offset: int
    nbytes: int
    start: int
    numel: int

    @property
    def file(self) -> str:
        """The name of the file in the tag directory."""
        return self.path.name


def places_of(tensor: ModelTensor, parts: Sequence[SavedPart], key: str | None) -> tuple[TensorPlace, ...]:
    """Where a tensor is, in the order of its elements; ``key`` is a state key of its parameter, None: its own."""
    source = tensor.source
    if isinstance(source, Buffer):
        extent = source.extent
        return (TensorPlace(0, extent.path, extent.offset, extent.nbytes, 0, tensor.numel),)
    part = parts[source.part]
    chosen = source.key if key is None else key
    dtype = part.dtypes[source.param][chosen]
    plan = whole_param(part, source)
    found: list[TensorPlace] = []
    for rank in np.unique(plan.src_rank).tolist():
        rows = extent_table(_rows_of(plan, plan.src_rank == rank), part.extents, [Destination(chosen, 0, dtype)])
        columns = (rows.file, rows.file_offset, rows.nbytes, rows.start, rows.numel)
        found += [
            TensorPlace(rank, rows.paths[file], *numbers)
            for file, *numbers in zip(*(column.tolist() for column in columns), strict=True)
        ]
    return tuple(sorted(found, key=lambda place: place.start))


def whole_param(part: SavedPart, place: Place) -> Plan:
    """The plan that fills a buffer with one whole parameter of a part of the saved state."""
    return make_plan(part.layout, unpacked_layout([part.layout.params[place.param]], 1), 0)


def clipped(plan: Plan, start: int, stop: int) -> Plan:
    """A plan for one whole parameter, cut to the elements from ``start`` to ``stop``, which go to offset 0."""
    begin = np.maximum(plan.start, start)
    end = np.minimum(plan.start + plan.length, stop)
    cut = replace(
        plan,
        start=begin,
        length=end - begin,
        src_offset=plan.src_offset + begin - plan.start,
        dst_offset=begin - start,
    )
    return _rows_of(cut, end > begin)


def _rows_of(plan: Plan, keep: npt.NDArray[np.bool_]) -> Plan:
    """Some of the rows of a plan."""
    return replace(plan, **{name: getattr(plan, name)[keep] for name in _PLAN_COLUMNS})
