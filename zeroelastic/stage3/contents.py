"""What the live optimizer holds, as digests in its own layout: a load is proved without trusting the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from zeroelastic.digest import ParamContent, ScalarValue, combine, stream_seed
from zeroelastic.executors import digest_range
from zeroelastic.shard import FP32, FROZEN
from zeroelastic.stage3.live import LiveState

_COPY_NUMEL = 1 << 22

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalDigests:
    """The partial digests of what this rank owns, in an order that all ranks share, and the scalars beside them.

    ``streams`` are (parameter, state key); ``dtypes`` and ``partial`` run parallel to it.
    """

    streams: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    partial: tuple[int, ...]
    scalars: Mapping[str, Mapping[str, ScalarValue]]

    def table(self) -> dict[tuple[str, str], int]:
        """The partial digest of each stream."""
        return dict(zip(self.streams, self.partial, strict=True))


@dataclass(frozen=True, slots=True)
class LiveStreams:
    """The tensors that a rank's digests are made of: what it owns of each, padding excluded, in an order all share.

    ``streams`` are (parameter, state key); ``pieces`` (1-D views of live tensors) and ``starts`` (global position of
    the first element) run parallel to it. ``scalars`` are those of each trained parameter.
    """

    streams: tuple[tuple[str, str], ...]
    pieces: tuple[torch.Tensor, ...]
    starts: tuple[int, ...]
    scalars: Mapping[str, Mapping[str, ScalarValue]]

    def digest(self, known: Sequence[int | None] | None = None) -> LocalDigests:
        """Digest every piece but those whose digest is known already. Memory: a few MiB."""
        partial = [
            digest_tensor(piece, name, key, start) if found is None else found
            for (name, key), piece, start, found in zip(
                self.streams, self.pieces, self.starts, known or [None] * len(self.streams), strict=True
            )
        ]
        return LocalDigests(self.streams, tuple(map(_dtype_name, self.pieces)), tuple(partial), self.scalars)


def live_streams(live: LiveState, *, weights_only: bool = False, with_frozen: bool = True) -> LiveStreams:
    """What this rank owns. ``weights_only`` leaves out optimizer state."""
    streams: list[tuple[str, str]] = []
    pieces: list[torch.Tensor] = []
    starts: list[int] = []
    scalars: dict[str, dict[str, ScalarValue]] = {}
    start, length = live.layout.owned(live.rank)
    for i in range(live.layout.num_sub_groups):
        tensors, replicated = ({}, {}) if weights_only else live.split_state(i)
        tensors = {FP32: live.fp32(i), **tensors}
        for p in np.flatnonzero(live.layout.sub_group == i).tolist():
            name = live.layout.params[p].name
            scalars[name] = replicated
            offset = int(live.layout.offset[p])
            for key in sorted(tensors):
                streams.append((name, key))
                pieces.append(tensors[key][offset : offset + int(length[p])])
                starts.append(int(start[p]))
    if with_frozen:
        start, length = live.frozen.owned(live.rank)
        for p, tensor in enumerate(live.frozen_tensors):
            streams.append((live.frozen.params[p].name, FROZEN))
            pieces.append(tensor.view(-1)[: int(length[p])])
            starts.append(int(start[p]))
    return LiveStreams(tuple(streams), tuple(pieces), tuple(starts), scalars)


def local_digests(live: LiveState, *, weights_only: bool = False, with_frozen: bool = True) -> LocalDigests:
    """Digest what this rank owns, padding excluded. ``weights_only`` leaves out optimizer state. Memory: a few MiB."""
    return live_streams(live, weights_only=weights_only, with_frozen=with_frozen).digest()


def whole_contents(
    live: LiveState, local: LocalDigests, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[ParamContent]:
    """Digests and scalars of every parameter over all ranks: the same list everywhere. Collective.

    One int64 all-reduce of one number per tensor, on ``device``, adds the partial digests up, over ``group`` where it
    is not the data parallel group itself that is used. Under tensor parallelism
    the list is of this tensor parallel rank, and the same over its data parallel group.
    """
    table = torch.from_numpy(np.array(local.partial, dtype=np.uint64).view(np.int64)).to(device)
    dist.all_reduce(table, group=group if group is not None else live.optimizer.dp_process_group)
    totals = table.cpu().numpy().view(np.uint64).tolist()
    by_name: dict[str, dict[str, tuple[str, int]]] = {}
    for (name, key), dtype, total in zip(local.streams, local.dtypes, totals, strict=True):
        by_name.setdefault(name, {})[key] = (dtype, total)
    return [
        ParamContent(param, by_name[param.name], local.scalars.get(param.name, {}), live.tp.rank)
        for layout in (live.layout, live.frozen)
        for param in layout.params
        if param.name in by_name
    ]


def of_every_tp_rank(live: LiveState, value: T) -> list[T]:
    """The value of each tensor parallel rank, by rank; the data parallel ranks must have it alike. Collective."""
    if live.tp.size == 1:
        return [value]
    values: list[tuple[int, T] | None] = [None] * live.tp.size
    dist.all_gather_object(values, (live.tp.rank, value), group=live.optimizer.model_parallel_group)
    return [each for _, each in sorted((pair for pair in values if pair is not None), key=lambda pair: pair[0])]


def digest_tensor(piece: torch.Tensor, name: str, key: str, start: int) -> int:
    """Partial digest of a 1-D run of elements of one parameter that begins at global position ``start``."""
    seed = stream_seed(name, key)
    total = 0
    for done in range(0, piece.numel(), _COPY_NUMEL):
        chunk = piece[done : done + _COPY_NUMEL].contiguous().cpu()
        data = chunk.view(torch.uint8).numpy()
        total = combine(total, digest_range(data, chunk.element_size(), seed=seed, start=start + done))
    return total


def differences(
    saved: Collection[ParamContent], live: Collection[ParamContent], *, weights_only: bool
) -> list[tuple[str, str]]:
    """Every tensor and scalar in which two lists of contents differ, as (parameter, state key).

    Scalars are compared as numbers: optimizers differ in what they keep a step as. ``weights_only`` compares master
    weights and frozen parameters alone.
    """
    found: list[tuple[str, str]] = []
    others = {content.param.name: content for content in live}
    for content in saved:
        name, other = content.param.name, others.get(content.param.name)
        if other is None:
            found.append((name, "the parameter itself"))
            continue
        tensors = {k: v for k, v in content.tensors.items() if not weights_only or k in (FP32, FROZEN)}
        scalars = {} if weights_only else content.scalars
        found += [(name, key) for key in sorted(tensors) if other.tensors.get(key) != tensors[key]]
        found += [
            (name, key)
            for key, value in sorted(scalars.items())
            if key not in other.scalars or other.scalars[key].number() != value.number()
        ]
    return found


def with_saved_kinds(live: Collection[ParamContent], saved: Collection[ParamContent]) -> list[ParamContent]:
    """Live contents with scalars written as they were saved, where they are the same number."""
    kept = {content.param.name: content.scalars for content in saved}
    return [
        replace(
            content,
            scalars={
                key: other
                if (other := kept.get(content.param.name, {}).get(key)) and other.number() == value.number()
                else value
                for key, value in content.scalars.items()
            },
        )
        for content in live
    ]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
