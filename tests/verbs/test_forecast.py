"""What is said of a load before it is made: the same bytes, files and requests as the plan, and as the load itself."""

from __future__ import annotations

import dataclasses
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import GOLDEN
from synthetic import write_checkpoint

import zeroelastic
from zeroelastic.checkpoint.extents import Destination, TensorExtents, extent_table
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, ParamGroup, Shard
from zeroelastic.checkpoint.saved_state import SavedState, open_state
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import (
    Layout,
    Param,
    group_split_layout,
    layout_from_sub_groups,
    pack_sub_groups,
    param_alignment_gaps,
    round_robin_order,
    unpacked_layout,
)
from zeroelastic.core.plan import Plan, coalesce, make_plan
from zeroelastic.errors import UsageError
from zeroelastic.executors.dispatch import CopyTable
from zeroelastic.runs.locate import find_source
from zeroelastic.testing import RankPool
from zeroelastic.testing.sample import write_sample
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.plan.forecast import (
    LOAD_MEMORY_LIMIT,
    LOAD_STAGING_BYTES,
    MAX_WORLD_SIZE,
    RESHARD_MEMORY_LIMIT,
    Forecast,
    Head,
    make_forecast,
    read_head,
    target_layout,
)
from zeroelastic.verbs.reshard.reshard import ReshardOptions, plan_reshard, run_reshard

KEYS = {FP32: "float32", "exp_avg": "float32", "exp_avg_sq": "bfloat16"}


def made_head(
    numels: list[int],
    frozen: list[int],
    *,
    world_size: int,
    sub_group_size: int | None = None,
    num_groups: int = 1,
    stage: int = 3,
    zero: dict[str, bool] | None = None,
) -> Head:
    """Headers of a checkpoint that is on no disk; sizes and offsets of its files do not matter."""
    params = [Param(f"p{i}", (n,)) for i, n in enumerate(numels) if n]
    groups = [params[g::num_groups] for g in range(num_groups)]
    zero = zero or {}
    if stage == 3:
        sub_groups = pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size)
        layout = layout_from_sub_groups(sub_groups, world_size)
    else:
        ordered = [
            round_robin_order(group, world_size) if zero.get("round_robin_gradients") else group for group in groups
        ]
        aligned = zero.get("parameter_alignment")
        gaps = [param_alignment_gaps(group, 2) if aligned else [0] * len(group) for group in ordered]
        layout = group_split_layout(ordered, world_size, gaps)
    extents = {
        key: TensorExtents(
            Path("optim"),
            dict.fromkeys(range(layout.num_sub_groups), dtype),
            (number << 40) + (layout.sub_group << 30) + layout.offset * DTYPE_BYTES[dtype],
        )
        for number, (key, dtype) in enumerate(KEYS.items())
    }
    shard = Shard(
        path=Path("optim"),
        size=0,
        rank=0,
        stage=stage,
        format="rigid",
        save_id=None,
        layout=layout,
        groups=tuple(ParamGroup({"lr": 0.1}, tuple(p.name for p in group)) for group in groups),
        tensor_keys=tuple(tuple(KEYS) for _ in range(layout.num_sub_groups)),
        scalars=tuple({"step": ScalarValue("pyint", 3)} for _ in range(layout.num_sub_groups)),
        extents=extents,
        digests=None,
        scaler=None,
        ds_config={
            "bf16": {"enabled": True},
            "zero_optimization": {**zero, **({"sub_group_size": sub_group_size} if sub_group_size else {})},
        },
        train_batch_size=None,
        header_bytes=1000,
    )
    num_models = world_size if stage == 3 else 1
    others = unpacked_layout([Param(f"f{i}", (n,)) for i, n in enumerate(frozen)], num_models)
    model = ModelStates(
        path=Path("model"),
        size=0,
        rank=0,
        world_size=world_size,
        tensor_size=1,
        global_steps=1,
        sub_groups=(),
        frozen=others,
        frozen_extents=TensorExtents(Path("model"), dict.fromkeys(range(len(frozen)), "bfloat16"), others.offset),
        header_bytes=500,
    )
    sizes = np.full(world_size, 1 << 40, dtype=np.int64)
    return Head(shard, model, sizes, sizes[:num_models], 0)


