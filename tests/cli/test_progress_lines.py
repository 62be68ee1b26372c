"""Progress where stderr is no terminal: a line every 10 s with share, rate and time left, from every long verb."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from programs import run_command
from rich.console import Console
from sample import write_sample

from zeroelastic.cli import terminal
from zeroelastic.cli.terminal import progress_line

LINE = re.compile(r"^[\w *.:-]+: \d+% of [\d.]+ \w+, [\d.]+ \w+/s(, [\d.]+ (s|min|h) left)?$", re.MULTILINE)

VERBS = {
    "verify": ["ckpt"],
    "reshard": ["ckpt", "out", "-n", "3"],
    "export": ["ckpt", "out"],
    "convert": ["ckpt", "out", "--to", "fsdp2"],
    "diff": ["ckpt/global_step2", "ckpt/global_step4"],
    "latest": ["ckpt"],
    "prune": ["ckpt", "--keep", "1", "--yes"],
}


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint, and clocks by which every piece of work takes 11 seconds."""
    write_sample(tmp_path / "ckpt")
    ticks = count(1000, 11)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(ticks)))
    yield tmp_path


@pytest.mark.parametrize("verb", VERBS)
def test_a_log_gets_a_line_now_and_then(ckpt: Path, verb: str) -> None:
    done = run_command(verb, *VERBS[verb], cwd=ckpt)
    assert done.returncode == (verb == "diff") and LINE.search(done.stderr), done.stderr
    assert not LINE.search(done.stdout)


@pytest.mark.parametrize("verb", VERBS)
def test_quiet_verbs_say_nothing(ckpt: Path, verb: str) -> None:
    done = run_command(verb, *VERBS[verb], "--quiet", cwd=ckpt)
    assert done.returncode == (verb == "diff") and done.stderr == ""


def test_the_bar_has_its_rate_in_the_units_of_its_size() -> None:
    bar = terminal._start_bar("verify", 12 << 30, 3 << 30, "102 MiB/s")
    console = Console(width=120, file=io.StringIO())
    console.print(bar.get_renderable())
    bar.stop()
    assert re.search(r"verify .* 3.0/12.0 GiB 102 MiB/s", console.file.getvalue())


def test_what_takes_a_moment_says_nothing(tmp_path: Path) -> None:
    write_sample(tmp_path / "ckpt")
    assert run_command("verify", tmp_path / "ckpt").stderr == ""


@pytest.mark.parametrize(
    ("done", "nbytes", "seconds", "line"),
    [
        (3 << 30, 12 << 30, 30.0, "verify: 25% of 12 GiB, 102 MiB/s, 90 s left"),
        (1 << 20, 1 << 30, 10.0, "verify: 0% of 1 GiB, 102 KiB/s, 2.8 h left"),
        (1 << 30, 1 << 30, 10.0, "verify: 100% of 1 GiB, 102 MiB/s"),
        (2 << 30, 1 << 30, 10.0, "verify: 100% of 1 GiB, 205 MiB/s"),
        (0, 1 << 30, 10.0, "verify: 0% of 1 GiB, 0 B/s"),
        (0, 0, 10.0, "verify: 100% of 0 B, 0 B/s"),
    ],
)
def test_a_line_has_share_rate_and_time_left(done: int, nbytes: int, seconds: float, line: str) -> None:
    assert progress_line("verify", done, nbytes, seconds) == line
