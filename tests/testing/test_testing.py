"""zeroelastic.testing: ranks that return, fail, hang and die; a resume test that notices what it should."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zeroelastic.testing import (
    RankError,
    RankPool,
    RankTimeoutError,
    assert_resumes,
    compare_states,
    fingerprint,
    gather_state,
    gpus_available,
    run_ranks,
)
from zeroelastic.testing.resume import _perturb
from zeroelastic.testing.state import _split_state

GLOBAL_BATCH = 12
CONFIG = {
    "train_batch_size": GLOBAL_BATCH,
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
    return {name: os.environ.get(name) for name in names}


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
    with open(os.path.join(directory, str(rank)), "w"):
        pass
    raise ValueError(f"trouble on {rank}")


def leave_the_others_waiting():
    if torch.distributed.get_rank() == 0:
        return
    wait_for_rank_0()


def wait_for_rank_0():
    torch.distributed.all_reduce(torch.ones(3))


def die_on_rank_1(number):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), number)
    torch.distributed.all_reduce(torch.ones(3))


def exit_on_rank_1():
    if torch.distributed.get_rank() == 1:
        os._exit(3)
    torch.distributed.all_reduce(torch.ones(3))


def start_a_process_and_fail(directory):
    rank = torch.distributed.get_rank()
    sleeper = subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp)
    Path(directory, f"{rank}").write_text(f"{os.getpid()} {sleeper.pid}")
    torch.distributed.barrier()
    if rank == 0:
        raise ValueError("trouble")
    time.sleep(1000)


def start_a_process_and_return():
    return subprocess.Popen(["sleep", "1000"]).pid


def kill_the_pool():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def pid_of_pool():
    return os.getppid()


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
    import deepspeed

    print("a rank speaks")
    deepspeed.utils.logger.warning("deepspeed speaks")
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


def train(num_steps):
    """Losses of the global batch, and the gathered state."""
    import deepspeed

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model, optimizer, _ = build()
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = []
    for step in range(num_steps):
        x, y = (part.chunk(world_size)[rank] for part in batch(step, GLOBAL_BATCH))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world_size)
    return losses, initial, gather_state(engine)


# Ranks


def test_importing_it_imports_neither_torch_nor_deepspeed():
    code = "import sys, zeroelastic.testing; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_results_come_by_rank(rank_pool):
    results = rank_pool.run(total_of_ranks, 3, 10, plus=1)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert [total.item() for _, total in results] == [33, 33, 33]


@pytest.mark.extended
def test_new_interpreters_give_the_same_results_and_are_silent(capfd):
    assert run_ranks(say_something, 2, 10) == [(0, 10), (1, 10)]
    assert capfd.readouterr() == ("", "")


def test_ranks_find_the_modules_imported_that_the_ini_file_names(rank_pool, pytestconfig):
    names = ["pytest", *pytestconfig.getini("rank_pool_preload")]
    assert "s3fs" in names and rank_pool.run(which_are_imported, 2, names) == [names] * 2


def which_are_imported(names):
    return [name for name in names if name in sys.modules]


def test_ranks_have_the_callers_environment_and_no_launchers(rank_pool, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_CALLER", "yes")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.chdir(tmp_path)
    names = ("OF_THE_CALLER", "GIVEN", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    first, second = rank_pool.run(environment_of_rank, 2, *names, env={"GIVEN": "too"})
    assert list(first.values()) == ["yes", "too", None, "0", "0", "2", "2"]
    assert list(second.values()) == ["yes", "too", None, "1", "1", "2", "2"]
    assert rank_pool.run(os.getcwd, 1) == [str(tmp_path)]


@pytest.mark.extended
def test_a_variable_that_is_read_at_import_takes_effect_in_new_interpreters():
    assert run_ranks(torch.get_num_threads, 1) == [1]
    assert run_ranks(torch.get_num_threads, 1, env={"OMP_NUM_THREADS": "2"}) == [2]


def test_the_pool_refuses_other_values_of_variables_that_are_read_at_import(rank_pool, monkeypatch):
    with pytest.raises(ValueError, match=r"^OMP_NUM_THREADS changed since the pool started.* use run_ranks"):
        rank_pool.run(os.getppid, 1, env={"OMP_NUM_THREADS": "2"})
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    with pytest.raises(ValueError, match=r"^PYTHONHASHSEED changed"):
        rank_pool.run(os.getppid, 1)


def test_what_a_library_sets_when_it_is_imported_does_not_end_forking(rank_pool, monkeypatch):
    """deepspeed sets the first where it is imported, so also in the process of the tests; transformers the second."""
    server = rank_pool.run(os.getppid, 1)
    assert server != [os.getpid()]
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    assert rank_pool.run(os.getppid, 1) == server
    names = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
    assert list(rank_pool.run(environment_of_rank, 1, *names)[0].values()) == ["1", "/nowhere"]


def test_the_first_traceback_is_shown_and_peers_are_not_blamed(rank_pool):
    with pytest.raises(RankError) as info:
        rank_pool.run(fail_on_rank, 3, 1)
    assert "in fail_on_rank" in info.value.failures[0].details
    assert [failure.rank for failure in info.value.failures] == [1]
    message = str(info.value)
    assert message.startswith("rank 1 of 3 failed first: ValueError: trouble on 1")
    assert "just before it happened" in message
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
        assert "in wait_for_rank_0" in failure.details
        assert "in leave_the_others_waiting" in failure.details


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal(rank_pool, number):
    with pytest.raises(RankError, match=f"rank 1 of 3 failed first: was killed by {number.name}") as info:
        rank_pool.run(die_on_rank_1, 3, number)
    assert info.value.failures[0].rank == 1
    assert ("in die_on_rank_1" in info.value.failures[0].details) == (number == signal.SIGSEGV)


def test_a_rank_that_exits_early_is_named(rank_pool):
    with pytest.raises(RankError, match="rank 1 of 2 failed first: exited with status 3 before"):
        rank_pool.run(exit_on_rank_1, 2)


def test_nothing_that_ranks_started_is_left_after_a_failure(rank_pool, tmp_path):
    with pytest.raises(RankError, match="trouble"):
        rank_pool.run(start_a_process_and_fail, 2, str(tmp_path))
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert not any(map(is_alive, pids))


def test_nothing_that_ranks_started_is_left_after_a_success(rank_pool):
    assert not any(map(is_alive, rank_pool.run(start_a_process_and_return, 2)))


def is_alive(pid):
    """Whether a process runs; one that only waits to be reaped by an indolent init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_cannot_be_sent_is_refused_before_anything_starts(rank_pool):
    with pytest.raises(TypeError, match=r"lambda.* cannot be sent to another process: .*define functions"):
        rank_pool.run(lambda: None, 2)
    with pytest.raises(TypeError, match=r"total_of_ranks.* and its arguments cannot be sent.*lambda"):
        run_ranks(total_of_ranks, 2, 1, plus=lambda: None)


