"""Loads between runs whose parameters differ.

What both have is compared bit for bit with the state gathered in the run that saved, parameter by parameter; what only
one has, with what the report says became of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training
from extended import with_swept
from saved_files import flip
from training import Job, ds_config, of_all, raised, train_step

from zeroelastic.checkpoint.param_changes import GroupMatch
from zeroelastic.deepspeed.load.module_states import rearranged
from zeroelastic.testing import RankPool, gather_state


def test_the_scheduler_follows_the_groups() -> None:
    def scheduler(rates: list[float]) -> Any:
        params = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        optimizer = torch.optim.SGD(params)
        first = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [3])

    saved, own = scheduler([1.0, 2.0]), scheduler([7.0, 8.0, 9.0])
    for _ in range(2):
        saved.optimizer.step()
        saved.step()
    before = repr(saved.state_dict())
    groups = (GroupMatch(1, (1,)), GroupMatch(None, ()), GroupMatch(0, (0,)))
    state = rearranged(saved.state_dict(), own.state_dict(), groups)
    assert repr(saved.state_dict()) == before
    own.load_state_dict(state)
    assert own.last_epoch == 2 and own._schedulers[0].last_epoch == 2
    assert own._last_lr == [2 / 3, 7.0 if own._last_lr[1] == 7.0 else own._last_lr[1], 1 / 3]
    assert own._schedulers[0].base_lrs == [2.0, 8.0, 1.0] == own._schedulers[1].base_lrs
    own.optimizer.step()
    own._schedulers[0].step()
    assert [group["lr"] for group in own.optimizer.param_groups] == pytest.approx([0.5, 2.0, 0.25])


@dataclass(frozen=True)
class Setup:
    """A run: the standard job, which parameters are frozen (by the beginnings of their names), and its groups.

    ``alone`` are trained in a group of their own, with weight decay 0.3; ``empty`` adds two parameters without
    elements, one of them frozen; ``buffer`` adds a buffer of that name.
    """

    job: Job = field(default_factory=Job)
    frozen: tuple[str, ...] = ("adapter.",)
    alone: tuple[str, ...] = ()
    empty: bool = False
    buffer: str = ""
    untie: bool = False

    def other(self, **changes: Any) -> Setup:
        """The run that loads: of other initial values, learning rate and sub-groups, with "initialize"."""
        options = {"verify": True, "on_mismatch": "initialize"}
        job = self.job.other(options=options, sub_group_size=changes.pop("sub_group_size", 131))
        return replace(self, **{"job": replace(job, **changes.pop("job", {})), **changes})


def make_model(setup: Setup) -> torch.nn.Module:
    model: Any = training.build_model(setup.job)
    if setup.untie:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    if setup.empty:
        model.spare = torch.nn.Module()  # never run: DeepSpeed 0.19.8 cannot gather a parameter without elements
        model.spare.register_parameter("nothing", torch.nn.Parameter(torch.empty(0)))
        model.spare.register_parameter("void", torch.nn.Parameter(torch.empty(0, 5)))
    if setup.buffer:
        model.register_buffer(setup.buffer, torch.full((2,), 7.0))
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(setup.frozen) and name != "spare.void"
    return model


def make_groups(setup: Setup, model: torch.nn.Module) -> list[dict[str, Any]]:
    lr = setup.job.lr
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    alone = [trained.pop(name) for name in list(trained) if name.startswith(setup.alone or ("?",))]
    if setup.job.groups == 1:
        groups = [{"params": list(trained.values()), "lr": lr, "weight_decay": 0.05}]
    else:
        groups = [
            {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": 0.1, "lr": lr},
            {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0, "lr": lr / 3},
        ]
    if alone:
        groups.append({"params": alone, "weight_decay": 0.3, "lr": lr / 2})
    return [group for group in groups if group["params"]]


def make_optimizer(setup: Setup, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if setup.job.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, initial_accumulator_value=0.25)
    if setup.job.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    if setup.job.optimizer == "rprop":
        return torch.optim.Rprop([{"params": group["params"], "lr": group["lr"]} for group in groups])
    return torch.optim.AdamW(groups, betas=(0.8, 0.95))


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def make_engine(setup: Setup) -> Any:
    import deepspeed

    import zeroelastic

    if setup.job.installed:
        zeroelastic.install()
    model = make_model(setup)
    optimizer = make_optimizer(setup, make_groups(setup, model))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=ds_config(setup.job), lr_scheduler=make_schedule(optimizer)
    )
    return engine


State = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """What a load left: the state before it and after it, what the report says, and the losses that follow."""

    initial: State
    state: State
    report: Any
    losses: list[float]
    base_lrs: list[float]


def save(setup: Setup, directory: str, **how: Any) -> State:
    engine = make_engine(setup)
    for step in range(3):
        train_step(engine, step)
    state = gather_state(engine)
    engine.save_checkpoint(directory, **how)
    return state


def load(setup: Setup, directory: str, train_first: bool = False, target: str = "", **how: Any) -> Loaded:
    engine = make_engine(setup)
    if train_first:
        train_step(engine, 8)
    initial = gather_state(engine)
    engine.load_checkpoint(directory, **how)
    state = gather_state(engine)
    base_lrs = list(engine.lr_scheduler.base_lrs)
    if target:
        engine.save_checkpoint(target)
    losses = [train_step(engine, step) for step in (3, 4)]
    return Loaded(initial, state, engine.zeroelastic_report, losses, base_lrs)


def refuse(setup: Setup, directory: str, **how: Any) -> tuple[str, str]:
    """The type and text of the error, and that nothing was touched: no parameter, no buffer, no counter."""
    from zeroelastic.testing import compare_states

    engine = make_engine(setup)
    before = gather_state(engine)
    try:
        engine.load_checkpoint(directory, **how)
    except Exception as error:
        assert compare_states(before, gather_state(engine)) == []
        return type(error).__name__, str(error)
    return "", ""


BASE = Setup()
ALL = Setup(frozen=("?",))
EXTRA = Setup(job=Job(extra="old"), buffer="old_buffer")
FULL = Setup(frozen=("?",), job=Job(groups=1))


@dataclass(frozen=True)
class Saved:
    directory: str
    state: State


Saver = Callable[..., Saved]


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    made: dict[str, Saved] = {}

    def make(setup: Setup, world_size: int, **how: Any) -> Saved:
        key = f"{setup}@{world_size}{how}"
        if key not in made:
            directory = str(tmp_path_factory.mktemp("save"))
            made[key] = Saved(directory, rank_pool.run(save, world_size, setup, directory, **how)[0])
        return made[key]

    return make


def run(rank_pool: RankPool, setup: Setup, world_size: int, directory: str, **how: Any) -> Loaded:
    """Load on every rank; the state is the same on all of them, and the first one's is returned."""
    loads = rank_pool.run(load, world_size, setup, directory, **how)
    assert all(one.report == loads[0].report for one in loads)
    assert all(np.isfinite(one.losses).all() for one in loads)
    return loads[0]


