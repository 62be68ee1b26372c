"""A save that is killed, at every boundary of its calls: `latest` names a whole checkpoint, and nothing older is lost.

SIGKILL leaves the files as they are at that moment. So one run saves under a lock that all its ranks take for each call
which changes a file, and before each of these calls, and each collective, the whole directory is copied: that is what a
kill of all ranks there leaves, and what one after the call before it does. Every copy must hold then what a directory
must hold after a crash.
"""

from __future__ import annotations

import builtins
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import topologies
import torch.distributed as dist
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


def tree(directory: Path, *, visible: bool = False) -> str:
    """One hash of all names and contents below a directory; ``visible``: but for saves that are being made."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if visible and is_unfinished(path.relative_to(directory).parts[0]):
            continue
        found.update(str(path.relative_to(directory)).encode() + b"\0")
        if path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


class Images:
    """Copies of a directory at the boundaries of calls, each state of it once; ``trace`` has the calls in order."""

    def __init__(self, root: Path, images: Path) -> None:
        self.root, self.images, self.depth = root, images, 0
        self.lock = os.open(images / "lock", os.O_RDWR | os.O_CREAT)
        self.threads = threading.RLock()
        self.watching = False
        self.last = ()
        self.own = threading.local()  # calls: those that taking an image makes are not watched

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.threads:
            self.depth += 1
            if self.depth == 1:
                fcntl.flock(self.lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self.depth -= 1
                if self.depth == 0:
                    fcntl.flock(self.lock, fcntl.LOCK_UN)

    def passes(self) -> bool:
        return not self.watching or getattr(self.own, "calls", False)

    def take(self, name: str) -> None:
        if self.passes():
            return
        self.own.calls = True
        with self.alone():
            now = tuple(
                (str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                for path in sorted(self.root.rglob("*"))
                for found in (path.lstat(),)
            )
            if now != self.last:
                image = self.images / tree(self.root)
                if not image.exists():
                    shutil.copytree(self.root, image)
            self.last = now
            with REAL_OPEN(self.images / "trace", "a") as file:
                file.write(f"{dist.get_rank()} {name}\n")
        self.own.calls = False

    def changing(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A call that changes files, and no rank is in the middle of another."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.passes():
                return call(*args, **kwargs)
            with self.alone():
                self.take(name)
                return call(*args, **kwargs)

        return run

    def meeting(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A collective: it ends when others have come, so that it is not under the lock."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.take(name)
            return call(*args, **kwargs)

        return run


REAL_OPEN = builtins.open


def patch(images: Images) -> None:
    from zeroelastic.runs import tag_directory
    from zeroelastic.torch_file import image, save

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "link", "fsync", "chmod", "utime"):
        setattr(os, name, images.changing(getattr(os, name), name))
    tag_directory.exchange = images.changing(tag_directory.exchange, "exchange")  # type: ignore[assignment]
    for name in ("write_skeleton", "reserve", "write_segments", "_complete", "write_fully"):
        setattr(save, name, images.changing(getattr(save, name), name))
    for name in ("reserve", "write_past_cache", "write_fully"):
        setattr(image, name, images.changing(getattr(image, name), name))
    os.pwrite = images.changing(os.pwrite, "pwrite")  # type: ignore[assignment]
    for name in ("all_reduce", "all_gather", "broadcast_object_list", "barrier"):
        setattr(dist, name, images.meeting(getattr(dist, name), name))

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        call = images.changing(REAL_OPEN, "open") if any(c in mode for c in "wxa+") else REAL_OPEN
        return call(path, mode, *args, **kwargs)

    builtins.open = opened  # type: ignore[assignment]


def save_under_watch(directory: str, copies: str, behind: bool, job: Job | TopologyJob) -> dict[int, Any]:
    """Saves: the first, one under a new tag, that tag again by exchange, and again by two renames. States by step.

    In the background, training goes a step on before it waits. Frozen weights change before the second save.
    """
    from zeroelastic.deepspeed.save.background import saving_in_background
    from zeroelastic.runs import tag_directory

    engine = engine_of(job)
    states: dict[int, Any] = {}
    images = Images(Path(directory), Path(copies))
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    patch(images)
    for step, tag in enumerate(("first", "second", "second", "second")):
        take_step(engine, 2 * step)
        if step == 1 and isinstance(job, Job):
            engine.module.adapter.weight.ds_tensor.add_(1.0)
        states[engine.global_steps] = state_of(engine)
        if step == 3:
            tag_directory.exchange = lambda staging_dir, place: False  # type: ignore[assignment]
        images.watching = True
        with saving_in_background(engine, behind):
            engine.save_checkpoint(directory, tag=tag, client_state={"note": tag})
        take_step(engine, 2 * step + 1)
        zeroelastic.wait_for_save(engine)
        images.take("saved")
        images.watching = False
        dist.barrier()
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
    copies.mkdir()
    states = rank_pool.run(save_under_watch, 2, str(root), str(copies), behind, job, timeout=280)[0]
    trace = (copies / "trace").read_text().splitlines()
    writing = ("write_past_cache", "pwrite") if behind else ("write_segments",)
    for name in ("exchange", "rename", "fsync", "open", "mkdir", "all_reduce", *writing):
        assert any(line.endswith(f" {name}") for line in trace), name
    images = [path for path in sorted(copies.iterdir()) if path.is_dir()]
    committed: dict[str, Path] = {}
    mended = 0
    for image in images:
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
        committed[tree(image, visible=True)] = image
    assert len(trace) > 200 and len(images) > 40 and mended >= 1, (len(trace), len(images), mended)
    steps = set()
    resumed = rank_pool.run(load_images, 3, other, list(map(str, committed.values())), timeout=280)[0]
    for image, (step, state, matches) in zip(committed.values(), resumed, strict=True):
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
