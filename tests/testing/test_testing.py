"""zeroelastic.testing: ranks that return, fail, hang and die; a resume test that notices what it should."""

from __future__ import annotations

import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import is_running

from zeroelastic.testing import (
    RankError,
    RankPool,
    RankTimeoutError,
    assert_resumes,
    compare_states,
    fingerprint,
    gather_state,
    run_ranks,
)
from zeroelastic.testing.resume import _perturb
from zeroelastic.testing.state import _split_state

CONFIG = {
    "train_batch_size": 12,
    "zero_optimization": {
        "stage": 3,
        "elastic_checkpoint": True,
        "sub_group_size": 40,
        "stage3_param_persistence_threshold": 10,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zeroelastic": {"verify": True},
}


# What ranks run. It has to stand at the top of a module, so that another process can import it.


def total_of_ranks(factor, *, plus):
    total = torch.tensor([torch.distributed.get_rank() * factor + plus])
    torch.distributed.all_reduce(total)
    return torch.distributed.get_rank(), total


def environment_of_rank(*names):
    return [os.environ.get(name) for name in names]


def which_are_imported(names):
    return [name for name in names if name in sys.modules]


def fail_on_rank(bad):
    if torch.distributed.get_rank() == bad:
        print("just before it happened")
        raise ValueError(f"trouble on {bad}")
    torch.distributed.all_reduce(torch.ones(3))


def fail_in_turn(order, directory):
    """Each rank fails when the one before it in the order is about to: no rank waits for a clock."""
    rank = int(os.environ["RANK"])
    turn = order.index(rank)
    while turn and not os.path.exists(os.path.join(directory, str(order[turn - 1]))):
        time.sleep(0.001)
    time.sleep(0.05 * bool(turn))
    Path(directory, str(rank)).touch()
    raise ValueError(f"trouble on {rank}")


def leave_the_others_waiting():
    if torch.distributed.get_rank() != 0:
        wait_for_rank_0()


def wait_for_rank_0():
    torch.distributed.all_reduce(torch.ones(3))


def end_on_rank_1(number):
    """By a signal, or by an early exit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), number) if number else os._exit(3)
    torch.distributed.all_reduce(torch.ones(3))


def start_a_process(directory, fails):
    rank = torch.distributed.get_rank()
    sleeper = subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp)
    Path(directory, f"{rank}").write_text(f"{os.getpid()} {sleeper.pid}")
    torch.distributed.barrier()
    if fails and rank == 0:
        raise ValueError("trouble")
    time.sleep(1000 * fails)


def kill_the_pool():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def leave_traces():
    import deepspeed

    found = (torch.get_default_dtype() == torch.float64, "TRACE" in os.environ, hasattr(deepspeed, "trace"))
    torch.set_default_dtype(torch.float64)
    os.environ["TRACE"] = "1"
    deepspeed.trace = True
    return found


def give_back_a_function():
    return lambda: None


def say_something(result=None):
    print("a rank speaks")
    return torch.distributed.get_rank(), result


def build_model():
    class Model(torch.nn.Module):
        """Odd sizes; a parameter smaller than the world, a frozen one, a tied one; two kinds of buffers."""

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(5, 7)
            self.frozen = torch.nn.Linear(7, 7)
            self.frozen.requires_grad_(False)
            self.last = torch.nn.Linear(7, 1)
            self.gain = torch.nn.Parameter(torch.ones(2))
            self.tied = self.first.weight
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("scale", torch.full((3,), 0.5))

        def forward(self, x, y):
            if self.training:
                self.calls += 1
            hidden = torch.tanh(self.first(x)) + torch.nn.functional.linear(x, self.tied).relu()
            out = self.last(self.frozen(hidden)) * self.gain.sum() * self.scale.sum()
            return (out - y).pow(2).mean()

    return Model()


def build():
    model = build_model()
    decayed = [model.first.weight, model.last.weight]
    others = [model.first.bias, model.last.bias, model.gain]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def batch(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 5, generator=generator), torch.randn(size, 1, generator=generator)


def loss(engine, data):
    return engine(*data)


def loss_in_16_bit(engine, data):
    return engine(*(part.bfloat16() for part in data))


def build_partitioned():
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = build_model()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def build_and_corrupt():
    """After a load: one bit of one element on rank 1, another rank's step, and a group's learning rate."""
    import deepspeed

    load = deepspeed.DeepSpeedEngine.load_checkpoint

    def load_and_corrupt(engine, *args, **kwargs):
        loaded = load(engine, *args, **kwargs)
        states = list(engine.optimizer.optimizer.state.values())
        if torch.distributed.get_rank() == 1:
            states[0]["exp_avg"].view(torch.int32)[1] ^= 1
            engine.module.calls += 1
        states[-1]["step"] += 1
        engine.optimizer.optimizer.param_groups[1]["lr"] = 0.25
        return loaded

    deepspeed.DeepSpeedEngine.load_checkpoint = load_and_corrupt
    return build()


def train(num_steps, **zero):
    """The initial weights, the gathered state, and the same values by DeepSpeed's own accessors."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model, optimizer, _ = build()
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **zero}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(num_steps):
        engine.backward(engine(*(part.chunk(world_size)[rank] for part in batch(step, 12))))
        engine.step()
    if engine.zero_optimization_stage() < 3 and num_steps:
        # DeepSpeed 0.19.8 links the state after the step of the first group, when that of the others does not exist.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state, accessed = gather_state(engine), {}
    for name, param in model.named_parameters():
        if param.requires_grad and num_steps:
            accessed[f"master/{name}"] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                accessed[f"state/{name}/{key}"] = safe_get_full_optimizer_state(param, key)
    return initial, state, accessed


