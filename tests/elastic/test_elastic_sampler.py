"""Samplers: for any sequence of world sizes and restarts each sample comes once, in the order of one permutation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from zeroelastic.core.world_size import world_sizes
from zeroelastic.elastic import ElasticBatchSampler, ElasticDistributedSampler, ElasticIterableDataset, batch_plan
from zeroelastic.elastic.position import _load_data
from zeroelastic.errors import ConfigError, StrictError


def sampler(length: int, batch: int, rank: int = 0, world_size: int = 1, **how: object) -> ElasticDistributedSampler:
    return ElasticDistributedSampler(range(length), batch, rank=rank, world_size=world_size, **how)  # type: ignore[arg-type]


def epoch_of(length: int, batch: int, epoch: int, seed: int, shuffle: bool, drop_last: bool) -> list[list[int]]:
    """What an epoch has to be, written down independently: the permutation, cut into global batches."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator, device="cpu").tolist() if shuffle else list(range(length))
    if not drop_last:
        order = list(itertools.islice(itertools.cycle(order), -(-length // batch) * batch))
    return [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_does_not_depend_on_the_default_device(shuffle: bool) -> None:
    with torch.device("meta"):  # as torch.set_default_device
        found = sampler(10, 4, shuffle=shuffle)
        assert [found.batch(number).tolist() for number in range(3)] == epoch_of(10, 4, 0, 0, shuffle, drop_last=False)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, bool, bool, list[tuple[int, int]]]:
    """length, global batch, seed, shuffle, drop_last, and (world size, global batches trained there) in turn."""
    batch = draw(st.integers(1, 24))
    length = draw(st.integers(batch, 80))
    turns = draw(st.lists(st.tuples(st.sampled_from(world_sizes(batch)), st.integers(0, 5)), min_size=1, max_size=6))
    return length, batch, draw(st.integers(0, 3)), draw(st.booleans()), draw(st.booleans()), turns


@given(runs())
def test_each_sample_once_for_any_sequence_of_world_sizes(run) -> None:
    length, batch, seed, shuffle, drop_last, turns = run
    how = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    state: str | None = None
    trained: list[list[int]] = []
    for world_size, steps in turns:
        ranks = [sampler(length, batch, r, world_size, **how) for r in range(world_size)]
        for one in ranks if state is not None else []:
            one.load_state_dict(json.loads(state))
        for _ in range(steps):
            share = batch // world_size
            mine = [list(itertools.islice(iter(one), share)) for one in ranks]  # a new loader at any step
            trained.append([mine[i % world_size][i // world_size] for i in range(batch)])
            for one in ranks:
                one.advance()
        states = {json.dumps(one.state_dict()) for one in ranks}
        assert len(states) == 1, "the position differs from rank to rank"
        state = states.pop()
    per_epoch = ranks[0].num_batches
    expected = [
        epoch_of(length, batch, step // per_epoch, seed, shuffle, drop_last)[step % per_epoch]
        for step in range(len(trained))
    ]
    assert trained == expected
    whole = [i for one in expected[: len(trained) // per_epoch * per_epoch] for i in one]
    for epoch in range(len(trained) // per_epoch):
        seen = whole[epoch * per_epoch * batch : (epoch + 1) * per_epoch * batch]
        tail = length % batch if drop_last else 0
        assert len(set(seen)) == length - tail and len(seen) == per_epoch * batch


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.integers(0, 3), st.booleans(), st.booleans())
def test_at_a_fixed_size_it_is_torchs_distributed_sampler(
    quota, world_size, batches, epoch, shuffle, drop_last
) -> None:
    batch = quota * world_size
    length = batch * batches
    for rank in range(world_size):
        theirs = DistributedSampler(range(length), world_size, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        theirs.set_epoch(epoch)
        ours = sampler(length, batch, rank, world_size, shuffle=shuffle, seed=3, drop_last=drop_last)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs) and len(ours) == len(theirs)


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5), st.integers(0, 4))
def test_micro_batches_of_a_padded_plan_hold_each_sample_once(batch, world_size, max_micro, done) -> None:
    if world_size > batch:
        return
    plan = batch_plan(batch, world_size, max_micro, misfit="pad")
    steps: list[list[int]] = [[] for _ in range(5 - min(done, 4))]
    for rank in range(world_size):
        one = sampler(5 * batch, batch, rank, world_size, seed=2)
        one.advance(min(done, 4))
        micros = ElasticBatchSampler(one, plan)
        drawn = list(micros)
        assert len(drawn) == len(micros) == len(steps) * plan.accumulation
        for number, micro in enumerate(drawn):
            step, micro_step = divmod(number, plan.accumulation)
            real = plan.num_samples(rank, micro_step)
            assert len(micro) == max(real, 1) and (plan.loss_weight(rank, micro_step) > 0) == (real > 0)
            steps[step] += micro[:real]
    for step, seen in enumerate(steps):
        assert sorted(seen) == sorted(sampler(5 * batch, batch, seed=2).batch(step + min(done, 4)).tolist())


def numbers() -> Iterator[int]:
    return iter(range(100))


@pytest.mark.parametrize("can_skip", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_a_stream_is_dealt_out_by_number(world_size: int, can_skip: bool) -> None:
    plan = batch_plan(12, world_size, 2)
    skipping = (lambda skip: range(skip, 100)) if can_skip else numbers
    streams = [ElasticIterableDataset(skipping, plan, can_skip=can_skip, rank=r) for r in range(world_size)]
    for one in streams:
        one.load_state_dict({"consumed": 36, "global_batch": 12})
    drawn = [list(one) for one in streams]
    per_rank = 12 // world_size
    for step in range((100 - 36) // 12):
        seen = [x for mine in drawn for x in mine[step * per_rank : (step + 1) * per_rank]]
        assert sorted(seen) == list(range(36 + 12 * step, 48 + 12 * step))
    assert {len(mine) for mine in drawn} == {(100 - 36) // 12 * per_rank}
    streams[0].advance(2)
    assert streams[0].state_dict() == {"consumed": 60, "global_batch": 12}
    with pytest.raises(StrictError, match="global batch of 24"):
        streams[0].load_state_dict({"consumed": 24, "global_batch": 24})


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_neither_form(workers: int) -> None:
    plan = batch_plan(12, 2, 2)
    stream = ElasticIterableDataset(numbers, plan, rank=1)
    alone = [batch.tolist() for batch in DataLoader(stream, batch_size=plan.micro_batch)]
    loader = DataLoader(stream, batch_size=plan.micro_batch, num_workers=workers, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == alone
    micros = ElasticBatchSampler(sampler(50, 12, 1, 2), plan)
    data = torch.arange(50)
    alone = [batch.tolist() for batch in DataLoader(data, batch_sampler=micros)]
    loader = DataLoader(data, batch_sampler=micros, num_workers=workers, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == alone == list(micros)


def test_an_epoch_that_ends_under_a_loader_keeps_its_order() -> None:
    one = sampler(24, 12, seed=5)
    drawing = iter(one)
    first = [next(drawing) for _ in range(12)]
    one.advance(2)  # the loop draws on from the epoch that it began with
    assert first + list(drawing) == [i for batch in epoch_of(24, 12, 0, 5, True, False) for i in batch]
    assert one.epoch == 1 and one.consumed == 0 and one.global_step == 2
    assert list(one) == [i for batch in epoch_of(24, 12, 1, 5, True, False) for i in batch]


def test_set_epoch_goes_on_within_the_epoch_it_is_in() -> None:
    one = sampler(24, 12)
    one.advance(3)
    one.set_epoch(1)
    assert (one.epoch, one.consumed) == (1, 12)
    one.set_epoch(2)
    assert (one.epoch, one.consumed) == (2, 0)


def test_a_loop_that_begins_with_epoch_0_after_a_resume_is_named(caplog: pytest.LogCaptureFixture) -> None:
    one = sampler(24, 12)
    for epoch in (0, 1, 0, 1):
        one.set_epoch(epoch)
    one.load_state_dict({**one.state_dict(), "epoch": 2, "consumed": 12})
    one.set_epoch(2)
    assert not caplog.records and (one.epoch, one.consumed) == (2, 12)
    one.set_epoch(0)
    (record,) = caplog.records
    assert "set_epoch(0) goes back from epoch 2, 12 samples, of a run that was resumed" in record.getMessage()
    one.set_epoch(1)
    one.set_epoch(0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 25}, "length was 25 and is 24"),
        ({"seed": 9}, "seed was 9 and is 0"),
        ({"global_batch": 6, "consumed": 6}, "global_batch was 6 and is 12"),
        ({"shuffle": False}, "shuffle"),
        ({"drop_last": True}, "drop_last"),
        ({"consumed": 5}, "not the end of a global batch"),
        ({"consumed": 24}, "not the end of a global batch"),
        ({"consumed": -12}, "not the end of a global batch"),
    ],
)
def test_a_position_in_other_data_is_refused_and_nothing_moves(change: dict[str, object], message: str) -> None:
    one = sampler(24, 12)
    with pytest.raises(StrictError, match=message):
        one.load_state_dict({**one.state_dict(), "epoch": 4, **change})
    assert one.epoch == one.consumed == 0
    with pytest.raises(StrictError, match="has no seed"):
        one.load_state_dict({key: value for key, value in one.state_dict().items() if key != "seed"})


def test_what_cannot_be_dealt_out_is_said() -> None:
    with pytest.raises(ConfigError, match="evenly among 5 ranks"):
        list(sampler(24, 12, 0, 5))
    with pytest.raises(ConfigError, match="drop_last leaves them out"):
        sampler(11, 12, drop_last=True)
    with pytest.raises(ConfigError, match="must be 1 or more"):
        sampler(0, 12)
    with pytest.raises(ConfigError, match="rank 4 has no samples: the plan is for 4 ranks"):
        list(ElasticBatchSampler(sampler(24, 12, 4, 5), batch_plan(12, 4)))
    with pytest.raises(ConfigError, match="global batch of 6, the sampler has 12"):
        ElasticBatchSampler(sampler(24, 12), batch_plan(6, 1))
    with pytest.raises(ConfigError, match="empty places"):
        ElasticIterableDataset(numbers, batch_plan(12, 5, misfit="pad"))
    with pytest.raises(ValueError, match="does not go back"):
        sampler(24, 12).advance(-1)
    with pytest.raises(IndexError):
        sampler(24, 12).batch(2)


class Own:
    """Data of one's own, whose ``strict`` means another thing."""

    def __init__(self) -> None:
        self.loaded: list[tuple[object, bool]] = []

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: object, strict: bool = True) -> None:
        self.loaded.append((state, strict))


def test_the_strictness_of_a_resume_is_not_that_of_data_of_ones_own() -> None:
    data = Own()
    assert _load_data(data, {"at": 3}, strict=False) == [] and data.loaded == [({"at": 3}, True)]


@pytest.mark.parametrize(
    ("drop_last", "batch", "place"),
    [
        (False, 12, (2, 24)),  # two whole batches of the other size
        (False, 16, (2, 16)),  # 8 of the 24 samples fill no whole batch
        (False, 48, (2, 0)),
        (True, 5, (2, 20)),
        (True, 28, (2, 0)),
        (True, 12, (3, 0)),  # 29 samples are two batches of 12, so the epoch is over
    ],
)
def test_a_position_goes_on_with_another_global_batch_where_it_may(
    drop_last: bool, batch: int, place: tuple[int, int]
) -> None:
    saved = {"epoch": 2, "consumed": 24, "seed": 0, "length": 29, "global_batch": 6, "shuffle": True}
    one = ElasticDistributedSampler(range(29), batch, drop_last=drop_last, rank=0, world_size=1)
    one.load_state_dict({**saved, "drop_last": drop_last}, strict=False)
    assert (one.epoch, one.consumed) == place
    whole = ElasticDistributedSampler(range(29), batch, drop_last=drop_last, rank=0, world_size=1)
    whole.set_epoch(place[0])
    assert list(one) == list(whole)[place[1] :]
    with pytest.raises(StrictError, match="seed was 1 and is 0"):
        one.load_state_dict({**saved, "drop_last": drop_last, "seed": 1}, strict=False)
    with pytest.raises(StrictError, match="not the end of a global batch"):
        one.load_state_dict({**saved, "drop_last": drop_last, "consumed": -6}, strict=False)
    stream = ElasticIterableDataset(numbers, batch_plan(batch, 1), rank=0)
    stream.load_state_dict({"consumed": 24, "global_batch": 6}, strict=False)
    assert list(stream)[:2] == [24, 25]
