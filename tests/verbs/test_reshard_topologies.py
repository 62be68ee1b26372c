"""Resharded checkpoints of experts and tensor parallelism in stock DeepSpeed: the whole state is the saved one.

The referee is ``topologies.logical_state``. zeroelastic is not installed in the ranks that load, and in those that save
only where the case says so; every load trains on with the losses of the run that was saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import topologies
import torch
from synthetic import plain
from topologies import LOSS_RTOL, TopologyJob, differences, load_run, save_run

import zeroelastic
from zeroelastic.checkpoint.tag_files import SAVE_ID
from zeroelastic.errors import UnsupportedError, UsageError
from zeroelastic.testing import RankPool


@dataclass(frozen=True)
class Case:
    """A run of ``job`` on ``ranks``, and stock runs that load what is made of its checkpoint: ranks and changes."""

    ranks: int
    job: TopologyJob
    others: tuple[tuple[int, dict[str, Any]], ...]


def stock(model: str, **options: Any) -> TopologyJob:
    return TopologyJob(model, installed=False, elastic=False, **options)


CASES = {
    "llama 3": Case(
        4, stock("llama", tp=2, precision="bf16"), ((2, {"tp": 1}), (4, {"tp": 4}), (2, {"tp": 2, "stage": 1}))
    ),
    "qwen3 2": Case(
        2, stock("qwen3", tp=2, stage=2, frozen=True), ((3, {"tp": 1}), (4, {"tp": 2}), (4, {"tp": 4, "stage": 3}))
    ),
    "neox 1": Case(4, stock("neox", tp=4, stage=1), ((4, {"tp": 2, "stage": 2}), (1, {"tp": 1}))),
    "autoep 3": Case(
        4, stock("autoep", ep=2, precision="bf16"), ((4, {"ep": 4}), (3, {"ep": 1}), (2, {"ep": 2, "stage": 2}))
    ),
    "autoep 1": Case(2, stock("autoep", ep=1, stage=1), ((4, {"ep": 2}),)),
    "moe 2": Case(4, stock("moe", ep=2, stage=2, precision="bf16"), ((2, {"ep": 2}), (4, {"ep": 4}), (3, {"ep": 1}))),
}


@pytest.mark.support(
    "Using it", "`zeroelastic reshard --tp`, `--ep`: AutoTP, AutoEP and DeepSpeed's own MoE layers", "exact"
)
@pytest.mark.parametrize("name", CASES)
def test_stock_deepspeed_goes_on_at_another_topology(name: str, topology_pool: RankPool, tmp_path: Path) -> None:
    case = CASES[name]
    saved = topology_pool.run(save_run, case.ranks, case.job, str(tmp_path / "saved"))[0]
    roots: set[str | None] = set()
    for number, (ranks, changes) in enumerate(case.others):
        job = replace(case.job.other(), **changes)
        given: dict[str, Any] = {"tp": job.tp} if "tp" in changes else {"ep": job.ep}
        if job.stage == 3:
            given["sub_group_size"] = topologies.ds_config(job)["zero_optimization"]["sub_group_size"]
        target = tmp_path / str(number)
        report = zeroelastic.reshard(tmp_path / "saved", target, world_size=ranks, stage=job.stage, **given)
        roots.add(report.content_root)
        found = topology_pool.run(load_run, ranks, job, str(target))[0]
        assert not differences(saved.state, found.state), changes
        assert found.losses == pytest.approx(saved.losses, rel=LOSS_RTOL[job.precision])
    assert len(roots) == 1


@pytest.fixture(scope="module")
def saves(topology_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two ranks: by the model, "plain" without tensor parallelism."""
    jobs = {
        "plain": stock("llama"),
        "llama": stock("llama", tp=2),
        "qwen3": stock("qwen3", tp=2),
        "autoep": stock("autoep", ep=2),
        "moe": stock("moe", ep=2, stage=2),
    }
    found: dict[str, Path] = {}
    for name, job in jobs.items():
        found[name] = tmp_path_factory.mktemp("saves") / name
        topology_pool.run(save_run, 2, job, str(found[name]))
    return found


