"""What is wrong with a checkpoint raises the same error on every rank, before any tensor is touched, without a hang."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic import sealed
from training import Job, attempt, build_engine, raised, train_and_save

from zeroelastic.checkpoint.tag_files import NO_TENSOR_PARALLEL
from zeroelastic.deepspeed.load import verify
from zeroelastic.deepspeed.options import Options
from zeroelastic.errors import DigestMismatchError
from zeroelastic.testing import RankError, RankPool

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def elastic_save(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("elastic")
    rank_pool.run(train_and_save, 4, Job(), str(directory), after=0)
    return directory


@pytest.fixture(scope="module")
def rigid_save(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rigid")
    rank_pool.run(train_and_save, 4, Job(elastic=False, installed=False), str(directory), after=0)
    return directory


def refused(rank_pool: RankPool, job: Job, directory: Path, world_size: int = 3) -> tuple[str, str]:
    """The one error that every rank raised."""
    errors = rank_pool.run(attempt, world_size, job, str(directory), timeout=LIMIT_S)
    assert len(set(errors)) == 1, errors
    assert errors[0][0], "nothing was raised"
    return errors[0]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target / "global_step3"


@pytest.mark.support("Checkpoint engines and storage", "missing files", "refused", "all of them named")
@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ("elastic", "optim_states"),
        ("elastic", "model_states"),
        ("rigid", "optim_states"),
        ("rigid", "model_states"),
    ],
)
def test_missing_shard(
    rank_pool: RankPool, request: pytest.FixtureRequest, tmp_path: Path, format: str, kind: str
) -> None:
    tag = copied(request.getfixturevalue(f"{format}_save"), tmp_path / "c")
    name = next(tag.glob(f"*rank_2_mp*{kind}.pt"))
    name.unlink()
    error, text = refused(rank_pool, Job().other(), tmp_path / "c")
    assert error == "MissingFileError" and f"zero_pp_rank_2_mp_rank_00_{kind}.pt" in text


@pytest.mark.support("Checkpoint engines and storage", "missing files", "refused", "all of them named")
def test_two_missing_shards_are_both_named(rank_pool: RankPool, elastic_save: Path, tmp_path: Path) -> None:
    tag = copied(elastic_save, tmp_path / "c")
    for rank in (1, 3):
        next(tag.glob(f"*rank_{rank}_mp*optim_states.pt")).unlink()
    error, text = refused(rank_pool, Job().other(), tmp_path / "c")
    assert error == "MissingFileError" and "rank_1_" in text and "rank_3_" in text


@pytest.mark.support("Checkpoint engines and storage", "files of two saves in one tag", "refused")
@pytest.mark.parametrize("with_record", [True, False])
def test_elastic_shards_of_two_saves(
    rank_pool: RankPool, elastic_save: Path, tmp_path: Path, with_record: bool
) -> None:
    rank_pool.run(train_and_save, 4, Job(), str(tmp_path / "other"), after=0)
    tag = copied(elastic_save, tmp_path / "c")
    name = next(tag.glob("*rank_1_mp*optim_states.pt")).name
    shutil.copy(tmp_path / "other" / "global_step3" / name, tag / name)
    if not with_record:
        (tag / "zeroelastic.json").unlink()
    error, text = refused(rank_pool, Job().other(), tmp_path / "c")
    assert error == "CheckpointError" and "two saves are mixed" in text


@pytest.mark.support("Checkpoint engines and storage", "files of two saves in one tag", "refused")
def test_rigid_shards_of_two_steps(rank_pool: RankPool, rigid_save: Path, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 4, Job(elastic=False, installed=False), str(tmp_path / "o"), before=2, after=0)
    tag = copied(rigid_save, tmp_path / "c")
    name = next(tag.glob("*rank_1_mp*optim_states.pt")).name
    shutil.copy(tmp_path / "o" / "global_step2" / name, tag / name)
    error, text = refused(rank_pool, Job().other(), tmp_path / "c")
    assert error == "CheckpointError" and "two saves are mixed" in text and "step" in text


@pytest.mark.support("Checkpoint engines and storage", "files of two saves in one tag", "refused")
def test_shards_of_another_world_size(rank_pool: RankPool, rigid_save: Path, tmp_path: Path) -> None:
    rank_pool.run(train_and_save, 3, Job(elastic=False, installed=False), str(tmp_path / "o"), after=0)
    tag = copied(rigid_save, tmp_path / "c")
    name = next(tag.glob("*rank_1_mp*optim_states.pt")).name
    shutil.copy(tmp_path / "o" / "global_step3" / name, tag / name)
    error, text = refused(rank_pool, Job().other(), tmp_path / "c")
    assert error == "CheckpointError" and "two saves are mixed" in text


@pytest.mark.support("Checkpoint engines and storage", "truncated files", "refused")
@pytest.mark.parametrize("cut", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("format", ["elastic", "rigid"])
def test_truncated_shard(
    rank_pool: RankPool, request: pytest.FixtureRequest, tmp_path: Path, format: str, cut: float
) -> None:
    tag = copied(request.getfixturevalue(f"{format}_save"), tmp_path / "c")
    path = next(tag.glob("*rank_2_mp*optim_states.pt"))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)])
    error, text = refused(rank_pool, Job().other(), tmp_path / "c", world_size=2)
    assert error == "CheckpointError" and path.name in text


@pytest.mark.core
def test_every_layout_problem_is_listed(rank_pool: RankPool, elastic_save: Path) -> None:
    errors = rank_pool.run(attempt_other_model, 3, str(elastic_save), timeout=LIMIT_S)
    assert len(set(errors)) == 1
    error, text = errors[0]
    assert error == "LayoutMismatchError"
    for problem in (
        "parameter extra.weight [16, 16] of the model is not in the checkpoint",
        "parameter extra.bias [16] of the model is not in the checkpoint",
        "parameter three [3] of the checkpoint is not in the model",
        "parameter renamed [3] of the model is not in the checkpoint",
        "parameter scale has shape [1] in the checkpoint and [2] in the model",
    ):
        assert problem in text, text


def attempt_other_model(directory: str) -> tuple[str, str]:
    """A model with a parameter renamed, one added, and one of another shape."""
    import training

    build = training.build_model

    def other(job: Job) -> torch.nn.Module:
        model = build(job)
        model.register_parameter("renamed", model.three)
        del model.three
        model.scale = torch.nn.Parameter(torch.ones(2))
        return model

    training.build_model = other  # type: ignore[assignment]
    return attempt(Job(extra="extra"), directory)


def test_another_number_of_optimizer_groups(rank_pool: RankPool, elastic_save: Path) -> None:
    error, text = refused(rank_pool, Job(groups=1), elastic_save)
    assert error == "LayoutMismatchError" and "2 optimizer groups and the run has 1" in text


def test_parameters_in_other_groups(rank_pool: RankPool, elastic_save: Path) -> None:
    errors = rank_pool.run(attempt_regrouped, 3, str(elastic_save), timeout=LIMIT_S)
    assert len(set(errors)) == 1
    assert errors[0][0] == "LayoutMismatchError"
    assert "parameter norm.weight is in optimizer group 1 of the checkpoint and in group 0 of the run" in errors[0][1]


def attempt_regrouped(directory: str) -> tuple[str, str]:
    import training

    build = training.build_optimizer

    def other(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = build(job, model)
        first, second = optimizer.param_groups
        moved = next(p for p in second["params"] if p is model.norm.weight)
        second["params"] = [p for p in second["params"] if p is not moved]
        first["params"].append(moved)
        return optimizer

    training.build_optimizer = other  # type: ignore[assignment]
    return attempt(Job(), directory)


def test_frozen_parameter_that_was_trained(rank_pool: RankPool, elastic_save: Path) -> None:
    error, text = refused(rank_pool, Job(frozen=False), elastic_save)
    assert error == "LayoutMismatchError" and "adapter.weight" in text


RECORD_DAMAGE: dict[str, Callable[[Path], None]] = {
    "not_json": lambda path: path.write_text(path.read_text()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "digest": lambda path: _edit(path, lambda r: _zero_digest(r["params"][-1]["rows"])),
    "unknown_field": lambda path: _edit(path, lambda r: r.update(surprise=1)),
    "size": lambda path: _edit(path, lambda r: _zero_size(r["file_rows"])),
    "newer": lambda path: _edit(path, lambda r: r.update(format_version=99)),
    "world_size": lambda path: _edit(path, lambda r: r.update(world_size=5)),
}


def _zero_digest(rows: list[str]) -> None:
    rows[-1] = "0" * 16 + rows[-1][16:]


def _zero_size(rows: list[str]) -> None:
    rows[0] = "0".rjust(19) + rows[0][19:]


def _edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(sealed(json.dumps(record)))


@pytest.mark.support("Checkpoint engines and storage", "a damaged or newer commit record", "refused")
@pytest.mark.parametrize("damage", RECORD_DAMAGE)
def test_corrupt_commit_record(rank_pool: RankPool, elastic_save: Path, tmp_path: Path, damage: str) -> None:
    tag = copied(elastic_save, tmp_path / "c")
    RECORD_DAMAGE[damage](tag / "zeroelastic.json")
    error, text = refused(rank_pool, Job().other(), tmp_path / "c", world_size=2)
    expected = ("NewerFormatError",) if damage == "newer" else ("CheckpointError", "MissingFileError")
    assert error in expected and str(tag) in text


@pytest.mark.support(
    "Checkpoint engines and storage", "changed bytes", "refused", "file, parameter and state key are named"
)
@pytest.mark.parametrize("key", ["fp32", "exp_avg"])
def test_damaged_payload_names_parameter_and_state(
    rank_pool: RankPool, elastic_save: Path, tmp_path: Path, key: str
) -> None:
    from zeroelastic.checkpoint.open import open_checkpoint

    tag = copied(elastic_save, tmp_path / "c")
    shard = open_checkpoint(tag).shard(1)
    target = shard.layout.index()["up.weight"]
    offset = int(shard.extents[key].offset[target])
    data = bytearray(shard.path.read_bytes())
    data[offset + 5] ^= 0x10
    shard.path.write_bytes(bytes(data))
    errors = rank_pool.run(load_error, 3, Job().other(), str(tmp_path / "c"), timeout=LIMIT_S)
    assert len(set(errors)) == 1
    error, text = errors[0]
    assert error == "DigestMismatchError" and f"up.weight: {key}" in text and "1 tensor differs" in text
    assert f"Damaged: {shard.path.name}." in text


def load_error(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.load_checkpoint(directory))


@pytest.mark.support("Using it", "unknown options of the `zeroelastic` block", "refused", "the known ones are named")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"verfiy": True}, "verfiy"),
        ({"verify": "sometimes"}, "verify"),
        ({"strict_batch": 1}, "strict_batch"),
        ([], "block"),
    ],
)
def test_misspelt_option(rank_pool: RankPool, options: object, named: str) -> None:
    errors = rank_pool.run(build_error, 2, Job(options=options), timeout=LIMIT_S)  # type: ignore[arg-type]
    assert len(set(errors)) == 1
    error, text = errors[0]
    assert error == "ConfigError" and named in text
    if named == "verfiy":
        assert ", ".join(sorted(Options.model_fields)) in text and "store_timeout_s, strict_batch, verify" in text


def build_error(job: Job) -> tuple[str, str]:
    return raised(lambda: build_engine(job))


@pytest.mark.support(
    "Using it", 'another global batch under `"strict_batch": true`', "refused", "otherwise a loud line of the report"
)
@pytest.mark.core
def test_changed_global_batch_is_loud_and_strict_refuses(rank_pool: RankPool, elastic_save: Path) -> None:
    job = Job().other(batch=60)
    reports = rank_pool.run(load_report, 3, job, str(elastic_save))
    note = next(note for note in reports[0].notes if "GLOBAL BATCH" in note)
    assert "from 120 to 60" in note and "train_micro_batch_size_per_gpu 40" in note
    error, text = refused(rank_pool, Job().other(batch=60, options={"strict_batch": True}), elastic_save)
    assert error == "StrictError" and "from 120 to 60" in text


def load_report(job: Job, directory: str) -> object:
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    return engine.zeroelastic_report


def test_directory_and_tag_that_do_not_exist(rank_pool: RankPool, tmp_path: Path, elastic_save: Path) -> None:
    assert rank_pool.run(load_nothing, 2, str(tmp_path)) == [(None, None)] * 2  # as DeepSpeed does without `latest`
    errors = rank_pool.run(attempt, 2, Job(), str(elastic_save), tag="global_step77", timeout=LIMIT_S)
    assert len(set(errors)) == 1 and errors[0][0] == "MissingFileError" and "global_step77" in errors[0][1]


def load_nothing(directory: str) -> object:
    return build_engine(Job()).load_checkpoint(directory)


def test_ranks_that_ask_for_different_tags(rank_pool: RankPool, elastic_save: Path) -> None:
    errors = rank_pool.run(attempt_rank_tag, 2, str(elastic_save), timeout=LIMIT_S)
    assert len(set(errors)) == 1 and errors[0][0] == "CheckpointError" and "same tag" in errors[0][1]


def attempt_rank_tag(directory: str) -> tuple[str, str]:
    return attempt(Job(), directory, tag=f"global_step{torch.distributed.get_rank()}")


def test_an_error_of_the_module_load_on_one_rank_stops_all(rank_pool: RankPool, elastic_save: Path) -> None:
    with pytest.raises(RankError, match="only here"):
        rank_pool.run(fail_in_module_load, 3, str(elastic_save), timeout=LIMIT_S)


def fail_in_module_load(directory: str) -> None:
    def load(src: object, dst: object) -> None:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("only here")

    build_engine(Job()).load_checkpoint(directory, custom_load_fn=load)


@pytest.mark.support("Parameters", "a parameter that no optimizer group has", "exact", "as a frozen one")
@pytest.mark.core
def test_a_parameter_that_no_optimizer_has_is_saved_although_it_requires_a_gradient(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(use_orphan, 2, Job(), str(tmp_path), save=True, timeout=LIMIT_S)
    assert rank_pool.run(use_orphan, 3, Job(), str(tmp_path), timeout=LIMIT_S) == [("", "")] * 3


@pytest.mark.core
def test_what_deepspeed_alone_saves_without_it_is_left_to_deepspeed(rank_pool: RankPool, tmp_path: Path) -> None:
    """It loads at one size, as without us; at another size it is refused by name."""
    job = Job(elastic=False)
    rank_pool.run(use_orphan, 2, replace(job, installed=False), str(tmp_path), save=True)
    assert rank_pool.run(use_orphan, 2, job, str(tmp_path)) == [("", "")] * 2
    errors = rank_pool.run(use_orphan, 3, job, str(tmp_path), timeout=LIMIT_S)
    assert len(set(errors)) == 1 and errors[0][0] == "LayoutMismatchError" and "down.bias" in errors[0][1]


def use_orphan(job: Job, directory: str, save: bool = False) -> tuple[str, str]:
    leave_out_of_the_optimizer()
    if not save:
        return load_error(job, directory)
    build_engine(job).save_checkpoint(directory)
    return "", ""


def leave_out_of_the_optimizer() -> None:
    """A parameter that requires a gradient but that the optimizer is not given."""
    import training

    build = training.build_optimizer

    def other(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = build(job, model)
        group = optimizer.param_groups[1]
        group["params"] = [p for p in group["params"] if p is not model.down.bias]
        return optimizer

    training.build_optimizer = other  # type: ignore[assignment]


def test_ranks_exchange_few_of_the_names_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has eight; of a model with many parameters there may be a million, and thousands of ranks."""
    sent: list[object] = []

    def exchange(*values: Any) -> list[Any]:
        sent.append(values[-1])
        return [values[-1]]

    monkeypatch.setattr(verify, "all_gather", exchange)
    monkeypatch.setattr(verify, "gather_over_tp", exchange)
    live: Any = SimpleNamespace(tp=NO_TENSOR_PARALLEL, rank=1)
    plan: Any = SimpleNamespace(checkpoint=SimpleNamespace(tag_dir="run/t"), visibility=None)
    wrong = tuple((f"layers.{i:05}.weight", "fp32") for i in range(10_000))
    with pytest.raises(DigestMismatchError, match="10000 tensors differ") as caught:
        verify.raise_mismatch(live, verify.Verification("a", None, False, None, wrong), plan)
    assert "layers.00007.weight: fp32 ..." in str(caught.value) and "layers.00008" not in str(caught.value)
    assert sum(len(pickle.dumps(value)) for value in sent) < 1000
