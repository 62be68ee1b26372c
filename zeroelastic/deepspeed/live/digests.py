"""Digests of the live optimizer in its own layout, so that a load is verified without trusting its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.core.digest import DigestKey, ParamContent, ScalarValue, UInt64Array, combine, stream_seed
from zeroelastic.core.layout import Int64Array, Layout
from zeroelastic.core.plan import identity_plan
from zeroelastic.core.slices import Slices, first_copies, places_in_slices, strips_of_runs
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.distributed.collective import all_gather_mostly_equal, collective_device, current_group
from zeroelastic.errors import DigestMismatchError, some
from zeroelastic.executors.dispatch import DigestRows, Ranges, sum_segments
from zeroelastic.torch_file.header import DTYPE_BYTES

T = TypeVar("T")

_WINDOW_RUNS = 1 << 16
_DTYPES = tuple(DTYPE_BYTES)


class LocalDigests(NamedTuple):
    """The dtype and partial digest of each tensor that this rank owns, in the same order on all ranks, and scalars."""

    partial: dict[DigestKey, tuple[str, int]]
    scalars: Mapping[str, Mapping[str, ScalarValue]]

    def sums(self) -> dict[DigestKey, int]:
        """The partial digests alone."""
        return {key: digest for key, (_, digest) in self.partial.items()}


class LivePiece(NamedTuple):
    """This rank's part of one strip of a tensor, without padding: a 1-D view, whose first element is at ``start``.

    ``start`` is a position in the flattened whole tensor, ``at`` the one in this rank's slice, the same without slices.
    ``strip`` is where the strip begins in the whole tensor. ``runs`` are there if the view is not one run of it.
    """

    param: str
    key: str
    tensor: torch.Tensor
    start: int
    at: int | None = None
    strip: int = 0
    runs: PieceRuns | None = None

    @property
    def stream(self) -> DigestKey:
        """The tensor and the strip that it is a part of."""
        return DigestKey(self.param, self.key, self.strip)

    @property
    def place(self) -> int:
        """The position of the first element in this rank's slice."""
        return self.start if self.at is None else self.at


@dataclass(frozen=True, slots=True)
class PieceRuns:
    """Runs of a whole tensor in a view: run i is the ``numel[i]`` elements from ``offset[i]`` on, at ``start[i]``."""

    offset: Int64Array
    start: Int64Array
    numel: Int64Array

    @classmethod
    def whole(cls, piece: LivePiece) -> PieceRuns:
        """Return the one run of a piece without runs."""
        return cls(*(np.array([value], dtype=np.int64) for value in (0, piece.start, piece.tensor.numel())))


class CopiesDifferError(DigestMismatchError):
    """Ranks have different copies of the same ``tensors``: (whole tensor, state key)."""

    def __init__(self, tensors: Sequence[tuple[str, str]]) -> None:
        named = some([f"{name}: {key}" for name, key in tensors])
        super().__init__(f"the copies that tensor parallel ranks have of the same values differ: {named}.")
        self.tensors = tuple(tensors)


class ReadDigest(NamedTuple):
    """The partial digest of what was read of one tensor, and where in memory that went.

    The element at position p of the rank's slice went to address ``origin + p * itemsize``, for positions from
    ``begin`` to ``end``. ``origin`` is None if that does not hold for all of them, or is not known.
    """

    digest: int
    origin: int | None
    begin: int
    end: int

    def shows(self, piece: LivePiece) -> bool:
        """Whether everything that was read went to ``piece``, every element to its place.

        A digest that is then right, over all ranks, shows the content of the pieces, because it depends on the position
        of each element: one that was read twice, or not at all, would change it.
        """
        begin, tensor = piece.place, piece.tensor
        origin = tensor.data_ptr() - begin * tensor.element_size()
        fits = begin <= self.begin and self.end <= begin + tensor.numel()
        return self.origin == origin and fits and tensor.is_contiguous()

    def joined(self, other: ReadDigest) -> ReadDigest:
        """Return the digest of both reads together."""
        origin = self.origin if self.origin == other.origin else None
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        return ReadDigest(combine(self.digest, other.digest), origin, begin, end)


