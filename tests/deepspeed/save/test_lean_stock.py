"""What DeepSpeed alone says of a lean tag: its load fails on every rank, and its script names the command to use."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.utils import zero_to_fp32
from lean_tags import BUFFER, build_lean_engine
from safetensors.torch import load_file
from training import Job, build_engine, raised, train_step
from warm_python import executable

from zeroelastic import export
from zeroelastic.deepspeed.save import recovery_script
from zeroelastic.testing import RankPool

JOB = Job(options={"verify": True, "lean": True}, frozen_table=60, elastic=False)
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


def save_lean_then_full(job: Job, directory: str) -> None:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="lean")
    engine._config._param_dict["zeroelastic"] = {}
    engine.save_checkpoint(directory, tag="full")


def load_by_deepspeed(job: Job, directory: str, tag: str) -> tuple[str, str]:
    import zeroelastic

    zeroelastic.uninstall()
    engine = build_engine(replace(job, installed=False))
    return raised(lambda: engine.load_checkpoint(directory, tag=tag))


@pytest.fixture(scope="module", params=[3, 2, 1])
def run(
    request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Job]:
    """A run with the tags ``lean`` and ``full``, in this order."""
    job = replace(JOB, stage=request.param)
    directory = tmp_path_factory.mktemp(f"stock-{request.param}")
    rank_pool.run(save_lean_then_full, 2, job, str(directory))
    return directory, job


def test_deepspeed_alone_fails_on_every_rank(rank_pool: RankPool, run: tuple[Path, Job]) -> None:
    directory, job = run
    for kind, message in rank_pool.run(load_by_deepspeed, 2, job, str(directory), "lean"):
        assert kind == "RuntimeError"
        assert "size" in message
    assert rank_pool.run(load_by_deepspeed, 2, job, str(directory), "full") == [("", "")] * 2


def run_script(path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [executable(), str(path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_script_of_deepspeed_names_the_command_for_a_lean_tag(run: tuple[Path, Job], tmp_path: Path) -> None:
    """The full tag that was saved last, which ``latest`` names, is read by DeepSpeed's own."""
    directory, _ = run
    for name in SCRIPTS:
        assert (directory / name).read_bytes() == Path(recovery_script.__file__).read_bytes()
        done = run_script(directory / name, "--max_shard_size", "5GB", directory, tmp_path / "out", "-t", "lean")
        assert done.returncode == 1
        assert f"zeroelastic export {directory / 'lean'} {tmp_path / 'out'}" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run_script(directory / "zero_to_fp32.py", directory, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "out/pytorch_model.bin")["up.weight"].shape == (33, 16)


def test_the_script_that_deepspeed_installs_passes_no_empty_weights_on(run: tuple[Path, Job], tmp_path: Path) -> None:
    """It is also what front ends call as a function. At stage 1 it leaves frozen weights out of every checkpoint."""
    directory, job = run
    done = run_script(Path(zero_to_fp32.__file__), directory, tmp_path / "out", "-t", "lean")
    if job.stage == 1:
        weights = torch.load(tmp_path / "out/pytorch_model.bin")
        assert "up.weight" in weights and all(weight.numel() for weight in weights.values())
        return
    message = {3: "RuntimeError", 2: "KeyError"}[job.stage]
    assert done.returncode == 1 and message in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


def save_buffer(job: Job, directory: str) -> None:
    engine = build_lean_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="lean")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_script_that_deepspeed_installs_passes_no_empty_buffers_on(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """Where the run has no frozen weights, at which it would fail."""
    rank_pool.run(save_buffer, 2, replace(JOB, stage=stage, frozen_table=0), str(tmp_path))
    done = run_script(Path(zero_to_fp32.__file__), tmp_path, tmp_path / "out", "-t", "lean")
    assert done.returncode == 1 and "AttributeError: 'NoneType'" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "out").exists()
    assert export(tmp_path / "lean", tmp_path / "exported").buffers
    assert load_file(tmp_path / "exported/model.safetensors")[BUFFER].tolist() == [*range(1 << 15)]


def test_the_script_needs_the_standard_library_alone(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "latest").write_text("tag\n")
    (tmp_path / "tag" / "zeroelastic.json").write_text(json.dumps({"shared": [{"path": "p"}]}))
    command = [executable(), "-I", "-S", recovery_script.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"zeroelastic export {tmp_path / 'tag'} OUT" in done.stderr


@pytest.mark.parametrize("text", ["", "[]", '{"shared": []}', "{}"])
def test_what_is_not_lean_is_left_to_deepspeed(tmp_path: Path, text: str) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "zeroelastic.json").write_text(text)
    assert recovery_script.lean_tag([str(tmp_path), "out", "-t", "tag"]) is None
    assert recovery_script.lean_tag([str(tmp_path)]) is None
    assert recovery_script.lean_tag([]) is None
