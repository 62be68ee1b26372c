"""The elastic example on torchrun agents that are killed, cut off and started again, as a cluster does it.

`make demo-elastic` plays 4 -> 3 -> 2 -> 4 -> 1 -> 3 nodes, a fixed size and a pulled cable, and compares each with a
run without a break.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from places import ROOT
from programs import wait_for
from warm_python import executable

from zeroelastic.elastic import ElasticDistributedSampler
from zeroelastic.verbs.verify.verify import verify_checkpoint

pytestmark = pytest.mark.extended

EXAMPLE = ROOT / "examples" / "elastic"
BATCH, SAMPLES, STEPS, SAVE_STEPS = 12, 500, 16, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("cluster")
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a process that has imported torch and deepspeed; they end with what torchrun started."""
    monkeypatch.setenv("PYTHON_EXEC", executable())


def check(out: Path, steps: int, *, ranks: int, our_share: float | None = None) -> None:
    """Every step was trained on its own samples, every resume was bit-exact, every checkpoint is whole."""
    import judge

    trace = out / "trace.jsonl"
    resumes = [entry for entry in judge.read_trace(trace) if entry["event"] == "resume" and entry["tier"] is not None]
    assert resumes and all(entry["exact"] for entry in resumes)
    assert max(judge.lost_steps(trace)) <= SAVE_STEPS
    sampler = ElasticDistributedSampler(range(SAMPLES), BATCH, seed=0, rank=0, world_size=1)
    committed = judge.committed_samples(trace)
    assert list(committed) == list(range(1, steps + 1))
    for step, (_, samples) in committed.items():
        assert samples == torch.sort(sampler.batch(step - 1)).values.tolist(), f"step {step}"
    assert judge.world_sizes(trace)[-1] == ranks
    for tag in out.glob("ckpt/global_step*"):
        assert verify_checkpoint(tag).problems == (), tag
    restarts = judge.restarts(trace)
    assert restarts and all(0 < one["our_share"] <= (our_share or judge.OUR_SHARE) for one in restarts)


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.timeout(420)
def test_a_job_goes_on_through_a_lost_and_a_new_node(cluster: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "job"
    cluster.play(out, ((6, -1), (10, +1)), steps=STEPS, save_steps=SAVE_STEPS, limit=400, first=2)
    check(out, STEPS, ranks=2)
    import judge

    sizes = judge.world_sizes(out / "trace.jsonl")
    assert sizes[:2] == [2, 1] and sizes[-1] == 2 and judge.restarts(out / "trace.jsonl")[-1]["lost_steps"] == 0


@pytest.mark.timeout(420)
def test_with_memory_a_lost_node_costs_a_step_and_no_read_of_the_disk(
    cluster: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import judge

    monkeypatch.setenv("ZEROELASTIC_MEMORY_DIR", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    out = tmp_path / "job"
    scenario = ((6, -1), (10, +1))
    cluster.play(out, scenario, steps=STEPS, save_steps=SAVE_STEPS, limit=400, first=3, way=cluster.MEMORY)
    check(out, STEPS, ranks=3, our_share=1.0)
    trace = out / "trace.jsonl"
    assert max(judge.lost_steps(trace)) <= 1
    later = [entry for entry in judge.read_trace(trace) if entry["event"] == "resume" and entry["tag"] is not None]
    assert later and all(entry["tier"] == "memory" for entry in later)
    wait_for(lambda: not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()], "memory is freed", 10)


@pytest.mark.support("Using it", "torchrun job of a fixed size", "exact", "waits for a node that was killed")
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.timeout(420)
def test_a_job_of_a_fixed_size_waits_for_the_node_that_was_killed(cluster: ModuleType, tmp_path: Path) -> None:
    out, steps = tmp_path / "job", 14
    seen = cluster.play_fixed_size(out, size=2, kill_at=6, away=3.0, steps=steps, save_steps=SAVE_STEPS, limit=400)
    assert seen == {"steps_while_waiting": 0, "agents_waiting": 1}
    check(out, steps, ranks=2)
    import judge

    assert set(judge.world_sizes(out / "trace.jsonl")) == {2}


@pytest.mark.timeout(420)
def test_a_node_whose_cable_is_pulled_is_left_behind(cluster: ModuleType, tmp_path: Path) -> None:
    import network

    reason = network.why_not()
    if reason is not None:
        pytest.skip(reason)
    out, steps = tmp_path / "job", 14
    seen = cluster.play_cut(out, size=2, cut_at=5, steps=steps, save_steps=SAVE_STEPS, limit=400, back=None)
    assert seen.pop("seconds_to_a_step_without_it") < 200
    assert seen == {"workers_left": 0, "steps_by_lost_workers": 0}
    check(out, steps, ranks=1)
    import judge

    assert judge.world_sizes(out / "trace.jsonl") == [2, 1]
