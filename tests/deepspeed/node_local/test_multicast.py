"""What many ranks ask of one reaches each of them, and no rank sends it to more than a few."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from zeroelastic.deepspeed.node_local import multicast as multicast_module
from zeroelastic.deepspeed.node_local.multicast import FAN_OUT, Request, multicast, tree_steps
from zeroelastic.testing import RankPool


def test_a_content_reaches_all_that_ask_in_few_steps_and_few_copies() -> None:
    one, other = Request(0, "model"), Request(8_191, "optimizer")
    askers = {one: list(range(8_192, 16_384)), other: list(range(8_192, 16_384)), Request(5, "own"): []}
    steps = list(tree_steps(askers, FAN_OUT))
    assert len(steps) == 5  # of trees of 8, 64, 512, 4,096 and the rest
    for request in (one, other):
        have = {request.reader}
        for hops in steps:
            mine = [hop for hop in hops if hop.request == request]
            assert {hop.src for hop in mine} <= have
            assert not have & {hop.dst for hop in mine}
            have |= {hop.dst for hop in mine}
        assert have == {request.reader, *askers[request]}
    sent = Counter((hop.src, hop.request) for hops in steps for hop in hops)
    assert max(sent.values()) <= FAN_OUT


def test_nothing_that_is_asked_for_takes_no_step() -> None:
    assert not list(tree_steps({}, FAN_OUT)) and not list(tree_steps({Request(0, "own"): []}, FAN_OUT))


def ask(failing: int | None) -> tuple[dict[str, bytes], list[str], int, int] | str:
    """What rank 0 of 4 sends to the others through one of them, and what rank 3 sends to itself."""
    multicast_module.FAN_OUT = 1
    rank, asked = dist.get_rank(), []

    def read(names: list[str]) -> dict[str, bytes]:
        asked.extend(names)
        if rank == failing:
            raise OSError("the disk is gone")
        return {name: f"{name} of {rank}".encode() * 1000 for name in names}

    requests = [Request(0, "a")] if rank else []
    requests += [Request(3, "b")] if rank == 3 else []
    try:
        arrived = multicast(requests, read)  # type: ignore[arg-type]
    except Exception as error:
        return str(error)
    return dict(arrived.content), asked, arrived.sent, arrived.received


def test_ranks_send_on_what_they_received(rank_pool: RankPool) -> None:
    results = rank_pool.run(ask, 4, None)
    a, b = b"a of 0" * 1000, b"b of 3" * 1000
    contents, asked, sent, received = zip(*results, strict=True)
    assert contents == ({}, {"a": a}, {"a": a}, {"a": a, "b": b})
    assert asked == (["a"], [], [], ["b"])
    assert sent[:3] == received[1:] and sent[3] == received[0] == 0 and min(sent[:3]) > len(a)


def test_every_rank_raises_what_a_reader_raised(rank_pool: RankPool) -> None:
    assert all("the disk is gone" in said for said in rank_pool.run(ask, 4, 0, timeout=60))  # type: ignore[operator]