def refused(rank_pool: RankPool, function: Callable[..., Any], *args: Any) -> str:
    """The text of the LayoutMismatchError that every rank raises alike."""
    ((kind, text),) = set(rank_pool.run(function, *args))
    assert kind == "LayoutMismatchError"
    return text


def of(state: State, *names: str, kinds: tuple[str, ...] = ("weight", "master", "state", "scalar")) -> State:
    """The entries of parameters, each named in full or by its beginning and a dot."""
    found: State = {}
    for key, value in state.items():
        kind, _, rest = key.partition("/")
        if kind in kinds and any(rest == n or rest.startswith((f"{n}/", f"{n}.")) for n in names):
            found[key] = value
    assert found, names
    return found


def same(left: State, right: State) -> None:
    from zeroelastic.testing import compare_states

    assert compare_states(left, right) == []


def named(report: Any, text: str) -> list[str]:
    """The names that the report lists behind a text."""
    lines = [line for line in report.changed if text in line]
    assert len(lines) == 1, (text, report.changed)
    return sorted(lines[0].rpartition(": ")[2].split(", "))


SHARED = ("embedding", "up", "norm", "down", "scale", "three")
ADAPTER = ("adapter.bias", "adapter.weight")
NEW_STATE = "optimizer state not created yet"
ZERO_STATE = "as before a first step, but"


