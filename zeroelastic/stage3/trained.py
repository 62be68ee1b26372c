"""Which parameters are trained: those that the optimizer has, whatever their ``requires_grad`` says by now.

DeepSpeed's own save lists parameters by ``requires_grad``. While ``listed_by_optimizer`` lasts it lists them as our
loads read them, and a stock load finds what it looks for too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeroelastic.patching import patched

Names = dict[torch.nn.Parameter, str]


def param_names(engine: Any) -> Names:
    """The name of every parameter: as of ``deepspeed.initialize``, and the module's for what it has got since."""
    names: Names = {param: name for name, param in engine.module.named_parameters()}
    names.update(engine.param_names)
    return names


def trained_params(optimizer: Any) -> set[torch.nn.Parameter]:
    """The parameters that a ZeRO-3 optimizer has."""
    return {param for members in optimizer.fp16_groups for param in members}


@contextmanager
def listed_by_optimizer(engine: Any) -> Iterator[None]:
    """While it lasts, DeepSpeed's save lists every parameter that its optimizer lacks as frozen.

    What does not require a gradient stays listed: a stock load looks for it there, also where it is trained.
    """
    trained = trained_params(engine.optimizer)
    names = engine.param_names
    frozen_attributes = engine._get_zero_frozen_param_attributes
    module_state_dict = engine.module_state_dict

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
                if param not in trained and (param.ds_numel > 0 or not param.requires_grad):
                    state.pop(name, None)
        return state

    with patched(engine, _get_zero_frozen_param_attributes=listed, module_state_dict=module_state):
        yield
