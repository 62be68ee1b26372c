"""Extent tables in windows: the same rows, the same bytes and digests, in bounded memory."""

from __future__ import annotations

import tracemalloc
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import write_sample

from zeroelastic.checkpoint import extents as extents_module
from zeroelastic.checkpoint.extents import ExtentTable, TensorExtents, TensorSlot, extent_table, extent_windows
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.layout import Layout, Param, layout_from_sub_groups, pack_sub_groups
from zeroelastic.core.plan import Plan, make_plan
from zeroelastic.deepspeed.fill import FillJob, Target, fill
from zeroelastic.verbs.reshard.reshard import reshard

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
COLUMNS = ("file_offset", "target", "target_offset", "numel", "itemsize", "param", "start")


def rows_of(table: ExtentTable) -> list[tuple[object, ...]]:
    columns = [getattr(table, column).tolist() for column in COLUMNS]
    return list(zip([table.paths[number] for number in table.file.tolist()], *columns, strict=True))


def extents_of(layout: Layout, directory: Path) -> dict[int, dict[str, TensorExtents]]:
    """Made up: each key of each rank in one run of a file."""
    dtypes = dict.fromkeys(range(layout.num_sub_groups), "float32")
    ends = np.cumsum(layout.part) * 4
    return {
        rank: {
            key: TensorExtents(directory / f"rank {rank}", dtypes, number * int(ends[-1]) + ends - layout.part * 4)
            for number, key in enumerate(KEYS)
        }
        for rank in range(layout.world_size)
    }


def plan_of(numels: list[int], saved: int, world_size: int, rank: int) -> tuple[Plan, list[TensorSlot]]:
    sub_groups = pack_sub_groups(
        [[Param(f"p{i}", (numel,)) for i, numel in enumerate(numels)]], world_size=world_size, sub_group_size=20
    )
    src, dst = (layout_from_sub_groups(sub_groups, size) for size in (saved, world_size))
    targets = [TensorSlot(key, i, "float32") for i in range(len(sub_groups)) for key in KEYS]
    return make_plan(src, dst, rank), targets


@given(
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    saved=st.integers(1, 5),
    world_size=st.integers(1, 5),
    limit=st.integers(1, 30),
)
@settings(deadline=None)
def test_windows_have_the_rows_of_the_table(numels: list[int], saved: int, world_size: int, limit: int) -> None:
    plan, targets = plan_of(numels, saved, world_size, world_size - 1)
    extents = extents_of(plan.src, Path("/saved"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents_module, "_WINDOW_ROWS", limit)
        windows = list(extent_windows(plan, extents, targets))
    assert sorted(row for window in windows for row in rows_of(window)) == sorted(
        rows_of(extent_table(plan, extents, targets))
    )
    assert all(window.num_rows <= max(limit, len(KEYS)) for window in windows)
    for window in windows:
        assert rows_of(window) == sorted(rows_of(window), key=lambda row: (window.paths.index(row[0]), row[1]))
    joined = windows[0]
    for window in windows[1:]:
        joined = joined.joined(window)
    assert rows_of(joined) == [row for window in windows for row in rows_of(window)]
    assert len(set(joined.paths)) == len(joined.paths)


def test_a_table_of_many_parameters_is_never_there_as_a_whole() -> None:
    """200,000 parameters, whose table of three state keys is more than 64 MiB."""
    plan, targets = plan_of([10] * 3, 4, 3, 1)
    params = tuple(Param(f"p{i}", (10,)) for i in range(200_000))
    src, dst = (layout_from_sub_groups([params], size) for size in (4, 3))
    plan, targets = make_plan(src, dst, 1), [TensorSlot(key, 0, "float32") for key in KEYS]
    extents = extents_of(src, Path("/saved"))

    def measured(tables: Callable[[], Iterable[ExtentTable]]) -> tuple[int, float]:
        tracemalloc.start()
        try:
            rows = sum(table.num_rows for table in tables())
            return rows, tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()

    rows, mib = measured(lambda: extent_windows(plan, extents, targets))
    all_rows, all_mib = measured(lambda: [extent_table(plan, extents, targets)])
    assert rows == all_rows > 4 * extents_module._WINDOW_ROWS
    assert mib < 40 < all_mib / 4, "windows of tables bound the memory of a load"


def fill_sample(directory: Path, remote: tuple[str, ...]) -> tuple[list[torch.Tensor], FillJob]:
    """The second of three ranks, from a sample of four: two keys as they are, and one cast to 16 bits."""
    checkpoint = open_checkpoint(directory / "global_step2")
    shards = {rank: checkpoint.shard(rank) for rank in range(4)}
    src = shards[0].layout
    plan = make_plan(src, layout_from_sub_groups(sub_groups_of(src), 3), 1)
    targets = []
    for number in range(src.num_sub_groups):
        numel = int(plan.dst.part[plan.dst.sub_group == number].sum())
        for key, dtype in zip(KEYS, (torch.float32, torch.float32, torch.bfloat16), strict=True):
            targets.append(Target(key, number, torch.full((numel,), -7.0, dtype=dtype), "float32"))
    extents = {rank: shard.extents for rank, shard in shards.items()}
    filled = fill(plan, extents, targets, remote_files=remote, digest=True)
    return [target.tensor for target in targets], filled


def sub_groups_of(layout: Layout) -> list[list[Param]]:
    return [
        [param for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True) if i == number]
        for number in range(layout.num_sub_groups)
    ]


@pytest.mark.parametrize("remote", [(), ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",)])
def test_what_is_filled_window_by_window_is_the_same(
    tmp_path: Path, remote: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sample(tmp_path, steps=(2,))
    tensors, filled = fill_sample(tmp_path, remote)
    monkeypatch.setattr(extents_module, "_WINDOW_ROWS", 7)
    in_windows, again = fill_sample(tmp_path, remote)
    assert all(map(torch.equal, tensors, in_windows))
    assert not any((tensor == -7.0).all() for tensor in tensors)
    for facts in ("bytes_read", "bytes_owned", "cast_digests"):
        assert getattr(filled, facts) == getattr(again, facts)
    read, reread = (
        {name: each._replace(origin=None) for name, each in of.read_digests.items()} for of in (filled, again)
    )
    assert read == reread
    assert sorted(map(str, filled.files)) == sorted(map(str, again.files))
    assert len(filled.cast_digests) == len(filled.read_digests) // 2 > 0
    if remote:
        assert filled.unread is not None and again.unread is not None and filled.unread.num_rows > 7
        assert sorted(rows_of(filled.unread)) == sorted(rows_of(again.unread))
        assert filled.bytes_read < filled.bytes_owned


def test_reshard_in_windows_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))  # the save id in the files
    write_sample(tmp_path / "saved", steps=(2,))
    reshard(tmp_path / "saved", tmp_path / "whole", world_size=3)
    monkeypatch.setattr(extents_module, "_WINDOW_ROWS", 2 * len(KEYS))
    reshard(tmp_path / "saved", tmp_path / "windows", world_size=3)
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.pt")]
    assert len(files) == 6
    for path in files:
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "windows" / path).read_bytes()
