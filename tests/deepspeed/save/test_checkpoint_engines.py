"""Checkpoint engines and storage: who writes the files, when a save counts, and directories that are not shared.

DeepSpeed's Fast engine and the Decoupled one around it are run with its "python" writer, which needs no GPU, and the
"fast" writer with two stand-ins (see ``checkpoint_writers``). A third-party engine is played by a small fake.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_writers import LateEngine, let_the_fast_writer_run, writer_job
from saved_files import committed, contents, latest, logged
from training import Job, attempt, build_engine, look, of_all, raised, resume, train_and_save, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.testing import RankPool, compare_states

ENGINES = "Checkpoint engines and storage"


def save_with_the_fast_writer(job: Job, directory: str) -> Any:
    let_the_fast_writer_run()
    return train_and_save(job, directory)


def resume_with_the_fast_writer(job: Job, directory: str) -> Any:
    let_the_fast_writer_run()
    return resume(job, directory)


@pytest.mark.parametrize(
    "elastic",
    [
        pytest.param(
            True,
            id="elastic",
            marks=pytest.mark.support(ENGINES, '`checkpoint.writer` "fast" and "python"', "exact", "at any world size"),
        ),
        pytest.param(
            False,
            id="by-deepspeed-alone",
            marks=pytest.mark.support(
                ENGINES,
                'rigid files of the "fast" writer',
                "exact",
                "DeepSpeed alone does not load them (torch >= 2.6)",
            ),
        ),
    ],
)
def test_what_the_fast_engine_wrote_loads_at_any_size(rank_pool: RankPool, tmp_path: Path, elastic: bool) -> None:
    """Also into an engine whose own checkpoint engine is Fast: its ``load`` fails under torch 2.6 and later."""
    job = writer_job("fast", elastic=elastic, installed=elastic)
    saved = rank_pool.run(save_with_the_fast_writer, 2, job, str(tmp_path))[0]
    for world_size in (3, 2):
        for outcome in rank_pool.run(resume_with_the_fast_writer, world_size, job.other(installed=True), str(tmp_path)):
            assert compare_states(saved.state, outcome.state) == []
            assert outcome.gathered == saved.gathered
            assert outcome.report.root_matches is (True if elastic else None)


def save_decoupled(job: Job, directory: str) -> tuple[list[str], dict[str, Any], bool]:
    """A save that DeepSpeed's writer has finished before the next step; what was logged, and if there is a record."""
    engine, said = build_engine(job), logged("deepspeed.save.save_checkpoint", logging.WARNING)
    train_step(engine, 0)
    state = look(engine)[0]
    engine.save_checkpoint(directory, tag="one", client_state={"note": "one"})
    # As the next step does, but before its forward: DeepSpeed's writer shares the buffers with the run, and a forward
    # that changes them meanwhile is in the file.
    engine._commit_decoupled_checkpoint()
    train_step(engine, 1)
    engine.destroy()
    dist.barrier()
    return said, state, committed(directory, "one")


@pytest.mark.support(
    ENGINES, "`checkpoint.writer.decoupled`", "exact", "left to DeepSpeed: rigid, without a commit record"
)
@pytest.mark.core
def test_a_decoupled_save_is_left_to_deepspeed_and_loads_as_any_other(rank_pool: RankPool, tmp_path: Path) -> None:
    job = writer_job("python", decoupled=True, elastic=False)
    results = rank_pool.run(save_decoupled, 2, job, str(tmp_path))
    state = results[0][1]
    for rank, (said, _, has_record) in enumerate(results):
        assert not has_record and latest(str(tmp_path)) == "one"
        assert len(said) == (1 if rank == 0 else 0), said
        assert all("DeepSpeed alone saves this run" in line and '"async_save": true' in line for line in said)
    for outcome in rank_pool.run(resume, 3, Job().other(), str(tmp_path), after=0, tag="one"):
        assert compare_states(state, outcome.state) == [] and outcome.client_state["note"] == "one"
        assert (outcome.report.format, outcome.report.saved_root) == ("rigid", None)