def check_common(checkpoint: Saved, loaded: Loaded, *names: str) -> None:
    """These were trained then and are now: weights, master weights, moments and steps are the saved ones."""
    same(of(checkpoint.state, *names), of(loaded.state, *names))
    report = loaded.report
    assert report.root_matches is None and report.changed
    assert "changed since the save" in report.text()
    counters = {key: value for key, value in checkpoint.state.items() if key.startswith(("engine/", "loss_scaler/"))}
    same(counters, {key: loaded.state[key] for key in counters})


@pytest.mark.support("Parameters", "a frozen parameter is trained now", "exact", '`"on_mismatch": "initialize"`')
@pytest.mark.parametrize(("elastic", "save_world_size", "world_size"), [(True, 4, 3), (False, 2, 3)], ids=str)
def test_unfreezing_takes_the_saved_weights(
    rank_pool: RankPool, saved: Saver, elastic: bool, save_world_size: int, world_size: int
) -> None:
    """In a sub-group with restored parameters its moments are zero at their step; in its own group there are none."""
    job = Job() if elastic else Job(elastic=False, installed=False)  # the latter is written by DeepSpeed alone
    checkpoint = saved(replace(BASE, job=job), save_world_size)
    for setup, shares in ((ALL.other(sub_group_size=10**6), True), (ALL.other(alone=("adapter.",)), False)):
        loaded = run(rank_pool, setup, world_size, checkpoint.directory, train_first=True)
        check_common(checkpoint, loaded, *SHARED)
        weights = of(checkpoint.state, *ADAPTER, kinds=("weight",))
        same(weights, of(loaded.state, *ADAPTER, kinds=("weight",)))
        for name in ADAPTER:
            assert torch.equal(loaded.state[f"master/{name}"], weights[f"weight/{name}"].float())
            if shares:
                assert not loaded.state[f"state/{name}/exp_avg"].any() and loaded.state[f"scalar/{name}/step"] == 3
                assert not loaded.state[f"state/{name}/exp_avg_sq"].any()
            else:
                assert not any(key.startswith((f"state/{name}", f"scalar/{name}")) for key in loaded.state)
        assert named(loaded.report, "frozen in the checkpoint and trained now") == list(ADAPTER)
        if shares:
            assert named(loaded.report, ZERO_STATE) == list(ADAPTER)
            assert any("at step 3" in line for line in loaded.report.changed)
        else:
            assert named(loaded.report, NEW_STATE) == list(ADAPTER)
            assert any("optimizer group 2 are the run's own" in line for line in loaded.report.changed)
            assert loaded.state["group/2/weight_decay"] == 0.3
            lrs = [checkpoint.state[f"group/{g}/initial_lr"] for g in range(2)]
            assert loaded.base_lrs == [*lrs, setup.job.lr / 2]
        for g in range(2):
            for option in ("lr", "initial_lr", "weight_decay", "betas/0"):
                assert loaded.state[f"group/{g}/{option}"] == checkpoint.state[f"group/{g}/{option}"]
        digests = "NOT CHECKED" if not elastic else "digests of what was restored match the record"
        assert any(digests in note for note in loaded.report.notes)


@pytest.mark.support("Parameters", "a trained parameter is frozen now", "exact", '`"on_mismatch": "initialize"`')
@pytest.mark.parametrize(("elastic", "save_world_size", "world_size"), [(True, 4, 3), (False, 2, 3)], ids=str)
def test_freezing_takes_the_saved_master_weights(
    rank_pool: RankPool, saved: Saver, elastic: bool, save_world_size: int, world_size: int
) -> None:
    job = Job() if elastic else Job(elastic=False, installed=False)
    checkpoint = saved(replace(ALL, job=job), save_world_size)
    loaded = run(rank_pool, BASE.other(), world_size, checkpoint.directory)
    check_common(checkpoint, loaded, *SHARED)
    for name in ADAPTER:
        assert torch.equal(loaded.state[f"weight/{name}"], checkpoint.state[f"master/{name}"].bfloat16())
        assert f"master/{name}" not in loaded.state
    assert named(loaded.report, "trained in the checkpoint and frozen now") == list(ADAPTER)
    for g in range(2):
        assert loaded.state[f"group/{g}/weight_decay"] == checkpoint.state[f"group/{g}/weight_decay"]


