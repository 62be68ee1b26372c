"""Digests of the live optimizer in its own layout, so that a load is verified without trusting its plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.core.digest import ParamContent, ScalarValue, combine, stream_seed
from zeroelastic.core.streams import Stream
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.executors.dispatch import DigestRows, Ranges, sum_segments

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalDigests:
    """The partial digests of the tensors that this rank owns, in the same order on all ranks, and the scalars.

    ``dtypes`` and ``partial`` run parallel to ``streams``.
    """

    streams: tuple[Stream, ...]
    dtypes: tuple[str, ...]
    partial: tuple[int, ...]
    scalars: Mapping[str, Mapping[str, ScalarValue]]

    def table(self) -> dict[Stream, int]:
        """The partial digest of each stream."""
        return dict(zip(self.streams, self.partial, strict=True))


class LivePiece(NamedTuple):
    """This rank's part of one tensor without padding: a 1-D view that begins at global position ``start``."""

    param: str
    key: str
    tensor: torch.Tensor
    start: int


class ReadDigest(NamedTuple):
    """The partial digest of what was read of one tensor, and where in memory that went.

    The element at global position p of the tensor went to address ``origin + p * itemsize``, for positions from
    ``begin`` to ``end``. ``origin`` is None if that does not hold for all of them, or is not known.
    """

    digest: int
    origin: int | None
    begin: int
    end: int

    def shows(self, piece: LivePiece) -> bool:
        """Whether all of it went to ``piece``, every element to its place.

        A digest that is then right, over all ranks, shows what the pieces hold, because it depends on the position of
        each element: one that was read twice, or not at all, would change it.
        """
        begin, tensor = piece.start, piece.tensor
        origin = tensor.data_ptr() - begin * tensor.element_size()
        fits = begin <= self.begin and self.end <= begin + tensor.numel()
        return self.origin == origin and fits and tensor.is_contiguous()

    def joined(self, other: ReadDigest) -> ReadDigest:
        """That of what both were read of."""
        origin = self.origin if self.origin == other.origin else None
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        return ReadDigest(combine(self.digest, other.digest), origin, begin, end)


@dataclass(frozen=True, slots=True)
class LiveStreams:
    """What a rank digests, in the same order on all ranks, and the scalars of each trained parameter."""

    pieces: tuple[LivePiece, ...]
    scalars: Mapping[str, Mapping[str, ScalarValue]]

    def digest(self, known: Sequence[int | None] | None = None) -> LocalDigests:
        """Digest every piece whose digest is not known yet. Memory: a few MiB."""
        known = known or [None] * len(self.pieces)
        new = iter(digest_pieces([piece for piece, found in zip(self.pieces, known, strict=True) if found is None]))
        return LocalDigests(
            tuple(Stream(piece.param, piece.key) for piece in self.pieces),
            tuple(_dtype_name(piece.tensor) for piece in self.pieces),
            tuple(next(new) if found is None else found for found in known),
            self.scalars,
        )


def live_streams(live: LiveOptimizer, *, weights_only: bool = False, with_frozen: bool = True) -> LiveStreams:
    """What this rank owns. ``weights_only`` leaves out optimizer state."""
    pieces: list[LivePiece] = []
    scalars: dict[str, dict[str, ScalarValue]] = {}
    start, length = live.layout.owned(live.rank)
    place = live.layout.buffer_offset(live.rank)
    for i in range(live.layout.num_sub_groups):
        tensors, replicated = ({}, {}) if weights_only else live.split_state(i)
        tensors = {FP32: live.fp32(i), **tensors}
        for p in np.flatnonzero(live.layout.sub_group == i).tolist():
            name, offset = live.layout.params[p].name, int(place[p])
            scalars[name] = replicated
            for key in sorted(tensors):
                part = tensors[key][offset : offset + int(length[p])]
                pieces.append(LivePiece(name, key, part, int(start[p])))
    if with_frozen:
        start, length = live.frozen.owned(live.rank)
        for p, param in enumerate(live.frozen.params):
            part = live.frozen_tensor(p).view(-1)[: int(length[p])]
            pieces.append(LivePiece(param.name, FROZEN, part, int(start[p])))
    return LiveStreams(tuple(pieces), scalars)


def local_digests(
    live: LiveOptimizer,
    *,
    weights_only: bool = False,
    with_frozen: bool = True,
    read: Mapping[Stream, ReadDigest] | None = None,
) -> LocalDigests:
    """Digest what this rank owns, padding excluded. ``weights_only`` leaves out optimizer state.

    Where what was ``read`` went to its place, its digest is taken. Memory: a few MiB.
    """
    streams = live_streams(live, weights_only=weights_only, with_frozen=with_frozen)
    return streams.digest(known_digests(streams.pieces, read or {}))


def known_digests(pieces: Sequence[LivePiece], read: Mapping[Stream, ReadDigest]) -> list[int | None]:
    """The digest of each piece that what was read shows, None for the others."""
    found = [read.get(Stream(piece.param, piece.key)) for piece in pieces]
    return [
        each.digest if each is not None and each.shows(piece) else None
        for each, piece in zip(found, pieces, strict=True)
    ]


