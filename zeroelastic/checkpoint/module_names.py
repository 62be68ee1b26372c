"""The names in a module's state: further names of one tensor, buffers, and what modules add by ``get_extra_state``.

A model states file lists the trained parameters (``param_shapes``), the buffers (``buffer_names``) and some further
names (``shared_params``). DeepSpeed makes the lists by a walk that visits a module once under each parent, so what a
parent has under two names is listed by one of them. The state has the tensor under both: they are one place of one
storage. What ``get_extra_state`` of a module returned is in no list; it may be a tensor, as in Transformer Engine. A
save of zeroelastic lists as buffers what else DeepSpeed does not list (``all_buffer_names`` in ``live.kinds``).

Source: ``_get_buffer_names``, ``_get_shared_params`` (deepspeed.runtime.engine, 0.19.8); ``Module.state_dict`` (torch).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef

_EXTRA_STATE = "_extra_state"
"""The last part of the name of what ``get_extra_state`` of a module returned (torch.nn.modules.module)."""

Place = tuple[Hashable, int, tuple[int, ...]]
"""Where a tensor is: its storage, where it begins there, and its shape."""


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names in a module's state that are not one parameter each.

    ``tied`` are further names of parameters, each with the name that is listed; ``buffers`` the names of buffers, each
    with the first name of the tensor; ``extra_states`` the names of values that ``get_extra_state`` returned.
    """

    tied: Mapping[str, str]
    buffers: Mapping[str, str]
    extra_states: frozenset[str]

    @property
    def no_params(self) -> frozenset[str]:
        """The names that are of no parameter."""
        return self.extra_states.union(self.buffers)


def module_names(
    root: Mapping[object, object], names: Iterable[object], places: Mapping[str, Place], *, is_whole: bool
) -> ModuleNames:
    """The names of a model states file, whose lists are in ``root``.

    ``names`` are all of the module's state; ``places`` says where its tensors are. ``is_whole``: the file is of stage 0
    to 2 and has the weights; at stage 3 parameters have no elements there.
    """
    listed, tables, buffers, frozen = (
        root.get(key) for key in ("shared_params", "param_shapes", "buffer_names", "frozen_param_shapes")
    )
    tied = {str(alias): str(name) for alias, name in listed.items()} if isinstance(listed, Mapping) else {}
    frozen = frozen if isinstance(frozen, Mapping) else {}
    # DeepSpeed finds tied parameters by their addresses, and takes all that have no elements for one, at 0.
    empty = {name for name, shape in frozen.items() if isinstance(shape, tuple) and 0 in shape}
    if is_whole:
        empty |= {alias for alias, name in tied.items() if _are_two_empty(places.get(alias), places.get(name))}
    tied = {alias: name for alias, name in tied.items() if alias not in empty}
    tied |= {str(alias): str(name) for alias, name in duplicate_router_names(root, names).items()}
    extra_states = {name for name in map(str, names) if name.rpartition(".")[2] == _EXTRA_STATE}
    of_buffers = {str(name): str(name) for name in buffers} if isinstance(buffers, list) else {}
    tables = [*(tables if isinstance(tables, list) else ()), frozen]
    params = dict.fromkeys(str(name) for table in tables if isinstance(table, Mapping) for name in table)
    first: dict[Hashable, str] = {}
    for name in (*params, *of_buffers.copy(), *places):
        if name in places and name not in tied and name not in extra_states:
            owner = first.setdefault(_comparable(places[name]), name)
            if owner in of_buffers:
                of_buffers.setdefault(name, owner)
            elif owner != name and name not in of_buffers and name not in params:
                tied[name] = owner
    return ModuleNames(tied, of_buffers, frozenset(extra_states - params.keys()))


def places_of(entries: Mapping[object, object]) -> dict[str, Place]:
    """Return where each tensor of the module's state is."""
    return {
        str(name): (ref.storage.key or ref.storage, ref.offset * DTYPE_BYTES[ref.dtype], ref.shape)
        for name, ref in entries.items()
        if isinstance(ref, TensorRef)
    }


def _comparable(place: Place) -> Hashable:
    """Return the part that places of one tensor share: a tied weight may have another shape, as in DeepSpeed."""
    return place[:2] if math.prod(place[2]) else place


def _are_two_empty(one: Place | None, other: Place | None) -> bool:
    """Return whether these are two tensors, without elements."""
    if one is None or other is None:
        return False
    return not math.prod(one[2]) and not math.prod(other[2]) and one != other


def autoep_layers(root: Mapping[object, object]) -> list[Mapping[object, object]]:
    """The description of each layer that AutoEP made, in a model states file."""
    layers = root.get("ds_autoep_layers")
    return [layer for layer in layers if isinstance(layer, Mapping)] if isinstance(layers, list) else []


def duplicate_router_names(root: Mapping[object, object], module: Iterable[object]) -> dict[object, object]:
    """The further names of the routers of AutoEP's layers, each with the router's own.

    The layers have them for hooks of the model they replace; DeepSpeed's ``shared_params`` does not list them. Source:
    ``AutoEPMoELayer.__init__`` (deepspeed.module_inject.auto_ep_layer, 0.19.8).
    """
    paths = {layer.get("module_path") for layer in autoep_layers(root)}
    names = dict.fromkeys(module) if paths else {}
    found: dict[object, object] = {}
    for name in names:
        parts = str(name).split(".")
        for i in range(1, len(parts) - 1):
            path, attribute, rest = ".".join(parts[:i]), parts[i], ".".join(parts[i + 1 :])
            is_own = attribute in ("router", "experts") or attribute.startswith("shared_experts")
            if path in paths and not is_own and f"{path}.router.{rest}" in names:
                found[name] = f"{path}.router.{rest}"
    return found
