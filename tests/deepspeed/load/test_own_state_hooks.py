"""Modules that decide themselves what they take from a state: buffers that grow, observers of torch.ao, keys renamed.

DeepSpeed calls ``load_state_dict``, so such modules resume with it; no check of a load may come before their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.ao.quantization.observer import PerChannelMinMaxObserver
from training import initialize, raised

from zeroelastic.errors import LayoutMismatchError
from zeroelastic.testing import RankPool


class Queue(torch.nn.Module):
    """A queue of as many rows as it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 16))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "rows" in state:
            self.rows = torch.zeros_like(state[prefix + "rows"])
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, torch.full((1, 16), float(len(self.rows)))])
        return x


class Hooked(torch.nn.Module):
    """A module whose hook accepts a buffer of another shape, in a module that is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.register_buffer("seen", torch.zeros(1))
        self._register_load_state_dict_pre_hook(self.take)  # type: ignore[no-untyped-call]

    def take(self, state: Any, prefix: str, *_: Any) -> None:
        self.inner.seen = torch.zeros_like(state[prefix + "inner.seen"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.seen = torch.cat([self.inner.seen, torch.ones(1)])
        return x


class Observed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.observer = PerChannelMinMaxObserver(ch_axis=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observer(x.detach())
        return x


class Renamed(torch.nn.Module):
    """A module that saves a weight under another name, beside one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = torch.nn.Linear(16, 16, bias=False)
        self.fixed = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.register_state_dict_post_hook(lambda module, state, prefix, _: self.move(state, prefix, "now", "then"))
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda state, prefix, *_: self.move(state, prefix, "then", "now")
        )

    def move(self, state: Any, prefix: str, old: str, new: str) -> None:
        state[f"{prefix}{new}.weight"] = state.pop(f"{prefix}{old}.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.now(x) + self.fixed(x)
        return result


class Plain(torch.nn.Module):
    """A module that takes what torch takes."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(rows, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, torch.ones(1, 16)])
        return x


KINDS = {"queue": Queue, "hook": Hooked, "observer": Observed, "renamed": Renamed, "plain": Plain}


def make(kind: str, stage: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(KINDS[kind](), torch.nn.Linear(16, 7))
    return initialize(model, {"stage": stage, "elastic_checkpoint": True}, train_batch_size=6)


def own_state(engine: Any) -> dict[str, list[Any]]:
    """The buffers, and the weights of the first module where they are whole."""
    named = [*engine.module.named_buffers(), *engine.module[0].named_parameters()]
    return {name: tensor.tolist() for name, tensor in named}


def train_and_save(kind: str, stage: int, directory: str) -> dict[str, list[Any]]:
    engine = make(kind, stage)
    for _ in range(3):
        engine.backward(engine(torch.arange(16.0).repeat(2, 1)).square().mean())
        engine.step()
    engine.save_checkpoint(directory)
    return own_state(engine)


def load(kind: str, stage: int, directory: str) -> tuple[tuple[str, str], dict[str, list[Any]]]:
    engine = make(kind, stage, seed=1)
    return raised(lambda: engine.load_checkpoint(directory)), own_state(engine)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", ["queue", "hook", "observer", pytest.param("renamed", marks=pytest.mark.quick)])
def test_a_module_that_decides_itself_is_asked(rank_pool: RankPool, tmp_path: Path, kind: str, stage: int) -> None:
    saved = rank_pool.run(train_and_save, 3, kind, stage, str(tmp_path))[0]
    for error, found in rank_pool.run(load, 2, kind, stage, str(tmp_path)):
        assert error == ("", "") and found == saved


def test_any_other_module_is_not(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 3, "plain", 2, str(tmp_path))
    for (error, text), found in rank_pool.run(load, 2, "plain", 2, str(tmp_path)):
        assert error == LayoutMismatchError.__name__ and "buffer 0.rows is of shape [3, 16]" in text
        assert found == {"0.rows": []}
