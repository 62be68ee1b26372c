"""End to end with real DeepSpeed processes: what is resumed at another world size is what was saved, bit for bit.

One save serves many loads: the directories of saves are kept for the module. Each comparison covers the gathered state
(master weights, optimizer state, step of every parameter, 16-bit and frozen weights, buffers, hyper-parameters,
scheduler, loss scale, counters) and, separately, what DeepSpeed's safe_get_full_* accessors gather.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saved_files import record_of
from saves import Saved, Saver, check_each, check_resumed, save_once
from synthetic import plain
from training import Job, resume, resume_and_save, train_and_save

from zeroelastic.testing import RankPool, compare_states, run_ranks

SIZES = (1, 2, 3, 4, 5, 6, 8)
ROUND = ((4, 3), (3, 5), (5, 1), (1, 8), (8, 6), (6, 2), (2, 4))
"""Each size saves once and loads once; `make sweep` has all pairs, as plans have them in tests/core."""

OFFLOAD, PARAMS = ({f"offload_{what}": {"device": "cpu"}} for what in ("optimizer", "param"))
support = pytest.mark.support


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


def pairs() -> list[object]:
    """The first is of the core suite and in `make test`."""
    marks = {pair: [pytest.mark.sweep] for pair in itertools.product(SIZES, SIZES)}
    marks |= {pair: [pytest.mark.extended] for pair in ROUND} | {ROUND[0]: [pytest.mark.core]}
    return [pytest.param(*pair, marks=marks[pair]) for pair in sorted(marks, key=lambda pair: pair != ROUND[0])]


@support(
    "Using it", "elastic checkpoints, from N to M ranks", "exact", "N and M of 1, 2, 3, 4, 5, 6 and 8, up and down"
)
@support("Parameters", "several optimizer groups, each with its hyper-parameters", "exact")
@support("Parameters", "tied parameters", "exact")
@support("Parameters", "frozen parameters", "exact")
@support("Parameters", "parameters smaller than the number of ranks", "exact")
@support("Parameters", "buffers", "exact", "of the same rank; new ranks get those of rank 0")
@support("Parameters", "`sub_group_size` that differs between save and load", "exact")
@support("Optimizers", "torch `Adam`, `AdamW`, amsgrad", "exact")
@support("Precision", "bf16", "exact")
@pytest.mark.parametrize(("save_world_size", "world_size"), pairs())
def test_elastic_resume_is_bit_exact(rank_pool: RankPool, saved: Saver, save_world_size: int, world_size: int) -> None:
    job = Job()
    checkpoint = saved(job, save_world_size)
    outcomes = rank_pool.run(resume, world_size, job.other(), checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)
    record = record_of(checkpoint.tag_dir)
    assert record.versions.deepspeed == os.environ.get("ZEROELASTIC_EXPECT_DEEPSPEED", record.versions.deepspeed)
    report = outcomes[0].report
    assert (report.format, report.saved_world_size, report.world_size) == ("elastic", save_world_size, world_size)
    assert report.root_matches and report.loaded_root == checkpoint.root


@support("Using it", "rigid checkpoints that DeepSpeed alone saved", "exact")
@pytest.mark.parametrize(
    ("save_world_size", "world_size", "elastic"),
    [pytest.param(4, 3, True, marks=pytest.mark.core), (4, 4, False)],
)
def test_stock_rigid_checkpoint_resumes(
    rank_pool: RankPool, saved: Saver, save_world_size: int, world_size: int, elastic: bool
) -> None:
    """Whatever the flag says: it is for saves alone."""
    job = Job(elastic=False, installed=False)  # written by DeepSpeed alone
    checkpoint = saved(job, save_world_size)
    assert not (checkpoint.tag_dir / "zeroelastic.json").exists()
    outcomes = rank_pool.run(resume, world_size, job.other(installed=True, elastic=elastic), checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)
    report = outcomes[0].report
    assert report.format == "rigid" and report.root_matches is None and report.saved_root is None
    (note,) = (note for note in report.notes if "commit record" in note)
    assert f"NOT CHECKED. `zeroelastic verify {checkpoint.tag_dir}` compares its files with" in note


@support("Using it", "rigid checkpoints saved with zeroelastic", "exact", "with a commit record and a content root")
def test_rigid_save_with_zeroelastic_has_a_commit_record(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(Job(elastic=False), 4)
    outcomes = rank_pool.run(resume, 3, Job(elastic=False).other(), checkpoint.directory)
    check_resumed(checkpoint, outcomes, Job())
    assert outcomes[0].report.root_matches


@support("Using it", "the content root", "exact", "the same at every world size and in both formats")
def test_content_root_is_the_same_at_every_world_size_and_in_both_formats(
    rank_pool: RankPool, saved: Saver, tmp_path: Path
) -> None:
    checkpoint = saved(Job(), 4)
    for world_size, elastic in ((1, True), (3, False), (6, True)):
        job, target = Job().other(elastic=elastic), str(tmp_path / str(world_size))
        roots = rank_pool.run(resume_and_save, world_size, job, checkpoint.directory, target)
        assert set(roots) == {checkpoint.root}


CORE = {
    "elastic": ((4, 3), (Job(precision="fp32"), Job(optimizer="adagrad", groups=1), Job(zero={**OFFLOAD, **PARAMS}))),
    "rigid": ((3, 2), (Job(precision="fp16"), Job(optimizer="sgd"), Job(zero=OFFLOAD))),
}
"""Configurations that older versions of DeepSpeed resume, too; test_configurations.py has these and all others."""


@pytest.mark.core
@pytest.mark.parametrize("form", CORE)
def test_other_configurations_resume_bit_exact(rank_pool: RankPool, tmp_path: Path, form: str) -> None:
    sizes, jobs = CORE[form]
    jobs = [replace(job, elastic=form == "elastic") for job in jobs]
    check_each(rank_pool, {str(job): (job, job.other()) for job in jobs}, sizes, tmp_path)


@support("Precision", "loss scale and skipped steps after an overflow", "exact")
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "rigid"])
def test_fp16_after_an_overflow_keeps_scale_and_skipped_steps(rank_pool: RankPool, saved: Saver, elastic: bool) -> None:
    job = Job(precision="fp16", elastic=elastic, config={"fp16": {"initial_scale_power": 24, "hysteresis": 1}})
    checkpoint = saved(job, 4)
    assert checkpoint.outcome.state["engine/skipped_steps"] > 0, "no overflow happened"
    assert checkpoint.outcome.state["loss_scaler/cur_scale"] < 2**24
    outcomes = rank_pool.run(resume, 3, job.other(config={}), checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)


@support("Using it", "there and back: 4 to 3 to 4 ranks", "exact", "every tensor of every file is the first one's")
def test_there_and_back_gives_the_same_lean_tensors(rank_pool: RankPool, saved: Saver, tmp_path: Path) -> None:
    """4 -> 3 -> 4, with other sub-groups in between: every tensor of every rank's file is the original's."""
    job = Job()
    checkpoint = saved(job, 4)
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    roots = rank_pool.run(resume_and_save, 3, job.other(), checkpoint.directory, there)
    roots += rank_pool.run(resume_and_save, 4, job, there, back)
    assert set(roots) == {checkpoint.root}
    for path in sorted(checkpoint.tag_dir.glob("*optim_states.pt")):
        ours, theirs = (
            torch.load(file, weights_only=False)["optimizer_state_dict"]
            for file in (path, next(Path(back).glob("global_step*")) / path.name)
        )
        assert plain(ours["fp32_flat_groups"]) == plain(theirs["fp32_flat_groups"])  # padding included: it is zero
        lean, other = ([sorted(state.items()) for state in each["base_optimizer_state"]] for each in (ours, theirs))
        assert plain(lean) == plain(other)
        assert [[key for key, _ in state] for state in lean] == [["exp_avg", "exp_avg_sq", "step"]] * len(lean)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("save_world_size", "world_size"), [(1, 2), (2, 1)])
def test_resume_on_gpus(tmp_path: Path, save_world_size: int, world_size: int) -> None:
    """The same job and the same comparison as on the CPU."""
    for elastic in (True, False):
        directory = str(tmp_path / f"{elastic}")
        job = Job(elastic=elastic)
        outcome = run_ranks(train_and_save, save_world_size, job, directory, backend="nccl", timeout=300)[0]
        outcomes = run_ranks(resume, world_size, job.other(), directory, backend="nccl", timeout=300)
        check_resumed(Saved(directory, outcome), outcomes, job)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("elastic", [True, False])
def test_a_gpu_goes_on_from_cpu_ranks_and_they_from_it(tmp_path: Path, stage: int, elastic: bool) -> None:
    """Saved by 4 ranks on the CPU, resumed and saved by one on a GPU, and again by 3 on the CPU."""
    job = Job(stage=stage, elastic=elastic)
    first, second, third = (str(tmp_path / name) for name in ("cpu", "gpu", "back"))
    saved = Saved(first, run_ranks(train_and_save, 4, job, first)[0])
    outcomes = run_ranks(resume, 1, job.other(), first, backend="nccl", timeout=300)
    check_resumed(saved, outcomes, job)
    assert outcomes[0].report.verify == "full"  # the default where the state is on a GPU
    roots = run_ranks(resume_and_save, 1, job.other(), first, second, backend="nccl", timeout=300)
    for outcome in run_ranks(resume, 3, job.other(), second):
        assert compare_states(saved.outcome.state, outcome.state) == [] and outcome.gathered == saved.outcome.gathered
    roots += run_ranks(resume_and_save, 3, job.other(), second, third)
    assert set(roots) == {saved.root}
