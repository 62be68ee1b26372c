"""The table ``zeroelastic`` of an elastic optimizer file, as it is written and as it is read (docs/concepts/format.md).

It says what the lean tensors beside it are: the parameters by sub-group with the range of each that this rank owns, the
optimizer groups by the names of their parameters, and to which save, rank and world size the file belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zeroelastic.checkpoint.optimizer_file import (
    OptionValue,
    ParamGroup,
    checked_layout,
    checked_table,
    damaged,
    read_options,
)
from zeroelastic.core.layout import Layout, Param
from zeroelastic.errors import CheckpointError, NewerFormatError, shown
from zeroelastic.torch_file.columns import IntColumn
from zeroelastic.torch_file.header import Extent, TensorRef, TorchFile

ELASTIC_VERSION = 1

SAME_ON_ALL_RANKS = ("optimizer", "grad_scaler")
"""Entries of the table that are the same in every file of a save, at every world size."""

GRAD_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
"""What the state of torch's GradScaler holds."""


def elastic_table(
    layout: Layout, rank: int, *, save_id: str, train_batch_size: int | None, rest: Mapping[str, object]
) -> dict[str, object]:
    """The table of one rank of ``layout``.

    ``rest`` are the entries after the sub-groups, in the order in which they are written: ``param_groups``,
    ``optimizer``, ``grad_scaler``, ``tp_rank`` and ``tp_size``, ``digests``.
    """
    start, length = layout.owned(rank)
    members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]
    return {
        "format_version": ELASTIC_VERSION,
        "save_id": save_id,
        "world_size": layout.world_size,
        "rank": rank,
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
    """A table that was read, but for the ranges that the rank owns, which ``check_owned_ranges`` compares.

    ``digests`` is where the file keeps the partial digest of each parameter, where it has them.
    """

    save_id: str
    layout: Layout
    groups: tuple[ParamGroup, ...]
    train_batch_size: int | None
    optimizer: str | None
    grad_scaler: Mapping[str, OptionValue] | None
    digests: Extent | None


def read_elastic_table(file: TorchFile, table: object, *, rank: int, world_size: int, tp_rank: int) -> ElasticTable:
    """Check a table of a file that is named after this rank. Raises CheckpointError, NewerFormatError."""
    if not isinstance(table, dict):
        raise damaged(file.path, "has base_optimizer_state but no zeroelastic table")
    _check_version(file, table.get("format_version"))
    _check_place(file, table, rank, world_size, tp_rank)
    save_id = table.get("save_id")
    if not isinstance(save_id, str):
        raise damaged(file.path, "has no save id")
    layout = checked_layout(_params(file, table), world_size, file.path)
    batch, optimizer = table.get("train_batch_size"), table.get("optimizer")
    if not isinstance(optimizer, (str, type(None))):
        raise damaged(file.path, f"names an optimizer {shown(optimizer)}")
    return ElasticTable(
        save_id=save_id,
        layout=layout,
        groups=_groups(file, table.get("param_groups")),
        train_batch_size=batch if type(batch) is int else None,
        optimizer=optimizer,
        grad_scaler=_grad_scaler(file, table.get("grad_scaler")),
        digests=_digests(file, table.get("digests"), layout),
    )


def _check_version(file: TorchFile, version: object) -> None:
    if type(version) is not int or version < 1:
        raise damaged(file.path, f"has elastic format version {shown(version)}")
    if version > ELASTIC_VERSION:
        raise NewerFormatError(
            f"{file.path}: elastic format version {version} is newer than {ELASTIC_VERSION}. Upgrade zeroelastic to "
            "load it."
        )


def _check_place(file: TorchFile, table: Mapping[str, object], rank: int, world_size: int, tp_rank: int) -> None:
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


def check_owned_ranges(file: TorchFile, table: object, layout: Layout, rank: int) -> None:
    """Raise CheckpointError where a table does not record the ranges that ``layout``, made of it, gives the rank."""
    assert isinstance(table, dict)
    start, length = layout.owned(rank)
    for i, columns in enumerate(table["sub_groups"]):
        members = layout.sub_group == i
        for key, owned in (("offsets", start[members]), ("numels", length[members])):
            values = columns.get(key)
            if not isinstance(values, (list, IntColumn)) or len(values) != len(owned):
                raise damaged(file.path, f"sub-group {i} of its zeroelastic table has no {key} for each parameter")
            if not (values == owned.tolist() if isinstance(values, list) else np.array_equal(values.values, owned)):
                raise damaged(file.path, f"records other owned ranges than rank {rank} of {layout.world_size} has")


def _groups(file: TorchFile, groups: object) -> tuple[ParamGroup, ...]:
    if not isinstance(groups, list):
        raise damaged(file.path, "has no param_groups in its zeroelastic table")
    found: list[ParamGroup] = []
    for g, group in enumerate(groups):
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise damaged(file.path, f"optimizer group {g} is not a group")
        found.append(ParamGroup(read_options(file, group, f"optimizer group {g}"), tuple(names)))
    return tuple(found)


def _grad_scaler(file: TorchFile, scaler: object) -> dict[str, OptionValue] | None:
    if scaler is None:
        return None
    if (
        not isinstance(scaler, dict)
        or scaler.keys() != GRAD_SCALER
        or not all(isinstance(value, (int, float)) for value in scaler.values())
    ):
        raise damaged(file.path, f"has a grad_scaler {shown(scaler)}")
    return read_options(file, scaler, "grad_scaler")


def _digests(file: TorchFile, digests: object, layout: Layout) -> Extent | None:
    if digests is None:
        return None
    if not isinstance(digests, TensorRef) or digests.dtype != "int64" or digests.shape != (layout.num_params,):
        raise damaged(file.path, f"has digests that are not one int64 for each of {layout.num_params} parameters")
    return file.extent(digests)
