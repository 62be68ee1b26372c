"""What lean runs do between saves: they save beside training, and freeze, unfreeze and change weights and buffers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_writers import writer_job
from extended import with_swept
from safetensors import safe_open
from saved_files import record_of
from test_lean import LEAN, shared_files
from torch_files import bits_of_tensor
from training import Job, build_engine, look, train_step, wait_for_every_gather

import zeroelastic
from zeroelastic.testing import RankPool

support = pytest.mark.support
SECTION = "Checkpoint engines and storage"
JOB = Job(options=LEAN, frozen_table=60)


def names_in(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return {*file.keys()}


def refers_to(tag_dir: Path) -> list[str]:
    return [file.name for file in record_of(tag_dir).shared]


def as_they_are(run: Path) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_ino) for path in shared_files(run)]


def load_each(job: Job, directory: str, tags: tuple[str, ...]) -> list[dict[str, Any]]:
    engine = build_engine(job)
    found = []
    for tag in tags:
        engine.load_checkpoint(directory, tag=tag)
        assert engine.zeroelastic_report.root_matches is not False
        found.append(look(engine)[0])
    return found


# --- saves beside training --------------------------------------------------------------------------------------------


def save_beside(job: Job, directory: str) -> list[dict[str, Any]]:
    """Two saves that are committed while training goes on, or at the next step."""
    engine = build_engine(job)
    states = []
    for step, tag in enumerate(("a", "b")):
        train_step(engine, step)
        states.append(look(engine)[0])
        engine.save_checkpoint(directory, tag=tag)
    train_step(engine, 2)
    zeroelastic.wait_for_save(engine)
    engine.destroy()
    return states


@support(SECTION, "lean saves in the background and by decoupled writers", "exact")
@pytest.mark.parametrize(
    ("stage", "decoupled"), [(3, False), (2, False), (3, True)], ids=["background", "stage 2", "decoupled"]
)
def test_lean_saves_that_are_committed_later(rank_pool: RankPool, tmp_path: Path, stage: int, decoupled: bool) -> None:
    job = replace(JOB, stage=stage, options={**LEAN, "async_save": not decoupled})
    if decoupled:
        job = replace(job, config=writer_job("python", decoupled=True).config)
    states = rank_pool.run(save_beside, 2, job, str(tmp_path))[0]
    assert len(shared_files(tmp_path)) == 1
    for found in rank_pool.run(load_each, 3, replace(JOB, stage=stage).other(), str(tmp_path), ("a", "b")):
        assert found == states


# --- frozen weights that change ---------------------------------------------------------------------------------------


def save_and_change(job: Job, directory: str) -> list[dict[str, Any]]:
    """A save, and one after a frozen weight was changed, as merging an adapter does."""
    engine = build_engine(job)
    states = []
    for tag in ("first", "changed"):
        train_step(engine, 0)
        states.append(look(engine)[0])
        engine.save_checkpoint(directory, tag=tag)
        weight = engine.module.frozen_table.weight
        getattr(weight, "ds_tensor", weight).data.add_(1.0)
    return states


def resume_and_save(job: Job, directory: str, tag: str, to: str) -> dict[str, Any]:
    engine = build_engine(job)
    engine.load_checkpoint(directory, tag=tag)
    state = look(engine)[0]
    engine.save_checkpoint(directory, tag=to)
    return state


@support(SECTION, "lean runs that change, freeze or unfreeze weights", "exact", "a second file with what is new")
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_a_second_file_has_what_changed_alone(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = replace(JOB, stage=stage)
    states = rank_pool.run(save_and_change, 2, job, str(tmp_path))[0]
    (first,) = refers_to(tmp_path / "first")
    (second,) = {*refers_to(tmp_path / "changed")} - {first}
    assert names_in(shared_files(tmp_path)[0].with_name(second)) == {"frozen_table.weight"}
    assert first in refers_to(tmp_path / "changed"), "the rest is where it was"
    before = as_they_are(tmp_path)
    assert rank_pool.run(load_each, 3, job.other(), str(tmp_path), ("first", "changed"))[0] == states
    assert rank_pool.run(resume_and_save, 3, job.other(), str(tmp_path), "changed", "resumed")[0] == states[1]
    assert as_they_are(tmp_path) == before, "a new process finds both files"
    thawed = replace(job, frozen=False, options={**LEAN, "on_mismatch": "initialize"})
    thawed_state = rank_pool.run(resume_and_save, 2, thawed.other(), str(tmp_path), "changed", "thawed")[0]
    assert as_they_are(tmp_path) == before and refers_to(tmp_path / "thawed") == [second]
    assert rank_pool.run(load_each, 3, thawed.other(), str(tmp_path), ("thawed",))[0] == [thawed_state]
    frozen = replace(job, options={**LEAN, "on_mismatch": "initialize"})
    rank_pool.run(resume_and_save, 2, frozen.other(), str(tmp_path), "thawed", "frozen")
    assert {second} < {*refers_to(tmp_path / "frozen")}
    assert rank_pool.run(load_each, 2, job.other(), str(tmp_path), ("first",))[0] == states[:1], "an old tag loads"


# --- buffers, dtypes, ties and entries of a module's own --------------------------------------------------------------


class Quantised(torch.nn.Linear):
    """A layer whose state has more than its parameters, under names of its own, as those of bitsandbytes have."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 3, bias=False)
        self.weight.requires_grad = False
        self.absmax = torch.arange(20_000, dtype=torch.float32) + seed

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.absmax = state_dict.pop(f"{prefix}weight.absmax").clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Odd(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.trained = torch.nn.Linear(8, 5)
        self.quantised = Quantised(seed)
        self.table = torch.nn.Embedding(300, 16)
        self.tied = torch.nn.Embedding(300, 16)
        self.table.weight = self.tied.weight
        self.table.weight.requires_grad = False
        self.register_buffer("qweight", torch.arange(40_000, dtype=torch.int32).reshape(200, 200) * (seed + 1))
        self.register_buffer("mask", torch.arange(70_000).reshape(700, 100) % (seed + 2) == 0)
        self.register_buffer("running", torch.full((20_000,), float(seed)))
        self.register_buffer("angles", torch.polar(torch.ones(20_000), torch.arange(20_000.0) * (seed + 1)).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running += 1.0
        return self.trained(x) + self.table.weight.sum() * 1e-3 + self.quantised.weight.sum()


def build_odd(stage: int, seed: int) -> Any:
    import deepspeed

    zeroelastic.install()
    wait_for_every_gather()
    torch.manual_seed(seed)
    model = Odd(seed)
    config = {
        "train_batch_size": 6,
        "zero_optimization": {"stage": stage, "elastic_checkpoint": stage == 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zeroelastic": LEAN,
    }
    optimizer = torch.optim.AdamW(model.trained.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def odd_state(engine: Any) -> dict[str, bytes]:
    import deepspeed

    module = engine.module
    whole = [p for p in module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(whole):
        found = {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}
    found |= {**dict(module.named_buffers()), "absmax": module.quantised.absmax}
    return {name: bits_of_tensor(tensor.resolve_conj()) for name, tensor in found.items()}


def run_odd(stage: int, directory: str, load: str, tags: tuple[str, ...], seed: int) -> list[dict[str, bytes]]:
    """Resume from a tag, if one is named, and save before and after steps."""
    engine = build_odd(stage, seed)
    if load:
        engine.load_checkpoint(directory, tag=load)
    states = [odd_state(engine)]
    for tag in tags:
        engine.save_checkpoint(directory, tag=tag)
        x = torch.ones(engine.train_micro_batch_size_per_gpu(), 8)
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        states.append(odd_state(engine))
    return states


@support(SECTION, "lean saves of frozen buffers, tied frozen weights and modules with entries of their own", "exact")
@pytest.mark.parametrize("stage", with_swept((3, 2, 1), {1}))
def test_buffers_that_training_changes_go_back_into_the_tags(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    run = str(tmp_path)
    states = rank_pool.run(run_odd, 2, stage, run, "", ("a", "b", "c"), 1)[0]
    (first,) = shared_files(tmp_path)
    large = {"qweight", "mask", "quantised.weight.absmax", "running"}
    assert large < names_in(first) and len(names_in(first) - large) == 2, "and both weights, the tied one once"
    sizes = [sum(path.stat().st_size for path in (tmp_path / tag).glob("*model_states.pt")) for tag in "abc"]
    assert sizes[0] + 70_000 < sizes[1] and abs(sizes[2] - sizes[1]) < 8_000, "the running statistic is in the tags"
    for tag, state in zip("abc", states, strict=False):
        for found in rank_pool.run(run_odd, 3, stage, run, tag, (), 7):
            assert found == [state]
    again = rank_pool.run(run_odd, 3, stage, run, "b", ("d", "e"), 7)[0]
    assert again[0] == states[1]
    for tag, state in zip("de", again, strict=False):
        assert rank_pool.run(run_odd, 2, stage, run, tag, (), 3)[0] == [state]
    assert [names_in(path) for path in shared_files(tmp_path) if path != first] == [{"running"}]
