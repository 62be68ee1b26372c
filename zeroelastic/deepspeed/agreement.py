"""The ranks of a new world compare what they build, before each first collective of DeepSpeed.

A rank that builds another model, or another ZeRO stage, takes part in other collectives than the rest: gloo then ends
their processes by SIGABRT, or all of them wait for one another. So each rank describes what it is about to build where
DeepSpeed begins to communicate: an engine, ``zero.Init``, and each module that ``zero.Init`` partitions. One reduction
of fixed size finds out whether the descriptions are alike. All ranks come to the same one, whatever they build: up to
the first difference they have done the same.

Sources (0.18.9 to 0.19.8): ``deepspeed.runtime.engine.DeepSpeedEngine.__init__``,
``deepspeed.runtime.zero.partition_parameters.Init``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zeroelastic.distributed.collective import all_gather, all_gather_alike, broadcast
from zeroelastic.errors import LayoutMismatchError, MembershipError

Facts = Mapping[str, str]
"""What a rank is about to build: named values, as text."""

_OF_ONE_RANK = {
    *("comms_logger", "csv_monitor", "comet", "dump_state", "flops_profiler", "memory_breakdown", "steps_per_print"),
    *("tensorboard", "wall_clock_breakdown", "wandb", "zeroelastic"),
}
"""Sections of the configuration that may differ between ranks; the last one is compared by ``agree_on_options``."""
_NUM_LISTED = 20

_agreement: _Agreement | None = None


class OtherRanksRefusedError(MembershipError):
    """Other ranks build another engine than this one and those that trained before: they are refused, this one not."""


class _Agreement:
    """The comparisons of one world; ``trained`` says whether this rank was in a world of the job before."""

    def __init__(self, arguments: Facts, *, trained: bool) -> None:
        self._arguments, self._trained = arguments, trained
        self.builds_engine = False

    def compare(self, what: str, facts: Facts) -> None:
        """Raise where a rank is about to build something else than ``what``, of these ``facts``. Collective.

        Those that have trained before go on, and raise OtherRanksRefusedError; the others raise LayoutMismatchError, as
        all ranks do where nobody has trained before or those that have differ among themselves.
        """
        own = {"what DeepSpeed builds": what, **self._arguments, **facts}
        code = hashlib.sha256(repr(sorted(own.items())).encode("utf-8", "surrogatepass")).hexdigest()
        if len(set(all_gather_alike(code))) == 1:
            return
        trained = all_gather(self._trained)
        first = trained.index(True) if any(trained) else 0
        expected = broadcast(own, src=first)
        found = all_gather(_differences(expected, own)[: _NUM_LISTED + 1])
        problems = [f"rank {rank}: {problem}" for rank, listed in enumerate(found) for problem in listed[:_NUM_LISTED]]
        problems += [f"rank {rank}: and more" for rank, listed in enumerate(found) if len(listed) > _NUM_LISTED]
        refused = [rank for rank, listed in enumerate(found) if listed]
        if trained[first] and not any(trained[rank] for rank in refused):
            if not _differences(expected, own):
                raise OtherRanksRefusedError(
                    "the job goes on without ranks that build another engine:" + "".join(f"\n  - {p}" for p in problems)
                )
            raise LayoutMismatchError(
                "this process builds another engine than the job that it would join, which goes on without it. Start "
                "it with the script, the arguments and the configuration of the job:",
                problems,
            )
        raise LayoutMismatchError(f"the ranks build different engines (compared with rank {first}):", problems)


@contextmanager
def same_on_all_ranks(arguments: Facts, *, trained: bool) -> Iterator[None]:
    """Within this context, what DeepSpeed builds is compared between the ranks first, and so are ``arguments``.

    ``trained`` says whether this rank was in the job before: those that were decide what is right.
    """
    global _agreement
    _agreement = _Agreement(arguments, trained=trained)
    try:
        yield
    finally:
        _agreement = None


@contextmanager
def compared(init: Callable[..., None], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Within this context, ``init`` makes an engine or a ``zero.Init``. Collective in a world that begins."""
    agreement = _agreement
    if agreement is None or agreement.builds_engine:
        yield
        return
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    if (model := given.get("model")) is None:
        if given.get("enabled", True):
            config, module = given.get("config_dict_or_path", given.get("config")), given.get("module")
            facts = _config_facts(config) if isinstance(config, Mapping) else {}  # a path is compared by the engine
            agreement.compare("zero.Init", facts | ({} if module is None else _tensor_facts(module)))
        yield
        return
    optimizer = given.get("optimizer")
    groups = _group_facts(optimizer, given.get("model_parameters"), model)
    facts = {"the class of the optimizer": _class_of(optimizer), **groups, **_tensor_facts(model)}
    agreement.compare("an engine", facts | _config_facts(given["config_class"]._param_dict))
    agreement.builds_engine = True  # its own zero.Init follows from this
    try:
        yield
    finally:
        agreement.builds_engine = False


def compare_module(module: torch.nn.Module) -> None:
    """``zero.Init`` is about to partition what a module has by itself. Collective in a world that begins."""
    if _agreement is None or _agreement.builds_engine or next(module.parameters(recurse=False), None) is None:
        return
    _agreement.compare(f"a {type(module).__qualname__} in zero.Init", _tensor_facts(module, recurse=False))


def _tensor_facts(model: torch.nn.Module, *, recurse: bool = True) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, param in model.named_parameters(recurse=recurse):
        found[f"parameter {name}"] = _tensor_text(param) + ("" if param.requires_grad else ", frozen")
    for name, buffer in model.named_buffers(recurse=recurse):
        found[f"buffer {name}"] = _tensor_text(buffer)
    return found


def _tensor_text(tensor: torch.Tensor) -> str:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that is partitioned already
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"


def _class_of(optimizer: object) -> str:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__qualname__
    return str(getattr(optimizer, "__qualname__", type(optimizer).__qualname__))


def _group_facts(optimizer: object, model_parameters: object, model: torch.nn.Module) -> dict[str, str]:
    """The optimizer group of each parameter, as far as it is known before the engine is built."""
    groups: object = getattr(optimizer, "param_groups", model_parameters)
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        return {}
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, str] = {}
    for number, group in enumerate(groups):
        params = group["params"] if isinstance(group["params"], Sequence) else ()
        found |= {
            f"the optimizer group of {names.get(id(param), 'another parameter')}": str(number) for param in params
        }
    return found


def _config_facts(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        elif not name.endswith(("path", "folder")):  # a place on this node
            found[f'"{name}" in the configuration'] = repr(value)

    for key, value in config.items():
        if key not in _OF_ONE_RANK:
            add(str(key), value)
    return found


def _differences(expected: Facts, own: Facts) -> list[str]:
    names = dict.fromkeys([*expected, *own])
    return [
        f"{name} is {own.get(name, 'not there')}, and in the job {expected.get(name, 'not there')}"
        for name in names
        if own.get(name) != expected.get(name)
    ]
