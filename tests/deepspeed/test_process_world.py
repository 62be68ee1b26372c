"""zeroelastic.deepspeed.process_world: one world after another in the same processes, and nothing of any is left."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training import Job, build_engine, look, train_step

from zeroelastic.deepspeed.process_world import begin_world, end_world, only_new_garbage
from zeroelastic.testing import RankPool

LIMIT = timedelta(seconds=60)
SIZES = (4, 3, 2)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
GROWTH_BYTES = 1 << 19
"""How much a process may grow in a world: what refers to itself and waits for the collector is a fifth of it."""
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Left:
    """What a process has after a world, by ``/proc``, and of torch; ``groups`` are those that still exist."""

    threads: int
    files: int
    resident_bytes: int
    tensors: int
    groups: int


def worlds(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, dist.Store]]:
    """The number, the size and the store of each world that this process is a rank of, one after another.

    All processes begin each of them together, whether they are in it or not.
    """
    me, everybody = dist.get_rank(), dist.get_world_size()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if me == 0 else None
    port = [None if server is None else server.port]
    dist.broadcast_object_list(port, src=0)
    store = server or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.destroy_process_group()
    for number, size in enumerate((*sizes, 0)):
        store.add(f"here {number}", 1)
        while store.add(f"here {number}", 0) < everybody:
            time.sleep(0.002)
        if me < size:
            yield number, size, dist.PrefixStore(f"world {number}", store)
    while me == 0 and store.add("gone", 0) < everybody - 1:
        time.sleep(0.002)
    if me != 0:
        store.add("gone", 1)


def groups_of_now() -> list[weakref.ref[Any]]:
    return [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]


def num_threads() -> int:
    """Without those that are ending: the kernel lists a thread for a moment after it has been joined."""
    fewest = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        if fewest == 1:
            break
        time.sleep(0.02)
        fewest = min(fewest, len(os.listdir("/proc/self/task")))
    return fewest


def what_is_left(groups: list[weakref.ref[Any]]) -> Left:
    return Left(
        threads=num_threads(),
        files=len(os.listdir("/proc/self/fd")),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        tensors=sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        groups=sum(group() is not None for group in groups),
    )


def train_in(job: Job, sizes: tuple[int, ...]) -> list[Left]:
    """Train in one world after another, and look what each of them leaves.

    Freed buffers go back to the system at once. By default glibc keeps them in its heap, whose size then varies by some
    MB from world to world, up to 25 MB in thirty of them.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
    left = []
    for _, size, store in worlds(sizes):
        begin_world(store, rank=dist_rank(), world_size=size, timeout=LIMIT)
        with only_new_garbage():
            engine = build_engine(job)
        for step in range(2):
            train_step(engine, step)
        groups = groups_of_now()
        dist.barrier()
        end_world(engine)
        del engine
        left.append(what_is_left(groups))
    return left


def dist_rank() -> int:
    """The number of this process, which is its rank in every world of these tests."""
    return int(os.environ["LOCAL_RANK"])


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        pytest.param(3, {}, id="stage 3"),
        pytest.param(1, {}, id="stage 1"),
        pytest.param(3, OFFLOAD, id="stage 3, offload", marks=pytest.mark.extended),
        pytest.param(2, OFFLOAD, id="stage 2, offload", marks=pytest.mark.extended),
    ],
)
def test_ten_worlds_leave_no_threads_files_groups_or_memory(
    rank_pool: RankPool, stage: int, zero: dict[str, Any]
) -> None:
    # Tables of half a million elements: what stays of one world alone is more than a process may grow.
    job = Job(stage=stage, zero=zero, sub_group_size=400_000, tables=(32_000,))
    for rank, left in enumerate(rank_pool.run(train_in, 4, job, SIZES * 3 + SIZES[:1])):
        assert len(left) == (10, 10, 7, 4)[rank]
        assert {one.groups for one in left} == {0}
        assert len({(one.threads, one.files, one.tensors) for one in left[1:]}) == 1, left
        # oneDNN keeps what it has prepared for each shape of a batch, which is another in each size of world.
        of_each_size = sum(size > rank for size in SIZES)
        grown = left[-1].resident_bytes - left[of_each_size - 1].resident_bytes
        assert grown < GROWTH_BYTES * (len(left) - of_each_size), left


def look_after_one_world(job: Job) -> dict[str, Any]:
    """What is there after a world, without a collection of garbage: while its objects are in use, and then."""
    found: dict[str, Any] = {"collections": (collections := [])}
    linear = torch.nn.functional.linear
    for number, size, store in worlds((2, 2)):
        begin_world(store, rank=dist_rank(), world_size=size, timeout=LIMIT)
        gc.disable()
        functions = importlib.reload(importlib.import_module("torch.distributed.nn.functional"))
        engine = build_engine(job)
        train_step(engine, 0)
        found[f"ids {number}"] = sorted(getattr(param, "ds_id", 0) for param in engine.module.parameters())
        optimizer, base, scheduler, model = engine.optimizer, engine.basic_optimizer, engine.lr_scheduler, engine.module
        objects = [weakref.ref(thing) for thing in (engine, optimizer, base, scheduler, model, *model.parameters())]
        groups = groups_of_now()
        dist.barrier()
        gc.callbacks.append(lambda phase, info: collections.append(phase))
        end_world(engine)
        gc.callbacks.pop()
        found["groups"] = [repr(group()) for group in groups if group() is not None]
        found["elements"] = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        found["state"] = [len(base.state), len(base.param_groups)]
        del engine, optimizer, base, scheduler, model
        found["objects"] = [repr(thing()) for thing in objects if thing() is not None]
        gc.enable()
    found["defaults"] = [
        name
        for name, function in vars(functions).items()
        if any(isinstance(value, dist.ProcessGroup) for value in getattr(function, "__defaults__", None) or ())
    ]
    found["linear"] = torch.nn.functional.linear is linear
    return found


