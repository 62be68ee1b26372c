"""The kinds of DeepSpeed's optimizers that are loaded and saved here, and the live optimizer of an engine.

All that the optimizer has counts as trained, even if ``requires_grad`` was changed since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from zeroelastic.checkpoint.tag_files import NO_TENSOR_PARALLEL, TensorParallel
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.group_split import Bf16GroupSplit, GroupSplit
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.stage3 import Evaluation, Stage3
from zeroelastic.deepspeed.live.topology import is_opaque, tensor_parallel
from zeroelastic.deepspeed.patching import patched
from zeroelastic.errors import UnsupportedError

_KINDS: dict[type, type[LiveOptimizer]] = {
    DeepSpeedZeroOptimizer_Stage3: Stage3,
    DeepSpeedZeroOptimizer: GroupSplit,
    BF16_Optimizer: Bf16GroupSplit,
    DeepSpeedZeRoOffload: Evaluation,
}
"""DeepSpeed's class -> ours. Also for subclasses of DeepSpeed's; ``uncovered`` names the ones that are not covered."""


def kind_of(optimizer: object, *, to_load: bool = False) -> type[LiveOptimizer] | None:
    """Return the class of the live optimizer, or None for an optimizer that is left to DeepSpeed alone.

    The stand-in for the optimizer of an engine without one has a class ``to_load`` only.
    """
    kind = _class_of(optimizer)
    if kind is None or not (kind.trains or to_load):
        return None
    return kind if kind.left_to_deepspeed(optimizer) is None else None


def is_without_optimizer(optimizer: object) -> bool:
    """Return whether this is the stand-in for the optimizer of a ZeRO-3 engine without one."""
    return kind_of(optimizer) is None and kind_of(optimizer, to_load=True) is not None


def why_left_to_deepspeed(optimizer: object) -> str | None:
    """Return why DeepSpeed loads and saves a run itself; None for runs that are ours, and other optimizers."""
    kind = _class_of(optimizer)
    return None if kind is None else kind.left_to_deepspeed(optimizer)


@contextmanager
def in_rigid_form(optimizer: object) -> Iterator[None]:
    """Within this context, DeepSpeed's own save at stages 1 and 2 writes its rigid form.

    Its form under ``elastic_checkpoint`` lacks hyper-parameters there, and DeepSpeed cannot load it where the optimizer
    is one of torch. It loads the rigid form with that flag and without it. Loads keep the flag.
    """
    kind = _class_of(optimizer)
    with nullcontext() if kind is None or kind.per_param else patched(optimizer, elastic_checkpoint=False):
        yield


def _class_of(optimizer: object) -> type[LiveOptimizer] | None:
    return next((ours for theirs, ours in _KINDS.items() if isinstance(optimizer, theirs)), None)


def read_live(optimizer: Any, names: Mapping[torch.nn.Parameter, str]) -> LiveOptimizer:
    """Read the live state of one rank: the optimizer's parameters are trained, all others of the module frozen.

    Raises UnsupportedError for parameters that are not partitioned over all ranks.
    """
    kind = kind_of(optimizer, to_load=True)
    assert kind is not None
    return kind(optimizer, names)


def covered_live(
    engine: Engine, optimizer: Any, *, opaque: bool = False, renamed: Mapping[str, str] | None = None
) -> LiveOptimizer:
    """Read the live state of a run that elastic checkpoints cover. Raises UnsupportedError for any other.

    ``opaque`` takes each tensor parallel rank for its own run, whatever DeepSpeed says of its slices; ``renamed``
    has the names that a save has for some parameters.
    """
    kind = kind_of(optimizer, to_load=True)
    assert kind is not None
    if (problems := kind.uncovered(optimizer, engine)) and not kind.trains:
        raise UnsupportedError(f"engines without an optimizer are not loaded with {', '.join(problems)} yet.")
    if problems:
        raise UnsupportedError(
            f"elastic checkpoints do not cover {', '.join(problems)} yet. "
            'Save with "format": "rigid", and resume at the saved world size.'
        )
    names = param_names(engine)
    if renamed:
        names = {param: renamed.get(name, name) for param, name in names.items()}
    return kind(optimizer, names, opaque=opaque)


def trained_params(engine: Engine) -> list[Param] | None:
    """Return the parameters that the engine trains, or one without an optimizer would; None if not known here."""
    kind = kind_of(engine.optimizer, to_load=True)
    if kind is None:
        return None
    names = param_names(engine)
    live = read_live(engine.optimizer, names)
    if kind.trains:
        return list(live.whole.whole_tensors)
    wanted = {name for param, name in names.items() if param.requires_grad}
    return [param for param in live.frozen.params if param.name in wanted]


def opaque_tensor_parallel(engine: Engine) -> TensorParallel:
    """Return this rank's place among tensor parallel ranks that do not say which slices they have."""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None or kind_of(optimizer) is None:  # without an optimizer there are no such groups, either
        return NO_TENSOR_PARALLEL
    return tensor_parallel(optimizer) if is_opaque(optimizer, engine.module) else NO_TENSOR_PARALLEL


