"""Loads from an object store in a training job: what a local load restores, each byte asked for once over all ranks."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from extended import with_swept
from saved_files import flip, state_bytes
from saves import Saver, check_resumed, save_once
from stores import BUCKET, Request, S3Server
from training import Job, attempt, build_engine, build_wide, look, of_all, raised, resume, save_wide

from zeroelastic.elastic.resume import resume as elastic_resume
from zeroelastic.testing import RankPool

support = pytest.mark.support

MIB = 1 << 20


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


# --- the same as a local load -----------------------------------------------------------------------------------------


@support("Checkpoint engines and storage", "`load_checkpoint` from `s3://`, ZeRO stages 1 to 3", "exact")
@pytest.mark.parametrize(
    ("job", "save_world_size", "world_size"),
    [
        pytest.param(Job(), 4, 3, id="stage 3"),
        pytest.param(Job(stage=2), 4, 3, id="stage 2"),
        pytest.param(Job(elastic=False, installed=False), 2, 3, id="rigid", marks=pytest.mark.extended),
        pytest.param(Job(options={"verify": "quick"}), 2, 5, id="unverified", marks=pytest.mark.extended),
    ],
)
def test_a_load_from_s3_restores_what_a_local_one_does(
    rank_pool: RankPool, saved: Saver, calm: S3Server, job: Job, save_world_size: int, world_size: int
) -> None:
    checkpoint = saved(job, save_world_size)
    url = calm.upload(Path(checkpoint.directory), f"same-{Path(checkpoint.directory).name}")
    outcomes = rank_pool.run(resume, world_size, job.other(installed=True), url)
    check_resumed(checkpoint, outcomes, job)
    report = outcomes[0].report
    assert report.path == f"{url}/{checkpoint.tag_dir.name}" and report.saved_world_size == save_world_size
    assert not any("node-local" in note for note in report.notes)
    assert {request.method for request in calm.requests} <= {"GET", "HEAD"}
    assert all(request.range for request in calm.payload_requests())
    listings = [request for request in calm.requests if "list-type" in request.query]
    assert len(listings) < 4 + world_size, "one rank lists for all"


WIDTH = 768
"""About 5 M parameters: headers are below 1 % of 57 MB."""


def load_counted(url: str, stage: int) -> Any:
    engine = build_wide(True, False, stage=stage, width=WIDTH)
    engine.load_checkpoint(url)
    assert engine.zeroelastic_report.root_matches
    return engine.zeroelastic_report


@support("Checkpoint engines and storage", "each byte of a store read once, over all ranks", "exact", "at most 1.01")
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_all_ranks_together_ask_for_each_byte_once(
    rank_pool: RankPool, calm: S3Server, tmp_path: Path, stage: int
) -> None:
    rank_pool.run(save_wide, 4, str(tmp_path / "run"), True, False, stage, WIDTH)
    url = calm.upload(tmp_path / "run", f"counted{stage}")
    owned = state_bytes(tmp_path / "run")
    reports = rank_pool.run(load_counted, 3, url, stage)
    listed = calm.client().list_objects_v2(Bucket=BUCKET, Prefix=f"counted{stage}/")["Contents"]
    sizes = {f"/{BUCKET}/{entry['Key']}": entry["Size"] for entry in listed}
    asked = sum(min(request.nbytes, sizes.get(request.path, 0)) for request in calm.payload_requests())
    assert owned <= asked <= 1.01 * owned, f"{asked / owned:.4f} of {owned / MIB:.1f} MiB"
    assert reports[0].total_bytes_read <= 1.01 * owned
    per_file = Counter(request.path for request in calm.payload_requests())
    assert per_file[f"/{BUCKET}/counted{stage}/latest"] == 1
    assert sum(count for path, count in per_file.items() if path.endswith("zeroelastic.json")) <= 2


def test_rank_0_compares_the_sizes_of_all_files(
    rank_pool: RankPool, saved: Saver, calm: S3Server, tmp_path: Path
) -> None:
    checkpoint = saved(Job(), 4)
    shutil.copytree(checkpoint.directory, tmp_path / "cut")
    (file,) = (tmp_path / "cut" / checkpoint.tag_dir.name).glob("*rank_3_*_optim_states.pt")
    file.write_bytes(file.read_bytes()[:-1])
    url = calm.upload(tmp_path / "cut", "cut")
    for kind, text in rank_pool.run(attempt, 3, Job().other(), url):
        assert kind == "CheckpointError" and f"contradicts its commit record: {file.name} has" in text


# --- what is refused, and what is fallen back to ----------------------------------------------------------------------


def resume_elastically(job: Job, url: str, required: bool = False) -> tuple[Any, Any]:
    engine = build_engine(job)
    resumed = elastic_resume(engine, url, strict=False, required=required)
    return resumed, look(engine)[0] if resumed.tag else None


def test_resume_passes_over_a_damaged_tag(rank_pool: RankPool, saved: Saver, calm: S3Server, tmp_path: Path) -> None:
    job = Job()
    checkpoint = saved(job, 2)
    for name in ("global_step3", "global_step4"):
        shutil.copytree(checkpoint.tag_dir, tmp_path / name)
    damaged = next((tmp_path / "global_step4").glob("*rank_1_*optim*"))
    flip(damaged)
    url = calm.upload(tmp_path, "damaged")
    calm.client().put_object(Bucket=BUCKET, Key="damaged/latest", Body=b"global_step4")
    outcomes = rank_pool.run(resume_elastically, 3, job.other(), url)
    for resumed, state in outcomes:
        assert resumed.tag == "global_step3" and state == outcomes[0][1]
        assert "global_step4" in resumed.passed_over[0]


def test_a_tag_with_the_mark_of_an_upload_is_no_checkpoint(
    rank_pool: RankPool, saved: Saver, calm: S3Server, tmp_path: Path
) -> None:
    checkpoint = saved(Job(), 2)
    for name in ("global_step3", "global_step9"):
        shutil.copytree(checkpoint.tag_dir, tmp_path / name)
    (tmp_path / "global_step9" / "zeroelastic.json").unlink()
    (tmp_path / "global_step9" / "zeroelastic-unfinished.json").write_text("{}")
    url = calm.upload(tmp_path, "unfinished")
    for kind, text in rank_pool.run(attempt, 2, Job().other(), url, tag="global_step9"):
        assert kind == "CheckpointError" and "its upload is on its way or did not finish" in text
    outcomes = rank_pool.run(resume_elastically, 2, Job().other(), url)
    assert {resumed.tag for resumed, _ in outcomes} == {"global_step3"}


def refusals(url: str) -> dict[str, tuple[str, str]]:
    """What loads and saves of a URL raise, of which nothing is ours to do or nothing is there."""
    found: dict[str, tuple[str, str]] = {}

    def note(what: str, action: Any) -> None:
        try:
            found[what] = ("", repr(action()))
        except Exception as error:
            found[what] = (type(error).__name__, str(error))

    engine = build_engine(Job())
    note("nothing", lambda: engine.load_checkpoint(f"{url}/nowhere"))
    note("tag", lambda: engine.load_checkpoint(url, tag="global_step77"))
    note("bucket", lambda: engine.load_checkpoint("s3://no-such-bucket/run", tag="global_step3"))
    note("protocol", lambda: engine.load_checkpoint("nosuch://bucket/run"))
    engine = build_engine(Job(stage=0, options={}))
    note("stage 0", lambda: engine.load_checkpoint(url))
    return found


@support("Checkpoint engines and storage", "`load_checkpoint` of a URL that is DeepSpeed's own to load", "refused")
def test_what_cannot_be_loaded_from_a_url_is_said(
    rank_pool: RankPool, saved: Saver, calm: S3Server, tmp_path: Path
) -> None:
    url = calm.upload(Path(saved(Job(), 2).directory), "refused")
    for found in rank_pool.run(refusals, 2, url):
        assert found["nothing"] == ("", "(None, None)")
        assert found["tag"][0] == "MissingFileError" and "has no tag global_step77" in found["tag"][1]
        assert "global_step3" in found["tag"][1]
        assert found["bucket"][0] == "MissingFileError" and "s3://no-such-bucket/run" in found["bucket"][1]
        assert found["protocol"][0] == "UsageError" and "no file system of this name" in found["protocol"][1]
        kind, text = found["stage 0"]
        assert kind == "UnsupportedError" and "only DeepSpeed can load this, and it reads no URLs" in text


# --- faults ----------------------------------------------------------------------------------------------------------


def test_faults_of_the_store_are_survived(rank_pool: RankPool, saved: Saver, calm: S3Server) -> None:
    """Every ninth request fails once, in each of three ways."""
    checkpoint = saved(Job(), 4)
    url = calm.upload(Path(checkpoint.directory), "faulty")
    number = iter(range(10**6))
    faults = ["503", "cut", "503"]
    calm.fault = lambda request: faults[n // 9 % 3] if (n := next(number)) % 9 == 4 else None
    outcomes = rank_pool.run(resume, 3, Job().other(), url)
    check_resumed(checkpoint, outcomes, Job())
    assert next(number) > 20


def test_a_store_that_fails_for_one_rank_is_one_error_on_all(rank_pool: RankPool, saved: Saver, calm: S3Server) -> None:
    checkpoint = saved(Job(), 4)
    url = calm.upload(Path(checkpoint.directory), "failing")
    calm.fault = lambda request: "cut" if "rank_3_mp_rank_00_optim" in request.path else None
    job = replace(Job(), options={"verify": True, "store_retries": 1}).other()
    kind, text = of_all(rank_pool.run(attempt, 3, job, url))
    assert kind == "UnreadableError" and "rank_3_mp_rank_00_optim_states.pt" in text


def load_error(job: Job, url: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.load_checkpoint(url))


def test_a_tag_that_is_replaced_while_it_is_loaded_is_one_error_on_all(
    rank_pool: RankPool, saved: Saver, calm: S3Server
) -> None:
    """Every object is replaced by that of another save under the same name, in the middle of the load.

    The next load takes what is there then.
    """
    first, second = saved(Job(), 2), saved(Job(lr=3e-2), 2)
    url = calm.upload(Path(first.directory), "replaced")
    replaced, asked = threading.Lock(), itertools.count()

    def fault(request: Request) -> None:
        optimizer = request.method == "GET" and "_optim_states" in request.path
        if optimizer and next(asked) == 12 and replaced.acquire(blocking=False):
            for path in sorted(second.tag_dir.iterdir()):
                calm.client().put_object(
                    Bucket=BUCKET, Key=f"replaced/{second.tag_dir.name}/{path.name}", Body=path.read_bytes()
                )

    calm.fault = fault
    failures = rank_pool.run(load_error, 3, Job().other(), url)
    assert replaced.locked()
    assert len(set(failures)) == 1
    kind, text = failures[0]
    assert kind == "SavedAgainError" and text.startswith(f"{url}/{first.tag_dir.name}: was saved again")
    outcomes = rank_pool.run(resume, 3, Job().other(), url)
    assert {outcome.report.loaded_root for outcome in outcomes} == {second.root} != {first.root}
    assert all(outcome.state == outcomes[0].state for outcome in outcomes)
