"""Lean checkpoints become FSDP2's with every tensor that the full checkpoint of the same step gives, and come back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import topologies
import torch
from exports import plain
from lean_saves import JOB, save_both, save_lean_and_full
from made_once import made_once
from read_dcp import read_dcp
from safetensors.torch import save_file
from topologies import TopologyJob
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.errors import DigestMismatchError, MissingFileError
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.safetensors import read_head

SECTION, FEATURE = "Using it", "From lean checkpoints to FSDP2 (`convert`)"
NOTE = "every tensor is that of the full checkpoint, to the bit"
LEAN = {"verify": True, "lean": True}


def save_topology(job: TopologyJob, directory: str) -> None:
    """Train, and save to the folders ``lean`` and ``full``."""
    save_both(topologies.build(job), topologies.step, directory)


def save_all_trained(job: Job, directory: str) -> None:
    """The same of a model that has nothing frozen: at stages 1 and 2 its 16-bit weights are not saved."""
    save_both(build_engine(job), train_step, directory)


LORA = TopologyJob(adapters=True, precision="bf16", config={"zeroelastic": {"lean": True}})
SAVES: dict[str, tuple[Any, int, Any]] = {
    "frozen-3": (save_lean_and_full, 3, JOB),
    "frozen-2": (save_lean_and_full, 3, replace(JOB, stage=2, zero={"round_robin_gradients": True})),
    "frozen-1-fp32": (save_lean_and_full, 2, replace(JOB, stage=1, precision="fp32")),
    "lora-3": (save_topology, 2, LORA),
    "lora-2": (save_topology, 3, replace(LORA, stage=2)),
    "trained-2": (save_all_trained, 3, Job(stage=2, frozen=False, options=LEAN)),
}


@pytest.fixture(scope="module", params=[*SAVES])
def saved(request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders ``lean`` and ``full``."""
    save, ranks, job = SAVES[request.param]
    return made_once(
        tmp_path_factory,
        f"fsdp2-lean-{request.param}",
        lambda directory: rank_pool.run(save, ranks, job, str(directory)) and None,
    )


@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
@pytest.mark.parametrize("layout", ["torch", "accelerate"])
def test_a_lean_checkpoint_gives_what_the_full_one_gives_and_comes_back(
    saved: Path, tmp_path: Path, layout: Any
) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name in ("lean", "full"):
        report = zeroelastic.convert(saved / name, tmp_path / name, to="fsdp2", layout=layout)
        with zeroelastic.open(saved / name) as ck:
            num_params = sum(ck[tensor].kind != "buffer" for tensor in ck if tensor not in ck.tied)
            assert report.digests_compared and report.digests_compared >= num_params
        folders = [path.parent for path in (tmp_path / name).rglob(".metadata")]
        found[name] = {key: value for folder in folders for key, value in read_dcp(folder).items()}
    lean, full = ({key: plain(value) for key, value in state.items()} for state in found.values())
    kept = [json.loads(found[name]["zeroelastic"]) for name in found]
    assert kept[0] == kept[1] and not {"lean", "frozen"} & kept[0]["ds_config"]["zeroelastic"].keys()
    assert lean == full
    with zeroelastic.open(saved / "full") as ck:
        for name in ck:
            assert torch.equal(found["lean"][f"model.{name}"], ck[name].torch()), name
    back = zeroelastic.convert(tmp_path / "lean", tmp_path / "back", from_="fsdp2", world_size=4)
    assert back.content_root == zeroelastic.verify(saved / "full").content_root
    assert not (tmp_path / "back" / FROZEN_FOLDER).exists() and zeroelastic.verify(tmp_path / "back").valid
    with zeroelastic.open(saved / "full") as one, zeroelastic.open(tmp_path / "back") as two:
        assert {name: one[name].kind for name in one} == {name: two[name].kind for name in two}
        assert one.groups == two.groups and one.step == two.step == 2


def test_a_shared_file_that_is_gone_or_damaged_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "lean", tmp_path / "run")
    files = [*tmp_path.glob(f"run/{FROZEN_FOLDER}/*")]
    if not files:
        assert "trained" in saved.name, "with everything trained there is no shared file"
        return
    tensor = max(read_head(files[0]).tensors.values(), key=lambda place: place.nbytes)
    with open(files[0], "r+b") as file:
        file.seek(tensor.offset + 1)
        file.write(bytes([255 - file.read(1)[0]]))
    with pytest.raises(DigestMismatchError):
        zeroelastic.convert(tmp_path / "run", tmp_path / "out", to="fsdp2")
    files[0].rename(tmp_path / "away")
    with pytest.raises(MissingFileError, match=f"{files[0].name}.*put the folder {FROZEN_FOLDER} of the run there"):
        zeroelastic.convert(tmp_path / "run", tmp_path / "out", to="fsdp2")
    assert not (tmp_path / "out").exists()


def write_base(folder: str) -> None:
    """On a rank: a model directory with the frozen weights of a LoRA job, as they are before the run."""
    model = topologies.build_model(LORA, ep=1)
    frozen = {name: param.detach() for name, param in model.named_parameters() if not param.requires_grad}
    save_file({name: param.bfloat16() for name, param in frozen.items()}, f"{folder}/model.safetensors")


@pytest.mark.support(SECTION, FEATURE, "exact", NOTE)
def test_weights_of_a_base_model_are_taken_from_where_it_is(rank_pool: RankPool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    rank_pool.run(write_base, 1, str(base))
    job = replace(LORA, config={"zeroelastic": {"lean": True, "frozen": str(base)}})
    rank_pool.run(save_topology, 2, job, str(tmp_path))
    record = read_record(next(path for path in (tmp_path / "lean").iterdir() if path.name.startswith("global_step")))
    assert record is not None and str(base / "model.safetensors") in [file.path for file in record.shared]
    for name in ("lean", "full"):
        zeroelastic.convert(tmp_path / name, tmp_path / f"{name}-fsdp", to="fsdp2")
    lean, full = (read_dcp(tmp_path / f"{name}-fsdp") for name in ("lean", "full"))
    assert lean.keys() == full.keys()
    assert all(plain(lean[key]) == plain(full[key]) for key in full)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(MissingFileError, match=r'model\.safetensors.*"frozen" in the "zeroelastic" block'):
        zeroelastic.convert(tmp_path / "lean", tmp_path / "out", to="fsdp2")
    assert not (tmp_path / "out").exists()