# Ranks


def test_results_come_by_rank(rank_pool):
    results = rank_pool.run(total_of_ranks, 3, 10, plus=1)
    assert results == [(rank, torch.tensor([33])) for rank in range(3)]


@pytest.mark.extended
def test_a_run_by_itself_gives_the_same_results_and_is_silent_unless_asked(capfd, monkeypatch):
    assert run_ranks(say_something, 2, 10) == [(0, 10), (1, 10)]
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("ZEROELASTIC_TEST_VERBOSE", "1")
    run_ranks(say_something, 1)
    assert "a rank speaks" in capfd.readouterr().out


def test_ranks_find_the_modules_imported_that_a_conftest_names(rank_pool, rank_pool_preload):
    names = ["pytest", *rank_pool_preload]
    assert "s3fs" in names and rank_pool.run(which_are_imported, 2, names) == [names] * 2


def test_ranks_have_the_callers_environment_and_no_launchers(rank_pool, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_CALLER", "yes")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.chdir(tmp_path)
    names = ("OF_THE_CALLER", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = rank_pool.run(environment_of_rank, 2, *names)
    assert found == [["yes", None, rank, rank, "2", "2"] for rank in "01"]
    assert rank_pool.run(os.getcwd, 1) == [str(tmp_path)]


@pytest.mark.extended
@pytest.mark.parametrize("threads", ["", "2"])
def test_a_variable_that_is_read_at_import_takes_effect_in_a_run_by_itself(monkeypatch, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert run_ranks(torch.get_num_threads, 1) == [int(threads or 1)]


def test_what_cannot_be_run_is_refused_before_anything_starts(rank_pool):
    with pytest.raises(ValueError, match="at least one rank"):
        rank_pool.run(os.getpid, 0)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        rank_pool.run(total_of_ranks, 2, 1, plus=lambda: None)


def test_the_first_traceback_is_shown_and_peers_are_not_blamed(rank_pool):
    with pytest.raises(RankError) as info:
        rank_pool.run(fail_on_rank, 3, 1)
    assert [failure.rank for failure in info.value.failures] == [1]
    message = str(info.value)
    assert message.startswith("rank 1 of 3 failed first: ValueError: trouble on 1")
    assert "just before it happened" in message and "in fail_on_rank" in message
    assert "Connection" not in message


def test_failures_are_ordered_by_time(rank_pool, tmp_path):
    with pytest.raises(RankError, match=r"(?s)rank 2 of 3 failed first.*the others:\nrank 0: ValueError") as info:
        rank_pool.run(fail_in_turn, 3, (2, 0, 1), str(tmp_path))
    assert [failure.rank for failure in info.value.failures] == [2, 0, 1]


def test_hung_ranks_are_named_with_their_stacks(rank_pool):
    with pytest.raises(RankTimeoutError) as info:
        rank_pool.run(leave_the_others_waiting, 3, timeout=2)
    assert isinstance(info.value, TimeoutError)
    assert [failure.rank for failure in info.value.failures] == [1, 2]
    for failure in info.value.failures:
        assert "in wait_for_rank_0" in failure.details and "in leave_the_others_waiting" in failure.details


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSEGV, "was killed by SIGSEGV"), (0, "exited with status 3")],
)
def test_a_rank_that_dies_is_named_with_its_end(rank_pool, number, how):
    with pytest.raises(RankError, match=f"rank 1 of 3 failed first: {how} before") as info:
        rank_pool.run(end_on_rank_1, 3, number)
    assert ("in end_on_rank_1" in info.value.failures[0].details) == (number == signal.SIGSEGV)


