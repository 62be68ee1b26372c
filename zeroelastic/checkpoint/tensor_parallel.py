"""Tensor parallel ranks, each of which saves a ZeRO-3 checkpoint of its own into the same tag directory."""

from __future__ import annotations

from typing import NamedTuple

from zeroelastic.errors import UnsupportedError, shown
from zeroelastic.io.paths import FilePath


class TensorParallel(NamedTuple):
    """One tensor parallel rank of several, each of which is a ZeRO-3 run of its own with its own files and slices."""

    rank: int = 0
    size: int = 1


NO_TENSOR_PARALLEL = TensorParallel()

OFFLINE_TENSOR_PARALLEL = (
    "The command line works on checkpoints without tensor parallelism. A training job of the same tensor parallel size "
    "resumes this one at any data parallel size, and DeepSpeed's ds_to_universal converts it."
)


def other_tp_size(where: FilePath, saved: object, tp: TensorParallel | None, *, stage: int = 3) -> UnsupportedError:
    """The error about a save of another tensor parallel size than the run's; without ``tp``, than 1.

    ``stage`` is the run's. DeepSpeed's conversion of a save without tensor parallelism fails at stage 3 (0.19.8).
    """
    if tp is None:
        return UnsupportedError(
            f"{where}: was saved with {shown(saved)} tensor parallel ranks. {OFFLINE_TENSOR_PARALLEL}"
        )
    convert = ", or convert the checkpoint with DeepSpeed's ds_to_universal first"
    if saved == 1:
        convert = "" if stage == 3 else f"{convert} (--inject_missing_state)"
    return UnsupportedError(
        f"{where}: was saved with tensor parallel size {shown(saved)}, and the run has {tp.size}. The tensor parallel "
        f"size may not change: resume with the saved one{convert}."
    )
