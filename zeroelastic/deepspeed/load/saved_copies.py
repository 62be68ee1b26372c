"""Copies that several tensor parallel ranks saved of the same values, compared where no commit record did it.

A load at another tensor parallel size takes one copy of each. Stock DeepSpeed does not compare them, and copies drift
apart where ranks train replicated parameters on different gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch.distributed as dist

from zeroelastic.checkpoint.extents import ExtentTable, TensorExtents, TensorSlot, digest_in_file, extent_windows
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.core.digest import UInt64Array, combine
from zeroelastic.core.layout import Layout
from zeroelastic.core.plan import identity_plan
from zeroelastic.core.slices import Slices, first_copies, strips_of_runs
from zeroelastic.deepspeed.live.digests import sum_over_ranks
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.errors import UnsupportedError, some

_Extents = Callable[[int], Mapping[str, TensorExtents]]


def check_tp_replicas(checkpoint: Checkpoint, *, keys: list[str]) -> None:
    """Raise UnsupportedError where tensor parallel ranks saved different copies of the same values. Collective.

    Some rank that sees its file reads every copy once. ``keys`` are of optimizer state, and the same on all ranks.
    """

    def frozen(rank: int) -> Mapping[str, TensorExtents]:
        return {FROZEN: checkpoint.frozen_extents(rank)}

    parts: list[tuple[Layout, list[str], _Extents]] = [
        (checkpoint.layout, keys, checkpoint.extents),
        (checkpoint.frozen.layout, [FROZEN], frozen),
    ]
    differing: list[str] = []
    num_ranks, here = dist.get_world_size(), dist.get_rank()
    for layout, own, extents in parts:
        if (slices := layout.slices) is None:
            continue
        files = checkpoint.model_files if own == [FROZEN] else checkpoint.optim_files
        ranks = [
            rank
            for rank in range(layout.world_size)
            if checkpoint.inventory.reads_for_all(files[rank].name, shared=rank % num_ranks == here)
        ]
        sums = all_or_raise(partial(_sums, layout, slices, own, extents, ranks))
        totals = np.array(sum_over_ranks(sums.ravel()), dtype=np.uint64)
        totals = totals.reshape(sums.shape)
        first = first_copies(slices)
        wrong = np.argwhere(totals != totals[first])
        tensors, param = layout.tensors, slices.strips.param
        differing += [f"{tensors[int(param[strip])].name}: {own[key]}" for strip, key in wrong.tolist()]
    if differing:
        raise UnsupportedError(
            f"{checkpoint.tag_dir}: tensor parallel ranks saved different copies of the same values: "
            f"{some(list(dict.fromkeys(differing)))}. At another tensor parallel size one of them would be "
            "taken: resume at the one that saved."
        )


def _sums(layout: Layout, slices: Slices, keys: list[str], extents: _Extents, ranks: list[int]) -> UInt64Array:
    """Return the digests of copied strips as far as these saved ranks have them: shape ``(num_strips, num_keys)``."""
    first = first_copies(slices)
    is_copied = np.bincount(first, minlength=len(first))[first] > 1
    sums = np.zeros((len(first), len(keys)), dtype=np.uint64)
    for rank in ranks:
        plan = identity_plan(layout, rank)
        plan = plan.take(np.flatnonzero(is_copied[strips_of_runs(slices, plan.src_param, plan.start)]))
        places = extents(rank)
        there = [key for key in keys if key in places]
        targets = [TensorSlot(key, i, dtype) for key in there for i, dtype in places[key].dtype.items()]
        for rows in extent_windows(plan, {rank: places}, targets):
            strips = strips_of_runs(slices, rows.param, rows.start).tolist()
            found = digest_rows(layout, rows, targets)
            for strip, number, digest in zip(strips, rows.target.tolist(), found, strict=True):
                at = strip, keys.index(targets[number].key)
                sums[at] = combine(int(sums[at]), digest)
    return sums


def digest_rows(layout: Layout, rows: ExtentTable, slots: Sequence[TensorSlot]) -> Iterator[int]:
    """Digest what the files hold of each row of tensors of a ``layout``. Raises as ``digest_in_file``."""
    arrays = (rows.param, rows.target, rows.file, rows.file_offset, rows.numel, rows.start)
    for param, number, file, offset, numel, start in zip(*(column.tolist() for column in arrays), strict=True):
        name, slot = layout.tensors[param].name, slots[number]
        yield digest_in_file(rows.paths[file], slot.dtype, offset, numel, name=name, key=slot.key, start=start)
