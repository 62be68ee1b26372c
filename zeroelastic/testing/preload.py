"""What a process imports once, before ranks are forked from it. Nothing of zeroelastic is imported here.

The imports of the first ``deepspeed.initialize`` take two thirds of a rank's start.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable
from contextlib import suppress

DEEPSPEED_MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.cpp_extension",
    "torch.utils.serialization.config",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "numpy.ma",
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def preload(names: Iterable[str]) -> None:
    """Import modules, and get the CPU information once for all ranks.

    DeepSpeed gets that twice for each op that a rank loads, and each time starts a process that takes a second or more.
    A quarter of the time of these imports is the garbage collector's, which finds little: it is off meanwhile.
    """
    gc.disable()
    for name in names:
        # A module that cannot be imported fails again in the rank that needs it, and that traceback is reported.
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):  # without it, ranks get it themselves
        cpuinfo = importlib.import_module("cpuinfo")
        known = cpuinfo.get_cpu_info()
        setattr(cpuinfo, "get_cpu_info", lambda: dict(known))  # noqa: B010 - mypy allows no assignment to a module
    gc.enable()
