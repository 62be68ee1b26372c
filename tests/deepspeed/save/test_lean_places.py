"""Lean saves where no directory is shared by all ranks: in object stores, and on the disks of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from s3_server import BUCKET, S3Server, forget_clients, serve_s3
from saves import Saved, check_resumed
from test_lean import LEAN
from training import Job, build_engine, raised, resume, train_and_save, train_step

from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.testing import RankPool

support = pytest.mark.support
SECTION = "Checkpoint engines and storage"

WIDE = 200_000
"""Rows of a frozen table of 6 MB: two parts of an upload of 5 MiB."""

JOB = Job(options={**LEAN, "store_part_mib": 5}, frozen_table=WIDE)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture
def calm(s3: S3Server) -> Iterator[S3Server]:
    s3.requests.clear()
    yield s3
    s3.fault = None
    forget_clients()


def keys(server: S3Server, prefix: str) -> dict[str, int]:
    """The objects below a prefix, and their bytes."""
    forget_clients()
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    return {entry["Key"].removeprefix(f"{prefix}/"): entry["Size"] for entry in found}


def save_twice(job: Job, directory: str) -> Any:
    """Another save of the same process, and one of an engine that has resumed."""
    outcome = train_and_save(job, directory)
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    train_step(engine, 3)
    engine.save_checkpoint(directory, tag="again")
    engine.save_checkpoint(directory, tag="global_step3")
    return outcome


@support(SECTION, "lean saves to `s3://`, ZeRO stages 1 to 3", "exact", "each byte of the frozen weights written once")
@pytest.mark.parametrize("stage", [3, 2])
def test_a_lean_save_to_a_store_resumes_at_another_size(rank_pool: RankPool, calm: S3Server, stage: int) -> None:
    job, name = replace(JOB, stage=stage), f"lean{stage}"
    outcome = rank_pool.run(train_and_save, 3, job, calm.url(name))[0]
    (shared,) = (key for key in keys(calm, name) if key.startswith(FROZEN_FOLDER))
    assert not calm.client().list_multipart_uploads(Bucket=BUCKET, Prefix=f"{name}/").get("Uploads")
    sent = [r for r in calm.requests if r.method == "PUT" and "partNumber" in r.query and FROZEN_FOLDER in r.path]
    assert len(sent) == 2
    calm.requests.clear()
    found = rank_pool.run(resume, 2, job.other(), calm.url(name))
    check_resumed(Saved("", outcome), found, job)
    requests = [r for r in calm.requests if r.path.endswith(shared)]
    asked = sum(r.nbytes for r in requests if r.method == "GET")
    assert WIDE * 32 <= asked <= 1.001 * keys(calm, name)[shared], "each byte is asked for once over all ranks"
    assert sum(r.method == "HEAD" for r in requests) == 1, "one rank asks for the size"


def test_later_saves_write_nothing_of_the_frozen_weights(rank_pool: RankPool, calm: S3Server) -> None:
    job = replace(JOB, frozen_table=60)
    for _ in range(2):
        rank_pool.run(save_twice, 2, job, calm.url("again"))
    written = [r.method for r in calm.requests if r.method in ("PUT", "POST") and FROZEN_FOLDER in r.path]
    assert written == ["POST", "PUT", "POST"], "an upload is begun, sent and completed"


@pytest.mark.parametrize("what", ["PUT", "POST"], ids=["part", "complete"])
def test_a_shared_file_that_cannot_be_uploaded_leaves_nothing(rank_pool: RankPool, calm: S3Server, what: str) -> None:
    job, name = replace(JOB, options={**JOB.options, "store_retries": 0}), f"fails-{what}"
    calm.fault = lambda r: "503" if r.method == what and "uploadId" in r.query and FROZEN_FOLDER in r.path else None
    outcomes = rank_pool.run(try_to_save, 2, job, calm.url(name))
    calm.fault = None
    ((kind, text),) = set(outcomes)
    assert kind == "SaveError" and "zeroelastic-frozen/frozen-" in text and "Nothing was saved" in text
    assert not keys(calm, name)
    assert not calm.client().list_multipart_uploads(Bucket=BUCKET, Prefix=f"{name}/").get("Uploads")


def try_to_save(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.save_checkpoint(directory))
