"""A tag that is saved again while other ranks load it: a load is one whole save, or an error that says so."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from saved_files import Opens, flip
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.runs import tag_directory
from zeroelastic.testing import RankPool, compare_states

TAG = "last"
JOB = Job(groups=1, sub_group_size=10**6)
SAVE_ID = "1" * 32


@dataclass(frozen=True)
class TwoSaves:
    """Directories of two saves of one tag, by different steps of one run, and the state at each."""

    directories: tuple[Path, Path]
    states: tuple[Any, Any]


def save_twice(directories: tuple[str, str], elastic: bool) -> list[Any]:
    engine = build_engine(Job(groups=1, sub_group_size=10**6, elastic=elastic))
    states = []
    for step, directory in enumerate(directories):
        train_step(engine, step)
        states.append(look(engine)[0])
        engine.save_checkpoint(directory, tag=TAG)
    return states


@pytest.fixture(scope="module")
def saves(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> TwoSaves:
    folder = tmp_path_factory.mktemp("saves")
    directories = folder / "a", folder / "b"
    return TwoSaves(directories, tuple(rank_pool.run(save_twice, 2, tuple(map(str, directories)), True)[0]))


def publish_tag(staging_dir: Path, place: Path, *, exchange: bool) -> None:
    """What a save does when it is complete."""
    original = tag_directory.exchange
    if not exchange:
        tag_directory.exchange = lambda staging_dir, place: False  # type: ignore[assignment]
    try:
        tag_directory.publish_tag(staging_dir, place).finish()
    finally:
        tag_directory.exchange = original


@dataclass(frozen=True)
class How:
    """How loads are made, and how the tag changes meanwhile: at once ("exchange"), by two renames, or file by file."""

    verify: str
    change: str
    resume: bool = False
    damaged: bool = False
    """The first save has a damaged tensor, so that only the other one loads."""


def change_tag(how: How, tag_dir: Path, other: Path) -> None:
    """The other save under the tag's name."""
    if how.change == "in place":
        for path in sorted(other.iterdir()):
            (tag_dir / path.name).write_bytes(path.read_bytes())
    else:
        publish_tag(tag_directory.staging_dir_of(tag_dir, SAVE_ID), tag_dir, exchange=how.change == "exchange")


def load_while_changed(
    directory: str, copies: tuple[str, str], states: tuple[Any, ...], hows: tuple[How, ...], stride: int
) -> list[str]:
    """Change the tag before each open of a load, on each rank in turn: how many loads, and what was wrong with them."""
    root, rank = Path(directory), dist.get_rank()
    engine = build_engine(JOB.other())
    watched, wrong, loads = Opens(), list[str](), 0
    for how in hows:
        expected = states[1:] if how.damaged else states
        for changing in range(dist.get_world_size()):
            places = [-1]  # no change, to count the opens
            while places:
                at = places.pop(0)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(root, ignore_errors=True)
                    shutil.copytree(copies[0], root)
                    shutil.copytree(Path(copies[1]) / TAG, tag_directory.staging_dir_of(root / TAG, SAVE_ID))
                    if how.damaged:
                        damage(root / TAG)
                dist.barrier()
                engine._config._param_dict["zeroelastic"] = {"verify": how.verify, "io_engine": "numpy"}
                change = partial(change_tag, how, root / TAG, Path(copies[1]) / TAG)
                watched.arm(root, at if rank == changing else -1, change)
                where = f"{how}, open {at} of rank {changing}"
                try:
                    if how.resume:
                        assert zeroelastic.resume(engine, root).tag == TAG
                    else:
                        engine.load_checkpoint(str(root), tag=TAG)
                    state = look(engine)[0]
                    if all(compare_states(one, state) for one in expected):
                        wrong.append(f"{where}: the state is not that of a whole save")
                except zeroelastic.SavedAgainError as error:
                    if at == -1:
                        wrong.append(f"{where}: {error}")
                except Exception as error:
                    if not (how.damaged and at == -1):
                        wrong.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
                watched.stop()
                dist.barrier()
                loads += 1
                if at == -1:
                    counts: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(counts, watched.count)
                    places = list(range(0, counts[changing], stride))
    return [f"{loads} loads", *wrong]


def damage(tag_dir: Path) -> None:
    """Flip a bit of a tensor of rank 1."""
    shard = open_checkpoint(tag_dir).shard(1)
    offset = int(shard.extents["exp_avg"].offset[shard.layout.index()["up.weight"]])
    flip(tag_dir / shard.path.name, offset + 6, 8)


def check(ranks: list[list[str]]) -> None:
    for loads, *wrong in ranks:
        assert wrong == [], f"{loads}: {len(wrong)} wrong"
        assert int(loads.split()[0]) > 12


@pytest.mark.extended
def test_a_tag_replaced_before_any_open_of_a_load_is_loaded_whole_or_refused(
    saves: TwoSaves, rank_pool: RankPool, tmp_path: Path
) -> None:
    hows = (How("off", "exchange"), How("quick", "renames"), How("full", "exchange", resume=True))
    copies = tuple(map(str, saves.directories))
    check(rank_pool.run(load_while_changed, 2, str(tmp_path / "c"), copies, saves.states, hows, 3))


def test_a_damaged_save_that_is_replaced_while_it_is_judged_is_read_again(
    saves: TwoSaves, rank_pool: RankPool, tmp_path: Path
) -> None:
    hows = (How("full", "renames", resume=True, damaged=True),)
    copies = tuple(map(str, saves.directories))
    check(rank_pool.run(load_while_changed, 2, str(tmp_path / "c"), copies, saves.states, hows, 3))


def test_a_tag_that_deepspeed_alone_writes_again_file_by_file_is_loaded_whole(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    copies = str(tmp_path / "a"), str(tmp_path / "b")
    states = rank_pool.run(save_twice, 2, copies, False)[0]
    for copy in copies:
        (Path(copy) / TAG / RECORD_NAME).unlink()
    hows = (How("off", "in place"),)
    check(rank_pool.run(load_while_changed, 2, str(tmp_path / "c"), copies, tuple(states), hows, 1))


def load_between_renames(directory: str) -> list[str]:
    """What each way to load finds while the tag has no name for 0.2 s."""
    root, rank = Path(directory), dist.get_rank()
    engine = build_engine(JOB.other())
    found: list[str] = []
    aside = tag_directory.staging_dir_of(root / TAG, SAVE_ID).with_suffix(".old")
    for resume in (False, True):
        dist.barrier()
        timer = threading.Timer(0.2, os.rename, (aside, root / TAG))
        if rank == 0:
            os.rename(root / TAG, aside)
            timer.start()
        dist.barrier()
        if resume:
            found.append(str(zeroelastic.resume(engine, root).tag))
        else:
            path, _ = engine.load_checkpoint(str(root))
            found.append("None" if path is None else Path(path).parent.name)
        if rank == 0:
            timer.join()
    return found


def test_a_tag_that_has_no_name_between_two_renames_is_waited_for(
    saves: TwoSaves, rank_pool: RankPool, tmp_path: Path
) -> None:
    shutil.copytree(saves.directories[0], tmp_path / "c")
    assert rank_pool.run(load_between_renames, 2, str(tmp_path / "c")) == [[TAG, TAG]] * 2
