"""accelerate and Lightning remove older checkpoints while saves are in the background: a complete one always stays."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from frameworks_job import AccelerateJob, LightningJob, Net, Rows, accelerate_steps, groups, lightning_trainer, prepare
from torch.utils.data import DataLoader
from training import save_slowly

import zeroelastic
from zeroelastic import SaveError
from zeroelastic.deepspeed.save.save import Save
from zeroelastic.testing import RankPool

BEHIND = {"async_save": True}


def accelerate_limited(job: AccelerateJob, project: str, limit: int, steps: int) -> list[list[str]]:
    """Save each step, with a ``total_limit``. The complete checkpoints that stay at each removal. Saves are slow."""
    warnings.simplefilter("ignore")
    save_slowly()
    parts = prepare(job)
    accelerator = parts[0]
    config = accelerator.project_configuration
    config.set_directories(project)
    config.automatic_checkpoint_naming, config.total_limit = True, limit
    stay: list[list[str]] = []
    remove = shutil.rmtree

    def removing(path: Any, *args: Any, **kwargs: Any) -> None:
        remove(path, *args, **kwargs)
        stay.append(complete_in(Path(project, "checkpoints")))

    with patch.object(shutil, "rmtree", removing):
        for step in range(1, steps + 1):
            accelerate_steps(parts, step)
            accelerator.save_state()
        with patch.object(Save, "commit", lambda *_: fail()), pytest.raises((SaveError, OSError), match="disk is full"):
            accelerator.save_state()
            zeroelastic.wait_for_save(parts[1])
    return [names for names in stay if names or not Path(project, "checkpoints").exists()]


def fail() -> None:
    raise OSError("the disk is full")


def complete_in(directory: Path) -> list[str]:
    """The checkpoints of a framework in a directory that have a commit record."""
    return sorted(path.parent.parent.name for path in directory.glob("*/*/zeroelastic.json"))


def lightning_limited(job: LightningJob, directory: str, steps: int) -> list[list[str]]:
    """Save each step, of which one is kept: the complete checkpoints after each step. Saves are slow."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    save_slowly()
    complete: list[list[str]] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            complete.append(complete_in(Path(directory)))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(groups(self, 1e-2))

    keep = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=1)
    trainer = lightning_trainer(job, max_steps=steps, logger=False, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(Module(), DataLoader(Rows(96), batch_size=job.micro))
    return complete


@pytest.mark.parametrize(
    ("options", "limit", "stay"),
    [
        (BEHIND, 1, [["checkpoint_1"], ["checkpoint_2"], ["checkpoint_3"]]),
        (BEHIND, 2, [["checkpoint_1", "checkpoint_2"], ["checkpoint_2", "checkpoint_3"]]),
        ({}, 1, [["checkpoint_1"], ["checkpoint_2"], ["checkpoint_3"]]),
    ],
)
def test_accelerate_removes_no_checkpoint_before_the_one_after_it_is_complete(
    frameworks_pool: RankPool, tmp_path: Path, options: dict[str, Any], limit: int, stay: list[list[str]]
) -> None:
    """Nor where the save after it fails: accelerate removes first, and with a limit of one nothing would be left."""
    job = AccelerateJob(options=options)
    assert frameworks_pool.run(accelerate_limited, 2, job, str(tmp_path), limit, 4)[0] == stay
    assert complete_in(tmp_path / "checkpoints")[-1] == "checkpoint_3"


def test_lightning_removes_no_checkpoint_before_the_one_after_it_is_complete(
    frameworks_pool: RankPool, tmp_path: Path
) -> None:
    complete = frameworks_pool.run(lightning_limited, 2, LightningJob(options=BEHIND), str(tmp_path), 4)[0]
    assert complete == [[], ["step=2.ckpt"], ["step=3.ckpt"], ["step=4.ckpt"]]
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]
