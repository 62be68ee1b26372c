"""Checkpoints made for another world size: the files DeepSpeed would have written there, from whatever was saved."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT, TESTS
from programs import peak_memory, run_python
from sample import write_sample
from saved_files import contents, flip, record_again
from synthetic import FROZEN_PARAMS, GROUPS, edit, edit_optim, gather, model_name, optim_name
from synthetic import make_tag as make

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnsupportedError, UsageError
from zeroelastic.runs.locate import find_source
from zeroelastic.torch_file import archive
from zeroelastic.verbs import new_files
from zeroelastic.verbs.new_directory import staging_of
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardReport, plan_reshard
from zeroelastic.verbs.reshard.reshard import run_reshard


def run(src: Path, dst: Path, world_size: int, **options: Any) -> ReshardReport:
    return run_reshard(plan_reshard(find_source(src), ReshardOptions(world_size=world_size, **options)), dst)


def test_optimizer_and_grad_scaler_are_carried_over(tmp_path):
    make(tmp_path / "a", 2, record=True)
    scaler = dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"), 2)
    for rank in range(2):
        edit_optim(
            tmp_path / "a" / "tag" / optim_name(rank),
            lambda state: state["zeroelastic"].update(optimizer="torch.optim.adamw.AdamW", grad_scaler=scaler),
        )
    record_again(tmp_path / "a" / "tag")
    run(tmp_path / "a", tmp_path / "b", 3)
    checkpoint = open_checkpoint(tmp_path / "b" / "tag")
    for rank in range(3):
        assert checkpoint.shard(rank).optimizer == "torch.optim.adamw.AdamW"
        assert checkpoint.shard(rank).grad_scaler == scaler


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    saved=st.integers(1, 9),
    world_size=st.integers(1, 9),
    format=st.sampled_from(["elastic", "rigid"]),
    to=st.sampled_from(["elastic", "rigid"]),
    sub_group_size=st.sampled_from([1, 7, 10, None]),
    states=st.sampled_from([{}, {"m": torch.float32}, {"a": torch.bfloat16, "b": torch.float32, "c": torch.uint8}]),
    frozen=st.sampled_from([FROZEN_PARAMS, None, ()]),
    record=st.booleans(),
)
def test_the_state_is_the_same_at_every_world_size(
    tmp_path_factory, saved, world_size, format, to, sub_group_size, states, frozen, record
):
    root = tmp_path_factory.mktemp("r")
    truth = make(
        root / "a", saved, format=format, sub_group_size=sub_group_size, states=states, frozen=frozen,
        record=record or format == "elastic",
    )  # fmt: skip
    report = run(root / "a", root / "b", world_size, format=to)
    checkpoint = open_checkpoint(root / "b" / "tag")
    assert gather(checkpoint) == truth
    state = open_state(checkpoint)
    assert state.head.format == to and checkpoint.world_size == world_size
    assert checkpoint.record is not None and checkpoint.record.content_root == report.content_root
    if record:
        assert report.content_root == report.recorded_root
    for path in (root / "b" / "tag").glob("*.pt"):
        with zipfile.ZipFile(path) as file:
            assert file.testzip() is None
    assert sorted(os.listdir(root)) == ["a", "b"] and sorted(os.listdir(root / "b")) == ["latest", "tag"]
    assert report.bytes_moved == state.nbytes
    shutil.rmtree(root)


def same(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two objects that torch loaded differ; padding is NaN or 255 in synthetic files and zero in ours."""
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
            return [f"{where}: {a} {b}"]
        pad = torch.isnan(a) if a.is_floating_point() else a == 255
        ok = torch.where(pad, b == 0, a == b).all() if a.numel() else True
        return [] if ok else [f"{where}: {a} {b}"]
    if type(a) is not type(b):
        return [f"{where}: {type(a)} {type(b)}"]
    if isinstance(a, dict):
        if list(map(str, sorted(a, key=str))) != list(map(str, sorted(b, key=str))):
            return [f"{where}: {list(a)} {list(b)}"]
        return [line for key in a for line in same(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        if len(a) != len(b):
            return [f"{where}: {len(a)} {len(b)}"]
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in same(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a} {b}"]


@pytest.mark.parametrize("to", ["elastic", "rigid"])
@pytest.mark.parametrize(("saved", "world_size"), [(1, 3), (3, 1), (4, 3), (3, 4), (2, 7), (5, 2), (4, 4)])
def test_files_are_those_that_would_have_been_saved_there(tmp_path: Path, saved: int, world_size: int, to: str) -> None:
    """Object for object: the same save, written directly at the target's world size by other code."""
    make(tmp_path / "a", saved, format="rigid")
    make(tmp_path / "want", world_size, format=to)
    run(tmp_path / "a", tmp_path / "b", world_size, format=to)
    names = sorted(path.name for path in (tmp_path / "want" / "tag").iterdir())
    assert sorted(p.name for p in (tmp_path / "b" / "tag").iterdir()) == sorted([*names, "zeroelastic.json"])
    for name in names:
        want, got = (torch.load(tmp_path / d / "tag" / name, weights_only=False) for d in ("want", "b"))
        for data in (want, got):
            data.pop("zeroelastic_save_id", None)
            data["ds_config"].pop("train_batch_size")  # carried from the save, which had another number of ranks
            for key in ("save_id", "digests", "train_batch_size"):
                data.get("optimizer_state_dict", {}).get("zeroelastic", {}).pop(key, None)
        assert same(want, got) == [], name


class Foreign:
    """Client state of a class that is not to be imported by a tool."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_client_state_buffers_and_scheduler_are_carried_by_rank_without_loading_them(tmp_path: Path) -> None:
    make(tmp_path / "a", 3, format="rigid")
    for rank in range(3):

        def add(data: dict[str, Any], rank: int = rank) -> None:
            data["module"]["seen"] = torch.full((5,), float(rank))
            data["buffer_names"] = ["seen"]
            data["lr_scheduler"] = {"last_epoch": 7, "base_lrs": (0.1, torch.tensor(0.2))}
            data["mine"] = {"rank": rank, "foreign": Foreign(rank), "table": torch.arange(rank + 2)}

        edit(tmp_path / "a" / "tag" / model_name(rank), add)
    run(tmp_path / "a", tmp_path / "b", 5)
    for rank in range(5):
        data = torch.load(tmp_path / "b" / "tag" / model_name(rank), weights_only=False)
        source = rank if rank < 3 else 0
        assert data["mine"]["rank"] == source and data["mine"]["foreign"].value == source
        assert data["mine"]["table"].tolist() == list(range(source + 2))
        assert data["module"]["seen"].tolist() == [float(source)] * 5 and isinstance(data["module"], OrderedDict)
        assert data["lr_scheduler"]["base_lrs"][1].item() == pytest.approx(0.2)
        assert data["dp_world_size"] == 5
    code = (
        f"import sys; sys.argv[1:] = ['reshard', {str(tmp_path / 'a')!r}, {str(tmp_path / 'c')!r}, '-n', '2']\n"
        "from zeroelastic.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "print(sorted({'torch', 'deepspeed', 'test_reshard'} & set(sys.modules)))"
    )
    done = run_python("-c", code, path=[ROOT, TESTS])
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_options_keep_their_exact_types(tmp_path: Path) -> None:
    options = [
        {"lr": torch.tensor(0.25), "betas": [0.9, 0.95], "name": "a"},
        {"lr": 1e-3, "betas": (1, 2.5), "x": None},
    ]
    make(tmp_path / "a", 2, options=options, format="rigid")
    run(tmp_path / "a", tmp_path / "b", 3)
    state = torch.load(tmp_path / "b" / "tag" / optim_name(1), weights_only=False)["optimizer_state_dict"]
    for groups in (state["optimizer_state_dict"]["param_groups"], state["zeroelastic"]["param_groups"]):
        assert torch.equal(groups[0]["lr"], torch.tensor(0.25)) and groups[0]["betas"] == [0.9, 0.95]
        assert groups[1]["betas"] == (1, 2.5) and groups[1]["x"] is None


@pytest.mark.parametrize("step", [torch.tensor(3, dtype=torch.int64), torch.tensor(2.5, dtype=torch.bfloat16), 7, None])
def test_steps_keep_their_kind(tmp_path: Path, step: Any) -> None:
    make(tmp_path / "a", 2, step=step, format="rigid")
    run(tmp_path / "a", tmp_path / "b", 3)
    state = torch.load(tmp_path / "b" / "tag" / optim_name(2), weights_only=False)["optimizer_state_dict"]
    want = torch.tensor(3.0) if step is None else step
    for entry in (*state["base_optimizer_state"], *state["optimizer_state_dict"]["state"].values()):
        assert same(want, entry["step"]) == []
    tensors = [e["step"].data_ptr() for e in state["base_optimizer_state"] if torch.is_tensor(e["step"])]
    assert len(set(tensors)) == len(tensors), "sub-groups share one step tensor"


def test_a_group_whose_flat_buffers_are_listed_twice_keeps_them_so(tmp_path: Path) -> None:
    make(tmp_path / "a", 2, groups=GROUPS[:1], format="rigid")

    def twice(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["param_groups"][0]["params"] *= 2

    for rank in range(2):
        edit_optim(tmp_path / "a" / "tag" / optim_name(rank), twice)
    run(tmp_path / "a", tmp_path / "b", 1, format="rigid")
    state = torch.load(tmp_path / "b" / "tag" / optim_name(0), weights_only=False)["optimizer_state_dict"]
    count = len(state["fp32_flat_groups"])
    assert state["optimizer_state_dict"]["param_groups"][0]["params"] == list(range(count)) * 2


def test_groups_that_contradict_each_other_are_damage(tmp_path: Path) -> None:
    """An elastic file says its groups twice, for stock DeepSpeed and for us."""
    make(tmp_path / "a", 2, record=True)
    edit_optim(tmp_path / "a" / "tag" / optim_name(0), lambda s: s["optimizer_state_dict"]["param_groups"].pop())
    record_again(tmp_path / "a" / "tag")
    with pytest.raises(CheckpointError, match=f"{optim_name(0)}: its optimizer groups contradict each other"):
        run(tmp_path / "a", tmp_path / "b", 3)


def test_sub_groups_follow_the_configuration_or_the_option(tmp_path: Path) -> None:
    make(tmp_path / "a", 2, sub_group_size=10, format="rigid")
    run(tmp_path / "a", tmp_path / "b", 2)
    run(tmp_path / "a", tmp_path / "c", 2, sub_group_size=1)
    count = {d: len(open_checkpoint(tmp_path / d / "tag").shard(0).layout.sub_group_numel) for d in "abc"}
    assert count["b"] == count["a"] and count["c"] == 5
    for rank in range(2):
        edit(tmp_path / "a" / "tag" / optim_name(rank), lambda data: data["ds_config"].pop("zero_optimization"))
    with pytest.raises(UnsupportedError, match="--sub-group-size"):
        run(tmp_path / "a", tmp_path / "d", 2)
    run(tmp_path / "a", tmp_path / "d", 2, sub_group_size=10)


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path / "a", 2, format="rigid")
    edit_optim(tmp_path / "a" / "tag" / optim_name(0), lambda state: state.update(new_thing=1))
    with pytest.raises(UnsupportedError, match="new_thing"):
        run(tmp_path / "a", tmp_path / "b", 3)
    groups = [[Param("a", (4,)), Param("b", (4,))]]
    make(tmp_path / "c", 2, groups=groups, sub_group_size=1, frozen=None, format="rigid")
    for rank in range(2):
        edit_optim(tmp_path / "c" / "tag" / optim_name(rank), _other_step)
    run(tmp_path / "c", tmp_path / "d", 3)
    with pytest.raises(UnsupportedError, match="a and b share a sub-group on 3 ranks"):
        run(tmp_path / "c", tmp_path / "e", 3, sub_group_size=100)


def _other_step(state: dict[str, Any]) -> None:
    state["optimizer_state_dict"]["state"][1]["step"] = torch.tensor(99.0)


def test_a_changed_payload_is_found_by_the_record_and_leaves_nothing(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=4)
    path = tmp_path / "a" / "global_step4" / optim_name(2)
    shard = open_checkpoint(tmp_path / "a" / "global_step4").shard(2)
    flip(path, int(shard.extents["exp_avg"].offset[3]) + 5, 4)
    with pytest.raises(DigestMismatchError, match=f"{shard.layout.params[3].name}: exp_avg"):
        run(tmp_path / "a", tmp_path / "b", 3)
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sample(tmp_path / "a", world_size=4)
    calls: list[int] = []

    def full(fd: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive, "reserve_space", full)
    with pytest.raises(OSError, match="No space") as error:
        run(tmp_path / "a", tmp_path / "b", 3)
    assert error.value.errno == errno.ENOSPC and os.listdir(tmp_path) == ["a"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sample(tmp_path / "a", world_size=4)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="bytes are needed and 1,000 are free"):
        run(tmp_path / "a", tmp_path / "b", 3)
    assert os.listdir(tmp_path) == ["a"]


def test_an_interruption_leaves_nothing_and_the_end_of_a_process_leaves_it_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sample(tmp_path / "a", world_size=4)
    real = new_files.move_segments

    def stop_with(error: BaseException) -> None:
        calls: list[int] = []

        def move(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > 7:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(new_files, "move_segments", move)

    stop_with(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", tmp_path / "b", 3)
    assert os.listdir(tmp_path) == ["a"]
    stop_with(SystemExit(143))
    with pytest.raises(SystemExit):
        run(tmp_path / "a", tmp_path / "b", 3)
    assert sorted(os.listdir(tmp_path)) == [".b.zeroelastic-partial", "a"]
    monkeypatch.setattr(new_files, "move_segments", real)
    report = run(tmp_path / "a", tmp_path / "b", 3)
    assert report.resumed_ranks == 2 and report.content_root == report.recorded_root
    assert gather(open_checkpoint(tmp_path / "b" / "global_step4")) == gather(
        open_checkpoint(tmp_path / "a" / "global_step4")
    )
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def end_before_publishing(directory: Path) -> None:
    """A run from "a" to "b" on 3 ranks whose process ends when all files are written."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("zeroelastic.verbs.new_directory.flush_tree", _end)
        run(directory / "a", directory / "b", 3)


def test_what_another_command_left_is_not_taken_over(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=4)
    end_before_publishing(tmp_path)
    assert run(tmp_path / "a", tmp_path / "b", 2).resumed_ranks == 0
    shutil.rmtree(tmp_path / "b")
    end_before_publishing(tmp_path)
    edit(tmp_path / "a" / "global_step4" / model_name(1), lambda data: data.update(other=1))
    record_again(tmp_path / "a" / "global_step4")
    assert run(tmp_path / "a", tmp_path / "b", 3).resumed_ranks == 0
    assert torch.load(tmp_path / "b" / "global_step4" / model_name(1), weights_only=False)["other"] == 1


def test_what_a_kill_left_of_a_file_is_not_in_the_result(tmp_path: Path) -> None:
    """Temporary files of the commit record and of latest, as a kill leaves them before they get their names."""
    write_sample(tmp_path / "a", world_size=4)
    end_before_publishing(tmp_path)
    left = staging_of(tmp_path / "b") / "root"
    (left / "global_step4/.zeroelastic.json.123.0123abcd.tmp").write_text("{")
    (left / ".latest.123.0123abcd.tmp").write_text("glob")
    assert run(tmp_path / "a", tmp_path / "b", 3).resumed_ranks == 3
    run(tmp_path / "a", tmp_path / "c", 3)
    made = (tmp_path / "b", tmp_path / "c")
    b, c = (sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in made)
    assert b == c


def _end(*args: object) -> None:
    raise SystemExit(143)


@pytest.mark.parametrize("then", ["b", "c"])
def test_what_a_kill_after_the_renaming_left_is_removed_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Whether it has the same target, which is there, or another; what another command is at stays."""
    from zeroelastic.verbs.verify.verify import verify_checkpoint

    write_sample(tmp_path / "a", world_size=4)
    with monkeypatch.context() as patch:
        patch.setattr("zeroelastic.verbs.new_directory.sync_directory", lambda path: path == tmp_path and _end())
        with pytest.raises(SystemExit):
            run(tmp_path / "a", tmp_path / "b", 3)
    left = staging_of(tmp_path / "b")
    assert left.is_dir() and (tmp_path / "b" / "latest").exists()
    unfinished = staging_of(tmp_path / "x")
    unfinished.mkdir()
    with open(left / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="already exists"):
            run(tmp_path / "a", tmp_path / "b", 3)
        assert left.is_dir()
    if then == "b":
        with pytest.raises(UsageError, match="already exists"):
            run(tmp_path / "a", tmp_path / "b", 3)
    else:
        run(tmp_path / "a", tmp_path / "c", 3)
    assert not left.exists() and unfinished.is_dir()
    assert verify_checkpoint(tmp_path / "b" / "global_step4").valid


def test_two_runs_into_one_target_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sample(tmp_path / "a", world_size=4)

    def meet(*args: object) -> None:
        with pytest.raises(UsageError, match="another process"):
            run(tmp_path / "a", tmp_path / "b", 3)
        assert staging_of(tmp_path / "b").exists()
        raise SystemExit(143)

    monkeypatch.setattr("zeroelastic.verbs.new_directory.flush_tree", meet)
    with pytest.raises(SystemExit):
        run(tmp_path / "a", tmp_path / "b", 3)


def test_a_source_on_a_disk_that_cannot_be_written_to_is_not_touched(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", world_size=2)
    before = contents(tmp_path / "a")
    run(tmp_path / "a", tmp_path / "b", 3)
    assert before == contents(tmp_path / "a")


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_peak_memory_stays_within_the_limit(tmp_path: Path, stage: int) -> None:
    """64 MiB and 150 MiB for Python and its libraries, for a state of 300 MiB; below stage 3 whole weights are made."""
    write_sample(tmp_path / "a", world_size=2, steps=[1], hidden=512, layers=8, sub_group_size=10**9)
    peak = peak_memory("reshard", tmp_path / "a", tmp_path / "b", "-n", 3, "--stage", stage, "--max-memory", "64MiB")
    size = sum(path.stat().st_size for path in (tmp_path / "b").rglob("*.pt"))
    assert size > 280 << 20 and peak <= (64 + 150) << 20, f"{peak >> 20} MiB"
