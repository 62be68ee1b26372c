"""Uploads behind training: what resumes from a store, and what a store holds wherever an upload is killed or fails."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import fsspec.implementations.local
import pytest
import torch.distributed as dist
from extended import with_swept
from places import TESTS
from programs import run_python
from saved_files import logged, record_of
from saves import MOUNTS_NEED, Nodes, Saved, Saver, can_mount, check_resumed, on_nodes, save_once
from stores import S3Server, forget_clients
from training import Job, Outcome, build_engine, look, raised, resume, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.tag_files import UNFINISHED_NAME
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save import after_commit
from zeroelastic.deepspeed.save.after_commit import Uploads, uploads
from zeroelastic.deepspeed.save.directory import SaveDirectory
from zeroelastic.io import atomic
from zeroelastic.io.atomic import sizes_below
from zeroelastic.io.paths import as_path
from zeroelastic.io.remote import RemotePath
from zeroelastic.observers import Uploaded
from zeroelastic.testing import RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

support = pytest.mark.support
SECTION = "Checkpoint engines and storage"

TAG = "global_step3"


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    server: S3Server = request.getfixturevalue("calm")
    yield server.url(f"upload-{tmp_path.name}")
    server.fault = None


def in_store(url: str) -> RemotePath:
    path = as_path(url)
    return path if isinstance(path, RemotePath) else RemotePath("file", str(path))


def names(url: str) -> set[str]:
    """The files below a URL."""
    forget_clients()
    return {*sizes_below(in_store(url))}


_contents: dict[str, bytes] = {}
"""Of objects that were put whole, by their ETag, which is the MD5 of the content."""


@functools.cache
def s3_client(endpoint: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=endpoint)


def objects_below(url: str) -> dict[str, bytes]:
    """The content of the objects below a URL, read without our own clients."""
    if url.startswith("file://"):
        root = Path(url.removeprefix("file://"))
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = s3_client(os.environ["AWS_ENDPOINT_URL"])
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("Contents", ())
    for entry in found:
        if entry["ETag"] not in _contents:
            _contents[entry["ETag"]] = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
    return {entry["Key"].removeprefix(f"{prefix}/"): _contents[entry["ETag"]] for entry in found}


def put_objects(content: Mapping[str, bytes], url: str) -> str:
    for name, data in content.items():
        atomic.put_object(in_store(url) / name, data)
    return url


def latest(url: str) -> str:
    path = as_path(url) / "latest"
    return path.read_text() if isinstance(path, Path) else path.system.cat_file(path.path).decode()


def save_and_upload(job: Job, directory: str) -> tuple[Outcome, list[Any]]:
    """Save twice while training goes on; what the run saw at the last save, and the events of uploads."""
    events: list[Any] = []
    unsubscribe = zeroelastic.subscribe(events.append)
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    for step in (1, 2):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    losses = [train_step(engine, step) for step in (3, 4)]
    zeroelastic.wait_for_save(engine)
    assert uploads.wait(60) == []
    unsubscribe()
    return Outcome(state, seen, losses), [event for event in events if isinstance(event, Uploaded)]


# --- what is uploaded -------------------------------------------------------------------------------------------------


@support(SECTION, '`"upload"`: committed tags uploaded to `s3://` and other stores, behind training', "exact")
@pytest.mark.parametrize(
    ("store", "job"),
    [
        pytest.param("s3", Job(), id="s3, stage 3"),
        pytest.param("file", Job(stage=2), id="file, stage 2"),
        pytest.param("file", Job(elastic=False), id="file, rigid"),
        pytest.param("s3", Job(options={"verify": True, "async_save": True}), id="s3, background"),
    ],
    indirect=["store"],
)
def test_what_is_uploaded_resumes_at_other_sizes(rank_pool: RankPool, store: str, tmp_path: Path, job: Job) -> None:
    with_upload = replace(job, options={**job.options, "upload": store})
    ranks = rank_pool.run(save_and_upload, 4, with_upload, str(tmp_path / "run"))
    tags = ("global_step1", TAG)
    local = {f"{tag}/{path.name}" for tag in tags for path in (tmp_path / "run" / tag).iterdir()}
    assert names(store) == local | {"latest"} and latest(store) == TAG
    assert [(event.tag, event.url.rpartition("/")[2]) for event in ranks[0][1]] == [(tag, tag) for tag in tags]
    assert ranks[0][1][1].bytes == sum(record_of(tmp_path / "run" / TAG).files.values()) and not ranks[1][1]
    shutil.rmtree(tmp_path / "run")
    check_resumed(Saved("", ranks[0][0]), rank_pool.run(resume, 3, job.other(options={"verify": True}), store), job)
    assert verify_checkpoint(as_path(f"{store}/global_step1")).valid


@support(SECTION, '`"upload"` from node-local disks', "exact", "each node its own files")
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_each_node_uploads_the_files_of_its_disk(
    rank_pool: RankPool, calm: S3Server, tmp_path: Path, stage: int
) -> None:
    if not can_mount():
        pytest.skip(MOUNTS_NEED)
    url, nodes = calm.url(f"nodes{stage}"), Nodes(tmp_path)
    job = Job(stage=stage, config={"checkpoint": {"use_node_local_storage": True}})
    with_upload = replace(job, options={**job.options, "upload": url})
    outcome = rank_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), save_and_upload, with_upload, nodes.path)[0][0]
    record = read_record(as_path(url) / TAG)
    assert record is not None
    assert names(f"{url}/{TAG}") == {*record.files, RECORD_NAME}
    puts = [request.path.rpartition(f"/{TAG}/")[2] for request in calm.requests if request.method == "PUT"]
    assert sorted(name for name in puts if name in record.files) == sorted(record.files), "a file is put once"
    check_resumed(Saved("", outcome), rank_pool.run(resume, 3, job.other(config={}), url), job)


def save_to_url(job: Job, url: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.save_checkpoint(url))


@support(SECTION, "`save_checkpoint` to a URL", "refused", 'save to a directory, with `"upload"`')
@pytest.mark.parametrize("stage", [3, 0])
def test_a_save_to_a_url_says_what_to_do(rank_pool: RankPool, stage: int) -> None:
    for kind, text in rank_pool.run(save_to_url, 2, Job(stage=stage, options={}), "s3://bucket/run"):
        assert kind == "UsageError" and "s3://bucket/run: is a URL" in text and '"upload"' in text


# --- one process, without DeepSpeed -----------------------------------------------------------------------------------


def committed(tag_dir: Path, **changes: Any) -> SaveDirectory:
    """What a save has left of the tag that it has committed there."""
    facts = {
        "run_dir": tag_dir.parent,
        "place": tag_dir,
        "tag_dir": tag_dir,
        "tag": tag_dir.name,
        "save_id": record_of(tag_dir).save_id,
        "save_latest": True,
        "rank": 0,
        "leaders": (0, 0),
        "elsewhere": frozenset(),
    }
    return cast(SaveDirectory, SimpleNamespace(**{**facts, **changes}))


def quick(url: str, **options: Any) -> Options:
    return Options(upload=url, store_retries=0, **options)


def step_often(step: Callable[[], None]) -> None:
    """Have ``step`` called after each request that changes a store, and within the copy of a file.

    Between two requests a store of objects does not change: what a kill before the next one leaves is the same.
    """
    import s3fs

    call_s3, copy = s3fs.S3FileSystem._call_s3, fsspec.implementations.local.LocalFileSystem.cp_file

    async def call(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call_s3(self, method, *args, **kwargs)
        if not method.startswith(("get", "head", "list")):
            step()
        return answer

    def copy_in_two(self: Any, src: str, dst: str, **kwargs: Any) -> None:
        os.makedirs(os.path.dirname(dst), exist_ok=True)
        with open(src, "rb") as source, open(dst, "wb") as target:
            data = source.read()
            target.write(data[: len(data) // 2])
            target.flush()
            step()
        copy(self, src, dst, **kwargs)
        step()

    def stepped(change: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            step()
            change(*args, **kwargs)

        return run

    mock.patch.object(s3fs.S3FileSystem, "_call_s3", call).start()
    mock.patch.object(fsspec.implementations.local.LocalFileSystem, "cp_file", copy_in_two).start()
    remove = fsspec.implementations.local.LocalFileSystem.rm_file
    mock.patch.object(fsspec.implementations.local.LocalFileSystem, "rm_file", stepped(remove)).start()
    mock.patch.object(atomic, "write_atomically", stepped(atomic.write_atomically)).start()


def upload_and(step: Callable[[], None], run: str, url: str) -> None:
    """Upload the tags b and a; ``step`` is called as of ``step_often``."""
    forget_clients()
    step_often(step)
    for tag in ("b", "a"):
        uploads.add(committed(Path(run) / tag), quick(url))
    assert uploads.wait(60) == []
    mock.patch.stopall()


def states_of_upload(run: str, url: str) -> list[dict[str, bytes]]:
    """The content of the store at each step of an upload, which is what a kill at this step leaves, and at its end."""
    states: list[dict[str, bytes]] = []
    upload_and(lambda: states.append(objects_below(url)), run, url)
    return [*states, objects_below(url)]


def upload_killed(run: str, url: str, at: int) -> None:
    """Upload in a process that is killed at step ``at``; one that is not, with 0, uploads everything."""
    import s3fs  # noqa: F401 - its import is no step of the upload

    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            upload_and(step, run, url)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if at else 0)


@support(SECTION, "kill -9 at any moment of an upload", "exact", "no tag has a record without its files")
@pytest.mark.parametrize("store", [pytest.param("s3", marks=pytest.mark.extended), "file"], indirect=True)
def test_wherever_an_upload_is_killed_each_tag_with_a_record_is_whole(
    rank_pool: RankPool, saved: Saver, store: str, tmp_path: Path
) -> None:
    """The store has an earlier save of the tag a; b is uploaded, then a again. Each kind of state is resumed from.

    A tag with the same objects as in an earlier state is not verified again. That a kill leaves the state of its step
    is shown at three steps.
    """
    first, second = saved(Job(), 2), saved(Job(lr=3e-2), 3)
    shutil.copytree(first.tag_dir, tmp_path / "before" / "a")
    for tag in ("a", "b"):
        shutil.copytree(second.tag_dir, tmp_path / "run" / tag)
    run, roots = str(tmp_path / "run"), {"a": {first.root, second.root}, "b": {second.root}}
    rank_pool.run(put_before, 1, str(tmp_path / "before"), f"{store}/before")
    before = objects_below(f"{store}/before")
    (states,) = rank_pool.run(states_of_upload, 1, run, put_objects(before, f"{store}/whole"))
    verified: list[dict[str, bytes]] = []
    seen = set()
    for at, state in enumerate(states, 1):
        whole = [tag for tag in ("a", "b") if f"{tag}/{RECORD_NAME}" in state]
        newest, url = state["latest"].decode(), f"{store}/{at}"
        assert newest in whole, at
        kind = tuple(whole), newest
        for tag in whole:
            own = {name: data for name, data in state.items() if name.startswith(f"{tag}/")}
            if own not in verified:
                verified.append(own)
                put_objects(own, url)
                report = verify_checkpoint(as_path(f"{url}/{tag}"))
                assert report.valid and not report.problems, (at, tag, report.problems)
                assert record_of(as_path(f"{url}/{tag}")).content_root in roots[tag], (at, tag)
        if kind not in seen or at % 8 == 0:
            seen.add(kind)
            put_objects(state, url)
            report = rank_pool.run(resume, 3, Job().other(), url)[0].report
            assert report.root_matches and report.path == f"{as_path(url)}/{newest}", at
            rank_pool.run(upload_killed, 1, run, url, 0)
            assert objects_below(url) == states[-1], at
    assert len(states) > 12 and seen == {(("a",), "a"), (("a", "b"), "a"), (("a", "b"), "b"), (("b",), "b")}
    files = {f"{tag}/{path.name}" for tag in "ab" for path in (tmp_path / "run" / tag).iterdir()}
    assert states[-1].keys() == {*files, "latest"} and states[-1]["latest"] == b"a"
    assert record_of(as_path(f"{store}/whole/a")).content_root == second.root
    for at in (2, len(states) // 2, len(states) - 2):
        url = put_objects(before, f"{store}/killed-at-{at}")
        rank_pool.run(upload_killed, 1, run, url, at)
        assert objects_below(url) == states[at - 1], at


def put_before(run: str, url: str) -> None:
    forget_clients()
    uploads.add(committed(Path(run) / "a"), quick(url))
    assert uploads.wait(60) == []


@support(SECTION, "a store that is away for a while", "exact", "what waits is uploaded after the next commit")
def test_a_store_that_is_away_loses_nothing(saved: Saver, calm: S3Server, tmp_path: Path) -> None:
    for tag in ("s1", "s2", "s3", "s4"):
        shutil.copytree(saved(Job(), 2).tag_dir, tmp_path / tag)
    url, queue, said = calm.url("away"), Uploads(), logged("deepspeed.save.after_commit")
    queue.add(committed(tmp_path / "s1"), quick(url))
    assert queue.wait(60) == []
    calm.fault = lambda request: "503"
    for tag in ("s2", "s3"):
        queue.add(committed(tmp_path / tag), quick(url))
        left = queue.wait(60)
    assert [one.saved.tag for one in left] == ["s2", "s3"] and latest_after(calm, url) == "s1"
    assert len(said) == 3 and all(
        "NOT UPLOADED to s3://" in line and "reduce your request rate" in line for line in said
    )
    shutil.rmtree(tmp_path / "s2")
    queue.add(committed(tmp_path / "s4"), quick(url))
    assert queue.wait(60) == []
    assert "s2: not uploaded: the tag was removed" in "\n".join(said)
    assert latest(url) == "s4"
    for tag in ("s1", "s3", "s4"):
        assert verify_checkpoint(as_path(f"{url}/{tag}")).valid


def latest_after(server: S3Server, url: str) -> str:
    server.fault = None
    forget_clients()
    return latest(url)


def test_a_tag_that_comes_late_does_not_become_the_latest(saved: Saver, tmp_path: Path) -> None:
    for tag in ("s1", "s2"):
        shutil.copytree(saved(Job(), 2).tag_dir, tmp_path / tag)
    url, queue = f"file://{tmp_path}/store", Uploads()
    send = after_commit.Upload.send
    fails = mock.patch.object(after_commit.Upload, "send", autospec=True, side_effect=fail_for(send, "s1"))
    with fails:
        for tag in ("s1", "s2"):
            queue.add(committed(tmp_path / tag), quick(url))
            assert [one.saved.tag for one in queue.wait(60)] == ["s1"]
    assert latest(url) == "s2"
    queue.add(committed(tmp_path / "s2", save_latest=False), quick(url))
    assert queue.wait(60) == [] and (tmp_path / "store/s1" / RECORD_NAME).exists() and latest(url) == "s2"


def fail_for(send: Callable[[Any], int], tag: str) -> Callable[[Any], int]:
    def run(self: Any) -> int:
        if self.saved.tag == tag:
            raise OSError(5, "no route to the store")
        return send(self)

    return run


def test_a_tag_that_is_saved_again_while_it_is_uploaded_is_not_uploaded_in_parts_of_both(
    saved: Saver, tmp_path: Path
) -> None:
    first, second = saved(Job(), 2), saved(Job(lr=3e-2), 2)
    shutil.copytree(first.tag_dir, tmp_path / "run" / "a")
    url, queue, said = f"file://{tmp_path}/store", Uploads(), logged("deepspeed.save.after_commit")
    replaced = iter([True])

    def put(source: Path, path: RemotePath) -> None:
        atomic.put_file(source, path)
        if next(replaced, False):
            shutil.copytree(second.tag_dir, tmp_path / "run" / "new")
            os.rename(tmp_path / "run" / "a", tmp_path / "run" / "old")
            os.rename(tmp_path / "run" / "new", tmp_path / "run" / "a")
            shutil.rmtree(tmp_path / "run" / "old")
            queue.add(committed(tmp_path / "run" / "a"), quick(url))

    with mock.patch.object(after_commit, "put_file", put):
        queue.add(committed(tmp_path / "run" / "a"), quick(url))
        assert queue.wait(60) == []
    assert "was saved again" in said[0], "the first save is given up: it is not on the disk any more"
    assert verify_checkpoint(tmp_path / "store" / "a").valid
    assert record_of(tmp_path / "store" / "a").content_root == second.root


def test_the_record_waits_for_the_files_of_all_nodes(saved: Saver, tmp_path: Path) -> None:
    """Node 1's disk has the files of rank 1; it fails in the first round, after node 0 has uploaded its own."""
    tag_dir = saved(Job(), 2).tag_dir
    for node, other in (("node0", "rank_1_"), ("node1", "rank_0_")):
        shutil.copytree(tag_dir, tmp_path / node / TAG)
        for path in (tmp_path / node / TAG).glob(f"*{other}*"):
            path.unlink()
    files = {*record_of(tag_dir).files}
    url, options = f"file://{tmp_path}/store", quick(f"file://{tmp_path}/store", save_timeout_s=2.0)
    queues = Uploads(), Uploads()
    for rank, queue in enumerate(queues):
        elsewhere = frozenset(name for name in files if f"rank_{1 - rank}_" in name)
        own = committed(tmp_path / f"node{rank}" / TAG, rank=rank, leaders=(0, 1), elsewhere=elsewhere)
        with mock.patch.object(after_commit, "put_file", side_effect=OSError(5, "away")) if rank else mock.MagicMock():
            queue.add(own, options)
            (left,) = queue.wait(60)
            assert left.saved.rank == rank
    assert RECORD_NAME not in {path.name for path in (tmp_path / "store" / TAG).iterdir()}
    assert UNFINISHED_NAME in {path.name for path in (tmp_path / "store" / TAG).iterdir()}
    for rank in (1, 0):  # as after the next commit
        elsewhere = frozenset(name for name in files if f"rank_{1 - rank}_" in name)
        own = committed(tmp_path / f"node{rank}" / TAG, rank=rank, leaders=(0, 1), elsewhere=elsewhere)
        queues[rank].add(own, options)
        assert queues[rank].wait(60) == []
    assert names(f"{url}/{TAG}") == {*files, RECORD_NAME} and verify_checkpoint(tmp_path / "store" / TAG).valid
    assert latest(url) == TAG


