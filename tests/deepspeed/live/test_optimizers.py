"""Another optimizer goes on from the state of the saved one, or is refused by name before anything is harmed.

That each goes on from its own: load/test_configurations.py.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exact_jobs import OPTIMIZERS
from saves import Saver, save_once
from training import (
    LOSS_RTOL,
    Job,
    attempt,
    build_engine,
    ds_config,
    look,
    of_all,
    raised,
    resume,
    train_step,
)

from zeroelastic.checkpoint.optimizer_file import TensorForm
from zeroelastic.core.digest import ScalarValue
from zeroelastic.deepspeed.live.optimizers import (
    SavedGroup,
    changed_class,
    common_state_made_later,
    live_form,
    misfits,
    options_to_set,
)
from zeroelastic.deepspeed.live.replicated import set_groups
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool, compare_states

STEPS = {"before": 2, "after": 1}


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory, **STEPS)


FORMS = {"adamw": "a float32 tensor", "cpu_adam": "a Python int", "fused_adam": "a Python int"}
ADAMS = "changing between torch `AdamW`, `DeepSpeedCPUAdam` and `FusedAdam`"


@pytest.mark.support("Optimizers", ADAMS, "exact", "the report names hyper-parameters that only one of them has")
@pytest.mark.parametrize(
    ("one", "other"),
    [("adamw", "cpu_adam"), ("cpu_adam", "adamw"), ("adamw", "fused_adam"), ("fused_adam", "cpu_adam")],
)
def test_adam_goes_on_as_another_adam(rank_pool: RankPool, saved: Saver, one: str, other: str) -> None:
    """torch keeps a step as a tensor, DeepSpeed's ops as an int: the number is the same, and the form is the run's."""
    checkpoint = saved(OPTIMIZERS[one][0], 3)
    outcomes = rank_pool.run(resume, 2, Job(optimizer=other).other(), checkpoint.directory, **STEPS)
    classes = {"adamw": "AdamW", "cpu_adam": "DeepSpeedCPUAdam", "fused_adam": "FusedAdam"}
    for outcome in outcomes:
        different = compare_states(checkpoint.outcome.state, outcome.state)
        assert all(re.fullmatch(r"group/\d/\w+(/\d)?: is (missing|new)", line) for line in different), different
        assert outcome.gathered == checkpoint.outcome.gathered
        assert outcome.report.root_matches
        notes = outcome.report.notes
        assert f"optimizer: {classes[other]} goes on from the state of {classes[one]}, which has the same keys" in notes
        line = f"step: the same number, as {FORMS[other]} here and as {FORMS[one]} in the checkpoint"
        assert (line in notes) == (FORMS[one] != FORMS[other])
        assert any("hyper-parameters that are the run's own: " in note for note in notes)
        assert outcome.losses == pytest.approx(checkpoint.outcome.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.parametrize(("one", "other", "stage"), [("adam", "adamw", 3), ("adamw", "adam", 2)])
def test_files_that_do_not_name_the_optimizer_leave_its_kind_of_decay_alone(
    rank_pool: RankPool, saved: Saver, one: str, other: str, stage: int
) -> None:
    """DeepSpeed's own files have hyper-parameters and no class: AdamW is Adam but for one of them."""
    checkpoint = saved(Job(optimizer=one, elastic=False, stage=stage), 3)
    for outcome in rank_pool.run(resume, 2, Job(optimizer=other, stage=stage).other(), checkpoint.directory, **STEPS):
        assert [outcome.state[f"group/{g}/decoupled_weight_decay"] for g in (0, 1)] == [other == "adamw"] * 2
        different = compare_states(checkpoint.outcome.state, outcome.state)
        assert {line.partition(":")[0] for line in different} == {f"group/{g}/decoupled_weight_decay" for g in (0, 1)}
        names = {"adam": "Adam", "adamw": "AdamW"}
        said = f"optimizer: {names[other]} goes on from the state of {names[one]}, which has the same keys"
        assert said in outcome.report.notes
        assert "hyper-parameters that are the run's own: decoupled_weight_decay" in outcome.report.notes


