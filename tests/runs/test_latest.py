"""``zeroelastic latest``, and the order and the checks of a run's tags behind it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import GOLDEN, ROOT
from programs import run_command
from saved_files import record_of
from synthetic import edit, edit_optim, model_name, optim_name, sealed, write_checkpoint

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.errors import CheckpointError, NewerFormatError, UnreadableError, UsageError
from zeroelastic.io.paths import DiskPath
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import check_quickly, check_tag, find_newest

latest = partial(run_command, "latest", env={"COLUMNS": "200", "TERM": "dumb"})


def document(*arguments: object) -> dict[str, Any]:
    done = latest(*arguments, "--json")
    found = json.loads(done.stdout)
    assert done.stderr == "" and found["ok"] == (done.returncode == 0) == (found["tag"] is not None)
    assert done.returncode in (0, 3)
    return found


def save(tag_dir: Path, step: int, *, record: bool = True, format: str = "elastic", world_size: int = 2) -> Path:
    write_checkpoint(tag_dir, world_size=world_size, global_steps=step, record=record, format=format)
    return tag_dir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Tags of steps 8 to 11, whose names sort otherwise."""
    for step in (8, 9, 10, 11):
        save(tmp_path / "run" / f"global_step{step}", step)
    (tmp_path / "run" / "latest").write_text("global_step11")
    (tmp_path / "run" / "zero_to_fp32.py").write_text("")
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path / "run"


def flip_payload(path: Path) -> None:
    """One wrong bit in the largest tensor, as a disk makes it: sizes and headers stay."""
    shard = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
    data = bytearray(path.read_bytes())
    at = data.find(shard.detach().numpy().tobytes()[:4])
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)


# --- which is newest --------------------------------------------------------------------------------------------------


def test_the_step_decides_not_the_name(run: Path) -> None:
    for options in ([], ["--quick"]):
        assert latest(run, *options).stdout == "global_step11\n"
    (run / "latest").unlink()
    assert [tag.name for tag in RunStore(run).tags()] == [f"global_step{n}" for n in (11, 10, 9, 8)]
    (run / "global_step8").rename(run / "global_step99")
    assert latest(run, "--quick").stdout == "global_step11\n"
    (run / "global_step11").rename(run / "a")
    assert latest(run, "--quick", "--path").stdout == f"{run}/a\n"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_names_and_any_headers_are_ordered_by_step(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("run")
    steps = data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True))
    names = data.draw(
        st.lists(
            st.from_regex(r"[a-z]{0,4}[0-9]{1,4}", fullmatch=True),
            min_size=len(steps),
            max_size=len(steps),
            unique=True,
        )
    )
    for name, step in zip(names, steps, strict=True):
        record, format = data.draw(st.booleans()), data.draw(st.sampled_from(["elastic", "rigid"]))
        save(root / name, step, record=record, format=format if record else "rigid", world_size=1)
        record_path = root / name / RECORD_NAME
        if record and data.draw(st.booleans()):  # the same record, laid out by somebody else
            record_path.write_text(sealed(json.dumps(json.loads(record_path.read_text()), indent=4)))
    tags = RunStore(root).tags()
    assert [(tag.step, tag.name) for tag in tags] == sorted(zip(steps, names, strict=True), reverse=True)
    assert find_newest(tags, check_quickly) == (tags[0], ())


def test_a_record_is_not_fooled_by_what_its_tag_is_called(tmp_path: Path) -> None:
    """The first lines of a record are searched for the step; a tag's name is among them."""
    name = 'x", "global_steps": 77,'
    save(tmp_path / name, 5)
    save(tmp_path / "other", 6)
    assert [(tag.name, tag.step) for tag in RunStore(tmp_path).tags()] == [("other", 6), (name, 5)]


# --- what is passed over ----------------------------------------------------------------------------------------------


