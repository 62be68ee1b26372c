"""State and parameters on NVMe, with real swap files: saved from them, loaded into them, at any world size.

Sub-groups of at least 1 MiB are swapped and the small ones stay in memory, so every checkpoint here holds both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import logged, process_status
from saves import Saved, Saver, check_resumed, save_once
from training import Job, Outcome, attempt, build_engine, resume, resume_and_save, train_and_save, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.testing import RankPool, compare_states, fingerprint

TABLES = (110_000, 40_000)
"""Rows of 16: on two ranks both tables are swapped, on three only the first."""


def can_swap() -> str:
    """Why DeepSpeed cannot swap on this machine; empty when it can."""
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError as error:
        return str(error)
    return "" if AsyncIOBuilder().is_compatible() else "libaio is not installed, so DeepSpeed has no async_io op"


@pytest.fixture(scope="module", autouse=True)
def _needs_the_op(rank_pool: RankPool) -> None:
    reason = rank_pool.run(can_swap, 1)[0]  # on a rank: DeepSpeed changes the environment of what imports it
    if reason:
        pytest.skip(reason)


def on_nvme(job: Job, folder: Path, *, params: bool = False, pipelined: bool = False) -> Job:
    """The job with its optimizer state on NVMe, and with ``params`` its parameters as well."""
    folder.mkdir(parents=True, exist_ok=True)
    device = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    pipelines = {"buffer_count": 10, "pipeline_read": pipelined, "pipeline_write": pipelined}
    zero: dict[str, Any] = {"offload_optimizer": {**device, **pipelines}}
    if params:
        zero["offload_param"] = {**device, "max_in_cpu": 0, "buffer_size": 2_000_000}
    return replace(job, zero=zero)


JOB = Job(tables=TABLES)


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


@pytest.fixture(scope="module")
def nvme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs that save have their swap files."""
    return tmp_path_factory.mktemp("nvme")


def in_swap_files(job: Job, directory: str) -> tuple[Outcome, list[bool], list[bool]]:
    """Resume, and say which sub-groups are swapped and which of those keep nothing in memory."""
    kept: list[Any] = []

    def build(job: Job) -> Any:
        engine = build_engine(job)
        kept.append(engine)
        return engine

    import training

    training.build_engine = build
    outcome = resume(job, directory)
    optimizer = kept[0].optimizer
    swapped = [optimizer._swappable_optimizer_subgroup(i) for i in range(len(optimizer.fp16_groups))]
    flats = optimizer.fp32_partitioned_groups_flat
    state = optimizer.optimizer.state
    pipelined = hasattr(optimizer.optimizer_swapper, "swap_ops")  # leaves views of its buffers behind
    empty = [
        pipelined or (flats[i].numel() == 0 and state[flats[i]]["exp_avg"].numel() == 0)
        for i, away in enumerate(swapped)
        if away
    ]
    return outcome, swapped, empty


@pytest.mark.support("Offload", "`offload_optimizer: nvme`", "exact", "streamed from and into the swap files")
@pytest.mark.parametrize(
    ("save_world_size", "world_size", "pipelined", "job"),
    [
        (2, 3, False, JOB),
        (3, 2, True, JOB),
        (2, 1, False, replace(JOB, precision="fp16", optimizer="cpu_adam")),
    ],
    ids=["up", "down_pipelined", "down_fp16_cpu_adam"],
)
def test_state_on_nvme_resumes_bit_exact(
    rank_pool: RankPool,
    saved: Saver,
    nvme: Path,
    tmp_path: Path,
    save_world_size: int,
    world_size: int,
    pipelined: bool,
    job: Job,
) -> None:
    checkpoint = saved(on_nvme(job, nvme, pipelined=pipelined), save_world_size)
    assert not (checkpoint.tag_dir / "offloaded_tensors").exists()
    run = on_nvme(job.other(), tmp_path / "nvme", pipelined=pipelined)
    results = rank_pool.run(in_swap_files, world_size, run, checkpoint.directory)
    check_resumed(checkpoint, [outcome for outcome, _, _ in results], job)
    assert results[0][0].report.root_matches and results[0][0].report.loaded_root == checkpoint.root
    for _, swapped, empty in results:
        assert any(swapped) and not all(swapped) and all(empty)