def test_a_result_that_cannot_be_sent_back_is_an_error_of_its_rank(rank_pool):
    with pytest.raises(RankError, match="the result, a function, cannot be pickled"):
        rank_pool.run(give_back_a_function, 2)


def test_bad_requests_are_refused(rank_pool):
    with pytest.raises(ValueError, match="at least one rank"):
        run_ranks(os.getpid, 0)
    with pytest.raises(ValueError, match="at most 8 ranks"):
        rank_pool.run(os.getpid, 9)
    with pytest.raises(ValueError, match="known are 'gloo'"):
        run_ranks(os.getpid, 1, backend="mpi")
    with pytest.raises(ValueError, match=f"1000 ranks, {gpus_available()} GPUs"):
        run_ranks(os.getpid, 1000, backend="nccl")


@pytest.mark.extended
def test_output_is_shown_when_asked_for(capfd):
    run_ranks(say_something, 1, env={"ZEROELASTIC_TEST_VERBOSE": "1"})
    shown = "".join(capfd.readouterr())
    assert "a rank speaks" in shown and "deepspeed speaks" in shown


# The pool


def test_the_pool_trains_at_one_world_size_after_the_other(rank_pool):
    reference, _, _ = rank_pool.run(train, 1, 3)[0]
    assert reference[0] != reference[1]
    for world_size in (2, 4, 3, 2):
        for losses, _, _ in rank_pool.run(train, world_size, 3):
            assert losses == pytest.approx(reference, rel=1e-5)


def test_nothing_passes_from_one_run_to_the_next(rank_pool):
    assert rank_pool.run(leave_traces, 2) == [(False, False, False)] * 2
    assert rank_pool.run(leave_traces, 2) == [(False, False, False)] * 2


