"""``zeroelastic.diff``: how two checkpoints differ, whatever the number of ranks and the format of each.

found = compare_checkpoints(open_state(open_checkpoint(a)), open_state(open_checkpoint(b)))
found.equal, found.tensors, found.state
"""

from __future__ import annotations

import os

from pydantic import Field

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.checkpoint.saved_state import SavedState, open_state
from zeroelastic.errors import UsageError, with_remedy
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.runs.locate import find_source
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.verbs.diff.tensors import (
    ComparedTensor,
    compare_buffers,
    compare_tensors,
    comparison_nbytes,
)
from zeroelastic.verbs.diff.values import (
    Difference,
    saving_differences,
    scalar_differences,
    state_differences,
)
from zeroelastic.verbs.options import Progress, no_progress
from zeroelastic.verbs.report import Part, Report, Sides

LEAST_MEMORY = 16 << 20
WEIGHTS = (FP32, FROZEN)
"""The state keys of the weights of the model."""


class ParamAndKey(Part):
    """A tensor by its parameter and state key."""

    param: str
    key: str


class DiffReport(Report):
    """All differences of two checkpoints.

    ``tensors`` are those that both sides have and that differ; ``only_a`` and ``only_b`` are on one side alone.
    ``state`` are differences of what a resumed run would feel: hyper-parameters, counters, scalars, loss scale, client
    state. ``saving`` are those of how it was saved, which do not make two checkpoints differ. ``equal_tensors`` are
    not in the document.
    """

    weights_equal: bool
    a: str
    b: str
    content_root: Sides[str | None]
    num_tensors: int
    num_equal: int
    bytes_read: int
    tensors: tuple[ComparedTensor, ...]
    only_a: tuple[ParamAndKey, ...]
    only_b: tuple[ParamAndKey, ...]
    state: tuple[Difference, ...]
    saving: tuple[Difference, ...]
    equal_tensors: tuple[ComparedTensor, ...] = Field(default=(), exclude=True)

    @property
    def equal(self) -> bool:
        """Whether a run that resumes from one side is the run that resumes from the other."""
        return self.ok

    @property
    def differing(self) -> tuple[ComparedTensor, ...]:
        """The tensors that differ."""
        return self.tensors

    @property
    def weights(self) -> tuple[ComparedTensor, ...]:
        """The compared tensors that are weights of the model: master weights and frozen parameters."""
        return tuple(tensor for tensor in (*self.tensors, *self.equal_tensors) if tensor.key in WEIGHTS)


@with_remedy()
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    params: str | None = None,
    max_memory: int | str = "256MiB",
    progress: Progress = no_progress,
) -> DiffReport:
    """Compare two checkpoints: every tensor bit for bit, hyper-parameters, counters, client state.

    They may have been saved by different numbers of ranks and in different formats; neither makes them differ.
    ``params`` limits the comparison to parameters whose names match a glob. Raises UsageError where there is no
    checkpoint, CheckpointError for one that is damaged, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.diff("ckpt/global_step2", "ckpt/global_step4", params="*.norm.weight")
        print(report.equal, [tensor.param for tensor in report.differing])
    """
    memory = size_option(max_memory, "--max-memory", minimum=LEAST_MEMORY)
    sources = find_source(a), find_source(b)
    with one_save(*(source.tag_dir for source in sources)):
        left, right = (open_state(open_checkpoint(source.tag_dir), resizable=False) for source in sources)
        with progress("diff", comparison_nbytes(left, right, params=params)) as advance:
            return compare_checkpoints(left, right, params=params, max_memory=memory, progress=advance)


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
    tensors = [tensor for part in parts for tensor in part.tensors]
    differing = tuple(tensor for tensor in tensors if not tensor.equal)
    only_a = tuple(ParamAndKey(param=param, key=key) for part in parts for param, key in part.only_left)
    only_b = tuple(ParamAndKey(param=param, key=key) for part in parts for param, key in part.only_right)
    return DiffReport(
        ok=not (differing or only_a or only_b or state),
        weights_equal=not {*WEIGHTS} & {*(tensor.key for tensor in differing), *(one.key for one in only_a + only_b)},
        a=str(left.checkpoint.tag_dir),
        b=str(right.checkpoint.tag_dir),
        content_root=Sides(a=_recorded_root(left), b=_recorded_root(right)),
        num_tensors=len(tensors),
        num_equal=len(tensors) - len(differing),
        bytes_read=comparison_nbytes(left, right, params=params),
        tensors=differing,
        only_a=only_a,
        only_b=only_b,
        state=tuple(state),
        saving=tuple(saving_differences(left, right)),
        equal_tensors=tuple(tensor for tensor in tensors if tensor.equal),
    )


def _recorded_root(state: SavedState) -> str | None:
    record = state.checkpoint.record
    return None if record is None else record.content_root