def test_the_slices_of_another_checkpoint_are_taken(
    topology_pool: RankPool, saves: dict[str, Path], tmp_path: Path
) -> None:
    """Of one that says how tensor parallel ranks cut the weights, for a source that does not."""
    target = tmp_path / "out"
    report = zeroelastic.reshard(saves["plain"], target, world_size=4, tp=2, like=saves["llama"], verify=True)
    assert report.verified and report.notes == ("saved with tensor parallel size 1; the result is of 2",)
    job = stock("llama", tp=2).other()
    found = topology_pool.run(load_run, 4, job, str(target))[0]
    whole = topology_pool.run(load_run, 2, stock("llama").other(), str(saves["plain"]))[0]
    assert not differences(whole.state, found.state)


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no map": ("plain", {"world_size": 2, "tp": 2}, UnsupportedError, r"does not say how 2 ranks cut.*--like"),
    "uneven cuts": ("qwen3", {"world_size": 3, "tp": 3}, UnsupportedError, r"cannot be by 3 ranks.*--like"),
    "native MoE at stage 3": ("moe", {"world_size": 2, "stage": 3}, UnsupportedError, r"does not start at stage 3"),
    "experts and tensor parallelism": ("autoep", {"world_size": 2, "tp": 2}, UnsupportedError, r"Leave --tp out"),
    "experts that do not divide": ("autoep", {"world_size": 3, "ep": 3}, UnsupportedError, r"\(4\)\. Give an --ep"),
    "ranks that do not divide": (
        "autoep",
        {"world_size": 3},
        UsageError,
        r"cannot form groups of 2 expert parallel ranks",
    ),
    "tensor ranks that do not divide": (
        "llama",
        {"world_size": 3},
        UsageError,
        r"3 counts all ranks and is not a multiple of .* size 2",
    ),
    "fewer ranks than tensor ranks": (
        "llama",
        {"world_size": 1},
        UsageError,
        r"1 counts all ranks and is not a multiple of .* size 2",
    ),
    "no experts": ("llama", {"world_size": 2, "ep": 2}, UnsupportedError, r"has no experts that DeepSpeed distributes"),
    "a size of zero": ("llama", {"world_size": 2, "tp": 0}, UsageError, r"0 tensor parallel ranks make no sense"),
}


@pytest.mark.support("Using it", "`zeroelastic reshard --stage 3`: DeepSpeed's own MoE layers", "refused")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_by_name(name: str, saves: dict[str, Path], tmp_path: Path) -> None:
    source, options, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        zeroelastic.reshard(saves[source], tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "like", "tp", "said"),
    [
        ("plain", "llama", 4, "was saved with tensor parallel size 2, and 4 is asked for"),
        ("plain", "qwen3", 2, "has no slices of .* or those of another shape"),
        ("llama", "llama", 1, "--like says how tensor parallel ranks cut weights"),
    ],
)
def test_slices_of_another_model_or_size_are_refused(
    source: str, like: str, tp: int, said: str, saves: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=said):
        zeroelastic.reshard(saves[source], tmp_path / "out", world_size=4, tp=tp, like=saves[like])


@pytest.mark.parametrize(
    ("name", "over", "size"),
    [("llama", {"tp": 4}, {"tp": 2}), ("autoep", {"ep": 4}, {"ep": 2}), ("moe", {"ep": 1}, {"ep": 2})],
)
def test_a_result_is_resharded_back_to_what_deepspeed_wrote(
    name: str, over: dict[str, int], size: dict[str, int], saves: dict[str, Path], tmp_path: Path
) -> None:
    """In DeepSpeed's own format: every object of every file, what they say of slices and ranks included."""
    there, back = tmp_path / "there", tmp_path / "back"
    zeroelastic.reshard(saves[name], there, world_size=4, format="rigid", **over)
    zeroelastic.reshard(there, back, world_size=2, format="rigid", **size)
    for path in sorted((saves[name] / "t").glob("*.pt")):
        want, got = (torch.load(folder, weights_only=False) for folder in (path, back / "t" / path.name))
        got.pop(SAVE_ID, None)  # experts' files have none
        assert want.keys() == got.keys()
        for key in want:
            assert _sizes_as_tuples(plain(got[key])) == _sizes_as_tuples(plain(want[key])), (path.name, key)


def _sizes_as_tuples(value: Any) -> Any:
    """DeepSpeed copies the shapes of files with experts into tuples."""
    if isinstance(value, (list, tuple)):
        return [_sizes_as_tuples("tuple" if item == "Size" else item) for item in value]
    return value