def test_files_that_do_not_name_the_optimizer_are_told_from_those_of_another_class_with_the_same_state(
    rank_pool: RankPool, saved: Saver
) -> None:
    """RAdam has no hyper-parameter that AdamW lacks, and its kind of decay is its own."""
    checkpoint = saved(Job(elastic=False, stage=2), 3)
    for outcome in rank_pool.run(resume, 2, Job(optimizer="radam", stage=2).other(), checkpoint.directory, **STEPS):
        assert [outcome.state[f"group/{g}/decoupled_weight_decay"] for g in (0, 1)] == [False, False]
        assert not any(key.endswith("/amsgrad") for key in outcome.state)
        for note in (
            "optimizer: RAdam goes on from the state of another optimizer, which has the same keys",
            "hyper-parameters of the checkpoint that this optimizer does not have: amsgrad, fused",
            "hyper-parameters that are the run's own: decoupled_weight_decay",
        ):
            assert note in outcome.report.notes


@pytest.mark.parametrize("path", [None, "torch.optim.radam.RAdam"])
def test_an_option_of_the_same_name_that_is_the_users_is_restored(path: str | None) -> None:
    radam = torch.optim.RAdam([torch.zeros(1)], decoupled_weight_decay=False)
    options = {key: value for key, value in radam.param_groups[0].items() if key != "params"}
    saved = SavedGroup(path, {**options, "decoupled_weight_decay": True}, frozenset())
    taken, left, own = options_to_set(saved, radam, radam.param_groups[0])
    assert taken["decoupled_weight_decay"] is True and left == own == ()
    assert changed_class(saved, radam, radam.param_groups[0]) is None


