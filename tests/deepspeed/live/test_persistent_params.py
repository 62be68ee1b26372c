"""Persistent parameters after a save and a load: what DeepSpeed's own gather gives, by few collectives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from training import Job, build_engine, train_step

from zeroelastic.testing import RankPool


def gathered(directory: str, job: Job, batch_bytes: int) -> list[tuple[int, int, int]]:
    """For a save, a load and an epilogue of DeepSpeed: our gathers, its gathers, and how many parameters persist."""
    from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

    from zeroelastic.deepspeed.live import stage3_storage

    stage3_storage.BATCH_BYTES = batch_bytes
    engine = build_engine(job)
    train_step(engine, 0)
    optimizer, counts = engine.optimizer, []
    params = list(optimizer.persistent_parameters)

    def stock() -> None:
        optimizer.checkpoint_event_prologue()
        assert all(param.ds_status == ZeroParamStatus.NOT_AVAILABLE for param in params)
        optimizer.checkpoint_event_epilogue()

    def state() -> list[tuple[Any, ...]]:
        return [(p.ds_status, p.dtype, p.device, p.requires_grad, p.data.stride(), p.data.clone()) for p in params]

    def check(action: Any) -> None:
        ours, theirs = [0], [0]

        def counting(original: Any, count: list[int], number: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                count[0] += number(*args)
                return original(*args, **kwargs)

            return call

        by_deepspeed = counting(Init._allgather_params_coalesced, theirs, lambda init, params, *_: len(params))
        with (
            mock.patch.object(
                dist, "all_gather_into_tensor", counting(dist.all_gather_into_tensor, ours, lambda *_: 1)
            ),
            mock.patch.object(Init, "_allgather_params_coalesced", by_deepspeed),
        ):
            action()
        found = state()
        stock()
        for (*facts, values), (*expected, right) in zip(found, state(), strict=True):
            assert facts == expected, (facts, expected)
            assert facts[0] == ZeroParamStatus.AVAILABLE
            assert values.shape == right.shape and torch.equal(values, right)
        counts.append((ours[0], theirs[0], len(params)))

    check(lambda: engine.save_checkpoint(directory))
    for param in params:
        param.data.fill_(7.0)
    check(lambda: engine.load_checkpoint(directory))
    check(stock)
    train_step(engine, 1)
    return counts


@pytest.mark.parametrize(
    ("job", "world_size", "batch_bytes", "most"),
    [
        (Job(), 3, 8 << 20, 2),
        (Job(), 3, 1, 99),
        (Job(), 3, 600, 99),
        (Job(), 1, 8 << 20, 0),
    ],
)
def test_persistent_parameters_are_whole_after_a_save_and_a_load(
    rank_pool: RankPool, tmp_path: Any, job: Job, world_size: int, batch_bytes: int, most: int
) -> None:
    for save, load, stock in rank_pool.run(gathered, world_size, str(tmp_path), job, batch_bytes):
        assert save[2] > 4 and stock == (0, save[2], save[2])
        for ours, theirs, params in (save, load):
            assert ours <= most and theirs == (0 if world_size > 1 else params)
            assert world_size == 1 or (ours == params if batch_bytes == 1 else ours < params)
