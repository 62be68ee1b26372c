"""What goes from rank to rank: every byte once, in rounds that no rank's buffers are too small for."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import Engine, open_fake_gpu, to_fake_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.distributed import exchange
from zeroelastic.executors import cuda_executor
from zeroelastic.executors.dispatch import CopyTable, copy_segments
from zeroelastic.testing import RankPool

TABLES = st.integers(2, 40).flatmap(
    lambda world_size: st.tuples(
        st.just(world_size),
        st.dictionaries(
            st.tuples(st.integers(0, world_size - 1), st.integers(0, world_size - 1)).filter(lambda p: p[0] != p[1]),
            st.integers(1, 20_000),
            max_size=30,
        ),
    )
)


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ROUND_BYTES", 4096)
    monkeypatch.setattr(exchange, "_LEAST_BYTES", 512)  # eight peers in a round


@pytest.mark.usefixtures("small_rounds")
@settings(max_examples=60)
@given(TABLES)
def test_rounds_send_every_byte_once_and_stay_within_the_buffers(case: tuple[int, dict[tuple[int, int], int]]) -> None:
    world_size, table = case
    done = dict.fromkeys(table, 0)
    for messages in exchange._rounds(table, world_size, exchange.ROUND_BYTES):
        assert len(messages.src)
        for side in (messages.src, messages.dst):
            assert np.bincount(side).max() <= 8 and np.bincount(side, weights=messages.nbytes).max() <= 4096
        for src, dst, begin, nbytes in zip(*(column.tolist() for column in messages), strict=True):
            assert begin == done[src, dst] and begin % exchange.ALIGNMENT == 0 and nbytes > 0
            done[src, dst] += nbytes
        for rank in range(world_size):
            for src in (False, True):
                pieces = exchange._pieces(messages, rank, src=src)
                assert [piece.peer for piece in pieces] == sorted({piece.peer for piece in pieces})
                assert [piece.at for piece in pieces] == [0, *np.cumsum([piece.nbytes for piece in pieces])][:-1]
    assert done == table


def test_ranks_are_busy_in_each_round_wherever_their_peers_are() -> None:
    world_size, nbytes = 16_384, 3 * exchange.ROUND_BYTES
    from_many = {(int(dst * 1.33), dst): nbytes for dst in range(12_288)}  # each distance from 0 to 4,095
    rounds = list(exchange._rounds(from_many, world_size, exchange.ROUND_BYTES))
    assert len(rounds) == 3 and all(len(messages.src) == len(from_many) for messages in rounds)
    with_hub = {**from_many, **{(16_383, dst): 1 << 10 for dst in range(12_288)}}  # 128 of these in a round
    rounds = list(exchange._rounds(with_hub, world_size, exchange.ROUND_BYTES))
    assert len(rounds) == 12_288 // 128
    assert sum(len(messages.src) > 12_288 for messages in rounds[:4]) >= 3, "others do not wait for the hub"


def swap_in_small_rounds(sizes: list[list[int]]) -> tuple[bool, int]:
    """Whether everything came as it was sent, and the largest buffer."""
    exchange.ROUND_BYTES, exchange._LEAST_BYTES = 1024, 512  # two peers in a round
    largest = 0
    original = exchange._Memory.take

    def take(self: Any, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal largest
        largest = max(largest, *sizes)
        return original(self, *sizes)

    exchange._Memory.take = take  # type: ignore[method-assign]
    rank = dist.get_rank()
    arrived = exchange.all_to_all_bytes(
        {peer: _message(rank, peer, size) for peer, size in enumerate(sizes[rank]) if peer != rank}
    )
    wanted = {peer: _message(peer, rank, row[rank]) for peer, row in enumerate(sizes) if peer != rank and row[rank]}
    return arrived == wanted, largest


def _message(src: int, dst: int, nbytes: int) -> bytes:
    return np.random.default_rng((src, dst)).bytes(nbytes)


def test_messages_of_any_size_arrive(rank_pool: RankPool) -> None:
    sizes = [[(7 * src + 3 * dst) % 5 * 997 for dst in range(4)] for src in range(4)]
    for same, largest in rank_pool.run(swap_in_small_rounds, 4, sizes):
        assert same and 0 < largest <= 1024


class GpuMemory(exchange._Memory):
    """Buffers on the fake GPU."""

    gpu: Engine

    def __init__(self, filled_on: torch.device, taken_on: torch.device) -> None:
        assert filled_on.type == taken_on.type == "cuda"

    def take(self, nbytes_sent: int, nbytes_received: int) -> tuple[torch.Tensor, torch.Tensor]:
        sent, received = (torch.zeros(n, dtype=torch.uint8) for n in (nbytes_sent, nbytes_received))
        return to_fake_gpu(self.gpu, sent), to_fake_gpu(self.gpu, received)


def swap_on_gpu(numel: int, group_moves_it: bool) -> tuple[bool, bool]:
    """Whether what each rank has on its GPU came to the next one's, and both ends of each round went by the engine."""
    exchange.ROUND_BYTES, exchange._LEAST_BYTES = 1024, 512
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    with (
        open_fake_gpu() as gpu,
        mock.patch.object(exchange, "_Memory", GpuMemory),
        mock.patch.object(cuda_executor, "run", wraps=cuda_executor.run) as by_cuda,
        mock.patch.object(exchange, "collective_device", lambda: torch.device("cuda:0" if group_moves_it else "cpu")),
    ):
        GpuMemory.gpu = gpu
        source = to_fake_gpu(gpu, torch.arange(numel, dtype=torch.float32) + 1000 * rank)
        target = to_fake_gpu(gpu, torch.zeros(numel))

        def table(piece: Any, *, fill: bool) -> CopyTable:
            at, begin, nbytes = (np.array([value]) for value in (piece.at, piece.begin, piece.nbytes))
            zero = np.zeros(1, dtype=np.int64)
            return CopyTable(zero, *((begin, zero, at) if fill else (at, zero, begin)), nbytes)

        exchange.all_to_all_stream(
            {after: source.nbytes},
            lambda pieces, buffer: [copy_segments(table(p, fill=True), [source], [buffer]) for p in pieces],
            lambda pieces, buffer: [copy_segments(table(p, fill=False), [buffer], [target]) for p in pieces],
            filled_on=exchange.device_of([source, None]),
            taken_on=exchange.device_of([target]),
        )
        want = torch.arange(numel, dtype=torch.float32) + 1000 * before
        return torch.equal(target.as_on_host(), want), by_cuda.call_count >= 2 * source.nbytes // 1024


