"""The Hugging Face Trainer, plain and with PEFT's LoRA: a run that goes on at another world size is the same run.

One uninterrupted run on four ranks, saving as it goes, is what the resumed ones are compared with: state bit for bit,
samples and learning rates of every step, losses within the tolerance of 16-bit sums in another order.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from page_code import run_as_written
from places import ROOT
from saved_files import logged
from trainer_job import (
    GLOBAL_BATCH,
    OFFLOADED,
    SAMPLES,
    Seen,
    TrainerJob,
    attempt,
    complete_steps,
    generators_of_a_new_rank,
    refusals,
    removals,
    run_trainer,
    saved_steps,
)
from training import of_all
from warm_python import executable

import zeroelastic
from zeroelastic import ConfigError, StrictError, UsageError
from zeroelastic.deepspeed.load.notes import check_batch
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.testing import RankPool, compare_states

LIBRARIES = ("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "peft")
LOSS_ATOL = 4e-3
"""Losses are near 4 and logged as the mean of bf16 forward passes: 1e-3 of them."""


@pytest.fixture(scope="module")
def pool(frameworks_pool: RankPool) -> SimpleNamespace:
    """Ranks that have transformers imported already, and more time."""
    return SimpleNamespace(run=partial(frameworks_pool.run, timeout=250.0))


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Seen]]:
    """The uninterrupted run: 3 epochs of 4 steps on 4 ranks, a checkpoint every second step."""
    directory = str(tmp_path_factory.mktemp("whole"))
    return directory, pool.run(run_trainer, 4, TrainerJob(directory, args={"save_strategy": "steps", "save_steps": 2}))


def check_goes_on(whole: Seen, seen: Seen, step: int, saved: Seen | None = None, recorded: bool = True) -> None:
    """From ``step`` on, the resumed run is the uninterrupted one; its state at the resume is the saved one.

    ``recorded``: the save has a commit record, with the content root of what was loaded.
    """
    assert seen.first_step == step
    assert compare_states((saved or whole).saved[step], seen.resumed) == []
    assert seen.report.root_matches is (True if recorded else None)
    assert seen.max_steps == whole.max_steps
    steps = range(step, whole.max_steps)
    assert seen.samples == {at: whole.samples[at] for at in steps}
    assert seen.rates == {at: whole.rates[at] for at in seen.rates}
    for at in steps:
        assert seen.losses[at + 1] == pytest.approx(whole.losses[at + 1], abs=LOSS_ATOL), at


# Epochs in whole batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "batch"), [(43, 12), (36, 12), (12, 12), (5, 12), (1, 3), (100, 1)])
def test_an_epoch_is_its_order_cut_or_filled_up_to_whole_batches(samples, batch, drop_last):
    import torch

    from zeroelastic.integrations.transformers import WholeBatches

    order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples)).tolist()
    if drop_last and samples < batch:
        with pytest.raises(UsageError, match=f"{samples} samples, fewer than one global batch of {batch}"):
            WholeBatches(order, batch, drop_last=drop_last)
        return
    sampler = WholeBatches(order, batch, drop_last=drop_last)
    got = list(sampler)
    assert len(got) == len(sampler) == sampler.num_batches * batch
    assert got[:samples] == order[: len(got)]
    assert got[samples:] == (order * batch)[: max(0, len(got) - samples)]
    assert abs(len(got) - samples) < batch and (len(got) <= samples) >= drop_last


# The Trainer


@pytest.mark.support(
    "Frameworks", "Hugging Face Trainer", "exact", "with `elastic(trainer)`: samples, rates, generators too"
)
@pytest.mark.parametrize(
    ("world_size", "step"), [(2, 4), (3, 6), (1, 2)], ids=["2_between_epochs", "3_in_second_epoch", "1_in_first_epoch"]
)
def test_a_resumed_run_goes_on_as_the_whole_one(pool, whole, tmp_path, world_size, step):
    """Within the first epoch, between epochs, and within the second."""
    directory, seen = whole
    assert all(len(samples) == GLOBAL_BATCH for samples in seen[0].samples.values())
    assert seen[0].max_steps == 3 * -(-SAMPLES // GLOBAL_BATCH)
    job = TrainerJob(str(tmp_path), resume=f"{directory}/checkpoint-{step}", dropout=0.0)
    resumed = pool.run(run_trainer, world_size, job)
    for rank, outcome in enumerate(resumed):
        check_goes_on(seen[0], outcome, step)
        assert outcome.num_groups == 2
        assert outcome.generators[step] == seen[rank].generators[step]
        assert outcome.report == resumed[0].report
        assert outcome.micro_steps == resumed[0].micro_steps
    text = resumed[0].report.text()
    kept = "rank 0" if world_size == 1 else f"ranks 0 to {world_size - 1}"
    assert f"random number generators of {kept}" in text
    assert "position in the data (epochs of 4 global batches)" in text


STAGES: dict[str, tuple[dict[str, Any], int, dict[str, Any], int]] = {
    "2 on 3, fp16, to 1 on 2": ({"stage": 2, "precision": "fp16"}, 3, {"stage": 1}, 2),
    "2 on 4, DeepSpeedCPUAdam, to 2 on 3": ({"stage": 2, "zero": OFFLOADED}, 4, {}, 3),
    "2 on 2, to 3 on 3": ({"stage": 2}, 2, {"stage": 3}, 3),
    "3 on 3, to 2 on 2": ({"stage": 3}, 3, {"stage": 2}, 2),
    "2 on 3 in the background, to 2 on 2": (
        {"stage": 2, "config": {"zeroelastic": {"async_save": True}}},
        3,
        {},
        2,
    ),
    "2 on 2 without zeroelastic, to 2 on 3": ({"stage": 2, "installed": False}, 2, {"installed": True}, 3),
}


@pytest.mark.support(
    "Frameworks", "Hugging Face Trainer at ZeRO stages 1 and 2", "exact", "also from and to stage 3, and LoRA"
)
@pytest.mark.parametrize("name", STAGES)
def test_a_run_goes_on_at_stages_1_and_2(pool, tmp_path, name):
    """Saved at the end of the first epoch, with the example's configuration: ``round_robin_gradients`` and "auto"."""
    before, ranks, after, ranks_after = STAGES[name]
    args = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    job = TrainerJob(str(tmp_path / "whole"), args=args, **before)
    seen = pool.run(run_trainer, ranks, job)
    assert (seen[0].optimizer == "DeepSpeedCPUAdam") is ("DeepSpeedCPUAdam" in name)
    if job.installed:
        assert zeroelastic.verify(f"{tmp_path}/whole/checkpoint-4").valid
    job = job.at(directory=str(tmp_path), resume=f"{tmp_path}/whole/checkpoint-4", **after)
    for outcome in pool.run(run_trainer, ranks_after, job.at(args={**args, "save_strategy": "no"})):
        check_goes_on(seen[0], outcome, 4, recorded=before.get("installed", True))


