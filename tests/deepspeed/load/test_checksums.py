"""Files of stock DeepSpeed have no digests: a load says that it checks none, and ``verify`` compares their CRC-32."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from saved_files import flip
from saves import Saver, check_resumed, save_once
from training import Job, resume

import zeroelastic
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.zip_check import read_zip_records

STOCK = {
    "stage 3": Job(elastic=False, installed=False),
    "stage 2": Job(stage=2, elastic=False, installed=False),
}


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


@pytest.mark.parametrize("name", STOCK)
def test_a_load_of_a_stock_save_names_the_verb_that_checks_it(
    rank_pool: RankPool, saved: Saver, tmp_path: Path, name: str
) -> None:
    job = STOCK[name]
    checkpoint = saved(job, 4)
    outcomes = rank_pool.run(resume, 3, job.other(installed=True), checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)
    for outcome in outcomes:
        (note,) = (note for note in outcome.report.notes if "commit record" in note)
        assert f"NOT CHECKED. `zeroelastic verify {checkpoint.tag_dir}` compares its files with" in note
    tag_dir = tmp_path / "copy"
    shutil.copytree(checkpoint.tag_dir, tag_dir)
    path = next(tag_dir.glob("*optim_states.pt"))
    record = next(
        one for one in read_zip_records(path, path.stat().st_size) if "/data/" in one.name and one.nbytes > 64
    )
    flip(path, record.offset)
    (problem,) = zeroelastic.verify(tag_dir).problems
    assert problem.file == path.name and "CRC-32" in problem.sentence
