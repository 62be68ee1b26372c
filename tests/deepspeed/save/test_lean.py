"""Lean saves: what a tag holds, what it refers to, and resumes from it at other sizes and stages.

The state after each load is compared with what DeepSpeed gathered when it was saved, and the content root with that of
a full save of the same state.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from safetensors import safe_open
from saved_files import record_of
from training import LOSS_RTOL, Job, Outcome, build_engine, look, raised, resume, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.testing import RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

LEAN = {"verify": True, "lean": True}
JOB = Job(options=LEAN, frozen_table=60)
STAGES = {3: {}, 2: {"stage": 2}, 1: {"stage": 1}}


def shared_files(run: Path) -> list[Path]:
    return sorted((run / FROZEN_FOLDER).iterdir())


def save_both(job: Job, lean: str, full: str) -> Outcome:
    """Train, save lean and in full, and train on."""
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(lean)
    engine._config._param_dict["zeroelastic"] = {"verify": True}
    engine.save_checkpoint(full)
    return Outcome(state, seen, [train_step(engine, step) for step in range(3, 5)])


@pytest.mark.support(
    "Using it", '`"lean": true`: frozen weights once per run', "exact", "stages 1 to 3, any size and stage"
)
@pytest.mark.parametrize(
    ("stage", "ranks", "other_stage", "other_ranks", "elastic"),
    [
        pytest.param(3, 3, 3, 2, True, marks=pytest.mark.core),
        (3, 3, 2, 2, False),
        (2, 3, 3, 4, True),
        pytest.param(2, 2, 2, 3, True, marks=pytest.mark.sweep),
        (1, 3, 1, 2, True),
    ],
)
def test_a_lean_save_resumes_at_another_size_and_stage(
    rank_pool: RankPool, tmp_path: Path, stage: int, ranks: int, other_stage: int, other_ranks: int, elastic: bool
) -> None:
    job = replace(JOB, elastic=elastic, **STAGES[stage])
    lean, full = tmp_path / "lean", tmp_path / "full"
    saved = rank_pool.run(save_both, ranks, job, str(lean), str(full))[0]
    roots = [read_record(run / "global_step3").content_root for run in (lean, full)]  # type: ignore[union-attr]
    assert roots[0] == roots[1]
    other = replace(JOB, elastic=elastic, **STAGES[other_stage]).other()
    found = rank_pool.run(resume, other_ranks, other, str(lean))
    for outcome in found:
        assert outcome.state == saved.state
        assert outcome.gathered == saved.gathered
        assert outcome.report.root_matches
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_a_tag_holds_trained_state_alone(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = replace(JOB, **STAGES[stage])
    rank_pool.run(save_both, 2, job, str(tmp_path / "lean"), str(tmp_path / "full"))
    (shared,) = shared_files(tmp_path / "lean")
    with safe_open(shared, framework="pt") as file:
        frozen = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    assert {*frozen} == {"adapter.weight", "adapter.bias", "frozen_table.weight"}
    for path in (tmp_path / "lean/global_step3").glob("*model_states.pt"):
        module: dict[str, Any] = torch.load(path, weights_only=False)["module"]
        assert [name for name, tensor in module.items() if tensor.numel()] == ["batches_seen"]
    assert [file.name for file in record_of(tmp_path / "lean/global_step3").shared] == [shared.name]


def save_ten(job: Job, directory: str) -> None:
    engine = build_engine(job)
    for step in range(10):
        train_step(engine, step)
        engine.save_checkpoint(directory)


def nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("stage", with_swept((3, 2, 1), {1}))
def test_ten_tags_of_a_run_that_trains_two_percent_take_little_more_than_what_changes(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """98 % frozen: the frozen weights once, and ten times the trained state, and at most 5 % more."""
    job = replace(JOB, frozen_table=1_000_000, tables=(20_000,), sub_group_size=10**9, **STAGES[stage])
    rank_pool.run(save_ten, 2, job, str(tmp_path), timeout=240)
    assert len(shared_files(tmp_path)) == 1
    record = record_of(tmp_path / "global_step10")
    trained = sum(content.param.numel for content in record.contents() if FROZEN not in content.tensors)
    frozen = sum(content.param.numel for content in record.contents() if FROZEN in content.tensors)
    assert frozen > 0.97 * (trained + frozen)
    assert nbytes(tmp_path) <= 1.05 * (2 * frozen + 10 * 12 * trained)
    assert len([*tmp_path.glob("global_step*")]) == 10


@pytest.mark.parametrize("stage", with_swept((1, 2), {1}))
def test_a_run_that_trains_everything_writes_no_16_bit_weights(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """12 of 14 bytes a parameter remain, but for headers."""
    job = replace(JOB, frozen=False, frozen_table=0, tables=(200_000,), **STAGES[stage])
    rank_pool.run(save_both, 2, job, str(tmp_path / "lean"), str(tmp_path / "full"), timeout=240)
    lean, full = (nbytes(tmp_path / name / "global_step3") for name in ("lean", "full"))
    assert lean / full == pytest.approx(12 / 14, abs=0.005)
    assert not (tmp_path / "lean" / FROZEN_FOLDER).exists()


def save_where_the_file_goes(job: Job, directory: str) -> list[tuple[str, str]]:
    """The errors of saves during which the shared file is removed, and is there again."""
    from zeroelastic.deepspeed.save import save

    engine = build_engine(job)
    train_step(engine, 0)
    share = save.share_weights

    def share_and_lose(*args: Any, **kwargs: Any) -> Any:
        found = share(*args, **kwargs)
        if dist.get_rank() == 0:
            for path in (Path(directory) / FROZEN_FOLDER).iterdir():
                path.unlink()
        return found

    save.share_weights = share_and_lose
    found = [raised(lambda: engine.save_checkpoint(directory))]
    save.share_weights = share
    return [*found, raised(lambda: engine.save_checkpoint(directory))]


def test_no_tag_is_committed_whose_shared_file_is_gone(rank_pool: RankPool, tmp_path: Path) -> None:
    for (kind, text), after in rank_pool.run(save_where_the_file_goes, 2, JOB, str(tmp_path)):
        assert kind == "SaveError"
        assert FROZEN_FOLDER in text and "not committed" in text
        assert after == ("", "")
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step1"]
    assert [read_record(tmp_path / "global_step1").shared[0].name] == [path.name for path in shared_files(tmp_path)]  # type: ignore[union-attr]


def save_with_a_damaged_header(job: Job, directory: str, was: bytes, becomes: bytes) -> list[tuple[str, str]]:
    """The errors of a save whose shared file is damaged before it is read back, and of the next one."""
    from zeroelastic.deepspeed.save import shared_file

    engine = build_engine(job)
    train_step(engine, 0)
    write = shared_file.write_fully

    def write_other(fd: int, data: bytes, offset: int) -> None:
        write(fd, data.replace(was, becomes), offset)

    shared_file.write_fully = write_other  # type: ignore[assignment]
    found = [raised(lambda: engine.save_checkpoint(directory))]
    shared_file.write_fully = write
    return [*found, raised(lambda: engine.save_checkpoint(directory))]


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        (b"adapter.bias", b"adapter.bars", "its header reads back as another"),
        (b'{"__meta', b'["__meta', "does not read back: .* is not JSON"),
    ],
)
def test_a_shared_file_that_does_not_read_back_is_never_referred_to(
    rank_pool: RankPool, tmp_path: Path, was: bytes, becomes: bytes, said: str
) -> None:
    for (kind, text), after in rank_pool.run(save_with_a_damaged_header, 2, JOB, str(tmp_path), was, becomes):
        assert (kind, after) == ("SaveError", ("", ""))
        assert re.search(said, text) and "Nothing was saved" in text
    assert len(shared_files(tmp_path)) == 1
    assert verify_checkpoint(tmp_path / "global_step1").valid


def refused(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    engine.module.register_parameter("odd", torch.nn.Parameter(torch.zeros(3, dtype=torch.complex128), False))
    return raised(lambda: engine.save_checkpoint(directory))


def test_frozen_weights_that_no_safetensors_file_holds_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    for kind, text in rank_pool.run(refused, 2, replace(JOB, stage=2), str(tmp_path)):
        assert kind == "UnsupportedError"
        assert "odd is complex128" in text and '"lean"' in text
    assert not any(tmp_path.iterdir())
