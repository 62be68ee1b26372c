"""Defects of older commits, put back one at a time: the campaign has to find each of them.

A defect changes the package in the process that ranks are forked from, and in the one that plays the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def _set(module: str, name: str, value: Any) -> None:
    """Replace a name of a module, and of a class of it where the name has a dot."""
    owner = import_module(f"zeroelastic.{module}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    assert hasattr(owner, last), f"{module} has no {name}"
    setattr(owner, last, value)


def damaged_state_is_a_fresh_start() -> None:
    """A resume whose load from memory failed begins from scratch, with what the load has left in the engine."""
    _set("elastic.resume", "any_rank", lambda flag: False)
    _set("deepspeed.load.tag_choice", "refuse_damaged", lambda engine: None)


def all_tags_count_together() -> None:
    """Tags of all engines that save to a directory are counted together."""
    _set("runs.prune", "by_params", lambda tags: (tuple(tags),))


def the_last_commit_is_the_newest_state() -> None:
    """Of memory and disk a resume takes what was committed last."""

    def by_time(tag: Any, saved: Any, *others: Any) -> bool:
        return saved is None or bool(tag.committed_at > saved.saved_at)

    _set("elastic.memory.resume", "_is_after", by_time)


def workers_get_signals() -> None:
    """A signal to the process group ends the workers of a DataLoader."""
    _set("elastic.leaving", "_starting_shielded", lambda start, signals: start)


DEFECTS: dict[str, Callable[[], None]] = {
    defect.__name__: defect
    for defect in (
        damaged_state_is_a_fresh_start,
        all_tags_count_together,
        the_last_commit_is_the_newest_state,
        workers_get_signals,
    )
}
"""By name; each docstring says what is wrong then."""
