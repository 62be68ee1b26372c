"""Frozen base weights that have another name since PEFT put an adapter on their module, or took one off.

PEFT keeps the module itself as ``base_layer`` of an adapter's layer, and as ``original_module`` beside a trained copy:
``o_proj.weight`` is ``o_proj.base_layer.weight`` then. Pure data in, pure data out. Source: peft 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PARTS = ("base_layer", "original_module")

Shapes = Mapping[str, tuple[int, ...]]
"""By name."""


def renamed_base_weights(
    *, saved_frozen: Shapes, live_frozen: Shapes, saved: Iterable[str], live: Iterable[str]
) -> dict[str, str]:
    """The saved name of each frozen weight of the model that is a base weight under another name.

    ``saved`` and ``live`` are the names of all parameters. An adapter that was put on a module has its base weights in
    the save only if the module had no adapter then: base weights beside one, without the part, have it merged into
    them.

    Example::

        renamed_base_weights(...)    # {"o_proj.base_layer.weight": "o_proj.weight"}
    """
    saved, live = {*saved}, {*live}
    found: dict[str, str] = {}
    for name, shape in live_frozen.items():
        if name in saved:
            continue
        for module, part, rest in _splits(name):
            bare = f"{module}.{rest}"
            if saved_frozen.get(bare) != shape or bare in live:
                continue
            beside = [one.removeprefix(f"{module}.") for one in saved if one.startswith(f"{module}.")]
            if all(f"{module}.{part}.{one}" in live for one in beside):
                found[name] = bare
    taken_off = {
        f"{module}.{rest}": name for name in saved_frozen if name not in live for module, _, rest in _splits(name)
    }
    for name, before in taken_off.items():
        if name not in saved and live_frozen.get(name) == saved_frozen[before]:
            found[name] = before
    return found


def _splits(name: str) -> list[tuple[str, str, str]]:
    """The module before, the part itself, and the rest of a name, by each part of PEFT in it."""
    parts = name.split(".")
    return [
        (".".join(parts[:i]), parts[i], ".".join(parts[i + 1 :]))
        for i in range(1, len(parts) - 1)
        if parts[i] in _PARTS
    ]
