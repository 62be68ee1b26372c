"""zeroelastic.checkpoint.open: a tag directory is one whole save of known size, or an error that says what is wrong."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import GOLDEN
from saved_files import record_of
from synthetic import FROZEN_PARAMS, GROUPS, contents_of, edit, gather, model_name, optim_name, write_checkpoint

from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.checkpoint.contradictions import check_frozen
from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tag_files import TensorParallel
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UndescribedSlicesError,
    UnsupportedError,
    ZeroElasticError,
)

FORMATS = ("elastic", "rigid")


# ---- golden checkpoints: what real DeepSpeed wrote ----


def golden_truth(folder: Path) -> dict:
    expected = json.loads((folder / "expected.json").read_text())
    return {
        name: {key: (entry["dtype"], bytes.fromhex(data)) for key, data in entry["tensors"].items()}
        for name, entry in expected.items()
    }


@pytest.mark.parametrize("name", ["rigid2", "rigid3", "elastic2", "elastic3"])
def test_golden_checkpoints_hold_what_deepspeed_gathered(name):
    folder = GOLDEN / name
    tag_dir = folder / (folder / "latest").read_text().strip()
    checkpoint = open_checkpoint(tag_dir)
    assert checkpoint.world_size == int(name[-1]) and not checkpoint.stale_files
    assert gather(checkpoint) == golden_truth(folder)
    shard = checkpoint.shard(1)
    assert shard.format == name[:-1] == (checkpoint.record.checkpoint_format if checkpoint.record else "rigid")
    assert [group.options["weight_decay"] for group in shard.groups] == [0.1, 0.0]
    assert shard.groups[0].options["betas"] == (0.9, 0.95)
    assert {scalar.value for scalars in shard.scalars for scalar in scalars.values()} == {2.0}
    assert shard.scaler is not None and shard.scaler.class_name == "LossScaler"
    assert checkpoint.model_states(0).global_steps == 2
    shapes = json.loads((folder / "expected.json").read_text())
    params = (*shard.layout.params, *checkpoint.model_states(0).frozen.params)
    assert {param.name: list(param.shape) for param in params} == {n: e["shape"] for n, e in shapes.items()}


@pytest.mark.parametrize("name", ["elastic2", "elastic3"])
def test_golden_records_state_the_digests_of_what_deepspeed_gathered(name):
    folder = GOLDEN / name
    checkpoint = open_checkpoint(next(folder.glob("global_step*")))
    params = (*checkpoint.shard(0).layout.params, *checkpoint.model_states(0).frozen.params)
    want = contents_of(golden_truth(folder), params, checkpoint.shard(0).scalars[0])
    assert sorted(checkpoint.record.contents(), key=str) == sorted(want, key=str)
    assert checkpoint.record.train_batch_size == checkpoint.shard(0).train_batch_size


def test_the_golden_folder_stays_small():
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 300_000
    assert not list(GOLDEN.rglob("zero_to_*.py"))


# ---- whole saves ----


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("prefix", "record", "ranks"), [("bf16_", True, 3), ("", False, 12)])
def test_a_whole_save_is_opened(tmp_path, format, prefix, record, ranks):
    """More than ten ranks are in numeric order."""
    truth = write_checkpoint(tmp_path, world_size=ranks, format=format, prefix=prefix, record=record)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.world_size == ranks and (checkpoint.record is not None) == record
    assert [path.name for path in checkpoint.optim_files] == [optim_name(rank, prefix) for rank in range(ranks)]
    assert [path.name for path in checkpoint.model_files] == [model_name(rank) for rank in range(ranks)]
    assert gather(checkpoint) == truth


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("record", [False, True])
def test_a_shard_can_be_asked_for_first(tmp_path, format, record):
    write_checkpoint(tmp_path, world_size=2, format=format, record=record)
    assert open_checkpoint(tmp_path).shard(1).groups[0].params == ("w", "v")


def test_headers_are_read_once_and_only_when_asked_for(tmp_path):
    write_checkpoint(tmp_path, world_size=4, record=True)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.opened == () and checkpoint.header_bytes == (tmp_path / RECORD_NAME).stat().st_size
    shard = checkpoint.shard(2)
    before = checkpoint.header_bytes
    assert checkpoint.shard(2) is shard and checkpoint.header_bytes == before
    assert checkpoint.opened == (tmp_path / optim_name(2),)
    model = checkpoint.model_states(1)
    assert checkpoint.model_states(1) is model and checkpoint.header_bytes == before + model.header_bytes
    assert checkpoint.opened == (tmp_path / optim_name(2), tmp_path / model_name(1))


@pytest.mark.parametrize(("near", "opened"), [(0, 0), (2, 2), (7, 0)])
def test_without_a_record_the_near_ranks_own_file_is_opened(tmp_path, near, opened):
    write_checkpoint(tmp_path, world_size=3, format="rigid")
    assert open_checkpoint(tmp_path, near_rank=near).opened == (tmp_path / model_name(opened),)


def test_files_of_others_do_not_disturb(tmp_path):
    write_checkpoint(tmp_path, world_size=2)
    for name in ("zero_to_fp32.py", "rng_state_0.pth", "notes.txt", "zero_pp_rank_0_mp_rank_00_model_states.pt.tmp"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "zero_pp_rank_5_mp_rank_00_model_states.pt").mkdir()
    assert open_checkpoint(tmp_path).world_size == 2


# ---- what is missing ----


def test_no_directory_and_an_empty_one(tmp_path):
    with pytest.raises(MissingFileError, match=r"holds no ZeRO checkpoint \(zero_pp_rank_\*_optim_states.pt and"):
        open_checkpoint(tmp_path)
    with pytest.raises(MissingFileError, match=r"nowhere: no such checkpoint directory"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MissingFileError, match="no such checkpoint directory"):
        open_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("record", [False, True])
def test_missing_files_are_listed_all_at_once(tmp_path, record):
    write_checkpoint(tmp_path, world_size=4, record=record)
    gone = [optim_name(1), optim_name(3), model_name(2)]
    for name in gone:
        (tmp_path / name).unlink()
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert "3 of the files of 4 ranks are missing" in message and "use_node_local_storage" in message
    assert all(name.removeprefix("bf16_") in message for name in gone)
    assert optim_name(0).removeprefix("bf16_") not in message


def test_a_missing_rank_zero_is_named(tmp_path):
    write_checkpoint(tmp_path, world_size=2)
    (tmp_path / model_name(0)).unlink()
    with pytest.raises(MissingFileError, match=r"zero_pp_rank_0_mp_rank_00_model_states\.pt is missing"):
        open_checkpoint(tmp_path)
    with pytest.raises(MissingFileError, match="1 of the files of 2 ranks is missing"):
        open_checkpoint(tmp_path, near_rank=1)


@pytest.mark.parametrize("size", [10**6, 1 << 24])
def test_a_world_size_without_end_costs_nothing(tmp_path, size):
    write_checkpoint(tmp_path, world_size=1, frozen=None)
    edit(tmp_path / model_name(0), lambda data: data.update(dp_world_size=size))
    tracemalloc.start()
    with pytest.raises(MissingFileError, match=rf"of {size:,} ranks are missing: .* and {2 * size - 8} more\."):
        open_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


# ---- stale and mixed files ----


def grow_stale(tag_dir: Path, **options) -> None:
    """A save of 2 ranks over an older one of 4 in the same tag."""
    write_checkpoint(tag_dir, world_size=4, **{**options, "record": False})
    write_checkpoint(tag_dir, world_size=2, save_id="f" * 32, **options)


@pytest.mark.parametrize("record", [True, False])
def test_files_of_an_earlier_larger_save_are_left_alone(tmp_path, record):
    grow_stale(tmp_path, record=record)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.world_size == 2
    assert sorted(checkpoint.stale_files) == sorted(f(rank) for f in (optim_name, model_name) for rank in (2, 3))
    gather(checkpoint)


def test_files_of_an_earlier_smaller_save_are_noticed(tmp_path):
    write_checkpoint(tmp_path, world_size=3)
    other = tmp_path / "other"
    write_checkpoint(other, world_size=2)
    shutil.copy(other / optim_name(1), tmp_path)
    shutil.copy(other / model_name(1), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank_1.*was saved by 2 ranks, the rest of the checkpoint by 3"):
        checkpoint.shard(1)
    with pytest.raises(CheckpointError, match=r"rank_1.*was saved by 2 ranks, the rest of the checkpoint by 3"):
        checkpoint.model_states(1)


def test_files_of_two_precisions_are_refused(tmp_path):
    write_checkpoint(tmp_path, world_size=2, prefix="bf16_")
    write_checkpoint(tmp_path, world_size=2, prefix="")
    with pytest.raises(CheckpointError, match=r"both bf16_zero_pp_rank_0.* and zero_pp_rank_0.* claim rank 0"):
        open_checkpoint(tmp_path)


def test_a_file_that_is_not_what_the_record_saw_is_refused(tmp_path):
    write_checkpoint(tmp_path, world_size=2, record=True)
    path = tmp_path / optim_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    size = path.stat().st_size
    assert f"contradicts its commit record: {path.name} has {size} bytes, not {size + 1}" in str(caught.value)
    assert f"remove {RECORD_NAME}" in str(caught.value)


def test_files_that_the_record_names_besides_must_be_there(tmp_path):
    write_checkpoint(tmp_path, world_size=2, record=True)
    record = record_of(tmp_path)
    more = record.model_copy(update={"files": {**record.files, "more.pt": 3}})
    (tmp_path / RECORD_NAME).write_bytes(record_text(more))
    with pytest.raises(CheckpointError, match=r"contradicts its commit record: more\.pt is missing"):
        open_checkpoint(tmp_path)


def test_a_damaged_record_is_not_passed_over(tmp_path):
    write_checkpoint(tmp_path, world_size=2)
    (tmp_path / RECORD_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="commit record is damaged"):
        open_checkpoint(tmp_path)


# ---- what is not ours ----


def test_stage_0_is_refused_by_name(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="saved at ZeRO stage 0"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("record", [False, True])
def test_files_of_tensor_parallel_ranks_that_the_save_did_not_have_are_left_over(tmp_path, record):
    truth = write_checkpoint(tmp_path, world_size=2, record=record)
    left = "zero_pp_rank_0_mp_rank_01_model_states.pt"
    shutil.copy(tmp_path / model_name(0), tmp_path / left)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.stale_files == (left,) and checkpoint.topology.tensor_size == 1
    assert gather(checkpoint) == truth


def test_tensor_parallel_ranks_that_do_not_say_what_they_have_are_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, world_size=2)
    edit(tmp_path / model_name(0), lambda data: data.update(mp_world_size=2))
    with pytest.raises(UndescribedSlicesError, match=r"saved with 2 tensor parallel ranks.* does not say which slices"):
        open_checkpoint(tmp_path)
    with pytest.raises(UnsupportedError, match="saved with tensor parallel size 2, and the run has 1"):
        open_checkpoint(tmp_path, tp=TensorParallel(0, 1))


# ---- model states ----

MODEL = {
    "no world size": (lambda d: d.pop("dp_world_size"), "dp_world_size is None"),
    "world size 0": (lambda d: d.update(dp_world_size=0), "dp_world_size is 0"),
    "world size True": (lambda d: d.update(dp_world_size=True), "dp_world_size is True"),
    "world size huge": (lambda d: d.update(dp_world_size=1 << 70), "dp_world_size is 1180591620717411303424"),
    "world size text": (lambda d: d.update(dp_world_size="2"), "dp_world_size is '2'"),
    "no shapes": (lambda d: d.pop("param_shapes"), "holds no param_shapes"),
    "shapes a dict": (lambda d: d.update(param_shapes={}), "holds no param_shapes"),
    "shapes of lists": (lambda d: d.update(param_shapes=[[]]), "holds no param_shapes"),
    "a shape of text": (lambda d: d["param_shapes"][0].update(w="5"), "a parameter table holds 'w'"),
    "a shape below zero": (lambda d: d["param_shapes"][0].update(w=(-1,)), r"parameter w has shape \(-1,\)"),
    "frozen shape": (
        lambda d: d["frozen_param_shapes"].update(embedding=(3, 4)),
        r"the part of frozen parameter embedding is \(5,\); 2 ranks imply \(6,\)",
    ),
    "frozen shapes that overflow": (
        lambda d: d["frozen_param_shapes"].update(embedding=(1 << 40, 1 << 40)), "more elements than any file holds",
    ),
    "frozen part missing": (
        lambda d: d["frozen_param_fragments"].pop("embedding"), "part of frozen parameter embedding is None",
    ),
    "frozen part on NVMe": (
        lambda d: d["frozen_param_fragments"].update(embedding=torch.zeros(1)), r"is \(1,\); .* offloaded to NVMe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL)
def test_model_states_that_do_not_fit_are_refused(tmp_path, name):
    change, message = MODEL[name]
    write_checkpoint(tmp_path, world_size=2)
    edit(tmp_path / model_name(0), change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / model_name(0)) in str(caught.value)


def test_a_file_that_holds_no_model_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / model_name(0))
    with pytest.raises(CheckpointError, match="is not a DeepSpeed model states file"):
        open_model_states(tmp_path / model_name(0), 0, world_size=None)


def test_what_model_states_say(tmp_path):
    write_checkpoint(tmp_path, world_size=2, global_steps=9)
    model = open_model_states(tmp_path / model_name(1), 1, world_size=2)
    assert [param for sub_group in model.sub_groups for param in sub_group] == [p for group in GROUPS for p in group]
    assert (model.rank, model.world_size, model.global_steps) == (1, 2, 9)
    assert model.frozen.params == FROZEN_PARAMS and model.frozen_extents.dtype == {0: "bfloat16", 1: "bfloat16"}


def test_left_out_frozen_parameters_are_not_named(tmp_path):
    write_checkpoint(tmp_path, world_size=2, frozen=None)
    model = open_checkpoint(tmp_path).model_states(0)
    assert not model.frozen.params and not model.names_frozen


def test_frozen_parameters_must_agree(tmp_path):
    write_checkpoint(tmp_path / "a", world_size=2)
    write_checkpoint(tmp_path / "b", world_size=2, frozen=FROZEN_PARAMS[:1])
    models = {
        0: open_checkpoint(tmp_path / "a").model_states(0),
        1: open_checkpoint(tmp_path / "b").model_states(1),
    }
    with pytest.raises(CheckpointError, match="lists other frozen parameters than its neighbours"):
        check_frozen(models[1], models[0].frozen)
    assert models[0].frozen.params == FROZEN_PARAMS


# ---- comparing, and which ranks to open ----


ODD = st.sampled_from([None, 0, -1, 1 << 70, 1.5, "x", [], {}, [{}], [[1]], (1,), torch.ones(2), torch.ones(0)])


@given(
    key=st.sampled_from(["dp_world_size", "mp_world_size", "param_shapes", "frozen_param_shapes", "global_steps",
                         "frozen_param_fragments", "module"]),
    inner=st.sampled_from([None, 0, "w", "embedding"]),
    value=ODD,
)  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_model_states_are_parsed_or_refused(tmp_path, key, inner, value):
    if not (tmp_path / "good").exists():
        write_checkpoint(tmp_path / "good", world_size=2)
    data = torch.load(tmp_path / "good" / model_name(0), weights_only=False)
    if inner is None:
        data[key] = value
    elif isinstance(data[key], dict):
        data[key][inner] = value
    elif isinstance(data[key], list):
        if inner == 0:
            data[key][0] = value
        else:
            data[key][0][inner] = value
    torch.save(data, tmp_path / "odd.pt")
    try:
        open_model_states(tmp_path / "odd.pt", 0, world_size=None)
    except ZeroElasticError as error:
        assert "odd.pt" in str(error)