def test_a_resharded_checkpoint_goes_on_without_zeroelastic(pool, tmp_path):
    """The Trainer and DeepSpeed alone, on the files that ``reshard`` wrote for 3 ranks from those of 2."""
    args = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    job = TrainerJob(str(tmp_path / "whole"), args=args)
    seen = pool.run(run_trainer, 2, job)
    resharded = tmp_path / "checkpoint-4"
    zeroelastic.reshard(tmp_path / "whole/checkpoint-4", resharded, world_size=3)
    zero = {"elastic_checkpoint": False}
    job = job.at(args={"num_train_epochs": 2})
    alone = job.at(directory=str(tmp_path), installed=False, resume=str(resharded), stop_at=5, zero=zero)
    for outcome in pool.run(run_trainer, 3, alone):
        assert outcome.report is None
        assert compare_states(seen[0].saved[4], outcome.resumed) == []
        assert outcome.losses[5] == pytest.approx(seen[0].losses[5], abs=LOSS_ATOL)


def test_new_ranks_get_generators_of_their_own(pool, whole, tmp_path):
    """1 -> 4: the only rank's file has another name at other world sizes, and three ranks have none."""
    directory, seen = whole
    alone = TrainerJob(str(tmp_path / "one"), resume=f"{directory}/checkpoint-8", stop_at=10)
    alone = alone.at(args={"save_strategy": "steps", "save_steps": 2})
    one = pool.run(run_trainer, 1, alone)[0]
    job = TrainerJob(str(tmp_path / "four"), resume=f"{alone.directory}/checkpoint-10")
    grown = pool.run(run_trainer, 4, job)
    for rank, outcome in enumerate(grown):
        check_goes_on(seen[0], outcome, 10, saved=one)
        if rank:
            assert outcome.generators[10] == generators_of_a_new_rank(42, 10, rank)
    assert len({outcome.generators[10] for outcome in grown}) == 4
    assert "random number generators of ranks 1 to 3 from the seed, the step and the rank" in grown[0].report.text()
    assert (tmp_path / "one/checkpoint-10/rng_state.pth").exists()


