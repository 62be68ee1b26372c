"""``zeroelastic.show``: a tensor of a checkpoint, or many: where it lies, its statistics, its digest, some values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.core.digest import combine, stream_seed
from zeroelastic.errors import UnknownTensorError, printable, some, with_remedy
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.io.paths import absolute
from zeroelastic.json_document import document
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.diff.element_stats import bits_of, values_of
from zeroelastic.verbs.options import Advance, Progress, no_progress
from zeroelastic.verbs.places import TensorPlace
from zeroelastic.verbs.tensor import TensorHandle
from zeroelastic.verbs.tensor_stats import TensorStats, tensor_stats
from zeroelastic.verbs.view import CheckpointView
from zeroelastic.verbs.view import open as open_view

WEIGHT = "weight"
"""The kind of the weights themselves: master weights where a parameter is trained."""

_ENDS = 4
_NAMED = 8


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """A tensor, or a scalar of the optimizer's state, which has a ``value`` and neither statistics nor places.

    ``key`` is the state key under which the files have it; ``group`` the number of its optimizer group; ``other_kinds``
    what else there is of the parameter. ``first`` and ``last`` are its first and last elements, in row-major order.
    ``recorded_digest`` is that of the commit record, None where there is none.
    """

    name: str
    kind: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    group: int | None
    tied_to: str | None
    other_kinds: tuple[str, ...]
    places: tuple[TensorPlace, ...] = ()
    statistics: TensorStats | None = None
    digest: int | None = None
    recorded_digest: int | None = None
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    value: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return 0 if self.statistics is None else self.statistics.num * DTYPE_BYTES[self.dtype]

    @property
    def ok(self) -> bool:
        """Whether its digest is the recorded one, as far as there is one."""
        return self.recorded_digest is None or self.digest == self.recorded_digest


@dataclass(frozen=True, slots=True)
class ShowReport:
    """The tensors that were asked for; ``pattern`` is what the caller gave."""

    path: str
    tag: str
    format: str
    world_size: int
    step: int
    pattern: str
    tensors: tuple[ShownTensor, ...]

    @property
    def ok(self) -> bool:
        """Whether no tensor differs from its recorded digest."""
        return all(tensor.ok for tensor in self.tensors)

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic show --json``; docs/reference/cli/show.md has its keys."""
        body = {
            "path": self.path,
            "tag": self.tag,
            "format": self.format,
            "world_size": self.world_size,
            "step": self.step,
            "pattern": self.pattern,
            "tensors": [_tensor_document(tensor) for tensor in self.tensors],
        }
        return document(body, ok=self.ok)


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
        print(tensor.dtype, tensor.shape, tensor.statistics.mean, [place.path for place in tensor.places])
    """
    with open_view(src, tag=tag) as ck:
        chosen = {name: _of_kind(ck, name, kind) for name in _matching(ck, param, kind)}
        known = _Known(
            digests=_recorded_digests(ck.record),
            groups={name: i for i, group in enumerate(ck.groups) for name in group.params},
            tied=ck.tied,
        )
        nbytes = sum(found.nbytes for found in chosen.values() if isinstance(found, TensorHandle))
        with progress(f"reading {printable(param)}", nbytes) as advance:
            tensors = tuple(_shown(ck, name, kind, found, known, advance) for name, found in chosen.items())
        return ShowReport(
            path=absolute(str(ck.path)),
            tag=ck.tag,
            format=ck.format,
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
        f"{ck.path}: there is no {printable(kind)} of {what}. Give one of these kinds: {some(there, _NAMED)}."
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """What is looked up for each tensor: recorded digests by name and state key, groups, names that are tied."""

    digests: Mapping[tuple[str, str], int]
    groups: Mapping[str, int]
    tied: Mapping[str, str]


def _recorded_digests(record: CommitRecord | None) -> dict[tuple[str, str], int]:
    """The digests in the commit record, by parameter and state key."""
    return {
        (name, key): digest
        for group in (record.params.groups if record is not None else ())
        for name, row in zip(group.names, group.digests.tolist(), strict=True)
        for (key, _), digest in zip(group.tensors, row, strict=True)
    }


def _shown(
    ck: CheckpointView,
    name: str,
    kind: str,
    found: object,
    known: _Known,
    advance: Advance,
) -> ShownTensor:
    saved_as = known.tied.get(name, name)
    others = tuple(key for key in _kinds(ck, name) if key != kind)
    group = known.groups.get(saved_as)
    tied_to = None if saved_as == name else saved_as
    if not isinstance(found, TensorHandle):
        return ShownTensor(name, kind, kind, type(found).__name__, (), group, tied_to, others, value=found)
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
        group=group,
        tied_to=tied_to,
        other_kinds=others,
        places=ck.places(name, key=None if kind == WEIGHT else kind),
        statistics=statistics,
        digest=digest if is_param else None,
        recorded_digest=known.digests.get((saved_as, key)),
        first=first,
        last=last,
    )


def _tensor_document(tensor: ShownTensor) -> dict[str, object]:
    stats = tensor.statistics
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "key": tensor.key,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "group": tensor.group,
        "tied_to": tensor.tied_to,
        "other_kinds": list(tensor.other_kinds),
        "value": tensor.value,
        "statistics": None
        if stats is None
        else {
            "numel": stats.num,
            "min": stats.min,
            "max": stats.max,
            "mean": stats.mean if stats.num_finite else None,
            "std": stats.std,
            "norm": stats.norm,
            "zeros": stats.num_zero,
            "nans": stats.num_nan,
            "infs": stats.num_inf,
        },
        "digest": digest_text(tensor.digest),
        "recorded_digest": digest_text(tensor.recorded_digest),
        "first": list(tensor.first),
        "last": list(tensor.last),
        "places": [
            {
                "rank": place.rank,
                "file": place.file,
                "offset": place.offset,
                "bytes": place.nbytes,
                "start": place.start,
                "numel": place.numel,
            }
            for place in tensor.places
        ],
    }


def digest_text(digest: int | None) -> str | None:
    """A digest as the commit record has it: 16 hexadecimal digits."""
    return None if digest is None else f"{digest:016x}"
