"""Data loaders that skip or keep batches in ways of their own, and several at a time: each goes on at its place."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from frameworks_job import AccelerateJob, LightningJob, Net, Rows, accelerate_run, groups, lightning_trainer, zero_of
from places import ROOT
from saved_files import logged
from torch.utils.data import DataLoader, DistributedSampler

from zeroelastic.errors import UnsupportedError, ZeroElasticError
from zeroelastic.integrations.lightning import _short_of
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


def lightning_of_two_loaders(
    job: LightningJob,
    mode: str,
    samples: tuple[int, int],
    *,
    load: str | None = None,
    save: tuple[int, str] | None = None,
    elastic: bool = False,
) -> tuple[list[Any], list[str]]:
    """The samples of each of 12 steps from each of two loaders, None for one that has no more; and what was said.

    ``elastic`` is whether the second one keeps its position itself.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import CombinedLoader

    said = logged("", levels=True)
    seen: list[Any] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batches: Any, batch_idx: int) -> torch.Tensor:
            given = [batch if batch is None else self.all_gather(batch[1]).flatten().tolist() for batch in batches]
            seen.append([one if one is None else sorted(one) for one in given])
            return self.net(next(batch for batch in batches if batch is not None)[0])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if save is not None and self.trainer.global_step == save[0]:
                self.trainer.save_checkpoint(save[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(groups(self, 1e-2))

    pl.seed_everything(3)
    trainer = lightning_trainer(job, max_steps=12, logger=False, use_distributed_sampler=not elastic)
    trainer.strategy.config["train_micro_batch_size_per_gpu"] = job.micro  # with several loaders Lightning requires it
    loaders: list[Any] = [DataLoader(Rows(count), batch_size=job.micro, shuffle=True) for count in samples]
    if elastic:
        from zeroelastic.elastic import ElasticDistributedSampler, ElasticStatefulDataLoader, batch_plan

        plan, first, second = batch_plan(12), *map(Rows, samples)
        loaders = [
            DataLoader(first, batch_size=job.micro, sampler=DistributedSampler(first)),
            ElasticStatefulDataLoader(second, ElasticDistributedSampler(second, 12), plan),
        ]
    trainer.fit(Module(), CombinedLoader(loaders, mode), ckpt_path=load)
    return seen, said


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_several_loaders_go_on_each_at_its_place(frameworks_pool: RankPool, tmp_path: Path, mode: str) -> None:
    """8 and 3 batches: after step 5 the short loader is in its second round, has no more, or has ended the epoch."""
    step = 2 if mode == "min_size" else 5
    job, path = LightningJob(options={}), str(tmp_path / "a")
    whole, _ = frameworks_pool.run(lightning_of_two_loaders, 2, job.at(2, 12), mode, (96, 36), save=(step, path))[0]
    seen, said = frameworks_pool.run(lightning_of_two_loaders, 3, job.at(3, 12), mode, (96, 36), load=path)[0]
    assert seen == whole[step:]
    assert not [line for line in said if "POSITION CHANGED" in line]


def test_a_loader_beside_one_that_keeps_its_position_goes_on_too(frameworks_pool: RankPool, tmp_path: Path) -> None:
    """It began the epoch anew."""
    job, path, run = LightningJob(options={}), str(tmp_path / "a"), ("max_size_cycle", (96, 96))
    whole, _ = frameworks_pool.run(lightning_of_two_loaders, 2, job.at(2, 12), *run, save=(5, path), elastic=True)[0]
    for world_size in (2, 3):
        args = (job.at(world_size, 12), *run)
        seen, _ = frameworks_pool.run(lightning_of_two_loaders, world_size, *args, load=path, elastic=True)[0]
        assert seen == whole[5:]


def test_a_loader_that_begins_again_within_a_global_batch_is_named(frameworks_pool: RankPool, tmp_path: Path) -> None:
    """30 samples are 2 and a half global batches: its rounds end elsewhere on 3 ranks."""
    job, path = LightningJob(options={}), str(tmp_path / "a")
    frameworks_pool.run(lightning_of_two_loaders, 2, job.at(2, 12), "max_size_cycle", (96, 30), save=(5, path))
    for world_size, warned in ((2, 0), (3, 1)):
        args = (job.at(world_size, 12), "max_size_cycle", (96, 30))
        _, said = frameworks_pool.run(lightning_of_two_loaders, world_size, *args, load=path)[0]
        assert len([line for line in said if "POSITION CHANGED: a loader of 30 samples" in line]) == warned


def test_a_loader_of_a_stream_that_has_a_length_is_not_counted_in_samples() -> None:
    class Batches:
        dataset = iter(())

        def __len__(self) -> int:
            return 2

    combined = SimpleNamespace(_mode="max_size_cycle")
    assert _short_of(Batches(), 5, combined) == 0
    assert _short_of(DataLoader(Rows(30), batch_size=6), 5, combined) == 30
    assert _short_of(DataLoader(Rows(30), batch_size=6), 4, combined) == 0
