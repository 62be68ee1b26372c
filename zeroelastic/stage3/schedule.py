"""The saved state of an lr scheduler for optimizer groups that are not those of the save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroelastic.membership import GroupMatch

_BY_GROUP = frozenset(("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums"))
"""Lists of torch's schedulers with one entry per optimizer group (torch 2.6 to 2.13); DeepSpeed's own keep none."""


def rearranged(saved: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[GroupMatch]) -> dict[str, Any]:
    """A scheduler's saved state whose lists by group follow the live groups: each has what its saved group had.

    ``own`` is the state of the run's scheduler, from which a group without a saved one keeps its entries. Schedulers
    within schedulers are followed. Nothing that is passed in is changed.
    """
    state = dict(saved)
    for key, values in saved.items():
        theirs = own.get(key)
        if key in _BY_GROUP and isinstance(values, (list, tuple)) and isinstance(theirs, (list, tuple)):
            state[key] = [
                values[match.source] if match.source is not None and match.source < len(values) else theirs[g]
                for g, match in enumerate(groups)
                if g < len(theirs)
            ]
        elif key == "_schedulers" and isinstance(values, list) and isinstance(theirs, list):
            state[key] = [
                rearranged(inner, mine, groups) if isinstance(inner, Mapping) and isinstance(mine, Mapping) else inner
                for inner, mine in zip(values, theirs, strict=False)
            ]
    return state