@dataclass(frozen=True, slots=True)
class LiveStreams:
    """The pieces that a rank digests, in the same order on all ranks, and the scalars of each trained parameter."""

    pieces: tuple[LivePiece, ...]
    scalars: Mapping[str, Mapping[str, ScalarValue]]

    def digest(self, known: Sequence[int | None] | None = None) -> LocalDigests:
        """Digest every piece whose digest is not known yet. Memory: a few MiB."""
        known = known or [None] * len(self.pieces)
        new = iter(digest_pieces([piece for piece, found in zip(self.pieces, known, strict=True) if found is None]))
        partial = {
            piece.stream: (str(piece.tensor.dtype).removeprefix("torch."), next(new) if found is None else found)
            for piece, found in zip(self.pieces, known, strict=True)
        }
        return LocalDigests(partial, self.scalars)


class OwnPart(NamedTuple):
    """This rank's part of one strip of a parameter: where its buffer has it, and its place in the whole tensor."""

    param: int
    offset: int
    numel: int
    start: int
    at: int
    strip: int = 0
    runs: PieceRuns | None = None

    def piece(self, name: str, key: str, buffer: torch.Tensor) -> LivePiece:
        """Return the part as a piece of a flat buffer."""
        view = buffer[self.offset : self.offset + self.numel]
        return LivePiece(name, key, view, self.start, self.at, self.strip, self.runs)


def own_parts(layout: Layout, rank: int) -> list[OwnPart]:
    """Return this rank's part of each parameter, in the order of the layout; without slices, of every parameter."""
    start, length = layout.owned(rank)
    place, slices = layout.buffer_offset(rank), layout.slices
    if slices is None:
        columns = zip(place.tolist(), length.tolist(), start.tolist(), strict=True)
        return [OwnPart(p, offset, numel, begin, begin) for p, (offset, numel, begin) in enumerate(columns)]
    plan = identity_plan(layout, rank)
    strip = strips_of_runs(slices, plan.param, plan.start)
    at = places_in_slices(slices, strip, plan.start)
    order = np.lexsort((plan.src_offset, strip))
    first = np.flatnonzero(np.append(True, np.diff(strip[order]) != 0)[: len(order)])
    parts: list[OwnPart] = []
    for rows in np.split(order, first[1:]) if len(order) else []:
        row = int(rows[0])
        offset, begin = int(plan.src_offset[row]), int(plan.start[row])
        end = int(plan.src_offset[rows[-1]] + plan.length[rows[-1]])
        runs = None
        if len(rows) > 1:
            runs = PieceRuns(plan.src_offset[rows] - offset, plan.start[rows], plan.length[rows])
        strip_at = int(slices.strips.start[strip[row]])
        parts.append(OwnPart(int(plan.param[row]), offset, end - offset, begin, int(at[row]), strip_at, runs))
    return parts


def live_streams(live: LiveOptimizer, *, weights_only: bool = False, with_frozen: bool = True) -> LiveStreams:
    """Return the pieces that this rank owns. ``weights_only`` leaves out optimizer state."""
    pieces: list[LivePiece] = []
    states = [({}, {}) if weights_only else live.split_state(i) for i in range(live.layout.num_sub_groups)]
    buffers = [{FP32: live.fp32(i), **tensors} for i, (tensors, _) in enumerate(states)]
    sub_group = live.layout.sub_group.tolist()
    for part in sorted(own_parts(live.layout, live.rank), key=lambda part: sub_group[part.param]):
        tensors = buffers[sub_group[part.param]]
        name = live.layout.params[part.param].name
        pieces += [part.piece(name, key, tensors[key]) for key in sorted(tensors)]
    # of the parameters of all ranks, whose buffers of one number have the same scalars
    of = zip(live.whole.params, live.whole.sub_group.tolist(), strict=True)
    scalars = {param.name: states[i][1] for param, i in of}
    return LiveStreams((*pieces, *(_frozen_pieces(live) if with_frozen else ())), scalars)


def _frozen_pieces(live: LiveOptimizer) -> list[LivePiece]:
    return [
        part.piece(live.frozen.params[part.param].name, FROZEN, live.frozen_tensor(part.param).view(-1))
        for part in own_parts(live.frozen, live.rank)
    ]