class Scalars(torch.nn.Module):
    """More parameters than a list of hyper-parameters may have items; ``frozen`` of the first are not trained."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((1,), float(i)), requires_grad=i >= frozen) for i in range(1030)
        )

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.values)).square().sum()


def named_engine(stage: int, frozen: int) -> Any:
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    model = Scalars(frozen)
    optimizer = torch.optim.AdamW([named for named in model.named_parameters() if named[1].requires_grad])
    job = Job(stage=stage, precision="fp32", options={"on_mismatch": "initialize"})
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(job))[0]


def save_named(stage: int, directory: str) -> None:
    engine = named_engine(stage, 1)
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(directory)


def resume_named(stage: int, directory: str) -> tuple[list[str], list[str]]:
    engine = named_engine(stage, 2)
    engine.load_checkpoint(directory)
    return engine.optimizer.optimizer.param_groups[0]["param_names"], engine.zeroelastic_report.notes


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_of_many_named_parameters_resumes_with_the_names_of_its_own(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """torch keeps the names that it is given with parameters beside the hyper-parameters of each group."""
    rank_pool.run(save_named, 2, stage, str(tmp_path))
    for names, notes in rank_pool.run(resume_named, 3, stage, str(tmp_path)):
        assert names == [f"values.{i}" for i in range(2, 1030)]
        assert any(note.startswith("digests of what was restored match the record") for note in notes)
        assert not any("hyper-parameters" in note for note in notes)


def grouped(*groups: dict[str, object]) -> Any:
    """A live optimizer with these hyper-parameters."""
    return SimpleNamespace(base=SimpleNamespace(param_groups=list(groups), defaults={}))


def test_hyper_parameters_take_the_form_that_the_run_has_and_else_the_saved_one() -> None:
    saved = {"betas": (0.5, 0.25), "lists": [[1, None], (2, [3])], "made": [4], "scale": 0.5}
    live = grouped({"betas": [torch.tensor(0.9), 0.9], "lists": ([7, 8], [9, []])})
    form = {"scale": TensorForm("bfloat16", (1,))}
    assert set_groups(live, [SavedGroup("types.SimpleNamespace", saved, frozenset(), form)]) == []
    (group,) = live.base.param_groups
    assert isinstance(group["betas"][0], torch.Tensor)
    assert group == {
        "betas": [torch.tensor(0.5), 0.25],
        "lists": ([1, None], [2, [3]]),
        "made": [4],
        "scale": torch.tensor([0.5], dtype=torch.bfloat16),
    }
    assert group["scale"].dtype == torch.bfloat16 and group["scale"].shape == (1,)


@pytest.mark.parametrize(("values", "is_shared"), [((0.25, 0.5), False), ((0.25, 0.25), True), ((0.25, None), False)])
def test_groups_that_share_a_tensor_get_each_its_saved_value(values: tuple[float | None, ...], is_shared: bool) -> None:
    rate = torch.tensor(0.75)
    live = grouped({"lr": rate}, {"lr": rate})
    set_groups(
        live, [None if v is None else SavedGroup("types.SimpleNamespace", {"lr": v}, frozenset()) for v in values]
    )
    first, second = (group["lr"] for group in live.base.param_groups)
    assert [float(first), float(second)] == [0.75 if v is None else v for v in values]
    assert (first is second) == is_shared


@pytest.mark.support("Optimizers", "changing to one with other state", "refused", "both lists of state keys are named")
def test_another_optimizer_with_other_state_is_refused(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(OPTIMIZERS["adamw"][0], 3)
    error, text = of_all(rank_pool.run(attempt, 2, Job().other(optimizer="sgd"), checkpoint.directory))
    assert error == "LayoutMismatchError"
    assert "optimizer group 0 has the " in text and "load_optimizer_states=False for the weights alone" in text
    assert "state of AdamW (exp_avg, exp_avg_sq, step), this run's SGD keeps momentum_buffer;" in text


class Lamb(torch.optim.Optimizer):
    """One of which nothing is known."""


@pytest.mark.parametrize(
    ("one", "keys", "other", "message"),
    [
        ("AdamW", "exp_avg exp_avg_sq step", torch.optim.SGD, "this run's SGD keeps none;"),
        (
            "SGD",
            "momentum_buffer",
            torch.optim.AdamW,
            "(momentum_buffer), this run's AdamW keeps exp_avg, ",
        ),
        ("AdamW", "exp_avg exp_avg_sq max_exp_avg_sq step", torch.optim.NAdam, "NAdam keeps exp_avg, exp_avg_sq, mu_"),
        ("AdamW", "exp_avg step", partial(Lamb, defaults={}), "and what this run's Lamb keeps is not known;"),
    ],
)
def test_the_state_of_another_optimizer_is_named(one: str, keys: str, other: Any, message: str) -> None:
    saved = SavedGroup(f"torch.optim.{one}", {}, frozenset(keys.split()))
    (problem,) = misfits([(0, saved)], other([torch.nn.Parameter(torch.ones(2))]))
    assert message in problem and problem.startswith(f"optimizer group 0 has the state of {one} (")


def test_the_weights_alone_go_to_any_optimizer(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(OPTIMIZERS["adamw"][0], 3)
    job = Job(optimizer="sgd").other()
    outcome = rank_pool.run(resume, 2, job, checkpoint.directory, **STEPS, load_optimizer_states=False)[0]
    for key in checkpoint.outcome.state:
        if key.startswith(("master/", "weight/")):
            assert outcome.state[key] == checkpoint.outcome.state[key]
    assert not any(key.startswith("state/") for key in outcome.state)


REFUSED = {
    "quantised": "Quantised's optimizer state 'absmax' of sub-group 0 is a Tensor of shape",
    "factored": "Factored's state 'rms' of sub-group 0 is pyfloat:",
    "unplain": "'schedule' of optimizer group 0 is a dict, not a plain value",
    "text_of_numpy": "'schedule' of optimizer group 0 is a str_, not a plain value",
    "numbered": "Numbered's optimizer state 0 of sub-group 0 has a key that is not text",
    "complex": "Complex's optimizer state 'phase' of sub-group 0 is a Tensor of shape [], neither",
    "counting": "Counting keeps 'k' beside the state of its parameters; such state cannot be resharded",
    "own_entry": "OwnEntry keeps 'calls' beside the state of its parameters; such state cannot be resharded",
}
BEFORE = "before a save writes anything"


@pytest.mark.support("Optimizers", "block-quantised (8-bit) state", "refused", BEFORE)
@pytest.mark.support("Optimizers", "factored state, statistics of a rank's part", "refused", BEFORE)
@pytest.mark.support("Optimizers", "hyper-parameters that are no plain values", "refused", BEFORE)
@pytest.mark.support("Optimizers", "state of no parameter (MADGRAD's `k`)", "refused", BEFORE)
def test_state_that_cannot_be_resharded_is_refused_before_a_save_writes_anything(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    record = tmp_path / "global_step1" / "zeroelastic.json"  # of an earlier save to this tag
    record.parent.mkdir()
    record.write_text("{}")
    errors = of_all(rank_pool.run(attempt_saves, 3, list(REFUSED), str(tmp_path)))
    for (kind, text), said in zip(errors, REFUSED.values(), strict=True):
        assert kind == "UnsupportedError" and said in text
    assert [path.name for path in tmp_path.rglob("*")] == ["global_step1", "zeroelastic.json"]
    assert record.read_text() == "{}"


def attempt_saves(optimizers: list[str], directory: str) -> list[tuple[str, str]]:
    """The type and text of the error that a save after one step with each optimizer raises on this rank."""
    found = []
    for optimizer in optimizers:
        engine = build_engine(Job(optimizer=optimizer))
        train_step(engine, 0)
        found.append(raised(partial(engine.save_checkpoint, directory)))
    return found


def test_quantised_state_is_left_to_deepspeed_at_the_same_size_and_refused_at_another(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    job = Job(optimizer="quantised", elastic=False)
    saved = rank_pool.run(train_one_and_save, 2, job, str(tmp_path))
    assert not list(tmp_path.rglob("zeroelastic.json"))
    kind, text = of_all(rank_pool.run(attempt, 3, job.other(), str(tmp_path)))
    assert kind == "UnsupportedError" and "'absmax' of sub-group 0 has shape" in text
    assert rank_pool.run(load_own_state, 2, job, str(tmp_path)) == saved


def test_state_of_no_parameter_that_an_old_save_lacks_is_named_and_begins_anew(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """Saves once left it out; a load must not take it from an optimizer that makes it in its constructor."""
    for loaded, stepped, said in rank_pool.run(load_without_counter, 2, str(tmp_path)):
        assert loaded == [0.0] and stepped > loaded  # of as many calls as there are sub-groups
        assert said == [
            "STATE NOT SAVED: Counting keeps 'k' beside the state of its parameters. The checkpoint has none of it, "
            "and it begins anew"
        ]


def load_without_counter(directory: str) -> tuple[list[float], list[float], list[str]]:
    saving, loading = (build_engine(Job(optimizer="counting")) for _ in range(2))
    for engine in (saving, loading):
        train_step(engine, 0)
    del saving.optimizer.optimizer.state["k"]
    saving.save_checkpoint(directory)
    loading.load_checkpoint(directory)
    state = loading.optimizer.optimizer.state
    loaded = state["k"].tolist()
    train_step(loading, 1)
    notes = loading.zeroelastic_report.notes
    return loaded, state["k"].tolist(), [note for note in notes if note.startswith("STATE NOT SAVED")]


def test_the_state_of_no_parameter_of_a_known_class_is_named_before_it_is_made() -> None:
    madgrad = type("MADGRAD", (torch.optim.SGD,), {})
    assert common_state_made_later(madgrad([torch.zeros(1)])) == ("k",)
    assert common_state_made_later(torch.optim.SGD([torch.zeros(1)])) == ()


def test_values_of_a_ranks_part_are_not_told_to_be_kept_apart(rank_pool: RankPool, tmp_path: Path) -> None:
    """At twice the size each rank reads the file of one saved rank, whose sub-groups differ, too."""
    job = Job(optimizer="factored", elastic=False)
    rank_pool.run(step_and_save, 2, job, str(tmp_path))
    kind, text = of_all(rank_pool.run(attempt, 4, job.other(sub_group_size=10**9), str(tmp_path)))
    assert kind == "UnsupportedError" and "sub_group_size" not in text
    assert "'rms' of sub-group 0 is " in text and "takes the weights only (load_optimizer_states=False" in text


def step_and_save(job: Job, directory: str) -> None:
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory)


def train_one_and_save(job: Job, directory: str) -> list[list[float]]:
    """What each sub-group's 8-bit state says on this rank, saved."""
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    return absmax(engine)


