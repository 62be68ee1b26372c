"""The event log: lines that survive whatever kills their writer, and what a timeline makes of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.errors import CheckpointError, UsageError
from zeroelastic.job_log.event_log import (
    EndEvent,
    Event,
    NodesEvent,
    ResumeEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
    append,
    last_step,
    note_nodes,
    read_events,
)
from zeroelastic.job_log.timeline import make_timeline


def at(seconds: float, run: str = "a") -> dict[str, object]:
    return {"time": 1000.0 + seconds, "monotonic": 50.0 + seconds, "run": run}


def start(seconds: float, run: str, *, ranks: int, process: float = 5.0, imports: float = 3.0) -> StartEvent:
    return StartEvent(
        **at(seconds, run), world_size=ranks, num_nodes=ranks, host="h", pid=1, job="job", restart=0,
        process_seconds=process, import_seconds=imports,
    )  # fmt: skip


def resume(seconds: float, run: str, *, step: int, took: float = 0.5) -> ResumeEvent:
    return ResumeEvent(
        **at(seconds, run), tag=f"global_step{step}" if step else None, step=step, saved_world_size=None, proved=True,
        seconds=took, load_seconds=took, passed_over=0, lost_steps=None,
    )  # fmt: skip


def step(seconds: float, run: str, number: int) -> StepEvent:
    return StepEvent(**at(seconds, run), step=number, loss=float(number))


def write(path: Path, *events: Event) -> Path:
    for event in events:
        append(path, event)
    return path


EVENTS = (
    start(0, "a", ranks=2),
    resume(1, "a", step=0),
    StepEvent(**at(2), step=1, loss=math.nan),
    StepEvent(**at(3), step=2),
    SaveEvent(**at(4), step=2, tag="global_step2", seconds=0.25),
    NodesEvent(**at(5, ""), change=-1, cause="SIGKILL"),
    EndEvent(**at(6), step=2, rank=1, reason="error", error="RuntimeError: gone"),
)


def test_what_is_read_is_what_was_appended(tmp_path: Path) -> None:
    log = read_events([write(tmp_path / "log", *EVENTS)])
    assert log.num_torn == 0 and len(log.events) == len(EVENTS)
    for read, written in zip(log.events, EVENTS, strict=True):
        assert read.model_dump_json() == written.model_dump_json()
    loss = log.events[2].loss  # type: ignore[union-attr]
    assert loss is not None and math.isnan(loss)
    assert all(json.loads(line)["version"] == 1 for line in (tmp_path / "log").read_text().splitlines())


@given(st.data())
def test_a_torn_end_costs_the_torn_line_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("torn") / "log", *EVENTS)
    content = path.read_bytes()
    cut = data.draw(st.integers(content.index(b"\n") + 1, len(content)))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n") + (content[cut : cut + 1] == b"\n")
    torn = content[:cut].rpartition(b"\n")[2] not in (b"", *content.split(b"\n"))
    append(path, step(9, "b", 7))
    log = read_events([path])
    assert len(log.events) == whole + 1 and log.events[-1] == step(9, "b", 7)
    assert log.num_torn == torn
    assert last_step(path) == 7


@pytest.mark.parametrize("filler", [0, 1 << 16, (1 << 16) - 30, (1 << 16) - 102, 200_000])
def test_the_last_step_is_found_from_the_end_of_a_long_log(tmp_path: Path, filler: int) -> None:
    path = write(tmp_path / "log", step(1, "a", 41))
    with open(path, "a") as file:
        file.write(f'{{"event":"x","text":"{"y" * filler}"}}\n{{"event":"nodes","change":-1}}\n{{"step":')
    assert last_step(path) == 41
    assert last_step(write(path, step(2, "a", 42))) == 42
    assert last_step(tmp_path / "none") is None


def test_a_writer_that_is_killed_leaves_lines_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys, time; from zeroelastic.job_log.event_log import StepEvent, append\n"
        "for n in range(10**9): append(sys.argv[1], StepEvent(time=n, monotonic=n, run='a' * 300, step=n))"
    )
    for _ in range(2):
        before = path.stat().st_size if path.exists() else 0
        with subprocess.Popen([sys.executable, "-c", code, str(path)]) as writer:
            until = time.monotonic() + 60
            while (not path.exists() or path.stat().st_size < before + 20_000) and time.monotonic() < until:
                time.sleep(0.01)
            writer.kill()
    log = read_events([path])
    assert len(log.events) > 80 and log.num_torn <= 2


def test_kinds_of_later_versions_are_left_out_and_later_formats_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log", *EVENTS)
    with open(path, "a") as file:
        file.write('{"version":1,"event":"moon","time":1,"monotonic":1,"run":"a"}\n[1]\n{"version":1,"event":"step"}\n')
    log = read_events([path])
    assert len(log.events) == len(EVENTS) and log.num_torn == 2
    with open(path, "a") as file:
        file.write('{"version":2,"event":"step"}\n')
    with pytest.raises(CheckpointError, match=r"line 11 is of version 2 .* knows up to 1"):
        read_events([path])


def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    for path, said in (
        (tmp_path / "none", "No such file"),
        (tmp_path / "text", "has no event in it"),
        (tmp_path, "Is a"),
    ):
        with pytest.raises(UsageError, match=said):
            read_events([path])
    note_nodes(tmp_path / "nodes", -1)
    with pytest.raises(UsageError, match="no start of a job"):
        make_timeline(read_events([tmp_path / "nodes"]))


def test_a_restart_is_counted_from_the_last_kill_and_its_phases_add_up(tmp_path: Path) -> None:
    """The start "b" in between never trained: its seconds are part of what "c" has cost."""
    a = [start(0, "a", ranks=4), resume(0.2, "a", step=0), *(step(n, "a", n) for n in range(1, 13))]
    a += [SaveEvent(**at(10.5), step=10, tag="global_step10", seconds=0.1)]
    kills = [NodesEvent(**at(11.9, ""), change=-1), NodesEvent(**at(13.5, ""), change=-1)]
    a += [EndEvent(**at(14, "a"), step=12, rank=2, reason="error", error="RuntimeError: reset")]
    b = [
        start(19, "b", ranks=3),
        EndEvent(**at(22, "b"), step=None, rank=1, reason="error", error="RuntimeError: reset"),
    ]
    c = [start(40, "c", ranks=2, process=10, imports=6), resume(42, "c", step=10, took=1.5), step(43, "c", 11)]
    made = make_timeline(read_events([write(tmp_path / "log", *a, *kills, *b, *c)]))
    first, second, third = made.incarnations
    assert first.restart is None and second.restart is None
    assert third.restart is not None and third.restart.since_kill
    assert third.restart.by_phase == {
        "noticing": 0.5, "rendezvous": 16.0, "imports": 4.0, "engine": 6.5, "load": 1.5, "first_step": 1.0
    }  # fmt: skip
    assert third.restart.total == pytest.approx(43 - 13.5) and third.restart.our_share == pytest.approx(1.5 / 29.5)
    assert [one.lost_steps for one in made.incarnations] == [0, 0, 2] and made.lost_steps == 2
    assert (first.end, second.end, third.end) == ("error", "error", None)


def test_a_rollback_is_no_loss_of_the_restart_after_it(tmp_path: Path) -> None:
    a = [start(0, "a", ranks=2), resume(0.2, "a", step=0), *(step(n, "a", n) for n in range(1, 7)), step(7, "a", 4)]
    b = [start(20, "b", ranks=2), resume(21, "b", step=3), step(22, "b", 4)]
    made = make_timeline(read_events([write(tmp_path / "log", *a, *b)]))
    assert [one.lost_steps for one in made.incarnations] == [0, 1]


def test_without_a_kill_in_the_log_a_restart_is_counted_from_the_last_sign_of_life(tmp_path: Path) -> None:
    a = [start(0, "a", ranks=1), resume(0.2, "a", step=0), step(1, "a", 1), step(2, "a", 2)]
    a += [
        SaveEvent(**at(2.5), step=2, tag="global_step2", seconds=0.1),
        EndEvent(**at(3), step=2, rank=0, reason="stopped"),
    ]
    b = [start(20, "b", ranks=2), resume(21, "b", step=2), step(22, "b", 3)]
    came = NodesEvent(**at(1.5, ""), change=1)
    one = write(tmp_path / "one", *a)
    two = write(tmp_path / "two", came, *b)  # nodes may keep logs of their own
    for paths in ([one, two], [two, one]):
        restart = make_timeline(read_events(paths)).incarnations[1].restart
        assert restart is not None and not restart.since_kill and restart.noticing is None
        assert restart.rendezvous == pytest.approx(12) and restart.total == pytest.approx(19)
