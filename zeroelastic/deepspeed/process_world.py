"""The torch and DeepSpeed world of this process: begun over a store, and ended so that another one can follow.

A process group of gloo has three threads and about ten files, which end with its last reference. Some references are in
places that ``engine.destroy()`` does not look at, and stay for the life of the process:

    ZeRO-3           its stack of modules, and a cache of a method of its coordinator, keep each model, and with it
                     engine, optimizer and groups
    stages 1 and 2   a parameter has a reference to the node of the autograd graph that accumulates its gradient, and
                     the node one to the parameter, which the garbage collector does not see: each parameter stays,
                     with the 16-bit weights of the whole model and the groups
    torch            ``torch.distributed.nn.functional`` has the group of the time of its import as default arguments

``end_world`` removes every reference to the world that it knows of, so that the groups end at once, even while the
caller still has the engine, and without a collection of garbage, which takes 0.1 to 0.2 s in such a process.
Sources (0.18.9 to 0.19.8): ``deepspeed.comm.comm``, ``deepspeed.utils.groups``, ``deepspeed.runtime.zero``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.save.pending import unfinished

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WITH_GROUPS = (
    "deepspeed.utils.groups",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
)
"""The modules that keep process groups in globals; only those that were imported have any."""
_INITIAL: dict[str, object] = {
    "mpu": None,
    "mesh_device": None,
    "expert_tensor_parallel_world_size": 1,
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": None,
    "_MPU_TENSOR_MODEL_PARALLEL_RANK": None,
}
"""Other globals of ``deepspeed.utils.groups`` that describe a world, as they are when it is imported."""


def begin_world(store: Store, *, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
    """Make this process a rank of a new world; ``deepspeed.initialize`` then builds its engine there. Collective.

    ``store`` must have no keys of another world: give a ``PrefixStore`` of this world's own. The ``timeout`` of
    collectives is by default that of ``deepspeed.init_distributed``. RANK and WORLD_SIZE are set in
    the environment; LOCAL_RANK, which names the device, stays. Raises RuntimeError if a world has not ended.

        begin_world(dist.PrefixStore("world 1", store), rank=0, world_size=3)
        with only_new_garbage():
            engine, *_ = deepspeed.initialize(model=model, config=config)
        ...
        end_world(engine)
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a world already: call end_world() first.")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.constants import default_pg_timeout

    accelerator, comm = get_accelerator(), importlib.import_module("deepspeed.comm.comm")
    backend, timeout = accelerator.communication_backend_name(), timeout or default_pg_timeout
    device = None
    if accelerator.device_name() == "cuda" and world_size > 1:  # as deepspeed.comm.torch.TorchBackend does
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        accelerator.set_device(device.index)  # of collectives before DeepSpeed has set it
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    _set(comm, "cdb", None)
    comm.init_distributed(dist_backend=backend, timeout=timeout, dist_init_required=False)
    # Its size is that of the first world of this process, and cannot change; without it DeepSpeed uses the backend.
    comm.cdb.shm_comm_op = None


