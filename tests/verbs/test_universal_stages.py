"""Universal checkpoints of ZeRO stages 1 and 2, beside DeepSpeed's converter and in its loader, which stays stock."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from places import GOLDEN
from stock_programs import ds_to_universal
from training import LOSS_RTOL, Job, Outcome, resume, train_and_save

import zeroelastic
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError
from zeroelastic.testing import RankPool, compare_states

MODEL = "mp_rank_00_model_states.pt"
SOURCES = ("stage1_rank2", "stage1_bf16_optimizer_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3")
LOADED = {"checkpoint": {"load_universal": True}}
ROUND_ROBIN = {"round_robin_gradients": True}


def tag_of(directory: Path) -> Path:
    return next(directory.glob("global_step*"))


def stock_convert(tag_dir: Path, target: Path) -> Path:
    target.mkdir()
    ds_to_universal(tag_dir, target / tag_dir.name, "--inject_missing_state")
    return target


def plain(value: Any) -> Any:
    """A value of a file such that == compares it, tensors by their bits and shapes, dictionaries in any order."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return ("tensor", str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(vars(value)) if hasattr(value, "cur_scale") else value


@pytest.mark.support(
    "Using it",
    "`zeroelastic convert` to Universal Checkpoint from stages 1 and 2",
    "exact",
    "`round_robin_gradients` included, where `ds_to_universal` is wrong",
)
@pytest.mark.starts_processes
@pytest.mark.parametrize("name", SOURCES)
def test_every_file_is_that_of_deepspeeds_converter(name: str, tmp_path: Path) -> None:
    """The last of the sources has gaps between its parameters, where DeepSpeed is right under round_robin_gradients."""
    stock = stock_convert(tag_of(GOLDEN / name), tmp_path / "stock")
    report = zeroelastic.convert(GOLDEN / name, tmp_path / "ours", to="universal")
    files = {str(path.relative_to(stock)) for path in stock.rglob("*") if path.is_file()}
    ours = {str(path.relative_to(tmp_path / "ours")) for path in (tmp_path / "ours").rglob("*") if path.is_file()}
    assert ours - files == {f"global_step2/zero_pp_rank_0_{MODEL}"} and not files - ours
    assert report.tensors == 5 * 3 + 2 == sum(path.endswith(".pt") for path in files) - 5 - 2  # less step.pt, and two
    for file in sorted(path for path in files if path.endswith(".pt")):
        want, got = (torch.load(folder / file, weights_only=False) for folder in (stock, tmp_path / "ours"))
        if file.endswith("optimizer_state.pt"):  # what the loader of stage 3 reads
            extra = got.pop("optimizer_state_dict")
            assert [state["step"] for state in extra["state"].values()] == [2, 2]
            assert plain(extra["param_groups"]) == plain(want["param_groups"])
        assert plain(got) == plain(want), file
    whole = (tmp_path / "ours" / "global_step2" / MODEL).read_bytes()
    assert whole == (tag_of(GOLDEN / name) / MODEL).read_bytes()
    assert whole == (tmp_path / "ours" / "global_step2" / f"zero_pp_rank_0_{MODEL}").read_bytes()


