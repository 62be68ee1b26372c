"""Lightning with several loaders, of which some are shorter than the epoch: each goes on at its place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks_job import LightningJob, Net, Rows, groups, lightning_trainer
from saved_files import logged
from torch.utils.data import DataLoader, DistributedSampler

from zeroelastic.integrations.lightning import _short_of
from zeroelastic.testing import RankPool


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
