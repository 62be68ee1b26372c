"""Lean saves where no directory is shared by all ranks: in object stores, and on the disks of nodes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import with_swept
from nodes import MOUNTS_NEED, NodeRun, can_mount
from s3_server import BUCKET, S3Server, forget_clients
from saves import Saved, check_resumed
from test_lean import LEAN
from training import (
    LOSS_RTOL,
    Job,
    Outcome,
    attempt,
    build_engine,
    build_model,
    build_optimizer,
    ds_config,
    look,
    raised,
    resume,
    train_and_save,
    train_step,
)

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, read_shared_head
from zeroelastic.testing import RankPool, compare_states

support = pytest.mark.support
SECTION = "Checkpoint engines and storage"

WIDE = 200_000
"""Rows of a frozen table of 6 MB: two parts of an upload of 5 MiB."""

JOB = Job(options={**LEAN, "store_part_mib": 5}, frozen_table=WIDE)


def keys(server: S3Server, prefix: str) -> dict[str, int]:
    """The objects below a prefix, and their bytes."""
    forget_clients()
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    return {entry["Key"].removeprefix(f"{prefix}/"): entry["Size"] for entry in found}


@support(SECTION, "lean saves to `s3://`, ZeRO stages 1 to 3", "exact", "each byte of the frozen weights written once")
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
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
    assert kind == "SaveError" and f"{FROZEN_FOLDER}/frozen-" in text and "Nothing was saved" in text
    assert not keys(calm, name)
    assert not calm.client().list_multipart_uploads(Bucket=BUCKET, Prefix=f"{name}/").get("Uploads")


# --- functions that run on ranks --------------------------------------------------------------------------------------


def build_with_codes(job: Job) -> Any:
    """An engine whose model has a large buffer that training does not change."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    model = build_model(job)
    codes = torch.arange(40_000, dtype=torch.int32) + int(job.perturb * 10)
    model.register_buffer("codes", codes.reshape(200, 200))
    optimizer = build_optimizer(job, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(job), lr_scheduler=schedule)
    return engine


def save_codes(job: Job, directory: str) -> Outcome:
    engine = build_with_codes(job)
    for step in range(3):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(directory)
    engine.save_checkpoint(directory, tag="again")
    return Outcome(state, seen, [train_step(engine, step) for step in range(3, 5)])


def load_codes(job: Job, directory: str, *, save: bool = False) -> Outcome:
    engine = build_with_codes(job)
    path, _ = engine.load_checkpoint(directory, tag="global_step3")
    assert path is not None
    state, seen = look(engine)
    if save:
        engine.save_checkpoint(directory)
    losses = [train_step(engine, step) for step in range(3, 5)]
    return Outcome(state, seen, losses, engine.zeroelastic_report)


def save_twice(job: Job, directory: str) -> Any:
    """Another save of the same process, and one of an engine that has resumed."""
    outcome = train_and_save(job, directory)
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    train_step(engine, 3)
    engine.save_checkpoint(directory, tag="again")
    engine.save_checkpoint(directory, tag="global_step3")
    return outcome


def try_to_save(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.save_checkpoint(directory))


# --- disks of nodes ---------------------------------------------------------------------------------------------------


NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def shared_file(run: NodeRun, node: int) -> Path:
    (path,) = (run.nodes.disk(node) / FROZEN_FOLDER).iterdir()
    return path


@support(SECTION, "lean saves on node-local disks, on nodes old and new", "exact", "every node has the shared file")
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_a_node_without_the_shared_file_gets_it_from_others(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """Fewer ranks, a new node with rank 0, and more ranks on more nodes."""
    if not can_mount():
        pytest.skip(MOUNTS_NEED)
    job = Job(stage=stage, options=LEAN, config=NODE_LOCAL, frozen_table=60)
    run = NodeRun(tmp_path, rank_pool, job, (0, 0, 1), save_codes)
    heads = [read_shared_head(shared_file(run, node))[0] for node in (0, 1)]
    assert heads[0] == heads[1] and set(heads[0].tensors) > {"codes", "frozen_table.weight"}
    assert shared_file(run, 0).read_bytes() == shared_file(run, 1).read_bytes()
    records = [read_record(run.nodes.disk(node) / "global_step3") for node in (0, 1)]
    assert records[0] is not None and records[1] is not None and records[0].shared == records[1].shared != ()
    for placed in ((0, 1), (2, 0, 1), (1, 2, 0, 3)) if stage == 3 else ((0, 1, 2),):
        found = run.call(placed, load_codes, job.other(), run.nodes.path)
        for outcome in found:
            if stage == 3 or outcome is found[0]:
                assert compare_states(run.outcome.state, outcome.state) == []
            assert outcome.gathered == run.outcome.gathered and outcome.report.root_matches
            assert outcome.losses == pytest.approx(run.outcome.losses, rel=LOSS_RTOL["bf16"])


def test_ranks_that_see_the_tag_and_not_the_shared_file_get_it_from_others(rank_pool: RankPool, tmp_path: Path) -> None:
    """Both nodes have a copy of the whole tag, and one of them the shared file; then none of them."""
    if not can_mount():
        pytest.skip(MOUNTS_NEED)
    job = Job(options=LEAN, config=NODE_LOCAL, frozen_table=60)
    run = NodeRun(tmp_path, rank_pool, job, (0, 0), save_codes)
    shutil.copytree(run.nodes.disk(0), run.nodes.disk(1), dirs_exist_ok=True)
    shutil.rmtree(run.nodes.disk(1) / FROZEN_FOLDER)
    for outcome in run.call((1, 0, 1), load_codes, job.other(), run.nodes.path, save=True):
        assert compare_states(run.outcome.state, outcome.state) == [] and outcome.report.root_matches
    assert shared_file(run, 1).read_bytes() == shared_file(run, 0).read_bytes(), "the next save gives each node a copy"
    for node in (0, 1):
        shutil.rmtree(run.nodes.disk(node) / FROZEN_FOLDER)
    ((kind, text),) = set(run.call((1, 0), attempt, job.other(), run.nodes.path))
    assert kind == "MissingFileError" and "takes its frozen weights" in text