@pytest.mark.extended
def test_the_pool_goes_on_after_failures_and_after_its_own_death():
    with RankPool(2) as pool:
        with pytest.raises(RankError):
            pool.run(fail_on_rank, 2, 0)
        with pytest.raises(RankTimeoutError):
            pool.run(leave_the_others_waiting, 2, timeout=1)
        (before,) = pool.run(pid_of_pool, 1)
        with pytest.raises(RuntimeError, match="gave no answer"):
            pool.run(kill_the_pool, 1)
        (after,) = pool.run(pid_of_pool, 1)
        assert before != after
    assert not is_alive(after)


@pytest.mark.extended
def test_the_plugin_skips_what_needs_more_gpus(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.gpu(1000)\ndef test_it(): assert False\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "zeroelastic.testing.pytest_plugin",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert "1 skipped" in done.stdout and "needs 1000 GPU(s)" in done.stdout


# State


def test_gathered_state_is_whole_at_every_world_size(rank_pool):
    (reference,) = rank_pool.run(train, 1, 2)
    for _, initial, state in rank_pool.run(train, 3, 2):
        trained = {"tied", "first.bias", "last.weight", "last.bias", "gain"}
        assert {key.partition("/")[2] for key in state if key.startswith("master/")} == trained
        for name, param in initial.items():
            assert state[f"weight/{name}"].shape == param.shape
            assert state[f"weight/{name}"].equal(param) == (name not in trained)
        for name in trained:
            assert state[f"master/{name}"].equal(state[f"weight/{name}"])
            assert state[f"state/{name}/exp_avg_sq"].shape == initial[name].shape
            assert state[f"state/{name}/exp_avg_sq"].count_nonzero() > 0
            assert state[f"scalar/{name}/step"] == 2
        assert state["group/0/weight_decay"] == 0.1 and state["group/1/weight_decay"] == 0.0
        assert state["group/0/params"] == "last.weight tied"
        assert state["engine/global_steps"] == 2
        assert state["buffer/calls"].item() == 2
        assert state.keys() == reference[2].keys()
        for key, entry in state.items():
            if not isinstance(entry, str):
                assert math.isclose(float(sum_of(entry)), float(sum_of(reference[2][key])), rel_tol=1e-4)


def sum_of(entry):
    return entry.double().sum() if isinstance(entry, torch.Tensor) else entry or 0


def test_state_that_cannot_be_gathered_is_named():
    """Muon's momentum at stages 1 and 2 is of all parameters that the rank has a part of, in another order."""
    with pytest.raises(TypeError, match="The momentum of Muon at ZeRO stages 1 and 2"):
        _split_state({"momentum_buffer": torch.zeros(7)}, torch.zeros(4))


def test_weights_gathered_before_training_are_the_initial_ones(rank_pool):
    _, initial, state = rank_pool.run(train, 4, 0)[3]
    for name, param in initial.items():
        assert state[f"weight/{name}"].equal(param)
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
    assert_resumes(build, CONFIG, save, load, batch=batch, pool=rank_pool)


def test_16_bit_training_resumes_with_accumulation(rank_pool):
    config = CONFIG | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    assert_resumes(
        build,
        config,
        3,
        2,
        batch=batch,
        loss=loss_in_16_bit,
        pool=rank_pool,
        rtol=0.05,
        atol=0.01,
    )


def loss_in_16_bit(engine, data):
    x, y = data
    return engine(x.bfloat16(), y.bfloat16())


def test_a_partitioned_model_resumes_from_a_checkpoint_that_was_not_saved_elastic(rank_pool):
    config = CONFIG | {"zero_optimization": {"stage": 3}}
    assert_resumes(build_partitioned, config, 2, 3, batch=batch, pool=rank_pool)


def test_a_corrupted_resume_is_noticed_in_every_detail(rank_pool):
    with pytest.raises(AssertionError) as info:
        assert_resumes(build_and_corrupt, CONFIG, 2, 2, batch=batch, pool=rank_pool)
    message = str(info.value)
    assert "rank 0: state/tied/exp_avg: 1 of 35 elements differ" in message
    assert "rank 1: state/tied/exp_avg: has other elements" in message
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


def test_a_global_batch_that_one_size_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="global batch of 12 cannot be divided among 5 ranks"):
        assert_resumes(build, CONFIG, 4, 5, batch=batch)
