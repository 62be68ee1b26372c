"""Ranks that do not all run with zeroelastic, or not with the same options, are named within seconds; none waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from training import Job, build_engine, raised, train_step

import zeroelastic
from zeroelastic.distributed import collective, partners
from zeroelastic.errors import ConfigError
from zeroelastic.testing import RankError, RankPool

USING = "Using it"


def install_on_rank_0_alone(directory: str) -> None:
    build_engine(Job(installed=dist.get_rank() == 0))


def partners_within_a_second() -> None:
    partners._WAIT_S = 1.0


def install_on_rank_0_later(directory: str) -> None:
    engine = build_engine(Job(installed=False, elastic=False))
    if dist.get_rank() == 0:
        zeroelastic.install()
        partners_within_a_second()
    engine.save_checkpoint(directory)


def uninstall_on_rank_1(directory: str, call: str) -> None:
    engine = build_engine(Job(options={"async_save": True}))
    partners_within_a_second()
    train_step(engine, 0)
    engine.save_checkpoint(directory)
    if call != "destroy":
        zeroelastic.wait_for_save(engine)
    if dist.get_rank() == 1:
        zeroelastic.uninstall()
    dist.barrier()
    calls: dict[str, Callable[[], Any]] = {
        "load": lambda: engine.load_checkpoint(directory),
        "destroy": engine.destroy,
    }
    calls[call]()
    if dist.get_rank() == 1:
        dist.barrier()


@pytest.mark.support(USING, "`install()` on some ranks only", "refused", "naming the ranks without it, within seconds")
@pytest.mark.parametrize(
    ("script", "args"),
    [
        (install_on_rank_0_alone, ()),
        (install_on_rank_0_later, ()),
        (uninstall_on_rank_1, ("load",)),
        (uninstall_on_rank_1, ("destroy",)),
    ],
    ids=["before initialize", "after initialize", "uninstalled before a load", "uninstalled with a save on its way"],
)
def test_a_rank_without_zeroelastic_is_named_by_the_others(
    rank_pool: RankPool, tmp_path: Path, script: Callable[..., None], args: tuple[str, ...]
) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        rank_pool.run(script, 2, str(tmp_path), *args, timeout=60)
    said = {failure.rank: failure.headline for failure in caught.value.failures}[0]
    assert said.startswith("zeroelastic.errors.UsageError: zeroelastic is installed on rank 0 but not on rank 1")
    assert time.monotonic() - began < 55


def install_a_second_later_on_rank_1(directory: str) -> None:
    engine = build_engine(Job(installed=False, elastic=False))
    time.sleep(dist.get_rank())
    zeroelastic.install()
    engine.save_checkpoint(directory)


def test_install_after_initialize_on_all_ranks_is_enough(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(install_a_second_later_on_rank_1, 2, str(tmp_path), timeout=60)
    assert (tmp_path / "global_step0" / "zeroelastic.json").exists()


def build_with_other_options(changes: dict[str, Any]) -> tuple[str, str]:
    job = Job() if dist.get_rank() == 0 else replace(Job(), **changes)
    return raised(lambda: build_engine(job))


@pytest.mark.support(USING, "a configuration that differs between ranks", "refused", "naming the options and the ranks")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"elastic": False}, '"elastic_checkpoint" is True on rank 0, False on rank 1'),
        ({"options": {"async_save": True}}, '"async_save" in the "zeroelastic" block is False on rank 0'),
        ({"options": {"fast": True}}, "has no option 'fast'"),
    ],
)
def test_a_configuration_that_differs_between_ranks_is_the_same_error_on_all(
    rank_pool: RankPool, changes: dict[str, Any], named: str
) -> None:
    first, second = rank_pool.run(build_with_other_options, 2, changes, timeout=60)
    assert first == second and first[0] == "ConfigError" and named in first[1]


def test_an_error_about_many_ranks_names_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = [
        {"async_save": rank % 2 == 0, "keep": rank, "alike": 1, "few": int(rank >= 16_000)} for rank in range(16_384)
    ]
    monkeypatch.setattr(partners, "all_gather_or_raise", lambda facts: (facts(), everybody))
    with pytest.raises(ConfigError) as caught:
        partners.agree_on(lambda: everybody[0])
    said = str(caught.value)
    assert len(said) < 700 and "alike" not in said
    assert (
        "async_save is True on ranks 0, 2, 4, 6, 8, 10 and 8186 more, False on ranks 1, 3, 5, 7, 9, 11 and 8186" in said
    )
    assert "keep is 0 on rank 0, 1 on rank 1, 2 on rank 2" in said and "and 16378 more" in said
    assert "few is 0 on ranks 0 to 15999, 1 on ranks 16000 to 16383" in said


def test_an_error_of_many_ranks_has_a_few_messages() -> None:
    failures = {rank: ("CheckpointError", f"rank{rank}.pt: is missing", (), None) for rank in range(16_384)}
    said = str(collective._combined(failures))
    assert said.startswith("rank0.pt: is missing\n(rank 1: rank1.pt: is missing)") and said.endswith("16377 more")
    assert len(said) < 400