@pytest.mark.support(
    "Frameworks",
    "Hugging Face Trainer with PEFT (LoRA)",
    "exact",
    "frozen weights are the base model's, compared by digest",
)
@pytest.mark.parametrize(("stage", "stage_after"), [(3, 3), (2, 3)])
def test_lora_goes_on_as_the_whole_one(pool, tmp_path, stage, stage_after):
    """The Trainer leaves frozen parameters out of its saves; ``resume_from_checkpoint=True`` finds the newest one."""
    job = TrainerJob(str(tmp_path / "whole"), stage=stage, lora=True, args={"save_strategy": "steps", "save_steps": 6})
    seen = pool.run(run_trainer, 4, job)
    shutil.rmtree(tmp_path / "whole/checkpoint-12")
    assert (tmp_path / "whole/checkpoint-6/adapter_model.safetensors").exists()
    for world_size in (3, 2):
        shutil.copytree(tmp_path / "whole", tmp_path / str(world_size))
        for outcome in pool.run(
            run_trainer,
            world_size,
            job.at(directory=str(tmp_path / str(world_size)), stage=stage_after, resume=True),
        ):
            check_goes_on(seen[0], outcome, 6)
            assert "frozen parameters (the run's own; their digests match the save)" in outcome.report.text()
            assert outcome.report.root_matches
    other = job.at(directory=str(tmp_path / "2"), stage=stage_after, resume=True, model_seed=8)
    shutil.rmtree(tmp_path / "2")
    shutil.copytree(tmp_path / "whole", tmp_path / "2")
    for outcome in pool.run(run_trainer, 2, other):
        assert any(note.startswith("OTHER BASE MODEL: ") for note in outcome.report.notes)
    strict = other.at(directory=str(tmp_path / "whole"), config={"zeroelastic": {"strict": True}})
    for kind, text in pool.run(attempt, 2, strict):
        assert kind == "StrictError" and "frozen parameters of the run differ from those of the save" in text


@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, {}), (2, {"async_save": True})],
    ids=["3", "2 in the background"],
)
def test_the_best_model_may_be_of_another_world_size_and_old_checkpoints_go(pool, tmp_path, stage, options):
    """Saved on 4, resumed on 3: the best checkpoint (the first one, by this metric) is loaded at the end.

    At stage 3 without a file of gathered weights, for which the Trainer calls the engine's save twice.
    """
    args = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    zero = {"stage3_gather_16bit_weights_on_model_save": False} if stage == 3 else {}
    config = {"zeroelastic": options}
    job = TrainerJob(str(tmp_path), stage=stage, args=args, stop_at=4, zero=zero, config=config)
    first = pool.run(run_trainer, 4, job)
    assert saved_steps(str(tmp_path)) == [2, 4]
    last = pool.run(run_trainer, 3, job.at(stop_at=8, resume=True))
    assert saved_steps(str(tmp_path)) == [2, 8]
    for outcome in last:
        assert compare_states(first[0].saved[4], outcome.resumed) == []
        assert compare_states(first[0].saved[2], outcome.final) == []


