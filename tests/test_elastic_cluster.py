"""The elastic example on torchrun agents that are killed and started again, as a cluster does it.

`make demo-elastic` plays 4 -> 3 -> 2 -> 4 -> 1 -> 3 nodes and compares with a run without a break.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from zeroelastic.elastic import ElasticDistributedSampler

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic" / "cluster.py"
BATCH, SAMPLES, STEPS, SAVE_STEPS = 12, 500, 26, 4


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_cluster", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(420)
def test_a_job_goes_on_through_a_lost_and_a_new_node(cluster: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "job"
    cluster.play(out, ((6, -1), (10, +1)), steps=STEPS, save_steps=SAVE_STEPS, limit=400, first=2)
    log = out / "log.jsonl"
    assert cluster.world_sizes(log)[:2] == [2, 1] and cluster.world_sizes(log)[-1] == 2
    resumes = [entry for entry in cluster.read_log(log) if entry["event"] == "resume" and entry["tag"] is not None]
    assert len({entry["tag"] for entry in resumes}) >= 2 and all(entry["exact"] for entry in resumes)
    assert max(cluster.lost_steps(log)) <= SAVE_STEPS
    sampler = ElasticDistributedSampler(range(SAMPLES), BATCH, seed=0, rank=0, world_size=1)
    committed = cluster.committed_samples(log)
    assert list(committed) == list(range(1, STEPS + 1))
    for step, (_, samples) in committed.items():
        assert samples == torch.sort(sampler.batch(step - 1)).values.tolist(), f"step {step}"
