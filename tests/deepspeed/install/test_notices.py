"""Rank 0 says one line for each load and each committed save, however logging is set up, and never the same twice."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import zeroelastic
from zeroelastic.testing import RankPool


def train_and_listen(directory: str, setup: str, level: int) -> list[str]:
    """The lines on stderr of a script that saves and loads."""
    from training import Job, build_engine, train_step

    sys.stderr = io.StringIO()
    logging.getLogger("zeroelastic").setLevel(level)
    if setup == "before install()":
        logging.basicConfig(level=logging.INFO)
    engine = build_engine(Job(options={"async_save": setup == "background"}))
    if setup == "after install()":
        logging.basicConfig(level=logging.INFO)
    if setup == "root at WARNING":
        logging.basicConfig()
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)
    return sys.stderr.getvalue().splitlines()


@pytest.mark.parametrize("setup", ["none", "before install()", "after install()", "root at WARNING", "background"])
def test_a_save_and_a_load_are_one_line_each(rank_pool: RankPool, tmp_path: Path, setup: str) -> None:
    said, others = rank_pool.run(train_and_listen, 2, str(tmp_path), setup, logging.NOTSET)
    tag = f"{tmp_path}/global_step1"
    assert sum(f"{tag}: saved in" in line for line in said) == 1, said
    assert sum(f"resumed {tag} (elastic): 2 -> 2 ranks" in line for line in said) == 1, said
    assert not any("saved in" in line or "resumed" in line for line in others), others
    if setup == "none":
        assert sum(line.startswith("[zeroelastic] ") for line in said) == 2


def test_a_level_that_the_job_has_set_holds(rank_pool: RankPool, tmp_path: Path) -> None:
    for level, shown in ((logging.WARNING, False), (logging.DEBUG, True)):
        (said,) = rank_pool.run(train_and_listen, 1, str(tmp_path), "none", level)
        assert any(line.startswith("[zeroelastic] ") for line in said) == shown
        assert any(line.startswith("  exact: ") for line in said) == shown


def test_uninstall_leaves_logging_as_it_was(rank_pool: RankPool) -> None:
    assert rank_pool.run(handlers_and_levels, 1) == [True]


def handlers_and_levels() -> bool:
    def look() -> list[object]:
        logger = logging.getLogger("zeroelastic")
        return [logger.level, *logger.handlers]

    before = look()
    zeroelastic.install()
    assert look() != before
    zeroelastic.uninstall()
    return look() == before


SCRIPT = """
import sys
import deepspeed, torch
model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
          "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 3, "elastic_checkpoint": True}}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.save_checkpoint(sys.argv[1], tag="first")
engine.load_checkpoint(sys.argv[1])
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.extended
def test_a_script_that_knows_nothing_of_it_says_so_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["zeroelastic.run", str(script), str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "[zeroelastic]" in line]
    assert len(said) == 2, done.stderr
    assert "ckpt/first: saved in" in said[0] and "resumed" in said[1] and "2 -> 2 ranks" in said[1]