@pytest.mark.parametrize("fails", [True, False])
def test_nothing_that_ranks_started_is_left(rank_pool, tmp_path, fails):
    if fails:
        with pytest.raises(RankError, match="trouble"):
            rank_pool.run(start_a_process, 2, str(tmp_path), True)
    else:
        rank_pool.run(start_a_process, 2, str(tmp_path), False)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert not any(map(is_running, pids))


def test_a_result_that_cannot_be_sent_back_is_an_error_of_its_rank(rank_pool):
    with pytest.raises(RankError, match=r"rank \d of 2 failed first: .*lambda"):
        rank_pool.run(give_back_a_function, 2)


def test_nothing_passes_from_one_run_to_the_next(rank_pool):
    assert rank_pool.run(leave_traces, 2) == [(False, False, False)] * 2
    assert rank_pool.run(leave_traces, 2) == [(False, False, False)] * 2


@pytest.mark.extended
def test_the_pool_goes_on_after_failures_and_after_its_own_death():
    with RankPool() as pool:
        (before,) = pool.run(os.getppid, 1)
        with pytest.raises(RankError):
            pool.run(fail_on_rank, 2, 0)
        with pytest.raises(RankTimeoutError):
            pool.run(leave_the_others_waiting, 2, timeout=1)
        assert pool.run(os.getppid, 1) == [before]
        with pytest.raises(EOFError):
            pool.run(kill_the_pool, 1)
        (after,) = pool.run(os.getppid, 1)
        assert before != after
    assert not is_running(before) and not is_running(after)


# State


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathered_state_is_whole_at_every_world_size_and_what_deepspeed_says(rank_pool, stage):
    ((_, reference, _),) = rank_pool.run(train, 1, 2, stage=stage)
    trained = {"tied", "first.bias", "last.weight", "last.bias", "gain"}
    for initial, state, accessed in rank_pool.run(train, 3, 2, stage=stage):
        assert compare_states(accessed, {key: state[key] for key in accessed}) == []
        assert {key for key in state if key.startswith(("master/", "state/"))} == accessed.keys()
        assert {key.partition("/")[2] for key in accessed if key.startswith("master/")} == trained
        for name, param in initial.items():
            assert state[f"weight/{name}"].shape == param.shape
            assert state[f"weight/{name}"].equal(param) == (name not in trained)
        assert state["group/0/weight_decay"] == 0.1 and state["group/1/weight_decay"] == 0.0
        assert state["group/0/params"] == "last.weight tied"
        assert state["engine/global_steps"] == 2 and state["buffer/calls"].item() == 2
        assert {state[f"scalar/{name}/step"] for name in trained} == {2}
        assert state.keys() == reference.keys()
        for key, entry in state.items():
            if isinstance(entry, torch.Tensor):
                torch.testing.assert_close(entry, reference[key], rtol=1e-4, atol=1e-7)


