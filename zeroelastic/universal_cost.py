"""What DeepSpeed's Universal Checkpoint would cost for the same checkpoint: an estimate, from DeepSpeed 0.19.8's code.

``ds_to_universal`` reads and writes the state twice, then every rank reads every parameter whole. The model, for a
ZeRO-3 checkpoint without tensor or expert parallelism, is the list of reads and writes in ``_convert`` and ``_load``;
file and line name where each comes from. Memory is what the tensors alone take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeroelastic.forecast import Head, target_layout
from zeroelastic.layout import Int64Array
from zeroelastic.shard import FP32

STATES = (FP32, "exp_avg", "exp_avg_sq")
"""The state keys that are converted (ds_to_universal.py:196, 547) and loaded (stage3.py:3665): those of Adam."""

EXTRACT_WORKERS, MERGE_WORKERS = 4, 2
"""Processes of the conversion unless it is told otherwise (ds_to_universal.py:71)."""

_TORCH_FILE_BYTES = 1540
"""What torch.save writes beside the elements of one tensor (torch 2.13)."""

_TORCH_LOAD_LEAST, _TORCH_LOAD_MOST, _TORCH_LOAD_RATIO = 6_650, 17_800, 2.5
"""What torch.load reads beyond a file's bytes: it looks at the archive's end and its directory more than once, and
Python's buffer is filled anew after each jump. Measured with torch 2.13; a matter of small files."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """``ds_to_universal``, with its default number of workers, all of them on one machine.

    ``temporary_bytes`` is what the fragments in ``tmp/`` take, ``peak_disk_bytes`` the most that the output directory
    holds, ``output_bytes`` what stays. ``files_read`` counts openings. ``memory`` is of all workers together.
    """

    bytes_read: int
    bytes_written: int
    temporary_bytes: int
    peak_disk_bytes: int
    output_bytes: int
    files_read: int
    files_written: int
    memory: int


@dataclass(frozen=True, slots=True)
class UniversalLoad:
    """A load with ``load_universal``: bytes and files opened by each rank, which are the same for all, and in total.

    ``memory`` is of each rank, beyond the state that it fills.
    """

    bytes_read_per_rank: int
    bytes_read: int
    files_per_rank: int
    memory: int


@dataclass(frozen=True, slots=True)
class UniversalCost:
    """Conversion and load, or None each and a ``reason`` where the optimizer is another than Adam.

    ``losses`` says what the resumed run would not have as it was saved.
    """

    reason: str
    losses: tuple[str, ...]
    convert: Conversion | None
    load: UniversalLoad | None

    @property
    def supported(self) -> bool:
        """Whether the checkpoint can be converted at all."""
        return self.convert is not None


def universal_cost(head: Head, world_size: int) -> UniversalCost:
    """What converting this checkpoint and loading it on ``world_size`` ranks would cost."""
    reason = _obstacle(head)
    if reason:
        return UniversalCost(reason, (), None, None)
    layout = head.shard.layout
    sizes = np.stack([layout.numel * head.key_bytes(key) for key in STATES])
    converted, optimizer_state = _convert(head, sizes)
    return UniversalCost("", _losses(head), converted, _load(head, sizes, optimizer_state, world_size))


def _obstacle(head: Head) -> str:
    """Why the conversion or the load would fail, or ""."""
    keys = [set(own) for own in head.shard.tensor_keys]
    if not keys:
        return "there are no trained parameters"
    if any(own == {FP32} for own in keys):
        return "there is no optimizer state to convert: it was saved before the first step, or without state"
    missing = [key for key in STATES if not all(key in own for own in keys)]
    if missing:
        have = ", ".join(key for key in head.state_keys if key != FP32)
        return f"it knows Adam only: {' and '.join(missing)} are not in this checkpoint, which has {have}"
    if "step" not in head.shard.scalars[0]:
        return "it takes the step from the first sub-group, which has none here"
    return ""


def _losses(head: Head) -> tuple[str, ...]:
    lost: list[str] = []
    options = [dict(group.options) for group in head.shard.groups]
    other = [str(g) for g, chosen in enumerate(options) if chosen != options[0]]
    if other:  # stage3.py:3687
        groups = f"group {other[0]}" if len(other) == 1 else f"groups {', '.join(other)}"
        lost.append(f"hyper-parameters of {groups}: every group gets those of group 0")
    if head.frozen is not None:  # engine.py:4660 skips load_module_state_dict
        lost.append("frozen parameters")
    lost.append("buffers, where the model has any")
    more = [key for key in head.state_keys if key not in STATES]
    if more:
        lost.append(f"optimizer state {', '.join(more)}")
    return tuple(lost)


def _file_bytes(payload: Int64Array) -> Int64Array:
    """Size of a file with one tensor."""
    return payload + _TORCH_FILE_BYTES


def _loaded_bytes(size: Int64Array) -> Int64Array:
    """What torch.load reads of files of these sizes: without mmap, all of them."""
    around = np.minimum(
        _TORCH_LOAD_LEAST + _TORCH_LOAD_RATIO * np.maximum(size - _TORCH_FILE_BYTES, 0), _TORCH_LOAD_MOST
    )
    return size + around.astype(np.int64)


def _convert(head: Head, sizes: Int64Array) -> tuple[Conversion, int]:
    """The conversion's cost, and the size of ``optimizer_state.pt``; ``sizes`` are bytes by (state key, parameter)."""
    world_size, layout = head.world_size, head.shard.layout
    optimizer, models = head.optimizer_sizes, head.model_sizes
    # One file for each parameter, state and rank, also where the rank has no elements (ds_to_universal.py:223).
    fragments = fragment_payload = fragment_reads = 0
    itemsize = np.stack([head.key_bytes(key) for key in STATES])
    numels, which = np.unique(layout.numel, return_inverse=True)
    rank = np.arange(world_size, dtype=np.int64)
    for i, numel in enumerate(numels.tolist()):
        part = -(-numel // world_size)
        length = np.minimum((rank + 1) * part, numel) - np.minimum(rank * part, numel)
        widths, counts = np.unique(itemsize[:, which.reshape(-1) == i], return_counts=True)
        for width, count in zip(widths.tolist(), counts.tolist(), strict=True):
            files = _file_bytes(length * width)
            fragment_payload += count * int(files.sum())
            fragment_reads += count * int(_loaded_bytes(files).sum())
            fragments += count * world_size
    merged = _file_bytes(sizes)
    # rank 0's whole state, its parameter groups once more (ds_to_universal.py:1016)
    optimizer_state = int(optimizer[0])
    whole = int(_loaded_bytes(optimizer).sum())
    first = int(_loaded_bytes(optimizer[:1]).sum())
    bytes_read = (
        first  # which stage it is (1073)
        + int(_loaded_bytes(models).sum())  # expert parameters, looked for on every rank (713)
        + 2 * int(_loaded_bytes(models[:1]).sum())  # parameter shapes (967), twice (1296, 1307)
        + whole  # extraction (186)
        + fragment_reads  # merging (270)
        + first  # common state (1017)
        + int(models.sum())  # copied (1368)
    )
    kept = int(merged.sum()) + optimizer_state
    largest = int(sizes.max())
    extracting = min(EXTRACT_WORKERS, world_size) * (int(optimizer.max()) + -(-largest // world_size))
    return (
        Conversion(
            bytes_read=bytes_read,
            bytes_written=fragment_payload + kept + int(models.sum()),
            temporary_bytes=fragment_payload,
            peak_disk_bytes=fragment_payload + kept,
            output_bytes=kept + int(models.sum()),
            files_read=2 + 2 * world_size + 2 + world_size + fragments,
            files_written=fragments + sizes.size + 2 + world_size,
            memory=max(extracting, min(MERGE_WORKERS, layout.num_params) * 2 * largest, int(optimizer[0])),
        ),
        optimizer_state,
    )


def _load(head: Head, sizes: Int64Array, optimizer_state: int, world_size: int) -> UniversalLoad:
    """Every rank reads rank 0's shard, every whole parameter (stage3.py:3660-3682), rank 0's module states twice."""
    model = head.model_sizes[:1]
    per_rank = (
        int(_loaded_bytes(_file_bytes(sizes)).sum())  # stage3.py:3770
        + int(_loaded_bytes(np.array([optimizer_state])).sum())  # stage3.py:3660
        + 2 * int(_loaded_bytes(model).sum())  # state_dict_factory.py:170 and 97
    )
    # Held at once: rank 0's shard, one flat buffer, a parameter and its padded copy, the module states.
    flat = int(target_layout(head.shard, world_size).sub_group_numel.max()) * int(head.key_bytes(FP32).max())
    largest = int(sizes.max())
    return UniversalLoad(
        bytes_read_per_rank=per_rank,
        bytes_read=world_size * per_rank,
        files_per_rank=sizes.size + 1 + 1,
        memory=optimizer_state + flat + 2 * largest + int(model[0]),
    )
