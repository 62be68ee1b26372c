"""The partition-invariant digest: sums over global element coordinates that add up over any partition.

The digest of one tensor of one parameter (its fp32 weights, one optimizer state) is, modulo 2**64,

    sum over blocks b of  W(param, key, b) * (sum over j < 1024 of  w[j] * bits(x[1024 * b + j]))

where ``x`` is the flattened, unpartitioned tensor, ``bits`` the element's own bits as an unsigned little-endian
integer, and all weights are odd. An odd factor is invertible modulo 2**64, so any change of a single element changes
the digest; a moved element meets other weights. The sum over any set of disjoint ranges is the sum of their partial
digests, so N ranks and M ranks arrive at the same value with one integer all-reduce. It detects errors; it is not a
cryptographic hash and does not stop somebody who can rewrite the record too.

The content root is a SHA-256 over the digests of all parameters, see ``content_root``.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from json.encoder import encode_basestring_ascii
from math import copysign
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from zeroelastic.core.layout import Int64Array, Layout, Param

BLOCK = 1024
"""Elements per block: the table of weights within a block is 8 KiB and stays in the L1 cache."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_CHUNK = BLOCK * 512
_LINES = 1 << 14

UInt64Array = npt.NDArray[np.uint64]
ByteArray = npt.NDArray[np.uint8]

S = TypeVar("S", str, bytes)
T = TypeVar("T")


def _mix_array(value: UInt64Array) -> UInt64Array:
    """The output function of splitmix64: a bijection on 64-bit integers."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64Array = value ^ (value >> np.uint64(31))
    return mixed


def element_weights() -> UInt64Array:
    """The odd weights ``w[j]`` within a block: shape ``(1024,)``, uint64."""
    counter = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    weights: UInt64Array = _mix_array(counter) | np.uint64(1)
    return weights


_WEIGHTS = element_weights()


def stream_seed(param_name: str, key: str) -> int:
    """The 64-bit seed of one stream, that is of one tensor kind of one parameter."""
    text = f"{key}\0{param_name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def block_weights(seed: int, first_block: int, num_blocks: int) -> UInt64Array:
    """The odd weights ``W(param, key, b)`` for ``num_blocks`` blocks from ``first_block``, uint64."""
    counter = np.arange(first_block + 1, first_block + num_blocks + 1, dtype=np.uint64)
    weights: UInt64Array = _mix_array(np.uint64(seed) + counter * np.uint64(_GOLDEN)) | np.uint64(1)
    return weights


def digest_range(data: ByteArray, itemsize: int, *, seed: int, start: int) -> int:
    """Partial digest of the elements ``[start, start + len(data) / itemsize)`` of one stream, in numpy.

    ``data`` holds the raw bytes, contiguous, little-endian; ``itemsize`` is 1, 2, 4 or 8. Partial digests of disjoint
    ranges add up modulo 2**64. This is the reference that every engine matches bit for bit, and it needs a few MiB;
    ``executors.digest_range`` is the fastest one there is.
    """
    bits = data.view(np.dtype(f"<u{itemsize}"))
    total = 0
    done = 0
    while done < len(bits):
        begin = start + done
        lead = begin % BLOCK
        count = min(len(bits) - done, _CHUNK - lead)
        piece = bits[done : done + count]
        num_blocks = -(-(lead + count) // BLOCK)
        if lead == 0 and count == num_blocks * BLOCK:
            blocks = piece.reshape(num_blocks, BLOCK).astype(np.uint64)
        else:
            padded = np.zeros(num_blocks * BLOCK, dtype=np.uint64)
            padded[lead : lead + count] = piece
            blocks = padded.reshape(num_blocks, BLOCK)
        sums = blocks @ _WEIGHTS
        weights = block_weights(seed, begin // BLOCK, num_blocks)
        total = (total + int((sums * weights).sum(dtype=np.uint64))) & _MASK
        done += count
    return total


def combine(left: int, right: int) -> int:
    """The digest of the union of two disjoint ranges."""
    return (left + right) & _MASK


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """A replicated scalar of optimizer state, such as ``step``: its type as saved and its value.

    ``kind`` is a torch dtype name ("float32") for a 0-dim tensor, and "pyint", "pyfloat", "pybool" or "none" for a
    Python value; the prefix keeps them apart from torch's own names, of which "int" and "bool" are two.
    """

    kind: str
    value: int | float | bool | None

    @classmethod
    def of_python(cls, value: int | float | bool | None) -> ScalarValue:
        """A Python value; subclasses such as numpy's become the plain type."""
        if value is None:
            return cls("none", None)
        if isinstance(value, bool):
            return cls("pybool", value)
        return cls("pyint", int(value)) if isinstance(value, int) else cls("pyfloat", float(value))

    def canonical(self) -> str:
        """One text per distinct value; floats by their exact bits."""
        value = float(self.value).hex() if isinstance(self.value, float) else repr(self.value)
        return f"{self.kind}:{value}"

    def number(self) -> str:
        """One text per numeric value, whatever it is kept as: 3 and a float32 tensor of 3.0 are the same number."""
        if isinstance(self.value, float) and self.value.is_integer() and (self.value or copysign(1.0, self.value) > 0):
            return repr(int(self.value))
        return self.canonical().partition(":")[2]