@pytest.mark.support(
    "Using it", "`zeroelastic convert` from Universal Checkpoint to stages 1, 2 and 3", "exact", "of stages 1, 2 and 3"
)
@pytest.mark.parametrize("name", ["elastic2", "rigid3", *SOURCES, "round_robin_rank2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_there_and_back_is_the_same_content_at_every_stage(name: str, stage: int, tmp_path: Path) -> None:
    source = GOLDEN / name
    if name == "round_robin_rank2":  # whose buffers have another order than its optimizer groups
        source = tmp_path / name
        zeroelastic.reshard(GOLDEN / "elastic2", source, world_size=2, stage=2, round_robin_gradients=True)
    root = zeroelastic.verify(source).content_root
    zeroelastic.convert(source, tmp_path / "there", to="universal")
    report = zeroelastic.convert(tmp_path / "there", tmp_path / "back", from_="universal", world_size=3, stage=stage)
    assert report.content_root == root == zeroelastic.verify(tmp_path / "back").content_root
    assert report.to == ("elastic" if stage == 3 else "rigid")
    zeroelastic.reshard(source, tmp_path / "direct", world_size=3, stage=stage)
    assert zeroelastic.diff(tmp_path / "direct", tmp_path / "back").equal
    model = "zero_pp_rank_0_" * (stage == 3) + MODEL
    want, got = (torch.load(tag_of(tmp_path / d) / model, weights_only=False) for d in ("direct", "back"))
    assert plain(got) == plain(want)
    assert [list(group) for group in got["param_shapes"]] == [list(group) for group in want["param_shapes"]]


def test_options_of_the_run_that_loads_go_with_from(tmp_path: Path) -> None:
    zeroelastic.convert(GOLDEN / "elastic2", tmp_path / "u", to="universal")
    arguments = ["convert", tmp_path / "u", tmp_path / "b", "--from", "universal", "-n", 2]
    done = run_command(*arguments, "--stage", 2, "--round-robin-gradients")
    assert done.returncode == 0 and "round_robin_gradients as given" in done.stdout
    model = torch.load(tag_of(tmp_path / "b") / MODEL, weights_only=False)
    assert list(model["param_shapes"][1]) == ["gain", "tail.bias", "inner.bias"]
    for options, said in (
        ({"stage": 2, "format": "elastic"}, "there is no elastic format"),
        ({"stage": 0}, "a Universal checkpoint does not become one of stage 0"),
        ({"parameter_alignment": True}, "makes no difference at ZeRO stage 3"),
    ):
        with pytest.raises(UsageError, match=said):
            zeroelastic.convert(tmp_path / "u", tmp_path / "c", from_="universal", world_size=2, **options)
    with pytest.raises(UsageError, match="--stage goes with --from"):
        zeroelastic.convert(GOLDEN / "elastic2", tmp_path / "c", to="universal", stage=2)


def test_what_the_module_has_besides_is_in_float32_as_deepspeed_has_it(tmp_path: Path) -> None:
    """A buffer of whole numbers, one that is not contiguous, a tied name, and what is no tensor."""
    shutil.copytree(GOLDEN / "stage2_rank2", tmp_path / "a")
    path = tag_of(tmp_path / "a") / MODEL
    model = torch.load(path, weights_only=False)
    extra = {
        "counts": torch.tensor([1, 1 << 24 | 1, -(1 << 53) - 1]),
        "turned": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).t(),
        "mask": torch.tensor([True, False]),
        "wide": torch.tensor([1e300, 1 / 3], dtype=torch.float64),
        "none": torch.zeros(0, 4),
    }
    model["module"].update(extra, also=model["module"]["inner.weight"], _extra_state=None)
    model["buffer_names"] += list(extra)
    model["shared_params"] = {"also": "inner.weight"}
    torch.save(model, path)
    report = zeroelastic.convert(tmp_path / "a", tmp_path / "u", to="universal")
    zero = tag_of(tmp_path / "u") / "zero"
    for name, value in {**extra, "also": model["module"]["also"], "frozen": model["module"]["frozen"]}.items():
        found = torch.load(zero / name / "fp32.pt")
        assert found.keys() == {"param"} and plain(found["param"]) == plain(value.float()), name
    assert not (zero / "_extra_state").exists()
    assert any(note.startswith("_extra_state of the module: it is no tensor") for note in report.notes)


@pytest.fixture(scope="module")
def round_robin(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """``a``: a stage 2 checkpoint that stock DeepSpeed saved under round_robin_gradients; ``u``: what is made of it."""
    directory = tmp_path_factory.mktemp("round_robin")
    job = Job(stage=2, installed=False, elastic=False, zero=ROUND_ROBIN, optimizer="amsgrad")
    saved = rank_pool.run(train_and_save, 3, job, str(directory / "a"))[0]
    report = zeroelastic.convert(directory / "a", directory / "u", to="universal")
    notes = "\n".join(report.notes)
    assert "ds_to_universal.py gives parameters of such a checkpoint the values of others" in notes
    assert "load it at stage 3, or without round_robin_gradients" in notes
    return directory, saved


def stock(stage: int, **changes: Any) -> Job:
    """A run of stock DeepSpeed that loads a Universal checkpoint over everything that it was built with."""
    job = Job(stage=stage, installed=False, elastic=False, config=LOADED, optimizer="amsgrad").other()
    return replace(job, **changes)


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 4), (3, 2)])
def test_deepspeeds_loader_puts_every_parameter_into_its_place(
    rank_pool: RankPool, round_robin: tuple[Path, Outcome], stage: int, world_size: int
) -> None:
    directory, saved = round_robin
    want = saved.gathered
    if stage == 3:  # whose loader reads the states of Adam only
        want = {key: value for key, value in want.items() if not key.endswith("/max_exp_avg_sq")}
    for outcome in rank_pool.run(resume, world_size, stock(stage), str(directory / "u"), 3, 0):
        assert {key: value for key, value in outcome.gathered.items() if key in want} == want
        steps = {key: value for key, value in saved.state.items() if key.endswith("/step")}
        assert steps and {key: outcome.state[key] for key in steps} == steps
        if stage != 3:
            groups = {key: value for key, value in saved.state.items() if "group" in key}
            assert groups and {key: outcome.state[key] for key in groups} == groups


def wrong_params(found: dict[str, str], want: dict[str, str]) -> set[str]:
    return {key.rpartition("/")[0] for key, value in want.items() if found[key] != value}