# --- "keep", and the end of the job -----------------------------------------------------------------------------------


def save_three(job: Job, directory: str) -> list[str]:
    """Save after each of three steps, faster than the store takes it; the tags on the disk at the end."""
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
        engine.save_checkpoint(directory)
        dist.barrier()
    assert uploads.wait(60) == []
    train_step(engine, 3)
    engine.save_checkpoint(directory)
    assert uploads.wait(60) == []
    dist.barrier()
    return sorted(path.name for path in Path(directory).iterdir() if path.name.startswith("global_step"))


def test_keep_removes_no_tag_that_waits_for_its_upload(rank_pool: RankPool, calm: S3Server, tmp_path: Path) -> None:
    url = calm.url("keep")
    calm.fault = lambda request: "slow" if request.method == "PUT" else None
    job = Job(options={"keep": 1, "upload": url})
    kept = rank_pool.run(save_three, 2, job, str(tmp_path))[0]
    calm.fault = None
    assert kept == ["global_step4"], "what was uploaded goes at the next commit"
    for step in (1, 2, 3, 4):
        assert verify_checkpoint(as_path(f"{url}/global_step{step}")).valid
    assert latest(url) == "global_step4"


@support(SECTION, '`"upload"`: the end of a job waits for the last upload', "exact", "for `save_timeout_s` at most")
@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["at once", "background"])
@pytest.mark.starts_processes
def test_the_end_of_the_job_waits_for_the_last_upload(calm: S3Server, tmp_path: Path, options: dict[str, Any]) -> None:
    url = calm.url(f"end-{len(options)}")
    calm.fault = lambda request: "slow" if request.method == "PUT" and RECORD_NAME in request.path else None
    done = end_after_save(tmp_path, {**options, "upload": url})
    calm.fault = None
    assert done.returncode == 0, done.stderr
    forget_clients()
    assert verify_checkpoint(as_path(f"{url}/global_step1")).valid and latest(url) == "global_step1"


