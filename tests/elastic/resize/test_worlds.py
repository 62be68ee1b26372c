"""A job that changes size in its processes: announced changes, lost members, and members that die on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_python
from extended import with_swept
from stock_programs import resume_on_stock
from training import LOSS_RTOL, Job, build_engine, train_and_save, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.elastic import every, worlds
from zeroelastic.elastic.resize.roster import Roster
from zeroelastic.errors import ConfigError
from zeroelastic.in_place import VARIABLE, InPlace

HERE = Path(__file__).parent
LIMIT_S = 60.0
LIMITS = {
    "heartbeat_interval": 0.2,
    "heartbeat_timeout": 3.0,
    "last_call_timeout": 0.5,
    "failure_timeout": 20.0,
    "join_timeout": 60.0,
}
IN_MEMORY = {"memory": {"every": 1}}
MOST_STEPS = 400

pytestmark = [pytest.mark.starts_processes, pytest.mark.timeout(300)]


def _client_store(port: int) -> dist.Store:
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore("zeroelastic/job/job", client)


class Nodes:
    """A store and the processes of a job, one for each node; what they noted, in order."""

    def __init__(self, directory: Path, *, min_nodes: int = 1, **settings: Any) -> None:
        self.directory, self.settings = directory, {"steps": MOST_STEPS, "stage": 3, "options": {}, **settings}
        self.min_nodes = min_nodes
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.roster = Roster(partial(_client_store, self.server.port))
        self.roster.open()
        self.processes: list[subprocess.Popen[bytes]] = []

    def worlds_in_store(self) -> list[int]:
        """The worlds of whose process groups the store has anything."""
        keys = [key.partition("/groups/")[2] for key in self.server.list_keys()]
        return sorted({int(key.partition("/")[0]) for key in keys if key})

    def add(self, **settings: Any) -> subprocess.Popen[bytes]:
        node = self.roster.new_node()
        of_node = InPlace("127.0.0.1", self.server.port, "job", node, self.min_nodes, 8, **LIMITS)
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            VARIABLE: of_node.to_environment(),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "JOB": json.dumps({**self.settings, "node": node, **settings}),
        }
        command = [warm_python.executable(), str(HERE / "worlds_job.py"), str(self.directory)]
        with open(self.directory / f"node{node}.log", "wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def kill(self, node: int) -> None:
        """SIGKILL to the process of a node; that of ``processes`` only passes signals on to it."""
        (pid,) = (entry["pid"] for entry in self.seen("pid") if entry["node"] == node)
        os.kill(pid, signal.SIGKILL)

    def seen(self, what: str) -> list[dict[str, Any]]:
        path = self.directory / "seen"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if what in entry]

    def wait(self, done: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        deadline = time.monotonic() + limit_s
        while not (found := done()):
            if time.monotonic() > deadline:
                for entry in self.seen("pid"):
                    with suppress(ProcessLookupError):
                        os.kill(entry["pid"], signal.SIGUSR2)  # their stacks
                time.sleep(1)
                logs = "".join(
                    f"\n{path.name}: {path.read_text(errors='replace')[-2500:]}"
                    for path in sorted(self.directory.glob("node*.log"))
                )
                raise AssertionError(f"not within {limit_s:.0f} s: {what}{logs}")
            time.sleep(0.02)
        return found

    def trains_on(self, size: int, steps: int = 2) -> None:
        """Wait until the job has trained some steps on so many ranks since now."""
        before = len(self.seen("step"))
        self.wait(
            lambda: [entry["size"] for entry in self.seen("step")[before:]][-steps:] == [size] * steps,
            f"{steps} steps on {size} ranks; the last were {self.seen('step')[-3:]}",
        )

    def close(self) -> None:
        for entry in self.seen("pid"):
            with suppress(ProcessLookupError):
                os.kill(entry["pid"], signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait(20)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(**settings: Any) -> Nodes:
        made.append(Nodes(tmp_path, **settings))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


def uninterrupted(stage: int, steps: int) -> list[float]:
    engine = build_engine(Job(stage=stage, options={}))
    return [train_step(engine, step) for step in range(steps)]


def trains_as_uninterrupted(nodes: Nodes, rank_pool: Any, *, lost: int = 0) -> None:
    """Each world began with a state that the one before had; losses are those of a run that nothing happened to."""
    steps, begun = nodes.seen("step"), nodes.seen("begin")
    reached = max(entry["step"] for entry in steps)
    losses = rank_pool.run(uninterrupted, 4, nodes.settings["stage"], reached)[0]
    for entry in steps:
        assert entry["loss"] == pytest.approx(losses[entry["step"] - 1], rel=LOSS_RTOL["bf16"]), entry
    for entry in begun[1:]:
        before = [step for step in steps if step["time"] < entry["time"]]
        assert entry["begin"] >= before[-1]["step"] - lost, entry
        same = [step["state"] for step in before if step["step"] == entry["begin"]]
        assert same and same[-1] == entry["state"], f"the state of step {entry['begin']} is another one"


def stock_loads_the_save_after_the_death(nodes: Nodes) -> None:
    (save,) = nodes.wait(lambda: nodes.seen("saved"), "a save by the survivors")
    job = {"stage": nodes.settings["stage"]}
    stock = resume_on_stock(nodes.directory / "ckpt", nodes.directory, save["size"], job)
    assert stock["gathered"] == save["gathered"] and save["saved"] == f"global_step{stock['global_steps']}"


def test_announced_changes_lose_no_step_and_no_process(job, rank_pool):
    nodes = job()
    first = [nodes.add() for _ in range(4)]
    nodes.trains_on(4)
    for process, size in ((first[0], 3), (first[2], 2)):  # also the one with rank 0
        process.send_signal(signal.SIGTERM)
        nodes.trains_on(size)
        assert process.wait(20) == 0
    more = [nodes.add(), nodes.add()]
    nodes.trains_on(4)
    for process in (first[1], *more):
        process.send_signal(signal.SIGTERM)
    nodes.trains_on(1)
    last = [nodes.add(), nodes.add()]
    nodes.trains_on(3)
    assert sorted(entry["node"] for entry in nodes.seen("pid")) == list(range(8))  # each was started once
    assert all(process.poll() is None for process in (first[3], *last))
    begun = nodes.seen("begin")
    assert {entry["tier"] for entry in begun[1:]} == {"in-place"}
    own = {node: [entry["own"] for entry in nodes.seen("member") if entry["node"] == node] for node in (3, 6, 7)}
    assert {*own[3][1:]} == {3} and own[6] == own[7] == [3]  # client state: one's own, or that of rank 0
    assert not list((nodes.directory / "ckpt").glob("global_step*"))  # neither written nor read
    latest = len(begun) - 1
    nodes.wait(lambda: nodes.worlds_in_store() == [latest - 1, latest], "the end of what the store has of other worlds")
    trains_as_uninterrupted(nodes, rank_pool)


@pytest.mark.extended
@pytest.mark.parametrize("stage", with_swept((1, 2), {1}))
def test_other_stages(job, rank_pool, stage):
    nodes = job(stage=stage, options=IN_MEMORY, save_after_death=True)
    first = [nodes.add() for _ in range(3)]
    nodes.trains_on(3)
    first[1].send_signal(signal.SIGTERM)
    nodes.trains_on(2)
    nodes.add()
    nodes.trains_on(3)
    nodes.kill(0)
    nodes.trains_on(2)
    stock_loads_the_save_after_the_death(nodes)
    trains_as_uninterrupted(nodes, rank_pool, lost=1)


@pytest.mark.extended
def test_a_lean_run_changes_size_and_saves_its_frozen_weights_once(job, rank_pool):
    nodes = job(options={"lean": True, "verify": True}, save=2)
    first = [nodes.add() for _ in range(3)]
    nodes.trains_on(3)
    first[1].send_signal(signal.SIGTERM)
    nodes.trains_on(2, steps=4)
    nodes.add()
    nodes.trains_on(3, steps=4)
    trains_as_uninterrupted(nodes, rank_pool)
    nodes.close()
    (shared,) = (nodes.directory / "ckpt" / FROZEN_FOLDER).glob("frozen-*")
    records = [read_record(path.parent) for path in (nodes.directory / "ckpt").glob("global_step*/zeroelastic.json")]
    assert {record.world_size for record in records} == {2, 3}
    assert {file.name for record in records for file in record.shared} == {shared.name}


def test_a_killed_node_costs_one_step_at_most_and_the_others_keep_their_processes(job, rank_pool):
    nodes = job(options=IN_MEMORY, save_after_death=True)
    first = [nodes.add() for _ in range(4)]
    nodes.trains_on(4)
    begun = len(nodes.seen("begin"))
    nodes.kill(1)
    nodes.trains_on(3)
    stock_loads_the_save_after_the_death(nodes)
    nodes.add()
    nodes.trains_on(4)
    assert [entry["tier"] for entry in nodes.seen("begin")[begun:]] == ["memory", "in-place"]
    assert all(process.poll() is None for process in nodes.processes if process is not first[1])
    trains_as_uninterrupted(nodes, rank_pool, lost=1)


def test_a_job_that_begins_anew_keeps_nothing_of_the_world_that_failed(job):
    """Two of three nodes are lost at once, and there is no checkpoint."""
    nodes = job()
    for _ in range(3):
        nodes.add()
    nodes.trains_on(3)
    nodes.kill(0)
    nodes.kill(1)
    nodes.trains_on(1)
    begun = [entry for entry in nodes.seen("member") if entry["node"] == 2]
    assert (begun[-1]["member"], begun[-1]["size"], begun[-1]["position"]) == (0, 1, 0)
    assert all(entry["position"] == entry["member"] for entry in begun)
    generators = [entry["generator"] for entry in nodes.seen("generator") if entry["node"] == 2]
    assert len(generators) > 1 and generators[-1] == generators[0]


PHASES = ("decided", "holding", "held", "meeting", "groups", "built", "peers", "moving", "moved")
IN_EACH_PHASE = {
    "decided": "leaves",
    "holding": "stays",
    "held": "leaves",
    "meeting": "comes",
    "groups": "stays",
    "built": "comes",
    "peers": "leaves",
    "moving": "stays",
    "moved": "comes",
}
"""Who dies in the cases of `make test-all`: one of each phase."""


def marks_of(phase: str, who: str) -> list[pytest.MarkDecorator]:
    if (phase, who) == ("moving", "stays"):
        return []
    return [pytest.mark.extended if IN_EACH_PHASE[phase] == who else pytest.mark.sweep]


@pytest.mark.parametrize(
    ("phase", "who"),
    [
        pytest.param(phase, who, marks=marks_of(phase, who))
        for phase in PHASES
        for who in ("stays", "leaves", "comes")
        if who == "stays" or phase not in {"leaves": ("meeting", "groups", "built"), "comes": PHASES[:3]}[who]
    ],
)
def test_a_member_that_dies_during_a_change_of_size(job, rank_pool, phase, who):
    nodes = job(options=IN_MEMORY)
    first = [nodes.add(**({"die": phase} if who != "comes" and n == 1 else {})) for n in range(3)]
    nodes.trains_on(3)
    (nodes.directory / "armed").touch()
    if who == "comes":
        nodes.add(die=phase)
        dies = nodes.processes[-1]
    else:
        dies = first[1]
        (dies if who == "leaves" else first[2]).send_signal(signal.SIGTERM)
    assert nodes.wait(lambda: dies.poll() is not None, "the end of the one that dies") and dies.returncode == -9
    before = len(nodes.seen("step"))
    # by then the leaving one has left, unless the change that it was announced for has failed
    nodes.wait(lambda: len(nodes.seen("step")) > before + 3, "steps after it")
    trains_as_uninterrupted(nodes, rank_pool, lost=1)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.extended), *with_swept((1,), {1})])
def test_when_all_are_asked_to_leave_the_job_saves_and_stock_deepspeed_loads_it(job, stage):
    nodes = job(stage=stage)
    first = [nodes.add() for _ in range(3)]
    nodes.trains_on(3)
    first.pop(1).send_signal(signal.SIGTERM)
    nodes.trains_on(2)
    pids = [entry["pid"] for entry in nodes.seen("pid") if entry["node"] != 1]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that all have the signal at the same step
    for number in (signal.SIGTERM, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
    assert [process.wait(30) for process in first] == [0, 0]
    ends = [entry for entry in nodes.seen("end") if entry["node"] != 1]
    assert all(entry["stopped"] for entry in ends) and all(entry["saves"] for entry in ends)
    assert [entry["groups_at_exit"] for entry in nodes.seen("groups_at_exit")] == [False] * 3
    saved = ends[0]["saves"][-1]
    assert (nodes.directory / "ckpt" / saved / "zeroelastic.json").exists()
    stock = resume_on_stock(nodes.directory / "ckpt", nodes.directory, 2, {"stage": stage})
    assert stock["gathered"] == nodes.seen("gathered")[0]["gathered"]
    assert stock["global_steps"] == nodes.seen("step")[-1]["step"]


@pytest.mark.extended
def test_state_that_cannot_move_goes_by_way_of_the_directory(job, rank_pool):
    nodes = job(fixed=True)
    first = [nodes.add() for _ in range(2)]
    nodes.trains_on(2)
    begun = len(nodes.seen("begin"))
    nodes.add()
    nodes.trains_on(3)
    first[1].send_signal(signal.SIGTERM)
    nodes.trains_on(2)
    assert [entry["tier"] for entry in nodes.seen("begin")[begun:]] == ["directory", "directory"]
    trains_as_uninterrupted(nodes, rank_pool)


def asks_at(phase: int, directory: Path, *, decides: bool = False) -> tuple[int, str]:
    """Ask whether the world ends, this many micro batches after each optimizer step; the steps, and the error.

    ``decides``: the loop calls ``step`` once for each optimizer step, as accelerate does, whatever DeepSpeed counts.
    """
    job, steps = Job(micro=10, stage=2), 0
    for world in worlds(lambda: build_engine(job), directory, saving=every(steps=2)):
        with world as engine:
            accumulation = engine.gradient_accumulation_steps()
            for micro in range(1, 3 * accumulation + 1):
                part = torch.full((10, 5), micro)
                if decides:
                    engine.set_gradient_accumulation_boundary(micro % accumulation == 0)
                engine.backward(engine(part, part))
                if not decides or micro % accumulation == 0:
                    engine.step()
                steps = engine.global_steps
                if micro > accumulation and micro % accumulation == phase:
                    try:
                        world.ends()
                    except ConfigError as error:
                        return steps, str(error)
    return steps, ""


@pytest.mark.parametrize("decides", [False, True], ids=["DeepSpeed counts", "the loop decides"])
def test_a_world_ends_between_two_optimizer_steps_alone(rank_pool, tmp_path, decides):
    asks = partial(asks_at, decides=decides)
    assert rank_pool.run(asks, 2, 0, tmp_path / "between") == [(3, "")] * 2
    for steps, message in rank_pool.run(asks, 2, 1, tmp_path / "within"):
        assert steps == 1 and "was called 1 micro batches after optimizer step 1" in message


def test_state_that_is_not_of_zero_does_not_move(rank_pool):
    for why in rank_pool.run(why_stage_0_is_fixed, 2):
        assert why == "the state of a run with ZeRO stage 0 does not move from memory to memory"


def test_state_of_sub_groups_of_another_age_does_not_move(rank_pool, tmp_path):
    """Each parameter is a sub-group: those that are new to the optimizer have no state before a step, then another."""
    rank_pool.run(train_and_save, 2, Job(), str(tmp_path))
    now = Job(frozen=False, sub_group_size=1, options={"on_mismatch": "initialize"})
    for before, after in rank_pool.run(why_fixed_with_new_params, 2, now, str(tmp_path)):
        assert "its sub-groups have different state" in before and "its sub-groups have different state" in after


def why_fixed_with_new_params(job: Job, directory: str) -> tuple[str | None, str | None]:
    from zeroelastic.deepspeed.resize.restore import why_fixed

    engine = build_engine(job)
    engine.load_checkpoint(directory)
    before = why_fixed(engine)
    train_step(engine, 3)
    return before, why_fixed(engine)


def why_stage_0_is_fixed() -> str | None:
    from zeroelastic.deepspeed.resize.restore import why_fixed

    return why_fixed(build_engine(Job(stage=0)))


@pytest.mark.extended
def test_changes_that_come_together(job, rank_pool):
    nodes = job(options=IN_MEMORY)
    first = [nodes.add() for _ in range(4)]
    nodes.trains_on(4)
    for process in (first[0], first[3], first[0]):  # two notices at once, one of them twice
        process.send_signal(signal.SIGTERM)
    nodes.add()  # while they leave
    nodes.wait(lambda: first[0].poll() is not None and first[3].poll() is not None, "the end of those that leave")
    assert (first[0].returncode, first[3].returncode) == (0, 0)
    nodes.trains_on(3)
    trains_as_uninterrupted(nodes, rank_pool)
    begun = len(nodes.seen("begin"))
    first[1].send_signal(signal.SIGTERM)
    nodes.wait(lambda: len(nodes.seen("begin")) > begun, "the next world")
    nodes.kill(2)  # right after a change
    nodes.trains_on(1)
    trains_as_uninterrupted(nodes, rank_pool, lost=1)


@pytest.mark.extended
def test_a_script_that_ends_early_or_by_a_mistake_on_one_rank_leaves_the_others_training(job, rank_pool):
    nodes = job(options=IN_MEMORY)
    first = [nodes.add(), nodes.add(), nodes.add(**{"raise": 4}), nodes.add(**{"break": 8})]
    ends_with_its_traceback(nodes, first[2])
    assert first[3].wait(60) == 0
    nodes.trains_on(2)
    trains_as_uninterrupted(nodes, rank_pool, lost=1)


@pytest.mark.extended
def test_a_mistake_of_the_script_on_all_ranks_ends_the_job(job):
    nodes = job(options=IN_MEMORY)
    for process in [nodes.add(**{"raise": 4}) for _ in range(3)]:
        ends_with_its_traceback(nodes, process)


REFUSED = {
    "another model": ({"extra": "more"}, "parameter more.weight is float32[16, 16], and in the job not there"),
    "another stage": ({"stage": 2}, '"zero_optimization.stage" in the configuration is 2, and in the job 3'),
    "another optimizer": ({"optimizer": "sgd"}, "the class of the optimizer is SGD, and in the job AdamW"),
    "other arguments": ({"save": 7}, "the argument saving of worlds() is Every(seconds=None, steps=7, "),
    "no zero.Init": ({"partitioned": 0}, "what DeepSpeed builds is an engine, and in the job zero.Init"),
    "another model in zero.Init": (
        {"partitioned": 5},
        "parameter weight is bfloat16[5, 3], and in the job bfloat16[4, 3]",
    ),
}


def test_a_newcomer_that_builds_another_engine_is_refused_and_the_job_goes_on(job, rank_pool):
    nodes = job(partitioned=4)
    first = [nodes.add(), nodes.add()]
    nodes.trains_on(2)
    for settings, said in REFUSED.values():
        newcomer = nodes.add(**settings)
        nodes.wait(lambda newcomer=newcomer: newcomer.poll() is not None, f"the end of one with {settings}")
        log = (nodes.directory / f"node{len(nodes.processes) - 1}.log").read_text()
        assert newcomer.returncode == 1 and "LayoutMismatchError: this process builds another engine" in log, log
        assert said in log, log
        nodes.trains_on(2)
    nodes.add()
    nodes.trains_on(3)
    assert all(process.poll() is None for process in first)
    assert {entry["tier"] for entry in nodes.seen("begin")[1:]} == {"in-place"}
    trains_as_uninterrupted(nodes, rank_pool)


def test_a_node_that_comes_when_the_job_has_finished_does_not_begin_it_again(job):
    nodes = job(steps=4)
    first = [nodes.add(), nodes.add()]
    for process in first:
        assert process.wait(LIMIT_S) == 0
    late = nodes.add()
    assert late.wait(LIMIT_S) == 1
    assert "MembershipError: the job has finished" in (nodes.directory / "node2.log").read_text()
    assert {entry["node"] for entry in nodes.seen("member")} == {0, 1}


def test_ranks_of_a_new_job_that_build_different_engines_all_say_so(job):
    nodes = job(min_nodes=2)
    for process in (nodes.add(), nodes.add(stage=2)):
        nodes.wait(lambda process=process: process.poll() is not None, "the end of each")
    for number, process in enumerate(nodes.processes):
        log = (nodes.directory / f"node{number}.log").read_text()
        assert process.returncode == 1 and "the ranks build different engines (compared with rank 0):" in log, log
        assert re.search(
            r'rank 1: "zero_optimization\.stage" in the configuration is [23], and in the job [23]\n', log
        ), log


def ends_with_its_traceback(nodes: Nodes, process: subprocess.Popen[bytes]) -> None:
    nodes.wait(lambda: process.poll() is not None, "the end of the one with the mistake")
    log = (nodes.directory / f"node{nodes.processes.index(process)}.log").read_text()
    assert process.returncode == 1 and "ValueError: a mistake of the script" in log, log
