"""The torchdata loader: its position is that of the batches handed out, at any number of ranks and of workers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from zeroelastic.elastic import ElasticDistributedSampler, ElasticStatefulDataLoader, batch_plan, world_sizes
from zeroelastic.errors import ConfigError, StrictError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it


class Numbers(Dataset):
    """Sample i is i, with a place of its own in memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def loaders(length: int, batch: int, world_size: int, max_micro: int, **options: object) -> list:
    plan = batch_plan(batch, world_size, max_micro, misfit="pad")
    data = Numbers(length)
    return [
        ElasticStatefulDataLoader(
            data, ElasticDistributedSampler(data, batch, seed=3, rank=rank, world_size=world_size), plan, **options
        )
        for rank in range(world_size)
    ]


def reference(length: int, batch: int, steps: int) -> list[list[int]]:
    """The samples of each step of an uninterrupted run, by epochs of whole global batches, sorted."""
    found: list[list[int]] = []
    epoch = 0
    while len(found) < steps:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        order += order[: -length % batch]
        found += [sorted(order[i : i + batch]) for i in range(0, len(order), batch)]
        epoch += 1
    return found[:steps]


def train(ranks: list, steps: int, extra: int = 0) -> list[list[int]]:
    """The samples of so many steps, then of ``extra`` micro batches whose step is never taken."""
    plan = ranks[0]._plan
    found: list[list[int]] = [[] for _ in range(steps)]
    for rank, loader in enumerate(ranks):
        taken = 0
        while taken < steps * plan.accumulation + extra:
            for micro in loader:
                step, micro_step = divmod(taken, plan.accumulation)
                if step < steps:
                    found[step] += micro.tolist()[: plan.num_samples(rank, micro_step)]
                taken += 1
                if taken == steps * plan.accumulation + extra:
                    break
    return [sorted(samples) for samples in found]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_sample_once_for_any_sequence_of_world_sizes(data) -> None:
    batch = data.draw(st.integers(2, 12))
    length = data.draw(st.integers(batch, 50))
    trained: list[list[int]] = []
    state: str | None = None
    for _ in range(data.draw(st.integers(1, 4))):
        ranks = loaders(length, batch, data.draw(st.sampled_from(world_sizes(batch))), data.draw(st.integers(1, 4)))
        for one in ranks if state is not None else []:
            one.load_state_dict(json.loads(state))
        extra = data.draw(st.integers(0, ranks[0]._plan.accumulation - 1))
        trained += train(ranks, data.draw(st.integers(0, 6)), extra)
        states = {json.dumps(one.state_dict()) for one in ranks}
        assert len(states) == 1, "the position differs from rank to rank"
        state = states.pop()
    assert trained == reference(length, batch, len(trained))


def test_what_workers_fetch_ahead_does_not_count_and_their_number_may_change() -> None:
    trained: list[list[int]] = []
    state = None
    for world_size, workers, options in (
        (2, 1, {"prefetch_factor": 4}),
        (3, 0, {}),
        (1, 2, {"persistent_workers": True}),
        (2, 2, {}),
    ):
        ranks = loaders(40, 6, world_size, 1, num_workers=workers, **options)
        for one in ranks if state is not None else []:
            one.load_state_dict(state)
        trained += train(ranks, 5, extra=ranks[0]._plan.accumulation - 1)
        state = ranks[0].state_dict()
        assert isinstance(ranks[0], StatefulDataLoader)
    assert trained == reference(40, 6, 20)


def test_persistent_workers_go_on_after_a_break() -> None:
    (one,) = loaders(30, 6, 1, 2, num_workers=2, persistent_workers=True)
    assert train([one], 2) + train([one], 7) == reference(30, 6, 9)
    assert len(one) == (5 - 4) * 3


class Stateful(Numbers):
    def state_dict(self) -> dict:
        return {}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_what_cannot_be_elastic_is_refused() -> None:
    plan = batch_plan(4, 1, 2)
    sampler = ElasticDistributedSampler(range(10), 4, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"^shuffle: given by the sampler and the plan"):
        ElasticStatefulDataLoader(Numbers(10), sampler, plan, shuffle=True)
    with pytest.raises(ConfigError, match="Stateful has a state_dict"):
        ElasticStatefulDataLoader(Stateful(10), sampler, plan)
    with pytest.raises(ConfigError, match="ElasticIterableDataset"):
        ElasticStatefulDataLoader(Stream(), sampler, plan)
    with pytest.raises(StrictError, match="global_batch was 5"):
        ElasticStatefulDataLoader(Numbers(10), sampler, plan).load_state_dict(
            {**sampler.state_dict(), "global_batch": 5}
        )


def test_without_torchdata_it_is_said_what_to_install() -> None:
    program = """
import sys
sys.modules["torchdata"] = None
from zeroelastic.elastic import *
assert preemption and resume
import zeroelastic.elastic
try:
    zeroelastic.elastic.ElasticStatefulDataLoader
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "ElasticStatefulDataLoader needs torchdata: pip install 'zeroelastic[data]'.\n"