@pytest.mark.support(
    "Parameters", "parameters added or removed since the save", "exact", '`"on_mismatch": "initialize"`'
)
@pytest.mark.parametrize(
    ("elastic", "save_world_size", "world_size"), with_swept([(True, 4, 3), (False, 2, 3)], {(False, 2, 3)}), ids=str
)
def test_a_new_module_and_one_that_is_gone(
    rank_pool: RankPool, saved: Saver, tmp_path: Path, elastic: bool, save_world_size: int, world_size: int
) -> None:
    """Then that is saved, and loads again at another size without anything to say."""
    checkpoint = saved(replace(EXTRA, job=replace(EXTRA.job, elastic=elastic)), save_world_size)
    setup = BASE.other(job={"extra": "new"}, buffer="new_buffer", alone=("new.",))
    loaded = run(rank_pool, setup, world_size, checkpoint.directory, target=str(tmp_path))
    check_common(checkpoint, loaded, *SHARED)
    same(of(checkpoint.state, *ADAPTER), of(loaded.state, *ADAPTER))
    same(of(loaded.initial, "new", kinds=("weight", "master")), of(loaded.state, "new"))  # and no optimizer state
    report = loaded.report
    assert named(report, "not in the checkpoint, weights as this run made them") == ["new.bias", "new.weight"]
    assert named(report, "in the checkpoint and not in the model") == ["old.bias", "old.weight"]
    assert named(report, NEW_STATE) == ["new.bias", "new.weight"]
    assert named(report, "buffers and other module state not in the checkpoint") == ["new_buffer"]
    assert named(report, "module state of the checkpoint that the model does not have") == ["old_buffer"]
    assert torch.equal(loaded.state["buffer/new_buffer"], loaded.initial["buffer/new_buffer"])
    assert torch.equal(loaded.state["buffer/batches_seen"], checkpoint.state["buffer/batches_seen"])
    plain = replace(setup, job=replace(setup.job, options={"verify": True}))
    again = run(rank_pool, plain, world_size - 1, str(tmp_path))
    assert again.report.root_matches and not again.report.changed
    same(of(loaded.state, *SHARED, *ADAPTER, "new"), of(again.state, *SHARED, *ADAPTER, "new"))


@pytest.mark.support(
    "Parameters", "from training in full to adapters, and back", "exact", '`"on_mismatch": "initialize"`'
)
def test_from_full_training_to_an_adapter_and_back(rank_pool: RankPool, saved: Saver, tmp_path: Path) -> None:
    """Nothing is trained in both: all of the optimizer's state is new, and every weight is the saved one."""
    checkpoint = saved(FULL, 4)
    adapter = Setup(job=Job(groups=1, extra="lora"), frozen=(*SHARED, "adapter."))
    loaded = run(rank_pool, adapter.other(), 3, checkpoint.directory, target=str(tmp_path))
    masters = {key: value for key, value in checkpoint.state.items() if key.startswith("master/")}
    for key, master in masters.items():
        assert torch.equal(loaded.state[f"weight/{key.removeprefix('master/')}"], master.bfloat16())
    trained = {key.removeprefix("master/") for key in loaded.state if key.startswith("master/")}
    assert trained == {"lora.weight", "lora.bias"}
    same(of(loaded.initial, "lora", kinds=("weight", "master")), of(loaded.state, "lora"))
    assert any("optimizer group 0 are the run's own" in line for line in loaded.report.changed)
    assert any("saved group 0 ignored" in line for line in loaded.report.changed)
    assert loaded.report.exact[0] == "0 parameters"
    assert 0 < loaded.report.bytes_read <= 1.01 * loaded.report.bytes_owned
    back = run(rank_pool, FULL.other(), 2, str(tmp_path))
    for key in masters:
        name = key.removeprefix("master/")
        assert torch.equal(back.state[key], loaded.state[f"weight/{name}"].float())
        assert torch.equal(back.state[f"weight/{name}"], loaded.state[f"weight/{name}"])
    assert named(back.report, "in the checkpoint and not in the model") == ["lora.bias", "lora.weight"]


