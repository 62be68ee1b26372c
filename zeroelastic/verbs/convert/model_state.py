"""The optimizer's state under the names that the model's tensors have: as they were saved, or before AutoEP's change.

Two tensors that AutoEP made of one (``autoep_names``) have state of their own, which is joined as they are. A group
that DeepSpeed split off for experts goes back into the group that it was split from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroelastic.checkpoint.optimizer_file import FP32, OptionValue, ParamGroup
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.core.digest import ScalarValue
from zeroelastic.errors import UnsupportedError, printable
from zeroelastic.verbs.convert.autoep_names import NamedModel, NamedTensor
from zeroelastic.verbs.model_tensors import ModelTensor, Place

_OF_EXPERTS = ("name", "moe")
"""The options by which DeepSpeed tells a group of experts from the group that it was split from."""


@dataclass(frozen=True, slots=True)
class TrainedParam:
    """The optimizer's state of a trained parameter: tensors by state key, without the master weight; other values."""

    name: str
    tensors: Mapping[str, NamedTensor]
    scalars: Mapping[str, ScalarValue]


def trained_params(state: SavedState, model: NamedModel) -> tuple[TrainedParam, ...]:
    """The optimizer's state under the names of ``model``, in the order of the saved parameters.

    Raises UnsupportedError for tensors that are joined and whose state has other keys, dtypes or values.
    """
    trained = state.parts[0]
    of_first = {_number(tensor.first): tensor for tensor in model.tensors if tensor.first.kind == "trained"}
    found: list[TrainedParam] = []
    for number, (dtypes, scalars) in enumerate(zip(trained.dtypes, trained.scalars, strict=True)):
        tensor = of_first.get(number)
        if tensor is None:
            continue
        for part in tensor.parts[1:]:
            other = _number(part.tensor)
            if trained.dtypes[other] != dtypes or _numbers(trained.scalars[other]) != _numbers(scalars):
                raise UnsupportedError(
                    f"{printable(tensor.name)}: {printable(trained.params[number].name)} and "
                    f"{printable(trained.params[other].name)}, of which it is made, have other optimizer state. "
                    "`zeroelastic convert --to dcp` writes each under its name in DeepSpeed."
                )
        keys = {key: dtype for key, dtype in dtypes.items() if key != FP32}
        tensors = {key: _of_state(tensor, key, dtype) for key, dtype in keys.items()}
        found.append(TrainedParam(tensor.name, tensors, scalars))
    return tuple(found)


def model_groups(state: SavedState, model: NamedModel) -> tuple[ParamGroup, ...]:
    """The optimizer's groups with the names of ``model``, and without those that DeepSpeed split off for experts.

    Raises UnsupportedError for tensors that are joined and in groups with other hyper-parameters.
    """
    params = state.parts[0].params
    own: dict[str, NamedTensor] = {
        params[_number(part.tensor)].name: tensor
        for tensor in model.tensors
        if tensor.first.kind == "trained"
        for part in tensor.parts
    }
    made: list[ParamGroup] = []
    options_of: dict[str, Mapping[str, OptionValue]] = {}
    for group in state.groups:
        plain = {key: value for key, value in group.options.items() if key not in _OF_EXPERTS}
        for name in group.params:
            if options_of.setdefault(own[name].name, plain) != plain:
                raise UnsupportedError(
                    f"{printable(own[name].name)}: the tensors of which it is made have other hyper-parameters. "
                    "`zeroelastic convert --to dcp` writes each under its name in DeepSpeed."
                )
        names = tuple(dict.fromkeys(own[name].name for name in group.params))
        if not group.options.get("moe"):
            made.append(ParamGroup(group.options, names))
            continue
        for i, before in enumerate(made):
            if {key: value for key, value in before.options.items() if key not in _OF_EXPERTS} == plain:
                made[i] = ParamGroup(before.options, tuple(dict.fromkeys((*before.params, *names))))
                break
        else:
            made.append(ParamGroup(plain, names))
    return tuple(made)


def _number(tensor: ModelTensor) -> int:
    """Which trained parameter a tensor is."""
    assert isinstance(tensor.source, Place) and tensor.source.part == 0
    return tensor.source.param


def _numbers(scalars: Mapping[str, ScalarValue]) -> dict[str, object]:
    return {key: value.canonical() for key, value in scalars.items()}


def _of_state(tensor: NamedTensor, key: str, dtype: str) -> NamedTensor:
    """The tensor of a state key, made of that of each part as the weight is."""
    parts = [
        replace(
            part,
            tensor=replace(part.tensor, dtype=dtype, kind="state", source=Place(0, _number(part.tensor), key)),
        )
        for part in tensor.parts
    ]
    return replace(tensor, parts=tuple(parts))
