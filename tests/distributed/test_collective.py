"""Values of every rank, whatever the sizes of their pickles, and what of them is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from zeroelastic.distributed import collective
from zeroelastic.distributed.collective import (
    all_gather,
    all_gather_mostly_equal,
    all_gather_of_or_raise,
    any_rank,
    broadcast_or_raise,
    maximum,
    maximum_and_total,
)
from zeroelastic.errors import CheckpointError, RemoteRankError
from zeroelastic.testing import RankPool

LENGTHS = (0, 1, 500, 70_000)
"""Of byte strings; the pickle of one is some bytes longer."""


def value_of(rank: int, length: int) -> tuple[int, bytes]:
    return rank, bytes([rank + 1]) * length


def gather_all() -> bool:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for length in LENGTHS:
        everything = [value_of(other, length) for other in ranks]
        assert all_gather(value_of(rank, length)) == everything
        assert all_gather_mostly_equal(value_of(rank, length)) == everything
        # one long, the others short
        everything = [value_of(other, length if other == 1 else 3) for other in ranks]
        assert all_gather(everything[rank]) == everything
    assert all_gather(None) == all_gather_mostly_equal(None) == [None for _ in ranks]
    return True


def reduce_all() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert maximum([rank, -rank, -(1 << 63), (1 << 63) - 1 - rank]) == [size - 1, 0, -(1 << 63), (1 << 63) - 1]
    assert maximum_and_total([rank, -rank], rank + 1) == ([size - 1, 0], size * (size + 1) // 2)
    assert not any_rank(False) and any_rank(rank == size - 1)
    return True


@pytest.mark.parametrize("script", [gather_all, reduce_all])
def test_values_of_any_size_arrive(rank_pool: RankPool, script: Any) -> None:
    for world_size in (1, 2, 3):
        assert all(rank_pool.run(script, world_size))


def send_what_is_alike() -> list[int]:
    """The bytes that this rank sends: where values are alike, where the last rank differs, and by a plain gather."""
    rank, size, sent = dist.get_rank(), dist.get_world_size(), [0]

    def counting(original: Any, position: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[0] += args[position].nbytes
            return original(*args, **kwargs)

        return call

    counts = []
    with (
        mock.patch.object(dist, "all_gather", counting(dist.all_gather, 1)),
        mock.patch.object(dist, "all_reduce", counting(dist.all_reduce, 0)),
    ):
        long = "x" * 5000
        for value in (long, long if rank < size - 1 else "y", {"set": {1.5, None}}):
            sent[0] = 0
            assert all_gather_mostly_equal(value)[rank] == value
            counts.append(sent[0])
    return counts


def test_what_is_alike_is_not_sent(rank_pool: RankPool) -> None:
    for alike, different, small in rank_pool.run(send_what_is_alike, 3):
        assert alike == small == 2 * collective._HASH_BYTES
        assert different > 5000


def receive_what_one_rank_says() -> int:
    """The bytes that this rank receives where the last rank has a long value."""
    long, received = "x" * 100_000 if dist.get_rank() == dist.get_world_size() - 1 else "", [0]
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        received[0] += tensor.nbytes
        return all_reduce(tensor, **options)

    with mock.patch.object(dist, "all_reduce", counting):
        assert [len(value) for value in all_gather(long)] == [0] * (dist.get_world_size() - 1) + [100_000]
    return received[0]


def test_a_long_value_of_one_rank_costs_what_it_is_long(rank_pool: RankPool) -> None:
    assert all(100_000 < received < 101_000 for received in rank_pool.run(receive_what_one_rank_says, 3))


@pytest.mark.parametrize("differs", range(32))
def test_every_byte_of_the_hash_tells_values_apart(differs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks whose hashes differ in one byte, up or down: neither takes the other's value for its own."""
    hashes = [bytes(32), bytes(differs) + b"\x80" + bytes(31 - differs)]
    sent: list[list[int]] = []

    def on_a_rank(digest: bytes, reduced: Callable[[list[int]], list[int]]) -> list[str]:
        monkeypatch.setattr(collective, "hashlib", Mock(sha256=lambda data: Mock(digest=lambda: digest)))
        monkeypatch.setattr(collective, "maximum", reduced)
        return all_gather_mostly_equal("value")

    def alone(values: list[int]) -> list[int]:
        sent.append(values)
        return values

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(collective, "all_gather", lambda value: ["gathered"])
    assert [on_a_rank(digest, alone) for digest in hashes] == [["value"] * 2] * 2
    largest = torch.tensor(sent).amax(0).tolist()
    assert [on_a_rank(digest, lambda values: largest) for digest in hashes] == [["gathered"]] * 2


def outcomes_of_one_rank() -> dict[str, str]:
    """What values and errors of one rank become here: by name, a value or the error's type and message."""
    rank, asked = dist.get_rank(), []

    def fail(at: int, error: Exception) -> int:
        asked.append(rank)
        if rank == at:
            raise error
        return 10 * rank

    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: broadcast_or_raise(lambda: fail(-1, ValueError())),
        "broadcast, ours": lambda: broadcast_or_raise(lambda: fail(0, CheckpointError("no file"))),
        "broadcast, another's": lambda: broadcast_or_raise(lambda: fail(0, ValueError("no number"))),
        "parts": lambda: all_gather_of_or_raise(lambda: fail(-1, ValueError()), lambda value: value + 1),
        "parts, ours": lambda: all_gather_of_or_raise(lambda: fail(1, CheckpointError("no file")), lambda value: value),
        "parts that fail": lambda: all_gather_of_or_raise(lambda: rank, lambda value: 1 // (value - 2)),
    }
    found = {}
    for name, call in calls.items():
        asked.clear()
        try:
            found[name] = f"{call()} asked {asked}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_a_value_or_an_error_of_one_rank_comes_to_all(rank_pool: RankPool) -> None:
    remote = f"{RemoteRankError.__name__}: rank"
    for rank, found in enumerate(rank_pool.run(outcomes_of_one_rank, 3)):
        assert found["broadcast"] == f"0 asked {[0] if rank == 0 else []}"
        assert found["broadcast, ours"] == "CheckpointError: no file"
        own = "ValueError: no number"
        assert found["broadcast, another's"] == (own if rank == 0 else f"{remote} 0 failed with {own}")
        assert found["parts"] == f"({10 * rank}, [1, 11, 21]) asked [{rank}]"
        assert found["parts, ours"] == "CheckpointError: no file"
        own = "ZeroDivisionError: integer division or modulo by zero"
        assert found["parts that fail"] == (own if rank == 2 else f"{remote} 2 failed with {own}")