def test_deepspeeds_loader_is_wrong_under_round_robin_gradients(
    rank_pool: RankPool, round_robin: tuple[Path, Outcome]
) -> None:
    """Of the same files. If this fails, DeepSpeed has been repaired: the note of the verb and its page go."""
    directory, saved = round_robin
    outcome = rank_pool.run(resume, 2, stock(2, zero=ROUND_ROBIN), str(directory / "u"))[0]
    assert len(wrong_params(outcome.gathered, saved.gathered)) >= 3


def test_what_deepspeeds_converter_made_wrong_is_refused(round_robin: tuple[Path, Outcome], tmp_path: Path) -> None:
    directory, _ = round_robin
    made = stock_convert(tag_of(directory / "a"), tmp_path / "stock")
    right = tag_of(directory / "u") / "zero"
    files = [path.relative_to(right) for path in right.glob("*/fp32.pt")]
    pairs = [[torch.load(zero / file)["param"] for zero in (right, tag_of(made) / "zero")] for file in files]
    assert sum(not torch.equal(*pair) for pair in pairs) >= 3, "DeepSpeed's converter has been repaired"
    with pytest.raises(UnsupportedError, match=r"ds_to_universal\.py, which gave parameters the values of others"):
        zeroelastic.convert(made, tmp_path / "b", from_="universal", world_size=2)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("stage", "world_size", "zero"), [(2, 2, ROUND_ROBIN), (1, 4, ROUND_ROBIN), (3, 2, {})])
def test_stock_deepspeed_goes_on_from_a_native_checkpoint_made_of_it(
    rank_pool: RankPool,
    round_robin: tuple[Path, Outcome],
    tmp_path: Path,
    stage: int,
    world_size: int,
    zero: dict[str, Any],
) -> None:
    directory, saved = round_robin
    job = stock(stage, config={}, zero=zero)
    given = {"sub_group_size": job.sub_group_size} if stage == 3 else {}
    report = zeroelastic.convert(
        directory / "u", tmp_path / "b", from_="universal", world_size=world_size, stage=stage, format="rigid", **given
    )
    assert report.content_root == zeroelastic.verify(directory / "a").content_root
    for outcome in rank_pool.run(resume, world_size, job, str(tmp_path / "b")):
        assert compare_states(saved.state, outcome.state) == []
        assert outcome.gathered == saved.gathered and outcome.report is None
        assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


@pytest.mark.parametrize(("stage", "world_size"), [(2, 3), pytest.param(1, 2, marks=pytest.mark.extended)])
def test_a_universal_checkpoint_of_stage_3_becomes_one_of_stages_1_and_2(
    rank_pool: RankPool, tmp_path: Path, stage: int, world_size: int
) -> None:
    saved = rank_pool.run(train_and_save, 2, Job(elastic=False, installed=False), str(tmp_path / "a"))[0]
    stock_convert(tag_of(tmp_path / "a"), tmp_path / "u")
    zeroelastic.convert(tmp_path / "u", tmp_path / "b", from_="universal", world_size=world_size, stage=stage)
    job = stock(stage, config={}, optimizer="adamw")
    outcome = rank_pool.run(resume, world_size, job, str(tmp_path / "b"))[0]
    assert compare_states(saved.state, outcome.state) == []
    assert outcome.gathered == saved.gathered
    assert outcome.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])


def test_momentum_of_another_optimizer_than_adam_is_loaded_at_stage_2(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(stage=2, installed=False, elastic=False, optimizer="sgd", precision="fp32")
    saved = rank_pool.run(train_and_save, 3, job, str(tmp_path / "a"))[0]
    report = zeroelastic.convert(tmp_path / "a", tmp_path / "u", to="universal")
    assert any("loader at stage 3 asks for" in note for note in report.notes)
    job = stock(2, optimizer="sgd", precision="fp32")
    assert rank_pool.run(resume, 2, job, str(tmp_path / "u"))[0].gathered == saved.gathered


def test_without_hyper_parameters_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="holds no hyper-parameters"):
        zeroelastic.convert(GOLDEN / "stage2_elastic_rank2", tmp_path / "u", to="universal")
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tag: torch.save("text", tag / "zero" / "gain" / "step.pt"), "step"),
        (lambda tag: torch.save({"param": torch.zeros(9)}, tag / "zero" / "gain" / "exp_avg.pt"), "gain has 1"),
        (lambda tag: (tag / "zero" / "other").mkdir(), "other not in param_shapes"),
        (lambda tag: [path.unlink() for path in tag.glob("*_model_states.pt")], f"has neither {MODEL}"),
        (lambda tag: (tag / "mp_rank_01_model_states.pt").touch(), "tensor parallel rank"),
    ],
)
def test_damage_is_named_and_nothing_is_written(tmp_path: Path, change: Any, said: str) -> None:
    zeroelastic.convert(GOLDEN / "stage2_rank2", tmp_path / "u", to="universal")
    change(tag_of(tmp_path / "u"))
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        zeroelastic.convert(tmp_path / "u", tmp_path / "back", from_="universal", world_size=3)
    assert not (tmp_path / "back").exists()
