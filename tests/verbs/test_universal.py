"""Universal checkpoints that DeepSpeed's own converter makes of ours: its loader takes them, and we take them back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from places import GOLDEN
from programs import run_command
from sample import write_sample
from saved_files import tag_of
from stock_programs import ds_to_universal, make_universal
from synthetic import edit, model_name, plain, write_checkpoint
from training import Job, Outcome, resume, train_and_save

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError
from zeroelastic.testing import RankPool
from zeroelastic.verbs.convert.from_universal import find_universal, open_universal, plan_from_universal
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.reshard import run_reshard

TAG = "global_step3"


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """An elastic checkpoint of 4 ranks beside what DeepSpeed's converter, as a program, makes of it."""
    directory = tmp_path_factory.mktemp("saved")
    outcome = rank_pool.run(train_and_save, 4, Job(), str(directory / "run"))[0]
    (directory / "universal").mkdir()
    ds_to_universal(directory / "run" / TAG, directory / "universal" / TAG)
    return directory, outcome


@pytest.mark.support("Using it", "`ds_to_universal` on elastic checkpoints", "exact")
def test_stock_deepspeed_resumes_at_other_world_sizes(rank_pool: RankPool, saved: tuple[Path, Outcome]) -> None:
    """zeroelastic is not installed in the ranks that load."""
    directory, before = saved
    job = Job(perturb=0.5, lr=0.7, elastic=False, installed=False, config={"checkpoint": {"load_universal": True}})
    for world_size in (3, 2, 5):
        outcome = rank_pool.run(resume, world_size, job, str(directory / "universal"))[0]
        kinds = ("master/", "state/", "scalar/")
        found = {key: value for key, value in outcome.state.items() if key.startswith(kinds)}
        assert len(found) >= 4 * 7
        assert found == {key: value for key, value in before.state.items() if key.startswith(kinds)}
        assert outcome.report is None


def back(tag_dir: Path, target: Path, world_size: int, **options: Any) -> Any:
    plan = plan_from_universal(find_universal(tag_dir), ReshardOptions(world_size=world_size, **options))
    return run_reshard(plan, target)


def test_state_that_deepspeeds_converter_lost_is_reported(tmp_path: Path) -> None:
    """It keeps rank 0's part of max_exp_avg_sq in optimizer_state.pt, and that of no other rank."""
    states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "max_exp_avg_sq": torch.float32}
    write_checkpoint(tmp_path / "t", world_size=3, states=states, sub_group_size=None, frozen=None)
    for rank in range(3):
        edit(tmp_path / "t" / model_name(rank), lambda d: d.update(shared_params={}))
    make_universal(tmp_path / "t", tmp_path / "u")
    report = back(tmp_path / "u", tmp_path / "back", 2)
    assert any(note.startswith("max_exp_avg_sq of the optimizer") for note in report.notes)
    assert set(open_state(open_checkpoint(tmp_path / "back" / "t")).head.tensor_keys[0]) == {
        "fp32",
        "exp_avg",
        "exp_avg_sq",
    }


