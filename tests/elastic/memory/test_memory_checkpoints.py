"""Checkpoints in memory on real DeepSpeed processes: nodes are lost, and the run goes on at any size, bit for bit.

A node is a directory in shared memory, which several ranks may share; a lost node is a directory that is removed.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from extended import with_swept
from lifecycle.rank import use_node as use_memory_of
from saved_files import flip, logged
from torch.distributed.distributed_c10d import _world
from training import Job, build_engine, look, train_step

from zeroelastic.distributed import exchange
from zeroelastic.elastic import ElasticDistributedSampler, every, preemption, resume
from zeroelastic.elastic.memory import resume as memory_resume
from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints
from zeroelastic.elastic.memory.memory_file import MemoryFile
from zeroelastic.elastic.memory.save import MemoryDirectory
from zeroelastic.errors import ConfigError
from zeroelastic.io.paths import as_path
from zeroelastic.testing import RankPool, compare_states

LENGTH, BATCH = 2000, 120
COPIES = {"verify": True, "memory": {"every": 1, "copies": 1}}
JOB = Job(options=COPIES)


@dataclass(frozen=True)
class Turn:
    """What one rank saw of a start of the job."""

    start: Any
    samples: list[list[int]]
    resumed: dict[str, Any]
    states: dict[int, dict[str, Any]]
    checkpoints: list[tuple[int | None, str | None]]
    describes: str


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory for the nodes of one test, in shared memory where there is some to spare."""
    place = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 1 << 30 else None
    with tempfile.TemporaryDirectory(dir=place, prefix="zeroelastic-test-") as directory:
        yield Path(directory)


def ended(memory: MemoryCheckpoints) -> tuple[int | None, str | None]:
    """The step of the newest complete checkpoint, and the error of the last one if it has failed."""
    return memory.complete_step, None if memory.error is None else f"{type(memory.error).__name__}: {memory.error}"


def use_node(shared: Path, number: int) -> None:
    """Let this rank be on a node."""
    use_memory_of(shared / f"node{number}")
    exchange.ROUND_BYTES, exchange._LEAST_BYTES = 5000, 1000  # a file takes several messages, and ends within one


