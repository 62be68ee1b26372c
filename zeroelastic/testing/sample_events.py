"""``python -m zeroelastic.testing.sample_events events.jsonl``: an event log to try ``zeroelastic timeline`` on.

Of a made-up job of 24 steps that saves every fourth: 4 ranks, of which one is killed, then 3, then 4 again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroelastic.errors import UsageError
from zeroelastic.job_log.event_log import (
    SUPERVISOR,
    EndEvent,
    EndReason,
    NodesEvent,
    ResumeEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
    append,
)

_BEGAN = 1_700_000_000.0
_STEP_SECONDS = 0.5


def write_sample_events(path: Path) -> None:
    """Write the log as a new file. Raises UsageError when it exists."""
    if path.exists():
        raise UsageError(f"{path}: exists; nothing is overwritten. Give another name.")
    killed = _write_start(path, 0, began=6.0, world_size=4, first=1, last=10, end=None)
    append(path, NodesEvent(**_when(killed, SUPERVISOR), change=-1, cause="SIGKILL"))
    lost = EndEvent(**_when(killed + 0.3, "start0"), step=10, rank=2, reason="error", error="RuntimeError: peer closed")
    append(path, lost)
    came = _write_start(path, 1, began=killed + 9.0, world_size=3, first=9, last=16, end="stopped")
    append(path, NodesEvent(**_when(came - 2.0, SUPERVISOR), change=1, cause="started"))
    _write_start(path, 2, began=came + 9.0, world_size=4, first=17, last=24, end="done")


def _write_start(
    path: Path, number: int, *, began: float, world_size: int, first: int, last: int, end: EndReason | None
) -> float:
    """One start of the job, from the step ``first`` to ``last``; returns when it was over."""
    run, now = f"start{number}", began
    start = StartEvent(
        **_when(now, run), world_size=world_size, num_nodes=world_size, host=f"node{number}", pid=4000 + number,
        job="sample", restart=number, process_seconds=5.2, import_seconds=1.4,
    )  # fmt: skip
    append(path, start)
    now += 0.3
    resume = ResumeEvent(
        **_when(now, run), tag=f"global_step{first - 1}" if number else None, step=first - 1,
        saved_world_size=7 - world_size if number else None, proved=True if number else None, seconds=0.2,
        load_seconds=0.1 if number else None, passed_over=0, lost_steps=(2, 0)[number - 1] if number else None,
        tier="directory" if number else None,
    )  # fmt: skip
    append(path, resume)
    for step in range(first, last + 1):
        now += _STEP_SECONDS
        append(path, StepEvent(**_when(now, run), step=step, loss=5.5 / (1.0 + 0.05 * step)))
        if step % 4 == 0:
            append(path, SaveEvent(**_when(now + 0.1, run), step=step, tag=f"global_step{step}", seconds=0.1))
    now += 0.2
    if end is not None:
        append(path, EndEvent(**_when(now, run), step=last, rank=0, reason=end))
    return now


def _when(seconds: float, run: str) -> dict[str, Any]:
    return {"time": _BEGAN + seconds, "monotonic": 1000.0 + seconds, "run": run}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the log."""
    parser = argparse.ArgumentParser(prog="python -m zeroelastic.testing.sample_events", description=__doc__)
    parser.add_argument("path", type=Path, help="the new file")
    write_sample_events(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main()
