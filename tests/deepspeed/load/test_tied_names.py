"""A tied weight has several names: a save lists it by one of them, and a run by any other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import initialize, raised

from zeroelastic.checkpoint.param_changes import ParamSet, compare, other_names
from zeroelastic.core.layout import Param
from zeroelastic.testing import RankPool, fingerprint, gather_state

ROWS = 11


class Tied(torch.nn.Module):
    """An embedding and a head of one weight, under the names ``order``, or of two."""

    def __init__(self, order: tuple[str, ...], tied: bool) -> None:
        super().__init__()
        for name in order:
            layer = torch.nn.Embedding(ROWS, 4) if name == "embedding" else torch.nn.Linear(4, ROWS, bias=False)
            setattr(self, name, layer)
        self.other = torch.nn.Linear(4, 4)
        if tied:
            for name in order:
                getattr(self, name).weight = self.get_submodule(order[0]).weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        head = self.get_submodule("head")
        return torch.nn.functional.cross_entropy(
            head(self.other(self.embedding(tokens))).flatten(0, 1), tokens.flatten()
        )


def make(order: tuple[str, ...], stage: int, mode: str = "error", *, tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    zero, options = {"stage": stage, "elastic_checkpoint": True}, {"on_mismatch": mode}
    return initialize(Tied(order, tied), zero, train_batch_size=6, zeroelastic=options)


def values(engine: Any) -> list[Any]:
    """The fingerprints of all that is trained, whatever it is called."""
    state = fingerprint(gather_state(engine))
    return sorted(str(value) for key, value in state.items() if key.startswith(("master/", "state/", "scalar/")))


def train_and_save(order: tuple[str, ...], stage: int, directory: str, tied: bool = True) -> list[Any]:
    engine = make(order, stage, tied=tied)
    for step in range(2):
        tokens = torch.randint(0, ROWS, (2, 3), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(tokens))
        engine.step()
    engine.save_checkpoint(directory)
    return values(engine)


def load(
    order: tuple[str, ...], stage: int, directory: str, mode: str = "error", tied: bool = True
) -> tuple[tuple[str, str], list[Any]]:
    engine = make(order, stage, mode, tied=tied, seed=5)
    return raised(lambda: engine.load_checkpoint(directory)), values(engine)


SAVED = ("embedding", "head")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("order", [("head", "embedding", "output"), ("output", "head", "embedding")])
def test_any_of_its_names_restores_a_tied_weight(
    rank_pool: RankPool, tmp_path: Path, order: tuple[str, ...], stage: int
) -> None:
    saved = rank_pool.run(train_and_save, 3, (*SAVED, "output"), stage, str(tmp_path))[0]
    for size, mode in ((3, "error"), (2, "initialize")):
        for error, found in rank_pool.run(load, size, order, stage, str(tmp_path), mode):
            assert error == ("", "") and found == saved


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.quick), 3])
def test_what_was_tied_or_is_tied_now_is_named(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    rank_pool.run(train_and_save, 2, SAVED, stage, str(tmp_path / "tied"))
    rank_pool.run(train_and_save, 2, SAVED, stage, str(tmp_path / "two"), False)
    for (name, text), _ in rank_pool.run(load, 2, SAVED, stage, str(tmp_path / "tied"), "error", False):
        assert name == "LayoutMismatchError" and "head.weight [11, 4] of the model was tied to embedding.weight" in text
    for (name, text), _ in rank_pool.run(load, 2, SAVED, stage, str(tmp_path / "two")):
        assert name == "LayoutMismatchError" and "head.weight [11, 4] of the checkpoint is tied to embedding" in text


def test_a_name_that_both_list_is_no_other_name() -> None:
    a, b, c = (Param(name, (3,)) for name in "abc")
    assert other_names(ParamSet((a, b), ()), ParamSet((a, b), (), tied={"c": "a"})) == {}
    assert other_names(ParamSet((a, b), ()), ParamSet((a,), (), tied={"b": "a"})) == {}
    assert other_names(ParamSet((a,), (), tied={"c": "a"}), ParamSet((b,), (), tied={"c": "b"})) == {"b": "a"}
    assert other_names(ParamSet((a,), (c,)), ParamSet((b,), (), tied={"c": "b"})) == {"b": "c"}
    assert compare(ParamSet((a,), ()), ParamSet((b,), (), tied={"c": "b"}), [], []).dropped == ("a",)