def test_state_that_cannot_be_gathered_is_named():
    """Muon's momentum at stages 1 and 2 is of all parameters that the rank has a part of, in another order."""
    with pytest.raises(TypeError, match="The momentum of Muon at ZeRO stages 1 and 2"):
        _split_state({"momentum_buffer": torch.zeros(7)}, torch.zeros(4))


def test_weights_gathered_before_training_are_the_initial_ones(rank_pool):
    initial, state, _ = rank_pool.run(train, 4, 0)[3]
    assert compare_states(initial, {name: state[f"weight/{name}"] for name in initial}) == []
    assert not any(key.startswith("state/") for key in state)


def test_comparing_names_every_difference_and_no_other():
    nan = torch.tensor([1.0, math.nan])
    expected = {
        "same": nan,
        "bit": torch.tensor([1.0, 2.0, 3.0]),
        "zero": torch.tensor([0.0]),
        "dtype": torch.ones(2),
        "shape": torch.ones(2),
        "gone": 1,
        "number": 2,
        "nan": math.nan,
        "text": "a",
    }
    found = expected | {
        "same": nan.clone(),
        "bit": torch.tensor([1.0, 2.0, 3.0000002]),
        "zero": torch.tensor([-0.0]),
        "dtype": torch.ones(2).bfloat16(),
        "shape": torch.ones(2, 1),
        "number": 3,
        "text": "b",
        "new": 1,
    }
    del found["gone"]
    wrong = {"bit", "zero", "dtype", "shape", "gone", "number", "text", "new"}
    assert compare_states(expected, dict(expected)) == []
    assert {line.partition(":")[0] for line in compare_states(expected, found)} == wrong
    assert {line.partition(":")[0] for line in compare_states(expected, fingerprint(found))} == wrong
    assert {line.partition(":")[0] for line in compare_states(fingerprint(expected), fingerprint(found))} == wrong
    assert "bit: 1 of 3 elements differ, the first at 2" in "\n".join(compare_states(expected, found))


# Resuming


@pytest.mark.parametrize(("save", "load"), [(4, 3), (2, 4)])
def test_training_resumes_at_another_world_size(rank_pool, save, load):
    assert_resumes(build, CONFIG, save, load, batch=batch, loss=loss, pool=rank_pool)


def test_16_bit_training_resumes_with_accumulation(rank_pool):
    config = CONFIG | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    assert_resumes(build, config, 3, 2, batch=batch, loss=loss_in_16_bit, pool=rank_pool, rtol=0.05, atol=0.01)


def test_a_partitioned_model_resumes_from_a_checkpoint_that_was_not_saved_elastic(rank_pool):
    config = CONFIG | {"zero_optimization": {"stage": 3}}
    assert_resumes(build_partitioned, config, 2, 3, batch=batch, loss=loss, pool=rank_pool)


def test_a_corrupted_resume_is_noticed_in_every_detail(rank_pool):
    with pytest.raises(AssertionError) as info:
        assert_resumes(build_and_corrupt, CONFIG, 2, 2, batch=batch, loss=loss, pool=rank_pool)
    message = str(info.value)
    assert "rank 0: state/tied/exp_avg: 1 of 35 elements differ" in message
    assert "rank 1: state/tied/exp_avg: is 'torch.float32 (7, 5)" in message
    assert "rank 1: buffer/calls" in message and "rank 0: buffer/calls" not in message
    assert "rank 0: group/1/lr: is 0.25, expected" in message
    assert "/step: is 3.0, expected 2.0" in message
    assert "loss 2: is" in message
    assert "exp_avg_sq" not in message and "weight/" not in message.replace(".weight/", "")


def test_the_second_model_has_no_weight_or_buffer_of_the_first_before_it_loads():
    model = build_model().double()
    with torch.no_grad():
        model.gain[0], model.first.bias[0] = -1.0, -7.5
    model.register_buffer("mask", torch.tensor([True, False]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _perturb(model)
    assert all((value != before[name]).all() for name, value in model.state_dict().items())
