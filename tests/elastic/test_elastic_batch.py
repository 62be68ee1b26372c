"""The batch plan: the global batch is kept, every rank takes the same micro steps, padding changes no gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from training import initialize

from zeroelastic.core.world_size import world_sizes
from zeroelastic.elastic import ElasticBatchSampler, ElasticDistributedSampler
from zeroelastic.elastic.batch_plan import BatchPlan, batch_plan, current_rank, current_world_size
from zeroelastic.errors import ConfigError
from zeroelastic.testing import RankPool

sizes = st.integers(1, 200)


@given(sizes, st.integers(1, 40), sizes)
def test_a_plan_keeps_the_global_batch_with_the_fewest_micro_steps(quota: int, world_size: int, max_micro: int) -> None:
    plan = batch_plan(quota * world_size, world_size, max_micro)
    assert plan.micro_batch * plan.accumulation * world_size == plan.global_batch == quota * world_size
    assert plan.micro_batch <= max_micro and plan.padding == 0
    fewer = [a for a in range(1, plan.accumulation) if quota % a == 0 and quota // a <= max_micro]
    assert not fewer
    assert {plan.loss_weight(r, s) for r in range(world_size) for s in range(plan.accumulation)} == {1.0}


@given(sizes, st.integers(1, 40), st.one_of(st.none(), sizes))
def test_a_padded_plan_places_every_sample_once(global_batch: int, world_size: int, max_micro: int | None) -> None:
    if world_size > global_batch:
        with pytest.raises(ConfigError):
            batch_plan(global_batch, world_size, max_micro, misfit="pad")
        return
    plan = batch_plan(global_batch, world_size, max_micro, misfit="pad")
    places = [plan.num_samples(r, s) for r in range(world_size) for s in range(plan.accumulation)]
    assert sum(places) == global_batch and max(places) <= plan.micro_batch
    assert plan.padding == plan.micro_batch * plan.accumulation * world_size - global_batch >= 0
    if global_batch % world_size:  # no rank has more micro steps than the fullest one needs
        assert (plan.accumulation - 1) * (max_micro or global_batch) < -(-global_batch // world_size)


@given(st.integers(2, 40), st.integers(2, 12), st.integers(1, 6))
def test_weights_make_the_gradient_that_of_the_global_batch(global_batch: int, world_size: int, max_micro: int) -> None:
    if world_size > global_batch:
        return
    plan = batch_plan(global_batch, world_size, max_micro, misfit="pad")
    losses = torch.rand(global_batch, dtype=torch.float64, generator=torch.Generator().manual_seed(global_batch))
    total = 0.0
    for rank in range(world_size):
        mine = losses[rank::world_size]
        for step in range(plan.accumulation):
            micro = mine[step * plan.micro_batch : (step + 1) * plan.micro_batch]
            assert len(micro) == plan.num_samples(rank, step)
            mean = float(micro.mean()) if len(micro) else 123.0  # any sample; the weight is 0
            total += plan.loss_weight(rank, step) * mean / plan.accumulation / world_size
    assert total == pytest.approx(float(losses.mean()), rel=1e-12)


def train_padded(global_batch: int) -> torch.Tensor:
    """The weights after three steps at a micro batch of 2, whatever the world size."""
    from deepspeed.utils import safe_get_full_fp32_param

    plan = batch_plan(global_batch, max_micro=2, misfit="pad")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = initialize(model, {"stage": 3}, optimizer=optimizer, installed=False, **plan.apply({}))
    data = TensorDataset(torch.arange(120.0).sin().view(30, 4))
    micro_batches = ElasticBatchSampler(ElasticDistributedSampler(data, global_batch, seed=1), plan)
    for micro_step, (batch,) in enumerate(DataLoader(data, batch_sampler=micro_batches)):
        loss = (engine(batch) - 1).pow(2).mean()
        engine.backward(loss * plan.loss_weight(current_rank(), micro_step))
        engine.step()
    assert engine.global_steps == 3
    return safe_get_full_fp32_param(model.weight).clone()


def test_a_padded_run_takes_the_steps_of_one_that_is_not(rank_pool: RankPool) -> None:
    whole = rank_pool.run(train_padded, 1, 10)[0]
    for weights in rank_pool.run(train_padded, 3, 10):
        torch.testing.assert_close(weights, whole, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 3000))
def test_world_sizes_are_the_divisors(global_batch: int) -> None:
    assert world_sizes(global_batch) == tuple(n for n in range(1, global_batch + 1) if global_batch % n == 0)


def test_a_batch_that_does_not_fit_names_the_world_sizes_that_work() -> None:
    with pytest.raises(ConfigError, match=r"of 12 .* among 5 ranks\. World sizes that work: 1, 2, 3, 4, 6, 12\."):
        batch_plan(12, 5)


@pytest.mark.parametrize(
    ("batch", "size", "micro", "what"),
    [(0, 1, 1, "global_batch"), (8, 0, 1, "world_size"), (8, 2, 0, "max_micro"), (True, 1, 1, "global_batch")],
)
def test_nonsense_is_named(batch: int, size: int, micro: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        batch_plan(batch, size, micro)
    for misfit in ("panic", "fewer_ranks"):
        with pytest.raises(ConfigError, match=r"misfit is .* World sizes that work: 1, 2, 4, 8\. misfit=\"pad\""):
            batch_plan(8, 3, misfit=misfit)  # type: ignore[arg-type]


def test_apply_changes_a_copy() -> None:
    config = {"train_batch_size": 7, "bf16": {"enabled": True}, "gradient_accumulation_steps": "auto"}
    made = batch_plan(24, 3, 4).apply(config)
    assert made == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
    }
    assert config["train_batch_size"] == 7 and made["bf16"] is not config["bf16"]


def test_text_says_what_is_unusual() -> None:
    assert batch_plan(24, 3, 4).text() == "global batch 24 = 3 ranks x micro batch 4 x 2 accumulated"
    assert batch_plan(24, 5, 4, misfit="pad").text().endswith(", 6 places of it empty")


def test_the_world_is_that_of_torchrun_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert (current_world_size(), current_rank()) == (1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert (current_world_size(), current_rank()) == (4, 3)
    assert batch_plan(8, max_micro=1) == BatchPlan(8, 4, 1, 2)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        current_world_size()