DAMAGES = {
    "a missing file": (lambda tag: (tag / optim_name(1)).unlink(), optim_name(1), True),
    "a missing first header": (lambda tag: (tag / model_name(0)).unlink(), model_name(0), True),
    "a truncated file": (lambda tag: os.truncate(tag / optim_name(1), 600), optim_name(1), True),
    "a damaged record": (lambda tag: (tag / RECORD_NAME).write_text("{"), "is not JSON", True),
    "an empty record": (lambda tag: (tag / RECORD_NAME).write_text(""), "is not JSON", True),
    "a wrong bit": (lambda tag: flip_payload(tag / optim_name(1)), optim_name(1), False),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_newer_tags_that_are_damaged_are_passed_over_with_the_reason(run: Path, what: str) -> None:
    damage, said, seen_quickly = DAMAGES[what]
    damage(run / "global_step11")
    done = latest(run)
    assert done.returncode == 0 and done.stdout == "global_step10\n"
    assert "passed over global_step11: " in done.stderr and said in done.stderr
    assert "latest names global_step11. --fix" in done.stderr
    found = document(run)
    assert found["tag"] == "global_step10" and found["step"] == 10 and found["verified"] == "full"
    assert [(verdict["tag"], verdict["step"]) for verdict in found["passed_over"]] == [("global_step11", 11)]
    assert said in found["passed_over"][0]["problems"][0]
    assert document(run, "--quick")["tag"] == ("global_step10" if seen_quickly else "global_step11")


@pytest.mark.parametrize("how", ["missing", "truncated", "mixed"])
def test_without_records_headers_tell_what_is_incomplete(tmp_path: Path, how: str) -> None:
    for step in (1, 2):
        save(tmp_path / f"global_step{step}", step, record=step == 1, format="rigid")
    (tmp_path / "latest").write_text("global_step2")
    assert latest(tmp_path, "--quick").stdout == "global_step2\n"
    path = tmp_path / "global_step2" / model_name(1)
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 30)
    else:
        edit(path, lambda data: data.update(global_steps=1))
    assert latest(tmp_path, "--quick").stdout == "global_step1\n"
    assert latest(tmp_path).stdout == "global_step1\n"


def test_without_latest_only_what_was_committed_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "global_step2", 2, record=False, format="rigid")
    done = latest(tmp_path)
    assert done.returncode == 3 and "latest names no checkpoint, and none has a commit record; --set" in done.stderr
    assert latest(tmp_path, "--set", "global_step2").returncode == 0
    assert latest(tmp_path).stdout == "global_step2\n"


def test_none_that_verifies_is_exit_code_3(run: Path) -> None:
    for tag in run.glob("global_step*"):
        (tag / model_name(1)).unlink()
    done = latest(run)
    assert done.returncode == 3 and done.stdout == "" and "No checkpoint verifies" in done.stderr
    found = document(run, "--quick")
    assert len(found["passed_over"]) == 4 and found["tag"] is None and found["num_tags"] == 4


