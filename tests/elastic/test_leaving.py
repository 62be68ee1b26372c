"""Ranks that are lost without a word: how long the others wait for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training import Job, build_engine

from zeroelastic.elastic import set_collective_timeout
from zeroelastic.errors import ConfigError
from zeroelastic.testing import RankError, RankPool

JOB = Job(groups=1)


def timeouts(seconds: float) -> list[float]:
    """Before and after, of every group; a rank that stays silent is given up on."""
    with pytest.raises(ConfigError):
        set_collective_timeout(0)
    engine = build_engine(JOB)
    set_collective_timeout(seconds)
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=engine.optimizer.dp_process_group)
    else:
        time.sleep(seconds + 2)
    return [time.monotonic() - began]


def test_a_silent_rank_is_given_up_on_in_the_group_that_zero_works_in(rank_pool: RankPool) -> None:
    waited = rank_pool.run(timeouts, 2, 2.0)[0][0]
    assert 1.5 < waited < 60


def limits_of_groups(seconds: float) -> set[float]:
    """The timeouts of all process groups, made by DeepSpeed, after one was set before."""
    dist.destroy_process_group()
    set_collective_timeout(seconds)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.getsockname()[1]))
    build_engine(JOB)
    groups = list(dist.distributed_c10d._world.pg_map)
    assert len(groups) > 1
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


@pytest.mark.extended
def test_the_timeout_reaches_every_group_also_the_default_one(rank_pool: RankPool) -> None:
    assert rank_pool.run(limits_of_groups, 1, 77.0) == [{77.0}]


def lose_a_rank_in_initialize(seconds: float, moment: str) -> tuple[str, float]:
    """Rank 1 dies after the rendezvous; the error of the other, and how long it took."""
    import deepspeed

    set_collective_timeout(seconds)
    owner, name = {
        "before its groups are made": (deepspeed.DeepSpeedEngine, "__init__"),
        "while the optimizer is made": (deepspeed.DeepSpeedEngine, "_configure_zero_optimizer"),
    }[moment]
    if dist.get_rank() == 1:
        setattr(owner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    build_engine(JOB)
    raise AssertionError("nobody is lost")


@pytest.mark.parametrize("moment", ["before its groups are made", "while the optimizer is made"])
def test_a_rank_lost_while_the_engine_is_built_is_given_up_on(rank_pool: RankPool, moment: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        rank_pool.run(lose_a_rank_in_initialize, 2, 8.0, moment, timeout=90, grace=80)
    assert time.monotonic() - began < 80
    said = {failure.rank: failure.headline for failure in caught.value.failures}
    assert "SIGKILL" in said[1] and "nobody is lost" not in said[0] and "Error" in said[0], said


MEET = """
import datetime, sys, torch
from zeroelastic.elastic import set_collective_timeout
set_collective_timeout(3)
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=2)
"""


@pytest.mark.extended
def test_a_rank_that_never_comes_to_the_rendezvous_is_given_up_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEET, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.strip().endswith(("timeout", "timed out")), done.stderr
