"""Where the files of a checkpoint have a tensor: rank, file, byte range, and which elements these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint.extents import Destination, extent_table
from zeroelastic.checkpoint.saved_state import SavedPart
from zeroelastic.core.layout import unpacked_layout
from zeroelastic.core.plan import Plan, make_plan
from zeroelastic.io.paths import FilePath
from zeroelastic.verbs.convert.model_tensors import Buffer, ModelTensor, Place

_PLAN_COLUMNS = ("param", "start", "length", "src_rank", "src_sub_group", "src_offset", "dst_sub_group", "dst_offset")


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
