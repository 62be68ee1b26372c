"""Two engines that save to one directory, as a GAN does: neither removes, replaces or resumes from the other's tags."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.deepspeed import engine_state
from zeroelastic.deepspeed.save import commit, directory
from zeroelastic.elastic import resume
from zeroelastic.errors import SaveError
from zeroelastic.testing import RankPool

G = Job(options={"keep": 1})
D = replace(G, extra="more")


def save_both(directory: str, jobs: dict[str, Job]) -> dict[str, Any]:
    """Train and save two engines, three times; engines that are built anew then resume. What each had, and has."""
    engines = {name: build_engine(job) for name, job in jobs.items()}
    for epoch in range(3):
        for name, engine in engines.items():
            train_step(engine, epoch)
            engine.save_checkpoint(directory, tag=f"{name}_{epoch}")
    dist.barrier()
    kept = sorted(path.name for path in Path(directory).iterdir() if path.is_dir())
    saved = {name: look(engine)[0] for name, engine in engines.items()}
    resumed: dict[str, Any] = {}
    for name, job in jobs.items():
        engine = build_engine(replace(job, perturb=0.5))
        start = resume(engine, directory, strict=False)
        branches = [note for note in start.notes if note.startswith(("LEFT", "NOT THE NEWEST"))]
        resumed[name] = start.tag, start.passed_over, branches, look(engine)[0] == saved[name]
    return {"kept": kept, "resumed": resumed}


@pytest.mark.parametrize("stage", [2, 3])
def test_each_keeps_its_own_newest_and_resumes_from_it(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    jobs = {name: replace(job, stage=stage, elastic=stage == 3) for name, job in (("G", G), ("D", D))}
    found, _ = rank_pool.run(save_both, 2, str(tmp_path), jobs)
    assert found["kept"] == ["D_2", "G_2"] and (tmp_path / "latest").read_text() == "D_2"
    assert found["resumed"] == {name: (f"{name}_2", (), [], True) for name in "GD"}
    assert [(tag.tag, tag.run) for tag in zeroelastic.ls(tmp_path).tags] == [("D_2", 1), ("G_2", 2)]
    assert zeroelastic.prune(tmp_path, keep=1).plan.removals == ()


def test_twins_keep_their_own_and_resume_from_the_newest_of_both(rank_pool: RankPool, tmp_path: Path) -> None:
    found, _ = rank_pool.run(save_both, 2, str(tmp_path), {"A": G, "B": G})
    assert found["kept"] == ["A_2", "B_2"]
    assert {start[0] for start in found["resumed"].values()} == {"B_2"}


def save_under_one_tag(directory: str, job: Job, *, fork: bool) -> tuple[str, bool]:
    """``fork``: both engines go on from one checkpoint, so that they are of one run."""
    engines = [build_engine(job), build_engine(replace(job, extra="more"))]
    if fork:
        build_engine(job).save_checkpoint(f"{directory}/before")
    for engine in engines:
        if fork:
            engine.load_checkpoint(f"{directory}/before")
        train_step(engine, 0)
    engines[0].save_checkpoint(directory, tag="epoch")
    try:
        engines[1].save_checkpoint(directory, tag="epoch")
        said = ""
    except SaveError as error:
        said = str(error)
    zeroelastic.wait_for_save(engines[0])
    again = build_engine(job)  # begun anew after that save: it may replace the tag, as ever
    train_step(again, 0)
    if not job.options.get("async_save"):
        again.save_checkpoint(directory, tag="again")
        build_engine(replace(job, extra="more")).save_checkpoint(directory, tag="again")
    return said, zeroelastic.verify(Path(directory) / "epoch").valid


@pytest.mark.parametrize(("background", "fork"), [(False, False), (True, False), (False, True)])
def test_a_tag_that_another_engine_has_saved_is_refused(
    rank_pool: RankPool, tmp_path: Path, background: bool, fork: bool
) -> None:
    job = replace(G, options={"async_save": background, "on_mismatch": "initialize"})
    for said, valid in rank_pool.run(save_under_one_tag, 2, str(tmp_path), job, fork=fork):
        assert "by another engine" in said and "Two engines cannot save under one tag" in said and valid


def save_its_own_tags_again(directory: str, ahead_s: float) -> None:
    """Save under tags that another engine has not: one of before a load, and one with a time that is still to come."""
    pretrained, engine = build_engine(Job()), build_engine(Job())
    pretrained.save_checkpoint(f"{directory}/other")
    engine.save_checkpoint(directory, tag="last")
    engine.load_checkpoint(f"{directory}/other")
    engine.save_checkpoint(directory, tag="last")
    clock = time.time
    time.time = lambda: clock() + ahead_s  # type: ignore[assignment]
    pretrained.save_checkpoint(directory, tag="ahead")
    time.time = clock
    build_engine(Job()).save_checkpoint(directory, tag="ahead")


def test_an_engine_saves_its_own_tags_again(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_its_own_tags_again, 1, str(tmp_path), 3600.0)
    assert all(zeroelastic.verify(tmp_path / tag).valid for tag in ("last", "ahead"))


def change_params(directory: str) -> tuple[list[str], list[str]]:
    """Save, and go on with a further parameter: the directory after each save."""
    listed: list[list[str]] = []
    for job in (G, replace(D, options={"keep": 1, "on_mismatch": "initialize"})):
        engine = build_engine(job)
        if listed:
            engine.load_checkpoint(directory)
        for step in range(2):
            train_step(engine, step)
            engine.save_checkpoint(directory)
        dist.barrier()
        listed.append(sorted(path.name for path in Path(directory).iterdir() if path.is_dir()))
    return listed[0], listed[1]


def test_a_run_whose_parameters_change_stays_one(rank_pool: RankPool, tmp_path: Path) -> None:
    before, after = rank_pool.run(change_params, 2, str(tmp_path))[0]
    assert before == ["global_step2"] and after == ["global_step4"]


def save_beside_another_job(place: str, moment: str) -> tuple[str, list[str], str, list[str]]:
    """Another job goes on from the first save of one, which is stopped at a moment of its second.

    What the second save raises, the tags there are, ``latest``, and what the other job warns of at its next save.
    """
    engine, others = build_engine(Job()), list[Any]()

    def go_on() -> None:
        if not others:
            others.append(build_engine(Job()))
            others[0].load_checkpoint(place)
            if moment != "before the other saves":
                others[0].save_checkpoint(place, tag="theirs")
            engine_state._saves.clear()  # it is another process

    def then(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            found = action(*args, **kwargs)
            go_on()
            return found

        return act

    engine.save_checkpoint(place, tag="one")
    name = {"before it is published": "record_of", "before latest": "publish_tag"}.get(moment, "")
    if name:
        setattr(directory, name, then(getattr(directory, name)))
    else:
        go_on()
    said = ""
    try:
        engine.save_checkpoint(place, tag="mine")
    except SaveError as error:
        said = str(error)
    tags = [tag for tag in ("mine", "one", "theirs") if (Path(place) / tag).exists()]
    assert all(zeroelastic.verify(Path(place) / tag).valid for tag in tags)
    latest = (Path(place) / "latest").read_text()
    engine_state._saves.clear()
    with mock.patch.object(commit.logger, "warning") as warned:
        others[0].save_checkpoint(place, tag="later")
    return said, tags, latest, [call.args[0] % call.args[1:] for call in warned.call_args_list]


@pytest.mark.support(
    "Checkpoint engines and storage",
    "a job that another one has gone on from, stopped meanwhile or orphaned, and then saves",
    "refused",
    "from the first save of the other job on; until then that job warns",
)
@pytest.mark.parametrize(
    ("moment", "outcome", "tags"),
    [
        ("before it begins", "Nothing was written", ["one", "theirs"]),
        ("before it is published", "The tag is what it was before; `latest` is unchanged", ["one", "theirs"]),
        ("before latest", "The checkpoint is complete; `latest` is unchanged", ["mine", "one", "theirs"]),
    ],
)
def test_a_job_that_another_one_has_gone_on_from_saves_no_more(
    rank_pool: RankPool, tmp_path: Path, moment: str, outcome: str, tags: list[str]
) -> None:
    (found,) = rank_pool.run(save_beside_another_job, 1, str(tmp_path), moment)
    said, left, latest, warned = found
    assert f"{tmp_path}/mine: another job has gone on with this run, and has saved {tmp_path}/theirs (step 0)" in said
    assert outcome in said and (left, latest, warned) == (tags, "theirs", [])


def test_a_job_says_that_an_earlier_one_still_saves(rank_pool: RankPool, tmp_path: Path) -> None:
    (found,) = rank_pool.run(save_beside_another_job, 1, str(tmp_path), "before the other saves")
    said, left, latest, (warning,) = found
    assert (said, left, latest) == ("", ["mine", "one"], "mine")
    assert warning.startswith(f"{tmp_path}/mine (step 0) was saved by a job that still runs, and was started before")
