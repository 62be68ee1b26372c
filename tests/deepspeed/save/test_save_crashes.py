"""A save that is killed, at every boundary of its calls: `latest` names a whole checkpoint, and nothing older is lost.

SIGKILL leaves the files as they are at that moment. So before each call by which a rank of one run changes a file, the
other ranks are stopped and the directory is copied: that is what a kill of all ranks there leaves. Every copy must hold
what a directory must hold after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import topologies
from boundaries import Boundaries, distinct
from extended import with_swept
from topologies import TopologyJob
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.runs.tag_directory import is_unfinished, recover
from zeroelastic.testing import RankPool, compare_states
from zeroelastic.verbs.verify.verify import verify_checkpoint

JOB = Job()
SLICED = {
    "AutoTP": TopologyJob("llama", tp=2, precision="bf16", frozen=True),
    "MoE": TopologyJob("moe", ep=2, stage=2, precision="bf16"),
}
CASES: dict[str, tuple[Job | TopologyJob, bool]] = {
    f"{name}, {'in the background' if behind else 'waited for'}": (job, behind)
    for name, job in {"full": JOB, **SLICED}.items()
    for behind in (False, True)
}
"""A job, and whether training goes on while it saves."""


def engine_of(job: Job | TopologyJob) -> Any:
    return build_engine(job) if isinstance(job, Job) else topologies.build(job)


def take_step(engine: Any, step: int) -> None:
    (topologies.step if hasattr(engine, "built") else train_step)(engine, step)


def state_of(engine: Any) -> dict[str, Any]:
    """The whole state; with slices, of whole tensors."""
    return topologies.logical_hashes(engine) if hasattr(engine, "built") else look(engine)[0]


def save_under_watch(directory: str, copies: str, behind: bool, job: Job | TopologyJob) -> dict[int, Any]:
    """Saves: the first, one under a new tag, that tag again by exchange, and again by two renames. States by step.

    In the background, training goes a step on before it waits. Frozen weights change before the second save.
    """
    from zeroelastic.deepspeed.save.background import saving_in_background
    from zeroelastic.runs import tag_directory

    engine = engine_of(job)
    states: dict[int, Any] = {}
    Path(directory).mkdir(exist_ok=True)
    boundaries = Boundaries(directory, copies)
    boundaries.begin()
    for step, tag in enumerate(("first", "second", "second", "second")):
        take_step(engine, 2 * step)
        if step == 1 and isinstance(job, Job):
            engine.module.adapter.weight.ds_tensor.add_(1.0)
        states[engine.global_steps] = state_of(engine)
        if step == 3:
            tag_directory.exchange = lambda staging_dir, place: False  # type: ignore[assignment]
        with saving_in_background(engine, behind):
            engine.save_checkpoint(directory, tag=tag, client_state={"note": tag})
        take_step(engine, 2 * step + 1)
        zeroelastic.wait_for_save(engine)
    boundaries.end()
    return states


def load_images(job: Job | TopologyJob, copies: list[str]) -> list[tuple[int, dict[str, Any], bool]]:
    engine = engine_of(job)
    found = []
    for copy in copies:
        engine.load_checkpoint(copy)
        found.append((engine.global_steps, state_of(engine), engine.zeroelastic_report.root_matches))
    return found


SWEPT = {"full, in the background", "AutoTP, waited for", "MoE, in the background"}
"""Cases that only `make sweep` runs."""


@pytest.mark.extended
@pytest.mark.parametrize("case", with_swept(CASES, SWEPT))
def test_every_boundary_of_a_save_leaves_a_checkpoint_that_verifies_and_resumes(
    rank_pool: RankPool, tmp_path: Path, case: str
) -> None:
    job, behind = CASES[case]
    other = JOB.other() if isinstance(job, Job) else job.other(tp=1, ep=1)
    root, copies = tmp_path / "run", tmp_path / "images"
    states = rank_pool.run(save_under_watch, 2, str(root), str(copies), behind, job, timeout=280)[0]
    committed: list[Path] = []
    mended = 0
    for image in distinct(copies):
        latest = image / "latest"
        inside = {name for name in os.listdir(image) if (image / name).is_dir()}
        tags = [name for name in inside if not is_unfinished(name)]
        for tag in tags:  # whatever has the name of a tag is whole
            assert verify_checkpoint(image / tag).valid and read_record(image / tag) is not None, (image, tag)
        if not latest.exists():
            assert tags in ([], ["first"])
            continue
        named = latest.read_text()
        if named not in tags:  # between the two renames
            mended += 1
            assert named == "second"
        assert "first" in tags
        committed.append(image)
    num_copies = len(os.listdir(copies))
    assert num_copies > 40 and mended >= 1, (num_copies, mended)
    steps = set()
    resumed = rank_pool.run(load_images, 3, other, list(map(str, committed)), timeout=280)[0]
    for image, (step, state, matches) in zip(committed, resumed, strict=True):
        assert matches and compare_states(states[step], state) == [], image
        steps.add(step)
        assert not recover(image / "second")
    assert steps == {1, 3, 5, 7}
    assert {*os.listdir(root)} == {"first", "latest", "second", "zero_to_fp32.py", "zero_to_torch.py"}


def test_everything_is_durable_before_it_gets_its_name(rank_pool: RankPool, tmp_path: Path) -> None:
    """In the order of calls: every file and its directory are synced before the rename, and that before `latest`."""
    calls = rank_pool.run(order_of_calls, 2, str(tmp_path / "run"), True)
    for rank, mine in enumerate(calls):
        for kind in ("model", "optim"):
            assert any(call == "fsync" and f"rank_{rank}" in path and kind in path for call, path in mine)
    first = calls[0]
    moved = next(i for i, (call, path) in enumerate(first) if call == "rename" and is_unfinished(Path(path).name))
    record = next(i for i, (call, path) in enumerate(first) if call == "fsync" and RECORD_NAME in path)
    renamed = next(i for i, (call, path) in enumerate(first) if call == "replace" and RECORD_NAME in path)
    latest = next(i for i, (call, path) in enumerate(first) if call == "replace" and ".latest." in path)
    staging_dir = first[moved][1]
    synced = [i for i, (call, path) in enumerate(first) if call == "fsync" and path == staging_dir]
    above = [i for i, (call, path) in enumerate(first) if call == "fsync" and path == str(tmp_path / "run")]
    assert record < renamed < min(synced) < moved and any(moved < i < latest for i in above) and max(above) > latest
    assert all(i < record for i, (call, path) in enumerate(first) if call == "fsync" and path.endswith(".pt"))


def test_nothing_is_flushed_where_the_options_say_so(rank_pool: RankPool, tmp_path: Path) -> None:
    for calls in rank_pool.run(order_of_calls, 2, str(tmp_path / "run"), False):
        assert not any(call == "fsync" for call, _ in calls)
    assert verify_checkpoint(tmp_path / "run" / "global_step1").valid


def noted(calls: list[tuple[str, str]], name: str, call: Callable[..., None], src: Any, dst: Any) -> None:
    calls.append((name, os.fspath(src)))
    call(src, dst)


def order_of_calls(directory: str, fsync: bool) -> list[tuple[str, str]]:
    engine = build_engine(Job(options={"fsync": fsync}))
    train_step(engine, 0)
    calls: list[tuple[str, str]] = []
    flush = os.fsync

    def told(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        flush(fd)

    os.fsync = told  # type: ignore[assignment]
    for name in ("rename", "replace"):
        setattr(os, name, partial(noted, calls, name, getattr(os, name)))
    engine.save_checkpoint(directory)
    return calls