@pytest.mark.starts_processes
def test_a_job_does_not_wait_longer_than_its_limit(calm: S3Server, tmp_path: Path) -> None:
    calm.fault = lambda request: "stall" if request.method == "PUT" else None
    began = time.monotonic()
    done = end_after_save(tmp_path, {"upload": calm.url("limit"), "save_timeout_s": 1.0})
    calm.stalled.set()
    calm.fault = None
    assert done.returncode == 0 and time.monotonic() - began < 55
    assert "global_step1: NOT UPLOADED to s3://" in done.stderr and "zeroelastic.json last" in done.stderr
    assert (tmp_path / "run/global_step1" / RECORD_NAME).exists()


_SCRIPT = """
import os, sys
import deepspeed, torch
import zeroelastic
zeroelastic.install()
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo")
from training import Job, build_engine, train_step
engine = build_engine(Job(batch=12, options=eval(sys.argv[2])))
train_step(engine, 0)
engine.save_checkpoint(sys.argv[1])
"""


def end_after_save(tmp_path: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """A job that saves and ends at once, without ``destroy``."""
    path = [TESTS, *map(Path, sys.path)]
    return run_python("-c", _SCRIPT, tmp_path / "run", repr(options), path=path, timeout=100, DS_ACCELERATOR="cpu")
