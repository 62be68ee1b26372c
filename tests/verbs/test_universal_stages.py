"""Universal checkpoints of ZeRO stages 1 and 2, which DeepSpeed's converter made, as sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from places import GOLDEN
from programs import run_command
from stock_programs import make_universal
from synthetic import plain
from training import Job, train_and_save

import zeroelastic
from zeroelastic.errors import UnsupportedError, UsageError
from zeroelastic.testing import RankPool

MODEL = "mp_rank_00_model_states.pt"
SOURCES = ("stage1_rank2", "stage1_bf16_optimizer_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3")


def tag_of(directory: Path) -> Path:
    return next(directory.glob("global_step*"))


@pytest.mark.support(
    "Using it", "`zeroelastic convert` from Universal Checkpoint to stages 1, 2 and 3", "exact", "of stages 1, 2 and 3"
)
@pytest.mark.parametrize("name", ["elastic2", "rigid3", *SOURCES])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_there_and_back_is_the_same_content_at_every_stage(name: str, stage: int, tmp_path: Path) -> None:
    """The files are those of a reshard, object for object, which stock DeepSpeed loads.

    The last source has gaps between its parameters, where DeepSpeed is right under round_robin_gradients.
    """
    source = GOLDEN / name
    root = zeroelastic.verify(source).content_root
    make_universal(tag_of(source), tmp_path / "there")
    options = {"world_size": 3, "stage": stage, "format": "rigid" if stage < 3 or name == "rigid3" else "elastic"}
    report = zeroelastic.convert(tmp_path / "there", tmp_path / "back", from_="universal", **options)
    assert report.content_root == root == zeroelastic.verify(tmp_path / "back").content_root
    assert report.to == options["format"]
    zeroelastic.reshard(source, tmp_path / "direct", **options)
    assert zeroelastic.diff(tmp_path / "direct", tmp_path / "back").equal
    for path in tag_of(tmp_path / "direct").glob("*.pt"):
        want, got = (torch.load(tag_of(tmp_path / d) / path.name, weights_only=False) for d in ("direct", "back"))
        for data in (want, got):
            data.pop("zeroelastic_save_id", None)
            data.get("optimizer_state_dict", {}).get("zeroelastic", {}).pop("save_id", None)
        assert plain(got) == plain(want), path.name


def test_options_of_the_run_that_loads_go_with_from(tmp_path: Path) -> None:
    make_universal(tag_of(GOLDEN / "elastic2"), tmp_path / "u")
    arguments = ["convert", tmp_path / "u", tmp_path / "b", "--from", "universal", "-n", 2]
    done = run_command(*arguments, "--stage", 2, "--round-robin-gradients")
    assert done.returncode == 0 and "round_robin_gradients as given" in done.stdout
    model = torch.load(tag_of(tmp_path / "b") / MODEL, weights_only=False)
    assert list(model["param_shapes"][1]) == ["gain", "tail.bias", "inner.bias"]
    for options, said in (
        ({"stage": 2, "format": "elastic"}, "there is no elastic format"),
        ({"stage": 0}, "there is no ZeRO stage 0 to reshard to"),
        ({"parameter_alignment": True}, "makes no difference at ZeRO stage 3"),
    ):
        with pytest.raises(UsageError, match=said):
            zeroelastic.convert(tmp_path / "u", tmp_path / "c", from_="universal", world_size=2, **options)
    with pytest.raises(UsageError, match="--stage goes with --from"):
        zeroelastic.convert(GOLDEN / "elastic2", tmp_path / "c", to="fsdp2", stage=2)


def test_what_deepspeeds_converter_made_wrong_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    """If nothing is wrong, DeepSpeed has been repaired: the refusal, and what the docs say of it, go."""
    job = Job(stage=2, installed=False, elastic=False, zero={"round_robin_gradients": True})
    rank_pool.run(train_and_save, 3, job, str(tmp_path / "a"))
    tag = tag_of(tmp_path / "a")
    made = make_universal(tag, tmp_path / "stock")
    wrong = 0
    with zeroelastic.open(tag) as saved:
        for path in (made / tag.name / "zero").glob("*/exp_avg.pt"):
            right = saved.optimizer(path.parent.name)["exp_avg"].torch()
            wrong += not torch.equal(torch.load(path)["param"].view(-1), right.view(-1))
    assert wrong >= 3
    with pytest.raises(UnsupportedError, match=r"ds_to_universal\.py, which gave parameters the values of others"):
        zeroelastic.convert(made, tmp_path / "b", from_="universal", world_size=2)
    assert not (tmp_path / "b").exists()
