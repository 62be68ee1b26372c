"""``zeroelastic.diff``: how two checkpoints differ, whatever the number of ranks and the format of each."""

from __future__ import annotations

import os

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import with_remedy
from zeroelastic.runs.locate import find_source
from zeroelastic.verbs.diff.compare import DiffReport, compare_checkpoints
from zeroelastic.verbs.diff.tensors import comparison_nbytes
from zeroelastic.verbs.options import Progress, no_progress

LEAST_MEMORY = 16 << 20


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