@pytest.mark.support(
    "Parameters", "parameters moved between optimizer groups", "exact", '`"on_mismatch": "initialize"`'
)
def test_groups_that_were_merged_split_and_reordered(rank_pool: RankPool, saved: Saver) -> None:
    two = saved(BASE, 4)
    merged = run(rank_pool, BASE.other(job={"groups": 1}), 3, two.directory)
    assert merged.report.root_matches and merged.report.loaded_root == merged.report.saved_root  # the same parameters
    same(of(two.state, *SHARED, *ADAPTER), of(merged.state, *SHARED, *ADAPTER))
    assert merged.state["group/0/weight_decay"] == 0.05
    assert any("saved groups 0 and 1 differ in initial_lr, lr, weight_decay" in line for line in merged.report.changed)
    assert merged.base_lrs == [BASE.other().job.lr]
    one = saved(FULL, 4)
    split = run(rank_pool, ALL.other(alone=("scale",)), 3, one.directory)
    same(of(one.state, *SHARED, *ADAPTER), of(split.state, *SHARED, *ADAPTER))
    for g in range(3):
        for option in ("lr", "initial_lr", "weight_decay"):
            assert split.state[f"group/{g}/{option}"] == one.state[f"group/0/{option}"]
    assert split.base_lrs == [one.state["group/0/initial_lr"]] * 3
    assert split.state["scheduler/last_epoch"] == one.state["scheduler/last_epoch"]


@pytest.mark.parametrize("module_only", [True, False], ids=["module_only", "no_optimizer_states"])
def test_weights_alone(rank_pool: RankPool, saved: Saver, module_only: bool) -> None:
    how = {"load_module_only": True} if module_only else {"load_optimizer_states": False}
    checkpoint = saved(BASE, 4)
    loaded = run(rank_pool, ALL.other(job={"groups": 1, "extra": "new"}), 3, checkpoint.directory, **how)
    kinds = ("weight", "master")
    same(of(checkpoint.state, *SHARED, kinds=kinds), of(loaded.state, *SHARED, kinds=kinds))
    same(of(checkpoint.state, *ADAPTER), of(loaded.state, *ADAPTER, kinds=("weight",)))
    same(of(loaded.initial, "new"), of(loaded.state, "new"))
    assert torch.equal(loaded.state["master/adapter.bias"], checkpoint.state["weight/adapter.bias"].float())
    assert not any(key.startswith("state/") for key in loaded.state)
    assert loaded.state["group/0/weight_decay"] == 0.05
    assert named(loaded.report, "frozen in the checkpoint and trained now") == list(ADAPTER)
    assert not any("optimizer" in line for line in loaded.report.changed)
    assert loaded.base_lrs == [ALL.other().job.lr]
    frozen = run(rank_pool, BASE.other(), 3, saved(ALL, 4).directory, **how)
    for name in ADAPTER:
        assert torch.equal(frozen.state[f"weight/{name}"], saved(ALL, 4).state[f"master/{name}"].bfloat16())


