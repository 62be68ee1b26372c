"""``--distributed``: the processes of one torchrun or srun share the work of a verb."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from zeroelastic.distributed.processes import Processes

DistributedOption = Annotated[
    bool, typer.Option("--distributed", help="Share the work among all processes that torchrun or srun has started.")
]


@contextmanager
def processes_of(*, distributed: bool) -> Iterator[Processes]:
    """The processes of a verb. Without ``--distributed``, one that a launcher started works alone, with a note."""
    from zeroelastic.distributed.processes import launched_processes, num_launched

    count = num_launched()
    if count > 1 and not distributed:
        typer.echo(f"note: this process works alone; --distributed shares the work among {count} processes", err=True)
    with launched_processes(distributed=distributed) as processes:
        yield processes
