"""``"keep_global_batch"``: a Trainer whose batch per device nobody changed keeps the global batch at another size."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from trainer_job import TrainerJob, attempt, run_trainer

from zeroelastic import ConfigError, StrictError
from zeroelastic.deepspeed.load.report import check_batch
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.testing import RankPool

PRELOAD = ("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate")
LIMIT_S = 250.0
FIXED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
"""The global batch on two ranks, which is what the script of every run says."""
KEEP = {"zeroelastic": {"keep_global_batch": True}}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, preload=PRELOAD) as made:
        yield made


def run_and_listen(job: TrainerJob, environment: dict[str, str]) -> tuple[Any, str]:
    """What a run saw, and what zeroelastic logged."""
    os.environ.update(environment)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeroelastic")
    logger.addHandler(handler)
    try:
        return run_trainer(job), "\n".join(records)
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = str(tmp_path_factory.mktemp("whole"))
    args = {**FIXED, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    job = TrainerJob(directory, elastic=False, stop_at=6, args=args)
    return directory, pool.run(run_trainer, 2, job, timeout=LIMIT_S)[0]


CASES = {
    "2 -> 3": (3, KEEP, {}, (4, 1)),
    "2 -> 1, by the environment": (1, {"zeroelastic": {}}, {"ZEROELASTIC_KEEP_GLOBAL_BATCH": "1"}, (6, 2)),
}
"""Ranks, configuration, environment, and the micro batch and accumulation of the resumed run."""
STEPS = (2, 4, 5)
"""Those after the resume; step 3 is the end of an epoch, whose samples a Trainer makes up by the number of ranks."""


@pytest.mark.support("Frameworks", "`keep_global_batch`: an unchanged batch per device at another size", "exact")
@pytest.mark.parametrize("name", CASES)
def test_the_run_goes_on_with_the_samples_it_would_have_had(pool, whole, tmp_path, name):
    directory, seen = whole
    ranks, config, environment, (micro, accumulation) = CASES[name]
    args = {**FIXED, "num_train_epochs": 2}
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=6, args=args, config=config)
    job = job.at(resume=f"{directory}/checkpoint-2")
    outcomes = pool.run(run_and_listen, ranks, job, environment, timeout=LIMIT_S)
    for outcome, _ in outcomes:
        assert [outcome.samples[step] for step in STEPS] == [seen.samples[step] for step in STEPS]
        assert outcome.rates == seen.rates
        assert outcome.max_steps == seen.max_steps
        assert outcome.losses[3] == pytest.approx(seen.losses[3], abs=4e-3)
    said, *others = (text for _, text in outcomes)
    many = "rank" if ranks == 1 else "ranks"
    changed = f"per_device_train_batch_size 6 -> {micro}, gradient_accumulation_steps 1 -> {accumulation}"
    assert f"keep_global_batch: {changed}, so that {ranks} ranks have the global batch of checkpoint-2: 12" in said
    total = f"global batch 12 as before (micro batch {micro} x {ranks} {many} x {accumulation} accumulated)"
    assert f"resumed on {ranks} {many} from 2: {total}" in said
    assert all("keep_global_batch" not in text and "resumed on" not in text for text in others)


def test_without_it_the_batch_changes_and_the_log_says_so(pool, whole, tmp_path):
    directory, _ = whole
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=3, args=FIXED, resume=f"{directory}/checkpoint-2")
    outcome, said = pool.run(run_and_listen, 3, job, {}, timeout=LIMIT_S)[0]
    assert "GLOBAL BATCH CHANGED from 12 to 18" in outcome.report.text()
    assert "GLOBAL BATCH CHANGED from 12 to 18" in said and "as before" not in said


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_numbers(pool, tmp_path):
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    job = TrainerJob(str(tmp_path), elastic=False, stop_at=1, args=args, config=KEEP)
    pool.run(run_trainer, 2, job, timeout=LIMIT_S)
    errors = pool.run(attempt, 3, job.at(resume=True), timeout=LIMIT_S)
    assert len(set(errors)) == 1
    kind, text = errors[0]
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
