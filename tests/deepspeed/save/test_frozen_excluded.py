"""Saves without frozen weights: their size, resumes with the run's own base model, and other base models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from places import ROOT
from training import initialize

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.errors import LayoutMismatchError, StrictError, UnsupportedError
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state

EXCLUDE = {"frozen": "exclude"}


@dataclass(frozen=True)
class LoraJob:
    """A LoRA-like run: ``base`` is the seed of its frozen layers, ``seed`` that of everything that is trained."""

    stage: int
    base: int = 0
    seed: int = 1
    options: tuple[tuple[str, Any], ...] = tuple(EXCLUDE.items())
    installed: bool = True
    trains_base: bool = False
    layers: int = 3
    width: int = 256

    def asking(self, **options: Any) -> LoraJob:
        return replace(self, options=tuple(options.items()))


class Lora(torch.nn.Module):
    """Layers of which only low-rank corrections are trained, and a buffer: about 98 % of the parameters are frozen."""

    def __init__(self, job: LoraJob) -> None:
        super().__init__()
        torch.manual_seed(job.base)
        self.base = torch.nn.ModuleList(torch.nn.Linear(job.width, job.width) for _ in range(job.layers))
        self.base.requires_grad_(job.trains_base)
        torch.manual_seed(job.seed)
        self.down = torch.nn.ModuleList(torch.nn.Linear(job.width, job.width // 100, bias=False) for _ in range(3))
        self.up = torch.nn.ModuleList(torch.nn.Linear(job.width // 100, job.width, bias=False) for _ in range(3))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for base, down, up in zip(self.base, self.down, self.up, strict=False):
            rows = torch.tanh(base(rows) + up(down(rows)))
        return rows.float().pow(2).mean()


def build(job: LoraJob) -> Any:
    if not job.installed:
        zeroelastic.uninstall()
    zero = {"stage": job.stage, "elastic_checkpoint": job.installed, "stage3_param_persistence_threshold": 0}
    options = {"verify": True, "fsync": False, **dict(job.options)}
    more: dict[str, Any] = {"train_batch_size": 12, "bf16": {"enabled": True}, "zeroelastic": options}
    return initialize(Lora(job), zero, installed=job.installed, **more)


def step(engine: Any, number: int) -> None:
    rows = torch.randn(
        12, engine.module.base[0].in_features, generator=torch.Generator().manual_seed(number)
    ).bfloat16()
    count = 12 // dist.get_world_size()
    engine.backward(engine(rows[dist.get_rank() * count :][:count]))
    engine.step()


def train(job: LoraJob, directory: str, tags: int = 1, full: str = "", **flags: Any) -> dict[str, Any]:
    """The state at the last of some saves, each after a step; ``full`` is a directory for the same state in full."""
    engine = build(job)
    for number in range(tags):
        step(engine, number)
        engine.save_checkpoint(directory, **flags)
    if full:
        engine._config._param_dict["zeroelastic"] = {"verify": True}
        engine.save_checkpoint(full)
    return fingerprint(gather_state(engine))


def resume(job: LoraJob, directory: str, save_to: str = "", **flags: Any) -> tuple[dict[str, Any], Any]:
    engine = build(job)
    engine.load_checkpoint(directory, **flags)
    state = fingerprint(gather_state(engine))
    if save_to:
        step(engine, 7)
        engine.save_checkpoint(save_to)
        return fingerprint(gather_state(engine)), (state, engine.zeroelastic_report)
    return state, engine.zeroelastic_report


def refused(job: LoraJob, directory: str, **flags: Any) -> tuple[str, str, bool]:
    """The error of a load, and whether the engine is as it was."""
    engine = build(job)
    before = fingerprint(gather_state(engine))
    try:
        engine.load_checkpoint(directory, **flags)
    except (LayoutMismatchError, StrictError) as error:
        return type(error).__name__, str(error), fingerprint(gather_state(engine)) == before
    return "", engine.zeroelastic_report.text(), False


def tag_of(run: Path) -> Path:
    return run / (run / "latest").read_text()


@pytest.mark.support("Parameters", '`"frozen": "exclude"`', "exact", "the run's own, compared by digest")
@pytest.mark.parametrize("stages", [(1, 2, 3), (3, 1, 2)])
def test_resumes_with_the_base_model_loaded_first_are_exact(
    rank_pool: RankPool, tmp_path: Path, stages: tuple[int, int, int]
) -> None:
    """3 ranks, then 2, then 4, each at a stage of its own; what is trained is made anew each time."""
    first, second, third = (LoraJob(stage, seed=10 + stage) for stage in stages)
    saved = rank_pool.run(train, 3, first, str(tmp_path / "a"), 2, str(tmp_path / "full"))[0]
    record, full = read_record(tag_of(tmp_path / "a")), read_record(tag_of(tmp_path / "full"))
    assert record is not None and full is not None and record.excluded_by == "option" and full.excluded_by is None
    assert record.content_root == full.content_root and len(record.excluded()) == 6
    assert not open_checkpoint(tag_of(tmp_path / "a")).names_frozen
    later, (resumed, report) = rank_pool.run(resume, 2, second, str(tmp_path / "a"), str(tmp_path / "b"))[0]
    assert compare_states(saved, resumed) == [] and report.root_matches
    assert "6 frozen parameters (the run's own; their digests match the save)" in report.text()
    state, report = rank_pool.run(resume, 4, third, str(tmp_path / "b"))[0]
    assert compare_states(later, state) == [] and report.root_matches


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ten_tags_take_what_is_trained(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """Master weights and two moments, and at stages 1 and 2 16-bit weights; headers, tables and the record included."""
    rank_pool.run(train, 3, LoraJob(stage, width=1024), str(tmp_path), 10)
    tags = [path for path in tmp_path.iterdir() if path.is_dir()]
    record = read_record(tags[0])
    assert record is not None and len(tags) == 10
    frozen = sum(content.param.numel for content in record.excluded())
    trained = sum(content.param.numel for content in record.contents()) - frozen
    assert 0.97 < frozen / (frozen + trained) < 0.99
    total = sum(path.stat().st_size for tag in tags for path in tag.iterdir())
    assert total <= 1.05 * 10 * trained * (12 if stage == 3 else 14)


@pytest.mark.parametrize("stage", [1, 3])
def test_another_base_model_is_refused_by_name_on_every_rank(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = LoraJob(stage)
    rank_pool.run(train, 3, job, str(tmp_path))
    for flags in ({}, {"load_module_strict": False}):
        for kind, text, untouched in rank_pool.run(refused, 2, replace(job, base=5), str(tmp_path), **flags):
            assert kind == "LayoutMismatchError" and untouched
            assert (
                '"frozen": "exclude"' in text and "base.0.bias, base.0.weight" in text and "6 frozen parameters" in text
            )


@pytest.mark.support("Parameters", "`exclude_frozen_parameters=True`", "exact", "the run's own frozen weights stay")
@pytest.mark.support(
    "Parameters",
    "`exclude_frozen_parameters=True` (PEFT)",
    "exact",
    "the run's own; another base model is named",
)
@pytest.mark.parametrize("stage", [2, 3])
def test_by_the_argument_of_a_save_another_base_model_is_a_loud_line(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """An error under ``"strict"``, and where the module is loaded strictly, as stock DeepSpeed refuses it."""
    job = LoraJob(stage, options=())
    saved = rank_pool.run(train, 3, job, str(tmp_path), exclude_frozen_parameters=True)[0]
    assert read_record(tag_of(tmp_path)).excluded_by == "argument"
    state, report = rank_pool.run(resume, 2, replace(job, seed=3), str(tmp_path), load_module_strict=False)[0]
    assert compare_states(saved, state) == [] and report.root_matches
    other = replace(job, base=5)
    state, report = rank_pool.run(resume, 2, other, str(tmp_path), load_module_strict=False)[0]
    assert {line.partition(".")[0] for line in compare_states(saved, state)} == {"weight/base"}
    assert report.root_matches is None
    (line,) = (note for note in report.notes if note.startswith("OTHER BASE MODEL: 6 frozen parameters of the run"))
    assert "base.0.bias" in line and "exclude_frozen_parameters=True" in line
    for asked, flags, error in (
        ({"strict": True}, {"load_module_strict": False}, "StrictError"),
        ({}, {}, "LayoutMismatchError"),
    ):
        for kind, text, untouched in rank_pool.run(refused, 2, other.asking(**asked), str(tmp_path), **flags):
            assert kind == error and untouched and "base.0.bias" in text


def test_what_is_frozen_on_one_side_alone_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    job = LoraJob(2)
    rank_pool.run(train, 2, job, str(tmp_path / "frozen"))
    trained = replace(job, trains_base=True)
    kind, text, untouched = rank_pool.run(refused, 2, trained, str(tmp_path / "frozen"))[0]
    assert kind == "LayoutMismatchError" and untouched
    assert "base.0.weight [256, 256] was frozen when the checkpoint was saved without frozen weights" in text
    kind, text, untouched = rank_pool.run(refused, 2, replace(job, layers=2), str(tmp_path / "frozen"))[0]
    assert (
        kind == "LayoutMismatchError"
        and "frozen parameter base.2.weight [256, 256] of the checkpoint is not in" in text
    )
    _, report = rank_pool.run(resume, 2, trained.asking(on_mismatch="initialize"), str(tmp_path / "frozen"))[0]
    assert any("not in the checkpoint, weights as this run made them" in line for line in report.changed)
    saved = rank_pool.run(train, 2, trained, str(tmp_path / "trained"))[0]
    state, _ = rank_pool.run(resume, 2, job.asking(on_mismatch="initialize"), str(tmp_path / "trained"))[0]
    assert state["weight/base.0.weight"] == saved["weight/base.0.weight"]


def save_in_background(job: LoraJob, directory: str) -> dict[str, Any]:
    engine = build(job)
    step(engine, 0)
    state = fingerprint(gather_state(engine))
    engine.save_checkpoint(directory)
    step(engine, 1)
    zeroelastic.wait_for_save(engine)
    return state


@pytest.mark.parametrize("stage", [2, 3])
def test_background_saves_leave_frozen_weights_out(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = LoraJob(stage).asking(frozen="exclude", async_save=True)
    saved = rank_pool.run(save_in_background, 3, job, str(tmp_path))[0]
    assert read_record(tag_of(tmp_path)).excluded_by == "option" and zeroelastic.verify(tmp_path).valid
    state, report = rank_pool.run(resume, 2, replace(job, seed=3), str(tmp_path))[0]
    assert compare_states(saved, state) == [] and report.root_matches


def load_by_stock(job: LoraJob, directory: str) -> dict[str, Any]:
    engine = build(job)
    engine.load_checkpoint(directory, load_module_strict=False)
    return fingerprint(gather_state(engine))


@pytest.mark.parametrize("stage", [2, 3])
def test_stock_deepspeed_loads_it_at_the_same_size(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """As it loads a save of its own without frozen parameters."""
    saved = rank_pool.run(train, 2, LoraJob(stage), str(tmp_path))[0]
    stock = LoraJob(stage, seed=3, installed=False)
    for state in rank_pool.run(load_by_stock, 2, stock, str(tmp_path)):
        assert compare_states(saved, state) == []


@pytest.fixture(scope="module")
def tag(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("excluded")
    rank_pool.run(train, 3, LoraJob(3), str(run))
    return tag_of(run)


def test_verbs_say_what_is_not_there(tag: Path, tmp_path: Path) -> None:
    said = "frozen weights are not in the checkpoint (6 parameters"
    found, report = zeroelastic.inspect(tag), zeroelastic.verify(tag)
    assert found.ok and any(said in note for note in found.notes) and found.totals.frozen_params == 0
    assert report.valid and report.content_root == report.recorded_root and any(said in one for one in report.unchecked)
    quick = zeroelastic.verify(tag, quick=True)
    assert quick.valid and any(said in one for one in quick.unchecked)
    with zeroelastic.open(tag) as ck:
        assert "base.0.weight" not in ck and any(
            "base.0.weight: its weights are not in" in line for line in ck.left_out
        )
        with pytest.raises(KeyError, match=r"weights of frozen parameter base\.0\.weight are not in the checkpoint"):
            ck["base.0.weight"]
    with pytest.raises(
        UnsupportedError, match=r"6 frozen parameters \(base\.0.*\) are not in the checkpoint.*--adapters"
    ):
        zeroelastic.export(tag, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    exported = zeroelastic.export(tag, tmp_path / "adapters", adapters=True)
    assert (exported.trained, exported.frozen) == (6, 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reshard_carries_the_exclusion_along(rank_pool: RankPool, tag: Path, tmp_path: Path, stage: int) -> None:
    done = zeroelastic.reshard(tag, tmp_path / "new", world_size=2, stage=stage, verify=True)
    record, new = read_record(tag), read_record(tag_of(tmp_path / "new"))
    assert record is not None and new is not None
    assert done.content_root == new.content_root == record.content_root and new.excluded_by == "option"
    assert new.excluded() == record.excluded()
    job = LoraJob(stage, seed=3)
    for directory, ranks in ((tmp_path / "new", 4), (tag.parent, 4)):
        _, report = rank_pool.run(resume, ranks, job, str(directory))[0]
        assert report.root_matches, os.fspath(directory)
    kind, *_ = rank_pool.run(refused, 2, replace(job, base=5), str(tmp_path / "new"))[0]
    assert kind == "LayoutMismatchError"


def test_diff_compares_frozen_weights_in_no_file_by_their_digests(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train, 2, LoraJob(3), str(tmp_path / "a"), 1, str(tmp_path / "full"))
    rank_pool.run(train, 2, LoraJob(3, base=5), str(tmp_path / "other"))
    same = zeroelastic.diff(tmp_path / "a", tmp_path / "full")
    assert (same.tensors, same.only_a, same.only_b, same.weights_equal) == ((), (), (), True)
    assert same.num_by_digest == same.num_tensors - 1 > 6, "a buffer has no digest"
    for other in (
        zeroelastic.diff(tmp_path / "full", tmp_path / "other"),
        zeroelastic.diff(tmp_path / "a", tmp_path / "other"),
    ):
        frozen = {one.param: one.num_different for one in other.tensors if one.key == "frozen"}
        assert frozen == dict.fromkeys([f"base.{i}.{what}" for i in range(3) for what in ("weight", "bias")])
        assert not other.weights_equal and other.only_a == other.only_b == ()
    few = zeroelastic.diff(tmp_path / "a", tmp_path / "other", params="base.0.*")
    assert [one.param for one in few.tensors] == ["base.0.bias", "base.0.weight"] and few.num_tensors == 2


def test_the_format_example_reads_a_save_without_frozen_weights(tag: Path) -> None:
    example = subprocess.run(
        [sys.executable, ROOT / "examples/read_format.py", tag], capture_output=True, text=True, check=False
    )
    assert example.returncode == 0, example.stdout + example.stderr


def test_a_changed_digest_of_a_frozen_weight_is_a_damaged_record(tag: Path, tmp_path: Path) -> None:
    shutil.copytree(tag, tmp_path / "tag")
    record = read_record(tag)
    assert record is not None
    digest = f"{record.excluded()[0].tensors['frozen'][1]:016x}"
    path = tmp_path / "tag" / "zeroelastic.json"
    path.write_text(path.read_text().replace(digest, digest[::-1]))
    assert not zeroelastic.verify(tmp_path / "tag").valid
