"""``zeroelastic prune``: old checkpoints go, whole or not at all, and what must stay stays."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT
from programs import no_result, run_command
from saved_files import record_of
from synthetic import edit, model_name, optim_name, write_checkpoint, write_history

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.runs import run_store
from zeroelastic.runs.tag_directory import is_removal, is_unfinished, note_owner, remove_note
from zeroelastic.runs.verdicts import check_quickly, plan_prune, remove_tag
from zeroelastic.verbs.new_directory import staging_of

HOUR = 3600


prune = partial(run_command, "prune", env={"COLUMNS": "200", "TERM": "dumb"})
"""In this process, where nobody can be asked."""


def document(*arguments: object) -> dict[str, Any]:
    done = prune(*arguments, "--json")
    found = json.loads(done.stdout)
    assert done.stderr == "" and found["ok"] == (done.returncode == 0)
    return found


def command(*arguments: object) -> tuple[list[str], dict[str, str]]:
    return (
        [sys.executable, "-m", "zeroelastic", "prune", *map(str, arguments)],
        {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


def save(tag_dir: Path, step: int, *, record: bool = True, format: str = "rigid") -> Path:
    write_checkpoint(tag_dir, world_size=2, global_steps=step, record=record, format=format)
    return tag_dir


def age(directory: Path, seconds: float, *, now: float | None = None) -> None:
    """Let everything in a directory have changed so long ago."""
    then = (time.time() if now is None else now) - seconds
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (then, then), follow_symlinks=False)


def tags(run: Path) -> set[str]:
    return {path.name for path in run.iterdir() if path.is_dir()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Tags of steps 1 to 5, an hour old; latest names the last."""
    for step in range(1, 6):
        age(save(tmp_path / "run" / f"s{step}", step), 2 * HOUR)
    (tmp_path / "run" / "latest").write_text("s5")
    (tmp_path / "run" / "zero_to_fp32.py").write_text("")
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path / "run"


# --- what goes --------------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_the_others_go(run: Path) -> None:
    nbytes = sum(path.stat().st_size for tag in ("s1", "s2", "s3") for path in (run / tag).iterdir())
    said = prune(run, "--keep", 2, "--dry-run").stderr
    assert "not contents; `zeroelastic latest DIR` reads every byte" in said, "a damaged one may be the newest"
    planned = document(run, "--keep", 2, "--dry-run")
    assert tags(run) == {"s1", "s2", "s3", "s4", "s5", "logs"} and planned["removed"] == []
    assert [tag["action"] for tag in planned["tags"]] == ["kept"] * 2 + ["would be removed"] * 3
    done = document(run, "--keep", 2, "--yes")
    assert tags(run) == {"s4", "s5", "logs"} and (run / "zero_to_fp32.py").exists()
    assert done["removed"] == ["s1", "s2", "s3"] and done["freed_bytes"] == nbytes
    assert sorted(os.listdir(run)) == ["latest", "logs", "s4", "s5", "zero_to_fp32.py"]
    for tag in ("s4", "s5"):
        assert check_quickly(run / tag) == ()
    again = document(run, "--keep", 2, "--yes")
    assert again["removed"] == [] and again["freed_bytes"] == 0