NUMELS = st.lists(st.one_of(st.integers(1, 12), st.sampled_from([16, 16, 60, 97, 1000])), min_size=0, max_size=12)


@given(
    numels=NUMELS,
    frozen=st.lists(st.integers(0, 20), max_size=4),
    saved=st.integers(1, 13),
    world_size=st.integers(1, 13),
    sub_group_size=st.sampled_from([None, 1, 9, 40]),
    num_groups=st.integers(1, 2),
    stages=st.tuples(st.sampled_from([2, 3]), st.sampled_from([1, 3])),
    zero=st.dictionaries(st.sampled_from(["round_robin_gradients", "parameter_alignment"]), st.booleans()),
)
@example([16, 1, 1, 1], [], 4, 2, 9, 1, (3, 3), {})  # neighbours of one sub-group in the file, of two at the target
@example([16, 1, 1, 1], [], 2, 4, 9, 1, (3, 3), {})  # and the other way round
@example([1, 1, 1, 1], [3], 2, 5, None, 2, (3, 3), {})
@example([5, 7, 1, 60], [3], 2, 3, None, 1, (2, 1), {})
@example([5, 7, 1, 60], [3], 1, 3, None, 1, (2, 3), {"parameter_alignment": True})
def test_bytes_files_segments_and_requests_are_those_of_the_plan_of_every_rank(
    numels: list[int],
    frozen: list[int],
    saved: int,
    world_size: int,
    sub_group_size: int | None,
    num_groups: int,
    stages: tuple[int, int],
    zero: dict[str, bool],
) -> None:
    head = made_head(
        numels,
        frozen,
        world_size=saved,
        sub_group_size=sub_group_size,
        num_groups=num_groups,
        stage=stages[0],
        zero=zero,
    )
    forecast = make_forecast(head, world_size, stage=stages[1])
    width = sum(DTYPE_BYTES[dtype] for dtype in KEYS.values())
    state = width * sum(numels) + 2 * sum(frozen)
    assert forecast.state_bytes == state == int(forecast.bytes_owned.sum())
    assert forecast.amplification == 1.0
    matrix = np.zeros((saved, world_size), dtype=np.int64)
    target = target_layout(head, world_size, stages[1])
    extents = {
        rank: {key: dataclasses.replace(piece, path=Path(f"optim{rank}")) for key, piece in head.shard.extents.items()}
        for rank in range(saved)
    }
    targets = [Destination(key, i, dtype) for i in range(target.num_sub_groups) for key, dtype in KEYS.items()]
    for rank in range(world_size):
        plan = make_plan(head.shard.layout, target, rank)
        rows = extent_table(plan, extents, targets)
        joined = coalesce(rows.file, rows.file_offset, rows.target, rows.target_offset * rows.itemsize, rows.nbytes)
        np.add.at(matrix[:, rank], plan.src_rank, width * plan.length)
        models = {rank if rank < len(head.model_sizes) else 0}
        segments = len(KEYS) * plan.num_segments
        owned = width * target.owned_numel(rank)
        assert head.model.frozen is not None
        others = unpacked_layout(head.model.frozen.params, world_size)
        frozen_plan = make_plan(head.model.frozen, others, rank)
        np.add.at(matrix[:, rank], frozen_plan.src_rank, 2 * frozen_plan.length)
        assert forecast.optimizer_files[rank] == max(1, len(plan.source_ranks))
        assert forecast.model_files[rank] == len(models | set(frozen_plan.source_ranks))
        assert forecast.segments[rank] == segments + frozen_plan.num_segments
        assert forecast.requests[rank] == len(joined[0]) + frozen_plan.num_segments
        assert forecast.bytes_owned[rank] == owned + 2 * others.owned_numel(rank)
    assert forecast.bytes_read.tolist() == matrix.sum(axis=0).tolist()
    assert (forecast.traffic.binned(saved, world_size) == matrix).all()
    coarse = forecast.traffic.binned(saved, world_size, source_step=2, target_step=world_size)
    assert coarse.shape == (-(-saved // 2), 1) and coarse.sum() == state
    assert coarse[0, 0] == matrix[:2].sum()


def requests_of(
    state: SavedState, head: Head, world_size: int, stage: int = 3
) -> tuple[list[int], list[int], list[set[str]]]:
    """Requests, bytes and files of each target rank, from every rank's headers and the rows of the real plan."""
    requests, nbytes, files = [], [], []
    target = target_layout(head, world_size, stage)
    for rank in range(world_size):
        count, read, names = 0, 0, set()
        for number, part in enumerate(state.parts):
            layout = unpacked_layout(part.layout.params, world_size) if number else target
            plan = make_plan(part.layout, layout, rank)
            rows = extent_table(plan, part.extents, row_targets(part.layout, layout, part.dtypes))
            joined = coalesce(
                rows.file, rows.file_offset, rows.target, rows.target_offset * rows.itemsize, rows.nbytes
            )  # fmt: skip
            assert int(joined[-1].sum()) == int(rows.nbytes.sum())
            count, read = count + len(joined[0]), read + int(rows.nbytes.sum())
            names |= {rows.paths[i].name for i in np.unique(rows.file).tolist()}
        requests.append(count)
        nbytes.append(read)
        files.append(names)
    return requests, nbytes, files


def row_targets(source: Layout, target: Layout, dtypes: Any) -> list[Destination]:
    index = source.index()
    targets = []
    for sub_group in range(target.num_sub_groups):
        first = index[target.params[int(np.argmax(target.sub_group == sub_group))].name]
        if source.numel[first]:
            targets += [Destination(key, sub_group, dtype) for key, dtype in dtypes[first].items()]
    return targets


def test_tensors_that_lie_apart_in_the_file_are_not_joined(tmp_path: Path) -> None:
    write_sample(tmp_path, world_size=2, steps=[1], format="elastic")
    tag_dir = tmp_path / "global_step1"
    together = make_forecast(read_head(open_checkpoint(tag_dir)), 2)
    for path in tag_dir.glob("*optim_states.pt"):  # as a checkpoint engine that keeps no shared storage writes them
        data = torch.load(path, weights_only=False)
        for entry in data["optimizer_state_dict"]["base_optimizer_state"]:
            entry.update({key: [t.clone() for t in value] for key, value in entry.items() if isinstance(value, list)})
        torch.save(data, path)
    (tag_dir / "zeroelastic.json").unlink()
    apart = make_forecast(read_head(open_checkpoint(tag_dir)), 2)
    requests, *_ = requests_of(open_state(open_checkpoint(tag_dir)), apart.head, 2)
    assert apart.requests.tolist() == requests
    assert apart.requests.sum() > together.requests.sum()


STAGES_1_AND_2 = ("stage1_rank2", "stage1_bf16_optimizer_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3")


@pytest.mark.parametrize("name", ["rigid2", "rigid3", "elastic2", "elastic3", *STAGES_1_AND_2, "stage2_elastic_rank2"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_of_real_checkpoints_the_numbers_are_those_of_all_headers(name: str, stage: int, world_size: int) -> None:
    tag_dir = next((GOLDEN / name).glob("global_step*"))
    checkpoint = open_checkpoint(tag_dir)
    forecast = make_forecast(read_head(checkpoint), world_size, stage=stage)
    assert len(checkpoint.opened) == 2, "rank 0's headers are enough"
    state = open_state(open_checkpoint(tag_dir))
    requests, nbytes, files = requests_of(state, forecast.head, world_size, stage)
    assert forecast.requests.tolist() == requests and forecast.bytes_read.tolist() == nbytes
    assert forecast.state_bytes == state.nbytes
    for rank, names in enumerate(files):
        own = checkpoint.model_files[rank if rank < len(checkpoint.model_files) else 0].name
        optim = {n for n in names if "optim" in n}
        assert forecast.optimizer_files[rank] == max(1, len(optim))
        assert forecast.model_files[rank] == len((names - optim) | {own})


@pytest.mark.parametrize(("name", "other"), [("elastic2", "elastic3"), ("rigid3", "rigid2")])
def test_the_target_layout_is_the_one_that_deepspeed_makes_at_that_size(name: str, other: str) -> None:
    heads = [read_head(open_checkpoint(next((GOLDEN / n).glob("global_step*")))) for n in (name, other)]
    made = target_layout(heads[0], heads[1].world_size, 3)
    real = heads[1].shard.layout
    assert made.params == real.params
    assert made.sub_group.tolist() == real.sub_group.tolist() and made.offset.tolist() == real.offset.tolist()


@pytest.mark.support("Using it", "stage 1 and 2 checkpoints: plan", "exact", "the bytes that the load or reshard reads")
@pytest.mark.parametrize("name", ["rigid3", *STAGES_1_AND_2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_layout_is_that_of_the_files_which_a_reshard_writes(
    tmp_path: Path, name: str, stage: int, world_size: int
) -> None:
    """And it moves what was forecast: the headers of the result say which rank holds what."""
    head = read_head(open_checkpoint(next((GOLDEN / name).glob("global_step*"))))
    forecast = make_forecast(head, world_size, stage=stage)
    if (name, stage) == ("stage1_bf16_optimizer_rank2", 1):
        return  # no reshard writes one
    report = zeroelastic.reshard(GOLDEN / name, tmp_path / "b", world_size=world_size, stage=stage, format="rigid")
    assert report is not None and report.bytes_moved == forecast.bytes_read.sum() == forecast.state_bytes
    made = open_state(open_checkpoint(tmp_path / "b" / "global_step2"))
    target, real = target_layout(head, world_size, stage), made.parts[0].layout
    order = [target.index()[param.name] for param in real.params]
    for column in ("numel", "sub_group", "origin", "part", "offset"):
        assert getattr(target, column)[order].tolist() == getattr(real, column).tolist(), column
    held = [made.parts[0].rank_rows(rank)[1].nbytes.sum() for rank in range(world_size)]
    frozen = sum(tensor.nbytes for tensor in made.parts[1].tensors())
    assert (forecast.bytes_owned - forecast.frozen.per_target(world_size)).tolist() == held
    assert forecast.frozen.nbytes.sum() == frozen == 14


def test_a_run_with_bf16_optimizer_has_the_order_of_its_groups() -> None:
    """Whatever round_robin_gradients says: the layout of what such a run saved."""
    head = read_head(open_checkpoint(next((GOLDEN / "stage1_bf16_optimizer_rank2").glob("global_step*"))))
    config = {**head.shard.ds_config, "zero_optimization": {"stage": 1, "round_robin_gradients": True}}
    head = dataclasses.replace(head, shard=dataclasses.replace(head.shard, ds_config=config))
    real, made, dealt = head.shard.layout, target_layout(head, 2, 1), target_layout(head, 2, 2)
    assert made.params == real.params != dealt.params and made.origin.tolist() == real.origin.tolist()


def test_the_verb_plans_for_another_stage() -> None:
    report = zeroelastic.plan(GOLDEN / "stage2_rank2", world_size=3, stage=3, bandwidth="1GB")
    document = report.to_json()
    assert (document["stage"], document["target_stage"], document["amplification"]) == (2, 3, 1.0)
    written = document["reshard"]
    assert isinstance(written, dict) and (written["files_read"], written["files_written"]) == (3, 6)
    assert zeroelastic.plan(GOLDEN / "stage2_rank2", world_size=3, bandwidth="1GB").forecast.stage == 2
    done = run_command("plan", GOLDEN / "rigid2", "-n", 3, "--stage", 1, "--bandwidth", "1GB")
    assert done.returncode == 0 and "stage 3, 2 ranks, step 2; to load on 3 ranks at stage 1" in done.stdout
    assert "note: for a run with round_robin_gradients false and parameter_alignment false" in done.stdout
    with pytest.raises(UsageError, match="no ZeRO stage 4"):
        zeroelastic.plan(GOLDEN / "rigid2", world_size=3, stage=4)


# ---- a real load ----


def build(elastic: bool, stage: int) -> Any:
    """About half a million parameters, of which one layer is frozen, and a buffer."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(7)] + [torch.nn.Linear(256, 3)]
    model = torch.nn.Sequential(*layers)
    model.register_buffer("seen", torch.arange(250_000.0))
    for param in layers[2].parameters():
        param.requires_grad = False
    config = {
        "train_batch_size": 12,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "elastic_checkpoint": elastic, "round_robin_gradients": True}
        | ({"sub_group_size": 60_000} if stage == 3 else {}),
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config)
    return engine


def save(directory: str, elastic: bool, stage: int) -> None:
    engine = build(elastic, stage)
    data = torch.ones(12 // torch.distributed.get_world_size(), 256, dtype=torch.bfloat16)
    engine.backward(engine(data).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(directory)


def load(directory: str, stage: int) -> Any:
    engine = build(True, stage)
    engine.load_checkpoint(directory)
    return engine.zeroelastic_report


@pytest.mark.parametrize(
    ("elastic", "saved", "world_size", "stages"),
    [(True, 4, 3, (3, 3)), (False, 3, 4, (2, 2)), (False, 4, 3, (1, 3))],
)
def test_a_real_load_reports_what_was_forecast(
    rank_pool: RankPool, tmp_path: Path, elastic: bool, saved: int, world_size: int, stages: tuple[int, int]
) -> None:
    rank_pool.run(save, saved, str(tmp_path), elastic, stages[0])
    head = read_head(open_checkpoint(next(tmp_path.glob("global_step*"))))
    forecast = make_forecast(head, world_size, stage=stages[1])
    report = rank_pool.run(load, world_size, str(tmp_path), stages[1])[0]
    assert report.root_matches
    assert report.bytes_owned == forecast.bytes_owned.max() and report.bytes_read == forecast.bytes_read.max()
    assert report.total_bytes_read == forecast.bytes_read.sum()
    assert report.files_opened == forecast.files.max()
    assert forecast.frozen.nbytes.sum() == 2 * 256 * 257
    assert report.header_bytes == pytest.approx(int(forecast.header_bytes.max()), rel=0.05)


# ---- what is written, memory, sizes ----


@pytest.mark.parametrize("world_size", [3, 6])
@pytest.mark.parametrize("stages", [(3, 3), (3, 2), (2, 2), (2, 3)])
def test_what_a_reshard_moves_is_known_and_what_it_writes_is_estimated(
    tmp_path: Path, world_size: int, stages: tuple[int, int]
) -> None:
    write_sample(tmp_path / "four", world_size=4, steps=[1], hidden=96, sub_group_size=10**9)
    if stages[0] == 2:
        zeroelastic.reshard(tmp_path / "four", tmp_path / "two", world_size=4, stage=2)
        shutil.rmtree(tmp_path / "four")
        (tmp_path / "two").rename(tmp_path / "four")
    forecast = make_forecast(read_head(open_checkpoint(tmp_path / "four/global_step1")), world_size, stage=stages[1])
    options = ReshardOptions(world_size=world_size, stage=stages[1])
    report = run_reshard(plan_reshard(find_source(tmp_path / "four"), options), tmp_path / "other")
    assert report.bytes_moved == forecast.bytes_read.sum() == forecast.state_bytes
    assert forecast.reshard_bytes_written == pytest.approx(report.file_bytes, rel=0.02)
    assert options.max_memory == RESHARD_MEMORY_LIMIT


def test_memory_of_the_tables_is_within_the_estimate_and_the_promise(tmp_path: Path) -> None:
    groups = [[Param(f"p{i}", (97,)) for i in range(3000)]]
    write_checkpoint(tmp_path, world_size=3, groups=groups, frozen=None, sub_group_size=None)
    forecast = make_forecast(read_head(open_checkpoint(tmp_path)), 2)
    state = open_state(open_checkpoint(tmp_path))
    part, target = state.parts[0], target_layout(forecast.head, 2, 3)
    targets = row_targets(part.layout, target, part.dtypes)
    tracemalloc.start()
    rows = extent_table(make_plan(part.layout, target, 0), part.extents, targets)
    table = CopyTable(rows.file, rows.file_offset, rows.target, rows.target_offset * rows.itemsize, rows.nbytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    estimate = int(forecast.memory[0]) - LOAD_STAGING_BYTES - int(forecast.head.module_bytes(2)[0])
    assert len(table.nbytes) == forecast.segments[0]
    assert estimate / 4 < peak <= estimate
    assert forecast.memory.max() < LOAD_MEMORY_LIMIT


def test_staging_is_that_of_a_load() -> None:
    from zeroelastic.deepspeed.fill import STAGING_BYTES

    assert STAGING_BYTES == LOAD_STAGING_BYTES


@pytest.mark.parametrize("world_size", [0, -1, MAX_WORLD_SIZE + 1])
def test_a_world_size_that_there_is_not_is_refused(world_size: int) -> None:
    with pytest.raises(UsageError, match=f"not {world_size}"):
        make_forecast(made_head([3], [], world_size=2), world_size)


def timed(head: Head, world_size: int) -> tuple[Forecast, float]:
    """And the processor time that it took."""
    began = time.process_time()
    forecast = make_forecast(head, world_size)
    return forecast, time.process_time() - began


def test_thousands_of_ranks_take_a_moment() -> None:
    """126 layers as of a large language model, with 4096 ranks on one side and 3000 on the other."""
    layer = [16384**2, 16384 * 1024, 16384 * 1024, 16384**2, *[16384 * 53248] * 3, 16384, 16384]
    head = made_head([128256 * 16384, *layer * 126, 16384, 128256 * 16384], [], world_size=4096, sub_group_size=10**9)
    forecast, seconds = timed(head, 3000)
    assert seconds < 2
    assert forecast.amplification == 1.0 and forecast.state_bytes == 10 * sum(head.shard.layout.numel.tolist())
    for rank in (0, 1, 1499, 2999):
        plan: Plan = make_plan(head.shard.layout, target_layout(head, 3000, 3), rank)
        assert forecast.segments[rank] == 3 * plan.num_segments
        assert forecast.bytes_read[rank] == 10 * int(plan.length.sum())
        assert forecast.optimizer_files[rank] == len(plan.source_ranks)


def test_parameters_all_of_different_sizes_are_counted_in_bounded_memory() -> None:
    head = made_head(list(range(5000, 8000)), [], world_size=2048)
    tracemalloc.start()
    forecast, _ = timed(head, 1536)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert forecast.amplification == 1.0 and forecast.bytes_read.tolist() == forecast.bytes_owned.tolist()
    assert peak < 700 << 20


@settings(max_examples=10)
@given(saved=st.integers(1, 6), world_size=st.integers(1, 6))
def test_nothing_at_all_is_read_once_as_well(saved: int, world_size: int) -> None:
    forecast = make_forecast(made_head([], [0], world_size=saved), world_size)
    assert forecast.amplification == 1.0 and not forecast.bytes_read.any() and (forecast.files == 2).all()
