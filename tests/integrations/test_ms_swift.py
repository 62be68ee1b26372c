"""ms-swift's sampler, by a stand-in with its interface; tests/front_ends/run.py runs the real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from places import GOLDEN

from zeroelastic.deepspeed.patching import unwrap_all
from zeroelastic.integrations import ms_swift
from zeroelastic.integrations.trainer import TrainerRun, _running

STEPS = 16


class BatchSampler:
    """Each rank's part of a permutation whose length is a multiple of the number of ranks."""

    world_size, rank = 2, 0

    def __init__(self, total_samples: int, batch_size: int, shuffle: bool, drop_last: bool, data_seed: int, tp_size=1):
        self.total_samples = total_samples // self.world_size
        self.batch_size, self.shuffle, self.drop_last, self.tp_size = batch_size, shuffle, drop_last, tp_size
        self.curr_seed = data_seed

    def __iter__(self) -> Iterator[list[int]]:
        length = self.total_samples * self.world_size
        order = torch.randperm(length, generator=torch.Generator().manual_seed(self.curr_seed)).tolist()
        mine = order[self.rank :: self.world_size] if self.shuffle else range(self.rank, length, self.world_size)
        batches = [list(mine[at : at + self.batch_size]) for at in range(0, len(mine), self.batch_size)]
        return iter([batch for batch in batches if len(batch) == self.batch_size or not self.drop_last])

    def __len__(self) -> int:
        return self.total_samples // self.batch_size


class OfAllSamples:
    """A later version: it permutes all samples, so that the order does not depend on the number of ranks."""

    world_size, rank = 2, 0

    def __init__(self, total_samples: int, batch_size: int, shuffle: bool, **kwargs: Any):
        self.total_samples, self.batch_size, self.shuffle, self.tp_size = total_samples, batch_size, shuffle, 1
        self.total_size = total_samples // self.world_size * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([])

    def __len__(self) -> int:
        return 0


@pytest.fixture
def wrapped() -> Iterator[None]:
    for kind in (BatchSampler, OfAllSamples):
        module = ModuleType("swift.dataloader.shard")
        module.BatchSamplerShard = kind  # type: ignore[attr-defined]
        ms_swift.wrap_module(module)
        ms_swift.wrap_module(module)
    yield
    unwrap_all()


def steps(samples: int, world_size: int, micro: int, checkpoint: Path | None, kind=BatchSampler, **kwargs: Any):
    """The samples of each step of an epoch over all ranks, and what the run records in its checkpoints."""
    recorded: dict[str, Any] = {}
    ranks = []
    for rank in range(world_size):
        members = {"world_size": world_size, "rank": rank}
        for name, value in members.items():
            setattr(kind, name, value)
        state = SimpleNamespace(stateful_callbacks=recorded)
        trainer = SimpleNamespace(add_callback=lambda callback, state=state: callback.on_train_begin(None, state, None))
        settings = {"shuffle": True, "drop_last": True, "data_seed": 5, **kwargs}
        with _running(TrainerRun(trainer, object, checkpoint)):
            sampler = kind(samples, micro, **settings)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)], recorded


def saved(folder: Path, recorded: dict[str, Any]) -> Path:
    """A checkpoint of two ranks, by a Trainer that has recorded this."""
    shutil.copytree(GOLDEN / "elastic2", folder)
    (folder / "trainer_state.json").write_text(json.dumps({"stateful_callbacks": recorded}))
    return folder


@pytest.mark.parametrize("samples", [100, 101, 99, 97])
@pytest.mark.parametrize("recorded", [True, False], ids=["saved with zeroelastic", "saved without"])
def test_the_order_goes_on_on_3_ranks_and_then_on_1(wrapped, tmp_path, samples, recorded):
    """The two-rank run's samples in every step, also from the checkpoint of the three-rank run that continued it."""
    on2, record = steps(samples, 2, 3, None)
    assert record["zeroelastic_order"]["attributes"] == {"samples": samples, "permuted": samples // 2 * 2}
    first = saved(tmp_path / "first", record if recorded else {})
    on3, record = steps(samples, 3, 2, first)
    assert record["zeroelastic_order"]["attributes"]["permuted"] == samples // 2 * 2
    on1, _ = steps(samples, 1, 6, saved(tmp_path / "second", record))
    same = [sorted(step) for step in on2[:STEPS]]
    assert [sorted(step) for step in on3[:STEPS]] == same and [sorted(step) for step in on1[:STEPS]] == same
    assert sorted(chain(*on1)) == sorted(set(chain(*on1)))


def test_without_it_100_samples_come_in_another_order_on_3_ranks():
    assert steps(100, 2, 3, None)[0] != steps(100, 3, 2, None)[0]
    assert steps(100, 3, 2, None)[1] == {}


def test_data_of_another_length_is_another_order_and_said(wrapped, tmp_path, caplog):
    _, record = steps(100, 2, 3, None)
    on3, _ = steps(98, 3, 2, saved(tmp_path / "saved", record))
    assert "order of samples cannot be continued" in caplog.text
    assert sorted(chain(*on3)) == list(range(96))


@pytest.mark.parametrize(("kind", "settings"), [(OfAllSamples, {}), (BatchSampler, {"shuffle": False})])
def test_other_orders_are_left_alone(wrapped, tmp_path, kind, settings):
    _, record = steps(100, 2, 3, None, kind, **settings)
    assert record == {}


def test_a_module_without_the_sampler_is_named(caplog):
    ms_swift.wrap_module(ModuleType("swift.dataloader.shard"))
    assert "has no BatchSamplerShard" in caplog.text