def test_for_people_it_says_what_and_how_much(run: Path) -> None:
    done = prune(run, "--keep", 4, "--yes")
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"^kept +s5 +one of the newest that verify$", done.stdout, re.M)
    assert re.search(r"^removed +s1 +[\d.]+ KiB +older than the newest 4 that verify$", done.stdout, re.M)
    assert re.search(r"^1 removed, [\d.]+ KiB freed$", done.stdout, re.M)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_there_what_must_stay_stays(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    steps = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    states = {}
    now = time.time()
    for i, step in enumerate(steps):
        name, state = f"s{i}{step % 7}", data.draw(st.sampled_from(["whole", "stock", "torn", "young torn"]))
        save(run / name, step, record=state == "whole")
        if "torn" in state:
            (run / name / optim_name(1)).unlink()
        age(run / name, 60 if "young" in state else 2 * HOUR, now=now)
        states[name] = (step, state)
    old = [name for name, (_, state) in states.items() if state != "young torn"]
    named = data.draw(st.sampled_from([None, *old]))
    if named is not None:
        (run / "latest").write_text(named)
    keep, invalid = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    options = ["--keep", keep, "--yes", *(["--invalid"] if invalid else [])]
    whole = sorted((step, name) for name, (step, state) in states.items() if "torn" not in state)[::-1]
    counted = [(step, name) for step, name in whole if states[name][1] == "whole"] or whole
    before = tags(run)
    done = prune(run, *options)
    after = tags(run)
    if not whole:
        assert done.returncode == 3 and after == before
        return
    assert done.returncode == 0
    newest = {name for _, name in counted[:keep]}
    for name, (step, state) in states.items():
        must_stay = (
            name in newest
            or name == named
            or state == "young torn"
            or (state == "stock" and (step, name) not in counted)
            or (state == "torn" and (not invalid or step > counted[0][0]))
        )
        assert (name in after) == must_stay, (name, states, named, options)
    assert all(check_quickly(run / name) == () for _, name in whole if name in after)


def test_files_with_other_names_free_nothing(run: Path) -> None:
    os.link(run / "s1" / optim_name(0), run / "kept.pt")
    shared = (run / "kept.pt").stat().st_size
    total = sum(path.stat().st_size for path in (run / "s1").iterdir())
    done = document(run, "--keep", 4, "--yes")
    assert done["removed"] == ["s1"] and done["freed_bytes"] == total - shared
    assert (run / "kept.pt").stat().st_size == shared


# --- what stays -------------------------------------------------------------------------------------------------------


def reasons(run: Path, *options: object) -> dict[str, str]:
    return {tag["tag"]: tag["reason"] for tag in document(run, *options)["tags"] if tag["action"] == "kept"}


def test_what_stays_says_why(run: Path) -> None:
    """Which tags stay, whatever there is, is the test of drawn runs above."""
    (run / "latest").write_text("s1")
    (run / "s2" / model_name(1)).unlink()
    (run / "s3" / RECORD_NAME).unlink()
    (run / "s5" / model_name(1)).unlink()
    for tag in ("s2", "s3", "s5"):
        age(run / tag, 2 * HOUR)
    kept = reasons(run, "--keep", 1, "--yes")
    assert (kept["s1"], kept["s4"]) == ("latest names it", "the newest that verifies")
    assert "--invalid removes it" in kept["s2"] and "not older than" in kept["s5"]
    assert kept["s3"] == "has no commit record, unlike others"
    assert document(run, "--keep", 1, "--yes", "--invalid")["removed"] == ["s2"]
    for tag in ("s1", "s3", "s4"):
        (run / tag / model_name(1)).unlink()
    assert "no checkpoint verifies" in prune(run, "--keep", 1, "--yes", "--invalid").stderr


def test_times_in_records_decide_which_are_the_newest(tmp_path: Path) -> None:
    write_history(tmp_path, [("s1", 1), ("s2", 2), ("s3", 3), ("s4", 4), ("s2b", 2), ("s3b", 3)])
    assert document(tmp_path, "--keep", 3, "--yes")["removed"] == ["s1", "s2", "s3"]
    assert tags(tmp_path) == {"s4", "s2b", "s3b"}


def test_tags_of_other_parameters_are_counted_apart(run: Path) -> None:
    """The other engine of a GAN: neither counts for this one, and the newest of each stay."""
    for tag in ("s1", "s2", "s3"):
        record = record_of(run / tag).model_copy(update={"trained_params": "b" * 32})
        (run / tag / RECORD_NAME).write_bytes(record_text(record))
        age(run / tag, 2 * HOUR)
    assert {tag.tag.name for tag in plan_prune(run, keep=1, of="s5").removals} == {"s4"}
    assert reasons(run, "--keep", 1, "--dry-run") == {
        "s5": "the newest that verifies", "s3": "the newest that verifies"
    }  # fmt: skip
    assert document(run, "--keep", 1, "--yes")["removed"] == ["s1", "s2", "s4"] and tags(run) == {"s3", "s5", "logs"}


def test_a_latest_that_cannot_be_read_keeps_everything(run: Path) -> None:
    (run / "latest").write_bytes(b"\xff\xfe")
    assert document(run, "--keep", 1, "--yes", "--invalid")["removed"] == [] and len(tags(run)) == 6


def test_what_may_be_being_written_stays(run: Path) -> None:
    for tag in ("s1", "s2", "s3", "s4", "s5"):
        (run / tag / RECORD_NAME).unlink()
        age(run / tag, 2 * HOUR)
    (run / "s1" / model_name(1)).touch()
    kept = reasons(run, "--keep", 1, "--yes")
    assert "changed within the last 60 minutes" in kept["s1"] and tags(run) == {"s1", "s5", "logs"}
    age(run / "s1", 120)
    assert "within the last 3 minutes" in reasons(run, "--keep", 1, "--dry-run", "--min-age", "3m")["s1"]
    assert document(run, "--keep", 1, "--yes", "--min-age", "90s")["removed"] == ["s1"]


def test_what_dead_saves_left_goes_and_what_may_be_on_its_way_stays(run: Path) -> None:
    old, new, only = (f".global_step{step}.{digit * 32}" for step, digit in ((10, "a"), (20, "b"), (15, "c")))
    for name in (f"{old}.tmp", f"{new}.tmp", f"{only}.tmp", f"{only}.old"):
        save(run / name, 10)
        age(run / name, 2 * HOUR)
    age(run / f"{new}.tmp", 0)
    assert not (run / "global_step15").exists()  # moved aside, and its replacement was not put in place yet
    found = document(run, "--keep", 5, "--yes")
    told = {one["name"]: (one["action"], one["reason"][:30]) for one in found["unfinished"]}
    there = ("kept", "the tag that it belongs to is ")
    assert told == {
        f"{old}.tmp": ("removed", "of a save that did not finish"),
        f"{new}.tmp": ("kept", "a save may be on its way: it c"),
        f"{only}.tmp": there,
        f"{only}.old": there,
    }
    left = {path.name for path in run.iterdir() if path.name.startswith(".global")}
    assert left == {f"{new}.tmp", f"{only}.tmp", f"{only}.old"} and found["freed_bytes"] > 0


@pytest.mark.parametrize("folder", [".", "checkpoint-9"])
def test_what_a_command_was_making_when_it_was_killed_is_no_tag_and_goes(tmp_path: Path, folder: str) -> None:
    """A reshard beside the tags of a run, or beside the folders of a framework, with all of its files."""
    save(tmp_path / folder / "s9", 9)
    (tmp_path / folder / "latest").write_text("s9")
    left = staging_of(tmp_path / "made")
    save(left / "root/s10", 10)
    tag = "checkpoint-9" if folder != "." else "s9"
    assert [found.tag for found in zeroelastic.ls(tmp_path).tags] == [tag]
    assert (newest := zeroelastic.latest(tmp_path).tag) is not None and newest.name == tag
    (found,) = zeroelastic.prune(tmp_path, keep=1).unfinished
    assert (found.action, found.reason[:32]) == ("kept", "a command may be on its way: it ")
    age(left, 2 * HOUR)
    note_owner(left)  # of this process
    (found,) = zeroelastic.prune(tmp_path, keep=1, dry_run=False).unfinished
    assert (found.action, found.reason[:25]) == ("kept", "its command is on its way")
    remove_note(left)
    age(left, 2 * HOUR)
    (found,) = zeroelastic.prune(tmp_path, keep=1, dry_run=False).unfinished
    assert (found.name, found.action, found.reason) == (left.name, "removed", "of a command that did not finish")
    assert not left.exists() and [found.tag for found in zeroelastic.ls(tmp_path).tags] == [tag]


def test_a_clock_that_is_ahead_makes_nothing_old(run: Path) -> None:
    for tag in run.glob("s?"):
        (tag / RECORD_NAME).unlink()
    age(run / "s1", -10 * HOUR)
    assert "may be being written" in reasons(run, "--keep", 1, "--yes")["s1"]


def test_what_cannot_be_judged_stays(run: Path) -> None:
    (run / "s1" / RECORD_NAME).write_text('{"format_version": 99}')
    for path in (run / "s2").glob("*optim_states.pt"):
        path.unlink()
    (run / "s2" / RECORD_NAME).unlink()
    (run / "s2" / "zero" / "w").mkdir(parents=True)
    (run / "s2" / "zero" / "w" / "fp32.pt").write_text("")
    edit(run / "s3" / model_name(0), lambda data: data.update(mp_world_size=2))
    (run / "s3" / RECORD_NAME).unlink()
    for tag in ("s1", "s2", "s3"):
        age(run / tag, 2 * HOUR)
    kept = reasons(run, "--keep", 1, "--yes", "--invalid")
    assert tags(run) == {"s1", "s2", "s3", "s5", "logs"}
    assert "Upgrade" in kept["s1"] and "Universal" in kept["s2"] and "tensor parallel" in kept["s3"]


def test_links_and_what_they_lead_to_stay_and_are_not_followed(run: Path, tmp_path: Path) -> None:
    outside = age_of = save(tmp_path / "elsewhere" / "s0", 0)
    age(age_of, 2 * HOUR)
    (run / "s0").symlink_to(outside)
    (run / "best").symlink_to("s2")
    (run / "s1" / "data").symlink_to(tmp_path / "elsewhere")
    age(run / "s1", 2 * HOUR)
    kept = reasons(run, "--keep", 1, "--yes")
    assert tags(run) == {"s0", "best", "s2", "s5", "logs"} and not (run / "s1").exists()
    assert kept["s0"] == kept["best"] == "is a symbolic link" and "best leads to it" in kept["s2"]
    assert check_quickly(outside) == () and check_quickly(run / "best") == ()


def test_a_run_behind_a_link_is_pruned_where_it_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    assert prune(tmp_path / "link", "--keep", 1, "--yes").returncode == 0
    assert tags(run) == {"s5", "logs"} and (tmp_path / "link").is_symlink()


# --- nothing half-done ------------------------------------------------------------------------------------------------


KILL = """
import os, shutil, signal, sys
from zeroelastic.cli.app import main
where, count = sys.argv.pop(1), int(sys.argv.pop(1))
real = getattr(os, where)
def dying(*args, **kwargs):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGNUM)
    return real(*args, **kwargs)
setattr(os, where, dying)
main()
"""


def killed(number: str, where: str, count: int, run: Path, *, keep: int = 1) -> subprocess.CompletedProcess[str]:
    """A removal that gets a signal at the ``count``-th call of a function of ``os``."""
    code = KILL.replace("SIGNUM", number)
    arguments = [sys.executable, "-c", code, where, str(count), "prune", str(run), "--keep", str(keep), "--yes"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.starts_processes
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize(("where", "count"), [("rename", 1), ("rename", 2), ("unlink", 1), ("unlink", 4), ("rmdir", 1)])
def test_a_kill_leaves_no_half_tag_and_the_next_one_finishes(run: Path, number: str, where: str, count: int) -> None:
    done = killed(number, where, count, run, keep=2)
    assert done.returncode == (-9 if number == "SIGKILL" else 143), done.stderr
    left = tags(run) - {"logs"}
    hidden = {name for name in left if name.startswith(".")}
    assert {"s4", "s5"} <= left and all(is_unfinished(name) for name in hidden)
    for tag in left - hidden:
        assert check_quickly(run / tag) == ()
    again = document(run, "--keep", 2, "--dry-run")
    assert {one["name"] for one in again["unfinished"] if one["action"] == "would be removed"} == hidden
    assert document(run, "--keep", 2, "--yes")["ok"] and tags(run) == {"s4", "s5", "logs"}


def test_a_tag_that_changes_after_it_was_looked_at_is_left_alone(run: Path) -> None:
    plan = plan_prune(run, keep=1)
    oldest, second, third, fourth = plan.removals
    (run / "s1" / optim_name(0)).touch()
    assert remove_tag(plan, oldest) == "it changed while this ran" and check_quickly(run / "s1") == ()
    (run / "latest").write_text("s2")
    assert remove_tag(plan, second) == "latest names it by now"
    shutil.rmtree(run / "s3")
    assert remove_tag(plan, third) == "it changed while this ran"
    (run / "latest").write_bytes(b"\xff")
    assert remove_tag(plan, fourth) is not None
    (run / "latest").write_text("s5")
    assert remove_tag(plan, fourth) is None and tags(run) == {"s1", "s2", "s5", "logs"}


def save_again(tag: Path) -> None:
    """Put another save in the place of a tag in one step, as a save does."""
    write_checkpoint(tag.parent / "new", world_size=2, global_steps=9, format="rigid")
    tag.rename(tag.parent / "old")
    (tag.parent / "new").rename(tag)
    shutil.rmtree(tag.parent / "old")


def test_a_tag_that_is_saved_again_in_the_last_moment_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, pending = os.rename, ["s1"]

    def late(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if Path(source).name in pending:
            pending.remove(Path(source).name)
            save_again(Path(source))
        rename(source, target)

    monkeypatch.setattr("zeroelastic.runs.run_store.os.rename", late)
    done = document(run, "--keep", 1, "--yes")
    assert done["ok"] and not pending and tags(run) == {"s1", "s5", "logs"} and check_quickly(run / "s1") == ()
    (kept,) = (tag for tag in done["tags"] if tag["tag"] == "s1")
    assert kept["action"] == "kept" and kept["reason"] == "it changed while this ran"


@pytest.mark.parametrize("moment", ["while it is looked at", "before it is removed"])
def test_what_vanishes_beside_a_saving_job_is_no_failure(run: Path, monkeypatch: pytest.MonkeyPatch, moment) -> None:
    look, rename, made = run_store.survey, os.rename, []

    def survey(directory: Path) -> run_store.Tree:
        if directory.name == "s1" and moment.startswith("while") and not made:
            made.append(directory)
            shutil.rmtree(directory)
        return look(directory)

    def late(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if Path(source).name == "s1" and moment.startswith("before") and not made:
            made.append(source)
            shutil.rmtree(source)
        rename(source, target)

    monkeypatch.setattr(run_store, "survey", survey)
    monkeypatch.setattr("zeroelastic.runs.run_store.os.rename", late)
    done = prune(run, "--keep", 1, "--yes")
    assert done.returncode == 0 and made and tags(run) == {"s5", "logs"}, done.stderr


def test_two_at_once_do_not_disturb_each_other(run: Path) -> None:
    for step in range(10, 40):
        age(save(run / f"s{step}", step), 2 * HOUR)
    (run / "latest").write_text("s39")
    arguments, env = command(run, "--keep", "3", "--yes")
    both = [subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert b"Traceback" not in errors
    assert prune(run, "--keep", 3, "--yes").returncode == 0
    assert tags(run) == {"s37", "s38", "s39", "logs"}


def test_what_cannot_be_deleted_is_told_and_the_rest_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = shutil.rmtree, []

    def fail_once(path: Path) -> None:
        if not failed:
            failed.append(path)
            raise PermissionError(13, "Permission denied", str(path))
        real(path)

    monkeypatch.setattr(run_store.shutil, "rmtree", fail_once)
    found = document(run, "--keep", 3, "--yes")
    assert not found["ok"] and [tag["action"] for tag in found["tags"]] == ["kept"] * 3 + ["removed", "failed"]
    assert "Permission denied" in found["tags"][-1]["reason"] and found["removed"] == ["s2"]
    (left,) = tags(run) - {"s3", "s4", "s5", "logs"}
    assert is_removal(run / left), "the next prune, or save, takes it"


def test_the_last_leftover_is_finished_without_any_tag(tmp_path: Path) -> None:
    left = save(tmp_path / f".s1.{'0' * 32}.gone", 1)
    (left / "link").symlink_to(ROOT)
    assert "would be removed" in prune(tmp_path, "--keep", 1, "--dry-run").stdout
    assert prune(tmp_path, "--keep", 1, "--yes").returncode == 0 and list(tmp_path.iterdir()) == []
    assert (ROOT / "README.md").exists()


# --- folders of the Trainer -------------------------------------------------------------------------------------------


@pytest.fixture
def output(tmp_path: Path) -> Path:
    for step in (5, 20, 100):
        folder = tmp_path / "output" / f"checkpoint-{step}"
        save(folder / f"global_step{step}", step)
        (folder / "latest").write_text(f"global_step{step}")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (folder / "model.safetensors").write_bytes(b"x" * 1000)
        age(folder, 2 * HOUR)
    save(tmp_path / "output" / "other-run" / "global_step1", 1)
    (tmp_path / "output" / "other-run" / "latest").write_text("global_step1")
    return tmp_path / "output"


def test_folders_go_as_a_whole_and_other_runs_stay(output: Path) -> None:
    assert document(output, "--keep", 1, "--yes")["removed"] == ["checkpoint-5", "checkpoint-20"]
    assert tags(output) == {"checkpoint-100", "other-run"}


def test_the_best_model_of_the_trainer_stays(output: Path) -> None:
    state = {"best_model_checkpoint": "/elsewhere/output/checkpoint-5"}
    (output / "checkpoint-100" / "trainer_state.json").write_text(json.dumps(state))
    kept = reasons(output, "--keep", 1, "--yes")
    assert tags(output) == {"checkpoint-100", "checkpoint-5", "other-run"} and "best model" in kept["checkpoint-5"]
    for text in ("{", "[]", '{"best_model_checkpoint": 7}'):
        (output / "checkpoint-100" / "trainer_state.json").write_text(text)
        assert document(output, "--keep", 2, "--yes")["ok"]


def test_an_unfinished_folder_is_damaged(output: Path) -> None:
    (output / "checkpoint-20" / "latest").unlink()
    age(output / "checkpoint-20", 2 * HOUR)
    assert document(output, "--keep", 1, "--yes")["removed"] == ["checkpoint-5"]
    assert document(output, "--keep", 1, "--yes", "--invalid")["removed"] == ["checkpoint-20"]


# --- asking -----------------------------------------------------------------------------------------------------------


def test_where_nobody_can_be_asked_yes_is_needed(run: Path) -> None:
    for options in ([], ["--json"]):
        done = prune(run, "--keep", 1, *options)
        assert done.returncode == 2 and "--yes" in done.stderr and no_result(done.stdout) and len(tags(run)) == 6
    assert prune(run, "--keep", 5).returncode == 0  # nothing to ask about


def test_a_closed_stdin_is_nobody_to_ask(run: Path) -> None:
    """As a service, or `<&-` in a shell, starts a command: sys.stdin is None."""
    arguments, env = command(run, "--keep", "2")
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "--yes is required" in done.stderr and "Traceback" not in done.stderr
    assert len(tags(run)) == 6


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 3), ("n", 1, 6), ("", 1, 6)])
def test_on_a_terminal_it_asks(run: Path, answer: str, code: int, left: int) -> None:
    arguments, env = command(run, "--keep", "2")
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            arguments, env=env, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        os.write(ours, f"{answer}\n".encode())
        out, errors = process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == code and "Remove 3 checkpoints (" in errors and "Traceback" not in errors
    assert "would be removed" in out and len(tags(run)) == left
    assert ("Nothing was removed." in errors) == (code == 1)


def test_ctrl_c_ends_it_with_130(run: Path) -> None:
    done = killed("SIGINT", "unlink", 3, run)
    assert done.returncode == 128 + signal.SIGINT
    assert all(check_quickly(run / tag) == () for tag in tags(run) - {"logs"} if not is_unfinished(tag))
