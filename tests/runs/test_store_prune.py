"""``prune`` and ``latest`` where the run is in an object store: removed for good, set back, repaired."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lean_runs import FIRST, SECOND, lean_tag, write_shared
from places import ROOT
from s3_server import BUCKET, S3Server, forget_clients, serve_s3
from synthetic import write_checkpoint

import zeroelastic
from zeroelastic.checkpoint.marks import UNFINISHED_NAME, new_mark
from zeroelastic.checkpoint.shared_files import shared_name
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.distributed.process_identity import machine
from zeroelastic.errors import CheckpointError, UsageError
from zeroelastic.io.objects import StoredObject, objects_below
from zeroelastic.io.paths import RemotePath, as_path
from zeroelastic.runs.candidates import check_quickly, going_on_from, list_run
from zeroelastic.runs.run_store import open_run
from zeroelastic.verbs.prune import carry_out

support = pytest.mark.support

STEPS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local run of four tags."""
    root = tmp_path_factory.mktemp("run")
    for step in STEPS:
        write_checkpoint(
            root / f"global_step{step}", world_size=2, groups=[(Param("w", (5,)),)], record=True, step=step
        )
    (root / "latest").write_text("global_step4")
    return root


@pytest.fixture
def url(server: S3Server, run: Path, request: pytest.FixtureRequest) -> str:
    """The run in a store, with other objects beside it."""
    found = server.upload(run, f"{request.node.name}/run")
    server.client().put_object(Bucket=BUCKET, Key=f"{request.node.name}/run2/file", Body=b"x")
    forget_clients()
    return found


