"""A path means what it meant when the call was made, whatever becomes of the working directory and of links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_writers import held_writers
from saved_files import file_bytes
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.elastic import preemption, resume
from zeroelastic.io.paths import absolute
from zeroelastic.testing import RankPool

BACKGROUND = Job(groups=1, options={"async_save": True})


def other_run(directory: Path) -> dict[str, bytes]:
    """What another run has in ``ck``: its own ``best``."""
    (directory / "ck" / "best").mkdir(parents=True)
    for name, data in {"latest": b"best", "best/zero_pp_rank_0_mp_rank_00_model_states.pt": b"of another run"}.items():
        (directory / "ck" / name).write_bytes(data)
    return file_bytes(directory)


def save_and_repoint(link: str, other: str) -> None:
    engine = build_engine(BACKGROUND)
    with held_writers():
        engine.save_checkpoint(link, tag="best")
        if dist.get_rank() == 0:
            os.unlink(link)
            os.symlink(other, link)
        dist.barrier()
    zeroelastic.wait_for_save(engine)


def test_a_link_that_is_turned_during_a_save_leads_it_nowhere_else(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    before = other_run(tmp_path / "second")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    rank_pool.run(save_and_repoint, 2, str(tmp_path / "link"), str(tmp_path / "second" / "ck"))
    assert file_bytes(tmp_path / "second") == before
    assert (tmp_path / "first" / "latest").read_text() == "best" and (tmp_path / "first" / "best").is_dir()
    assert not [name for name in os.listdir(tmp_path / "first") if name.startswith(".")]


def train_in_relative_directories(here: str, elsewhere: str) -> tuple[int, int]:
    """A job whose every path is relative, and which changes its working directory after each call."""
    began = os.getcwd()
    engine = build_engine(BACKGROUND)
    try:
        os.chdir(here)
        unsubscribe = zeroelastic.subscribe(zeroelastic.jsonl("log.jsonl"))
        with preemption(engine, "ck") as stop:
            resume(engine, "ck")
            os.chdir(elsewhere)
            train_step(engine, 0)
            stop.save()
            os.chdir(began)
    finally:
        unsubscribe()
        os.chdir(began)
    os.chdir(here)
    again = resume(engine, "ck").global_steps
    os.chdir(began)
    return again, engine.global_steps


def test_a_job_stays_where_it_was_begun(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    assert rank_pool.run(train_in_relative_directories, 1, str(tmp_path / "here"), str(tmp_path / "elsewhere")) == [
        (1, 1)
    ]
    assert os.listdir(tmp_path / "elsewhere") == []
    assert sorted(os.listdir(tmp_path / "here")) == ["ck", "log.jsonl"]
    assert (tmp_path / "here" / "log.jsonl").read_text().count("\n") >= 2


def test_what_is_absolute_or_a_url_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("elsewhere")
    assert absolute("link/ck") == str(tmp_path / "link" / "ck") and absolute(tmp_path) == str(tmp_path)
    for url in ("s3://bucket/run", "memory://a", "simplecache::s3://bucket/run"):
        assert absolute(url) == url