@pytest.mark.support("Parameters", "other trained parameters than the save, without the option", "refused")
def test_by_default_every_difference_is_refused_and_listed(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(EXTRA, 4)
    setup = Setup(job=Job(extra="new", groups=1), frozen=("up.",), alone=("down.",))
    error = refused(rank_pool, refuse, 3, setup, checkpoint.directory)
    for problem in (
        "parameter new.weight [16, 16] of the model is not in the checkpoint",
        "parameter old.bias [16] of the checkpoint is not in the model",
        "parameter adapter.bias [7] was frozen when the checkpoint was saved and is trained in the model",
        "parameter up.weight [33, 16] was trained when the checkpoint was saved and is frozen in the model",
        "parameter down.weight is in optimizer group 0 of the checkpoint and in group 1 of the run",
        '"on_mismatch": "initialize"',
    ):
        assert problem in error, error


class Wrapper(torch.nn.Module):
    """A module around a model, as torch.compile and DistributedDataParallel put one."""

    def __init__(self, part: str, model: torch.nn.Module) -> None:
        super().__init__()
        self.part = part
        self.add_module(part, model)

    def forward(self, *args: Any) -> Any:
        return getattr(self, self.part)(*args)


def refuse_wrapped(directory: str, part: str, on_mismatch: str) -> tuple[str, str]:
    make = training.build_model
    training.build_model = lambda job: Wrapper(part, make(job))  # type: ignore[assignment, return-value]
    options = {"verify": True, "on_mismatch": on_mismatch}
    return refuse(BASE.other(job={"options": options}), directory)


@pytest.mark.support(
    "Parameters", "names changed by a wrapper, or all names changed", "refused", "the message names the wrapper"
)
@pytest.mark.parametrize(
    ("part", "on_mismatch", "said"),
    [
        ("_orig_mod", "initialize", 'names of the model have "_orig_mod." from torch.compile(model)'),
        ("_orig_mod", "error", "model.compile()"),
        ("module", "initialize", 'names of the model have "module." from a wrapper such as DistributedDataParallel'),
        ("renamed", "initialize", "no trained parameter of the model is in the checkpoint"),
    ],
)
def test_a_resume_that_would_restore_nothing_is_refused(
    rank_pool: RankPool, saved: Saver, part: str, on_mismatch: str, said: str
) -> None:
    error = refused(rank_pool, refuse_wrapped, 3, saved(BASE, 4).directory, part, on_mismatch)
    assert said in error and f"parameter {part}.up.weight [33, 16] of the model is not in" in error
    assert ("no option to rename" in error) == (part != "renamed")


def test_module_state_that_the_save_does_not_have(rank_pool: RankPool, saved: Saver) -> None:
    """A buffer and a frozen module: with load_module_strict=False named, else refused before anything is touched."""
    checkpoint = saved(BASE, 4)
    setup = BASE.other(buffer="late", frozen=("adapter.", "new."), job={"extra": "new", "options": {"verify": True}})
    error = refused(rank_pool, refuse, 3, setup, checkpoint.directory)
    assert "frozen parameter new.weight [16, 16] of the model is not in the checkpoint" in error
    loaded = run(rank_pool, setup, 3, checkpoint.directory, load_module_strict=False)
    assert named(loaded.report, "buffers and other module state not in the checkpoint") == ["late"]
    assert named(loaded.report, "frozen and not in the checkpoint") == ["new.bias", "new.weight"]
    check_common(checkpoint, loaded, *SHARED, *ADAPTER)
    same(of(loaded.initial, "new"), of(loaded.state, "new"))
    buffer = setup.other(frozen=("adapter.",), job={"extra": "", "options": {"verify": True}})
    loaded = run(rank_pool, buffer, 3, checkpoint.directory, load_module_strict=False)
    assert named(loaded.report, "buffers and other module state not in the checkpoint") == ["late"]
    assert loaded.report.root_matches and len(loaded.report.changed) == 1


@pytest.mark.support("Parameters", "without elements, trained and frozen", "exact")
@pytest.mark.parametrize("elastic", with_swept((True, False), {False}), ids=["elastic", "rigid"])
def test_parameters_without_elements(rank_pool: RankPool, saved: Saver, elastic: bool) -> None:
    setup = replace(BASE, empty=True, job=Job(elastic=elastic))
    checkpoint = saved(setup, 4)
    loaded = run(rank_pool, setup.other(job={"options": {"verify": True}}), 3, checkpoint.directory)
    assert loaded.report.root_matches and not loaded.report.changed
    everything = (*SHARED, *ADAPTER, "spare")
    same(of(checkpoint.state, *everything), of(loaded.state, *everything))
    assert loaded.state["weight/spare.nothing"].shape == (0,) and loaded.state["weight/spare.void"].shape == (0, 5)
    gone = run(rank_pool, BASE.other(), 3, checkpoint.directory)
    assert named(gone.report, "in the checkpoint and not in the model") == ["spare.nothing", "spare.void"]
    new = run(rank_pool, setup.other(frozen=("?",)), 2, saved(replace(BASE, job=Job(elastic=elastic)), 4).directory)
    assert any("void" in line for line in new.report.changed) and any("nothing" in line for line in new.report.changed)


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd", "rprop"])
def test_state_that_does_not_begin_at_zero_or_is_made_early(rank_pool: RankPool, saved: Saver, optimizer: str) -> None:
    """Adagrad's sum begins at a value of its own and is made with the optimizer; training needs it to be there."""
    job = Job(optimizer=optimizer, groups=1)
    checkpoint = saved(Setup(job=job), 4)
    for sub_group_size in (10**6, 1):
        setup = Setup(job=job, frozen=("?",)).other(sub_group_size=sub_group_size)
        loaded = run(rank_pool, setup, 3, checkpoint.directory, train_first=True)
        check_common(checkpoint, loaded, *SHARED)
        for name in ADAPTER:
            state = {k: v for k, v in loaded.state.items() if k.startswith((f"state/{name}/", f"scalar/{name}/"))}
            if optimizer == "adagrad":
                assert (state[f"state/{name}/sum"] == 0.25).all()
                assert state[f"scalar/{name}/step"] == (3 if sub_group_size > 1 else 0)
            elif optimizer == "rprop":
                sizes = state.get(f"state/{name}/step_size")
                assert (sizes is None) == (sub_group_size == 1)
                assert sizes is None or ((sizes == sizes.flatten()[0]).all() and sizes.flatten()[0] > 1e-4)
            else:
                assert all(not value.any() for value in state.values()) and len(state) == (sub_group_size > 1)


def test_tied_weights_that_come_apart(rank_pool: RankPool, saved: Saver) -> None:
    checkpoint = saved(BASE, 4)
    loaded = run(rank_pool, BASE.other(untie=True), 3, checkpoint.directory)
    check_common(checkpoint, loaded, *SHARED)
    assert named(loaded.report, "not in the checkpoint, weights as this run made them") == ["head.weight"]
    same(of(loaded.initial, "head", kinds=("weight", "master")), of(loaded.state, "head", kinds=("weight", "master")))


@pytest.mark.parametrize(("direction", "precision"), [("unfreeze", "bf16"), ("freeze", "fp32")])
def test_damage_in_what_has_moved_is_found(
    rank_pool: RankPool, saved: Saver, tmp_path: Path, direction: str, precision: str
) -> None:
    """One bit of a weight that was frozen in the save, or is frozen now, cast and as it is."""
    import shutil

    from zeroelastic.checkpoint.open import open_checkpoint
    from zeroelastic.checkpoint.optimizer_file import FP32

    frozen, thawed = Setup(job=Job(precision=precision)), Setup(job=Job(precision=precision), frozen=("?",))
    before, after = (frozen, thawed) if direction == "unfreeze" else (thawed, frozen)
    shutil.copytree(saved(before, 4).directory, tmp_path / "c")
    checkpoint = open_checkpoint(tmp_path / "c" / "global_step3")
    if direction == "unfreeze":
        model = checkpoint.model_states(1)
        path, offset = model.path, int(model.frozen_extents.offset[model.frozen.index()["adapter.weight"]])
    else:
        shard = checkpoint.shard(1)
        path, offset = shard.path, int(shard.extents[FP32].offset[shard.layout.index()["adapter.weight"]])
    flip(Path(path), offset)
    kind, text = of_all(rank_pool.run(load_error, 3, after.other(), str(tmp_path / "c")))
    assert kind == "DigestMismatchError"
    key = "frozen" if direction == "unfreeze" else "fp32"
    assert f"adapter.weight: {key}" in text and "1 tensor differs" in text


def load_error(setup: Setup, directory: str) -> tuple[str, str]:
    engine = make_engine(setup)
    return raised(lambda: engine.load_checkpoint(directory))


def test_muon_does_not_go_on_from_the_state_of_adam(rank_pool: RankPool, saved: Saver) -> None:
    error, text = rank_pool.run(refuse_muon, 2, saved(BASE, 4).directory)[0]
    assert error == "UnsupportedError" and "optimizer group 1 of this run is stepped by Muon" in text


def refuse_muon(directory: str) -> tuple[str, str]:
    make = globals()["make_groups"]

    def other(setup: Setup, model: Any) -> list[dict[str, Any]]:
        first, second = make(setup, model)
        return [first, {**second, "use_muon": True}]

    globals()["make_groups"] = other
    return refuse(BASE.other(), directory)
