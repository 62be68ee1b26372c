"""Every optimizer resumes at another world size bit for bit, or is refused by name before anything is harmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_resume import Saved
from training import LOSS_RTOL, Job, resume, train_and_save

from zeroelastic.digest import ScalarValue
from zeroelastic.errors import UnsupportedError
from zeroelastic.stage3.optimizers import live_form
from zeroelastic.testing import RankPool, compare_states

Saver = Callable[[Job, int], Saved]


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    made: dict[str, Saved] = {}

    def save(job: Job, world_size: int) -> Saved:
        key = f"{job}@{world_size}"
        if key not in made:
            directory = str(tmp_path_factory.mktemp("save"))
            made[key] = Saved(directory, rank_pool.run(train_and_save, world_size, job, directory)[0])
        return made[key]

    return save


@pytest.mark.parametrize(("one", "other"), [("adamw", "cpu_adam"), ("cpu_adam", "adamw")])
def test_adam_goes_on_as_another_adam(rank_pool: RankPool, saved: Saver, one: str, other: str) -> None:
    """torch keeps a step as a tensor, DeepSpeed's ops as an int: the number is the same, and the form is the run's."""
    checkpoint = saved(Job(optimizer=one), 3)
    outcomes = rank_pool.run(resume, 2, Job(optimizer=other).other(), checkpoint.directory)
    forms = {"adamw": "a float32 tensor", "cpu_adam": "a Python int"}
    for outcome in outcomes:
        different = compare_states(checkpoint.outcome.state, outcome.state)
        assert not [line for line in different if not line.startswith("group/")], different
        assert outcome.gathered == checkpoint.outcome.gathered
        assert outcome.report.root_matches
        line = f"step: the same number, as {forms[other]} here and as {forms[one]} in the checkpoint"
        assert line in outcome.report.notes
        assert outcome.losses == pytest.approx(checkpoint.outcome.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.parametrize(
    ("optimizer", "current", "value", "expected"),
    [
        (torch.optim.AdamW, None, ScalarValue("pyint", 3), ScalarValue("float32", 3.0)),
        (torch.optim.AdamW, None, ScalarValue("float64", 3.0), ScalarValue("float64", 3.0)),
        (torch.optim.AdamW, torch.tensor(1.0), ScalarValue("pyint", 2**24), ScalarValue("float32", 2.0**24)),
        (torch.optim.AdamW, 5, ScalarValue("float32", 3.0), ScalarValue("pyint", 3)),
        (torch.optim.AdamW, 5.0, ScalarValue("float32", 3.5), ScalarValue("pyfloat", 3.5)),
        (torch.optim.AdamW, None, ScalarValue("none", None), ScalarValue("none", None)),
        (torch.optim.AdamW, 5, ScalarValue("bool", True), ScalarValue("bool", True)),
        (torch.optim.SGD, None, ScalarValue("pyint", 3), ScalarValue("pyint", 3)),
        (torch.optim.AdamW, 5, ScalarValue("float32", 3.5), "cannot keep as pyint"),
        (torch.optim.AdamW, 5, ScalarValue("float32", float("inf")), "cannot keep as pyint"),
        (torch.optim.AdamW, None, ScalarValue("pyint", 2**24 + 1), "cannot keep as float32"),
    ],
)
def test_a_scalar_takes_the_form_that_the_optimizer_keeps(
    optimizer: type[torch.optim.Optimizer], current: object, value: ScalarValue, expected: ScalarValue | str
) -> None:
    live = optimizer([torch.nn.Parameter(torch.ones(2))])
    if isinstance(expected, str):
        with pytest.raises(UnsupportedError, match=expected):
            live_form(value, key="step", current=current, optimizer=live, where="here")
    else:
        made = live_form(value, key="step", current=current, optimizer=live, where="here")
        assert made == expected and type(made.value) is type(expected.value)