def test_what_cannot_be_judged_is_told_apart(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only damage counts against a tag: prune removes by it."""
    tag = RunStore(run).tags()[0]
    assert check_tag(tag, check_quickly) is None
    (run / "global_step11" / RECORD_NAME).write_text('{"format_version": 99}')
    verdict = check_tag(tag, check_quickly)
    assert verdict is not None and verdict.undecided and "Upgrade" in verdict.problems[0]
    (run / "global_step11" / RECORD_NAME).write_text("{")
    verdict = check_tag(tag, check_quickly)
    assert verdict is not None and not verdict.undecided

    def stale(place: DiskPath, offset: int, nbytes: int) -> bytes:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(DiskPath, "read", stale)
    verdict = check_tag(tag, check_quickly)
    assert verdict is not None and verdict.undecided and "Stale file handle" in verdict.problems[0]


def test_other_kinds_are_passed_over_and_never_called_damaged(run: Path) -> None:
    universal = run / "global_step12_universal"
    shutil.copytree(run / "global_step11", universal)
    for path in (*universal.glob("*optim_states.pt"), universal / RECORD_NAME):
        path.unlink()
    (universal / "zero" / "w").mkdir(parents=True)
    (universal / "zero" / "w" / "fp32.pt").write_bytes(b"")
    edit(universal / model_name(0), lambda data: data.update(global_steps=12))
    tags = RunStore(run).tags()
    assert [tag.step for tag in tags[:2]] == [12, 11]
    newest, passed = find_newest(tags, check_quickly)
    assert newest is not None and newest.name == "global_step11"
    assert [(verdict.tag.name, verdict.undecided) for verdict in passed] == [("global_step12_universal", True)]
    assert "Universal" in passed[0].problems[0]


def test_tags_of_stages_1_and_2_are_tags_like_others(run: Path) -> None:
    golden = GOLDEN / "stage2_round_robin_aligned_rank3" / "global_step2"
    shutil.copytree(golden, run / "stage2")
    edit(run / "stage2" / "mp_rank_00_model_states.pt", lambda data: data.update(global_steps=13))
    newest, passed = find_newest(RunStore(run).tags(), check_quickly)
    assert newest is not None and (newest.name, newest.step) == ("stage2", 13) and not passed


def test_a_tag_that_tells_no_step_at_all_does_not_hide_the_newest(run: Path) -> None:
    shutil.copytree(run / "global_step8", run / "best")
    (run / "best" / RECORD_NAME).unlink()
    (run / "best" / model_name(0)).write_bytes(b"torn")
    done = latest(run, "--quick")
    assert done.stdout == "global_step11\n" and done.stderr == ""
    (run / "latest").write_text("best")
    done = latest(run, "--quick")
    assert done.stdout == "global_step11\n" and "passed over best" in done.stderr
    assert document(run, "--quick")["passed_over"][0]["step"] is None


# --- the file latest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, b"global_step12", b"\xff", b"a/b", b""])
def test_fix_lets_latest_name_the_newest(run: Path, wrong: bytes | None) -> None:
    path = run / "latest"
    path.unlink() if wrong is None else path.write_bytes(wrong)
    before = sorted(os.listdir(run))
    done = latest(run, "--quick", "--fix", "--dry-run")
    assert done.returncode == 0 and "would now name global_step11" in done.stderr
    assert sorted(os.listdir(run)) == before and (wrong is None or path.read_bytes() == wrong)
    assert document(run, "--quick", "--fix", "--dry-run")["latest"]["fixed"] is False
    done = latest(run, "--quick", "--fix")
    assert done.stdout == "global_step11\n" and "now names global_step11" in done.stderr
    assert path.read_bytes() == b"global_step11" and not [p for p in run.iterdir() if p.name.endswith(".tmp")]
    again = document(run, "--quick", "--fix")["latest"]
    assert again == {"names": "global_step11", "is_newest": True, "fixed": False}


def test_set_rolls_back_and_fix_leaves_it(run: Path) -> None:
    for options, word in ((["--dry-run"], "would now name"), ([], "now names")):
        done = latest(run, "--set", "global_step8", *options)
        assert done.returncode == 0 and done.stdout == "global_step8\n"
        assert f"latest names global_step11. It {word} global_step8." in done.stderr
    found = document(run, "--quick", "--fix")
    assert found["tag"] == "global_step8" and found["newer"] == ["global_step11", "global_step10", "global_step9"]
    assert found["latest"] == {"names": "global_step8", "is_newest": True, "fixed": False}
    assert "Committed after global_step8, and not taken: global_step11, global_step10" in latest(run, "--quick").stderr
    (run / "global_step9" / model_name(1)).unlink()
    assert latest(run, "--set", "global_step9").returncode == 3 and (run / "latest").read_text() == "global_step8"


def test_fix_writes_nothing_when_latest_is_right_or_none_verifies(run: Path) -> None:
    mark = (run / "latest").stat().st_mtime_ns
    assert latest(run, "--quick", "--fix").stderr == "" and (run / "latest").stat().st_mtime_ns == mark
    for tag in run.glob("global_step*"):
        (tag / model_name(1)).unlink()
    (run / "latest").write_text("global_step8")
    assert latest(run, "--quick", "--fix").returncode == 3 and (run / "latest").read_text() == "global_step8"


# --- directories of folders -------------------------------------------------------------------------------------------


def trainer_output(output: Path, steps: tuple[int, ...]) -> Path:
    """What the Trainer leaves: a folder for each checkpoint, a tag and latest in each."""
    for step in steps:
        folder = output / f"checkpoint-{step}"
        save(folder / f"global_step{step}", step)
        (folder / "latest").write_text(f"global_step{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "best_model_checkpoint": None}))
        (folder / "model.safetensors").write_bytes(b"x" * 1000)
    (output / "runs").mkdir()
    return output


def test_folders_of_the_trainer_are_checkpoints(tmp_path: Path) -> None:
    output = trainer_output(tmp_path / "output", (5, 20, 100))
    found = document(output)
    assert found["tag"] == "checkpoint-100" and found["folder"] == str(output / "checkpoint-100")
    assert found["path"] == str(output / "checkpoint-100" / "global_step100") and found["latest"]["names"] is None
    (output / "checkpoint-100" / "latest").unlink()  # written last
    done = latest(output, "--quick")
    assert done.stdout == "checkpoint-20\n" and "checkpoint-100: has no latest file" in done.stderr
    (output / "checkpoint-20" / "latest").write_text("global_step19")
    assert latest(output, "--quick").stdout == "checkpoint-5\n"
    assert latest(output, "--fix").returncode == 2


@pytest.mark.parametrize(
    ("folder", "tag"), [("checkpoint_{}", "pytorch_model"), ("epoch={}-step=9.ckpt", "checkpoint")]
)
def test_folders_of_accelerate_and_lightning_are_too(tmp_path: Path, folder: str, tag: str) -> None:
    for step in (9, 10):
        save(tmp_path / folder.format(step) / tag, step)
        (tmp_path / folder.format(step) / "latest").write_text(tag)
    assert latest(tmp_path, "--quick").stdout == f"{folder.format(10)}\n"


def test_folders_of_other_runs_are_not_taken_for_checkpoints(run: Path) -> None:
    done = latest(run.parent, "--quick")
    assert done.returncode == 2 and "holds no ZeRO checkpoint" in done.stderr


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rigid2", "elastic3"])
def test_checkpoints_that_deepspeed_saved(name: str) -> None:
    assert latest(GOLDEN / name).stdout == "global_step2\n"


@pytest.mark.extended
def test_5000_tags_are_quick(tmp_path: Path) -> None:
    source = GOLDEN / "elastic3" / "global_step2"
    record = record_of(source)
    for step in range(5000):
        tag = tmp_path / f"global_step{step}"
        tag.mkdir()
        at_step = record.model_copy(update={"global_steps": step, "committed_at": 1e9 + step})
        (tag / RECORD_NAME).write_bytes(record_text(at_step))
    for step in (4990, 4999):
        for path in source.glob("*.pt"):
            shutil.copy(path, tmp_path / f"global_step{step}")
    (tmp_path / "global_step4999" / model_name(0)).unlink()
    command = [sys.executable, "-m", "zeroelastic", "latest", str(tmp_path), "--quick"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert time.perf_counter() - began < 10
    assert done.stdout == "global_step4990\n" and len(done.stderr.splitlines()) == 10


def test_a_library_user_gets_the_same(run: Path) -> None:
    with pytest.raises(UsageError):
        RunStore(run / "logs").require_tags()
    edit_optim(run / "global_step11" / optim_name(0), lambda state: state.update(overflow=True, extra=1))

    def refuse(path: object) -> tuple[str, ...]:
        raise CheckpointError("no")

    assert find_newest(RunStore(run).tags(), refuse)[0] is None
    assert find_newest((), refuse) == (None, ())


@pytest.mark.parametrize("error", [UnreadableError, NewerFormatError])
@pytest.mark.parametrize("dry_run", [False, True])
def test_fix_does_not_pass_over_a_newer_tag_that_cannot_be_read_now(
    run: Path, error: type[Exception], dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole; a job that went on from an older tag would lose the steps between."""
    (run / "latest").unlink()

    def check(tag_dir: Any) -> tuple[str, ...]:
        if tag_dir.name == "global_step11":
            raise error(f"{tag_dir}: cannot be read.")
        return ()

    monkeypatch.setattr("zeroelastic.verbs.tags._check_quickly", check)
    with pytest.raises(UnreadableError, match=r"global_step11: cannot be read.* latest was not changed"):
        zeroelastic.latest(run, quick=True, fix=True, dry_run=dry_run)
    assert not (run / "latest").exists()


def test_fix_is_not_advised_where_it_would_refuse(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "latest").unlink()

    def check(tag_dir: Any) -> tuple[str, ...]:
        if tag_dir.name == "global_step11":
            raise UnreadableError(f"{tag_dir}: cannot be read.")
        return ()

    monkeypatch.setattr("zeroelastic.verbs.tags._check_quickly", check)
    done = run_command("latest", run, "--quick")
    assert done.returncode == 0 and "--fix lets it name" not in done.stderr
    assert "--fix changes it when global_step11 can be read, which may be whole; --set names a tag now." in done.stderr
