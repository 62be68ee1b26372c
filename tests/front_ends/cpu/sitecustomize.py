"""A stand-in for GPUs: what the front ends need to run at all on a CPU. No part of zeroelastic.

Python imports this from PYTHONPATH in every process. It acts on ranks alone (RANK is set), and on what they import:

* FRONT_END_CPU=1: torch.distributed begins as gloo, and as DeepSpeed's, before a model is loaded: with ``use_cpu``
  accelerate begins it without DeepSpeed, and ``zero.Init`` then takes the run for one of a single rank.
* FRONT_END_TRACE=DIR: each rank writes the samples of every step to DIR/RANK.jsonl.
* FRONT_END_SHIM=NAME: what one front end needs besides, in ``shims.py``.
"""

import os
import sys


def _begin(module):
    import deepspeed

    deepspeed.init_distributed("gloo")


def _trace(module):
    import json

    original = module.Trainer.training_step
    path = os.path.join(os.environ["FRONT_END_TRACE"], os.environ["RANK"] + ".jsonl")

    def training_step(self, model, inputs, *args, **kwargs):
        found = set()
        for value in inputs.values():
            if hasattr(value, "flatten") and not value.is_floating_point():
                found |= {int(token) - 100 for token in value.flatten().tolist() if 100 <= token < 200}
        with open(path, "a") as file:
            print(json.dumps({"step": self.state.global_step + 1, "samples": sorted(found)}), file=file)
        return original(self, model, inputs, *args, **kwargs)

    module.Trainer.training_step = training_step


if "RANK" in os.environ and "FRONT_END_CPU" in os.environ:
    from zeroelastic.activation import when_imported

    when_imported("transformers.training_args", _begin)
    if "FRONT_END_TRACE" in os.environ:
        when_imported("transformers.trainer", _trace)
    if "FRONT_END_SHIM" in os.environ:
        sys.path.append(os.path.dirname(os.path.abspath(__file__)))
        import shims

        getattr(shims, os.environ["FRONT_END_SHIM"])()
