"""What is wrong with a checkpoint raises the same error on every rank, before any tensor is touched, without a hang."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved_files import flip
from synthetic import sealed
from training import Job, attempt, attempt_each, build_engine, gathered, of_all, raised, train_and_save

from zeroelastic.checkpoint.open import open_checkpoint
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


def refused(rank_pool: RankPool, job: Job, directory: Path) -> tuple[str, str]:
    """The one error that every rank raised."""
    return refused_each(rank_pool, [directory], job)[0]


def refused_each(rank_pool: RankPool, directories: list[Path], job: Job | None = None) -> list[tuple[str, str]]:
    """The one error that every rank raised of each directory, into one engine."""
    errors = of_all(rank_pool.run(attempt_each, 3, job or Job().other(), list(map(str, directories)), timeout=LIMIT_S))
    assert all(error for error, _ in errors), "nothing was raised"
    return errors


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target / "global_step3"


Damage = Callable[[Path], object]


def removed(*patterns: str) -> Damage:
    return lambda tag: [path.unlink() for pattern in patterns for path in tag.glob(pattern)]


def cut(share: float) -> Damage:
    def damage(tag: Path) -> None:
        path = next(tag.glob("*rank_2_mp*optim_states.pt"))
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def record(change: Callable[[Path], object]) -> Damage:
    return lambda tag: change(tag / "zeroelastic.json")


def edited(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(sealed(json.dumps(content)))

    return record(damage)


def _zero_digest(content: dict[str, Any]) -> None:
    rows = content["params"][-1]["rows"]
    rows[-1][2][0] = "0" * 16


def _zero_size(content: dict[str, Any]) -> None:
    content["files"][next(iter(content["files"]))] = 0


MISSING, DAMAGED, ANY = "MissingFileError", "CheckpointError", "CheckpointError, MissingFileError"
OPTIM, MODEL = "zero_pp_rank_2_mp_rank_00_optim_states.pt", "zero_pp_rank_2_mp_rank_00_model_states.pt"
FILE_DAMAGE: dict[str, tuple[Damage, str, tuple[str, ...]]] = {
    "elastic, no optimizer file": (removed("*" + OPTIM), MISSING, (OPTIM,)),
    "elastic, no model states": (removed("*" + MODEL), MISSING, (MODEL,)),
    "elastic, two missing": (removed("*rank_1_mp*optim*", "*rank_3_mp*optim*"), MISSING, ("rank_1_", "rank_3_")),
    "elastic, empty file": (cut(0.0), DAMAGED, (OPTIM,)),
    "elastic, truncated": (cut(0.3), DAMAGED, (OPTIM,)),
    "elastic, end cut off": (cut(0.999), DAMAGED, (OPTIM,)),
    "elastic, record cut": (record(lambda path: path.write_text(path.read_text()[:-20])), ANY, ()),
    "elastic, record empty": (record(lambda path: path.write_bytes(b"")), ANY, ()),
    "elastic, record's digest": (edited(_zero_digest), ANY, ()),
    "elastic, record's field": (edited(lambda content: content.update(surprise=1)), ANY, ()),
    "elastic, record's size": (edited(_zero_size), ANY, ()),
    "elastic, newer record": (edited(lambda content: content.update(format_version=99)), "NewerFormatError", ()),
    "elastic, record's ranks": (edited(lambda content: content.update(world_size=5)), ANY, ()),
    "rigid, no optimizer file": (removed("*" + OPTIM), MISSING, (OPTIM,)),
    "rigid, no model states": (removed("*" + MODEL), MISSING, (MODEL,)),
    "rigid, empty file": (cut(0.0), DAMAGED, (OPTIM,)),
    "rigid, truncated": (cut(0.9), DAMAGED, (OPTIM,)),
}


@pytest.mark.support("Checkpoint engines and storage", "missing files", "refused", "all of them named")
@pytest.mark.support("Checkpoint engines and storage", "truncated files", "refused")
@pytest.mark.support("Checkpoint engines and storage", "a damaged or newer commit record", "refused")
def test_what_is_wrong_with_files_is_refused_on_every_rank(
    rank_pool: RankPool, elastic_save: Path, rigid_save: Path, tmp_path: Path
) -> None:
    """Three ranks load every damaged checkpoint into one engine."""
    for name, (damage, _, _) in FILE_DAMAGE.items():
        damage(copied(elastic_save if name.startswith("elastic") else rigid_save, tmp_path / name))
    for (name, (_, kinds, said)), (error, text) in zip(
        FILE_DAMAGE.items(), refused_each(rank_pool, [tmp_path / name for name in FILE_DAMAGE]), strict=True
    ):
        assert error and error in kinds, (name, text)
        assert name in text and all(part in text for part in said), (name, text)


@pytest.mark.support("Checkpoint engines and storage", "files of two saves in one tag", "refused")
def test_files_of_two_saves(rank_pool: RankPool, elastic_save: Path, rigid_save: Path, tmp_path: Path) -> None:
    """Of another save of the same step; of another step; of another world size."""
    rigid = Job(elastic=False, installed=False)
    rank_pool.run(train_and_save, 4, Job(), str(tmp_path / "o1"), after=0)
    rank_pool.run(train_and_save, 4, rigid, str(tmp_path / "o2"), before=2, after=0)
    rank_pool.run(train_and_save, 3, rigid, str(tmp_path / "o3"), after=0)
    mixed = (
        ("record", elastic_save, "o1/global_step3"),
        ("step", rigid_save, "o2/global_step2"),
        ("world size", rigid_save, "o3/global_step3"),
    )
    for name, source, other in mixed:
        tag = copied(source, tmp_path / name)
        file = next(tag.glob("*rank_1_mp*optim_states.pt")).name
        shutil.copy(tmp_path / other / file, tag / file)
    for (name, _, _), (error, text) in zip(
        mixed, refused_each(rank_pool, [tmp_path / name for name, _, _ in mixed]), strict=True
    ):
        assert error == "CheckpointError" and "two saves are mixed" in text, (name, text)
        assert name != "step" or "step" in text.partition("differ in")[2]


@pytest.mark.core
def test_every_layout_problem_is_listed(rank_pool: RankPool, elastic_save: Path) -> None:
    error, text = of_all(rank_pool.run(attempt_other_model, 3, str(elastic_save), timeout=LIMIT_S))
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


@pytest.mark.support(
    "Checkpoint engines and storage", "changed bytes", "refused", "file, parameter and state key are named"
)
def test_damaged_payload_names_parameter_and_state(rank_pool: RankPool, elastic_save: Path, tmp_path: Path) -> None:
    tag = copied(elastic_save, tmp_path / "c")
    shard = open_checkpoint(tag).shard(1)
    target = shard.layout.index()["up.weight"]
    offset = int(shard.extents["exp_avg"].offset[target])
    flip(shard.path, offset + 5, 0x10)
    error, text = of_all(rank_pool.run(load_error, 3, Job().other(), str(tmp_path / "c"), timeout=LIMIT_S))
    assert error == "DigestMismatchError" and "up.weight: exp_avg" in text and "1 tensor differs" in text
    assert f"Damaged: {shard.path.name}." in text


def load_error(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.load_checkpoint(directory))


@pytest.mark.support("Using it", "unknown options of the `zeroelastic` block", "refused", "the known ones are named")
def test_misspelt_option(rank_pool: RankPool) -> None:
    options: dict[str, Any] = {
        "verfiy": {"verfiy": True},
        "verify": {"verify": "sometimes"},
        "strict": {"strict": 1},
        "block": [],
    }
    errors = of_all(rank_pool.run(build_errors, 2, [Job(options=wrong) for wrong in options.values()], timeout=LIMIT_S))
    for named, (error, text) in zip(options, errors, strict=True):
        assert error == "ConfigError" and named in text
    known = errors[0][1]
    assert ", ".join(sorted(Options.model_fields)) in known and "store_timeout_s, strict, upload, verify" in known


def build_errors(jobs: list[Job]) -> list[tuple[str, str]]:
    return [raised(partial(build_engine, job)) for job in jobs]


@pytest.mark.support(
    "Using it", 'another global batch under `"strict": true`', "refused", "otherwise a loud line of the report"
)
@pytest.mark.core
def test_changed_global_batch_is_loud_and_strict_refuses(rank_pool: RankPool, elastic_save: Path) -> None:
    job = Job().other(batch=60)
    reports = rank_pool.run(load_report, 3, job, str(elastic_save))
    note = next(note for note in reports[0].notes if "GLOBAL BATCH" in note)
    assert "from 120 to 60" in note and "train_micro_batch_size_per_gpu 40" in note
    error, text = refused(rank_pool, Job().other(batch=60, options={"strict": True}), elastic_save)
    assert error == "StrictError" and "from 120 to 60" in text


def load_report(job: Job, directory: str) -> object:
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    return engine.zeroelastic_report


def test_directory_and_tag_that_do_not_exist(rank_pool: RankPool, tmp_path: Path, elastic_save: Path) -> None:
    for nothing, absent, different in rank_pool.run(load_nothing, 2, str(tmp_path), str(elastic_save)):
        assert nothing == (None, None)  # as DeepSpeed does without `latest`
        assert absent[0] == "MissingFileError" and "global_step77" in absent[1]
        assert different[0] == "CheckpointError" and "same tag" in different[1]


def load_nothing(empty: str, directory: str) -> tuple[object, tuple[str, str], tuple[str, str]]:
    """What a load from an empty directory returns; the errors for an absent tag, and for one of each rank's own."""
    engine = build_engine(Job())
    own = f"global_step{torch.distributed.get_rank()}"
    return (
        engine.load_checkpoint(empty),
        raised(lambda: engine.load_checkpoint(directory, tag="global_step77")),
        raised(lambda: engine.load_checkpoint(directory, tag=own)),
    )


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
    kind, text = of_all(rank_pool.run(use_orphan, 3, job, str(tmp_path), timeout=LIMIT_S))
    assert kind == "LayoutMismatchError" and "down.bias" in text


