"""Short sequences, each of which once ended with a state that was lost, mixed or given up."""

from __future__ import annotations

from typing import Any

Sequence = list[tuple[str, dict[str, Any]]]

_LONG = "x" * 200


def _start(job: str, world_size: int = 1) -> tuple[str, dict[str, Any]]:
    return "start", {"job": job, "world_size": world_size}


def _save(job: str, tag: str | None = None, **how: Any) -> tuple[str, dict[str, Any]]:
    return "save", {"job": job, "tag": tag, **how}


def _train(job: str, steps: int = 1) -> tuple[str, dict[str, Any]]:
    return "train", {"job": job, "steps": steps}


def _killed(how: str, at: int) -> tuple[str, dict[str, Any]]:
    return "kill", {"job": "a", "moment": "resume", "how": how, "at": at}


_EACH_STEP: dict[str, Any] = {"options": {"memory": {"every": 1}}}


def _crash(*script: str) -> tuple[str, dict[str, Any]]:
    return "preempt", {"job": "a", "directory": "run", "script": [*([what] for what in script), ["die"], ["train"]]}


FOUND: dict[str, Sequence] = {
    "a flipped bit in memory, and nothing on disk": [
        ("start", {"job": "a", "world_size": 2, **_EACH_STEP}),
        _crash("train", "train"),
        ("damage_memory", {"job": "a"}),
        ("start", {"job": "a", "world_size": 2, **_EACH_STEP}),
        ("resume", {"job": "a"}),
    ],
    "a save in the background that is committed after newer checkpoints in memory": [
        ("start", {"job": "a", "world_size": 2, **_EACH_STEP}),
        _crash("train", "slow", "train", "train", "release"),
        ("start", {"job": "a", "world_size": 1, **_EACH_STEP}),
        ("resume", {"job": "a"}),
    ],
    "a relative directory in the background, then chdir": [
        _start("a"),
        _save("a", "best", background=True, hold=1),
        ("chdir", {"job": "a", "to": "elsewhere"}),
        ("wait", {"job": "a"}),
    ],
    "the same, where another run has that tag": [
        _start("b"),
        _save("b", "best", directory="/elsewhere/run"),
        _start("a"),
        _train("a"),
        _save("a", "best", background=True, hold=1),
        ("chdir", {"job": "a", "to": "elsewhere"}),
        ("wait", {"job": "a"}),
    ],
    "tags that share 200 bytes, one saved in the background": [
        _start("a"),
        _start("b"),
        _save("a", f"{_LONG}-1", background=True, hold=1),
        _save("b", f"{_LONG}-2"),
        ("wait", {"job": "a"}),
    ],
    "a rollback, and a save at an earlier step than the last": [
        _start("a"),
        _save("a", "first"),
        _train("a", 2),
        _save("a"),
        ("load", {"job": "a", "tag": "first"}),
        _train("a"),
        _save("a"),
        ("latest_fix", {"directory": "/home/run"}),
        ("resume", {"job": "a"}),
    ],
    "a rollback within a preemption loop, and a signal at the step of the last save": [
        _start("a"),
        _save("a", "first"),
        ("preempt", {"job": "a", "script": [["train"], ["load", "first"], ["signal", 0], ["train"]], "every_steps": 1}),
        _start("a", 2),
        ("resume", {"job": "a"}),
    ],
    "a second signal after the block": [
        _start("a", 2),
        ("preempt", {"job": "a", "script": [["signal", 0], ["train"]], "signal_again": True}),
    ],
    "SIGTERM in two loads": [
        _start("a"),
        _save("a", "last"),
        _killed("sigterm", 20),
        _start("a"),
        _killed("sigterm", 20),
        _start("a"),
        ("resume", {"job": "a"}),
    ],
    "kill -9 in two loads of the only tag": [
        _start("a"),
        _save("a", "last"),
        _killed("kill", 20),
        _start("a"),
        _killed("kill", 20),
        _start("a"),
        ("resume", {"job": "a"}),
    ],
    "resume while the newest save is on its way": [
        _start("a"),
        _save("a", "one"),
        _train("a"),
        _save("a", "two", background=True, hold=1),
        ("resume", {"job": "a"}),
    ],
    "a rollback by latest --set, and a save after it": [
        _start("a"),
        _save("a", "one"),
        _train("a"),
        _save("a", "two"),
        ("latest_set", {"directory": "/home/run", "tag": "one"}),
        ("resume", {"job": "a"}),
        ("latest_fix", {"directory": "/home/run"}),
        ("resume", {"job": "a"}),
        _train("a"),
        _save("a"),
        ("resume", {"job": "a"}),
    ],
    "a first save that was killed, and a new start": [
        _start("a"),
        ("kill", {"job": "a", "moment": "save", "at": 11}),
        _start("a", 2),
        ("resume", {"job": "a"}),
    ],
    "a missing directory where one is required": [_start("a"), ("resume", {"job": "a", "required": True})],
    "a killed save, then a save of another tag": [
        _start("a"),
        ("kill", {"job": "a", "moment": "save", "tag": "last", "at": 11}),
        _start("a"),
        _save("a", "best"),
    ],
    "latest --fix beside a job that saves": [
        _start("a"),
        _save("a", "one"),
        _train("a"),
        ("latest_fix", {"directory": "/home/run", "job": "a", "tag": "two", "at": 5}),
    ],
    "prune beside a job that saves": [
        _start("a"),
        _save("a", "one"),
        _train("a"),
        _save("a", "two"),
        ("prune", {"directory": "/home/run", "job": "a", "tag": "one", "keep": 1, "at": 5}),
    ],
}
