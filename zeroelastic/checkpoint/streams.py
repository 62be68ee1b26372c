"""The digests of a save that is read as a whole: of each tensor, and of each copy that several ranks have.

Under tensor parallelism ranks have copies of the same elements. They count once, and have to be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.slice_plan import slices_of_layout
from zeroelastic.core.slices import first_copies, strips_of_runs

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class DigestKeys:
    """The streams of the tensors of some parts, in their order, and then the streams of copies.

    A copy is a strip that more than one slice of a tensor has, for one state key. Of shape ``(num_streams,)``:
    ``tensor`` is the number of a stream's tensor; ``group`` numbers what copies there are of the same, -1 for a tensor
    itself; ``numel`` are the elements of a copy; ``part`` and ``slice`` say which parameter of which part's layout has
    it. ``first[part]`` has for each strip of a part its stream of the first state key, -1 for one without copies.
    """

    num_tensors: int
    tensor: Int64Array
    group: Int64Array
    numel: Int64Array
    part: Int64Array
    slice: Int64Array
    first: tuple[Int64Array, ...]

    @property
    def num_copies(self) -> int:
        """How many of the streams are copies."""
        return len(self.tensor) - self.num_tensors

    def of_rows(self, parts: Sequence[TensorSet], number: int, rows: ExtentTable, tensor: Int64Array) -> Int64Array:
        """The stream of each row of ``parts[number].rank_rows``, which are of these tensors of all parts."""
        first = self.first[number]
        if not len(first):  # there are no copies
            return tensor
        stream = first[strips_of_runs(slices_of_layout(parts[number].layout), rows.param, rows.start)]
        key = tensor - self.tensor[stream]
        return np.where(stream < 0, tensor, stream + key)


def streams_of(parts: Sequence[TensorSet]) -> DigestKeys:
    """The streams of these parts."""
    num_tensors = sum(len(dtypes) for part in parts for dtypes in part.dtypes)
    columns: list[npt.NDArray[np.int64]] = []
    firsts: list[Int64Array] = []
    num_streams, num_groups, base = num_tensors, 0, 0
    for number, part in enumerate(parts):
        keys = np.array([len(dtypes) for dtypes in part.dtypes], dtype=np.int64)
        begins, slices = base + np.cumsum(keys) - keys, part.layout.slices
        base += int(keys.sum())
        if slices is None:
            firsts.append(_NONE)
            continue
        strips, same = slices.strips, first_copies(slices)
        copied = np.flatnonzero(np.bincount(same, minlength=len(strips))[same] > 1)
        of = part.numbers()[strips.param[copied]]
        # A stream for each state key of each copied strip; those of equal copies and keys are a group.
        row = np.repeat(np.arange(len(copied)), keys[of])
        at = np.cumsum(keys[of]) - keys[of]
        key = np.arange(len(row)) - at[row]
        group_of, groups = at[np.searchsorted(copied, same[copied])][row] + key, len(row)
        first = np.full(len(strips), -1, dtype=np.int64)
        first[copied] = num_streams + at
        columns.append(
            np.stack(
                (
                    begins[of][row] + key,
                    num_groups + group_of,
                    (strips.numel * strips.num_runs)[copied][row],
                    np.full_like(row, number),
                    strips.param[copied][row],
                )
            )
        )
        firsts.append(first)
        num_streams, num_groups = num_streams + groups, num_groups + groups
    own = np.arange(num_tensors, dtype=np.int64)
    unknown = np.full_like(own, -1)
    columns.insert(0, np.stack((own, unknown, np.zeros_like(own), unknown, unknown)))
    tensor, group, numel, of_part, of_param = np.concatenate(columns, axis=1)
    return DigestKeys(num_tensors, tensor, group, numel, of_part, of_param, tuple(firsts))


@dataclass(frozen=True, slots=True)
class CopySums:
    """The sums of all streams by tensor, each copied strip taken once.

    ``digests`` and ``covered`` are by tensor. ``differs`` is by stream: a copy that is not what most others are, of
    those that were read as a whole. ``unsure`` are the copies of which as many are like this as like that.
    """

    digests: UInt64Array
    covered: Int64Array
    differs: npt.NDArray[np.bool_]
    unsure: npt.NDArray[np.bool_]


def sum_copies(streams: DigestKeys, digests: UInt64Array, covered: Int64Array, want: Sequence[int | None]) -> CopySums:
    """Add up the streams by tensor. ``want`` is what each tensor's digest should be, where that is known.

    Of copies that differ the one is taken with which a tensor's digest is as it should be, else that of most ranks.
    """
    count = streams.num_tensors
    total, elements = digests[:count].copy(), covered[:count].copy()
    differs, unsure = np.zeros((2, len(streams.tensor)), dtype=bool)
    disputed: dict[int, list[Int64Array]] = {}
    for members in _groups(streams, covered == streams.numel):
        tensor = int(streams.tensor[members[0]])
        elements[tensor] += streams.numel[members[0]]
        if (digests[members] == digests[members[0]]).all():
            np.add.at(total, tensor, digests[members[0]])
        else:
            disputed.setdefault(tensor, []).append(members)
    for tensor, groups in disputed.items():
        expected = want[tensor]
        # Modulo 2 ** 64, as digests are added up.
        rest = None if expected is None else np.uint64((expected - int(total[tensor])) % (1 << 64))
        for members in groups:
            values, counts = np.unique(digests[members], return_counts=True)
            confirmed = len(groups) == 1 and rest is not None and rest in values
            chosen = rest if rest is not None and confirmed else values[counts.argmax()]
            np.add.at(total, tensor, chosen)
            differs[members] = digests[members] != chosen
            unsure[members] = not confirmed and (counts == counts.max()).sum() > 1
    return CopySums(total, elements, differs, unsure)


def _groups(streams: DigestKeys, chosen: npt.NDArray[np.bool_]) -> list[Int64Array]:
    """The streams of each group of copies, of those that are chosen."""
    copies = np.flatnonzero(chosen & (streams.group >= 0))
    copies = copies[np.argsort(streams.group[copies], kind="stable")]
    bounds = np.flatnonzero(np.diff(streams.group[copies])) + 1
    return np.split(copies, bounds) if len(copies) else []
