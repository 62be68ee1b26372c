"""``zeroelastic ls``: all checkpoints of a run, newest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.output.options import JsonOption
from zeroelastic.cli.output.show import print_columns, print_report

if TYPE_CHECKING:
    from zeroelastic.verbs.ls import TagInfo


def ls(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory that holds the tags, or the checkpoint-N folders.")
    ],
    as_json: JsonOption = False,
) -> None:
    """List all checkpoints of a run, newest first: step, ranks, stage, size, time, and whether they are committed.

    Reads names, sizes and commit records; verify and latest check what is in the files.
    Exit code 0: listed; 2: wrong usage, or there is no checkpoint.

    \b
    Examples:
        zeroelastic ls ckpt
        zeroelastic ls ckpt --json
    """
    from zeroelastic.verbs.ls import ls as run

    report = run(directory)
    if as_json:
        print_report(report)
        return
    rows = [("tag", "step", "ranks", "stage", "size", "saved", "status"), *map(_row, report.tags)]
    if any(tag.run not in (None, 1) for tag in report.tags):
        runs = ["run", *("" if tag.run is None else str(tag.run) for tag in report.tags)]
        rows = [(*row, run) for row, run in zip(rows, runs, strict=True)]
    print_columns(rows, right=frozenset({1, 2, 3, 4, 7}), indent="")


def _row(tag: TagInfo) -> tuple[str, ...]:
    numbers = ("" if value is None else str(value) for value in (tag.step, tag.world_size, tag.stage))
    saved = "" if tag.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tag.saved_at))
    return (tag.tag, *numbers, format_size(tag.bytes), saved, tag.status + (", latest" if tag.latest else ""))
