"""What frameworks keep beside the tag, at another world size: carried, derived for new ranks, or said to be left."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample import write_sample

from zeroelastic.core.world_size import derived_seed
from zeroelastic.runs.locate import find_source
from zeroelastic.torch_file.header import read_tree
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardReport, plan_reshard
from zeroelastic.verbs.reshard.reshard import run_reshard
from zeroelastic.verbs.reshard.sidecar_files import plan_sidecar_files, reseed, write_sidecar_files


def run(src: Path, dst: Path, world_size: int) -> ReshardReport:
    return run_reshard(plan_reshard(find_source(src), ReshardOptions(world_size=world_size)), dst)


def hf_states(rank: int, *, single: bool) -> dict[str, Any]:
    """What the Trainer's _save_rng_state puts together, with GPUs there."""
    gpu = torch.full((16,), rank, dtype=torch.uint8)
    return {
        "python": random.Random(rank).getstate(),
        "numpy": np.random.RandomState(rank).get_state(),
        "cpu": torch.Generator().manual_seed(rank).get_state(),
        "cuda": gpu if single else [gpu, gpu + 1],
    }


def hf_checkpoint(root: Path, world_size: int) -> Path:
    write_sample(root, world_size=world_size, steps=[4])
    for rank in range(world_size):
        name = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
        torch.save(hf_states(rank, single=world_size == 1), root / name)
    (root / "trainer_state.json").write_text('{"global_step": 4}')
    torch.save({"last_epoch": 4}, root / "scheduler.pt")
    (root / "config.json").write_text("{}")
    (root / "runs").mkdir()
    return root


def check_generators(state: dict[str, Any], rank: int, seed: int | None) -> None:
    """The states are those of generators with this seed; None means that of the saved rank."""
    python, legacy, generator = random.Random(), np.random.RandomState(), torch.Generator()
    python.setstate(state["python"])
    legacy.set_state(state["numpy"])
    generator.set_state(state["cpu"])
    want = rank if seed is None else seed
    assert python.random() == random.Random(want).random()
    assert legacy.rand() == np.random.RandomState(want & 0xFFFFFFFF).rand()
    assert torch.equal(torch.rand(7, generator=generator), torch.rand(7, generator=torch.Generator().manual_seed(want)))


@pytest.mark.parametrize(("saved", "world_size"), [(4, 3), (2, 5), (3, 1), (1, 3), (1, 1)])
def test_a_trainer_checkpoint_keeps_its_generators_and_gets_new_ones(
    tmp_path: Path, saved: int, world_size: int
) -> None:
    hf_checkpoint(tmp_path / "checkpoint-4", saved)
    report = run(tmp_path / "checkpoint-4", tmp_path / "to", world_size)
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == sorted(
        ["config.json", "global_step4", "latest", "scheduler.pt", "trainer_state.json", *names]
    )
    for rank, name in enumerate(names):
        state = torch.load(tmp_path / "to" / name, weights_only=False)
        kept = rank < saved
        check_generators(state, rank, None if kept else derived_seed(report.content_root, rank))
        assert isinstance(state["cuda"], torch.Tensor if world_size == 1 else list)
        gpu = state["cuda"] if world_size == 1 else state["cuda"][0]
        if kept:
            assert gpu.tolist() == [rank] * 16
        else:
            assert gpu.view(torch.int64).tolist() == [derived_seed(report.content_root, rank), 0]
    assert (tmp_path / "to" / "trainer_state.json").read_text() == '{"global_step": 4}'
    assert torch.load(tmp_path / "to" / "scheduler.pt") == {"last_epoch": 4}
    notes = " ".join(report.notes)
    assert "not carried: runs" in notes
    assert ("new, seeded" in notes) == (world_size > saved) and ("dropped" in notes) == (world_size < saved)