def frozen_digests(live: LiveOptimizer) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Return the shape, dtype and digest of each frozen parameter over all ranks, by name. Collective.

    Raises CopiesDifferError as ``whole_contents``.
    """
    local = LiveStreams(tuple(_frozen_pieces(live)), {}).digest()
    totals = reduce_digests(live, local.partial)
    shapes = {tensor.name: tensor.shape for tensor in live.whole_frozen.whole_tensors}
    return {name: (shapes[name], *content) for (name, _), content in totals.items()}


def local_digests(
    live: LiveOptimizer,
    *,
    weights_only: bool = False,
    with_frozen: bool = True,
    read: Mapping[DigestKey, ReadDigest] | None = None,
) -> LocalDigests:
    """Digest what this rank owns, padding excluded. ``weights_only`` leaves out optimizer state.

    The digest of what was ``read`` is taken where it went to its place. Memory: a few MiB.
    """
    streams = live_streams(live, weights_only=weights_only, with_frozen=with_frozen)
    return streams.digest(known_digests(streams.pieces, read or {}))


def known_digests(pieces: Sequence[LivePiece], read: Mapping[DigestKey, ReadDigest]) -> list[int | None]:
    """Return the digest of each piece that the reads show, 0 of one without elements, None for the others."""

    def known(piece: LivePiece) -> int | None:
        if not piece.tensor.numel():
            return 0
        found = read.get(piece.stream)
        return found.digest if found is not None and found.shows(piece) else None

    return [known(piece) for piece in pieces]


def whole_contents(live: LiveOptimizer, local: LocalDigests) -> list[ParamContent]:
    """Return digests and scalars of every parameter over all ranks: the same list everywhere. Collective.

    Where tensor parallelism is opaque the list is of this tensor parallel rank, and the same over its data parallel
    group. Raises CopiesDifferError where copies of the same values differ.
    """
    by_name: dict[str, dict[str, tuple[str, int]]] = {}
    for (name, key), content in reduce_digests(live, local.partial).items():
        by_name.setdefault(name, {})[key] = content
    return [
        ParamContent(tensor, by_name[tensor.name], local.scalars.get(tensor.name, {}), live.tp.rank)
        for layout in (live.whole, live.whole_frozen)
        for tensor in layout.whole_tensors
        if tensor.name in by_name
    ]


def reduce_digests(
    live: LiveOptimizer, partial: Mapping[DigestKey, tuple[str, int]]
) -> dict[tuple[str, str], tuple[str, int]]:
    """Return the dtype and digest of each (whole tensor, state key), of partial digests over all ranks. Collective.

    Without slices all ranks have the same streams in the same order; with them, each has its own. A strip that several
    ranks have copies of counts once. Raises CopiesDifferError on all ranks where copies differ.
    """
    group = current_group() or live.process_group
    if live.whole.slices is None:
        totals = sum_over_ranks([digest for _, digest in partial.values()], group)
        return {
            (stream.param, stream.key): (dtype, total)
            for (stream, (dtype, _)), total in zip(partial.items(), totals, strict=True)
        }
    layouts = live.whole, live.whole_frozen
    names = {tensor.name for tensor in live.whole_frozen.whole_tensors}
    own = sorted({(int(stream.param in names), stream.key) for stream in partial})
    keys = sorted({key for theirs in all_gather_mostly_equal(own) for key in theirs})
    found: dict[tuple[str, str], tuple[str, int]] = {}
    differing: list[tuple[str, str]] = []
    for is_frozen, layout in enumerate(layouts):
        chosen = [key for of_frozen, key in keys if of_frozen == is_frozen]
        if not chosen or layout.slices is None:
            continue
        numbers, copy_of = _strip_numbers(layout.slices, live.rank), first_copies(layout.slices)
        column = {key: i for i, key in enumerate(chosen)}
        # of each strip and key: the digest, and the number of its dtype from 1 on, 0 where there is none
        table = np.zeros((2, len(layout.slices.strips), len(chosen)), dtype=np.uint64)
        for stream, (dtype, digest) in partial.items():
            if (stream.param in names) == is_frozen:
                strip, key_number = numbers[stream.param, stream.start], column[stream.key]
                table[:, strip, key_number] = digest, 1 + _DTYPES.index(dtype)
        digests = np.array(sum_over_ranks(table[0].ravel(), group), dtype=np.uint64)
        digests = digests.reshape(table[0].shape)
        kinds = _reduced(table[1], dist.ReduceOp.MAX, group)
        of = [layout.tensors[p].name for p in layout.slices.strips.param.tolist()]
        for strip, key_number in np.argwhere(kinds > 0).tolist():
            tensor = of[strip], chosen[key_number]
            first, kind, digest = int(copy_of[strip]), int(kinds[strip, key_number]), int(digests[strip, key_number])
            dtype, total = found.get(tensor, (_DTYPES[kind - 1], 0))
            if first == strip:
                found[tensor] = dtype, combine(total, digest)
            if dtype != _DTYPES[kind - 1] or digest != int(digests[first, key_number]):
                differing.append(tensor)
    if differing:
        raise CopiesDifferError(tuple(dict.fromkeys(differing)))
    return found


def _strip_numbers(slices: Slices, rank: int) -> dict[tuple[str, int], int]:
    """Return the number of each strip that a rank has, by the name of its tensor and its place in that."""
    own = np.flatnonzero(slices.has(rank)[slices.strips.param])
    places = zip(slices.strips.param[own].tolist(), slices.strips.start[own].tolist(), strict=True)
    return {(slices.tensors[p].name, start): n for (p, start), n in zip(places, own.tolist(), strict=True)}


def sum_over_ranks(partial: Sequence[int] | UInt64Array, group: dist.ProcessGroup | None = None) -> list[int]:
    """Add up partial digests over all ranks of a group: one int64 all-reduce. Collective."""
    totals: list[int] = _reduced(np.array(partial, dtype=np.uint64), dist.ReduceOp.SUM, group).view(np.uint64).tolist()
    return totals


def _reduced(values: UInt64Array, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Int64Array:
    table = torch.from_numpy(values.view(np.int64)).to(collective_device(group))
    dist.all_reduce(table, op=op, group=group)
    reduced: Int64Array = table.cpu().numpy()
    return reduced


def copies_that_differ(live: LiveOptimizer) -> tuple[tuple[str, str], ...]:
    """Return the (whole tensor, state key) of which tensor parallel ranks have different copies. Collective.

    Only copied tensors are digested: with few exceptions norms and some biases.
    """
    copied: set[tuple[str, int]] = set()
    for layout in (live.whole, live.whole_frozen):
        if layout.slices is not None:
            strips, first = layout.slices.strips, first_copies(layout.slices)
            of_copies = np.flatnonzero(np.bincount(first, minlength=len(strips))[first] > 1)
            copied |= {(layout.tensors[strips.param[i]].name, int(strips.start[i])) for i in of_copies.tolist()}
    streams = live_streams(live)
    pieces = tuple(piece for piece in streams.pieces if (piece.param, piece.strip) in copied)
    try:
        reduce_digests(live, LiveStreams(pieces, {}).digest().partial)
    except CopiesDifferError as error:
        return error.tensors
    return ()


def gather_over_tp(live: LiveOptimizer, value: T) -> list[T]:
    """Return the value of each tensor parallel rank; all data parallel ranks must have the same. Collective."""
    if live.tp.size == 1:
        return [value]
    values: list[tuple[int, T] | None] = [None] * live.tp.size
    dist.all_gather_object(values, (live.tp.rank, value), group=live.tp_group)
    return [each for _, each in sorted((pair for pair in values if pair is not None), key=lambda pair: pair[0])]


def digest_pieces(pieces: Sequence[LivePiece]) -> list[int]:
    """Return the partial digest of each piece, made where it is, in few calls per device. Memory: some MiB."""
    found = [0] * len(pieces)
    for device in {piece.tensor.device for piece in pieces}:
        there = [i for i, piece in enumerate(pieces) if piece.tensor.device == device]
        for window in _windows(pieces, there):
            for i, total in zip(window, _digests([pieces[i] for i in window]), strict=True):
                found[i] = total
    return found


def _windows(pieces: Sequence[LivePiece], chosen: Sequence[int]) -> Iterator[list[int]]:
    """Group pieces that are neighbours: at most ``_WINDOW_RUNS`` runs together, or one piece that has more."""
    window: list[int] = []
    count = 0
    for i in chosen:
        runs = pieces[i].runs
        size = 1 if runs is None else len(runs.numel)
        if window and count + size > _WINDOW_RUNS:
            yield window
            window, count = [], 0
        window.append(i)
        count += size
    if window:
        yield window


def _digests(pieces: Sequence[LivePiece]) -> list[int]:
    """Return the partial digests of pieces on one device."""
    tensors = [piece.tensor.contiguous() for piece in pieces]
    itemsize = np.array([tensor.element_size() for tensor in tensors], dtype=np.int64)
    runs = [piece.runs or PieceRuns.whole(piece) for piece in pieces]
    number = np.repeat(np.arange(len(pieces), dtype=np.int64), [len(each.numel) for each in runs])
    offset, start, numel = (
        np.concatenate([getattr(each, name) for each in runs]) for name in ("offset", "start", "numel")
    )
    totals = sum_segments(
        Ranges(number, offset * itemsize[number], numel * itemsize[number]),
        tensors,
        digest=DigestRows(
            seeds=np.array([stream_seed(piece.param, piece.key) for piece in pieces], dtype=np.uint64),
            stream=number,
            start=start,
            itemsize=itemsize[number],
        ),
    )
    assert totals is not None
    sums: list[int] = totals.tolist()
    return sums
