"""The layout of one rank's optimizer file: how its flat buffers are cut, and the table of it in elastic files.

The table ``zeroelastic`` (docs/concepts/format.md) has the parameters by sub-group with the range of each that the rank
owns, the optimizer groups by the names of their parameters, and the save, rank and world size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zeroelastic.checkpoint.optimizer_file import (
    OptimizerHeader,
    OptionValue,
    ParamGroup,
    checked_params,
    checked_table,
    damaged,
    read_group,
    read_option,
)
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.layout import Int64Array, Layout, Param, layout_from_sub_groups, with_slices
from zeroelastic.core.slices import RankSet
from zeroelastic.errors import CheckpointError, NewerFormatError, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import Extent, TensorRef, TorchFile

ELASTIC_VERSION = 1

SAME_ON_ALL_RANKS = ("optimizer", "grad_scaler")
"""Entries of the table that are the same in every file of a save, at every world size."""

_GRAD_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
"""The entries of the state of torch's GradScaler."""


class RankSlices(NamedTuple):
    """Which slices a rank's files have to hold.

    ``rank`` is counted over all ranks, ``layout`` is what the checkpoint's maps say that it has, and ``names`` has
    the name of a whole tensor by the name in the files, where they differ.
    """

    topology: Topology
    rank: int
    layout: Layout
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BufferCut:
    """How many ranks there are, which of them a file is of, and the ranks that share each flat buffer.

    Without ``num_parts`` all ranks share all.
    """

    world_size: int
    rank: int
    num_parts: tuple[int, ...] | None = None
    ranks: tuple[RankSet, ...] | None = None

    def layout(
        self, buffers: Sequence[Sequence[Param]], path: FilePath, family: Callable[..., Layout] = layout_from_sub_groups
    ) -> Layout:
        """The layout of the parameters of each flat buffer, with the ranks. Raises CheckpointError."""
        parts = self.parts(len(buffers), path)
        checked_params([param for buffer in buffers for param in buffer], path)
        try:
            layout = family(buffers, self.world_size, num_parts=parts)
        except (ValueError, OverflowError) as error:
            raise CheckpointError(f"{path}: {error}. The file is damaged.") from None
        return layout if self.ranks is None else with_slices(layout, self.ranks)

    def parts(self, num_buffers: int, path: FilePath) -> tuple[int, ...]:
        """The ranks that share each flat buffer. Raises CheckpointError where the file has not as many buffers."""
        parts = (self.world_size,) * num_buffers if self.num_parts is None else self.num_parts
        if len(parts) != num_buffers:
            raise damaged(path, f"states how many ranks share {len(parts)} flat buffers, and has {num_buffers}")
        return parts


def of_whole_tensors(shard: OptimizerHeader, slices: RankSlices) -> OptimizerHeader:
    """A shard with the layout and the names that the checkpoint's maps give it.

    Raises CheckpointError where the file has other slices.
    """
    own, layout, names = shard.layout, slices.layout, slices.names
    params = [Param(names.get(param.name, param.name), param.shape) for param in own.params]
    same = params == [*layout.params] and own.num_sub_groups == layout.num_sub_groups
    if not same or not all(
        np.array_equal(getattr(own, column), getattr(layout, column))
        for column in ("sub_group", "origin", "part", "offset")
    ):
        raise CheckpointError(
            f"{shard.path}: has other slices of tensors than the maps in the model states files give to rank "
            f"{slices.rank}. Files of two saves are mixed in this directory."
        )
    groups = [replace(group, params=tuple(names.get(name, name) for name in group.params)) for group in shard.groups]
    return replace(shard, layout=layout, groups=tuple(groups))


def elastic_table(
    layout: Layout,
    rank: int,
    *,
    save_id: str,
    train_batch_size: int | None,
    rest: Mapping[str, object],
    topology: Topology | None = None,
) -> dict[str, object]:
    """The table of one rank of ``layout``, whose ranks are all data parallel unless a ``topology`` is given.

    ``rest`` are the entries after the sub-groups, in the order in which they are written: ``param_groups``,
    ``optimizer``, ``grad_scaler``, ``tp_rank`` and ``tp_size``, ``digests``.
    """
    topology = topology or Topology(layout.world_size)
    start, length = layout.owned(rank)
    members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]
    return {
        "format_version": ELASTIC_VERSION,
        "save_id": save_id,
        "world_size": topology.data_size,
        "rank": topology.place(rank)[0],
        "train_batch_size": train_batch_size,
        "sub_groups": [
            {
                "names": [layout.params[p].name for p in own],
                "shapes": [layout.params[p].shape for p in own],
                "offsets": [int(start[p]) for p in own],
                "numels": [int(length[p]) for p in own],
            }
            for own in members
        ],
        **rest,
    }