def whole_contents(
    live: LiveOptimizer, local: LocalDigests, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[ParamContent]:
    """Digests and scalars of every parameter over all ranks: the same list everywhere. Collective.

    ``group`` is the data parallel group by default. Under tensor parallelism the list is of this tensor parallel rank,
    and the same over its data parallel group.
    """
    totals = sum_over_ranks(local.partial, device=device, group=group if group is not None else live.dp_group)
    by_name: dict[str, dict[str, tuple[str, int]]] = {}
    for stream, dtype, total in zip(local.streams, local.dtypes, totals, strict=True):
        by_name.setdefault(stream.param, {})[stream.key] = (dtype, total)
    return [
        ParamContent(param, by_name[param.name], local.scalars.get(param.name, {}), live.tp.rank)
        for layout in (live.layout, live.frozen)
        for param in layout.params
        if param.name in by_name
    ]


def sum_over_ranks(partial: Sequence[int], *, device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Partial digests added up over all ranks: one int64 all-reduce, on ``device``. Collective."""
    table = torch.from_numpy(np.array(partial, dtype=np.uint64).view(np.int64)).to(device)
    dist.all_reduce(table, group=group)
    totals: list[int] = table.cpu().numpy().view(np.uint64).tolist()
    return totals


def gather_over_tp(live: LiveOptimizer, value: T) -> list[T]:
    """The value of each tensor parallel rank, by rank; it must be the same on all data parallel ranks. Collective."""
    if live.tp.size == 1:
        return [value]
    values: list[tuple[int, T] | None] = [None] * live.tp.size
    dist.all_gather_object(values, (live.tp.rank, value), group=live.tp_group)
    return [each for _, each in sorted((pair for pair in values if pair is not None), key=lambda pair: pair[0])]


def digest_pieces(pieces: Sequence[LivePiece]) -> list[int]:
    """The partial digest of each piece, made where it is: one call of the engine for each device. Memory: a few MiB."""
    found = [0] * len(pieces)
    for device in {piece.tensor.device for piece in pieces}:
        there = [i for i, piece in enumerate(pieces) if piece.tensor.device == device]
        tensors = [pieces[i].tensor.contiguous() for i in there]
        number = np.arange(len(there), dtype=np.int64)
        totals = sum_segments(
            Ranges(number, np.zeros_like(number), np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)),
            tensors,
            digest=DigestRows(
                seeds=np.array([stream_seed(pieces[i].param, pieces[i].key) for i in there], dtype=np.uint64),
                stream=number,
                start=np.array([pieces[i].start for i in there], dtype=np.int64),
                itemsize=np.array([tensor.element_size() for tensor in tensors], dtype=np.int64),
            ),
        )
        assert totals is not None
        for i, total in zip(there, totals.tolist(), strict=True):
            found[i] = total
    return found


def differences(
    saved: Collection[ParamContent], live: Collection[ParamContent], *, weights_only: bool
) -> list[tuple[str, str]]:
    """Every tensor and scalar in which two lists of contents differ, as (parameter, state key).

    Scalars are compared as numbers, because optimizers keep a step in different types. ``weights_only`` compares only
    master weights and frozen parameters.
    """
    found: list[tuple[str, str]] = []
    others = {content.param.name: content for content in live}
    wrong_scalars: dict[tuple[int, int], list[str]] = {}  # the parameters of a group share their scalars
    for content in saved:
        name, other = content.param.name, others.get(content.param.name)
        if other is None:
            found.append((name, "the parameter itself"))
            continue
        tensors = {k: v for k, v in content.tensors.items() if not weights_only or k in (FP32, FROZEN)}
        found += [(name, key) for key in sorted(tensors) if other.tensors.get(key) != tensors[key]]
        if weights_only:
            continue
        pair = id(content.scalars), id(other.scalars)
        if pair not in wrong_scalars:
            wrong_scalars[pair] = [
                key
                for key, value in sorted(content.scalars.items())
                if key not in other.scalars or other.scalars[key].number() != value.number()
            ]
        found += [(name, key) for key in wrong_scalars[pair]]
    return found


def with_saved_kinds(live: Collection[ParamContent], saved: Collection[ParamContent]) -> list[ParamContent]:
    """Live contents, with each scalar in the type of the saved one if both are the same number."""
    kept = {content.param.name: content.scalars for content in saved}
    none: Mapping[str, ScalarValue] = {}
    made: dict[tuple[int, int], Mapping[str, ScalarValue]] = {}  # the parameters of a group share their scalars
    found: list[ParamContent] = []
    for content in live:
        others = kept.get(content.param.name, none)
        pair = id(content.scalars), id(others)
        if pair not in made:
            made[pair] = {
                key: others[key] if key in others and others[key].number() == value.number() else value
                for key, value in content.scalars.items()
            }
        found.append(replace(content, scalars=made[pair]))
    return found


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