def run(
    job: Job,
    directory: str,
    shared: Path,
    nodes: Sequence[int],
    steps: int,
    *,
    save_steps: int | None = None,
    roll_back_to: str | None = None,
    act: str = "",
) -> Turn:
    """Resume, train some steps, and end as a job that is killed does: without a word. ``nodes`` are by rank."""
    use_node(shared, nodes[dist.get_rank()])
    engine = build_engine(job)
    data = ElasticDistributedSampler(range(LENGTH), BATCH, seed=4)
    start = resume(engine, directory, data=data)
    resumed, _ = look(engine)
    samples: list[list[int]] = []
    states: dict[int, dict[str, Any]] = {}
    checkpoints: list[tuple[int | None, str | None]] = []
    with preemption(engine, directory, data=data, saving=every(steps=save_steps)) as stop:
        memory = stop._memory
        for number, step in enumerate(range(start.global_steps, start.global_steps + steps)):
            samples.append(data.batch(data.consumed // BATCH).tolist())
            train_step(engine, step)
            if act and number == steps - 1:
                {**ACTS, "emptied": is_emptied}[act](memory)
            stop()
            states[engine.global_steps], _ = look(engine)
            if memory is not None:
                memory.wait()
                checkpoints.append(ended(memory))
        if roll_back_to is not None:
            engine.load_checkpoint(directory, tag=roll_back_to)
    if memory is not None:
        checked_memory(memory)
    return Turn(start, samples, resumed, states, checkpoints, "" if memory is None else memory._describe())


def save_in_short_loops(directory: str) -> list[str]:
    """The saves of training loops of two steps each, one of which is due every three steps."""
    engine, saves = build_engine(replace(JOB, options={})), list[str]()
    for epoch in range(3):
        with preemption(engine, directory, saving=every(steps=3)) as stop:
            for step in range(2):
                train_step(engine, 2 * epoch + step)
                stop()
        saves += stop.saves
    return saves


def fail_alone(job: Job, directory: str, shared: Path) -> tuple[float, bool]:
    """Rank 0 alone fails in the thread of a checkpoint; how long each rank waits for its end, and if it is broken."""
    use_node(shared, dist.get_rank())
    engine = build_engine(job)
    train_step(engine, 0)
    memory = MemoryCheckpoints(engine, as_path(directory))
    fails = mock.patch.object(memory, "_finish", side_effect=RuntimeError("a connection was closed by its peer"))
    with fails if dist.get_rank() == 0 else nullcontext():
        memory.capture({})
        began = time.monotonic()
        memory.wait()
    return time.monotonic() - began, memory.is_broken


def step_beside_a_slow_checkpoint(job: Job, directory: str, shared: Path) -> int | None:
    """The step that memory has when the next step has changed the weights, though a checkpoint takes a while."""
    use_node(shared, dist.get_rank())
    engine = build_engine(job)
    train_step(engine, 0)
    memory = MemoryCheckpoints(engine, as_path(directory))
    finish = memory._finish

    def finish_late(*args: Any) -> Any:
        time.sleep(1.0)
        return finish(*args)

    with mock.patch.object(memory, "_finish", finish_late):
        memory.capture({})
        train_step(engine, 1)
    complete = memory.complete_step
    memory.close()
    return complete


def test_no_weight_changes_before_the_step_before_is_in_memory(
    rank_pool: RankPool, tmp_path: Path, shared: Path
) -> None:
    assert rank_pool.run(step_beside_a_slow_checkpoint, 2, JOB, str(tmp_path), shared) == [1, 1]


def test_no_rank_waits_for_one_that_has_failed_alone(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    for seconds, is_broken in rank_pool.run(fail_alone, 3, JOB, str(tmp_path), shared, timeout=100):
        assert seconds < 20 and is_broken


def lose_groups(job: Job, directory: str, shared: Path, lost: Mapping[int, str], steps: int) -> Turn:
    """At some steps, a rank loses the process group of memory checkpoints, or gives the one up that is being made."""
    use_node(shared, dist.get_rank())
    engine, states, checkpoints = build_engine(job), dict[int, Any](), list[tuple[int | None, str | None]]()
    data, finish = ElasticDistributedSampler(range(LENGTH), BATCH, seed=4), MemoryCheckpoints._finish

    def lose(memory: MemoryCheckpoints, node: MemoryDirectory, captured: Any) -> Any:
        step = int(node.tag.partition("-")[0].removeprefix("step"))
        fault = lost.get(step) if dist.get_rank() == 1 else None
        if fault == "lost":
            raise RuntimeError("timed out")
        memory.is_broken |= fault == "given up"
        return finish(memory, node, captured)

    with mock.patch.object(MemoryCheckpoints, "_finish", lose), preemption(engine, directory, data=data) as stop:
        for step in range(steps):
            train_step(engine, step)
            stop()
            states[engine.global_steps], _ = look(engine)
            assert stop._memory is not None
            stop._memory.wait()
            checkpoints.append(ended(stop._memory))
        assert stop._memory is not None
        checked_memory(stop._memory)
    return Turn(None, [], {}, states, checkpoints, "")


@pytest.mark.parametrize(
    ("lost", "steps", "complete"),
    [
        ({3: "lost"}, 4, [1, 2, 4]),
        ({3: "given up", 4: "lost", 6: "lost"}, 10, [1, 2, 10]),  # 5, and 7 to 9, are left out
    ],
)
def test_checkpoints_go_on_after_one_rank_has_lost_their_process_group(
    rank_pool: RankPool, tmp_path: Path, shared: Path, lost: dict[int, str], steps: int, complete: list[int]
) -> None:
    """The generation before stays until one is complete; where each try fails, fewer are made."""
    directory = str(tmp_path / "ckpt")
    first = rank_pool.run(lose_groups, 3, JOB, directory, shared / "whole", lost, steps)
    assert sorted({step for step, error in first[0].checkpoints if step is not None and error is None}) == complete
    continued(first[0], rank_pool.run(run, 2, JOB.other(), directory, shared / "whole", [0, 2], 1), steps)
    short = rank_pool.run(lose_groups, 3, JOB, directory, shared / "short", lost, 3)
    assert short[0].checkpoints[-1][1] is not None
    continued(short[0], rank_pool.run(run, 2, JOB.other(), directory, shared / "short", [0, 2], 1), 2)


def checked_memory(memory: MemoryCheckpoints) -> None:
    """At most two checkpoints lie in a node's memory, and nothing of an earlier start of the job."""
    assert len(memory._run.tags()) <= 1
    assert os.listdir(memory._run.path / "writing") == [memory._attempt]


def no_memory_left(memory: Any) -> None:
    """The next file of this rank, if it is rank 1, finds no memory."""
    if dist.get_rank() == 1:

        def take(self: MemoryFile, nbytes: int, **names: bool) -> Any:
            raise OSError(28, "needs 1 GiB more of shared memory, and 0 bytes are to spare", str(self.path))

        MemoryFile.take = take  # type: ignore[method-assign]


def dies_before_it_is_complete(memory: Any) -> None:
    """No rank comes to the end of the generation: it is not published."""

    def publish(*args: Any) -> None:
        raise OSError(5, "the node is gone")

    MemoryDirectory._publish = publish  # type: ignore[method-assign]


def is_complete_on_one_node_only(memory: Any) -> None:
    """The other nodes cannot put the generation into its place."""
    if dist.get_rank() != 0:
        dies_before_it_is_complete(memory)


def is_emptied(memory: Any) -> None:
    """Somebody removes what the job has in shared memory, as systemd does when the user logs out (RemoveIPC)."""
    memory.wait()
    dist.barrier()
    if memory._leads_node:
        shutil.rmtree(memory._run.path.parent)
    dist.barrier()


ACTS = {"no memory": no_memory_left, "dies": dies_before_it_is_complete, "on one node": is_complete_on_one_node_only}


def lose(shared: Path, *nodes: int) -> None:
    for number in nodes:
        shutil.rmtree(shared / f"node{number}")


def continued(first: Turn, turns: Sequence[Turn], step: int, *, tier: str = "memory") -> None:
    """Every rank resumed from ``step`` of the first start, bit for bit, with the samples that follow."""
    for turn in turns:
        assert (turn.start.tier, turn.start.global_steps) == (tier, step)
        assert turn.start.report.root_matches
        assert compare_states(first.states[step], turn.resumed) == []


CASES = {
    "stage 3, bf16": JOB,
    "stage 2, fp16, accumulation": replace(JOB, stage=2, precision="fp16", micro=10),
    "stage 1, fp32, amsgrad, one group": replace(JOB, stage=1, precision="fp32", optimizer="amsgrad", groups=1),
    "stage 3, CPU offload, rigid saves": replace(
        JOB,
        optimizer="cpu_adam",
        elastic=False,
        zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
}


@pytest.mark.support("Checkpoint engines and storage", "memory of the nodes", "exact", "lost nodes, at any size")
@pytest.mark.parametrize("case", CASES)
def test_a_lost_node_costs_no_step_at_any_size(rank_pool: RankPool, tmp_path: Path, shared: Path, case: str) -> None:
    """4 ranks on 4 nodes, a node is lost each time: 3, 2 and 1, then three come.

    No checkpoint is on the disk."""
    job, directory = CASES[case], str(tmp_path / "ckpt")
    whole = ElasticDistributedSampler(range(LENGTH), BATCH, seed=4, rank=0, world_size=1)
    before = rank_pool.run(run, 4, job, directory, shared, [0, 1, 2, 3], 3)
    assert all(turn.start.tier is None and turn.start.tag is None for turn in before)
    step = 3
    for nodes, lost in (([0, 1, 3], [2]), ([0, 3], [1]), ([0], [3]), ([0, 1, 2, 3], [])):
        lose(shared, *lost)
        turns = rank_pool.run(run, len(nodes), job.other(), directory, shared, nodes, 2)
        continued(before[0], turns, step)
        want = [whole.batch(number).tolist() for number in (step, step + 1)]
        assert [turn.samples for turn in turns] == [want] * len(nodes)
        before, step = turns, step + 2
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").rglob("*.pt"))


def test_a_second_loss_before_the_next_checkpoint_is_due_costs_no_more_steps(
    rank_pool: RankPool, tmp_path: Path, shared: Path
) -> None:
    """A start that resumed from memory, where copies were lost, makes them again before it trains."""
    directory, job = str(tmp_path / "ckpt"), replace(JOB, options={"verify": True, "memory": {"every": 4, "copies": 1}})
    first = rank_pool.run(run, 3, job, directory, shared, [0, 1, 2], 5)
    for nodes, lost in (([0, 2], 1), ([2], 0)):
        lose(shared, lost)
        continued(first[0], rank_pool.run(run, len(nodes), job.other(), directory, shared, nodes, 1), 4)


def test_a_process_is_lost_and_the_nodes_stay(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    """Two ranks on each of two nodes, then three on one and one on the other."""
    directory = str(tmp_path / "ckpt")
    first = rank_pool.run(run, 4, JOB, directory, shared, [0, 0, 1, 1], 2)
    second = rank_pool.run(run, 4, JOB.other(), directory, shared, [0, 0, 0, 1], 1)
    continued(first[0], second, 2)
    assert "1 copies of each on other nodes, of 2" in second[0].describes


def test_of_two_nodes_that_are_lost_at_once_only_neighbours_cost_what_the_disk_has_not(
    rank_pool: RankPool, tmp_path: Path, shared: Path
) -> None:
    """Each of the nodes 0, 2, 1, 3 keeps the copy of the one before, and node 0 that of node 3."""
    directory = str(tmp_path / "ckpt")
    first = rank_pool.run(run, 4, JOB, directory, shared / "before", [0, 1, 2, 3], 5, save_steps=3)
    shutil.copytree(shared / "before", shared / "apart")
    lose(shared / "apart", 0, 1)
    continued(first[0], rank_pool.run(run, 3, JOB.other(), directory, shared / "apart", [2, 3, 5], 1), 5)
    lose(shared / "before", 0, 2)
    turns = rank_pool.run(run, 3, JOB.other(), directory, shared / "before", [1, 3, 5], 1)
    continued(first[0], turns, 3, tier="directory")
    (passed,) = turns[0].start.passed_over
    assert passed.startswith("step 5 in memory: ") and "the files of saved rank 0" in passed


def test_a_start_waits_for_late_nodes_where_an_agent_can_start_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(memory_resume, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for variables, seconds in (({}, []), ({"TORCHELASTIC_RUN_ID": "job"}, [5.0])):
        slept.clear()
        with pytest.MonkeyPatch.context() as environment:
            environment.delenv("TORCHELASTIC_RUN_ID", raising=False)
            for name, value in variables.items():
                environment.setenv(name, value)
            tier = object.__new__(memory_resume.MemoryTier)
            for tier._waits in (False, True, False):
                tier.wait_for_late_nodes()
        assert slept == seconds


def test_where_the_newest_save_is_damaged_what_memory_has_from_before_is_taken(
    rank_pool: RankPool, tmp_path: Path, shared: Path
) -> None:
    """The disk has steps 3 and 6, memory step 4; then the disk has no older save, and then memory is damaged too."""
    directory, job = tmp_path / "ckpt", replace(JOB, options={"verify": True, "memory": {"every": 4}})
    first = rank_pool.run(run, 2, job, str(directory), shared / "kept", [0, 1], 7, save_steps=3)
    flip(next((directory / "global_step6").glob("*rank_1_*optim_states.pt")))
    shutil.copytree(directory, tmp_path / "saved")
    for name in ("alone", "damaged"):
        shutil.copytree(shared / "kept", shared / name)
    for path in (shared / "damaged").rglob("complete/*/*optim_states.pt"):
        flip(path)

    for name, tier, step, passed_over in (
        ("kept", "memory", 4, ["global_step6"]),
        ("alone", "memory", 4, ["global_step6"]),
        ("damaged", "directory", 3, ["global_step6", "step 4 in memory"]),
    ):
        if name == "alone":
            shutil.rmtree(directory / "global_step3")
        turns = rank_pool.run(run, 2, job.other(), str(directory), shared / name, [0, 1], 1)
        continued(first[0], turns, step, tier=tier)
        assert [passed.split(": ")[0] for passed in turns[0].start.passed_over] == passed_over, name
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "saved", directory)


def test_the_disk_is_taken_where_it_is_newer(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    """A job whose memory checkpoints were turned off for a while."""
    directory = str(tmp_path / "ckpt")
    rank_pool.run(run, 2, JOB, directory, shared, [0, 1], 2)
    without = replace(JOB, options={"verify": True})
    first = rank_pool.run(run, 2, without, directory, shared, [0, 1], 4, save_steps=4)
    assert first[0].start.tier is None
    turns = rank_pool.run(run, 2, JOB, directory, shared, [0, 1], 1)
    continued(first[0], turns, 4, tier="directory")


@pytest.mark.parametrize("steps", [5, 4], ids=["after the last save", "of its step"])
def test_a_run_that_was_rolled_back_does_not_return_to_memory(
    rank_pool: RankPool, tmp_path: Path, shared: Path, steps: int
) -> None:
    """By ``latest``, and by a load in the training loop; from there on memory counts again."""
    directory = str(tmp_path / "ckpt")
    first = rank_pool.run(run, 2, JOB, directory, shared, [0, 1], steps, save_steps=2)
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    second = rank_pool.run(run, 2, JOB, directory, shared, [0, 1], 1)
    continued(first[0], second, 2, tier="directory")
    third = rank_pool.run(run, 2, JOB, directory, shared, [0, 1], 1, roll_back_to="global_step2")
    continued(second[0], third, 3)
    fourth = rank_pool.run(run, 2, JOB, directory, shared, [0, 1], 1)
    continued(first[0], fourth, 2, tier="directory")


def test_steps_since_the_last_save_count_over_starts_and_loops(
    rank_pool: RankPool, tmp_path: Path, shared: Path
) -> None:
    """Starts that are shorter than the interval between saves save nevertheless."""
    directory = str(tmp_path / "ckpt")
    for _ in range(4):
        rank_pool.run(run, 2, JOB, directory, shared, [0, 1], 2, save_steps=3)
    found = sorted(path.name for path in (tmp_path / "ckpt").glob("global_step*"))
    assert found == ["global_step3", "global_step6"]
    assert rank_pool.run(save_in_short_loops, 1, str(tmp_path / "loops"))[0] == ["global_step3", "global_step6"]


@pytest.mark.parametrize("act", ACTS)
def test_a_generation_that_fails_costs_one_step_and_training_goes_on(
    rank_pool: RankPool, tmp_path: Path, shared: Path, act: str
) -> None:
    directory = str(tmp_path / "ckpt")
    first = rank_pool.run(run, 3, JOB, directory, shared, [0, 1, 2], 4, act=act)
    assert [step for step, error in first[0].checkpoints if error is None] == [1, 2, 3]
    step, error = first[0].checkpoints[-1]
    assert step == 3 and error is not None and "SaveError" in error
    turns = rank_pool.run(run, 2, JOB.other(), directory, shared, [0, 2], 1)
    continued(first[0], turns, 3)


def test_shared_memory_that_was_emptied_is_used_again(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    directory = str(tmp_path / "ckpt")
    first = rank_pool.run(run, 3, JOB, directory, shared, [0, 0, 1], 3, act="emptied")
    assert first[0].checkpoints == [(1, None), (2, None), (3, None)]
    continued(first[0], rank_pool.run(run, 2, JOB.other(), directory, shared, [0, 1], 1), 3)


def test_what_is_kept_is_bounded(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    """Two generations of a node's own part and of what it keeps: as much again with copies."""
    kept = dict[str, int]()
    for name, copies, steps in (("own", 0, 4), ("few", 1, 2), ("copies", 1, 4)):
        job = replace(JOB, options={"memory": {"copies": copies}}, tables=(20_000,))
        rank_pool.run(run, 3, job, str(tmp_path / name), shared / name, [0, 1, 2], steps)
        files = (shared / name / "node0").rglob("writing/*/rank0/*/*")
        kept[name] = sum(path.stat().st_size for path in files)
    assert 0 < kept["few"] == pytest.approx(kept["copies"], rel=0.01)
    assert kept["copies"] == pytest.approx(2 * kept["own"], rel=0.05)


def train_in_blocks(job: Job, directory: str, shared: Path) -> tuple[list[tuple[int, int, int]], int]:
    """Process groups, threads and open files after each of three training loops, and groups after the engine."""
    use_node(shared, dist.get_rank())
    engine, seen = build_engine(job), []
    backend = dist.get_backend
    for step in range(3):
        with mock.patch.object(dist, "get_backend", lambda *group: backend(*group) if group else "nccl"):
            stop = preemption(engine, directory).__enter__()
        train_step(engine, step)
        stop()
        stop.save(background=True)
        stop.__exit__(None, None, None)
        seen.append((len(_world.pg_map), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    engine.destroy()
    return seen, len(_world.pg_map)


def test_a_training_loop_ends_with_its_process_groups(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    for seen, after in rank_pool.run(train_in_blocks, 2, JOB, str(tmp_path / "ckpt"), shared):
        groups, threads, files = zip(*seen, strict=True)
        assert len(set(groups)) == 1 and after == groups[0] - 1  # that of saves in the background
        assert threads[2] <= threads[0] and files[2] <= files[0] + 2, seen


def train_two(jobs: tuple[Job, Job], directory: str, shared: Path, *, damaged: int | None = None) -> list[Any]:
    """Two engines train in turn, with one directory; built anew, each resumes. The tier, step, and if it is its own.

    ``damaged``: a byte of what that engine has in memory is flipped before.
    """
    use_node(shared, dist.get_rank())
    engines = [build_engine(job) for job in jobs]
    saved: list[Any] = []
    with preemption(engines[0], directory) as stop, preemption(engines[1], directory) as other:
        for step in range(4):
            for i, (engine, each) in enumerate(zip(engines, (stop, other), strict=True)):
                for number in range(i + 1):
                    train_step(engine, 10 * step + number)
                each()
                if step == 1:
                    each.save(tag=f"{i}_{step}")
        saved += [look(engine)[0] for engine in engines]
        places = [each._memory._run.complete for each in (stop, other) if each._memory is not None]
    if damaged is not None and dist.get_rank() == 1:
        for path in places[damaged].rglob("*rank_1_*optim_states.pt"):
            flip(path)
    if dist.get_rank() == 0:
        (Path(directory) / "latest").unlink()  # it names a tag of the other engine, which is an error for this one
    dist.barrier()
    found: list[Any] = []
    for job, state in zip(jobs, saved, strict=True):
        engine = build_engine(job.other())
        start = resume(engine, directory, strict=False)
        found.append((start.tier, start.global_steps, look(engine)[0] == state))
    return found


@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_each_of_two_engines_has_a_place_of_its_own(
    rank_pool: RankPool, tmp_path: Path, shared: Path, stage: int
) -> None:
    """A GAN's: what memory has of one is neither replaced nor removed by the other, whatever that resumes from."""
    jobs = replace(JOB, stage=stage), replace(JOB, stage=stage, extra="more")
    for found in rank_pool.run(train_two, 2, jobs, str(tmp_path / "sound"), shared / "sound"):
        assert found == [("memory", 4, True), ("memory", 8, True)]
    for found in rank_pool.run(train_two, 2, jobs, str(tmp_path / "flipped"), shared / "flipped", damaged=0):
        assert found == [("directory", 2, False), ("memory", 8, True)]


def said_in_a_run(job: Job, directory: str, shared: Path, steps: int) -> tuple[int, list[str]]:
    """The step at which a run with memory begins that saves every two steps, and the warnings about its memory."""
    said = logged("elastic.memory.resume", logging.WARNING)
    turn = run(job, directory, shared, [0, 1], steps, save_steps=2)
    return turn.start.global_steps, said


def test_what_memory_has_from_before_a_parameter_was_unfrozen_is_named(
    rank_pool: RankPool, tmp_path: Path, shared: Path
) -> None:
    unfrozen = replace(JOB, frozen=False, options={**COPIES, "on_mismatch": "initialize"})
    directory = str(tmp_path / "ckpt")
    rank_pool.run(said_in_a_run, 2, JOB, directory, shared, 3)
    first, other = rank_pool.run(said_in_a_run, 2, unfrozen, directory, shared, 2)
    assert first[0] == other[0] == 2 and other[1] == []
    (text,) = first[1]
    assert text.startswith("step 3 in memory is not taken: the run trained other parameters")
    again = rank_pool.run(said_in_a_run, 2, unfrozen, directory, shared, 1)
    assert again == [(4, [])] * 2  # a save has come after it


def train_twins(job: Job, directory: str, shared: Path) -> str:
    """Two engines of the same parameters, with one directory; then one after the other."""
    use_node(shared, dist.get_rank())
    engines = [build_engine(job) for _ in range(2)]
    said = ""
    with preemption(engines[0], directory):
        try:
            preemption(engines[1], directory).__enter__()
        except ConfigError as error:
            said = str(error)
    for _ in range(2):
        with preemption(engines[1], directory) as stop:
            train_step(engines[1], 0)
            stop()
    return said


def test_two_engines_of_the_same_parameters_are_refused(rank_pool: RankPool, tmp_path: Path, shared: Path) -> None:
    for said in rank_pool.run(train_twins, 2, JOB, str(tmp_path / "ckpt"), shared):
        assert "two engines with the same trained parameters" in said and "a directory of its own" in said


def save_without(job: Job, directory: str) -> list[str]:
    """What a loop logs that has the option and makes no checkpoints in memory, in two saves."""
    said = logged("deepspeed.save.save_checkpoint")
    engine = build_engine(job)
    for step in range(2):
        train_step(engine, step)
        engine.save_checkpoint(directory)
    return [text for text in said if text.startswith('"memory"')]


def test_a_loop_that_makes_none_is_told_so_once(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(save_without, 2, JOB, str(tmp_path / "ckpt"))
    assert len(first) == 1 and "preemption()" in first[0] and second == []
