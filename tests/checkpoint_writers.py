"""Checkpoint engines as the tests configure them, and what DeepSpeed's fast writer needs to run without a GPU."""

from __future__ import annotations

from typing import Any

from training import Job


def writer_job(kind: str, *, decoupled: bool = False, **job: Any) -> Job:
    """A job whose files DeepSpeed's ``kind`` of writer writes, in another process if ``decoupled``."""
    writer = {"type": kind, "decoupled": decoupled, "io_buffer_size": 1 << 20}
    return Job(config={"checkpoint": {"writer": writer}}, **job)


def let_the_fast_writer_run() -> None:
    """Give DeepSpeed's fast writer what it lacks without a GPU, neither of which touches what it writes.

    Its buffer need not be pinned for libaio, and the op "utils" casts storage objects, which torch.save hands to no
    writer.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.io import fast_file_writer

    class NoCast:
        cast_to_byte_tensor = None

        def load(self) -> NoCast:
            return self

    fast_file_writer.UtilsBuilder = NoCast
    type(get_accelerator()).is_pinned = lambda self, tensor: True
