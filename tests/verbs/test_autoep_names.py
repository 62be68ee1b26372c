"""Exported weights of AutoEP's layers: the model's own names and shapes where they are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from synthetic import Param, edit, model_name, optim_name, write_checkpoint

from zeroelastic.verbs.convert.convert import export

BLOCK = "model.layers.0.mlp"
LAYER = {"expert_key_prefix": f"{BLOCK}.experts", "ep_size": 1, "affine_maps": {"version": 1, "params": {}}}
EXPERTS, ROWS, COLUMNS = 4, 3, 5
GROUPS = (
    (Param(f"{BLOCK}.router.gate.weight", (EXPERTS, COLUMNS)), Param(f"{BLOCK}.shared_experts.up.weight", (2, 2))),
    (
        Param(f"{BLOCK}.experts.w1", (EXPERTS, ROWS, COLUMNS)),
        Param(f"{BLOCK}.experts.w2", (EXPERTS, COLUMNS, ROWS)),
        Param(f"{BLOCK}.experts.w3", (EXPERTS, ROWS, COLUMNS)),
    ),
)


def write_autoep(tag_dir: Path, options: dict[str, object], *, world_size: int = 3) -> dict[str, torch.Tensor]:
    """A checkpoint of one layer of AutoEP whose configuration has these ``expert_parallel``; its master weights."""
    truth = write_checkpoint(tag_dir, world_size=world_size, groups=GROUPS, frozen=())
    shapes = {param.name: param.shape for group in GROUPS for param in group}

    def configure(data: dict[str, Any]) -> None:
        data.setdefault("ds_config", {})["expert_parallel"] = options

    for rank in range(world_size):
        edit(
            tag_dir / model_name(rank),
            lambda data: data.update(ds_autoep_layers=[LAYER]),
        )
        edit(tag_dir / optim_name(rank), configure)
    return {
        name: torch.frombuffer(bytearray(truth[name]["fp32"][1]), dtype=torch.float32).view(shape)
        for name, shape in shapes.items()
    }


def exported(tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    export(tmp_path / "run" / "t", tmp_path / "out", **options)
    return {
        name: tensor
        for path in sorted((tmp_path / "out").glob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("max_memory", ["1GiB", "64MiB"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("max_shard_size", ["5GB", 200])
def test_experts_have_the_shapes_of_the_model(
    tmp_path: Path, dtype: str | None, max_memory: str, max_shard_size: object
) -> None:
    saved = write_autoep(tmp_path / "run" / "t", {"enabled": True, "preset_model": "qwen3_moe"})
    found = exported(tmp_path, dtype=dtype, max_memory=max_memory, max_shard_size=max_shard_size)
    to = torch.float32 if dtype is None else torch.bfloat16
    w1, w2, w3 = (saved[f"{BLOCK}.experts.w{i}"] for i in (1, 2, 3))
    want = {
        f"{BLOCK}.experts.gate_up_proj": torch.cat([w1, w3], dim=1),
        f"{BLOCK}.experts.down_proj": w2,
        f"{BLOCK}.gate.weight": saved[f"{BLOCK}.router.gate.weight"],
        f"{BLOCK}.shared_expert.up.weight": saved[f"{BLOCK}.shared_experts.up.weight"],
    }
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor.to(to)), name


def test_the_model_type_of_the_configuration_beside_the_tag_will_do(tmp_path: Path) -> None:
    write_autoep(tmp_path / "run" / "t", {"enabled": True})
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    (tmp_path / "run" / "latest").write_text("t")
    report = export(tmp_path / "run", tmp_path / "out", dry_run=True)
    assert report.notes is None and "notes" not in report.to_json()


@pytest.mark.parametrize(
    "options", [{"enabled": True}, {"enabled": True, "preset_model": "mixtral", "expert_w1": "gate_proj"}]
)
def test_experts_of_an_unknown_model_keep_the_names_of_deepspeed(tmp_path: Path, options: dict[str, object]) -> None:
    saved = write_autoep(tmp_path / "run" / "t", options)
    report = export(tmp_path / "run" / "t", tmp_path / "dry", dry_run=True)
    assert report.notes is not None and "DeepSpeed's names" in report.notes[0]
    found = exported(tmp_path)
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
