"""Saves into an object store by real ranks: what a local save holds, committed by the record last, or not at all."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from s3_server import BUCKET, Request, S3Server, forget_clients
from saves import Saved, check_resumed
from training import Job, build_engine, look, raised, resume, train_and_save, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.deepspeed.save.store import StoreTarget
from zeroelastic.distributed.process_identity import identity
from zeroelastic.errors import SaveError
from zeroelastic.io import objects
from zeroelastic.io.objects import MAX_PARTS, begin_upload, complete_upload, part_size
from zeroelastic.io.paths import RemotePath, as_path
from zeroelastic.testing import RankPool
from zeroelastic.testing.run import RankError
from zeroelastic.verbs.verify.verify import verify_checkpoint

support = pytest.mark.support

MARK = "zeroelastic-unfinished.json"


def keys(server: S3Server, prefix: str) -> list[str]:
    """The objects below a prefix, without it."""
    forget_clients()
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    return [entry["Key"].removeprefix(f"{prefix}/") for entry in found]


def uploads(server: S3Server, prefix: str) -> list[str]:
    """The multipart uploads below a prefix that are not completed."""
    found = server.client().list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/").get("Uploads", [])
    return [entry["Key"] for entry in found]


def latest(server: S3Server, prefix: str) -> str:
    answer = server.client().get_object(Bucket=BUCKET, Key=f"{prefix}/latest")
    return str(answer["Body"].read().decode())


# --- what is saved --------------------------------------------------------------------------------------------------


@support("Checkpoint engines and storage", "`save_checkpoint` to `s3://`, ZeRO stages 1 to 3", "exact")
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(), id="stage 3"),
        pytest.param(Job(stage=2), id="stage 2", marks=pytest.mark.extended),
        pytest.param(Job(elastic=False), id="rigid", marks=pytest.mark.extended),
    ],
)
def test_what_is_saved_to_s3_resumes_at_other_sizes(rank_pool: RankPool, calm: S3Server, job: Job) -> None:
    """4 ranks save, 3 load and save again, 1 loads."""
    name = f"sizes-{job.stage}-{job.elastic}"
    url = calm.url(f"{name}/a")
    outcomes = rank_pool.run(train_and_save, 4, job, url)
    assert not uploads(calm, name) and MARK not in {key.rpartition("/")[2] for key in keys(calm, name)}
    assert latest(calm, f"{name}/a") == "global_step3"
    saved = Saved("", outcomes[0])
    report = verify_checkpoint(as_path(f"{url}/global_step3"))
    assert report.valid and not report.problems
    check_resumed(saved, rank_pool.run(resume, 3, job.other(), url), job)
    roots = rank_pool.run(save_again, 3, job.other(), url, calm.url(f"{name}/b"))
    record = read_record(as_path(f"{url}/global_step3"))
    assert record is not None and set(roots) == {record.content_root}
    check_resumed(saved, rank_pool.run(resume, 1, job.other(), calm.url(f"{name}/b")), job)


def save_again(job: Job, url: str, target: str) -> str:
    engine = build_engine(job)
    engine.load_checkpoint(url)
    engine.save_checkpoint(target, client_state={"note": "hello"})
    record = read_record(as_path(f"{target}/global_step3"))
    assert record is not None
    return record.content_root


def test_the_objects_are_the_files_of_a_local_save(rank_pool: RankPool, calm: S3Server, tmp_path: Path) -> None:
    for where in (str(tmp_path), calm.url("same")):
        rank_pool.run(train_and_save, 2, Job(), where)
    local = {str(path.relative_to(tmp_path)): path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert set(keys(calm, "same")) == set(local)
    here, there = (read_record(as_path(f"{where}/global_step3")) for where in (tmp_path, calm.url("same")))
    assert here is not None and there is not None
    assert here.content_root == there.content_root and here.files == there.files
    puts = [
        request for request in calm.requests if request.method == "PUT" and request.path.endswith("zeroelastic.json")
    ]
    completed = [
        i for i, request in enumerate(calm.requests) if request.method == "POST" and "uploadId" in request.query
    ]
    assert len(puts) == 1 and calm.requests.index(puts[0]) > max(completed), "the record is the last object of the tag"


def save_in_background(job: Job, url: str) -> dict[str, Any]:
    engine = build_engine(job)
    train_step(engine, 0)
    state, _ = look(engine)
    engine.save_checkpoint(url, tag="a")
    train_step(engine, 1)
    zeroelastic.wait_for_save(engine)
    engine.save_checkpoint(url, tag="b")
    engine.destroy()
    return state


@support("Checkpoint engines and storage", "saves to `s3://` in the background", "exact")
def test_a_save_in_the_background_is_of_the_moment_it_began(rank_pool: RankPool, calm: S3Server) -> None:
    job = replace(Job(), options={"verify": True, "async_save": True})
    calm.fault = lambda request: "slow" if request.method == "PUT" and "partNumber" in request.query else None
    outcomes = rank_pool.run(save_in_background, 2, job, calm.url("later"))
    calm.fault = None
    assert latest(calm, "later") == "b" and not uploads(calm, "later")
    loaded = rank_pool.run(load_state, 3, Job().other(), calm.url("later"), "a")
    assert all(state == outcomes[0] for state in loaded)


def load_state(job: Job, url: str, tag: str) -> dict[str, Any]:
    engine = build_engine(job)
    engine.load_checkpoint(url, tag=tag)
    return look(engine)[0]


def test_parts_are_larger_where_there_would_be_too_many() -> None:
    assert part_size(1, 16 << 20) == 16 << 20
    size = 400 << 30
    assert part_size(size, 16 << 20) % (1 << 20) == 0 and -(-size // part_size(size, 16 << 20)) <= MAX_PARTS


# --- what fails -----------------------------------------------------------------------------------------------------


def try_to_save(job: Job, url: str, tag: str) -> tuple[str, str]:
    engine = build_engine(job)
    train_step(engine, 0)
    return raised(lambda: engine.save_checkpoint(url, tag=tag))


QUICK = replace(Job(), options={"store_retries": 1, "store_timeout_s": 20})


def of_rank_1(request: Request) -> bool:
    return "rank_1_mp_rank_00_optim" in request.path


@support(
    "Checkpoint engines and storage", "a save to `s3://` that fails on one rank", "refused", "one error on all ranks"
)
@pytest.mark.parametrize(
    ("what", "fails"),
    [
        ("part", lambda r: r.method == "PUT" and "partNumber" in r.query and of_rank_1(r)),
        pytest.param(
            "complete",
            lambda r: r.method == "POST" and "uploadId" in r.query and of_rank_1(r),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "record",
            lambda r: r.method == "PUT" and r.path.endswith("/zeroelastic.json"),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_save_that_fails_on_one_rank_leaves_nothing_and_is_one_error(
    rank_pool: RankPool, calm: S3Server, what: str, fails: Any
) -> None:
    url = calm.url(f"fails-{what}")
    assert rank_pool.run(try_to_save, 2, QUICK, url, "good") == [("", "")] * 2
    calm.fault = lambda request: "503" if fails(request) and "/bad/" in request.path else None
    outcomes = rank_pool.run(try_to_save, 2, QUICK, url, "bad")
    calm.fault = None
    assert len(set(outcomes)) == 1
    kind, text = outcomes[0]
    assert kind == "SaveError" and f"{url}/bad" in text and "`latest` is unchanged" in text
    assert not uploads(calm, f"fails-{what}") and not keys(calm, f"fails-{what}/bad")
    assert latest(calm, f"fails-{what}") == "good"


def save_without_the_end(job: Job, url: str) -> tuple[str, str]:
    """A save of which the last rank ends, as far as the others know, when the commit record is written."""

    def ends(self: StoreTarget, *arguments: Any) -> None:
        raise SaveError("the rank has ended")

    engine = build_engine(job)
    train_step(engine, 0)
    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(StoreTarget, "_write_record", ends) if last else nullcontext():
        return raised(lambda: engine.save_checkpoint(url, tag="bad"))


def test_a_save_that_fails_when_its_record_is_written_leaves_no_record(rank_pool: RankPool, calm: S3Server) -> None:
    for kind, text in rank_pool.run(save_without_the_end, 2, QUICK, calm.url("end")):
        assert kind == "SaveError" and "the rank has ended" in text
    assert not keys(calm, "end")


def test_an_upload_that_somebody_aborted_is_not_taken_for_the_object_of_an_earlier_save(calm: S3Server) -> None:
    """Of the same size. The object of an upload whose answer was lost is taken."""
    path = as_path(calm.url("aborted/file.pt"))
    assert isinstance(path, RemotePath)
    calm.client().put_object(Bucket=BUCKET, Key="aborted/file.pt", Body=b"old")
    upload = begin_upload(path)
    assert abs(upload.began_at - time.time()) < 60
    with mock.patch.object(objects, "_call", side_effect=FileNotFoundError("NoSuchUpload")):  # moto has no such error
        complete_upload(upload, [], 3)
        with pytest.raises(OSError, match="NoSuchUpload"):
            complete_upload(replace(upload, began_at=upload.began_at + 3600), [], 3)


def test_transient_faults_do_not_fail_a_save(rank_pool: RankPool, calm: S3Server) -> None:
    seen: set[str] = set()

    def fault(request: Request) -> str | None:
        key = f"{request.method} {request.path} {request.query.partition('&uploadId')[0]}"
        if request.method in ("PUT", "POST") and key not in seen:
            seen.add(key)
            return "503" if len(seen) % 2 else "cut"
        return None

    calm.fault = fault
    outcomes = rank_pool.run(train_and_save, 2, Job(), calm.url("transient"))
    calm.fault = None
    assert seen and latest(calm, "transient") == "global_step3" and not uploads(calm, "transient")
    check_resumed(Saved("", outcomes[0]), rank_pool.run(resume, 3, Job().other(), calm.url("transient")), Job())


def test_stores_that_cannot_be_written_are_said(rank_pool: RankPool, calm: S3Server) -> None:
    for kind, text in rank_pool.run(try_to_save, 2, QUICK, "s3://no-such-bucket/run", "a"):
        assert kind == "SaveError" and "s3://no-such-bucket/run/a" in text and "bucket" in text
        assert "Nothing was saved" in text
    for kind, text in rank_pool.run(try_to_save, 2, replace(QUICK, stage=0, options={}), calm.url("stage0"), "a"):
        assert kind == "UnsupportedError" and "which writes to no URLs" in text
    without = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    for kind, text in rank_pool.run(try_to_save, 2, QUICK, calm.url("denied"), "a", env=without):
        assert kind == "SaveError" and f"{calm.url('denied')}/a: cannot be written" in text and "redentials" in text
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    for kind, text in rank_pool.run(try_to_save, 2, QUICK, calm.url("gone"), "a", env=nowhere):
        assert kind == "SaveError" and f"{calm.url('gone')}/a: cannot be written" in text and "saved" in text


def save_beside(job: Job, url: str) -> list[tuple[str, str]]:
    """Saves of two tags that carry a mark."""
    engine = build_engine(job)
    train_step(engine, 0)
    return [raised(lambda tag=tag: engine.save_checkpoint(url, tag=tag)) for tag in ("held", "left")]


@support("Checkpoint engines and storage", "two jobs that save one tag to `s3://`", "refused", "where it can be seen")
def test_a_tag_that_another_process_saves_is_refused_and_a_dead_one_is_taken_over(
    rank_pool: RankPool, calm: S3Server
) -> None:
    url, client = calm.url("beside"), calm.client()
    for tag, owner in (("held", identity(os.getpid())), ("left", "another machine/pid:[1] 7 8")):
        data = json.dumps({"work": "save", "save_id": "", "owner": owner, "began_at": time.time()})
        client.put_object(Bucket=BUCKET, Key=f"beside/{tag}/{MARK}", Body=data.encode())
    client.create_multipart_upload(Bucket=BUCKET, Key="beside/left/some.pt")
    for held, left in rank_pool.run(save_beside, 2, QUICK, url):
        assert held[0] == "SaveError" and "another process of this machine is saving" in held[1]
        assert left == ("", "")
    assert keys(calm, "beside/held") == [MARK] and latest(calm, "beside") == "left"
    assert not uploads(calm, "beside") and MARK not in keys(calm, "beside/left")


def save_twice(job: Job, url: str) -> dict[str, Any]:
    engine = build_engine(job)
    engine.load_checkpoint(url, tag="t")
    train_step(engine, 3)
    engine.save_checkpoint(url, tag="t", client_state={"note": "hello"})
    return look(engine)[0]


def test_a_tag_that_is_saved_again_by_fewer_ranks_is_the_new_save_alone(rank_pool: RankPool, calm: S3Server) -> None:
    url = calm.url("again")
    rank_pool.run(train_and_save, 3, Job(), url, tag="t")
    old = set(keys(calm, "again/t"))
    states = rank_pool.run(save_twice, 2, Job().other(), url)
    gone = old - set(keys(calm, "again/t"))
    assert gone == {name for name in old if "rank_2_" in name} and gone
    assert all(state == states[0] for state in rank_pool.run(load_state, 1, Job().other(), url, "t"))


def save_to_memory(job: Job, url: str) -> tuple[bool, bool, list[str]]:
    """A store of which fsspec knows no upload in two steps: whether what is loaded is what was saved."""
    import fsspec

    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(url, tag="one")
    state, _ = look(engine)
    train_step(engine, 1)
    engine.load_checkpoint(url)
    names = sorted(path.rpartition("/")[2] for path in fsspec.filesystem("memory").find("/run"))
    return look(engine)[0] == state, bool(engine.zeroelastic_report.root_matches), names


@support("Checkpoint engines and storage", "other stores that fsspec writes to", "exact", "shown with `memory://`")
def test_stores_without_multipart_uploads_are_saved_to(rank_pool: RankPool) -> None:
    ((same, root_matches, names),) = rank_pool.run(save_to_memory, 1, Job(), "memory://run")
    assert same and root_matches and MARK not in names
    assert {"latest", "zeroelastic.json", "zero_to_fp32.py"} <= set(names)


def save_three(job: Job, url: str) -> None:
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
        engine.save_checkpoint(url)
    zeroelastic.wait_for_save(engine)


@pytest.mark.parametrize("options", [{"keep": 2}, {"keep": 2, "async_save": True}], ids=["waited for", "background"])
def test_older_tags_go_as_keep_says(rank_pool: RankPool, calm: S3Server, options: dict[str, Any]) -> None:
    url = calm.url(f"kept{len(options)}")
    rank_pool.run(save_three, 2, Job(options=options), url)
    found = {name.partition("/")[0] for name in keys(calm, url.rpartition("/")[2])}
    assert {name for name in found if name.startswith("global_step")} == {"global_step2", "global_step3"}


# --- kill -9 --------------------------------------------------------------------------------------------------------


def save_and_die(job: Job, url: str, tag: str) -> None:
    """Rank 0 is killed in the middle of its upload, when the server has stalled it."""
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(url, tag="good")
    train_step(engine, 1)
    if dist.get_rank() == 0:
        threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    engine.save_checkpoint(url, tag=tag)


@support("Checkpoint engines and storage", "kill -9 during an upload to `s3://`", "exact", "the older tag stays newest")
@pytest.mark.parametrize("cleaned_by", ["save", "prune"])
def test_a_killed_upload_leaves_the_older_tag_the_newest_and_is_cleaned_up(
    rank_pool: RankPool, calm: S3Server, cleaned_by: str
) -> None:
    prefix = f"killed-{cleaned_by}"
    url = calm.url(prefix)
    calm.stalled.clear()
    calm.fault = lambda r: "stall" if "/bad/" in r.path and "partNumber" in r.query and "rank_0" in r.path else None
    with pytest.raises(RankError):
        rank_pool.run(save_and_die, 2, replace(Job(), options={"save_timeout_s": 30}), url, "bad")
    calm.fault = None
    calm.stalled.set()
    calm.requests.clear()
    assert uploads(calm, prefix), "the test shows nothing: no upload was cut off"
    found = zeroelastic.latest(url, quick=True)
    assert found.tag is not None and found.tag.name == "good" and latest(calm, prefix) == "good"
    if cleaned_by == "save":
        assert rank_pool.run(try_to_save, 2, QUICK, url, "next") == [("", "")] * 2
        assert latest(calm, prefix) == "next"
    else:
        report = zeroelastic.prune(url, keep=5, dry_run=False)
        assert report.removed == ("bad",) and not report.failed
    assert not uploads(calm, prefix)
    assert not [key for key in keys(calm, prefix) if key.startswith("bad/") or key.endswith(MARK)]
    assert open_checkpoint(f"{url}/good").record is not None