@pytest.mark.parametrize("best", [False, True], ids=["limit", "limit and best"])
def test_in_the_background_the_checkpoint_before_stays_until_the_new_one_is_complete(pool, tmp_path, best):
    """``save_total_limit=1``: the Trainer removes the others while the newest is not written yet."""
    args = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    if best:  # the first one, by this metric
        args |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
        args |= {"greater_is_better": True}
    config = {"zeroelastic": {"async_save": True}}
    job = TrainerJob(str(tmp_path), stage=2, args=args, config=config, stop_at=8, slow_saves=True)
    seen = pool.run(run_trainer, 2, job)[0]
    assert seen.complete == ([[], [2], [2, 4], [2, 8]] if best else [[], [2], [4], [8]])
    assert saved_steps(str(tmp_path)) == ([2] if best else [8])  # the Trainer itself leaves the best alone
    assert not [line for line in seen.said if "not complete" in line]


BEST = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}


def test_in_the_background_the_best_model_is_loaded_where_it_is_the_last_save(pool, tmp_path):
    """The Trainer looks for its files itself, at the end of the training, when they are not written yet."""
    args = {**BEST, "load_best_model_at_end": True, "greater_is_better": True}  # the first one, by this metric
    config = {"zeroelastic": {"async_save": True}}
    job = TrainerJob(str(tmp_path), stage=2, args=args, config=config, stop_at=3, slow_saves=True)
    for seen in pool.run(run_trainer, 2, job):
        assert compare_states(seen.saved[2], seen.final) == []


@pytest.mark.parametrize("fails", [False, True], ids=["written", "not written"])
def test_the_end_of_the_training_removes_nothing_before_the_best_model_is_complete(pool, tmp_path, fails):
    """``save_total_limit=1``: the Trainer removes all but the best, which is the last save and not written yet."""
    args = {**BEST, "save_total_limit": 1, "greater_is_better": False}  # each one is the best so far
    config = {"zeroelastic": {"async_save": True}}
    job = TrainerJob(str(tmp_path), stage=2, args=args, config=config, stop_at=5, slow_saves=True)
    kept, said = pool.run(removals, 2, job, 4 if fails else None)[0]
    assert all(complete_then[-1] != step for step, complete_then in kept)
    assert complete_steps(str(tmp_path)) == [2 if fails else 4]
    assert any("older checkpoints stay" in line for line in said) == fails


@pytest.mark.parametrize("is_damaged", [False, True], ids=["cut short", "damaged"])
def test_a_checkpoint_without_what_a_resume_reads_is_passed_over_by_a_resume_from_the_last(pool, tmp_path, is_damaged):
    """As a kill leaves it while the newest checkpoint is written in the background: all but the tag is there."""
    job = TrainerJob(str(tmp_path), args={"save_strategy": "steps", "save_steps": 2}, stop_at=6)
    first = pool.run(run_trainer, 2, job)[0]
    if is_damaged:
        os.truncate(next((tmp_path / "checkpoint-6/global_step6").glob("*rank_1_*optim_states.pt")), 1000)
    else:
        (tmp_path / "checkpoint-6/global_step6").rename(tmp_path / "checkpoint-6/.global_step6.made.tmp")
    (tmp_path / "checkpoint-8").mkdir()  # killed earlier still
    for rank, seen in enumerate(pool.run(run_trainer, 3, job.at(resume=True))):
        assert seen.first_step == 4 and compare_states(first.saved[4], seen.resumed) == []
        warned = [line for line in seen.said if "PASSED OVER" in line]
        assert len(warned) == (rank == 0)
        assert all("checkpoint-8, checkpoint-6, from which no run can go on" in line for line in warned)
        assert all(f"The run goes on from {tmp_path}/checkpoint-4." in line for line in warned)
    assert zeroelastic.verify(tmp_path / "checkpoint-6").valid  # saved again
    shutil.rmtree(tmp_path / "checkpoint-8")
    for step in (2, 4, 6):
        shutil.rmtree(tmp_path / f"checkpoint-{step}/global_step{step}")
    errors = pool.run(attempt, 2, job.at(resume=True))
    assert {kind for kind, _ in errors} == {"ValueError"}  # the Trainer's own