@pytest.mark.parametrize("stage", [2, 3])
def test_other_names_without_strict_are_left_to_deepspeed(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """It goes by position, and the run gets the same with us and without us; with ``strict`` it is an error."""
    job = Job(elastic=False, stage=stage, extra="renamed")
    rank_pool.run(train_and_save, 2, replace(job, installed=False, extra="first"), str(tmp_path))
    alone = rank_pool.run(load_as, 2, replace(job, installed=False, perturb=0.5), str(tmp_path), strict=False)
    assert [error for error, _ in alone] == [("", "")] * 2
    assert rank_pool.run(load_as, 2, replace(job, perturb=0.5), str(tmp_path), strict=False) == alone
    for (kind, text), _ in rank_pool.run(load_as, 2, job, str(tmp_path), strict=True):
        assert kind == "LayoutMismatchError" and "renamed" in text


def load_as(job: Job, directory: str, *, strict: bool) -> tuple[tuple[str, str], dict[str, str]]:
    """The error of a load, and the master weights and optimizer state after it."""
    engine = build_engine(job)
    error = raised(lambda: engine.load_checkpoint(directory, load_module_strict=strict))
    return error, gathered(engine) if error == ("", "") else {}


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
    checkpoint = SimpleNamespace(inventory=SimpleNamespace(reads_headers=True))
    plan: Any = SimpleNamespace(live=live, tag_dir="run/t", checkpoint=checkpoint)
    wrong = tuple((f"layers.{i:05}.weight", "fp32") for i in range(10_000))
    with pytest.raises(DigestMismatchError, match="10000 tensors differ") as caught:
        verify.raise_mismatch(verify.Verification("a", None, False, None, wrong), plan)
    assert "layers.00007.weight: fp32 ..." in str(caught.value) and "layers.00008" not in str(caught.value)
    assert sum(len(pickle.dumps(value)) for value in sent) < 1000


def attempt_where_one_fails_unforeseen(directory: str) -> tuple[str, str]:
    """What a load raises where rank 1 meets an error that is none of ours, before anything is read."""
    import torch.distributed as dist

    from zeroelastic.deepspeed.load import preflight

    engine = build_engine(Job().other())
    if dist.get_rank() == 1:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("unforeseen")

        preflight.plan_load = fail
    return raised(partial(engine.load_checkpoint, directory))


def test_an_unforeseen_error_of_one_rank_ends_the_load_on_all(rank_pool: RankPool, elastic_save: Path) -> None:
    errors = rank_pool.run(attempt_where_one_fails_unforeseen, 3, str(elastic_save), timeout=LIMIT_S)
    assert errors[1] == ("RuntimeError", "unforeseen")
    assert {name for name, _ in (errors[0], errors[2])} == {"RemoteRankError"}
    assert all("rank 1 failed with RuntimeError: unforeseen" in text for _, text in (errors[0], errors[2]))