@dataclass(frozen=True, slots=True)
class ElasticTable:
    """The table of a file: ``params`` are the parameters by sub-group, other fields those of ``OptimizerHeader``."""

    file: TorchFile
    params: list[list[Param]]
    groups: tuple[ParamGroup, ...]
    save_id: str
    train_batch_size: int | None
    optimizer: str | None
    grad_scaler: Mapping[str, OptionValue] | None
    _sub_groups: Sequence[Mapping[str, object]]
    _digests: object

    def check_owned(self, layout: Layout, rank: int) -> None:
        """Raise CheckpointError where other ranges are recorded than ``layout``, made of it, gives the rank."""
        start, length = layout.owned(rank)
        for i, columns in enumerate(self._sub_groups):
            members = layout.sub_group == i
            for key, owned in (("offsets", start[members]), ("numels", length[members])):
                values = columns.get(key)
                if not isinstance(values, list) or len(values) != len(owned):
                    problem = f"sub-group {i} of its zeroelastic table has no {key} for each parameter"
                    raise damaged(self.file.path, problem)
                if values != owned.tolist():
                    problem = f"records other owned ranges than rank {rank} of {layout.world_size} has"
                    raise damaged(self.file.path, problem)

    def digests(self, layout: Layout) -> Extent | None:
        """Where the file has a digest for each parameter; None where it has none. Raises CheckpointError."""
        ref = self._digests
        if ref is None:
            return None
        if not isinstance(ref, TensorRef) or ref.dtype != "int64" or ref.shape != (layout.num_params,):
            problem = f"has digests that are not one int64 for each of {layout.num_params} parameters"
            raise damaged(self.file.path, problem)
        return self.file.extent(ref)


def read_elastic_table(file: TorchFile, table: object, *, rank: int, world_size: int, tp_rank: int) -> ElasticTable:
    """Read the table in a file of a data parallel rank of ``world_size``. Raises CheckpointError, NewerFormatError."""
    if not isinstance(table, dict):
        raise damaged(file.path, "has base_optimizer_state but no zeroelastic table")
    version = table.get("format_version")
    if type(version) is not int or version < 1:
        raise damaged(file.path, f"has elastic format version {shown(version)}")
    if version > ELASTIC_VERSION:
        raise NewerFormatError(
            f"{file.path}: elastic format version {version} is newer than {ELASTIC_VERSION}. Upgrade zeroelastic to "
            "load it."
        )
    if table.get("rank") != rank or table.get("world_size") != world_size:
        raise CheckpointError(
            f"{file.path}: was written as rank {shown(table.get('rank'))} of {shown(table.get('world_size'))}; its "
            f"name says rank {rank} of {world_size}. The file is in the wrong place."
        )
    if (found := table.get("tp_rank", 0)) != tp_rank:
        raise CheckpointError(
            f"{file.path}: was written as tensor parallel rank {shown(found)}; its name says rank "
            f"{tp_rank}. The file is in the wrong place."
        )
    save_id, batch, optimizer = (table.get(key) for key in ("save_id", "train_batch_size", "optimizer"))
    if not isinstance(save_id, str):
        raise damaged(file.path, "has no save id")
    if not isinstance(optimizer, (str, type(None))):
        raise damaged(file.path, f"names an optimizer {shown(optimizer)}")
    params = _params(file, table)
    return ElasticTable(
        file,
        params,
        _groups(file, table.get("param_groups")),
        save_id,
        batch if type(batch) is int else None,
        optimizer,
        _grad_scaler(file, table.get("grad_scaler")),
        table["sub_groups"],
        table.get("digests"),
    )


def _params(file: TorchFile, table: Mapping[str, object]) -> list[list[Param]]:
    tables = table.get("sub_groups")
    if not isinstance(tables, list):
        raise damaged(file.path, "has no sub_groups in its zeroelastic table")
    sub_groups: list[list[Param]] = []
    for i, columns in enumerate(tables):
        names, shapes = (columns.get(key) if isinstance(columns, dict) else None for key in ("names", "shapes"))
        if not isinstance(names, list) or not isinstance(shapes, list) or len(names) != len(shapes):
            raise damaged(file.path, f"sub-group {i} of its zeroelastic table is not a table of names and shapes")
        sub_groups.append(checked_table(names, shapes, file.path))
    return sub_groups


def _groups(file: TorchFile, groups: object) -> tuple[ParamGroup, ...]:
    if not isinstance(groups, list):
        raise damaged(file.path, "has no param_groups in its zeroelastic table")
    found: list[ParamGroup] = []
    for g, group in enumerate(groups):
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise damaged(file.path, f"optimizer group {g} is not a group")
        found.append(read_group(file, group, f"optimizer group {g}", tuple(names)))
    return tuple(found)


def _grad_scaler(file: TorchFile, scaler: object) -> dict[str, OptionValue] | None:
    if scaler is None:
        return None
    if (
        not isinstance(scaler, dict)
        or scaler.keys() != _GRAD_SCALER
        or not all(isinstance(value, (int, float)) for value in scaler.values())
    ):
        raise damaged(file.path, f"has a grad_scaler {shown(scaler)}")
    return {key: read_option(file, value, f"grad_scaler: {key}") for key, value in scaler.items()}


def places_of_lean(
    file: TorchFile, tensors: list[object], owned: Int64Array, where: str, rank: int
) -> tuple[Int64Array, str]:
    """Where the tensors of a sub-group's parameters are, in bytes, and their dtype. ``owned`` are their elements."""
    if len(tensors) != len(owned):
        raise damaged(file.path, f"{where} has {len(tensors)} tensors; the sub-group has {len(owned)} parameters")
    refs: list[TensorRef] = []
    for i, (tensor, numel) in enumerate(zip(tensors, owned.tolist(), strict=True)):
        if not isinstance(tensor, TensorRef):
            raise damaged(file.path, f"{where} holds something that is not a tensor")
        if tensor.shape != (numel,):
            raise damaged(file.path, f"{where}: part {i} has shape {tensor.shape}; rank {rank} owns {numel} elements")
        refs.append(tensor)
    dtypes = {tensor.dtype for tensor in refs}
    if len(dtypes) != 1:
        raise damaged(file.path, f"{where} mixes the dtypes {sorted(dtypes)}")
    return file.ranges(refs)[:, 0], dtypes.pop()
