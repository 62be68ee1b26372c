"""From one world to the next in the same processes: what DeepSpeed gathers is the same, and training goes on."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from functools import partial
from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import training
from extended import with_swept
from training import LOSS_RTOL, Job, build_engine, build_model, look, raised, train_step

from zeroelastic.core.layout import Layout
from zeroelastic.core.movement import assign_ranks
from zeroelastic.distributed.peers import JoinedPeers
from zeroelastic.errors import DigestMismatchError, LayoutMismatchError

STEPS = 2
LIMIT = timedelta(seconds=60)
SIZES = (4, 3, 2, 4, 1, 3)


def members_of(sizes: tuple[int, ...]) -> list[list[int]]:
    """Which processes are in each world, by rank: those that stay where ``assign_ranks`` puts them."""
    found = [list(range(sizes[0]))]
    for size in sizes[1:]:
        old = found[-1]
        stay = old[1:] if size < len(old) else old  # the first leaves, which had rank 0
        stay = stay[-size:]
        ranks = assign_ranks(len(old), size, [old.index(member) for member in stay])
        places: list[int | None] = [None] * size
        for member in stay:
            places[ranks[old.index(member)]] = member
        newcomers = (member for member in range(5) if member not in stay)
        found.append([next(newcomers) if place is None else place for place in places])
    return found


def change_sizes(job: Job, worlds: list[list[int]], others: dict[int, Job]) -> list[dict[str, Any]]:
    """Train in one world after another; what each world began and ended with, and its losses."""
    from zeroelastic.deepspeed.engine_state import lineage_of
    from zeroelastic.deepspeed.live.kinds import covered_live
    from zeroelastic.deepspeed.process_world import begin_world, end_world
    from zeroelastic.deepspeed.resize.restore import join_world, leave_world, recuts_of, serve

    me = dist.get_rank()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if me == 0 else None
    port = [None if server is None else server.port]
    dist.broadcast_object_list(port, src=0)
    store = server or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.destroy_process_group()
    found: list[dict[str, Any]] = []
    leaving, old, foreseen = None, [], ()
    for number, members in enumerate(worlds):
        joined = [*members, *(member for member in old if member not in members)]
        engine, seen = None, {"members": members, "losses": []}
        if me in members:
            rank = members.index(me)
            begin_world(dist.PrefixStore(f"{number}", store), rank=rank, world_size=len(members), timeout=LIMIT)
            torch.manual_seed(number)
            engine = build_first(job) if number == 0 else build_engine(others.get(number, job))
        if old and me in joined:
            peers = JoinedPeers(dist.PrefixStore(f"{number}p", store), joined.index(me), len(joined), timeout=LIMIT)
            peer_of = [joined.index(member) for member in old]
            state = peers.broadcast(None if leaving is None else leaving.state, peer_of[0])
            if engine is not None:
                seen["joined"] = join_world(engine, leaving, state, peers, peer_of)
                seen["client_state"] = dict(state.client_state)
            else:
                serve(leaving, peers, peer_of)
            peers.all_gather(None)
            del peers
        leaving = None
        foreseen, before = (), foreseen
        if engine is not None:
            live = covered_live(engine, engine.optimizer)
            for recut, layout in zip(before, (live.layout, live.frozen), strict=False):
                seen["as foreseen"] = seen.get("as foreseen", True) and columns(recut.new) == columns(layout)
                seen["bytes"] = seen.get("bytes", 0) + recut.element_bytes * int(layout.numel.sum())
            del live
            seen["begin"] = look(engine)
            seen["scale"] = float(getattr(engine.optimizer, "cur_scale", 1.0))
            seen["rates"] = [group["lr"] for group in engine.optimizer.param_groups]
            seen["clipping"] = engine.optimizer.clip_grad
            seen["steps"], seen["unsaved"] = engine.global_steps, lineage_of(engine).unsaved_steps
            seen["buffer"] = engine.module.batches_seen.tolist()
            for _ in range(STEPS):
                seen["losses"].append(train_step(engine, engine.global_steps))
            seen["end"] = look(engine)
            seen["end_scale"] = float(getattr(engine.optimizer, "cur_scale", 1.0))
            seen["end_rates"] = [group["lr"] for group in engine.optimizer.param_groups]
            seen["end_buffer"] = engine.module.batches_seen.tolist()
            if number + 1 < len(worlds):
                foreseen = recuts_of(engine, len(worlds[number + 1]))
            lineage_of(engine).unsaved_steps += STEPS  # as ``preemption`` does at its end
            leaving = leave_world(engine, {"note": number})
            end_world(engine)
        del engine
        found.append(seen)
        old = members
    return found


def columns(layout: Layout) -> list[Any]:
    """A layout as values that can be compared."""
    arrays = (layout.numel, layout.sub_group, layout.origin, layout.part, layout.offset, layout.sub_group_numel)
    return [layout.world_size, layout.params, *(array.tolist() for array in arrays)]


def build_first(job: Job) -> Any:
    """At stages 1 and 2 with another norm to clip to than is configured, as after a load of a run that had it."""
    engine = build_engine(job)
    if job.stage < 3:
        engine.optimizer.clip_grad = 0.25
    return engine


def uninterrupted(job: Job, steps: int) -> list[float]:
    engine = build_first(job)
    return [train_step(engine, step) for step in range(steps)]


def check(by_process: list[list[dict[str, Any]]], job: Job, losses: list[float]) -> None:
    """Every world began with what the one before ended with, and trained as if nothing had happened."""
    worlds = len(by_process[0])
    begun = [next(seen[w] for seen in by_process if "begin" in seen[w]) for w in range(worlds)]
    for w in range(worlds):
        mine = [seen[w] for seen in by_process if "begin" in seen[w]]
        assert len(mine) == len(begun[w]["members"])
        for one in mine:
            assert one["begin"] == begun[w]["begin"] and one["end"] == begun[w]["end"]
            if w:
                before = begun[w - 1]
                assert one["begin"][1] == before["end"][1], "what DeepSpeed gathers"
                assert one["begin"][0] == before["end"][0], "the whole state"
                assert one["scale"] == before["end_scale"] and one["rates"] == before["end_rates"]
                assert one["clipping"] == before["clipping"]
                assert one["buffer"] == before["end_buffer"] and one["client_state"] == {"note": w - 1}
                assert one["steps"] == one["unsaved"] == w * STEPS and one["joined"].root is not None
        if w:
            moved = sum(one["joined"].moved.received for one in mine)
            kept = sum(one["joined"].moved.kept for one in mine)
            stayed = [one for one in mine if "as foreseen" in one]
            assert stayed and all(one["as foreseen"] for one in stayed)
            (nbytes,) = {one["bytes"] for one in stayed}
            assert nbytes <= moved + kept <= 1.05 * nbytes  # runs that move are padded to multiples of 8 bytes
    trained = [loss for one in begun for loss in one["losses"]]
    assert trained == pytest.approx(losses, rel=LOSS_RTOL[job.precision])


JOBS = {
    "stage 3": Job(),
    "stage 3, fp16": Job(precision="fp16"),
    "stage 3, CPU offload": Job(optimizer="cpu_adam", zero={"offload_optimizer": {"device": "cpu"}}),
    "stage 3, fp32, accumulation": Job(precision="fp32", micro=5, groups=3),
    "stage 2": Job(stage=2),
    "stage 2, fp16, round robin": Job(stage=2, precision="fp16", zero={"round_robin_gradients": True}),
    "stage 2, aligned": Job(stage=2, zero={"parameter_alignment": True}),
    "stage 1": Job(stage=1),
    "stage 1, fp32, aligned, round robin": Job(
        stage=1, precision="fp32", zero={"parameter_alignment": True, "round_robin_gradients": True}
    ),
    "stage 1, CPU offload": Job(stage=1, optimizer="cpu_adam", zero={"offload_optimizer": {"device": "cpu"}}),
}


SWEPT = ("stage 1", "stage 2, aligned")
"""Others have the same stage and options, with more."""


@pytest.mark.support("Using it", "a change of size in the same processes, stages 1 to 3", "exact")
@pytest.mark.parametrize(
    "name",
    [
        *("stage 3", "stage 2"),
        *(
            pytest.param(name, marks=pytest.mark.extended)
            for name in JOBS
            if name not in ("stage 3", "stage 2", *SWEPT)
        ),
        *with_swept(SWEPT, SWEPT),
    ],
)
def test_the_state_goes_from_world_to_world_bit_for_bit(rank_pool, name):
    job = JOBS[name]
    losses = rank_pool.run(uninterrupted, 4, job, STEPS * len(SIZES))[0]
    found = rank_pool.run(change_sizes, 5, job, members_of(SIZES), {}, timeout=240)
    check(found, job, losses)


def least_moved_share(old: int, new: int, stay: list[int]) -> float:
    """The least share of elements that move, by trying every assignment."""

    def overlap(i: int, j: int) -> Fraction:
        return max(
            Fraction(0), min(Fraction(i + 1, old), Fraction(j + 1, new)) - max(Fraction(i, old), Fraction(j, new))
        )

    best = max(sum(map(overlap, stay, ranks)) for ranks in permutations(range(new), len(stay)))
    return float(1 - best)


def test_what_moves_is_what_its_new_owner_lacks(rank_pool):
    job = Job(tables=(4000,))
    found = rank_pool.run(change_sizes, 5, job, [[0, 1, 2, 3], [0, 1, 3]], {}, timeout=240)
    joined = [seen[1]["joined"] for seen in found if "joined" in seen[1]]
    moved, kept = (sum(getattr(one.moved, name) for one in joined) for name in ("received", "kept"))
    # 4 -> 3 parts without the third rank: its quarter moves, and of the others 1/6 of the second's
    assert moved <= 1.05 * (moved + kept) * least_moved_share(4, 3, [0, 1, 3])


def change_with_float4(job: Job) -> list[list[int]]:
    """The bytes of a frozen parameter of a dtype that torch cannot fill, in each world."""
    seen: list[list[int]] = []

    def build(job: Job) -> Any:
        model = build_model(job)
        values = torch.arange(6, dtype=torch.uint8) if not seen else torch.zeros(6, dtype=torch.uint8)
        model.four = torch.nn.Parameter(values.view(torch.float4_e2m1fn_x2), requires_grad=False)
        return model

    def look_at_it(engine: Any) -> None:
        seen.append(engine.module.four.view(torch.uint8).tolist())

    with patch.object(training, "build_model", build), patch(f"{__name__}.look", look_at_it):
        change_sizes(job, [[0, 1, 2], [0, 1]], {})
    return seen


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_a_frozen_parameter_may_have_a_dtype_that_torch_cannot_fill(rank_pool):
    for seen in rank_pool.run(change_with_float4, 3, Job(stage=2)):
        assert seen and all(found == [*range(6)] for found in seen)


def change_with_own_buffers(job: Job, worlds: list[list[int]]) -> list[dict[str, Any]]:
    """A change in which each rank of the first world has other buffers, as with batch norms in no group."""
    first = build_first

    def build(job: Job) -> Any:
        engine = first(job)
        engine.module.batches_seen.fill_(10.0 * dist.get_rank())
        return engine

    with patch(f"{__name__}.build_first", build):
        return change_sizes(job, worlds, {})


@pytest.mark.parametrize("stage", [3, 2])
def test_a_member_that_stays_keeps_its_buffers_and_one_that_comes_gets_those_of_rank_0(rank_pool, stage):
    worlds = [[0, 1, 2], [2, 3, 1]]
    found = rank_pool.run(change_with_own_buffers, 4, Job(stage=stage), worlds)
    ends = [seen[0]["end_buffer"] for seen in found[:3]]
    assert len({tuple(buffer) for buffer in ends}) == 3
    assert [seen[1]["buffer"] for seen in found[1:]] == [ends[1], ends[2], ends[0]]


def wrong_model(job: Job) -> tuple[str, str]:
    try:
        change_sizes(job, [[0, 1], [0, 1]], {1: Job(extra="more")})
    except (LayoutMismatchError, DigestMismatchError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_another_model_in_the_next_world_is_refused_on_every_rank(rank_pool):
    found = rank_pool.run(wrong_model, 2, Job())
    assert found[0] == found[1]
    assert found[0][0] == "LayoutMismatchError" and "trained parameter more.weight was None" in found[0][1]


def flipped(job: Job) -> tuple[str, str]:
    from zeroelastic.deepspeed.resize import move

    original = move.exchange_rows

    def exchange(rows: Any, owner: Any, serve: Any, put: Any, **more: Any) -> Any:
        def damaged(arrived: Any, buffer: Any) -> None:
            buffer[0] ^= 4
            put(arrived, buffer)

        return original(rows, owner, serve, damaged, **more)

    move.exchange_rows = exchange
    try:
        change_sizes(job, [[0, 1, 2], [0, 1]], {})
    except (DigestMismatchError, RuntimeError) as error:  # the member that leaves loses the others
        return type(error).__name__, str(error)
    return "", ""


def test_a_bit_that_changes_on_its_way_is_noticed_on_every_rank(rank_pool):
    found = rank_pool.run(flipped, 3, Job())
    assert [name for name, _ in found[:2]] == ["DigestMismatchError"] * 2
    assert "the content root was" in found[0][1] and "do not train on it" in found[0][1]


NO_PLACE = {
    "factored": "'rms' of optimizer group 0 is pyfloat:",
    "counting": "Counting keeps 'k' beside the state of its parameters",
    "by_rank": "'of_numpy' of optimizer group 0 is 0.0 on rank 0 and 1.0 on rank 1; 'small' of optimizer group 0 is",
}


def test_values_that_differ_by_rank_do_not_become_those_of_one(rank_pool):
    for errors in rank_pool.run(leave_each, 2, list(NO_PLACE)):
        for (kind, text), said in zip(errors, NO_PLACE.values(), strict=True):
            assert kind == "UnsupportedError" and said in text
        assert "'table' of optimizer group 0 is {'a': [0, None]} on rank 0" in text and "other" not in text


def leave_each(optimizers: list[str]) -> list[tuple[str, str]]:
    from zeroelastic.deepspeed.resize.restore import leave_world

    found = []
    for optimizer in optimizers:
        engine = build_engine(Job(optimizer=optimizer, stage=2))
        train_step(engine, 0)
        found.append(raised(partial(leave_world, engine, {})))
    return found
