"""Universal checkpoints: what DeepSpeed's own converter makes, and what its loader takes at any world size."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command as verb
from documentation import documented_keys
from exports import keys_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stock_programs import ds_to_universal
from synthetic import (
    FROZEN_PARAMS,
    GROUPS,
    Param,
    edit,
    edit_optim,
    gather,
    model_name,
    optim_name,
    raw,
    write_checkpoint,
)
from training import Job, Outcome, resume, train_and_save

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError
from zeroelastic.runs.locate import find_source
from zeroelastic.testing import RankPool, compare_states
from zeroelastic.testing.sample import write_sample
from zeroelastic.verbs.convert.convert import write_plan
from zeroelastic.verbs.convert.from_universal import find_universal, open_universal, plan_from_universal
from zeroelastic.verbs.convert.to_universal import plan_universal
from zeroelastic.verbs.reshard.reshard import ReshardOptions, plan_reshard, run_reshard


def convert(tag_dir: Path, target: Path, **options: Any) -> int:
    return write_plan(plan_universal(open_state(open_checkpoint(tag_dir)), tag=tag_dir.name), target, **options)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 7),
    format=st.sampled_from(["elastic", "rigid"]),
    alias=st.booleans(),
    record=st.booleans(),
    sub_group_size=st.sampled_from([1, 7, None]),
    states=st.sampled_from(
        [
            {},
            {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
            {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "max_exp_avg_sq": torch.float64},
        ]
    ),
    step=st.sampled_from([None, 7]),
)
def test_every_tensor_is_a_file_that_holds_it(
    tmp_path_factory, world_size, format, alias, record, sub_group_size, states, step
):
    tag_dir = tmp_path_factory.mktemp("ckpt") / "global_step3"
    truth = write_checkpoint(
        tag_dir, world_size=world_size, format=format, alias=alias, record=record, sub_group_size=sub_group_size,
        states=states, step=step,
    )  # fmt: skip
    target = tag_dir.parent / "out"
    trained = {name: keys for name, keys in truth.items() if "fp32" in keys}
    compared = convert(tag_dir, target, max_memory=1 << 16)
    assert compared == (sum(map(len, truth.values())) if record else 0)
    zero = target / "global_step3" / "zero"
    assert sorted(p.name for p in zero.iterdir()) == sorted([*trained, "optimizer_state.pt"])
    for name, keys in trained.items():
        assert {path.stem for path in (zero / name).iterdir()} == set(keys)
        for key, (dtype, data) in keys.items():
            found = torch.load(zero / name / f"{key}.pt")
            assert (str(found.dtype), found.dim(), raw(found)) == (f"torch.{dtype}", 1, data)
    for rank in range(world_size):
        name = model_name(rank)
        assert (target / "global_step3" / name).read_bytes() == (tag_dir / name).read_bytes()
    assert (target / "latest_universal").read_text() == "global_step3"
    for path in zero.rglob("*.pt"):  # torch does not look at checksums, zip tools do
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, path
    optimizer = torch.load(zero / "optimizer_state.pt", weights_only=False)
    state = optimizer["optimizer_state_dict"]["state"]
    assert all(value == {"step": 3.0 if step is None else 7} for value in state.values())
    assert all(torch.is_tensor(value["step"]) == (step is None) for value in state.values())
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.1, 0.05]
    assert sorted(i for group in optimizer["param_groups"] for i in group["params"]) == list(range(len(state)))


def tensors_of(target: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(target)): torch.load(path, weights_only=False)
        for path in sorted(target.glob("*/zero/*/*.pt"))
    }


@pytest.fixture(scope="module")
def saves(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    made: dict[str, tuple[Path, Outcome]] = {}
    for name, job in {"elastic": Job(), "stock": Job(elastic=False, installed=False)}.items():
        directory = tmp_path_factory.mktemp(name)
        made[name] = directory, rank_pool.run(train_and_save, 4, job, str(directory))[0]
    return made


@pytest.mark.support("Using it", "`ds_to_universal` on elastic checkpoints", "exact")
@pytest.mark.support(
    "Using it", "`zeroelastic convert` to Universal Checkpoint", "exact", "the files that `ds_to_universal` makes"
)
@pytest.mark.parametrize("name", ["elastic", "stock"])
def test_stock_deepspeed_resumes_at_other_world_sizes(
    rank_pool: RankPool, saves: dict[str, tuple[Path, Outcome]], tmp_path: Path, name: str
) -> None:
    """zeroelastic is not installed in the ranks that load; ds_to_universal says what they should find."""
    directory, saved = saves[name]
    tag_dir = directory / "global_step3"
    (tmp_path / "stock").mkdir()
    ds_to_universal(tag_dir, tmp_path / "stock" / tag_dir.name)
    convert(tag_dir, tmp_path / "ours")
    stocks, ours = tensors_of(tmp_path / "stock"), tensors_of(tmp_path / "ours")
    assert ours.keys() == stocks.keys() and len(ours) >= 21
    assert all(raw(ours[key]) == raw(value) and ours[key].dtype == value.dtype for key, value in stocks.items())
    job = Job(perturb=0.5, lr=0.7, elastic=False, installed=False, config={"checkpoint": {"load_universal": True}})
    for world_size in (3, 2, 5):
        outcome = rank_pool.run(resume, world_size, job, str(tmp_path / "ours"))[0]
        kinds = ("master/", "state/", "scalar/")
        found = {key: value for key, value in outcome.state.items() if key.startswith(kinds)}
        assert len(found) >= 4 * 7
        assert found == {key: value for key, value in saved.state.items() if key.startswith(kinds)}
        assert outcome.report is None
    expected = rank_pool.run(resume, 3, job, str(tmp_path / "stock"))[0]
    outcome = rank_pool.run(resume, 3, job, str(tmp_path / "ours"))[0]
    assert outcome.state == expected.state and outcome.losses == expected.losses


def test_other_optimizers_keep_their_state_and_that_deepspeed_does_not_read_it_is_said(tmp_path: Path) -> None:
    truth = write_checkpoint(tmp_path / "t", world_size=3, states={"momentum_buffer": torch.float32})
    plan = plan_universal(open_state(open_checkpoint(tmp_path / "t")), tag="t")
    assert any("has no exp_avg, exp_avg_sq of every parameter" in note for note in plan.notes)
    assert any("not momentum_buffer" in note for note in plan.notes)
    assert any("hyper-parameters of the first one" in note for note in plan.notes)
    write_plan(plan, tmp_path / "out")
    found = torch.load(tmp_path / "out" / "t" / "zero" / "w" / "momentum_buffer.pt")
    assert raw(found) == truth["w"]["momentum_buffer"][1]
    same = [{"lr": 0.1}, {"lr": 0.1}]
    write_checkpoint(tmp_path / "u", world_size=2, options=same)
    plan = plan_universal(open_state(open_checkpoint(tmp_path / "u")), tag="u")
    assert [note.partition(" restores")[2] for note in plan.notes if "restores" in note] and len(plan.notes) == 1


def test_the_loss_scaler_and_what_else_there_is_are_kept(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2**9, 77, 0.5, delayed_shift=3, consecutive_hysteresis=True)
    write_checkpoint(tmp_path / "t", world_size=2, loss_scaler=scaler)
    small, large = torch.arange(3.0), torch.zeros(1 << 19)
    for rank in range(2):
        edit_optim(
            tmp_path / "t" / optim_name(rank),
            lambda state: state.update(overflow=torch.tensor(True), note={"small": small}, queue=[large]),
        )
    plan = plan_universal(open_state(open_checkpoint(tmp_path / "t")), tag="t")
    assert any(note.startswith("queue of the optimizer state") for note in plan.notes)
    write_plan(plan, tmp_path / "out")
    found = torch.load(tmp_path / "out" / "t" / "zero" / "optimizer_state.pt", weights_only=False)
    assert vars(found["loss_scaler"]) == vars(scaler) and type(found["loss_scaler"]) is DynamicLossScaler
    assert found["overflow"].item() is True and torch.equal(found["note"]["small"], small) and "queue" not in found
    assert not {"fp32_flat_groups", "base_optimizer_state", "zeroelastic"} & found.keys()


TAKEN = r"cannot be a file.*`zeroelastic convert --to dcp` and `zeroelastic export` take any name"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            ({"groups": [[Param(name, (2,))]]}, TAKEN)
            for name in ("../up", "a/b", "..", "", "x" * 256, "nul\0", "\ud800")
        ),
        ({"groups": [[Param("optimizer_state.pt", (2,))]]}, "no place for a parameter of this name"),
        ({"states": {"../../x": torch.float32}}, "a state key of this name cannot be a file"),
    ],
)
def test_names_that_are_no_files_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    write_checkpoint(tmp_path / "t", world_size=1, **options)
    with pytest.raises(UnsupportedError, match=said):
        plan_universal(open_state(open_checkpoint(tmp_path / "t")), tag="t")


def test_a_dtype_that_no_class_of_storage_has_is_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "t", world_size=1, states={"m": torch.float8_e5m2})
    convert(tmp_path / "t", tmp_path / "out")
    written = [torch.load(path) for path in (tmp_path / "out").rglob("m.pt")]
    assert written and {tensor.dtype for tensor in written} == {torch.float8_e5m2}


@pytest.mark.parametrize("part", [0, 1])
def test_changed_bytes_are_found_and_nothing_is_left(tmp_path: Path, part: int) -> None:
    write_checkpoint(tmp_path / "t", world_size=3, record=True)
    state = open_state(open_checkpoint(tmp_path / "t"))
    key = ("exp_avg_sq", "frozen")[part]
    tensors, rows = state.parts[part].whole_rows([0], keys=[key])
    with open(rows.paths[int(rows.file[1])], "r+b") as file:
        file.seek(int(rows.file_offset[1]))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 64]))
    with pytest.raises(DigestMismatchError, match=f"{tensors[0].param.name}: {key} has digest"):
        convert(tmp_path / "t", tmp_path / "out")
    assert os.listdir(tmp_path) == ["t"]


def test_frozen_parts_that_overlap_are_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "t", world_size=1, frozen=[Param("one", (8,)), Param("two", (8,))], record=True)
    state = open_state(open_checkpoint(tmp_path / "t"))
    offset = state.parts[1].extents[0]["frozen"].offset
    offset[1] = offset[0] + 4
    with pytest.raises(CheckpointError, match="overlap"):
        write_plan(plan_universal(state, tag="t"), tmp_path / "out")


def test_it_converts_many_small_parameters_in_several_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zeroelastic.verbs.convert.to_universal as universal

    monkeypatch.setattr(universal, "_FILES_AT_ONCE", 7)
    truth = write_checkpoint(tmp_path / "t", world_size=5, record=True)
    assert convert(tmp_path / "t", tmp_path / "out") == sum(map(len, truth.values()))
    found = tensors_of(tmp_path / "out")
    assert len(found) == 3 * sum(len(group) for group in GROUPS) and len(truth) == 5 + len(FROZEN_PARAMS)


# ---- the way back


def back(tag_dir: Path, target: Path, world_size: int, **options: Any) -> Any:
    plan = plan_from_universal(find_universal(tag_dir), ReshardOptions(world_size=world_size, **options))
    return run_reshard(plan, target)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    saved=st.integers(1, 5),
    world_size=st.integers(1, 6),
    format=st.sampled_from(["elastic", "rigid"]),
    states=st.sampled_from([{}, {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "max": torch.float64}]),
    step=st.sampled_from([None, 7]),
    frozen=st.booleans(),
)
def test_there_and_back_is_the_same_content(tmp_path_factory, saved, world_size, format, states, step, frozen):
    root = tmp_path_factory.mktemp("ckpt")
    truth = write_checkpoint(
        root / "t", world_size=saved, states=states, step=step, record=True, sub_group_size=None,
        frozen=FROZEN_PARAMS if frozen else None,
    )  # fmt: skip
    convert(root / "t", root / "universal")
    report = back(root / "universal", root / "back", world_size, format=format)
    record = read_record(root / "t")
    assert record is not None and report.content_root == record.content_root
    made = open_checkpoint(root / "back" / "t")
    assert made.world_size == world_size and gather(made) == truth
    ours, theirs = open_state(made), open_state(open_checkpoint(root / "t"))
    assert ours.head.groups == theirs.head.groups and ours.head.format == format
    assert ours.parts[0].scalars == theirs.parts[0].scalars


@pytest.mark.support(
    "Using it",
    "`zeroelastic convert` from Universal Checkpoint",
    "exact",
    "to elastic or rigid files for any world size",
)
@pytest.mark.parametrize("by", ["deepspeed", "us"])
def test_universal_checkpoints_become_what_reshard_makes_and_resume(
    rank_pool: RankPool, saves: dict[str, tuple[Path, Outcome]], tmp_path: Path, by: str
) -> None:
    directory, saved = saves["elastic"]
    (tmp_path / "u").mkdir()
    if by == "deepspeed":
        ds_to_universal(directory / "global_step3", tmp_path / "u" / "global_step3")
    else:
        convert(directory / "global_step3", tmp_path / "u" / "x")
        (tmp_path / "u" / "x").rename(tmp_path / "v")
        (tmp_path / "u").rmdir()
        (tmp_path / "v").rename(tmp_path / "u")
    record = read_record(directory / "global_step3")
    assert record is not None
    for world_size, format in ((3, "elastic"), (2, "rigid")):
        report = back(tmp_path / "u", tmp_path / format, world_size, format=format)
        assert report.content_root == record.content_root
        job = Job(perturb=0.5, lr=0.7, installed=False, elastic=False)
        outcome = rank_pool.run(resume, world_size, job, str(tmp_path / format))[0]
        assert compare_states(saved.state, outcome.state) == []
        again = tmp_path / f"again-{format}"
        options = ReshardOptions(world_size=world_size, format=format)
        run_reshard(plan_reshard(find_source(directory / "global_step3"), options), again)
        assert gather(open_checkpoint(again / "global_step3")) == gather(
            open_checkpoint(tmp_path / format / "global_step3")
        )


def test_state_that_deepspeeds_converter_lost_is_reported(tmp_path: Path) -> None:
    """It keeps rank 0's part of max_exp_avg_sq in optimizer_state.pt, and that of no other rank."""
    states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "max_exp_avg_sq": torch.float32}
    write_checkpoint(tmp_path / "t", world_size=3, states=states, sub_group_size=None, frozen=None)
    for rank in range(3):
        edit(tmp_path / "t" / model_name(rank), lambda d: d.update(shared_params={}))
    (tmp_path / "u").mkdir()
    ds_to_universal(tmp_path / "t", tmp_path / "u" / "t")
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
    convert(tmp_path / "t", tmp_path / "u")
    change(tmp_path / "u" / "t")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        back(tmp_path / "u", tmp_path / "back", 3)
    assert sorted(os.listdir(tmp_path)) == before