def test_save_only_model_writes_the_resumed_weights_and_nothing_to_resume(pool, whole, tmp_path):
    directory, _ = whole
    job = TrainerJob(str(tmp_path), resume=f"{directory}/checkpoint-6", stop_at=8)
    outcomes = pool.run(
        run_trainer, 2, job.at(args={"save_strategy": "steps", "save_steps": 8, "save_only_model": True})
    )
    assert not list((tmp_path / "checkpoint-8").glob("global_step*"))
    assert outcomes[0].weights_file == {
        name.removeprefix("weight/"): entry for name, entry in outcomes[0].final.items() if name.startswith("weight/")
    }
    assert of_all(pool.run(attempt, 3, job.at(resume=str(tmp_path / "checkpoint-8"))))[0] == "ValueError"


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(3, {}), (2, OFFLOADED)],
    ids=["3", "2 on the CPU"],
)
def test_deepspeeds_own_optimizer_and_scheduler(pool, tmp_path, stage, zero):
    """ "auto" values in both blocks; the engine steps and saves the scheduler. With CPU offload it is CPUAdam."""
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    config = {
        "optimizer": {"type": "AdamW", "params": params if zero else {**params, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
    }
    job = TrainerJob(
        str(tmp_path), stage=stage, zero=zero, config=config, args={"save_strategy": "steps", "save_steps": 6}
    )
    seen = pool.run(run_trainer, 4, job)
    assert any(key.startswith("scheduler/") for key in seen[0].saved[6])
    resumed = pool.run(run_trainer, 3, job.at(resume=f"{tmp_path}/checkpoint-6", args={}))
    check_goes_on(seen[0], resumed[0], 6)


# Without elastic(), and what it refuses


@pytest.mark.support(
    "Frameworks",
    "Hugging Face Trainer, unchanged script",
    "exact",
    "state; [its page](guides/huggingface.md) for the data",
)
@pytest.mark.parametrize("stage", [3, 2])
def test_an_unchanged_script_resumes_its_state_and_keeps_its_place(pool, whole, tmp_path, stage):
    """zeroelastic.install() alone, with the same global batch, within the second epoch. The save is of stage 3."""
    directory, seen = whole
    job = TrainerJob(str(tmp_path), stage=stage, elastic=False, resume=f"{directory}/checkpoint-6", stop_at=8)
    for outcome in pool.run(run_trainer, 3, job):
        assert compare_states(seen[0].saved[6], outcome.resumed) == []
        assert outcome.samples == {step: seen[0].samples[step] for step in (6, 7)}
        assert outcome.rates == {step: seen[0].rates[step] for step in outcome.rates}


def test_a_changed_global_batch_is_loud_and_an_error_under_strict(pool, whole, tmp_path):
    """What the Trainer fills in for "auto" follows the world size: 4 x 3 samples become 3 x 3."""
    directory, _ = whole
    args = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}
    job = TrainerJob(str(tmp_path), elastic=False, resume=f"{directory}/checkpoint-2", stop_at=3, args=args)
    text = pool.run(run_trainer, 3, job)[0].report.text()
    assert "GLOBAL BATCH CHANGED from 12 to 9; to keep it: train_micro_batch_size_per_gpu 4" in text
    errors = pool.run(attempt, 3, job.at(config={"zeroelastic": {"strict": True}}))
    assert {kind for kind, _ in errors} == {"StrictError"} and len({text for _, text in errors}) == 1
    assert "GLOBAL BATCH CHANGED from 12 to 9" in errors[0][1]


def test_epochs_that_were_cut_by_the_world_size_are_noticed(pool, tmp_path):
    """The Trainer alone, dropping the last batch, has 4 steps an epoch on 3 ranks and 3 on 4 ranks."""
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=5)
    job = job.at(args={"save_strategy": "steps", "save_steps": 5, "dataloader_drop_last": True})
    alone = pool.run(run_trainer, 3, job)
    assert alone[0].max_steps == 12
    again = job.at(elastic=True, resume=True, stop_at=6, args={"dataloader_drop_last": True})
    report = pool.run(run_trainer, 4, again)[0].report
    assert "POSITION CHANGED: step 5 was saved at epoch 1." in report.text()
    assert "SCHEDULE CHANGED: the same 3 epochs end at step 9 and ended at step 12" in report.text()
    assert of_all(pool.run(attempt, 4, again.at(config={"zeroelastic": {"strict": True}})))[0] == "StrictError"