@pytest.mark.support("Offload", "`offload_optimizer: nvme`", "exact", "also to and from runs without NVMe")
@pytest.mark.parametrize(("to_nvme", "world_size"), [(True, 2), (False, 3)], ids=["to_nvme", "from_nvme"])
def test_checkpoints_move_between_nvme_and_memory(
    rank_pool: RankPool, saved: Saver, nvme: Path, tmp_path: Path, to_nvme: bool, world_size: int
) -> None:
    checkpoint = saved(JOB if to_nvme else on_nvme(JOB, nvme), 5 - world_size)
    run = on_nvme(JOB.other(), tmp_path / "nvme") if to_nvme else JOB.other()
    outcomes = rank_pool.run(resume, world_size, run, checkpoint.directory)
    check_resumed(checkpoint, outcomes, JOB)
    target = str(tmp_path / "again")
    run = on_nvme(JOB.other(), tmp_path / "nvme2") if to_nvme else JOB.other()
    assert set(rank_pool.run(resume_and_save, world_size, run, checkpoint.directory, target)) == {checkpoint.root}


@pytest.mark.support("Offload", "`offload_param: nvme`", "exact", "frozen parameters included")
@pytest.mark.parametrize(("save_world_size", "world_size", "back"), [(2, 3, True), (2, 1, False)])
def test_parameters_on_nvme_resume_bit_exact(
    rank_pool: RankPool, saved: Saver, nvme: Path, tmp_path: Path, save_world_size: int, world_size: int, back: bool
) -> None:
    """The frozen table is on NVMe at every size here; DeepSpeed alone saves one element of it."""
    job = Job(tables=(110_000,), frozen_table=110_000)
    checkpoint = saved(on_nvme(job, nvme, params=True), save_world_size)
    run = on_nvme(job.other(), tmp_path / "nvme", params=True) if back else job.other()
    outcomes = rank_pool.run(resume, world_size, run, checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)
    assert outcomes[0].report.root_matches


def save_twice_and_reload(job: Job, directory: str) -> tuple[str, str, float, float]:
    """Save, train on, load into the run that has moved on, and save under the same tag: both content roots."""
    engine = build_engine(job)
    for step in range(2):
        train_step(engine, step)
    engine.save_checkpoint(directory, tag="one")
    first = read_record(Path(directory) / "one")
    expected = train_step(engine, 2)
    train_step(engine, 3)
    engine.load_checkpoint(directory, tag="one")
    engine.save_checkpoint(directory, tag="one")
    second = read_record(Path(directory) / "one")
    assert first is not None and second is not None
    return first.content_root, second.content_root, expected, train_step(engine, 2)


def test_a_run_on_nvme_goes_back_to_its_own_checkpoint(rank_pool: RankPool, tmp_path: Path) -> None:
    for first, second, expected, got in rank_pool.run(
        save_twice_and_reload, 2, on_nvme(JOB, tmp_path / "nvme"), str(tmp_path / "ckpt")
    ):
        assert first == second
        assert got == expected


def test_checkpoint_from_before_the_first_step_on_nvme(rank_pool: RankPool, tmp_path: Path) -> None:
    outcome = rank_pool.run(train_and_save, 2, on_nvme(JOB, tmp_path / "a"), str(tmp_path / "ckpt"), before=0)[0]
    run = on_nvme(JOB.other(), tmp_path / "b")
    outcomes = rank_pool.run(resume, 1, run, str(tmp_path / "ckpt"), before=0)
    check_resumed(Saved(str(tmp_path / "ckpt"), outcome), outcomes, JOB)


@pytest.mark.support(
    "Offload", "`offload_optimizer: nvme`, saved by DeepSpeed alone", "refused", "the state is not in its files"
)
def test_what_stock_deepspeed_saved_from_nvme_is_refused_by_name(rank_pool: RankPool, tmp_path: Path) -> None:
    stock = on_nvme(replace(JOB, elastic=False, installed=False), tmp_path / "a")
    rank_pool.run(train_and_save, 2, stock, str(tmp_path / "ckpt"))
    for world_size in (2, 3):
        run = on_nvme(replace(JOB, installed=True), tmp_path / f"b{world_size}")
        for name, message in rank_pool.run(attempt, world_size, run, str(tmp_path / "ckpt")):
            assert name == "CheckpointError"
            assert "NVMe" in message and "offloaded_tensors" in message and '"format": "elastic"' in message