def test_experts_and_missing_model_states_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "t", world_size=1, sub_group_size=None)
    convert(tmp_path / "t", tmp_path / "u")
    torch.save({"param": torch.zeros(5, 4)}, tmp_path / "u" / "t" / "zero" / "w" / "fp32.pt")
    assert open_universal(tmp_path / "u" / "t")[0].state.parts[0].dtypes[0]["fp32"] == "float32"
    torch.save({"param": torch.zeros(5, 4), "is_expert_param": True}, tmp_path / "u" / "t" / "zero" / "w" / "fp32.pt")
    with pytest.raises(UnsupportedError, match="AutoEP"):
        open_universal(tmp_path / "u" / "t")
    (tmp_path / "u" / "t" / model_name(0)).unlink()
    with pytest.raises(CheckpointError, match=r"has neither mp_rank_00_model_states\.pt"):
        find_universal(tmp_path / "u")


# ---- the verb


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    write_sample(root / "ckpt")
    return root


def test_the_verb_says_what_it_wrote(sample: Path) -> None:
    dry = verb("convert", "ckpt", "said", "--to", "universal", "--json", "--dry-run", cwd=sample)
    assert dry.returncode == 0 and not (sample / "said").exists()
    done = verb("convert", "ckpt", "said", "--to", "universal", "--json", cwd=sample)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    assert keys_of(document) == documented_keys("convert")
    assert document["from"] == "native" and document["to"] == "universal" and document["world_size"] == 4
    assert document["tensors"] == len(tensors_of(sample / "said")) == 54 and document["digests_compared"] == 55
    before = json.loads(dry.stdout)
    for key in ("dry_run", "digests_compared", "seconds"):
        del document[key], before[key]
    assert document == before
    text = verb("convert", "ckpt/global_step2", "text", "--to", "universal", cwd=sample).stdout
    assert "wrote text: 54 tensors" in text and "note: DeepSpeed's loader" in text and "55 digests agree" in text


