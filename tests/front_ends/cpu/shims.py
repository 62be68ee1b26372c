"""What one front end needs besides ``sitecustomize`` to run on a CPU, by name. No part of zeroelastic."""

import json
import os


def openrlhf():
    """OpenRLHF calls torch.cuda by name, makes a mesh of CUDA devices, and has a trainer of its own to trace."""
    from zeroelastic.activation import when_imported

    when_imported("torch", _no_cuda)
    when_imported("torch.distributed.device_mesh", _cpu_mesh)
    when_imported("openrlhf.trainer.sft_trainer", _trace)


def _no_cuda(torch):
    """Each a function of its own: torch.compile sorts them by object."""

    def set_device(device):
        pass

    def synchronize(device=None):
        pass

    def empty_cache():
        pass

    def current_device():
        return "cpu"

    for function in (set_device, synchronize, empty_cache, current_device):
        setattr(torch.cuda, function.__name__, function)


def _cpu_mesh(module):
    original = module.init_device_mesh
    module.init_device_mesh = lambda device, *args, **kwargs: original("cpu", *args, **kwargs)


def _trace(module):
    path = os.path.join(os.environ["FRONT_END_TRACE"], os.environ["RANK"] + ".jsonl")

    def note(**row):
        with open(path, "a") as file:
            print(json.dumps(row), file=file)

    init, logs = module.SFTTrainer.__init__, module.SFTTrainer.save_logs_and_checkpoints

    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        engine = self.model.model

        def look(engine_, inputs, named):
            tokens = [*inputs, *named.values()][0].flatten().tolist()
            found = sorted({int(token) - 100 for token in tokens if 100 <= token < 200})
            note(step=engine.global_steps + 1, samples=found)

        engine.register_forward_pre_hook(look, with_kwargs=True)

    def save_logs_and_checkpoints(self, args, global_step, step_bar, logs_dict=None, client_states=None):
        note(step=global_step, loss=logs_dict["loss_mean"])
        return logs(self, args, global_step, step_bar, logs_dict, client_states)

    module.SFTTrainer.__init__ = __init__
    module.SFTTrainer.save_logs_and_checkpoints = save_logs_and_checkpoints
