"""How two checkpoints differ, tensor by tensor, whatever the number of ranks and the format each was saved with.

    found = compare_checkpoints(open_state(open_checkpoint(a)), open_state(open_checkpoint(b)))
    found.equal, found.tensors, found.state

Both sides are read once, side by side, in pieces of bounded size.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zeroelastic.digest import ByteArray
from zeroelastic.element_stats import CHUNK, ElementStats, compare_elements
from zeroelastic.errors import UsageError, brief, shown
from zeroelastic.executors import ReadTable, read_segments
from zeroelastic.layout import Int64Array
from zeroelastic.rows import ByteRows
from zeroelastic.shard import ParamGroup, ScalerState
from zeroelastic.state import SavedPart, SavedState
from zeroelastic.torchfile import DTYPE_BYTES, DType, Stub, TensorRef, TorchFile, read_torch_file

BUFFER = "buffer"
"""The state key of a module's own tensors that are no parameters, which every rank's file has whole."""

Progress = Callable[[int], None]

_MOST_VALUES = 100_000
_MOST_LEVELS = 50
_SMALL_BYTES = 1 << 20
_MOST_SHOWN = 120
_OF_THE_SAVE = {
    "buffer_names",
    "dp_world_size",
    "ds_config",
    "ds_version",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "global_steps",
    "module",
    "mp_world_size",
    "optimizer",
    "param_shapes",
    "shared_params",
}
"""Of a model states file: what is compared elsewhere, or says how it was saved."""


class TensorDifference(NamedTuple):
    """One tensor that both sides have. Dtypes, or shapes, differ where left and right are not the same.

    ``stats`` is None where the shapes differ.
    """

    param: str
    key: str
    left_dtype: str
    right_dtype: str
    left_shape: tuple[int, ...]
    right_shape: tuple[int, ...]
    stats: ElementStats | None

    @property
    def equal(self) -> bool:
        """Whether both sides are the same, bit for bit."""
        alike = self.left_dtype == self.right_dtype and self.stats is not None
        return alike and self.stats is not None and self.stats.num_different == 0

    @property
    def norm(self) -> float | None:
        """The Euclidean norm of the difference of the finite elements."""
        return None if self.stats is None else math.sqrt(self.stats.square)

    @property
    def relative_norm(self) -> float | None:
        """``norm`` by the norm of the left side; None where that is 0 and the difference is not."""
        if self.stats is None or self.norm is None:
            return None
        if self.stats.left_square == 0:
            return 0.0 if self.norm == 0 else None
        return self.norm / math.sqrt(self.stats.left_square)


class ValueDifference(NamedTuple):
    """Something beside tensors that the sides have differently: what it is, and how each has it; None: not at all."""

    what: str
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences of two checkpoints.

    ``tensors`` are all that both sides have, equal or not; ``only_left`` and ``only_right`` are (parameter, state key)
    of the others. ``state`` are differences of what a resumed run would feel: hyper-parameters, counters, scalars, loss
    scale, client state. ``saving`` are those of how it was saved, which do not make two checkpoints differ.
    """

    left: str
    right: str
    tensors: tuple[TensorDifference, ...]
    only_left: tuple[tuple[str, str], ...]
    only_right: tuple[tuple[str, str], ...]
    state: tuple[ValueDifference, ...]
    saving: tuple[ValueDifference, ...]
    left_root: str | None
    right_root: str | None
    num_bytes: int

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ."""
        return tuple(tensor for tensor in self.tensors if not tensor.equal)

    @property
    def equal(self) -> bool:
        """Whether a run that resumes from one side is the run that resumes from the other."""
        return not (self.differing or self.only_left or self.only_right or self.state)


class Side(NamedTuple):
    """Where one side has a tensor: the number of its part, and of the parameter in that."""

    part: int
    param: int
    dtype: str
    shape: tuple[int, ...]


def compare_checkpoints(
    left: SavedState,
    right: SavedState,
    *,
    params: str | None = None,
    max_memory: int = 256 << 20,
    progress: Progress | None = None,
) -> Comparison:
    """Compare all tensors and all other state of two checkpoints.

    ``params``, a pattern such as ``"*.bias"``, chooses parameters by name: then nothing but these is compared, their
    scalars included. ``progress`` is given the bytes done since it was last called; there are ``comparison_nbytes``.
    Raises UsageError where the pattern fits no parameter, CheckpointError for files that cannot be read.

    Example::

        compare_checkpoints(before, after, params="*.norm.weight").equal
    """
    sides = _sides(left, params), _sides(right, params)
    if params is not None and not any(sides):
        raise UsageError(f"{params!r} fits no parameter of {left.checkpoint.tag_dir} or {right.checkpoint.tag_dir}.")
    common = [tensor for tensor in sides[0] if tensor in sides[1]]
    alike = [tensor for tensor in common if sides[0][tensor].shape == sides[1][tensor].shape]
    stats = dict.fromkeys(alike, ElementStats())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for batch in _batches(alike, sides, max_memory):
            _compare_batch(batch, (left, right), sides, stats, pool, progress or _ignore)
    found = [
        TensorDifference(
            *tensor,
            sides[0][tensor].dtype,
            sides[1][tensor].dtype,
            sides[0][tensor].shape,
            sides[1][tensor].shape,
            stats.get(tensor),
        )
        for tensor in common
    ]
    only_left = [tensor for tensor in sides[0] if tensor not in sides[1]]
    only_right = [tensor for tensor in sides[1] if tensor not in sides[0]]
    state = _scalar_differences(left, right, params)
    if params is None:
        roots = _model_states(left), _model_states(right)
        buffers = _buffers(roots[0]), _buffers(roots[1])
        found += [_compare_buffer(name, *buffers, *roots) for name in buffers[0] if name in buffers[1]]
        only_left += [(name, BUFFER) for name in buffers[0] if name not in buffers[1]]
        only_right += [(name, BUFFER) for name in buffers[1] if name not in buffers[0]]
        state += _value_differences(_state_values(left, roots[0]), _state_values(right, roots[1]))
    records = left.checkpoint.record, right.checkpoint.record
    return Comparison(
        left=str(left.checkpoint.tag_dir),
        right=str(right.checkpoint.tag_dir),
        tensors=tuple(found),
        only_left=tuple(only_left),
        only_right=tuple(only_right),
        state=tuple(state),
        saving=tuple(_value_differences(_saving_values(left), _saving_values(right))),
        left_root=None if records[0] is None else records[0].content_root,
        right_root=None if records[1] is None else records[1].content_root,
        num_bytes=comparison_nbytes(left, right, params=params),
    )


def comparison_nbytes(left: SavedState, right: SavedState, *, params: str | None = None) -> int:
    """Bytes of both sides that ``compare_checkpoints`` reads."""
    sides = _sides(left, params), _sides(right, params)
    return sum(
        math.prod(side[tensor].shape) * DTYPE_BYTES[side[tensor].dtype]
        for side in sides
        for tensor in side
        if tensor in sides[0] and tensor in sides[1] and sides[0][tensor].shape == sides[1][tensor].shape
    )


_Tensor = tuple[str, str]


def _sides(state: SavedState, params: str | None) -> dict[_Tensor, Side]:
    """Where a checkpoint has each (parameter, state key) that is compared."""
    return {
        (param.name, key): Side(number, p, dtype, param.shape)
        for number, part in enumerate(state.parts)
        for p, param in enumerate(part.layout.params)
        if params is None or fnmatch.fnmatchcase(param.name, params)
        for key, dtype in part.dtypes[p].items()
    }


class _Piece(NamedTuple):
    """Elements of one tensor that are compared in one go: a range of it, and where they are in each side's buffer."""

    tensor: _Tensor
    first: int
    numel: int
    offsets: tuple[int, int]


