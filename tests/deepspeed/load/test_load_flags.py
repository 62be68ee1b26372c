"""What load_checkpoint's arguments promise in DeepSpeed's documentation, and what the stock code gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import Job, Outcome, build_engine, look, raised, resume, train_and_save, train_step

from zeroelastic.testing import RankError, RankPool, gather_state


@pytest.fixture(scope="module", params=["elastic", "rigid"])
def save(request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = str(tmp_path_factory.mktemp(request.param))
    job = Job(elastic=request.param == "elastic")
    return directory, rank_pool.run(train_and_save, 4, job, directory)[0]


def built_state(job: Job) -> dict[str, Any]:
    return look(build_engine(job))[0]


def pick(state: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    found = {key: value for key, value in state.items() if key.startswith(prefixes)}
    assert found
    return found


WEIGHTS = ("weight/", "master/", "buffer/")
ELASTIC_IS_CORE = pytest.mark.parametrize(
    "save", [pytest.param("elastic", marks=pytest.mark.core), "rigid"], indirect=True
)


def load_buffers(src: dict[str, Any], dst: torch.nn.Module) -> None:
    dst.load_state_dict({"batches_seen": src["batches_seen"]}, strict=False)


FLAGS: tuple[dict[str, Any], ...] = (
    {"load_optimizer_states": False},
    {"load_module_only": True, "custom_load_fn": load_buffers},
    {"load_lr_scheduler_states": False, "custom_load_fn": load_buffers},
)


def resume_each(job: Job, directory: str) -> tuple[dict[str, Any], list[Outcome]]:
    """The state of an engine as it is built, and the outcome of a resume with each of FLAGS."""
    return built_state(job), [resume(job, directory, **flags) for flags in FLAGS]


@pytest.mark.support("Using it", "`load_optimizer_states=False`", "exact", "weights; the optimizer is the run's own")
@pytest.mark.support("Using it", "`load_module_only=True`", "exact", "weights and buffers, nothing else")
@pytest.mark.support("Using it", "`load_lr_scheduler_states=False`", "exact", "all but the scheduler")
@ELASTIC_IS_CORE
def test_what_a_flag_leaves_out_is_the_runs_and_the_rest_is_exact(
    rank_pool: RankPool, save: tuple[str, Outcome]
) -> None:
    directory, saved = save
    fresh, (weights, module, unscheduled) = rank_pool.run(resume_each, 3, Job().other(), directory)[0]
    for outcome in (weights, module):
        assert pick(outcome.state, *WEIGHTS) == pick(saved.state, *WEIGHTS)
    assert not any(key.startswith("state/") for key in weights.state)
    assert weights.state["group/0/weight_decay"] == fresh["group/0/weight_decay"]
    assert weights.state["group/0/initial_lr"] == fresh["group/0/initial_lr"] != saved.state["group/0/initial_lr"]
    assert weights.state["engine/global_steps"] == 3
    assert pick(weights.state, "scheduler/last_epoch") == pick(saved.state, "scheduler/last_epoch")
    assert "optimizer" in weights.client_state
    assert any("not asked for" in line for line in weights.report.reset)
    notes = [outcome.report.notes for outcome in (weights, module, unscheduled)]
    assert [any(note.startswith("custom_load_fn sets only") for note in said) for said in notes] == [False, True, True]
    rest = ("engine/", "scheduler/", "group/", "loss_scaler/")
    assert pick(module.state, *rest) == pick(fresh, *rest)
    assert pick(unscheduled.state, "scheduler/") == pick(fresh, "scheduler/")
    everything_else = ("weight/", "master/", "state/", "scalar/", "buffer/", "group/", "engine/")
    assert pick(unscheduled.state, *everything_else) == pick(saved.state, *everything_else)


@pytest.mark.support("Precision", "`load_from_fp32_weights: false`", "exact", "master weights are the 16-bit ones")
def test_load_from_fp32_weights_off_rounds_the_master_weights_to_16_bit(
    rank_pool: RankPool, save: tuple[str, Outcome]
) -> None:
    directory, saved = save
    job = Job().other(zero={"load_from_fp32_weights": False})
    for with_state, without in rank_pool.run(resume_rounded, 3, job, directory):
        for state in (with_state, without):
            assert pick(state, "weight/") == pick(saved.state, "weight/")
            assert pick(state, "master/") != pick(saved.state, "master/")
        assert pick(with_state, "state/", "scalar/") == pick(saved.state, "state/", "scalar/")


def resume_rounded(job: Job, directory: str) -> list[dict[str, Any]]:
    """The state after loads with optimizer states and without, in which master weights are the 16-bit weights."""
    found = []
    for optimizer_states in (True, False):
        engine = build_engine(job)
        engine.load_checkpoint(directory, load_optimizer_states=optimizer_states)
        state = gather_state(engine)
        masters = [key for key in state if key.startswith("master/")]
        assert masters
        assert all(torch.equal(state[key], state[f"weight/{key.removeprefix('master/')}"].float()) for key in masters)
        found.append(look(engine)[0])
    return found


@pytest.mark.support("Using it", "client state", "exact", "of the same rank; new ranks get that of rank 0")
@pytest.mark.support("Using it", '`"weights_only_load": true`', "exact", "nothing is unpickled outside an allow-list")
@pytest.mark.parametrize("weights_only_load", [False, True])
def test_new_ranks_get_client_state_and_buffers_of_rank_0(
    rank_pool: RankPool, save: tuple[str, Outcome], weights_only_load: bool
) -> None:
    directory, saved = save
    job = Job().other(options={"weights_only_load": weights_only_load})
    outcomes = rank_pool.run(resume, 6, job, directory)
    assert [outcome.client_state["rank"] for outcome in outcomes] == [0, 1, 2, 3, 0, 0]
    assert all(pick(o.state, "buffer/") == pick(saved.state, "buffer/") for o in outcomes)


def dump_state_dict(job: Job, directory: str) -> dict[str, Any]:
    engine = build_engine(job)
    train_step(engine, 0)
    state = engine.optimizer.state_dict()
    assert "base_optimizer_state" in state and "fp32_flat_groups" in state and "optimizer_state_dict" not in state
    torch.save(state, Path(directory) / f"{torch.distributed.get_rank()}.pt")
    return look(engine)[0]


STATE_DICTS = "`optimizer.load_state_dict()`: elastic state dicts, those of another number of ranks at any stage"


BY_HAND = [
    Job(elastic=False, stage=stage, precision=precision) for stage, precision in ((1, "bf16"), (2, "fp32"), (3, "bf16"))
]
"""With elastic_checkpoint, DeepSpeed itself joins what it makes at stages 1 and 2."""


@pytest.mark.support("Using it", STATE_DICTS, "refused", "`save_checkpoint` instead")
def test_state_dicts_that_are_saved_by_hand_load_at_their_own_size_alone(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_by_hand, 2, str(tmp_path))
    assert rank_pool.run(load_by_hand, 2, str(tmp_path)) == [[("", "")] * len(BY_HAND)] * 2
    for world_size in (1, 3):
        for kind, text in (one for found in rank_pool.run(load_by_hand, world_size, str(tmp_path)) for one in found):
            assert kind == "UnsupportedError" and f"of 2 ranks, and this run has {world_size}: DeepSpeed" in text


def save_by_hand(directory: str) -> None:
    for job in BY_HAND:
        engine = build_engine(job)
        train_step(engine, 0)
        place = Path(directory) / str(job.stage)
        place.mkdir(exist_ok=True)
        torch.save(engine.optimizer.state_dict(), place / f"{torch.distributed.get_rank()}.pt")


def load_by_hand(directory: str) -> list[tuple[str, str]]:
    return [load_from_memory(job, f"{directory}/{job.stage}") for job in BY_HAND]


@pytest.mark.support("Using it", STATE_DICTS, "refused", "`save_checkpoint` instead")
def test_elastic_state_dicts_in_memory_are_refused_by_name(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(dump_state_dict, 2, Job(), str(tmp_path))
    for kind, text in rank_pool.run(load_from_memory, 2, Job(), str(tmp_path)):
        assert kind == "UnsupportedError" and "optimizer.load_state_dict() was given elastic state dicts" in text


def load_from_memory(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    states = [torch.load(Path(directory) / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return raised(lambda: engine.optimizer.load_state_dict(states))


def test_state_that_the_checkpoint_does_not_have_is_not_taken_for_the_saved_state(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """Everything saved is live and right, and yet the state is not the saved one: the root tells."""
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path))
    with pytest.raises(RankError, match="holds state that the checkpoint does not"):
        rank_pool.run(load_with_leftover, 3, Job(), str(tmp_path))


def load_with_leftover(job: Job, directory: str) -> None:
    from zeroelastic.deepspeed.live.stage3 import Stage3

    Stage3.drop_state = lambda self, sub_group, keep=(): None  # type: ignore[method-assign]  # what keeps leftovers out
    engine = build_engine(job)
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        engine.optimizer.optimizer.state[flat]["leftover"] = torch.zeros_like(flat)
    engine.load_checkpoint(directory)
