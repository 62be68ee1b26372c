"""How two checkpoints differ, whatever the number of ranks and the format each was saved with.

found = compare_checkpoints(open_state(open_checkpoint(a)), open_state(open_checkpoint(b)))
found.equal, found.tensors, found.state
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.errors import UsageError
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.json_document import document
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.verbs.diff.tensors import (
    TensorDifference,
    compare_buffers,
    compare_tensors,
    comparison_nbytes,
)
from zeroelastic.verbs.diff.values import (
    ValueDifference,
    saving_differences,
    scalar_differences,
    state_differences,
)


@dataclass(frozen=True, slots=True)
class DiffReport:
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
    def weights(self) -> tuple[TensorDifference, ...]:
        """The tensors that are weights of the model: master weights and frozen parameters."""
        return tuple(tensor for tensor in self.tensors if tensor.key in (FP32, FROZEN))

    @property
    def weights_equal(self) -> bool:
        """Whether both sides have the same weights, bit for bit."""
        only = any(key in (FP32, FROZEN) for _, key in (*self.only_left, *self.only_right))
        return not only and all(tensor.equal for tensor in self.weights)

    @property
    def equal(self) -> bool:
        """Whether a run that resumes from one side is the run that resumes from the other."""
        return not (self.differing or self.only_left or self.only_right or self.state)

    def to_json(self) -> dict[str, object]:
        """The document of ``zeroelastic diff --json``; docs/reference/cli/diff.md has its keys."""
        body = {
            "weights_equal": self.weights_equal,
            "a": self.left,
            "b": self.right,
            "content_root": {"a": self.left_root, "b": self.right_root},
            "num_tensors": len(self.tensors),
            "num_equal": len(self.tensors) - len(self.differing),
            "bytes_read": self.num_bytes,
            "tensors": [tensor.to_json() for tensor in self.differing],
            "only_a": [{"param": param, "key": key} for param, key in self.only_left],
            "only_b": [{"param": param, "key": key} for param, key in self.only_right],
            "state": [{"what": value.what, "a": value.left, "b": value.right} for value in self.state],
            "saving": [{"what": value.what, "a": value.left, "b": value.right} for value in self.saving],
        }
        return document(body, ok=self.equal)


def compare_checkpoints(
    left: SavedState,
    right: SavedState,
    *,
    params: str | None = None,
    max_memory: int = 256 << 20,
    progress: ProgressFunction | None = None,
) -> DiffReport:
    """Compare all tensors and all other state of two checkpoints.

    ``params``, a pattern such as ``"*.bias"``, chooses parameters by name: then nothing but these is compared, their
    scalars included. ``progress`` is given the bytes done since it was last called; there are ``comparison_nbytes``.
    Raises UsageError where the pattern fits no parameter, CheckpointError for files that cannot be read.

    Example::

        compare_checkpoints(before, after, params="*.norm.weight").equal
    """
    found = compare_tensors(left, right, params, max_memory=max_memory, progress=progress)
    if found is None:
        raise UsageError(
            f"{params!r} fits no parameter of {left.checkpoint.tag_dir} or {right.checkpoint.tag_dir}. Give a glob of "
            "their names, or a part of them; `zeroelastic inspect --params` lists them."
        )
    parts = [found]
    state = scalar_differences(left, right, params)
    if params is None:
        files = tuple(read_torch_file(side.models[0].path, foreign="inert") for side in (left, right))
        parts.append(compare_buffers(left, right, (files[0], files[1])))
        state += state_differences(left, right, *files)
    records = left.checkpoint.record, right.checkpoint.record
    return DiffReport(
        left=str(left.checkpoint.tag_dir),
        right=str(right.checkpoint.tag_dir),
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        only_left=tuple(tensor for part in parts for tensor in part.only_left),
        only_right=tuple(tensor for part in parts for tensor in part.only_right),
        state=tuple(state),
        saving=tuple(saving_differences(left, right)),
        left_root=None if records[0] is None else records[0].content_root,
        right_root=None if records[1] is None else records[1].content_root,
        num_bytes=comparison_nbytes(left, right, params=params),
    )