def load_own_state(job: Job, directory: str) -> list[list[float]]:
    engine = build_engine(job)
    path, _ = engine.load_checkpoint(directory)
    assert path is not None and not hasattr(engine, "zeroelastic_report")
    return absmax(engine)


def absmax(engine: Any) -> list[list[float]]:
    optimizer = engine.optimizer
    return [optimizer.optimizer.state[flat]["absmax"].tolist() for flat in optimizer.fp32_partitioned_groups_flat]


def test_steps_that_differ_are_kept_apart_or_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    """Sub-groups of which one skipped a step: each parameter keeps its own, and two of them cannot share one."""
    job = Job(sub_group_size=1)
    state = rank_pool.run(save_with_skipped_step, 2, job, str(tmp_path))[0]
    assert len({value for key, value in state.items() if key.startswith("scalar/")}) == 2
    outcome = rank_pool.run(resume, 3, job, str(tmp_path), **STEPS)[0]
    assert compare_states(state, outcome.state) == []
    kind, text = of_all(rank_pool.run(attempt, 3, Job(sub_group_size=10**9), str(tmp_path)))
    assert kind == "UnsupportedError"
    assert "step: 2 and 1" in text or "step: 1 and 2" in text
    assert "Choose a sub_group_size that keeps them apart" in text
    below = rank_pool.run(attempt, 3, Job(stage=2), str(tmp_path))[0][1]
    assert "share optimizer group 0 in this run" in below and "resume at stage 3, with a sub_group_size" in below