@pytest.mark.parametrize("stage", [3, 2])
def test_the_objects_of_a_world_end_without_a_collection_of_garbage(rank_pool: RankPool, stage: int) -> None:
    for found in rank_pool.run(look_after_one_world, 2, Job(stage=stage)):
        assert found["collections"] == []
        assert found["groups"] == []
        assert found["objects"] == []
        assert found["elements"] == 0
        assert found["state"] == [0, 0]
        assert found["defaults"] == []
        assert found["linear"]
        assert found["ids 0"] == found["ids 1"]


def save_and_load_in_each(directory: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The states with which a world began and the one before it ended, where each loads what the one before saved."""
    seen = []
    before: dict[str, Any] = {}
    for number, size, store in worlds((2, 2, 2)):
        begin_world(store, rank=dist_rank(), world_size=size, timeout=LIMIT)
        engine = build_engine(Job(options={"verify": True, "async_save": number == 1}))
        if number:
            engine.load_checkpoint(directory)
            seen.append((before, look(engine)[0]))
        train_step(engine, number)
        before = look(engine)[0]
        engine.save_checkpoint(directory)
        dist.barrier()
        end_world(engine)
    return seen


def test_each_world_saves_and_loads_over_the_same_store(rank_pool: RankPool, tmp_path: Path) -> None:
    for seen in rank_pool.run(save_and_load_in_each, 2, str(tmp_path)):
        assert len(seen) == 2
        assert all(before == after for before, after in seen)


def end_after_failures() -> dict[str, str]:
    """A world that is in one already, an engine that was not built, and one that cannot be destroyed."""
    errors = {}
    for number, size, store in worlds((2, 2, 2)):
        begin_world(store, rank=dist_rank(), world_size=size, timeout=LIMIT)
        if number == 0:
            try:
                begin_world(dist.HashStore(), rank=0, world_size=1)
            except RuntimeError as error:
                errors["twice"] = str(error)
            end_world(None)
        elif number == 1:
            engine = build_engine(Job())

            def fail() -> None:
                raise OSError("the disk is full")

            engine.destroy = fail
            dist.barrier()
            try:
                end_world(engine)
            except OSError as error:
                errors["destroy"] = str(error)
        else:
            engine = build_engine(Job())
            errors["trained"] = str(train_step(engine, 0) > 0)
            dist.barrier()
            end_world(engine)
        assert not dist.is_initialized()
    return errors


def test_a_world_follows_one_that_failed(rank_pool: RankPool) -> None:
    for errors in rank_pool.run(end_after_failures, 2):
        assert "call end_world() first" in errors["twice"]
        assert errors["destroy"] == "the disk is full"
        assert errors["trained"] == "True"


class Loop:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process that runs no tests: what they have imported is frozen (conftest.py)."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_only_garbage_of_the_context_is_collected_in_it() -> None:
    gc.collect()
    gc.disable()
    try:
        older = weakref.ref(Loop())
        with only_new_garbage():
            younger = weakref.ref(Loop())
            gc.collect()
            assert younger() is None
            assert older() is not None
        gc.collect()
        assert older() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_others_have_frozen_stay_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with only_new_garbage():
            pass
        assert gc.get_freeze_count() >= count > 0
    finally:
        gc.unfreeze()


def linear_after_worlds(patch_in_the_world: bool) -> tuple[bool, bool]:
    """Whether ``linear`` of another library, set in a world or between two, is there after each of the two."""
    functional, torchs = torch.nn.functional, torch.nn.functional.linear

    def of_another_library(*args: Any) -> Any:
        return torchs(*args)

    found = []
    for number, _, store in worlds((1, 1)):
        begin_world(store, rank=0, world_size=1, timeout=LIMIT)
        engine = build_engine(Job(stage=3))
        if number == 0 and patch_in_the_world:
            functional.linear = of_another_library
        train_step(engine, 0)
        end_world(engine)
        if number == 0 and not patch_in_the_world:
            assert functional.linear is torchs
            functional.linear = of_another_library
        found.append(functional.linear is of_another_library)
    return found[0], found[1]


@pytest.mark.parametrize("patch_in_the_world", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_what_another_library_has_put_in_the_place_of_linear_stays(
    rank_pool: RankPool, patch_in_the_world: bool
) -> None:
    assert rank_pool.run(linear_after_worlds, 1, patch_in_the_world) == [(True, True)]