class DigestKey(NamedTuple):
    """The key of a digest: for a state key, the elements of one strip, from ``start`` of the whole tensor on.

    A whole tensor is one strip, and begins at 0. Several ranks may have copies of one strip.
    """

    param: str
    key: str
    start: int = 0


def stream_of(layout: Layout, strip: int, key: str) -> DigestKey:
    """The stream of a strip of a layout, by number; without slices, the stream of a parameter."""
    param, start = layout.parts.strip(strip)
    return DigestKey(layout.params[param].name, key, start)


def streams_of(layout: Layout, sub_group: int, key: str) -> list[DigestKey]:
    """The streams of all parameters of a sub-group."""
    parts, params = layout.parts, layout.params
    strips = np.flatnonzero(layout.sub_group[parts.params_of_strips] == sub_group).tolist()
    return [DigestKey(params[param].name, key, start) for param, start in map(parts.strip, strips)]


@dataclass(frozen=True, slots=True)
class ParamContent:
    """The content of one parameter in a checkpoint: a digest per tensor and the scalars of optimizer state.

    ``tensors`` maps a state key ("fp32" for the master weights, "frozen" for a frozen parameter, else the optimizer's
    key) to (dtype name, digest). ``tp_rank`` is the tensor parallel rank whose slice of the parameter this is.
    """

    param: Param
    tensors: Mapping[str, tuple[str, int]]
    scalars: Mapping[str, ScalarValue]
    tp_rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ContentGroup:
    """The content of the parameters that have the same state keys, dtypes and scalars, in columns.

    ``tensors`` are (state key, dtype), sorted by key. ``names`` are sorted and run parallel to ``shapes`` and
    ``digests``, uint64 of shape ``(num_params, len(tensors))``. ``trainable`` says whether the parameters are trained,
    which is not part of the content root.
    """

    tensors: tuple[tuple[str, str], ...]
    scalars: Mapping[str, ScalarValue]
    tp_rank: int
    trainable: bool
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    digests: UInt64Array

    def content(self, row: int) -> ParamContent:
        """One of the parameters."""
        digests = zip(self.tensors, self.digests[row].tolist(), strict=True)
        tensors = {key: (dtype, digest) for (key, dtype), digest in digests}
        return ParamContent(Param(self.names[row], self.shapes[row]), tensors, self.scalars, self.tp_rank)

    def digest_texts(self, rows: slice | Int64Array, between: Sequence[str]) -> list[bytes]:
        """The digests of each of some rows as one text: ``between`` stand before, between and behind 16 digits each."""
        digests = self.digests[rows]
        digits = np.frombuffer(digests.astype(">u8").tobytes().hex().encode(), dtype=np.uint8)
        digits = digits.reshape(*digests.shape, 16)
        template = np.frombuffer((" " * 16).join(between).encode(), dtype=np.uint8)
        table = np.tile(template, (len(digests), 1))
        at = 0
        for k, text in enumerate(between[:-1]):
            at += len(text)
            table[:, at : at + 16] = digits[:, k]
            at += 16
        texts: list[bytes] = table.view(f"S{len(template)}").reshape(-1).tolist()
        return texts


