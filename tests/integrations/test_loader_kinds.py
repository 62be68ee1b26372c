"""Data loaders of accelerate and Fabric that skip or keep batches in ways of their own."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks_job import AccelerateJob, Net, Rows, accelerate_run, groups, zero_of
from places import ROOT

from zeroelastic.errors import UnsupportedError, ZeroElasticError
from zeroelastic.testing import RankError, RankPool


@pytest.mark.support("Frameworks", "accelerate: `dispatch_batches`, and streams", "exact", "with `remaining_epochs`")
@pytest.mark.parametrize("loader", ["dispatched", "stream"])
def test_remaining_epochs_go_on_with_batches_that_are_dealt_out(
    frameworks_pool: RankPool, tmp_path: Path, loader: str
) -> None:
    """In the middle of the second epoch of two steps; accelerate deals out streams, too."""
    step, job, path = 3, AccelerateJob(loader=loader), str(tmp_path / "a")
    whole = frameworks_pool.run(accelerate_run, 2, job.at(2), 6, save=(step, path))[0]
    assert sorted(whole.samples[2] + whole.samples[3]) == list(range(48))
    for world_size in (2, 3):
        for seen in frameworks_pool.run(accelerate_run, world_size, job.at(world_size), 6, load=path):
            assert seen.samples == whole.samples[step:]


def test_remaining_epochs_refuse_a_loader_that_keeps_the_position_itself(frameworks_pool: RankPool) -> None:
    """A resume at the same size gave the second epoch without its first batches."""
    with pytest.raises(RankError, match="Turn use_stateful_dataloader off"):
        frameworks_pool.run(accelerate_run, 2, AccelerateJob(loader="stateful").at(2), 1)


def fabric_run(loader: str, path: str, *, steps: tuple[int, int]) -> Any:
    """The samples of a run of Fabric from the first to the last of ``steps``, or the error of its load.

    It loads from ``path`` unless it begins with step 0, in which case it saves there after two steps.
    """
    sys.path.append(str(ROOT / "examples" / "lightning"))
    from cpu_accelerator import FabricOnCPU
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    import zeroelastic
    from zeroelastic.elastic import ElasticDistributedSampler, ElasticStatefulDataLoader, batch_plan

    warnings.simplefilter("ignore")
    zeroelastic.install()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    plan = batch_plan(12)
    config = {"train_micro_batch_size_per_gpu": plan.micro_batch, "zero_optimization": zero_of(AccelerateJob())}
    config["zero_allow_untested_optimizer"] = True
    strategy = DeepSpeedStrategy(config=config)
    fabric = Fabric(accelerator=FabricOnCPU(), devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    fabric.seed_everything(7)
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(groups(model, 1e-2)))
    rows = Rows()
    if loader == "elastic":
        data: Any = ElasticStatefulDataLoader(rows, ElasticDistributedSampler(rows, plan.global_batch), plan)
    else:
        data = StatefulDataLoader(rows, batch_size=plan.micro_batch, sampler=DistributedSampler(rows))
    state = {"model": model, "optimizer": optimizer, "loader": data, "step": 0}
    first, last = steps
    if first:
        try:
            fabric.load(path, state)
        except ZeroElasticError as error:
            return type(error).__name__, str(error)
    samples = []
    for batch, index in data:
        fabric.backward(model(batch))
        optimizer.step()
        samples.append(sorted(fabric.all_gather(index).flatten().tolist()))
        state["step"] += 1
        if state["step"] == 2 and not first:
            fabric.save(path, state)
        if state["step"] == last:
            break
    return samples


@pytest.mark.support(
    "Frameworks", "Fabric: `StatefulDataLoader` in the state", "refused", "at another size; exact at the same"
)
def test_a_stateful_loader_of_fabric_is_refused_at_another_size(frameworks_pool: RankPool, tmp_path: Path) -> None:
    """Two batches of 6 became three of 4, on ranks that have done two: a global batch was left out."""
    path = str(tmp_path / "a")
    whole = frameworks_pool.run(fabric_run, 2, "stateful", path, steps=(0, 4))[0]
    assert frameworks_pool.run(fabric_run, 2, "stateful", path, steps=(2, 4))[0] == whole[2:]
    for kind, text in frameworks_pool.run(fabric_run, 3, "stateful", path, steps=(2, 4)):
        assert kind == UnsupportedError.__name__
        assert "'loader' in the state is a StatefulDataLoader, which counts the batches of 2 ranks" in text


@pytest.mark.support("Frameworks", "Fabric: `ElasticStatefulDataLoader` in the state", "exact")
def test_an_elastic_loader_of_fabric_goes_on_at_another_size(frameworks_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    whole = frameworks_pool.run(fabric_run, 2, "elastic", path, steps=(0, 4))[0]
    assert frameworks_pool.run(fabric_run, 3, "elastic", path, steps=(2, 4))[0] == whole[2:]
