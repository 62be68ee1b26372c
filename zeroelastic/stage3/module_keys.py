"""What a module's own ``load_state_dict`` finds missing or unknown: recorded, and forgiven where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ModuleKeys:
    """Entries of the module's state that the checkpoint lacks, and entries of the checkpoint that the module lacks."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@contextmanager
def recorded_keys(module: Any, keys: ModuleKeys, *, forgive: bool) -> Iterator[None]:
    """While it lasts, what ``module.load_state_dict`` finds missing and unknown is added to ``keys``.

    ``forgive`` then strikes it off before a strict load raises for it. Tensors of other shapes are an error all the
    same.
    """

    def record(_: object, found: Any) -> None:
        keys.missing += found.missing_keys
        keys.unexpected += found.unexpected_keys
        if forgive:
            found.missing_keys.clear()
            found.unexpected_keys.clear()

    handle = module.register_load_state_dict_post_hook(record)
    try:
        yield
    finally:
        handle.remove()