def group_contents(
    contents: Iterable[ParamContent], trainable: Collection[str] = frozenset()
) -> tuple[ContentGroup, ...]:
    """The contents in columns; ``trainable`` names the parameters that are trained."""
    members: dict[tuple[object, ...], list[ParamContent]] = {}
    known: dict[tuple[object, ...], list[ParamContent]] = {}  # a cheaper name of the same list
    for content in contents:
        dtypes = tuple([dtype for dtype, _ in content.tensors.values()])
        trained = content.param.name in trainable
        short = (tuple(content.tensors), dtypes, id(content.scalars), content.tp_rank, trained)
        group = known.get(short)
        if group is None:
            tensors = tuple(sorted(zip(content.tensors, dtypes, strict=True)))
            scalars = tuple(sorted((key, value.canonical()) for key, value in content.scalars.items()))
            group = known[short] = members.setdefault((tensors, scalars, content.tp_rank, trained), [])
        group.append(content)
    groups: list[ContentGroup] = []
    for group in members.values():
        group.sort(key=lambda content: content.param.name)
        first = group[0]
        keys = sorted(first.tensors)
        digests = np.array([content.tensors[key][1] for content in group for key in keys], dtype=np.uint64)
        groups.append(
            ContentGroup(
                tensors=tuple((key, first.tensors[key][0]) for key in keys),
                scalars=first.scalars,
                tp_rank=first.tp_rank,
                trainable=first.param.name in trainable,
                names=[content.param.name for content in group],
                shapes=[content.param.shape for content in group],
                digests=digests.reshape(len(group), len(keys)),
            )
        )
    return tuple(groups)


def interleaved(columns: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """The first value of each column, then the second of each, and so on: what a repeated format takes."""
    values = [columns[0][0]] * (len(columns) * len(columns[0]))
    for i, column in enumerate(columns):
        values[i :: len(columns)] = column
    return tuple(values)


def content_root(contents: Iterable[ParamContent]) -> str:
    """One hexadecimal SHA-256 for the state of a checkpoint: the same at every world size.

    It covers every parameter's name, shape, tensors and scalars; not hyper-parameters, buffers, or client state.
    """
    return root_of_groups(group_contents(contents))


def root_of_groups(groups: Sequence[ContentGroup]) -> str:
    """The content root of parameters in columns: SHA-256 of a JSON line for each of them, in the order of the lines."""
    # A line begins with the name as JSON, whose closing quote makes the names' order that of the lines.
    names = [encode_basestring_ascii(name).encode() for group in groups for name in group.names]
    order = sorted_order(names)
    first = np.cumsum([0, *(len(group.names) for group in groups)])
    root = hashlib.sha256()
    at = 0
    while at < len(order):
        end = min(at + _LINES, len(order))
        while end < len(order) and names[order[end]] == names[order[end - 1]]:  # lines of one name stay together
            end += 1
        window = order[at:end]
        quoted = [names[i] for i in window.tolist()]
        of_group = np.searchsorted(first, window, side="right") - 1
        present = np.flatnonzero(np.bincount(of_group)).tolist()  # np.unique would import numpy.ma, 0.4 MB
        texts = [
            _lines(groups[number], window[mine] - first[number], list(compress(quoted, mine.tolist())))
            for number in present
            for mine in [of_group == number]
        ]
        if len(present) > 1 or len(set(quoted)) < len(quoted):
            texts = sorted(line for text in texts for line in text.splitlines(keepends=True))
        for text in texts:
            root.update(text)
        at = end
    return root.hexdigest()


def sorted_order(names: Sequence[S]) -> Int64Array:
    """The positions of the names in sorted order."""
    if all(map(operator.le, names, islice(names, 1, None))):  # as they are nearly always, at a tenth of the price
        return np.arange(len(names), dtype=np.int64)
    return np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)


def _lines(group: ContentGroup, rows: Int64Array, names: Sequence[bytes]) -> bytes:
    """The lines of some rows of a group, whose names are JSON already."""
    shapes = [group.shapes[row] for row in rows.tolist()]
    text_of = {shape: str(list(shape)).encode() for shape in set(shapes)}
    tensors = [f'[{json.dumps(key)}, {json.dumps(dtype)}, "' for key, dtype in group.tensors]
    scalars = json.dumps(sorted((key, value.canonical()) for key, value in group.scalars.items()))
    slice_of = f", {group.tp_rank}" if group.tp_rank else ""
    ends = [f", [{tensors[0]}", *(f'"], {tensor}' for tensor in tensors[1:]), '"]'] if tensors else [", ["]
    ends[-1] += f"], {scalars}{slice_of}]\n"
    columns = [names, [text_of[shape] for shape in shapes], group.digest_texts(rows, ends)]
    return (b"[%b, %b%b" * len(names)) % interleaved(columns)