def test_another_order_of_the_data_is_an_error_under_strict_and_loud_without(pool, whole, tmp_path):
    directory, _ = whole
    job = TrainerJob(str(tmp_path), resume=f"{directory}/checkpoint-2", stop_at=3, args={"data_seed": 5})
    assert "POSITION CHANGED: shuffle_seed 42 -> 5: other" in pool.run(run_trainer, 1, job)[0].report.text()
    assert of_all(pool.run(attempt, 2, job.at(config={"zeroelastic": {"strict": True}})))[0] == "StrictError"


def test_another_schedule_of_the_same_length_is_named(pool, tmp_path):
    """As by ``lr_scheduler_type`` or ``warmup_steps``. A save without elastic() records no seed of the order."""
    args = {"save_strategy": "steps", "save_steps": 6}
    job = TrainerJob(str(tmp_path), stage=2, elastic=False, args=args, stop_at=6)
    pool.run(run_trainer, 2, job)
    job = job.at(elastic=True, resume=True, stop_at=7)
    text = pool.run(run_trainer, 3, job.at(args={"lr_scheduler_type": "cosine"}))[0].report.text()
    assert "SCHEDULE CHANGED: the learning rates at step 6 are [0.00" in text
    report = pool.run(run_trainer, 3, job.at(args={}))[0].report
    assert "SCHEDULE CHANGED" not in report.text()
    assert "position in the data (epochs of 4 global batches, of an order whose seed is not recorded)" in report.exact


def test_an_iterable_dataset_keeps_its_own_order(pool, tmp_path):
    job = TrainerJob(str(tmp_path), iterable=True, args={"save_strategy": "steps", "save_steps": 2})
    seen = pool.run(run_trainer, 4, job.at(stop_at=4))
    resumed = pool.run(run_trainer, 2, job.at(resume=f"{tmp_path}/checkpoint-2", stop_at=4, args={}))[0]
    assert compare_states(seen[0].saved[2], resumed.resumed) == []
    assert resumed.samples[2] == seen[0].samples[2] == list(range(24, 36))
    assert "the order of an iterable dataset is its own" in resumed.report.text()


@pytest.mark.support(
    "Frameworks",
    "Hugging Face Trainer: `group_by_length`, `batch_rebalance`, `auto_find_batch_size`",
    "refused",
    "by `elastic()`; the state still resumes",
)
def test_what_depends_on_the_world_size_is_refused_by_name(pool, tmp_path):
    refused = pool.run(refusals, 1, str(tmp_path))[0]
    assert refused["preloaded"] == "True"  # before the rank was forked, as RankPool(preload=...) says
    assert (
        "24 cannot be divided evenly among 5 ranks. World sizes that work: 1, 2, 3, 4, 6, 8, 12, 24."
        in refused["batch"]
    )
    assert "train_sampling_strategy 'group_by_length'" in refused["group_by_length"]
    assert "train_sampling_strategy 'batch_rebalance'" in refused["batch_rebalance"]
    assert "auto_find_batch_size" in refused["auto_find_batch_size"]
    assert "split_batches" in refused["split_batches"]
    assert "dispatch_batches" in refused["dispatch_batches"]
    assert "called for this trainer before" in refused["twice"]
    assert "WeightedRandomSampler cannot be found again" in refused["sampler"]
    assert "43 samples, fewer than one global batch of 64" in refused["too_few"]


