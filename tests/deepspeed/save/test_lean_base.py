"""Lean saves that refer to a base model on a disk or behind a URL, which has frozen weights bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from nodes import MOUNTS_NEED, NodeRun, can_mount
from s3_server import S3Server
from safetensors import safe_open
from safetensors.torch import save_file
from saved_files import record_of
from test_lean import LEAN
from test_lean_places import build_with_codes, load_codes
from training import Job, Outcome, attempt, build_model, look, raised, train_step

import zeroelastic
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.deepspeed.save import base_model
from zeroelastic.errors import ConfigError
from zeroelastic.testing import RankPool, compare_states

support = pytest.mark.support
SECTION = "Checkpoint engines and storage"
JOB = Job(options=LEAN, frozen_table=60)


def write_base(folder: Path, *, shards: bool = True, changed: bool = False) -> None:
    """A model directory: the frozen table by its name, the adapter's weight by its end, another bias, and the codes."""
    model = build_model(JOB).bfloat16()
    tensors = {
        "frozen_table.weight": model.frozen_table.weight.detach().clone(),
        "model.adapter.weight": model.adapter.weight.detach().clone(),
        "model.adapter.bias": torch.zeros(7, dtype=torch.bfloat16),
        "codes": torch.arange(40_000, dtype=torch.int32).reshape(200, 200),
        "head.weight": torch.ones(3, 3),
    }
    if changed:
        tensors["frozen_table.weight"][-1, -1] += 1
    folder.mkdir(parents=True)
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return
    names = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted({*names.values()}):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    save_file(tensors, folder / "unlisted.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def on_base(base: object, **changes: Any) -> Job:
    return replace(JOB, options={**LEAN, "frozen": str(base)}, **changes)


def save_on_base(job: Job, directory: str) -> Outcome:
    """Two saves, the second of which reads nothing of the base model."""
    engine = build_with_codes(job)
    for step in range(3):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(directory)
    with mock.patch.object(base_model, "digest_in_file", side_effect=AssertionError("the base model is read again")):
        engine.save_checkpoint(directory, tag="again")
    return Outcome(state, seen, [train_step(engine, step) for step in range(3, 5)])


def try_to_save(job: Job, directory: str) -> tuple[str, str]:
    engine = build_with_codes(job)
    return raised(lambda: engine.save_checkpoint(directory))


def own_tensors(run: Path) -> list[set[str]]:
    found = []
    for path in sorted((run / FROZEN_FOLDER).iterdir()):
        with safe_open(path, framework="pt") as file:
            found.append({*file.keys()})
    return found


@support(SECTION, '`"frozen"`: lean saves that refer to a base model in safetensors files', "exact", "bit for bit")
@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_what_a_base_model_has_is_not_copied(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    run, base = tmp_path / "run", tmp_path / "base"
    write_base(base)
    job = on_base(base, stage=stage)
    saved = rank_pool.run(save_on_base, 3, job, str(run))[0]
    assert own_tensors(run) == [{"adapter.bias"}]
    for tag in ("global_step3", "again"):
        paths = [file.path for file in record_of(run / tag).shared]
        assert paths[:-1] == [str(base / f"model-0000{i}-of-00002.safetensors") for i in (1, 2)]
        assert paths[-1].startswith(f"../{FROZEN_FOLDER}/")
    for outcome in rank_pool.run(load_codes, 2, job.other(), str(run)):
        assert compare_states(saved.state, outcome.state) == []
        assert outcome.gathered == saved.gathered and outcome.report.root_matches
    if stage == 3:
        check_moved(rank_pool, run, base, saved)


def check_moved(rank_pool: RankPool, run: Path, base: Path, saved: Outcome) -> None:
    """The base model is elsewhere, or is another one."""
    moved, other = base.with_name("moved"), base.with_name("other")
    base.rename(moved)
    ((kind, text),) = set(rank_pool.run(attempt, 2, JOB.other(), str(run)))
    assert kind == "MissingFileError" and str(base / "model-00001-of-00002.safetensors") in text
    assert '"frozen"' in text and "digest" in text
    for outcome in rank_pool.run(load_codes, 2, on_base(moved).other(), str(run), save=True):
        assert compare_states(saved.state, outcome.state) == [] and outcome.report.root_matches
    record = record_of(run / "global_step3")
    assert record.shared[0].path.startswith(str(moved)), "the next save refers to the new place"
    write_base(other, changed=True)
    moved.rename(base.with_name("gone"))
    ((kind, text),) = set(rank_pool.run(try_to_load, 2, on_base(other).other(), str(run)))
    assert kind == "DigestMismatchError" and "frozen_table.weight: frozen" in text
    assert "Damaged: model-0000" in text


def try_to_load(job: Job, directory: str) -> tuple[str, str]:
    engine = build_with_codes(job)
    return raised(lambda: engine.load_checkpoint(directory))


def test_weights_that_differ_from_the_base_model_are_copied(rank_pool: RankPool, tmp_path: Path) -> None:
    run, base = tmp_path / "run", tmp_path / "base" / "model.safetensors"
    write_base(base.parent, shards=False, changed=True)
    saved = rank_pool.run(save_on_base, 2, on_base(base), str(run))[0]
    assert own_tensors(run) == [{"adapter.bias", "frozen_table.weight"}]
    for outcome in rank_pool.run(load_codes, 3, JOB.other(), str(run)):
        assert compare_states(saved.state, outcome.state) == [] and outcome.report.root_matches


def save_with_base_here(job: Job, directory: str) -> Outcome:
    """A save by nodes each of which has the base model on its own disk."""
    base = Path(directory) / "base"
    if dist.get_rank() in (0, 2):
        write_base(base)
    dist.barrier()
    return save_on_base(job, directory)


def test_a_node_without_the_base_model_gets_it_from_others(rank_pool: RankPool, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip(MOUNTS_NEED)
    base = tmp_path / "disk" / "base"  # where each node sees its own
    job = on_base(base, config={"checkpoint": {"use_node_local_storage": True}})
    run = NodeRun(tmp_path, rank_pool, job, (0, 0, 1), save_with_base_here)
    for placed in ((1, 2, 0), (0, 1)):
        for outcome in run.call(placed, load_codes, job.other(), run.nodes.path):
            assert compare_states(run.outcome.state, outcome.state) == [] and outcome.report.root_matches


def test_a_base_model_behind_a_url(rank_pool: RankPool, tmp_path: Path, s3: S3Server) -> None:
    write_base(tmp_path / "base")
    job = on_base(s3.upload(tmp_path / "base", "base"))
    shutil.rmtree(tmp_path / "base")
    saved = rank_pool.run(save_on_base, 2, job, str(tmp_path / "run"))[0]
    for outcome in rank_pool.run(load_codes, 3, JOB.other(), str(tmp_path / "run")):
        assert compare_states(saved.state, outcome.state) == [] and outcome.report.root_matches
    assert own_tensors(tmp_path / "run") == [{"adapter.bias"}]
    assert zeroelastic.verify(tmp_path / "run/global_step3").valid


@pytest.mark.parametrize(
    ("base", "said"),
    [("missing", "no such"), ("empty", "has no safetensors files"), ("damaged", "damaged.safetensors")],
)
def test_a_base_model_that_cannot_be_read_is_an_error(
    rank_pool: RankPool, tmp_path: Path, base: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/damaged.safetensors").write_bytes(b"no header")
    ((kind, text),) = set(rank_pool.run(try_to_save, 2, on_base(tmp_path / base), str(tmp_path / "run")))
    assert kind == "SaveError" and '"frozen"' in text and said in text and "Nothing was saved" in text
    assert not [path for path in (tmp_path / "run").iterdir() if path.name != FROZEN_FOLDER]


def test_a_base_model_without_lean_saves_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'frozen is .*Add "lean": true'):
        parse_options({"zeroelastic": {"frozen": "/models/base"}})