@pytest.mark.parametrize("group_moves_it", [True, False])
def test_what_is_on_gpus_is_flattened_and_unflattened_there(rank_pool: RankPool, group_moves_it: bool) -> None:
    assert rank_pool.run(swap_on_gpu, 3, 2000, group_moves_it) == [(True, True)] * 3


def test_a_round_is_on_the_one_device_of_its_tensors() -> None:
    meta, host = torch.empty(1, device="meta"), torch.empty(1)
    assert exchange.device_of([meta, None, meta]) == meta.device
    assert exchange.device_of([meta, host]) == exchange.device_of([]) == torch.device("cpu")


def fail_between_rounds(failing: int) -> tuple[str, float]:
    """The error of this rank, of which one fails to fill its part of the first round."""
    exchange.ROUND_BYTES, exchange._LEAST_BYTES = 1024, 512
    began = time.monotonic()

    def fill(pieces: Any, buffer: Any) -> None:
        if dist.get_rank() == failing:
            raise OSError("the disk is gone")

    try:
        exchange.all_to_all_stream({(dist.get_rank() + 1) % 3: 10_000}, fill, lambda pieces, buffer: None)
    except OSError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def test_a_rank_that_fails_leaves_nobody_waiting(rank_pool: RankPool) -> None:
    results = rank_pool.run(fail_between_rounds, 3, 1, timeout=60)
    assert [said for said, _ in results] == ["", "the disk is gone", ""]
    assert max(seconds for _, seconds in results) < 30