# "keep_global_batch"


FIXED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
"""The global batch on two ranks, which is what the script of every run says."""
KEEP = {"zeroelastic": {"keep_global_batch": True}}


def run_and_listen(job: TrainerJob, environment: dict[str, str]) -> tuple[Any, str]:
    """What a run saw, and what zeroelastic logged."""
    os.environ.update(environment)
    said = logged("")
    return run_trainer(job), "\n".join(said)


@pytest.fixture(scope="module")
def whole_of_a_fixed_batch(pool: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = str(tmp_path_factory.mktemp("whole"))
    args = {**FIXED, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    job = TrainerJob(directory, elastic=False, stop_at=6, args=args)
    return directory, pool.run(run_trainer, 2, job)[0]


CASES = {
    "2 -> 3": (3, KEEP, {}, (4, 1)),
    "2 -> 1, by the environment": (1, {"zeroelastic": {}}, {"ZEROELASTIC_KEEP_GLOBAL_BATCH": "1"}, (6, 2)),
}
"""Ranks, configuration, environment, and the micro batch and accumulation of the resumed run."""
STEPS = (2, 4, 5)
"""Those after the resume; step 3 is the end of an epoch, whose samples a Trainer makes up by the number of ranks."""


@pytest.mark.support("Frameworks", "`keep_global_batch`: an unchanged batch per device at another size", "exact")
@pytest.mark.parametrize("name", CASES)
def test_the_run_goes_on_with_the_samples_it_would_have_had(pool, whole_of_a_fixed_batch, tmp_path, name):
    directory, seen = whole_of_a_fixed_batch
    ranks, config, environment, (micro, accumulation) = CASES[name]
    args = {**FIXED, "num_train_epochs": 2}
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=6, args=args, config=config)
    job = job.at(resume=f"{directory}/checkpoint-2")
    outcomes = pool.run(run_and_listen, ranks, job, environment)
    for outcome, _ in outcomes:
        assert [outcome.samples[step] for step in STEPS] == [seen.samples[step] for step in STEPS]
        assert outcome.rates == seen.rates
        assert outcome.max_steps == seen.max_steps
        assert outcome.losses[3] == pytest.approx(seen.losses[3], abs=4e-3)
    said, *others = (text for _, text in outcomes)
    many = "rank" if ranks == 1 else "ranks"
    changed = f"per_device_train_batch_size 6 -> {micro}, gradient_accumulation_steps 1 -> {accumulation}"
    assert f"keep_global_batch: {changed}, so that" in said
    assert f"so that the global batch on {ranks} {many} is that of checkpoint-2: 12" in said
    total = f"global batch 12 as before (micro batch {micro} x {ranks} {many} x {accumulation} accumulated)"
    assert f"resumed on {ranks} {many} from 2: {total}" in said
    assert all("keep_global_batch" not in text and "resumed on" not in text for text in others)


def test_without_it_the_batch_changes_and_the_log_says_so(pool, whole_of_a_fixed_batch, tmp_path):
    directory, _ = whole_of_a_fixed_batch
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=3, args=FIXED, resume=f"{directory}/checkpoint-2")
    outcome, said = pool.run(run_and_listen, 3, job, {})[0]
    assert "GLOBAL BATCH CHANGED from 12 to 18" in outcome.report.text()
    assert "GLOBAL BATCH CHANGED from 12 to 18" in said and "as before" not in said