def keys(server: S3Server, url: str) -> set[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    return {entry["Key"].removeprefix(f"{prefix}/") for entry in found}


def begin_upload(server: S3Server, url: str, name: str) -> None:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    client = server.client()
    made = client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{name}")
    client.upload_part(Bucket=BUCKET, Key=f"{prefix}/{name}", UploadId=made["UploadId"], PartNumber=1, Body=b"x" * 100)


def open_uploads(server: S3Server, url: str) -> list[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    found = server.client().list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/").get("Uploads", [])
    return [entry["Key"] for entry in found]


def mark(server: S3Server, url: str, tag: str, owner: str, began_at: float) -> None:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    data = {"work": "save", "save_id": "", "owner": owner, "began_at": began_at}
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{tag}/{UNFINISHED_NAME}", Body=json.dumps(data).encode())


DEAD = f"{machine()} 4194304 1"
"""A process of this machine that does not run."""
ELSEWHERE = "another machine/pid:[1] 7 8"


@support("Checkpoint engines and storage", "`prune` and `latest --fix`, `--set` on `s3://`", "exact")
def test_prune_removes_old_tags_and_nothing_else(server: S3Server, url: str) -> None:
    before = keys(server, url)
    planned = zeroelastic.prune(url, keep=2)
    assert [decision.tag.name for decision in planned.plan.removals] == ["global_step1", "global_step2"]
    assert keys(server, url) == before, "a dry run removes nothing"
    report = zeroelastic.prune(url, keep=2, dry_run=False)
    assert report.removed == ("global_step1", "global_step2") and report.freed_bytes > 0 and not report.failed
    gone = {key for key in before if key.startswith(("global_step1/", "global_step2/"))}
    assert keys(server, url) == before - gone
    assert server.client().get_object(Bucket=BUCKET, Key=url.removeprefix(f"s3://{BUCKET}/") + "2/file")
    assert zeroelastic.latest(url, quick=True).tag.name == "global_step4"
    json.dumps(report.to_json())


def test_a_tag_that_changed_or_that_latest_names_by_now_is_kept(server: S3Server, url: str) -> None:
    planned = zeroelastic.prune(url, keep=1)
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/global_step2/more", Body=b"1")
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/latest", Body=b"global_step3")
    report = carry_out(planned)
    assert report.removed == ("global_step1",)
    reasons = {tag.tag: tag.reason for tag in report.tags}
    assert "changed" in reasons["global_step2"] and "latest names it" in reasons["global_step3"]


def test_a_save_that_begins_when_its_tag_is_removed_keeps_its_mark(
    server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job saves a tag again that a run has left."""

    def begins_after(path: RemotePath) -> list[StoredObject]:
        found = objects_below(path)
        if path.name == "global_step1":
            mark(server, url, "global_step1", ELSEWHERE, time.time())
        return found

    planned, before = zeroelastic.prune(url, keep=3), keys(server, url)
    monkeypatch.setattr("zeroelastic.runs.object_run.objects_below", begins_after)
    report = carry_out(planned)
    assert report.removed == () and not report.failed
    assert keys(server, url) == before | {f"global_step1/{UNFINISHED_NAME}"}


def test_a_removal_that_is_cut_short_leaves_no_checkpoint_and_is_finished(server: S3Server, url: str) -> None:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    mark(server, url, "global_step4", DEAD, time.time())
    server.client().delete_object(Bucket=BUCKET, Key=f"{prefix}/global_step4/zeroelastic.json")
    forget_clients()
    with pytest.raises(CheckpointError, match="its save, or its removal, is on its way or did not finish"):
        from zeroelastic.checkpoint.open import open_checkpoint

        open_checkpoint(f"{url}/global_step4")
    assert zeroelastic.latest(url, quick=True).tag.name == "global_step3"
    report = zeroelastic.prune(url, keep=9, dry_run=False)
    assert report.removed == ("global_step4",)
    assert not [key for key in keys(server, url) if key.startswith("global_step4/")]


@pytest.mark.parametrize(
    ("owner", "age_s", "removed"),
    [(DEAD, 0.0, True), (ELSEWHERE, 0.0, False), (ELSEWHERE, 7200.0, True), ("alive", 9999.0, False)],
    ids=["dead", "elsewhere", "elsewhere, long ago", "alive"],
)
def test_what_saves_left_goes_and_what_runs_stays(
    server: S3Server, url: str, owner: str, age_s: float, removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if owner == "alive":
        owner = _identity_of_parent()
    begin_upload(server, url, "global_step9/file.pt")
    mark(server, url, "global_step9", owner, time.time() - age_s)
    if age_s:  # the uploads and the mark's object are as old
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + age_s)
    forget_clients()
    open_run(as_path(url)).remove_dead_saves()
    assert bool(open_uploads(server, url)) is not removed
    assert any(key.endswith(UNFINISHED_NAME) for key in keys(server, url)) is not removed
    report = zeroelastic.prune(url, keep=9, dry_run=False)
    assert not removed or not report.removed
    found = [(item.name, item.remove) for item in report.plan.unfinished]
    assert found == ([] if removed else [("global_step9", False)])


def _identity_of_parent() -> str:
    from zeroelastic.distributed.process_identity import identity

    return identity(os.getppid())


def test_the_mark_of_this_process_is_its_own() -> None:
    found = new_mark("save", "1")
    assert found.is_own and found.life == "lives"


def test_latest_is_set_back_and_repaired(server: S3Server, url: str) -> None:
    report = zeroelastic.latest(url, set_to="global_step2")
    assert report.found.written
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    assert server.client().get_object(Bucket=BUCKET, Key=f"{prefix}/latest")["Body"].read() == b"global_step2"
    root = as_path(url)
    tags = list_run(root).tags
    assert tags[going_on_from(root, tags)].name == "global_step2", "a resume does not go back to where it was set"
    assert zeroelastic.latest(url, quick=True).tag.name == "global_step2"
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/latest", Body=b"gone")
    assert zeroelastic.latest(url, quick=True, fix=True).tag.name == "global_step4"
    assert server.client().get_object(Bucket=BUCKET, Key=f"{prefix}/latest")["Body"].read() == b"global_step4"
    with pytest.raises(UsageError, match="has no tag nowhere"):
        zeroelastic.latest(url, set_to="nowhere")


def test_prune_says_the_same_of_a_store_as_of_a_disk(server: S3Server, url: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    damaged = "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"
    (tmp_path / "run" / damaged).unlink()
    server.client().delete_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/{damaged}")
    forget_clients()
    said = []
    for where in (str(tmp_path / "run"), url):
        report = zeroelastic.prune(where, keep=2, invalid=True, min_age=0)
        said.append([(d.tag.name, d.remove, d.valid, d.reason.replace(where, "")) for d in report.plan.decisions])
    assert said[0] == said[1]


@pytest.fixture
def lean_url(server: S3Server, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A run of two tags in a store, each with a shared file."""
    for step, digest in ((1, FIRST), (2, SECOND)):
        lean_tag(tmp_path / "lean" / f"s{step}", step, digest)
        write_shared(tmp_path / "lean", digest)
    (tmp_path / "lean" / "latest").write_text("s2")
    found = server.upload(tmp_path / "lean", f"{request.node.name}/lean")
    forget_clients()
    return found


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


def test_a_shared_file_goes_a_day_after_it_was_written(
    server: S3Server, lean_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = zeroelastic.prune(lean_url, keep=1, dry_run=False)
    assert report.removed == ("s1",)
    assert [(one.action, one.reason) for one in report.shared] == [
        ("kept", "a save may be on its way: it changed within the last 1440 minutes"),
        ("kept", "s2 refers to it"),
    ]
    later(monkeypatch, 25 * 3600.0)
    report = zeroelastic.prune(lean_url, keep=1, dry_run=False)
    first = f"_zeroelastic_frozen/{shared_name(FIRST)}"
    assert report.removed == (first,) and report.freed_bytes == 1000
    assert first not in keys(server, lean_url) and f"_zeroelastic_frozen/{shared_name(SECOND)}" in keys(
        server, lean_url
    )
    assert check_quickly(as_path(f"{lean_url}/s2")) == ()
    report = zeroelastic.ls(lean_url)
    assert [tag.status for tag in report.tags] == ["committed"] and report.shared[0].tags == ("s2",)


def test_while_a_save_may_be_on_its_way_no_shared_file_goes(
    server: S3Server, lean_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, 25 * 3600.0)
    mark(server, lean_url, "s3", _identity_of_parent(), time.time())
    forget_clients()
    report = zeroelastic.prune(lean_url, keep=1, dry_run=False)
    assert report.removed == ("s1",) and report.shared[0].reason.startswith("s3: its save is on its way")
    mark(server, lean_url, "s3", DEAD, time.time())
    forget_clients()
    report = zeroelastic.prune(lean_url, keep=1, dry_run=False)
    assert report.removed == ("s3", f"_zeroelastic_frozen/{shared_name(FIRST)}")


def test_an_upload_of_a_shared_file_goes_when_no_save_is_on_its_way(server: S3Server, lean_url: str) -> None:
    """Uploads always look old in this store."""
    before = keys(server, lean_url)
    begin_upload(server, lean_url, f"_zeroelastic_frozen/{shared_name('d' * 64)}")
    mark(server, lean_url, "s3", _identity_of_parent(), time.time())
    forget_clients()
    open_run(as_path(lean_url)).remove_dead_saves()
    report = zeroelastic.prune(lean_url, keep=2, dry_run=False)
    assert {one.name: one.action for one in report.unfinished} == {"_zeroelastic_frozen": "kept", "s3": "kept"}
    mark(server, lean_url, "s3", DEAD, time.time())
    forget_clients()
    report = zeroelastic.prune(lean_url, keep=2, dry_run=False)
    assert {*report.removed} == {"_zeroelastic_frozen", "s3"}
    assert open_uploads(server, lean_url) == [] and keys(server, lean_url) == before


def test_a_tag_in_a_store_whose_shared_file_is_gone_is_not_whole(server: S3Server, lean_url: str) -> None:
    prefix = lean_url.removeprefix(f"s3://{BUCKET}/")
    server.client().delete_object(Bucket=BUCKET, Key=f"{prefix}/_zeroelastic_frozen/{shared_name(SECOND)}")
    forget_clients()
    assert zeroelastic.latest(lean_url, quick=True).tag.name == "s1"
    assert [tag.status for tag in zeroelastic.ls(lean_url).tags] == ["incomplete", "committed"]


@pytest.mark.extended
def test_the_commands_and_options_of_the_page_are_right(server: S3Server, url: str, tmp_path: Path) -> None:
    (page,) = (ROOT / "docs").rglob("object-stores.md")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for config in (text for language, text in found if language == "json"):
        assert parse_options(json.loads(config)).retries.number == 8
    commands = [
        line
        for language, text in found
        if language == "text"
        for line in text.splitlines()
        if line.startswith("zeroelastic ")
    ]
    assert len(commands) >= 4
    for command in commands:
        _, *arguments = command.replace("s3://bucket/run", url).split()
        done = subprocess.run(
            [sys.executable, "-m", "zeroelastic", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
