"""Single faults, put into the package of a process while it runs: the machine has to find each of them."""

from __future__ import annotations


def put_back(name: str) -> None:
    """Replace what a fault replaces in this process; nothing for an empty name."""
    if name:
        FAULTS[name]()


FAULTS: dict[str, object] = {}
