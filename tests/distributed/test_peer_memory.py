"""Ranks of one machine copy from each other what each of them has a part of, or all of them leave it alone."""

from __future__ import annotations

import ctypes
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeroelastic.deepspeed.live import group_split
from zeroelastic.distributed import spreading
from zeroelastic.testing import RankPool

_PART_BYTES = (1 << 20) + 24
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1 % (1 << 64))


def part(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (_PART_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def own_part_alone() -> torch.Tensor:
    rank = dist.get_rank()
    whole = torch.zeros(dist.get_world_size(), _PART_BYTES, dtype=torch.uint8)
    whole[rank] = part(rank)
    return whole.view(-1)


def all_parts() -> torch.Tensor:
    return torch.cat([part(number) for number in range(dist.get_world_size())])


def world() -> dist.ProcessGroup:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY)  # where Yama lets no process copy from its siblings
    group = dist.group.WORLD
    assert group is not None
    return group


def gather() -> tuple[bool, bool]:
    """Whether the parts were copied, and whether ``whole`` has all of them."""
    group, whole = world(), own_part_alone()
    return spreading.gather_from_peers(whole, group), torch.equal(whole, all_parts())


def test_every_rank_copies_the_parts_of_all(rank_pool: RankPool) -> None:
    assert rank_pool.run(gather, 3) == [(True, True)] * 3


def failing(why: str) -> Any:
    """What makes copies of rank 1, or from it, fail."""
    copy, rank = spreading._copy, dist.get_rank()

    def refused(process: int, src: int, dst: int, nbytes: int) -> bool:
        return nbytes < _PART_BYTES and copy(process, src, dst, nbytes)

    def of_others(process: int, src: int, dst: int, nbytes: int) -> bool:
        return True  # whose memory is zero there

    return {
        "the kernel refuses one rank": mock.patch.object(spreading, "_copy", refused if rank == 1 else copy),
        "one rank is on another machine": mock.patch.object(spreading, "machine", lambda: str(rank == 1)),
        "another process has its number": mock.patch.object(spreading, "_copy", of_others if rank == 1 else copy),
        "no process has its number": mock.patch.object(os, "getpid", (lambda: 1 << 30) if rank == 1 else os.getpid),
    }[why]


def gather_despite(why: str) -> tuple[bool, bool, bool]:
    """Whether the parts were copied, this rank's is as it was, and the gather of a load has then brought all."""
    group, whole, rank = world(), own_part_alone(), dist.get_rank()
    with failing(why):
        copied = spreading.gather_from_peers(whole, group)
        own = torch.equal(whole[rank * _PART_BYTES :][:_PART_BYTES], part(rank))
        group_split._all_gather(whole, group)
    return copied, own, torch.equal(whole, all_parts())


@pytest.mark.parametrize(
    "why",
    [
        "the kernel refuses one rank",
        "one rank is on another machine",
        "another process has its number",
        "no process has its number",
    ],
)
def test_parts_are_sent_where_any_rank_cannot_copy(rank_pool: RankPool, why: str) -> None:
    assert rank_pool.run(gather_despite, 3, why) == [(False, True, True)] * 3


def gather_of_load() -> tuple[int, bool]:
    """How many broadcasts the gather of a load needs, and whether it has brought all parts."""
    group, whole = world(), own_part_alone().view(torch.bfloat16)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        group_split._all_gather(whole, group)
    return broadcast.call_count, torch.equal(whole.view(torch.uint8), all_parts())


def test_a_load_sends_nothing_where_ranks_can_copy(rank_pool: RankPool) -> None:
    assert rank_pool.run(gather_of_load, 3) == [(0, True)] * 3