def save_with_skipped_step(job: Job, directory: str) -> Any:
    engine = build_engine(job)
    for step in range(2):
        train_step(engine, step)
    flats = engine.optimizer.fp32_partitioned_groups_flat
    engine.optimizer.optimizer.state[flats[0]]["step"] -= 1
    engine.save_checkpoint(directory)
    return look(engine)[0]


def test_muon_goes_on_from_the_loaded_momentum(rank_pool: RankPool, saved: Saver) -> None:
    """In memory, DeepSpeed steps with a buffer beside the optimizer state: it has to be the tensor that was filled."""
    name = "muon_in_memory"
    checkpoint = saved(OPTIMIZERS[name][0], 3)
    assert all(rank_pool.run(momentum_is_shared, 2, OPTIMIZERS[name][0].other(), checkpoint.directory))


def momentum_is_shared(job: Job, directory: str) -> bool:
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    optimizer = engine.optimizer
    buffers = optimizer.muon_momentum_buffer_partitioned_groups_flat
    assert buffers
    shared = True
    for i, buffer in buffers.items():
        held = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[i]]["momentum_buffer"]
        shared &= held is buffer and bool(buffer.abs().sum() > 0)
    return shared


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
            live_form(value, key="step", current=current, optimizer=live, options={}, where="here")
    else:
        made = live_form(value, key="step", current=current, optimizer=live, options={}, where="here")
        assert made == expected and type(made.value) is type(expected.value)


@pytest.mark.parametrize(("stage", "elastic"), [(3, True), (3, False), (2, True)])
def test_numbers_of_numpy_are_numbers(rank_pool: RankPool, tmp_path: Path, stage: int, elastic: bool) -> None:
    job = Job(optimizer="lamb", stage=stage, elastic=elastic)
    state = rank_pool.run(save_with_numbers_of_numpy, 2, job, str(tmp_path))[0]
    assert list(tmp_path.rglob("zeroelastic.json"))
    for found, options, count in rank_pool.run(load_into_numbers_of_numpy, 3, job, str(tmp_path)):
        assert compare_states(state, found) == []
        assert options == [(0.125, 3, False)] * 2 and count == 5


def save_with_numbers_of_numpy(job: Job, directory: str) -> dict[str, Any]:
    engine = build_engine(job)
    train_step(engine, 0)
    for group in engine.optimizer.param_groups:
        group.update(lr=np.float32(0.125), warm=np.int64(3), own=np.bool_(False))
    for state in engine.optimizer.optimizer.state.values():
        state["count"] = np.int64(5)
    engine.save_checkpoint(directory)
    return look(engine)[0]


def load_into_numbers_of_numpy(job: Job, directory: str) -> tuple[dict[str, Any], list[tuple[Any, ...]], int]:
    engine = build_engine(job.other())
    for group in engine.optimizer.param_groups:
        group["lr"] = np.float32(0.5)
    engine.load_checkpoint(directory)
    options = [(group["lr"], group["warm"], group["own"]) for group in engine.optimizer.param_groups]
    return look(engine)[0], options, next(iter(engine.optimizer.optimizer.state.values()))["count"]