def save_elastic_with_a_late_engine(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    engine.checkpoint_engine = LateEngine()
    return raised(lambda: engine.save_checkpoint(directory, tag="late"))


@pytest.mark.support(ENGINES, "elastic saves with a decoupled or third-party engine", "refused", 'use `"async_save"`')
@pytest.mark.parametrize("stage", [2, 3])
def test_an_elastic_save_by_an_engine_that_writes_later_is_refused(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    for kind, text in rank_pool.run(save_elastic_with_a_late_engine, 2, Job(stage=stage), str(tmp_path)):
        assert kind == "UnsupportedError" and "LateEngine is a decoupled checkpoint engine" in text
    assert list(tmp_path.iterdir()) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"writer": {"type": "mock"}}, '"mock" writes nothing'),
    ({"writer": {"type": "fast"}}, 'it does not have for this accelerator. Use "type": "python"'),
    ({"checkpoint_serialization": False}, "old format without a zip archive"),
    ({"writer": {"type": "python", "decoupled": True}}, 'Use "decoupled": false, with "async_save": true'),
]


def build_each() -> list[tuple[str, str]]:
    return [raised(lambda block=block: build_engine(Job(config={"checkpoint": block}))) for block, _ in REFUSED]


@pytest.mark.support(ENGINES, '`checkpoint.writer` "mock"', "refused", "it writes nothing")
@pytest.mark.support(ENGINES, '`checkpoint.writer` "fast" without a GPU', "refused", "DeepSpeed has no op for it there")
@pytest.mark.support(ENGINES, "`checkpoint_serialization: false`", "refused", "rigid files of it load at the same size")
def test_writers_whose_files_could_not_be_loaded_are_refused_when_the_engine_is_built(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(build_each, 2)
    assert first == second
    for (kind, text), (_, said) in zip(first, REFUSED, strict=True):
        assert kind == "UnsupportedError" and said in text


def save_old_format(job: Job, directory: str) -> Any:
    outcome = train_and_save(job, directory)
    assert Path(directory, "global_step3", "zero_pp_rank_0_mp_rank_00_model_states.pt").read_bytes()[:2] != b"PK"
    assert not committed(directory, "global_step3")
    return outcome


def test_the_old_format_is_deepspeeds_at_the_same_size_and_refused_at_another(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    job = Job(elastic=False, config={"checkpoint": {"checkpoint_serialization": False}})
    saved = rank_pool.run(save_old_format, 2, job, str(tmp_path))[0]
    for outcome in rank_pool.run(resume, 2, job.other(sub_group_size=job.sub_group_size), str(tmp_path)):
        assert compare_states(saved.state, outcome.state) == [] and outcome.report is None
    kind, text = of_all(rank_pool.run(attempt, 3, Job().other(), str(tmp_path)))
    assert kind == "OldFormatError" and "torch.save(torch.load(path, weights_only=False), path)" in text


def save_in_many_places(job: Job, directory: str) -> Any:
    """Tags and directories as people write them; returns the state that each of them holds."""
    root = Path(directory)
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(root / "path", tag=7)
    engine.save_checkpoint(str(root / "path"), tag="runs/first", save_latest=False)
    assert latest(root / "path") == "7"
    engine.save_checkpoint(str(root / "nested"), tag="runs/first")
    assert latest(root / "nested") == "runs/first"
    os.chdir(root)
    engine.save_checkpoint("relative")
    if dist.get_rank() == 0:
        (root / "elsewhere").mkdir()
        (root / "linked").mkdir()
        (root / "linked" / "tag").symlink_to(root / "elsewhere")
    dist.barrier()
    engine.save_checkpoint(str(root / "linked"), tag="tag")
    assert committed(root, "elsewhere")
    return look(engine)[0]


def load_from_many_places(job: Job, directory: str) -> list[tuple[Any, Any]]:
    root = Path(directory)
    engine = build_engine(job)
    found: list[tuple[Any, Any]] = []

    def load(place: Any, **options: Any) -> None:
        path, _ = engine.load_checkpoint(place, **options)
        assert path is not None
        found.append((look(engine)[0], engine.zeroelastic_report.root_matches))
        train_step(engine, 5)

    load(root / "path")
    load(str(root / "path"), tag=7)
    load(root / "path", tag="runs/first")
    load(str(root / "nested"))
    os.chdir(root)
    load("relative")
    load(root / "linked")
    asked: list[Any] = []

    def custom(src: Any, dst: Any) -> None:
        asked.append((type(src).__name__, type(dst).__name__))
        dst.load_state_dict(src, strict=False)

    load(root / "path", custom_load_fn=custom)
    assert asked == [("OrderedDict", "TinyModel")]
    return found


@pytest.mark.core
@pytest.mark.support("Using it", "explicit `tag`, `save_latest=False`", "exact")
@pytest.mark.support(ENGINES, "int tags, nested tags, `Path`, relative and linked directories, `save_latest`", "exact")
@pytest.mark.support(ENGINES, "`pipeline_loading_checkpoint`, `tag_validation`, `custom_load_fn`", "exact")
def test_tags_and_directories_as_people_write_them(rank_pool: RankPool, tmp_path: Path) -> None:
    """With ``pipeline_loading_checkpoint``, whose chain of ranks a load of ours does not enter, and strict tags."""
    job = Job(
        zero={"pipeline_loading_checkpoint": True},
        config={"checkpoint": {"tag_validation": "Fail", "parallel_write": {"pipeline_stage": True}}},
    )
    state = rank_pool.run(save_in_many_places, 2, job, str(tmp_path))[0]
    for found in rank_pool.run(load_from_many_places, 3, job.other(zero=job.zero), str(tmp_path)):
        for place, (loaded, matches) in enumerate(found):
            assert compare_states(state, loaded) == [], place
            assert matches


def save_where_it_cannot_be(job: Job, directory: str) -> list[tuple[str, str]]:
    engine = build_engine(job)
    train_step(engine, 0)
    rank = dist.get_rank()
    root = Path(directory)
    engine.save_checkpoint(directory, tag="good")
    good = contents(root / "good")
    train_step(engine, 1)
    bad = {"f": (lambda: 0) if rank else 0}
    if rank == 0:
        (root / "file").touch()
        (root / "blocked").touch()
    dist.barrier()
    errors = [
        raised(lambda: engine.save_checkpoint("/proc/nowhere/ckpt", tag="tag")),  # read-only, for root as well
        raised(lambda: engine.save_checkpoint(str(root / "file"), tag="tag")),
        raised(lambda: engine.save_checkpoint(directory, tag="blocked")),
        raised(lambda: engine.save_checkpoint(directory, tag=f"rank{rank}")),
        raised(lambda: engine.save_checkpoint(directory, tag="bad", client_state=bad)),
        raised(lambda: engine.save_checkpoint(directory, tag="good", client_state=bad)),
    ]
    dist.barrier()
    assert latest(directory) == "good" and contents(root / "good") == good, (
        "a tag that is saved again is still the first"
    )
    assert not committed(directory, "blocked") and not committed(directory, "bad")
    assert not any(root.glob("rank*")) and not any(root.glob(".*")) and (root / "file").stat().st_size == 0
    engine.save_checkpoint(directory, tag="better")
    assert latest(directory) == "better"
    return errors


@pytest.mark.core
@pytest.mark.support(ENGINES, "a save that fails", "refused", "the tag is what it was before, `latest` stays")
@pytest.mark.support(
    ENGINES, "a directory or a file that cannot be written, on any rank", "refused", "`SaveError` on every rank"
)
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "rigid"])
def test_what_cannot_be_written_is_the_same_error_on_every_rank(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    """No rank is left waiting in DeepSpeed's barriers; the last good checkpoint stays the latest."""
    job = Job(elastic=elastic, config={"checkpoint": {"tag_validation": "Fail"}})
    results = rank_pool.run(save_where_it_cannot_be, 2, job, str(tmp_path), timeout=60)
    if not elastic:  # DeepSpeed's own check of tags names the rank
        assert all("not consistent across all ranks" in result.pop(3)[1] for result in results)
        results = [[*result[:3], ("UsageError", "rank0, rank1"), *result[3:]] for result in results]
    assert results[0] == results[1]
    kinds, texts = zip(*results[0], strict=True)
    assert kinds == ("SaveError", "SaveError", "SaveError", "UsageError", "SaveError", "SaveError")
    assert "/proc/nowhere" in texts[0] and "Nothing was saved" in texts[0]
    assert "file" in texts[1] and "Nothing was saved" in texts[1]
    assert "blocked: cannot be written: Not a directory" in texts[2] and "Nothing was saved" in texts[2]
    assert "rank0" in texts[3] and "rank1" in texts[3]
    for text in texts[4:]:
        assert "zero_pp_rank_1_mp_rank_00_model_states.pt: cannot be written" in text and "lambda" in text


def warn_of_tags(job: Job, directory: str) -> Any:
    """Tags that differ, where DeepSpeed only warns: each rank writes its own directory, and no record is made."""
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag=f"rank{dist.get_rank()}")
    dist.barrier()
    return sorted(path.name for path in Path(directory).rglob("*optim_states.pt")), read_record(
        Path(directory) / f"rank{dist.get_rank()}"
    )


def test_tags_that_differ_get_no_record_where_deepspeed_only_warns(rank_pool: RankPool, tmp_path: Path) -> None:
    names, record = rank_pool.run(warn_of_tags, 2, Job(elastic=False), str(tmp_path))[0]
    assert record is None and len(names) == 2