def param_names(engine: Engine) -> dict[torch.nn.Parameter, str]:
    """Return the name of every parameter: that at ``deepspeed.initialize``, and the module's for later ones.

    At stages 1 and 2 it is the module's, by which DeepSpeed's files have all weights, as long as no two have one name.
    """
    now = {param: name for name, param in engine.module.named_parameters()}
    then = engine.param_names
    kind = _class_of(engine.optimizer)
    if kind is not None and not kind.per_param:
        names = {**then, **now}
        if len({*names.values()}) == len(names):
            return names
    return {**now, **then}


@contextmanager
def listed_by_optimizer(engine: Engine, trained: Collection[torch.nn.Parameter]) -> Iterator[None]:
    """Within this context, DeepSpeed's save lists every parameter as frozen that its optimizer has not ``trained``.

    DeepSpeed lists parameters by ``requires_grad``. One that does not require a gradient stays listed: a stock load
    looks for it there, even if it is trained. At stages 1 and 2, whose file has the frozen parameters in the module's
    state, every other tensor there is listed as a buffer (``all_buffer_names``).
    """
    names = param_names(engine)
    frozen_attributes = engine._get_zero_frozen_param_attributes
    module_state_dict = engine.module_state_dict
    buffer_names = engine._get_buffer_names

    def listed(attribute: Callable[[Any], Any]) -> OrderedDict[str, Any]:
        found = frozen_attributes(attribute)
        return OrderedDict(
            (name, found[name] if name in found else attribute(param))
            for param in engine.module.parameters()
            if (name := names[param]) in found or param not in trained
        )

    def module_state(*args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        state = module_state_dict(*args, **kwargs)
        if exclude_frozen_parameters:
            for name, param in engine.module.named_parameters():
                if param not in trained and (getattr(param, "ds_numel", 1) > 0 or not param.requires_grad):
                    state.pop(name, None)
        return state

    listing: dict[str, Callable[..., Any]] = {
        "_get_zero_frozen_param_attributes": listed,
        "module_state_dict": module_state,
    }
    kind = _class_of(engine.optimizer)
    if kind is not None and not kind.per_param:
        listing["_get_buffer_names"] = lambda: all_buffer_names(engine.module, buffer_names())
    with patched(engine, param_names=names, **listing):  # DeepSpeed looks for parameters that were added since, too
        yield


def all_buffer_names(module: torch.nn.Module, listed: Collection[str]) -> list[str]:
    """Return DeepSpeed's ``listed`` buffers, and every other tensor of the module's state that is no parameter.

    DeepSpeed goes by the first name of a buffer, and lists none where this one is not persistent and another one is. It
    does not list what a layer adds in ``_save_to_state_dict``, as quantised layers do, nor parameters that a hook of
    ``state_dict`` has given another name. Each tensor is listed once.
    """
    with torch.no_grad():
        state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    params = dict(module.named_parameters(remove_duplicate=False))
    known = {_place(params.get(name, tensor)) for name, tensor in state.items() if name in params or name in listed}
    found = [*listed]
    for name, tensor in state.items():
        if name in params or name in listed or name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            continue
        if (place := _place(tensor)) is None or place not in known:
            found.append(name)
            known.add(place)
    return found


def _place(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor; None for one that has no elements, or is not strided."""
    return tensor.data_ptr() if tensor.layout is torch.strided and tensor.numel() else None
