"""``zeroelastic.show``: a tensor of a checkpoint, or many: where it lies, its statistics, its digest, some values."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.core.digest import ByteArray, combine, stream_seed
from zeroelastic.errors import UnknownTensorError, printable, some, with_remedy
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.io.paths import absolute
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.diff.element_stats import CHUNK, bits_of, values_of
from zeroelastic.verbs.options import Advance, Progress, no_progress
from zeroelastic.verbs.report import Format, Number, Part, Report
from zeroelastic.verbs.tensor import TensorHandle
from zeroelastic.verbs.view import CheckpointView
from zeroelastic.verbs.view import open as open_view

WEIGHT = "weight"
"""The kind of the weights themselves: master weights where a parameter is trained."""

_ENDS = 4


class Statistics(Part):
    """Statistics of a tensor's elements, ``min`` to ``norm`` of the finite ones."""

    numel: int
    min: Number | None
    max: Number | None
    mean: Number | None
    std: Number | None
    norm: Number
    zeros: int
    nans: int
    infs: int


class ShownPlace(Part):
    """A run of a tensor's elements in the file of a saved rank: ``bytes`` from ``offset`` on are ``numel`` elements."""

    rank: int
    file: str
    offset: int
    bytes: int
    start: int
    numel: int


class ShownTensor(Part):
    """A tensor, or a scalar of the optimizer's state, which has a ``value`` and neither statistics nor places.

    ``key`` is the state key under which the files have it; ``group`` the number of its optimizer group; ``other_kinds``
    what else there is of the parameter. ``first`` and ``last`` are its first and last elements, in row-major order.
    Digests are 16 hexadecimal digits; ``recorded_digest`` is that of the commit record, None where there is none.
    """

    name: str
    kind: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    group: int | None
    tied_to: str | None
    other_kinds: tuple[str, ...]
    value: Any = None
    statistics: Statistics | None = None
    digest: str | None = None
    recorded_digest: str | None = None
    first: tuple[Number, ...] = ()
    last: tuple[Number, ...] = ()
    places: tuple[ShownPlace, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether its digest is the recorded one, as far as there is one."""
        return self.recorded_digest is None or self.digest == self.recorded_digest


class ShowReport(Report):
    """The tensors that were asked for; ``ok`` where none differs from its recorded digest.

    ``pattern`` is what the caller gave.
    """

    path: str
    tag: str
    format: Format
    world_size: int
    step: int
    pattern: str
    tensors: tuple[ShownTensor, ...]


@with_remedy()
def show(
    src: str | os.PathLike[str],
    param: str,
    *,
    tag: str | None = None,
    kind: str = WEIGHT,
    progress: Progress = no_progress,
) -> ShowReport:
    """Show a tensor of a checkpoint: dtype, shape, files and byte ranges, statistics, digest, first and last values.

    ``param`` is its name, or a glob such as ``"*norm*"`` for many. ``kind`` is "weight", or a key of the optimizer's
    state: "exp_avg", "step". Every byte of the tensor is read once, in windows of 16 MiB. Raises UnknownTensorError,
    with the nearest names, UsageError where there is no checkpoint, CheckpointError, UnreadableError.

    Example::

        import zeroelastic
        (tensor,) = zeroelastic.show("ckpt", "model.norm.weight").tensors
        print(tensor.dtype, tensor.shape, tensor.statistics.mean, [place.file for place in tensor.places])
    """
    with open_view(src, tag=tag) as ck:
        chosen = {name: _of_kind(ck, name, kind) for name in _matching(ck, param, kind)}
        digests = ck.record.params.digests if ck.record is not None else {}
        groups = {name: number for number, group in enumerate(ck.groups) for name in group.params}
        nbytes = sum(found.nbytes for found in chosen.values() if isinstance(found, TensorHandle))
        with progress(f"reading {printable(param)}", nbytes) as advance:
            tensors = tuple(_shown(ck, name, kind, found, groups, digests, advance) for name, found in chosen.items())
        return ShowReport(
            ok=all(tensor.ok for tensor in tensors),
            path=absolute(str(ck.path)),
            tag=ck.tag,
            format="elastic" if ck.format == "elastic" else "rigid",
            world_size=ck.world_size,
            step=ck.step,
            pattern=param,
            tensors=tensors,
        )


def _matching(ck: CheckpointView, pattern: str, kind: str) -> list[str]:
    """The names that are asked for. Raises UnknownTensorError where there is none."""
    if pattern in ck:
        return [pattern]
    if not any(sign in pattern for sign in "*?["):
        raise ck.unknown(pattern)
    found = [name for name in ck if fnmatchcase(name, pattern)]
    having = [name for name in found if kind in _kinds(ck, name)]
    if not found:
        raise UnknownTensorError(
            f"{ck.path}: no tensor matches {printable(pattern)}. Give a glob of its names, such as "
            f"{some(map(printable, ck), 2)}."
        )
    if not having:
        raise _no_kind(ck, found, kind)
    return having


def _kinds(ck: CheckpointView, name: str) -> tuple[str, ...]:
    """What there is of a tensor: its weight, and for a trained parameter the state of the optimizer."""
    return (WEIGHT, *ck.optimizer(name)) if ck[name].kind != "buffer" else (WEIGHT,)


def _of_kind(ck: CheckpointView, name: str, kind: str) -> object:
    """The handle of a tensor, or the value of a scalar."""
    if kind == WEIGHT:
        return ck[name]
    state: Mapping[str, object] = ck.optimizer(name) if ck[name].kind != "buffer" else {}
    if kind not in state:
        raise _no_kind(ck, [name], kind)
    return state[kind]


def _no_kind(ck: CheckpointView, names: list[str], kind: str) -> UnknownTensorError:
    there = dict.fromkeys(key for name in names for key in _kinds(ck, name))
    what = printable(names[0]) if len(names) == 1 else f"what matches ({some(map(printable, names), 2)})"
    return UnknownTensorError(
        f"{ck.path}: there is no {printable(kind)} of {what}. Give one of these kinds: {some(there)}."
    )


def _shown(
    ck: CheckpointView,
    name: str,
    kind: str,
    found: object,
    groups: Mapping[str, int],
    digests: Mapping[tuple[str, str], tuple[str, int]],
    advance: Advance,
) -> ShownTensor:
    saved_as = ck[name].name
    about: dict[str, Any] = {
        "group": groups.get(saved_as),
        "tied_to": None if saved_as == name else saved_as,
        "other_kinds": tuple(key for key in _kinds(ck, name) if key != kind),
    }
    if not isinstance(found, TensorHandle):
        scalar: dict[str, Any] = {"dtype": type(found).__name__, "shape": (), "bytes": 0, "value": found}
        return ShownTensor(name=name, kind=kind, key=kind, **about, **scalar)
    is_param = ck[name].kind != "buffer"
    key = kind if kind != WEIGHT else "buffer" if not is_param else FP32 if ck[name].kind == "trained" else "frozen"
    itemsize = DTYPE_BYTES[found.dtype]
    statistics, digest, start = TensorStats(), 0, 0
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    seed = stream_seed(saved_as, key)
    for data in found.windows():
        statistics += tensor_stats(data, found.dtype)
        if is_param:
            digest = combine(digest, digest_range(data, itemsize, seed=seed, start=start))
        start += len(data) // itemsize
        first = first or tuple(values_of(bits_of(data[: _ENDS * itemsize], found.dtype), found.dtype).tolist())
        last = (*last, *values_of(bits_of(data[-_ENDS * itemsize :], found.dtype), found.dtype).tolist())[-_ENDS:]
        advance(len(data))
    return ShownTensor(
        name=name,
        kind=kind,
        key=key,
        dtype=found.dtype,
        shape=found.shape,
        bytes=found.nbytes,
        **about,
        statistics=Statistics(**{name: getattr(statistics, name) for name in Statistics.model_fields}),
        digest=f"{digest:016x}" if is_param else None,
        recorded_digest=f"{digests[saved_as, key][1]:016x}" if (saved_as, key) in digests else None,
        first=first,
        last=last,
        places=tuple(
            ShownPlace(
                rank=place.rank,
                file=place.file,
                offset=place.offset,
                bytes=place.nbytes,
                start=place.start,
                numel=place.numel,
            )
            for place in ck.places(name, key=None if kind == WEIGHT else kind)
        ),
    )


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of ``numel`` elements; those of disjoint runs are joined with ``+``.

    ``min`` to ``squares`` are of the ``num_finite`` finite elements: 0 where there is none (``min`` and ``max``: None).
    ``deviations`` is the sum of the squared differences to ``centre``, their mean.
    """

    numel: int = 0
    num_finite: int = 0
    min: float | None = None
    max: float | None = None
    centre: float = 0.0
    deviations: float = 0.0
    squares: float = 0.0
    zeros: int = 0
    nans: int = 0
    infs: int = 0

    @property
    def mean(self) -> float | None:
        """The mean of the finite elements."""
        return self.centre if self.num_finite else None

    @property
    def std(self) -> float | None:
        """The standard deviation: of the finite elements, divided by their number (not by one less)."""
        return math.sqrt(self.deviations / self.num_finite) if self.num_finite else None

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.sqrt(self.squares)

    def __add__(self, other: TensorStats) -> TensorStats:
        finite = self.num_finite + other.num_finite
        share = other.num_finite / finite if finite else 0.0
        apart = other.centre - self.centre
        # The pairwise update of Chan, Golub and LeVeque: sums of squares minus squares of sums would lose everything
        # where the mean is large.
        return TensorStats(
            numel=self.numel + other.numel,
            num_finite=finite,
            min=min((x for x in (self.min, other.min) if x is not None), default=None),
            max=max((x for x in (self.max, other.max) if x is not None), default=None),
            centre=self.centre + apart * share,
            deviations=self.deviations + other.deviations + apart * apart * share * self.num_finite,
            squares=self.squares + other.squares,
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
        )


def tensor_stats(data: ByteArray, dtype: str) -> TensorStats:
    """The statistics of elements that are given as raw bytes; ``dtype`` is torch's name."""
    bits = bits_of(data, dtype)
    total = TensorStats()
    for at in range(0, len(bits), CHUNK):
        values = values_of(bits[at : at + CHUNK], dtype)
        finite = values[np.isfinite(values)]
        nan = int(np.count_nonzero(np.isnan(values)))
        centre = float(finite.mean()) if len(finite) else 0.0
        centred = finite - centre
        total += TensorStats(
            numel=len(values),
            num_finite=len(finite),
            min=float(finite.min()) if len(finite) else None,
            max=float(finite.max()) if len(finite) else None,
            centre=centre,
            deviations=float(np.dot(centred, centred)),
            squares=float(np.dot(finite, finite)),
            zeros=len(values) - int(np.count_nonzero(values)),
            nans=nan,
            infs=len(values) - len(finite) - nan,
        )
    return total