def _batches(
    tensors: Iterable[_Tensor], sides: tuple[Mapping[_Tensor, Side], Mapping[_Tensor, Side]], max_memory: int
) -> Iterator[list[_Piece]]:
    """Pieces of all tensors in order; those of a batch fit in the memory, and each is of another tensor.

    The tensors of a batch are of the same part on each side.
    """
    room = max(1 << 16, max_memory // 3)  # for both sides; the rest is for tables and for what is computed
    batch: list[_Piece] = []
    used = [0, 0]
    of: tuple[int, int] | None = None
    for tensor in tensors:
        left, right = (side[tensor] for side in sides)
        sizes = DTYPE_BYTES[left.dtype], DTYPE_BYTES[right.dtype]
        if batch and of != (left.part, right.part):
            yield batch
            batch, used = [], [0, 0]
        of = (left.part, right.part)
        first, numel = 0, math.prod(left.shape)
        while first < numel:
            free = (room - sum(used)) // sum(sizes)
            if free < min(numel - first, CHUNK) and batch:
                yield batch
                batch, used = [], [0, 0]
                continue
            count = min(numel - first, max(free, 1))
            batch.append(_Piece(tensor, first, count, (used[0], used[1])))
            used = [-(-(use + count * size) // 8) * 8 for use, size in zip(used, sizes, strict=True)]
            first += count
            if first < numel:
                yield batch
                batch, used = [], [0, 0]
    if batch:
        yield batch


def _compare_batch(
    batch: Sequence[_Piece],
    states: tuple[SavedState, SavedState],
    sides: tuple[Mapping[_Tensor, Side], Mapping[_Tensor, Side]],
    stats: dict[_Tensor, ElementStats],
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    """Add what the pieces of a batch have to the statistics of their tensors."""
    left, right = (
        _read(batch, number, states[number].parts[sides[number][batch[0].tensor].part], sides[number], progress)
        for number in (0, 1)
    )
    jobs = [(piece, at, min(CHUNK * 4, piece.numel - at)) for piece in batch for at in range(0, piece.numel, CHUNK * 4)]

    def compare(job: tuple[_Piece, int, int]) -> ElementStats:
        piece, at, count = job
        dtypes = sides[0][piece.tensor].dtype, sides[1][piece.tensor].dtype
        views = [
            buffer[base + at * DTYPE_BYTES[dtype] : base + (at + count) * DTYPE_BYTES[dtype]]
            for buffer, base, dtype in zip((left, right), piece.offsets, dtypes, strict=True)
        ]
        return compare_elements(views[0], views[1], *dtypes)

    for (piece, _, _), found in zip(jobs, pool.map(compare, jobs), strict=True):
        stats[piece.tensor] += found


def _read(
    batch: Sequence[_Piece], number: int, part: SavedPart, side: Mapping[_Tensor, Side], progress: Progress
) -> ByteArray:
    """The pieces' bytes of one side."""
    params = list(dict.fromkeys(side[piece.tensor].param for piece in batch))
    tensors, rows = part.whole_rows(params, keys={piece.tensor[1] for piece in batch})
    place = {(tensor.param.name, tensor.key): i for i, tensor in enumerate(tensors)}
    first = np.zeros(len(tensors), dtype=np.int64)
    count, offset = np.zeros_like(first), np.zeros_like(first)
    for piece in batch:
        i = place[piece.tensor]
        first[i], count[i], offset[i] = piece.first, piece.numel, piece.offsets[number]
    last = batch[-1]
    nbytes = last.offsets[number] + last.numel * DTYPE_BYTES[side[last.tensor].dtype]
    buffer = np.empty(nbytes, dtype=np.uint8)
    read_segments(_table(rows, first, count, offset), [buffer], progress=progress)
    return buffer


def _table(rows: ByteRows, first: Int64Array, count: Int64Array, offset: Int64Array) -> ReadTable:
    """What to read: of each target ``count`` elements from ``first``, to byte ``offset`` of the buffer."""
    begin = np.maximum(rows.target_offset, first[rows.target])
    end = np.minimum(rows.target_offset + rows.numel, (first + count)[rows.target])
    wanted = np.flatnonzero(end > begin)
    rows, begin, end = rows.take(wanted), begin[wanted], end[wanted]
    return ReadTable(
        paths=rows.paths,
        file=rows.file,
        file_offset=rows.file_offset + (begin - rows.target_offset) * rows.itemsize,
        buffer=np.zeros(len(wanted), dtype=np.int64),
        buffer_offset=offset[rows.target] + (begin - first[rows.target]) * rows.itemsize,
        nbytes=(end - begin) * rows.itemsize,
    )


def _model_states(state: SavedState) -> TorchFile:
    return read_torch_file(state.models[0].path, foreign="inert")


def _buffers(file: TorchFile) -> dict[str, TensorRef]:
    """The tensors of the module that hold something; parameters are empty there under stage 3."""
    root = file.root
    module = root.get("module") if isinstance(root, dict) else None
    if not isinstance(module, dict):
        return {}
    return {str(k): v for k, v in module.items() if isinstance(v, TensorRef) and v.numel and v.is_contiguous}


def _compare_buffer(
    name: str,
    left: Mapping[str, TensorRef],
    right: Mapping[str, TensorRef],
    left_file: TorchFile,
    right_file: TorchFile,
) -> TensorDifference:
    x, y = left[name], right[name]
    stats = None
    if x.shape == y.shape:
        stats = compare_elements(left_file.read(x), right_file.read(y), x.dtype, y.dtype)
    return TensorDifference(name, BUFFER, x.dtype, y.dtype, x.shape, y.shape, stats)


def _scalar_differences(left: SavedState, right: SavedState, params: str | None) -> list[ValueDifference]:
    """Replicated values such as ``step``; what is the same difference for many parameters is said once."""
    tables = [
        {
            (param.name, key): value.canonical()
            for part in state.parts
            for p, param in enumerate(part.layout.params)
            if params is None or fnmatch.fnmatchcase(param.name, params)
            for key, value in part.scalars[p].items()
        }
        for state in (left, right)
    ]
    names = [{param.name for part in state.parts for param in part.layout.params} for state in (left, right)]
    kinds: Counter[tuple[str, str | None, str | None]] = Counter()
    example: dict[tuple[str, str | None, str | None], str] = {}
    for name, key in dict.fromkeys((*tables[0], *tables[1])):
        values = tables[0].get((name, key)), tables[1].get((name, key))
        if values[0] != values[1] and name in names[0] and name in names[1]:
            kind = (key, *values)
            kinds[kind] += 1
            example.setdefault(kind, name)
    return [
        ValueDifference(
            f"{kind[0]} of {example[kind]}" + (f" and {count - 1} more parameters" if count > 1 else ""),
            _shown_scalar(kind[1]),
            _shown_scalar(kind[2]),
        )
        for kind, count in kinds.items()
    ]


def _shown_scalar(text: str | None) -> str | None:
    """A scalar's canonical text for people: floats in decimals, the kind behind it."""
    if text is None:
        return None
    kind, _, value = text.partition(":")
    if "0x" in value:
        value = repr(float.fromhex(value))
    return value if kind.startswith("py") or kind == "none" else f"{value} ({kind})"


def _state_values(state: SavedState, file: TorchFile) -> dict[str, str]:
    """Everything that a resumed run would feel, beside tensors and scalars, as text by what it is."""
    values = {"step": repr(state.models[0].global_steps)}
    for g, group in enumerate(state.head.groups):
        values |= _group_values(g, group)
    values |= _scaler_values(state.head.scaler)
    root = file.root
    if isinstance(root, dict):
        for key, value in root.items():
            if key not in _OF_THE_SAVE:
                for what, text in _flattened(value, brief(str(key)), file):
                    values[what] = text
                    if len(values) >= _MOST_VALUES:
                        return values
    return values


def _group_values(number: int, group: ParamGroup) -> dict[str, str]:
    values = {f"group {number}: {key}": repr(value) for key, value in group.options.items()}
    for name in group.params:
        values[f"group of {name}"] = str(number)
    return values


def _scaler_values(scaler: ScalerState | None) -> dict[str, str]:
    if scaler is None:
        return {}
    values = {f"loss scaler: {key}": _text(value) for key, value in scaler.attributes.items()}
    return {
        "loss scaler": scaler.class_name.rpartition(".")[2],
        "loss scaler: dynamic": repr(scaler.dynamic),
        "loss scaler: overflow": repr(scaler.overflow),
        **values,
    }


def _saving_values(state: SavedState) -> dict[str, str]:
    """How a checkpoint was saved."""
    checkpoint, head = state.checkpoint, state.head
    values = {
        "world size": str(checkpoint.world_size),
        "format": head.format,
        "sub-groups": str(head.layout.num_sub_groups),
        "commit record": "yes" if checkpoint.record is not None else "no",
    }
    if head.save_id is not None:
        values["save id"] = head.save_id
    batch = head.ds_config.get("train_batch_size")
    if isinstance(batch, int):
        values["global batch"] = str(batch)
    if checkpoint.record is not None:
        for name, version in checkpoint.record.versions.model_dump().items():
            values[f"version of {name}"] = str(version)
    return values


def _flattened(value: object, what: str, file: TorchFile, levels: int = _MOST_LEVELS) -> Iterator[tuple[str, str]]:
    """The leaves of containers as (what, text); what holds itself is not followed for ever."""
    if levels == 0:
        yield what, "nested deeper than is looked at"
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flattened(item, f"{what}.{brief(key) if type(key) is str else shown(key)}", file, levels - 1)
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from _flattened(item, f"{what}[{i}]", file, levels - 1)
    elif isinstance(value, TensorRef):
        yield what, _tensor_text(value, file)
    elif isinstance(value, Stub):
        yield what, f"a {value.module}.{value.qualname}"
        yield from _flattened(value.attributes or None, f"{what}.", file, levels - 1)
        yield from _flattened([*value.args, *value.items] or None, f"{what}.", file, levels - 1)
    else:
        yield what, _text(value)


def _tensor_text(ref: TensorRef, file: TorchFile) -> str:
    """A small tensor of client state: dtype, shape, and its bytes or what stands for them."""
    text = f"{ref.dtype}{list(ref.shape)}"
    if not ref.is_contiguous or ref.numel * DTYPE_BYTES[ref.dtype] > _SMALL_BYTES:
        return text
    return f"{text} {_shortened(file.read(ref).tobytes().hex())}"


def _text(value: object) -> str:
    return value.name if isinstance(value, DType) else _shortened(repr(value))


def _shortened(text: str) -> str:
    """One text per distinct value, too long to show or not."""
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN // 2]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _value_differences(left: Mapping[str, str], right: Mapping[str, str]) -> list[ValueDifference]:
    return [
        ValueDifference(what, left.get(what), right.get(what))
        for what in dict.fromkeys((*left, *right))
        if left.get(what) != right.get(what)
    ]


def _ignore(nbytes: int) -> None:
    pass