def _edit_state(change: Any) -> Any:
    return lambda tag: edit(tag / "zero" / "optimizer_state.pt", change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tag: (tag / "zero" / "w" / "fp32.pt").unlink(), "fp32.pt: no such file"),
        (lambda tag: (tag / "zero" / "w" / "exp_avg.pt").write_bytes(b"PK"), "exp_avg.pt"),
        (lambda tag: torch.save(torch.zeros(19), tag / "zero" / "w" / "fp32.pt"), "has 19 elements; w has 20"),
        (lambda tag: torch.save("text", tag / "zero" / "w" / "fp32.pt"), "not a tensor"),
        (lambda tag: (tag / "zero" / "w").rename(tag / "zero" / "other"), "w missing"),
        (lambda tag: (tag / "zero" / "other").mkdir(), "other not in param_shapes"),
        (lambda tag: (tag / "zero" / "optimizer_state.pt").unlink(), "optimizer_state.pt"),
        (lambda tag: (tag / model_name(1)).unlink(), "module states of rank 1 are missing"),
        (_edit_state(lambda d: d["optimizer_state_dict"].pop("state")), "with a state"),
        (_edit_state(lambda d: d["optimizer_state_dict"]["param_groups"][0].update(params=[99])), "group 0 lists"),
        (_edit_state(lambda d: d["optimizer_state_dict"]["param_groups"][0].update(params=[1])), "two optimizer"),
        (_edit_state(lambda d: d["optimizer_state_dict"]["param_groups"].pop()), "sub-groups of"),
        (_edit_state(lambda d: d["optimizer_state_dict"].update(param_groups=3)), "no optimizer groups"),
        (_edit_state(lambda d: d["optimizer_state_dict"]["state"].update({0: 3})), "the state of sub-group 0"),
    ],
)
def test_damage_is_named_and_nothing_is_written(tmp_path: Path, change: Any, said: str) -> None:
    write_checkpoint(tmp_path / "t", world_size=2, sub_group_size=None)
    check_damage(tmp_path / "t", tmp_path, change, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tag: torch.save("text", tag / "zero" / "gain" / "step.pt"), "step"),
        (lambda tag: torch.save({"param": torch.zeros(9)}, tag / "zero" / "gain" / "exp_avg.pt"), "gain has 1"),
        (lambda tag: (tag / "mp_rank_01_model_states.pt").touch(), "tensor parallel rank"),
    ],
)
def test_damage_of_stage_2_is_named(tmp_path: Path, change: Any, said: str) -> None:
    check_damage(GOLDEN / "stage2_rank2/global_step2", tmp_path, change, said)


def check_damage(source: Path, directory: Path, change: Any, said: str) -> None:
    make_universal(source, directory / "u")
    change(directory / "u" / source.name)
    before = sorted(os.listdir(directory))
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        back(directory / "u", directory / "back", 3)
    assert sorted(os.listdir(directory)) == before


def test_experts_and_missing_model_states_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "t", world_size=1, sub_group_size=None)
    make_universal(tmp_path / "t", tmp_path / "u")
    torch.save({"param": torch.zeros(5, 4)}, tmp_path / "u" / "t" / "zero" / "w" / "fp32.pt")
    assert open_universal(tmp_path / "u" / "t")[0].parts[0].dtypes[0]["fp32"] == "float32"
    torch.save({"param": torch.zeros(5, 4), "is_expert_param": True}, tmp_path / "u" / "t" / "zero" / "w" / "fp32.pt")
    with pytest.raises(UnsupportedError, match="AutoEP"):
        open_universal(tmp_path / "u" / "t")
    (tmp_path / "u" / "t" / model_name(0)).unlink()
    with pytest.raises(CheckpointError, match=r"has neither mp_rank_00_model_states\.pt"):
        find_universal(tmp_path / "u")


MODEL = "mp_rank_00_model_states.pt"
SOURCES = ("stage1_rank2", "stage1_bf16_optimizer_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3")


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
        ({"parameter_alignment": True}, "has no effect at ZeRO stage 3"),
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


# ---- the verb


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    write_sample(root / "ckpt")
    make_universal(root / "ckpt" / "global_step4", root / "there")
    return root


def test_the_verb_says_what_it_wrote(sample: Path) -> None:
    arguments = ["convert", "there", "again", "--from", "universal", "-n", "3"]
    dry = run_command(*arguments, "--dry-run", "--json", cwd=sample)
    assert dry.returncode == 0 and not (sample / "again").exists()
    done = run_command(*arguments, "--json", cwd=sample)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    record = read_record(sample / "ckpt" / "global_step4")
    assert record is not None and document["content_root"] == record.content_root
    assert (document["from"], document["to"], document["world_size"], document["target_world_size"]) == (
        "universal",
        "elastic",
        4,
        3,
    )
    before = json.loads(dry.stdout)
    assert before["tensors"] == document["tensors"] == 55 and before["content_root"] is None
    text = run_command(
        "convert", "there/global_step4", "rigid", "--from", "universal", "-n", "2", "--format", "rigid", cwd=sample
    )
    assert "wrote rigid for 2 ranks: 55 tensors" in text.stdout and record.content_root[:12] in text.stdout
    done = run_command(*arguments, cwd=sample)
    assert done.returncode == 2 and "already exists" in done.stderr
