"""`zeroelastic timeline`: what it prints, the document it gives, and the picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Done, run_command
from documentation import documented_keys
from places import ROOT

from zeroelastic.testing.sample_events import write_sample_events


@pytest.fixture
def log(tmp_path: Path) -> Path:
    write_sample_events(tmp_path / "events.jsonl")
    return tmp_path / "events.jsonl"


def run(*arguments: str | Path) -> Done:
    return run_command("timeline", *arguments)


def test_it_shows_every_start_and_what_it_cost(log: Path) -> None:
    done = run(log)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert "3 starts, 2 steps lost" in done.stdout
    assert ["0.0", "s", "4", "new", "-", "10", "0", "2", "error:", "RuntimeError:", "peer", "closed"] in lines
    assert ["14.5", "s", "3", "step", "8", "directory", "16", "2", "2", "stopped"] in lines
    assert ["14.5", "s", "3", "0.30", "3.50", "3.80", "1.50", "0.20", "0.50", "9.80", "2.0%"] in lines
    assert ["28.0", "s", "4", "-", "3.80", "3.80", "1.50", "0.20", "0.50", "9.80", "2.0%"] in lines


def test_half_lines_are_counted(log: Path) -> None:
    with open(log, "a") as file:
        file.write('{"version":1,"event":"st')
    assert "1 half line left out" in run(log).stdout
    assert json.loads(run(log, "--json").stdout)["torn_lines"] == 1


def keys(document: Any, prefix: str = "") -> set[str]:
    if isinstance(document, dict):
        return set().union(*(keys(value, f"{prefix}.{key}" if prefix else key) for key, value in document.items()))
    if isinstance(document, list):
        return set().union(*(keys(value, f"{prefix}[]") for value in document))
    return {prefix}


def test_the_document_has_the_documented_keys(log: Path) -> None:
    document = json.loads(run(log, "--json").stdout)
    documented = documented_keys("timeline")
    assert keys(document) - {"starts[].restart"} == documented
    assert [one["lost_steps"] for one in document["starts"]] == [0, 2, 0] and document["lost_steps"] == 2
    assert [one["change"] for one in document["nodes"]] == [-1, 1]


def test_of_very_many_steps_some_are_in_the_document_with_the_first_and_the_last(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_sample_events(path)
    lines = path.read_text().splitlines()
    step = json.loads(next(line for line in reversed(lines) if '"event":"step"' in line))
    more = [{**step, "step": 24 + number, "time": step["time"] + number / 1000} for number in range(1, 9000)]
    path.write_text("\n".join([*lines, *map(json.dumps, more)]) + "\n")
    document = json.loads(run(path, "--json").stdout)
    first, *_, last = document["starts"]
    points = [point["step"] for point in last["points"]]
    assert points[0] == 17 and points[-1] == last["last_step"] == 9023 and 1000 < len(points) < 2000
    assert points == sorted(set(points)) and [point["step"] for point in first["points"]] == list(range(1, 11))
    assert last["ended"] == pytest.approx(more[-1]["time"]) and len(last["save_times"]) == last["saves"] == 2


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_picture_is_a_new_file_and_shows_every_panel(log: Path, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"timeline{suffix}"
    assert run(log, "--plot", picture).returncode == 0
    data = picture.read_bytes()
    assert data.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]) and len(data) > 10_000
    again = run(log, "--plot", picture)
    assert again.returncode == 2 and "nothing is overwritten" in again.stderr and picture.read_bytes() == data
    picture.write_bytes(b"older")
    assert run(log, "--plot", picture, "--force").returncode == 0 and picture.read_bytes() == data


def test_lost_steps_kills_and_saves_are_drawn(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By colour: lost losses are grey, a kill is a red line; each save is a line, each resume a mark."""
    from zeroelastic.cli import jobs

    drawn: list[Any] = []
    monkeypatch.setattr(jobs, "write_figure", lambda path, figure, force: drawn.append(figure))
    assert run(log, "--plot", tmp_path / "x.png").returncode == 0
    ranks, losses, saves = drawn[0].axes
    grey = [line for line in losses.lines if line.get_color() == "0.75"]
    assert sum(len(line.get_xdata()) for line in grey) == 2
    assert sum(len(line.get_xdata()) for line in losses.lines if line.get_color() == "tab:blue") == 24
    colors = [line.get_color() for line in ranks.lines]
    assert colors.count("tab:red") == 1 and colors.count("tab:green") == 1
    assert [text.get_text() for text in ranks.texts] == ["4", "3", "4"]
    assert sum(len(lines.get_segments()) for lines in saves.collections) == 2 + 2 + 2
    assert sum(line.get_marker() == ">" for line in saves.lines) == 2


def test_without_matplotlib_the_extra_is_named(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(log, "--plot", tmp_path / "x.png")
    assert done.returncode == 2 and "pip install 'zeroelastic[plot]'" in done.stderr and done.stdout == ""
    assert not (tmp_path / "x.png").exists()
    assert re.search(r'^plot = \["matplotlib', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"), [(["none.jsonl"], "cannot be read"), (["--plot", "x.gif"], "is drawn as .png, .svg or .pdf")]
)
def test_misuse_exits_with_2(log: Path, arguments: list[str], said: str) -> None:
    done = run(log, *arguments)
    assert done.returncode == 2 and said in done.stderr.replace("\n", " ")


def test_it_needs_no_torch(log: Path) -> None:
    code = (
        "import sys, pathlib; from zeroelastic.cli.jobs import timeline; timeline([pathlib.Path(sys.argv[1])])\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(log)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.endswith("set()\n")
