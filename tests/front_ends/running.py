"""Runs a front end in its own environment on this machine's CPU, and tells what it trained on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from front_ends.commands import FRONT_ENDS, HERE, Run

ROOT = HERE.parent.parent
ENVIRONMENTS = Path(os.environ.get("FRONT_ENDS", ROOT / ".venv/front-ends"))
ON = {"ZEROELASTIC": "1", "ZEROELASTIC_KEEP_GLOBAL_BATCH": "1"}
"""What a user adds."""


@dataclass(frozen=True)
class Outcome:
    """What was seen of a run: ``samples`` and ``losses`` by optimizer step, and what zeroelastic printed."""

    status: int
    samples: dict[int, list[int]]
    losses: dict[int, float]
    said: list[str]
    log: Path

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def environment_of(name: str) -> Path:
    return ENVIRONMENTS / FRONT_ENDS[name].environment


def run_front_end(name: str, run: Run, *, env: dict[str, str] | None = None, limit_s: float = 500.0) -> Outcome:
    """One run; ``env`` are further environment variables, ``ON`` where it is left out."""
    folder = environment_of(name)
    command = FRONT_ENDS[name].command(run)
    trace = run.out.with_suffix(".trace")
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir(parents=True)
    log = run.out.with_suffix(".log")
    program = folder / "bin" / (command.program or "python")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("ZEROELASTIC", "COVERAGE"))},
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "cpu", HERE / "cpu/stand_ins" / folder.name))),
        "FRONT_END_CPU": "1",
        "FRONT_END_TRACE": str(trace),
        "MASTER_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(run.task / "cache"),
        "MODELSCOPE_CACHE": str(run.task / "cache"),
        "WANDB_MODE": "disabled",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **command.env,
        **(ON if env is None else env),
    }
    with open(log, "wb") as out:
        started = subprocess.Popen(
            [str(program), *command.arguments],
            env=settings,
            cwd=run.task,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = started.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            status = started.wait()
    text = log.read_text(errors="replace")
    lines = text.replace(f"{run.out.parent}/", "").splitlines()
    said = [line[line.index("[zeroelastic]") :] for line in lines if "[zeroelastic]" in line]
    rows = [row for path in sorted(trace.glob("*.jsonl")) for row in map(json.loads, path.read_text().splitlines())]
    return Outcome(status, _samples(rows), _losses(run, rows), said, log)


def _samples(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The samples of all ranks by step. A sample that came in two micro batches of a step is there twice."""
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(row["step"], []).extend(row.get("samples", []))
    return {step: sorted(found[step]) for step in sorted(found)}


def _losses(run: Run, rows: list[dict[str, Any]]) -> dict[int, float]:
    """The losses by step: as traced, else as the Trainer logged them, from the last checkpoint that was written."""
    traced: dict[int, list[float]] = {}
    for row in rows:
        if "loss" in row:
            traced.setdefault(row["step"], []).append(row["loss"])
    if traced:
        return {step: sum(losses) / len(losses) for step, losses in traced.items()}
    written = sorted(run.out.rglob("checkpoint-*"), key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
    if not written or not (written[-1] / "trainer_state.json").exists():
        return {}
    state = json.loads((written[-1] / "trainer_state.json").read_text())
    return {row["step"]: float(row["loss"]) for row in state["log_history"] if "loss" in row}


def take_checkpoint(name: str, before: Run, step: int, out: Path) -> Path:
    """Copy one checkpoint of a run to where the next run of the front end will look for it."""
    place = FRONT_ENDS[name].saves.format(step)
    shutil.copytree(before.out / place, out / place)
    if place != f"checkpoint-{step}":  # a directory of DeepSpeed's own
        (out / place).with_name("latest").write_text(f"global_step{step}")
    return out / place
