"""Model states by columns: the same as without, for the files of every ZeRO stage, and much less of it in Python."""

from __future__ import annotations

import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import TESTS
from synthetic import edit, model_name, write_checkpoint

from zeroelastic.checkpoint.model_states import ModelStates, open_model_states
from zeroelastic.core.layout import Param
from zeroelastic.errors import ZeroElasticError
from zeroelastic.executors.build_info import describe_build
from zeroelastic.torch_file import header
from zeroelastic.torch_file.columns import NamedColumn
from zeroelastic.torch_file.header import read_torch_file

pytestmark = pytest.mark.skipif(not describe_build("native").usable, reason="the native engine was not built")

GOLDEN = sorted(TESTS.glob("golden/*/global_step*/*model_states.pt"))
WHOLE = "mp_rank_00_model_states.pt"


@pytest.fixture(autouse=True)
def short_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dictionaries of two entries are columns."""
    monkeypatch.setattr(header, "LONG_LIST", 2)
    monkeypatch.setattr(header, "LARGE_PICKLE", 0)


def facts(model: ModelStates) -> dict[str, object]:
    """All that is in model states, to be compared; what reading them took is not."""
    named: dict[str, Any] = {name: getattr(model, name) for name in ModelStates.__slots__}
    del named["header_bytes"]
    named["weights"], named["params_alone"] = model.weights.tolist(), model.params_alone.tolist()
    if model.frozen is not None and model.frozen_extents is not None:
        named["frozen"] = (model.frozen.params, model.frozen.part.tolist())
        named["frozen_extents"] = (model.frozen_extents.dtype, model.frozen_extents.offset.tolist())
    return named


def outcome(path: Path) -> object:
    try:
        return facts(open_model_states(path, 0, world_size=None))
    except ZeroElasticError as error:
        return f"{type(error).__name__}: {error}"


def same_without_columns(path: Path) -> object:
    """What is read of a file, which is the same without columns."""
    found = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "pack_pickle", lambda data, *, long_list: None)
        assert found == outcome(path)
    return found


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parts[-3]}-{path.name[:14]}")
def test_files_of_deepspeed_say_the_same_by_columns(path: Path) -> None:
    root: Any = read_torch_file(path, foreign="inert", columns=True).root
    assert isinstance(root["module"], NamedColumn)
    assert isinstance(same_without_columns(path), dict)


def test_a_file_of_stage_0_is_refused_alike(tmp_path: Path) -> None:
    path = tmp_path / WHOLE
    module = torch.nn.Sequential(*[torch.nn.Linear(2, 3) for _ in range(4)]).state_dict()
    torch.save({"module": module, "param_shapes": None, "dp_world_size": 1, "mp_world_size": 1}, path)
    assert "holds no param_shapes" in str(same_without_columns(path))


def whole(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A file of the whole module that stage 2 writes, changed."""
    path.write_bytes(next(file for file in GOLDEN if file.parts[-3] == "stage2_rank2").read_bytes())
    edit(path, change)


def tie(data: dict[str, Any]) -> None:
    name = next(iter(data["param_shapes"][0]))
    data["module"].update({"tied": data["module"][name].view(-1), "tied again": data["module"][name][:1]})
    data["shared_params"] = {}


def share(data: dict[str, Any]) -> None:
    name = next(iter(data["param_shapes"][0]))
    data["client"] = [{"deep": (data["module"][name].view(-1)[:1],)}]


def transpose(data: dict[str, Any]) -> None:
    name = next(name for name, shape in data["param_shapes"][0].items() if len(shape) == 2)
    data["module"][name] = data["module"][name].t().contiguous().t()


def freeze(data: dict[str, Any]) -> None:
    for number in range(5):
        data["module"][f"frozen.{number}"] = torch.zeros(number, dtype=(torch.float32, torch.bfloat16)[number % 2])


def view(data: dict[str, Any]) -> None:
    flat = torch.cat([tensor.reshape(-1).float() for tensor in data["module"].values()])
    at = 0
    for name, tensor in data["module"].items():
        data["module"][name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()


CHANGES = {
    "ties": tie,
    "a tensor of client state": share,
    "strides": transpose,
    "frozen parameters": freeze,
    "one storage": view,
    "expanded": lambda data: data["module"].update(more=torch.zeros(1).expand(4)),
    "an extra state": lambda data: data["module"].update(_extra_state=None),
    "an object": lambda data: data["module"].update(_extra_state=Path("x")),
    "a name that is no text": lambda data: data["module"].update({7: torch.zeros(1)}),
    "a plain dictionary": lambda data: data.update(module=dict(data["module"])),
    "a shape that is none": lambda data: data["param_shapes"][0].update(odd=(1, "x")),
    "a shape of -1": lambda data: data["param_shapes"][0].update(odd=(1, -1)),
    "no module": lambda data: data.update(module=None),
    "a trained parameter that is not there": lambda data: data["module"].popitem(last=False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_odd_files_of_a_whole_module_say_the_same_by_columns(tmp_path: Path, what: str) -> None:
    whole(tmp_path / WHOLE, CHANGES[what])
    same_without_columns(tmp_path / WHOLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: None,
        lambda data: data.update(buffers=data["frozen_param_fragments"]),
        lambda data: data["frozen_param_fragments"].popitem(),
        lambda data: data["frozen_param_shapes"].update(more=torch.Size([2])),
        lambda data: data["module"].update(position=torch.zeros(3), frozen1=torch.zeros(0)),
        lambda data: data["param_shapes"][0].update(frozen1=torch.Size([2, 3])),
    ],
)
def test_odd_files_of_stage_3_say_the_same_by_columns(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    groups = [[Param(f"w{i}", (i % 3 + 1, 4)) for i in range(12)]]
    frozen = [Param(f"frozen{i}", (i + 2, 3)) for i in range(6)]
    write_checkpoint(tmp_path, world_size=2, groups=groups, frozen=frozen)
    edit(tmp_path / model_name(0), change)
    same_without_columns(tmp_path / model_name(0))


PARAMS = 100_000


@pytest.fixture(scope="module")
def many_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model states of stage 3 with a record, a name and a shape for each of many parameters."""
    path = tmp_path_factory.mktemp("many") / model_name(0)
    module = OrderedDict((f"layers.{i}.weight", torch.empty(0, dtype=torch.bfloat16)) for i in range(PARAMS))
    module._metadata = OrderedDict((f"layers.{i}", {"version": 1}) for i in range(PARAMS))  # type: ignore[attr-defined]
    shapes = OrderedDict((name, torch.Size((i % 7, 2))) for i, name in enumerate(module))
    torch.save(
        {"module": module, "param_shapes": [shapes], "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1}, path
    )
    return path


def test_a_parameter_takes_a_name_and_a_shape_and_no_other_object(many_params: Path) -> None:
    before = sys.getallocatedblocks()
    model = open_model_states(many_params, 0, world_size=1)
    assert len(model.sub_groups[0]) == PARAMS
    assert sys.getallocatedblocks() - before < 2.1 * PARAMS, "a name and a Param each"


def test_opening_model_states_takes_few_bytes_for_each_parameter(many_params: Path) -> None:
    """Beside the parameters themselves: the pickle, once and packed, and columns."""
    tracemalloc.start()
    try:
        model = open_model_states(many_params, 0, world_size=1)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(model.sub_groups[0]) == PARAMS and np.size(model.weights) == 0
    assert left < 250 * PARAMS and peak < 550 * PARAMS, (left / PARAMS, peak / PARAMS)
