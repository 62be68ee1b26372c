"""Files of the ZeRO-1 of early DeepSpeeds, as GPT-NeoX wrote them (Pythia): not damaged, and not supported."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import zeroelastic
from zeroelastic.checkpoint.optimizer_reader import read_optimizer_file
from zeroelastic.errors import UnsupportedError

TAG = "global_step143000"
RANKS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tag_dir = tmp_path / TAG
    tag_dir.mkdir()
    (tmp_path / "latest").write_text(TAG)
    shapes = OrderedDict(
        [("0.word_embeddings.weight", torch.Size([7, 3])), ("2.attention.dense.bias", torch.Size([5]))]
    )
    for rank in range(RANKS):
        state = {
            "loss_scaler": None,
            "dynamic_loss_scale": True,
            "overflow": False,
            "base_optimizer_state": [[{"exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n)}] for n in (6, 2)],
            "zero_stage": 1,
            "partition_count": RANKS,
            "num_comm_intervals_per_group": [1, 1],
            "local_sub_partitions_of_fp32_groups": [[torch.ones(6)], [torch.ones(2)]],
        }
        optimizer = {"optimizer_state_dict": state, "param_shapes": shapes}
        torch.save(optimizer, tag_dir / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    counters = {"skipped_steps": 0, "global_steps": 143000, "dp_world_size": RANKS, "mp_world_size": 1}
    model = {"module": None, "optimizer": None, "lr_scheduler": None, **counters, "num_layers": 12}
    torch.save(model, tag_dir / "mp_rank_00_model_states.pt")
    torch.save(OrderedDict(weight=torch.ones(7, 3).half()), tag_dir / "layer_00-model_00-model_states.pt")
    return tmp_path


@pytest.mark.parametrize("quick", [False, True])
def test_they_are_not_damaged_and_not_supported(run: Path, quick: bool) -> None:
    report = zeroelastic.verify(run, quick=quick)
    assert report.problems == () and len(report.unsupported) == 1
    assert "was written by an early DeepSpeed" in report.unsupported[0]
    assert [tag.status for tag in zeroelastic.ls(run).tags] == ["no record"]
    found = zeroelastic.inspect(run)
    assert found.problems == [] and "early DeepSpeed" in found.unsupported[0]


def test_every_verb_that_needs_their_tensors_says_so(run: Path, tmp_path: Path) -> None:
    for action in (
        lambda: zeroelastic.export(run, tmp_path / "out"),
        lambda: zeroelastic.reshard(run, tmp_path / "out", world_size=2),
        lambda: zeroelastic.plan(run, world_size=2),
        lambda: read_optimizer_file(run / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt", world_size=RANKS),
    ):
        with pytest.raises(UnsupportedError, match=r"was written by .* early DeepSpeed") as caught:
            action()
        assert "Copy the checkpoint again" not in str(caught.value) and not (tmp_path / "out").exists()
