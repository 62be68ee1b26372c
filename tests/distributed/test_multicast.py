"""What many ranks ask of one reaches each of them, and no rank sends it to more than a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.distributed import exchange, spreading
from zeroelastic.distributed.spreading import FAN_OUT, Request, multicast, tree_steps
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


class Asked(NamedTuple):
    """What one rank got and was asked to read, or the error of it."""

    content: dict[str, bytes]
    read: list[str]
    sent: int
    received: int
    error: str = ""


def ask(failing: int | None) -> Asked:
    """What rank 0 of 4 sends to the others through one of them, and what rank 3 sends to itself."""
    spreading.FAN_OUT = 1
    exchange.ROUND_BYTES, exchange._LEAST_BYTES = 4096, 4096  # several rounds in each step
    rank, asked = dist.get_rank(), list[str]()

    def read(names: Sequence[str]) -> dict[str, bytes]:
        asked.extend(names)
        if rank == failing:
            raise OSError("the disk is gone")
        return {name: content_of(name, rank) for name in names}

    requests = [Request(0, "a"), Request(0, "b")] if rank else []
    requests += [Request(3, "c")] if rank == 3 else []
    try:
        content, cost = multicast(requests, read)
    except Exception as error:
        return Asked({}, asked, 0, 0, str(error))
    return Asked({name: bytes(data) for name, data in content.items()}, asked, cost.sent, cost.received)


def content_of(name: str, rank: int) -> bytes:
    """Of a length that is no multiple of anything."""
    return f"{name} of {rank}".encode() * 1501


def test_ranks_send_on_what_they_received(rank_pool: RankPool) -> None:
    found = rank_pool.run(ask, 4, None)
    both = {name: content_of(name, 0) for name in ("a", "b")}
    assert [one.content for one in found] == [{}, both, both, {**both, "c": content_of("c", 3)}]
    assert [one.read for one in found] == [["a", "b"], [], [], ["c"]]
    assert [one.sent for one in found[:3]] == [one.received for one in found[1:]]
    assert found[3].sent == found[0].received == 0 and found[0].sent >= sum(map(len, both.values()))


def test_every_rank_raises_what_a_reader_raised(rank_pool: RankPool) -> None:
    assert all("the disk is gone" in one.error for one in rank_pool.run(ask, 4, 0, timeout=60))