def test_the_verb_goes_back(sample: Path) -> None:
    assert verb("convert", "ckpt", "there", "--to", "universal", cwd=sample).returncode == 0
    arguments = ["convert", "there", "again", "--from", "universal", "-n", "3"]
    dry = verb(*arguments, "--dry-run", "--json", cwd=sample)
    assert dry.returncode == 0 and not (sample / "again").exists()
    done = verb(*arguments, "--json", cwd=sample)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    assert keys_of(document) == documented_keys("convert")
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
    text = verb(
        "convert", "there/global_step4", "rigid", "--from", "universal", "-n", "2", "--format", "rigid", cwd=sample
    )
    assert "wrote rigid for 2 ranks: 55 tensors" in text.stdout and record.content_root[:12] in text.stdout
    done = verb(*arguments, cwd=sample)
    assert done.returncode == 2 and "is there already" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ckpt", "new"], "Give one of --to"),
        (["ckpt", "new", "--to", "dcp", "--from", "universal", "-n", "3"], "Give one of --to"),
        (["ckpt", "new", "--to", "dcp", "-n", "3"], "--world-size goes with --from"),
        (["ckpt", "new", "--to", "dcp", "--format", "rigid"], "--format goes with --from"),
        (["ckpt", "new", "--from", "universal"], "--from needs --world-size"),
        (["ckpt", "new", "--from", "universal", "-n", "3"], "is no Universal checkpoint"),
        (["ckpt", "new", "--from", "universal", "-n", "3", "--tag", "global_step2"], "has no Universal checkpoint"),
        (["ckpt", "new", "--from", "universal", "-n", "3", "--tag", "../x"], "is not the name of a tag"),
        (["ckpt", "new", "--to", "megatron"], "--to"),
        (["ckpt", "new", "--to", "dcp", "--max-memory", "1"], "--max-memory"),
    ],
)
def test_misuse_is_exit_code_2_and_writes_nothing(sample: Path, arguments: list[str], said: str) -> None:
    before = sorted(os.listdir(sample))
    done = verb("convert", *arguments, cwd=sample)
    assert done.returncode == 2 and said in done.stderr and done.stdout == "", done
    assert sorted(os.listdir(sample)) == before
