"""What the tests on a GPU call, on tensors that say that they are on one: faults show without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import RefusesTheHost, on_gpu_in_place
from stage_0 import gathered_at_stage_0, state_at_stage_0
from training import VOCABULARY, Job, build_engine, flat_buffers, look, sub_group_steps, train_step

from zeroelastic.testing import RankPool, compare_states, fingerprint


def tensors_of(engine: Any) -> list[torch.Tensor]:
    """Parameters, what ZeRO-3 keeps of them, buffers, master weights and their moments."""
    params = list(engine.module.parameters())
    found = [*params, *engine.module.buffers(), *(p.ds_tensor for p in params if hasattr(p, "ds_tensor"))]
    optimizer = engine.optimizer
    if engine.zero_optimization_stage():
        found += flat_buffers(optimizer)
        found += getattr(optimizer, "bit16_groups_flat", [])
    inner = getattr(optimizer, "optimizer", optimizer)
    found += [p for group in inner.param_groups for p in group["params"]]
    found += [
        value for state in inner.state.values() for value in state.values() if torch.is_tensor(value) and value.dim()
    ]
    return list({id(tensor): tensor for tensor in found}.values())


@contextlib.contextmanager
def as_if_on_a_gpu(engine: Any) -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator

    patch = pytest.MonkeyPatch()
    kind = type(get_accelerator())
    with on_gpu_in_place(tensors_of(engine)):
        patch.setattr(kind, "current_device_name", lambda self: "cuda:0")
        patch.setattr(kind, "current_device", lambda self: "cuda:0")
        try:
            yield
        finally:
            patch.undo()


def seen(engine: Any, stage: int) -> tuple[Any, ...]:
    """What the tests compare of an engine, as plain values."""
    if stage == 0:
        return fingerprint(state_at_stage_0(engine)), gathered_at_stage_0(engine)
    return (*look(engine), sub_group_steps(engine))


def loss(engine: Any) -> float:
    with torch.no_grad():
        tokens = torch.randint(0, VOCABULARY, (8, 5), device="cuda", generator=torch.Generator().manual_seed(3))
        return float(engine.module(tokens, tokens.roll(1, 1)))


def on_both(stage: int) -> None:
    """On a rank: helpers say the same of an engine, and of one whose tensors say that they are on a GPU."""
    engine = build_engine(Job(stage=stage, tables=(100,), frozen_table=VOCABULARY, extra="more"))
    for step in range(2):
        train_step(engine, step)
    want = seen(engine, stage)
    with as_if_on_a_gpu(engine):
        state, *rest = seen(engine, stage)
        assert compare_states(want[0], state) == [] and tuple(rest) == want[1:]
        if stage < 3:  # ZeRO-3 gathers weights in hooks that need a real device
            assert loss(engine) > 0


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_helpers_of_tests_take_an_engine_on_a_gpu(rank_pool: RankPool, stage: int) -> None:
    rank_pool.run(on_both, 1, stage)


def test_a_tensor_that_refuses_the_host_does_as_torch() -> None:
    tensor = torch.arange(6.0)
    with on_gpu_in_place([tensor]):
        assert isinstance(tensor, RefusesTheHost) and tensor.device.type == "cuda"
        with pytest.raises(TypeError, match="numpy"):
            (tensor * 2).numpy()
        with pytest.raises(RuntimeError, match="same device"):
            tensor += torch.ones(6)
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([torch.zeros(1), tensor])
        tensor.copy_(torch.ones(6))
        assert (tensor + torch.tensor(1.0)).cpu().numpy().tolist() == [2.0] * 6
    assert type(tensor) is torch.Tensor and tensor.numpy().tolist() == [1.0] * 6
