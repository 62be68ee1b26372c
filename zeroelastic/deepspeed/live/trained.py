"""Which parameters are trained: all that the optimizer has, even if ``requires_grad`` was changed since.

DeepSpeed's own save lists parameters by ``requires_grad``. Within ``listed_by_optimizer`` it lists them as zeroelastic
loads them, and as a stock load needs them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.patching import patched

Names = dict[torch.nn.Parameter, str]


def param_names(engine: Engine) -> Names:
    """The name of every parameter: that at ``deepspeed.initialize``, and the module's for parameters added since."""
    names: Names = {param: name for name, param in engine.module.named_parameters()}
    names.update(engine.param_names)
    return names


@contextmanager
def listed_by_optimizer(engine: Engine, trained: Collection[torch.nn.Parameter]) -> Iterator[None]:
    """Within this context, DeepSpeed's save lists every parameter that its optimizer has not ``trained`` as frozen.

    A parameter that does not require a gradient stays listed: a stock load looks for it there, even if it is trained.
    """
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
                if param not in trained and (getattr(param, "ds_numel", 1) > 0 or not param.requires_grad):
                    state.pop(name, None)
        return state

    with patched(engine, _get_zero_frozen_param_attributes=listed, module_state_dict=module_state):
        yield