def test_generators_load_as_the_trainer_loads_them(tmp_path: Path) -> None:
    """weights_only with numpy's names allowed, as transformers does."""
    hf_checkpoint(tmp_path / "checkpoint-4", 2)
    run(tmp_path / "checkpoint-4", tmp_path / "to", 3)
    core = np._core if hasattr(np, "_core") else np.core
    allowed = [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    with torch.serialization.safe_globals(allowed):
        for rank in range(3):
            state = torch.load(tmp_path / "to" / f"rng_state_{rank}.pth", weights_only=True)
            assert set(state) == {"python", "numpy", "cpu", "cuda"}


def test_new_ranks_differ_from_each_other_and_follow_from_the_checkpoint(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path / "checkpoint-4", 2)
    run(tmp_path / "checkpoint-4", tmp_path / "a", 4)
    run(tmp_path / "checkpoint-4", tmp_path / "b", 4)
    cpu = {
        d: [torch.load(tmp_path / d / f"rng_state_{r}.pth", weights_only=False)["cpu"] for r in range(4)] for d in "ab"
    }
    assert all(torch.equal(a, b) for a, b in zip(cpu["a"], cpu["b"], strict=True))
    assert len({state.numpy().tobytes() for state in cpu["a"]}) == 4


def accelerate_checkpoint(root: Path, world_size: int) -> Path:
    write_sample(root, world_size=world_size, steps=[4], format="rigid", record=False)
    (root / "global_step4").rename(root / "pytorch_model")
    (root / "latest").write_text("pytorch_model")
    for rank in range(world_size):
        state = hf_states(rank, single=False)
        saved = {
            "step": 12,
            "random_state": state["python"],
            "numpy_random_seed": state["numpy"],
            "torch_manual_seed": state["cpu"],
            "torch_cuda_manual_seed": state["cuda"],
            "torch_xpu_manual_seed": torch.zeros(40, dtype=torch.uint8),
        }
        torch.save(saved, root / f"random_states_{rank}.pkl")
    torch.save({"last_epoch": 8}, root / "scheduler.bin")
    return root


def test_an_accelerate_checkpoint_keeps_its_step_on_every_rank(tmp_path: Path) -> None:
    accelerate_checkpoint(tmp_path / "from", 2)
    report = run(tmp_path / "from", tmp_path / "to", 3)
    for rank in range(3):
        state = torch.load(tmp_path / "to" / f"random_states_{rank}.pkl", weights_only=False)
        assert state["step"] == 12
        named = {
            "python": state["random_state"],
            "numpy": state["numpy_random_seed"],
            "cpu": state["torch_manual_seed"],
        }
        check_generators(named, rank, None if rank < 2 else derived_seed(report.content_root, rank))
    notes = " ".join(report.notes)
    assert "scheduler.bin: carried as it is" in notes and "its counter runs 2 to a step there and 3" in notes
    assert "random_states_2.pkl: torch_xpu_manual_seed is rank 0's" in notes
    assert find_source(tmp_path / "to").framework == "accelerate"


def test_a_lightning_checkpoint_is_one_again(tmp_path: Path) -> None:
    root = tmp_path / "last.ckpt"
    write_sample(root, world_size=2, steps=[4], format="rigid", record=False)
    (root / "global_step4").rename(root / "checkpoint")
    (root / "latest").write_text("checkpoint")
    (root / "zero_to_fp32.py").write_text("# script")
    run(root, tmp_path / "next.ckpt", 3)
    assert sorted(os.listdir(tmp_path / "next.ckpt")) == ["checkpoint", "latest", "zero_to_fp32.py"]
    assert find_source(tmp_path / "next.ckpt").framework == "lightning"


def test_beside_a_plain_tag_only_deepspeeds_scripts_are_carried_and_the_rest_is_said(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=2)
    for name in ("zero_to_fp32.py", "zero_to_torch.py", "notes.txt", ".hidden"):
        (tmp_path / "a" / name).write_text(name)
    report = run(tmp_path / "a" / "global_step2", tmp_path / "b", 1)
    assert sorted(os.listdir(tmp_path / "b")) == ["global_step2", "latest", "zero_to_fp32.py", "zero_to_torch.py"]
    notes = " ".join(report.notes)
    assert "notes.txt" in notes and "global_step4" in notes and "hidden" not in notes
    assert "the source's latest names global_step4; the target's names global_step2" in notes


def test_missing_and_damaged_generators_are_said(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path / "a", 3)
    (tmp_path / "a" / "rng_state_1.pth").unlink()
    sidecar_files = plan_sidecar_files(find_source(tmp_path / "a"), saved_world_size=3, world_size=4)
    assert (
        "none was saved for ranks 1" in " ".join(sidecar_files.notes)
        and sidecar_files.derived["rng_state_1.pth"][1] == 1
    )
    (tmp_path / "a" / "rng_state_0.pth").unlink()
    sidecar_files = plan_sidecar_files(find_source(tmp_path / "a"), saved_world_size=3, world_size=4)
    assert not sidecar_files.derived and "that of rank 0 is missing" in " ".join(sidecar_files.notes)
    (tmp_path / "out").mkdir()
    write_sidecar_files(find_source(tmp_path / "a"), sidecar_files, tmp_path / "out", identity="x")
    assert not list((tmp_path / "out").glob("rng*"))


def test_only_what_is_known_is_seeded_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"a": torch.arange(16), "b": torch.zeros(17, dtype=torch.uint8), "c": (3, (1,), None), "d": [1]}, path)
    _, left = reseed(read_tree(path), 5)
    assert left == ["b"]
