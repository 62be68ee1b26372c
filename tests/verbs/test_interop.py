"""Nobody is locked in: stock DeepSpeed and its tools read elastic files, and installing changes nothing else."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_programs import make_universal, merged_by_zero_to_fp32
from training import LOSS_RTOL, Job, Outcome, build_engine, initialize, resume, train_and_save, train_step

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.testing import RankPool, compare_states, gather_state


@pytest.fixture(scope="module")
def saves(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """The same run saved three ways: elastic, rigid, and by stock DeepSpeed."""
    jobs = {"elastic": Job(), "rigid": Job(elastic=False), "stock": Job(elastic=False, installed=False)}
    made: dict[str, tuple[Path, Outcome]] = {}
    for name, job in jobs.items():
        directory = tmp_path_factory.mktemp(name)
        made[name] = directory, rank_pool.run(train_and_save, 4, job, str(directory))[0]
    return made


@pytest.mark.support("Using it", "training after `install()`", "exact", "the same losses and states as without")
@pytest.mark.core
def test_installing_does_not_change_training(saves: dict[str, tuple[Path, Outcome]]) -> None:
    states = [outcome.state for _, outcome in saves.values()]
    losses = [outcome.losses for _, outcome in saves.values()]
    assert states[0] == states[1] == states[2]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.support("Using it", "elastic checkpoints in stock DeepSpeed, at the same world size", "exact")
@pytest.mark.parametrize("elastic_flag", [pytest.param(False, marks=pytest.mark.core), True])
def test_stock_deepspeed_loads_an_elastic_file_at_the_same_world_size(
    rank_pool: RankPool, saves: dict[str, tuple[Path, Outcome]], elastic_flag: bool
) -> None:
    directory, saved = saves["elastic"]
    job = Job(installed=False, elastic=elastic_flag, perturb=0.5, lr=0.1)
    outcome = rank_pool.run(resume, 4, job, str(directory))[0]
    assert compare_states(saved.state, outcome.state) == []
    assert outcome.gathered == saved.gathered
    assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.core
def test_elastic_files_are_not_larger(saves: dict[str, tuple[Path, Outcome]]) -> None:
    elastic, stock = saves["elastic"][0] / "global_step3", saves["stock"][0] / "global_step3"
    num_params = 9
    for path in sorted(stock.glob("*optim_states.pt")):
        extra = (elastic / path.name).stat().st_size - path.stat().st_size
        assert extra <= 64 * 1024 + 200 * num_params
    for path in sorted(stock.glob("*model_states.pt")):
        assert (elastic / path.name).stat().st_size - path.stat().st_size <= 128, "the save's id"


def test_elastic_metadata_stays_within_200_bytes_per_parameter(rank_pool: RankPool, tmp_path: Path) -> None:
    """Without the fixed allowance of 64 KiB, which would hide it."""
    sizes = rank_pool.run(sizes_of_many_parameters, 2, str(tmp_path))
    elastic, rigid, num_params = sizes[0]
    assert num_params == 500
    assert elastic - rigid <= 200 * num_params


def sizes_of_many_parameters(directory: str) -> tuple[int, int, int]:
    sizes = []
    for elastic in (True, False):
        model = torch.nn.Module()
        for i in range(500):
            model.register_parameter(f"transformer_block_{i // 10}_weight_{i}", torch.nn.Parameter(torch.ones(9)))
        model.forward = functools.partial(_sum_of, model)  # type: ignore[method-assign]
        engine = initialize(model, {"stage": 3, "elastic_checkpoint": elastic}, train_batch_size=2)
        engine.backward(engine())
        engine.step()
        engine.save_checkpoint(directory, tag=str(elastic))
        path = Path(engine._get_zero_ckpt_name(directory, str(elastic)))
        sizes.append(path.stat().st_size)
        engine.destroy()
    return sizes[0], sizes[1], 500


def _sum_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([param.sum() for param in model.parameters()]).mean()


@pytest.mark.core
def test_padding_is_zero_on_disk(saves: dict[str, tuple[Path, Outcome]]) -> None:
    for path in sorted((saves["elastic"][0] / "global_step3").glob("*optim_states.pt")):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        for i, table in enumerate(state["zeroelastic"]["sub_groups"]):
            world_size = state["zeroelastic"]["world_size"]
            flats = [state["fp32_flat_groups"][i]]
            flats += [v for v in state["optimizer_state_dict"]["state"][i].values() if v.dim() == 1]
            assert len(flats) == 3
            offset = 0
            for shape, numel in zip(table["shapes"], table["numels"], strict=True):
                part = -(-torch.Size(shape).numel() // world_size)
                for flat in flats:
                    assert (flat[offset + numel : offset + part] == 0).all()
                offset += part


@pytest.mark.support("Using it", "`zero_to_fp32.py` on elastic checkpoints", "exact")
@pytest.mark.core
def test_zero_to_fp32_gives_the_trained_weights(
    rank_pool: RankPool, saves: dict[str, tuple[Path, Outcome]], tmp_path: Path
) -> None:
    """With the script that DeepSpeed leaves in the directory."""
    names = ("elastic", "stock")
    weights = dict(zip(names, merged_by_zero_to_fp32([saves[name][0] for name in names], tmp_path), strict=True))
    assert weights["elastic"].keys() == weights["stock"].keys()
    for key, value in weights["stock"].items():
        assert torch.equal(weights["elastic"][key], value), key
    gathered = rank_pool.run(full_masters, 1, Job().other(), str(saves["elastic"][0]))[0]
    for name, master in gathered.items():
        assert torch.equal(weights["elastic"][name], master), name


def full_masters(job: Job, directory: str) -> dict[str, torch.Tensor]:
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    return {key.removeprefix("master/"): t for key, t in gather_state(engine).items() if key.startswith("master/")}


@pytest.mark.support("Using it", "runs at stage 0", "exact", "left to DeepSpeed")
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.core), 1, 2])
def test_runs_at_other_stages_are_as_without_us(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """At stages 1 and 2, with a commit record beside the same files, and a report."""
    results = {
        installed: rank_pool.run(
            train_save_load, 2, Job(stage=stage, installed=installed, elastic=False), str(tmp_path / str(installed))
        )
        for installed in (True, False)
    }
    assert results[True] == results[False]
    ours, theirs = (
        {p.relative_to(tmp_path / str(installed)) for p in (tmp_path / str(installed)).rglob("*")}
        for installed in (True, False)
    )
    assert ours - theirs == ({Path("global_step1", RECORD_NAME)} if stage else set()) and theirs <= ours


def train_save_load(job: Job, directory: str) -> list[float]:
    engine = build_engine(job)
    losses = [train_step(engine, 0)]
    engine.save_checkpoint(directory)
    losses.append(train_step(engine, 1))
    engine.load_checkpoint(directory)
    losses.append(train_step(engine, 1))
    assert hasattr(engine, "zeroelastic_report") == (job.installed and job.stage > 0)
    assert losses[1] == losses[2]
    return losses


@pytest.mark.support("Using it", "Universal Checkpoints (`load_universal`)", "exact", "left to DeepSpeed")
def test_universal_checkpoints_are_left_to_deepspeed(
    rank_pool: RankPool, saves: dict[str, tuple[Path, Outcome]], tmp_path: Path
) -> None:
    make_universal(next(saves["stock"][0].glob("global_step*")), tmp_path / "u")
    job = Job().other(elastic=False, config={"checkpoint": {"load_universal": True}})
    outcome: Any = rank_pool.run(resume, 3, job, str(tmp_path / "u"))[0]
    masters = {k: v for k, v in saves["stock"][1].state.items() if k.startswith("master/")}
    assert {k: v for k, v in outcome.state.items() if k.startswith("master/")} == masters
    assert outcome.report is None
