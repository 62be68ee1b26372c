"""One tensor of a checkpoint, for ``inspect --tensor``: where it lies, statistics, the first values."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from pydantic import Field

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.errors import with_remedy
from zeroelastic.verbs.elements import bits_of, values_of
from zeroelastic.verbs.report import Number, Part
from zeroelastic.verbs.tensor import TensorHandle
from zeroelastic.verbs.view import CheckpointView, TensorPlace
from zeroelastic.verbs.view import open as open_view

_FIRST = 4


class StoredTensor(Part):
    """A tensor as the files have it under a state key; ``min``, ``max`` and ``mean`` are those of finite elements."""

    key: str
    dtype: str
    bytes: int
    min: Number | None
    max: Number | None
    mean: Number | None
    nans: int
    first: list[Number]
    places: list[TensorPlace]


class InspectedTensor(Part):
    """A parameter or buffer with all that the files have of it; ``scalars`` are the optimizer's, such as ``step``."""

    name: str
    kind: str
    shape: list[int]
    tied_to: str | None
    stored: list[StoredTensor]
    scalars: dict[str, Any] = Field(default={})


@with_remedy()
def inspect_tensor(src: str | os.PathLike[str], name: str, *, tag: str | None = None) -> InspectedTensor:
    """Read a tensor and its optimizer state, each byte once, and describe them.

    Raises UnknownTensorError with the nearest names, and what ``zeroelastic.open`` raises.
    """
    with open_view(src, tag=tag) as ck:
        weight = ck[name]
        state = {} if weight.kind == "buffer" else ck.optimizer(name)
        key = FP32 if weight.kind == "trained" else weight.kind
        handles = {key: weight} | {key: it for key, it in state.items() if isinstance(it, TensorHandle)}
        return InspectedTensor(
            name=name,
            kind=weight.kind,
            shape=list(weight.shape),
            tied_to=None if weight.name == name else weight.name,
            stored=[
                _stored(ck, name, key, handle, None if handle is weight else key) for key, handle in handles.items()
            ],
            scalars={key: value for key, value in state.items() if not isinstance(value, TensorHandle)},
        )


def _stored(ck: CheckpointView, name: str, key: str, handle: TensorHandle, state_key: str | None) -> StoredTensor:
    lowest, highest, total, num_finite, nans = np.inf, -np.inf, 0.0, 0, 0
    first: list[Number] = []
    for data in handle.windows():
        values = values_of(bits_of(data, handle.dtype), handle.dtype)
        finite = values[np.isfinite(values)]
        lowest = min(lowest, float(finite.min(initial=np.inf)))
        highest = max(highest, float(finite.max(initial=-np.inf)))
        total, num_finite = total + float(finite.sum()), num_finite + len(finite)
        nans += int(np.count_nonzero(np.isnan(values)))
        first = first or values[:_FIRST].tolist()
    return StoredTensor(
        key=key,
        dtype=handle.dtype,
        bytes=handle.nbytes,
        min=lowest if num_finite else None,
        max=highest if num_finite else None,
        mean=total / num_finite if num_finite else None,
        nans=nans,
        first=first,
        places=list(ck.places(name, key=state_key)),
    )