def test_groups_of_similar_length_are_others_on_another_number_of_ranks_which_is_said(pool, tmp_path):
    """Even with the same global batch, and on the same number of ranks after the first epoch.

    Nothing is lost between epochs: the ranks, of which a new one has another generator, take parts of one order.
    """
    args = {**FIXED, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    args["train_sampling_strategy"] = "group_by_length"
    job = TrainerJob(str(tmp_path / "whole"), elastic=False, args=args, config=KEEP)
    whole = pool.run(run_trainer, 2, job)[0]
    job = job.at(directory=str(tmp_path), args={**args, "save_strategy": "no"})
    for ranks, step, is_said in ((3, 2, True), (2, 2, False), (3, 4, False), (2, 4, False), (2, 6, True)):
        again = job.at(resume=f"{tmp_path}/whole/checkpoint-{step}")
        seen, said = pool.run(run_and_listen, ranks, again, {})[0]
        assert ("POSITION CHANGED: group_by_length" in said) is is_said
        assert ("later epochs" in said.lower()) is (ranks == 3 and is_said)
        noted = "each sample comes once in an epoch, in another order than on 2 ranks" in said
        assert noted is (ranks == 3 and not is_said)
        if ranks == 2:
            assert (seen.samples == {at: whole.samples[at] for at in range(step, 8)}) is not is_said
        if step < 6:
            assert {index for at in range(4, 8) for index in seen.samples[at]} == set(range(SAMPLES))
    strict = {"zeroelastic": {"keep_global_batch": True, "strict": True}}
    assert (
        of_all(pool.run(attempt, 3, job.at(resume=f"{tmp_path}/whole/checkpoint-2", config=strict)))[0] == "StrictError"
    )


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_numbers(pool, tmp_path):
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=1, args=args, config=KEEP)
    pool.run(run_trainer, 2, job)
    kind, text = of_all(pool.run(attempt, 3, job.at(resume=True)))
    assert kind == "ConfigError"
    assert "checkpoint-1: was saved with a global batch of 4, which 3 ranks cannot share evenly" in text
    assert "World sizes that work: 1, 2, 4." in text and "a global batch of 6 (2 x 3 ranks x 1)" in text


def test_where_it_cannot_act_a_changed_batch_is_an_error():
    assert parse_options(KEEP).refuses_other_batch and not parse_options({}).refuses_other_batch
    with pytest.raises(StrictError, match="GLOBAL BATCH CHANGED from 12 to 18"):
        check_batch(12, 18, 3, strict=True)


@pytest.mark.parametrize(("value", "kept"), [("1", True), ("0", False), ("", False)])
def test_the_variable_is_the_option_unless_the_configuration_says_otherwise(monkeypatch, value, kept):
    monkeypatch.setenv("ZEROELASTIC_KEEP_GLOBAL_BATCH", value)
    assert parse_options({}).keep_global_batch is kept
    assert parse_options({"zeroelastic": {"keep_global_batch": False}}).keep_global_batch is False


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("ZEROELASTIC_KEEP_GLOBAL_BATCH", "yes")
    with pytest.raises(ConfigError, match=r"^ZEROELASTIC_KEEP_GLOBAL_BATCH is 'yes'; it can be 1 \(on\) or 0"):
        parse_options({})


# The example, as its readers run it


def torchrun(world_size: int, *command: str) -> str:
    """What a launch on this machine alone prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    python = executable(*LIBRARIES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python}
    return run_as_written([python, *launcher, *command], ROOT, environment)


@pytest.mark.extended
def test_the_example_trains_lora_on_four_ranks_and_goes_on_on_three(tmp_path):
    script = [str(ROOT / "examples/huggingface/train.py"), "--lora", "--max-steps", "5", "--output-dir", str(tmp_path)]
    script += ["--deepspeed", "ds.json"]
    torchrun(4, *script, "--stop-at", "3")
    assert saved_steps(str(tmp_path)) == [3]
    output = torchrun(3, *script, "--metrics", str(tmp_path / "three.json"))
    seen = json.loads((tmp_path / "three.json").read_text())
    assert (seen["report"]["saved_world_size"], seen["report"]["world_size"]) == (4, 3)
    assert seen["report"]["root_matches"] and "position in the data" in output
    assert [entry["step"] for entry in seen["log"]] == [1, 2, 3, 4, 5]
    warm_up_and_decay = [0, 5e-4, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3]
    assert [entry["learning_rate"] for entry in seen["log"]] == pytest.approx(warm_up_and_decay)