def test_a_rigid_save_from_nvme_has_no_commit_record(rank_pool: RankPool, tmp_path: Path) -> None:
    """Its files lack the state, so nothing vouches for them; DeepSpeed's own copy of the swap files is made."""
    job = on_nvme(replace(JOB, elastic=False), tmp_path / "nvme")
    rank_pool.run(train_and_save, 2, job, str(tmp_path / "ckpt"))
    tag_dir = tmp_path / "ckpt" / "global_step3"
    assert (tag_dir / "offloaded_tensors" / "rank00").is_dir()
    assert not (tag_dir / "zeroelastic.json").exists()


def peak_memory(job: Job, directory: str) -> tuple[int, int, int, int]:
    """Bytes of anonymous memory that a save and a load add at most; bytes of state; of the largest sub-group."""
    engine = build_engine(job)
    train_step(engine, 0)
    optimizer = engine.optimizer
    numels = [int(numel) for numel in optimizer.fp16_partitioned_groups_flat_numel]
    return (
        added_memory(lambda: engine.save_checkpoint(directory)),
        added_memory(lambda: engine.load_checkpoint(directory)),
        12 * sum(numels),
        12 * max(numels),
    )


def added_memory(action: Callable[[], object]) -> int:
    action()  # what is made once is made here
    peak = before = process_status("RssAnon")
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, process_status("RssAnon"))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    stop.set()
    watcher.join()
    return peak - before


@pytest.mark.support("Offload", "`offload_optimizer: nvme`", "exact", "in bounded memory")
def test_memory_does_not_grow_with_the_swapped_state(rank_pool: RankPool, tmp_path: Path) -> None:
    """Five sub-groups of 27 MiB each: neither a save nor a load adds as much anonymous memory as one of them has."""
    job = on_nvme(Job(tables=(150_000,) * 5, sub_group_size=1_000), tmp_path / "nvme")
    saving, loading, state, largest = rank_pool.run(peak_memory, 1, job, str(tmp_path / "ckpt"))[0]
    assert state > 4 * largest and largest > 27 << 20
    assert saving < largest and loading < largest


@pytest.mark.parametrize("is_swapped", [True, False])
def test_what_is_new_to_the_optimizer_has_no_moments_yet(
    rank_pool: RankPool, saved: Saver, nvme: Path, tmp_path: Path, is_swapped: bool
) -> None:
    """Unfrozen parameters share swapped and other sub-groups with restored ones: zero moments, at their step."""
    checkpoint = saved(on_nvme(JOB, nvme), 2)
    job = JOB.other(frozen=False, sub_group_size=10**7, options={"verify": True, "on_mismatch": "initialize"})
    outcome = rank_pool.run(resume, 3, on_nvme(job, tmp_path / "nvme") if is_swapped else job, checkpoint.directory)[0]
    adapter = {"adapter.weight": (7, 16), "adapter.bias": (7,)}
    lines = compare_states(checkpoint.outcome.state, outcome.state)
    known = (*adapter, "/params: ")
    assert [line for line in lines if not any(name in line for name in known)] == []
    for name, shape in adapter.items():
        assert outcome.state[f"weight/{name}"] == checkpoint.outcome.state[f"weight/{name}"]
        for key in ("exp_avg", "exp_avg_sq"):
            zeros = fingerprint({"": torch.zeros(shape)})[""]
            assert outcome.state[f"state/{name}/{key}"] == zeros, (name, key)
        assert outcome.state[f"scalar/{name}/step"] == 3
    assert any("frozen in the checkpoint and trained now" in line for line in outcome.report.changed)


def save_in_the_background(job: Job, directory: str) -> tuple[bool, str | None, list[str]]:
    engine = build_engine(job)
    train_step(engine, 0)
    said = logged("deepspeed.save.background", logging.WARNING)
    for tag in ("one", "two"):
        engine.save_checkpoint(directory, tag=tag)
    threads = any(thread.name == "zeroelastic-save" for thread in threading.enumerate())
    record = read_record(Path(directory) / "two")
    return threads, record.tag if record is not None else None, said


@pytest.mark.support("Using it", '`"async_save"`', "exact", "waited for with NVMe offload and tensor parallelism")
def test_a_save_in_the_background_is_waited_for(rank_pool: RankPool, tmp_path: Path) -> None:
    """A snapshot would take the memory that NVMe is there to save; that is said once."""
    job = on_nvme(replace(JOB, options={"async_save": True}), tmp_path / "nvme")
    results = rank_pool.run(save_in_the_background, 2, job, str(tmp_path / "ckpt"))
    assert [result[:2] for result in results] == [(False, "two")] * 2
    assert len(results[0][2]) == 1 and "NVMe" in results[0][2][0] and results[1][2] == []