def set_default_timeout(limit: timedelta) -> None:
    """Set the timeout of the default group, which DeepSpeed and ``begin_world`` make with a limit of their own."""
    comm = importlib.import_module("deepspeed.comm.comm")
    _set(importlib.import_module("deepspeed.constants"), "default_pg_timeout", limit)
    function = comm.init_distributed
    names = [name for name, one in inspect.signature(function).parameters.items() if one.default is not one.empty]
    function.__defaults__ = tuple(
        limit if name == "timeout" else value for name, value in zip(names, function.__defaults__, strict=True)
    )


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within this context, collections of garbage look only at objects that were made in it.

    For the time in which an engine is built: ZeRO-3 collects then (``runtime.zero.utils.defragment``), and would look
    at half a million objects of the modules that are imported. Nothing is changed where others have frozen objects.
    """
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def end_world(engine: Engine | None) -> None:
    """Destroy the engine, if it was built, and leave the world, with all threads, files and memory of both.

    The caller has taken what it needs: the engine and its optimizers are empty afterwards, and so are the parameters
    and buffers of the model. Not collective: when a rank ends the world, the others lose it in their collectives, so
    all are at the same step before. Raises what ``engine.destroy()`` raises, such as the error of a save in the
    background; the world has ended then, too.
    """
    groups = [weakref.ref(group) for group in _world.pg_map]
    try:
        if engine is not None:
            engine.destroy()
    finally:
        if engine is not None:
            _empty(engine)
        _forget_models()
        _forget_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        if any(group() is not None for group in groups):
            gc.collect()  # of an object that refers to itself: of an engine that was not built to its end, for one


def end_groups_at_exit() -> None:
    """Destroy the process groups of the last world when the interpreter ends.

    A thread of gloo may still have the tensor of a collective that is done. Where the interpreter has ended meanwhile,
    it cannot free the Python object, and torch ends the process by SIGABRT ("terminate called without an active
    exception"; ``ProcessGroupGloo::runLoop``, torch 2.13).
    """

    def end() -> None:
        for save in unfinished():
            save.at_exit()
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(end)


def _empty(engine: Any) -> None:
    """Remove the references of an engine, in whatever state it is, to what is of its world."""
    writer = getattr(getattr(getattr(engine, "monitor", None), "tb_monitor", None), "summary_writer", None)
    if writer is not None:
        writer.close()  # has a thread and a file
    if isinstance(model := getattr(engine, "module", None), torch.nn.Module):
        _empty_model(model)
    optimizer = getattr(engine, "optimizer", None)
    bases: list[Any] = [found for found in (optimizer, getattr(optimizer, "optimizer", None)) if _is_of_torch(found)]
    for part in (getattr(optimizer, "parameter_offload", None), optimizer, engine):
        if part is not None and not _is_of_torch(part):
            vars(part).clear()
    torch.nn.Module.__init__(engine)
    for base in bases:  # a scheduler has a reference to it
        base.state.clear()
        base.param_groups.clear()


def _is_of_torch(optimizer: object) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer)


def _empty_model(model: torch.nn.Module) -> None:
    """Free what a model holds, and remove what ZeRO has added, through which it refers to itself."""
    for param in model.parameters():
        for name, value in list(vars(param).items()):
            if _is_of_a_world(name, value):
                for init in _inits_of(value):
                    vars(init).clear()
                delattr(param, name)
        param.data, param.grad = param.data.new_empty(0), None
    for buffer in model.buffers():
        buffer.data = buffer.data.new_empty(0)
    for module in model.modules():
        if hasattr(module._parameters, "_parent_module"):  # the table of parameters of ZeRO-3
            module._parameters = dict(module._parameters)
        for name in ("ds_external_parameters", "all_parameters"):
            vars(module).pop(name, None)
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            _cut_off(vars(module).pop(name, None), module)


def _cut_off(function_class: type | None, module: torch.nn.Module) -> None:
    """Remove the references to a module from the methods of a class, which are functions in a method of DeepSpeed."""
    for member in vars(function_class).values() if function_class is not None else ():
        for cell in _cells(getattr(member, "__func__", None)):
            if cell.cell_contents is module:
                cell.cell_contents = None


def _is_of_a_world(name: str, value: object) -> bool:
    """Whether an attribute of a parameter is DeepSpeed's and leads to its world, or to the parameter itself.

    What can be called is a method of the optimizer or of ``zero.Init``, or a node of the autograd graph.
    """
    return name.startswith("ds_") or callable(value) or isinstance(value, dist.ProcessGroup)


def _inits_of(method: object) -> list[Any]:
    """The ``zero.Init`` that gave a parameter this method, if it did: the method is a function in one of its own."""
    init = importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init
    return [cell.cell_contents for cell in _cells(method) if isinstance(cell.cell_contents, init)]


def _cells(function: object) -> list[CellType]:
    """The variables of surrounding functions that a function uses, where they have a value."""
    cells = (function.__closure__ or ()) if isinstance(function, FunctionType) else ()
    return [cell for cell in cells if cell != CellType()]


def _forget_models() -> None:
    """Put back what ZeRO-3 has changed in torch and in its own classes."""
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    parameters = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    offload.FWD_MODULE_STACK.clear()
    for method in vars(coordinator.PartitionedParameterCoordinator).values():
        for cell in _cells(method):  # of the wrapper of a method whose results are cached, with the arguments
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
    parameters.empty_buffers.clear()
    # A rank that begins its first world numbers modules and parameters as one that had others before. The number of
    # modules is a default argument of ``_register_deepspeed_module(self, module, count=[0])``.
    register = inspect.unwrap(offload.DeepSpeedZeRoOffload._register_deepspeed_module)
    register.__defaults__[0][0] = 0
    for name in ("param_id", "num_persisted_parameters", "num_persisted_elements"):
        setattr(parameters.Init, name, 0)
    base = parameters.InsertPostInitMethodToModuleSubClasses
    base.num_module_parameters = base.num_module_elements = 0
    if hasattr(base, "linear_bk") and torch.nn.functional.linear is parameters.zero3_linear_wrap:
        _set(torch.nn.functional, "linear", base.linear_bk)  # what another library put there stays
        del base.linear_bk  # the next world keeps what is there then


def _forget_groups() -> None:
    """Remove the process groups from the globals of DeepSpeed and torch."""
    for module in [sys.modules[name] for name in _WITH_GROUPS if name in sys.modules]:
        for key, value in list(vars(module).items()):
            if isinstance(value, dist.ProcessGroup):
                _set(module, key, None)
            elif isinstance(value, dict) and key.endswith(("_GROUP", "_GROUP_RANKS")):
                value.clear()
    groups = importlib.import_module("deepspeed.utils.groups")
    for key in vars(groups).keys() & _INITIAL.keys():
        _set(groups, key, _INITIAL[key])
    _set(importlib.import_module("deepspeed.comm.comm"), "cdb", None)
    functions = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functions).values() if functions is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            defaults = [None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__]
            function.__defaults__ = tuple(defaults)  # None is the group of all ranks, of any world


def _set(module: Any, name: str, value: object) -> None:
    """Set a global of a module, which mypy allows only for those that it knows."""
    setattr(module, name, value)
