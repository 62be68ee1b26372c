"""What a rank computes of who sees which file grows with the number of ranks, not with its square."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sample import write_sample
from saved_files import record_of

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord
from zeroelastic.checkpoint.inventory import Inventory
from zeroelastic.deepspeed.node_local import visibility
from zeroelastic.deepspeed.node_local.visibility import gather_inventory

NODE = 8
"""Ranks on a node."""

Look = Callable[[int, bool], tuple[Inventory, float]]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> CommitRecord:
    directory = tmp_path_factory.mktemp("saved")
    write_sample(directory, world_size=2, steps=(1,), hidden=8, layers=1)
    return record_of(directory / "global_step1")


def files_of(rank: int) -> dict[str, int]:
    return {
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": 1000 + rank,
        f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": 500,
    }


@pytest.fixture
def seen_by_rank_9(monkeypatch: pytest.MonkeyPatch, record: CommitRecord) -> Look:
    """What rank 9 makes of a save by so many ranks, with or without a record, and in how many seconds.

    The ranks are on nodes with disks of their own.
    """

    def look(num_ranks: int, with_record: bool) -> tuple[Inventory, float]:
        saved = {name: size for rank in range(num_ranks) for name, size in files_of(rank).items()}
        whole = record.model_copy(update={"files": saved, "directories": {}, "world_size": num_ranks})
        own = {RECORD_NAME: 100} if with_record else {}
        facts: dict[str, Any] = {"save": "its id"} if with_record else {}
        nodes: list[Any] = [None] * num_ranks
        for rank in range(0, num_ranks, NODE):
            files = {name: size for other in range(rank, rank + NODE) for name, size in files_of(other).items()}
            nodes[rank] = visibility._Node(own | files, **facts)
        said = [(num_ranks, 1) if rank % NODE == 0 else None for rank in range(num_ranks)]
        gathered = iter([nodes, [whole if with_record and rank == 0 else None for rank in range(num_ranks)], said])
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 9)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: num_ranks)
        replaced: dict[str, Any] = {
            "all_gather_mostly_equal": lambda value: [(rank // NODE, 0, 0) for rank in range(num_ranks)],
            "all_gather": lambda value: next(gathered),
            "all_or_raise": lambda action: action(),
            "_look": lambda *args: pytest.fail("the first rank of the node looks"),
        }
        for name, replacement in replaced.items():
            monkeypatch.setattr(visibility, name, replacement)
        began = time.thread_time()
        found = gather_inventory(Path("tag"))
        return found, time.thread_time() - began

    return look


@pytest.mark.parametrize("with_record", [True, False])
def test_each_file_is_read_by_the_ranks_of_its_node(seen_by_rank_9: Look, with_record: bool) -> None:
    found, _ = seen_by_rank_9(24, with_record)
    assert found.sizes == {name: size for rank in range(24) for name, size in files_of(rank).items()}
    for rank in range(24):
        node = tuple(range(rank // NODE * NODE, rank // NODE * NODE + NODE))
        assert [found.readers_of[name] for name in files_of(rank)] == [node, node]
    assert found.world_size == 24 and found.partial_ranks == tuple(range(24))
    assert {name for name in found.sizes if name not in found.remote_files} == {
        name for rank in range(8, 16) for name in files_of(rank)
    }


@pytest.mark.parametrize("with_record", [True, False])
def test_four_times_the_ranks_take_about_four_times_as_long(seen_by_rank_9: Look, with_record: bool) -> None:
    def seconds(num_ranks: int) -> float:
        return min(seen_by_rank_9(num_ranks, with_record)[1] for _ in range(3))

    assert seconds(4096) < 8 * seconds(1024)
