"""Short sequences, each of which once ended with a state that was lost, mixed or given up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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


def _while_saved(moments: Iterable[int], **how: Any) -> Sequence:
    """A job loads a tag again and again, and another one saves it again in the middle, each time at another moment."""
    during = {"reader": "b", "writer": "a", "directory": "/home/run", "tag": "last", **how}
    each = [[_train("a"), ("load_during_save", {**during, "at": at})] for at in moments]
    return [_start("a"), _start("b"), _save("a", "last"), *itertools.chain.from_iterable(each)]


_EACH_STEP: dict[str, Any] = {"options": {"memory": {"every": 1}}}


def _crash(*script: str) -> tuple[str, dict[str, Any]]:
    return "preempt", {"job": "a", "directory": "run", "script": [*([what] for what in script), ["die"], ["train"]]}


LATER: dict[str, Sequence] = {
    "a flipped bit in memory, and nothing on disk": [
        ("start", {"job": "a", "world_size": 2, **_EACH_STEP}),
        _crash("train", "train"),
        ("damage_memory", {"job": "a"}),
        ("start", {"job": "a", "world_size": 2, **_EACH_STEP}),
        ("resume", {"job": "a"}),
    ],
    "two engines in one directory, each of which keeps one": [
        ("start", {"job": "a", "world_size": 2, "options": {"keep": 1}}),
        ("start", {"job": "a_D", "world_size": 0, "options": {"keep": 1}}),
        _save("a", "G_1", directory="/home/run"),
        _save("a_D", "D_1", directory="/home/run"),
        _train("a"),
        _train("a_D"),
        _save("a", "G_2", directory="/home/run"),
        _save("a_D", "G_2", directory="/home/run"),
        _save("a_D", "D_2", directory="/home/run"),
        ("prune", {"directory": "/home/run", "keep": 1}),
        ("resume", {"job": "a"}),
        ("resume", {"job": "a_D"}),
    ],
    "a save in the background that is committed after newer checkpoints in memory": [
        ("start", {"job": "a", "world_size": 2, **_EACH_STEP}),
        _crash("train", "slow", "train", "train", "release"),
        ("start", {"job": "a", "world_size": 1, **_EACH_STEP}),
        ("resume", {"job": "a"}),
    ],
    "a signal to the process group, workers of a loader in it": [
        _start("a", 2),
        ("preempt", {"job": "a", "script": [["train"], ["group", 0], ["train"]], "workers": 1}),
        _start("a"),
        ("resume", {"job": "a"}),
    ],
}
"""The same of memory, of two engines, of jobs that change size in place, and of workers."""

FOUND: dict[str, Sequence] = {
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
    "a tag of two parts": [_start("a"), _save("a", "epoch1/step5"), ("resume", {"job": "a"})],
    "a tag with a no-break space": [
        _start("a"),
        _save("a", "a\u00a0b"),
        ("load", {"job": "a"}),
        ("resume", {"job": "a"}),
    ],
    "a tag that begins with a dot": [_start("a"), _save("a", ".hidden"), ("resume", {"job": "a"})],
    "a tag of no name": [_start("a"), _save("a", ""), ("resume", {"job": "a"})],
    "tags that share 200 bytes, one saved in the background": [
        _start("a"),
        _start("b"),
        _save("a", f"{_LONG}-1", background=True, hold=1),
        _save("b", f"{_LONG}-2"),
        ("wait", {"job": "a"}),
    ],
    "client state with a step": [_start("a"), _save("a", client_state={"global_steps": 7}), ("load", {"job": "a"})],
    "client state with a number of ranks": [
        _start("a"),
        _save("a", client_state={"mp_world_size": 7}),
        ("load", {"job": "a"}),
    ],
    "client state with shapes": [_start("a"), _save("a", client_state={"param_shapes": 7}), ("load", {"job": "a"})],
    "a parameter frozen after initialize": [
        _start("a"),
        _train("a"),
        ("freeze", {"job": "a", "frozen": True}),
        _save("a"),
        _start("b", 2),
        ("resume", {"job": "b"}),
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
    "a tag saved again while a job resumes from it": _while_saved(range(4, 37, 4), resume=True),
    "a tag saved again while a job loads it": _while_saved(range(5, 36, 4)),
    "the same, where no payload is verified": _while_saved(range(5, 17), verify="quick"),
    "the same, where nothing is verified": _while_saved(range(5, 17, 3), verify="off"),
    "a tag saved again while the ranks of a load look at its files": [
        _start("a", 2),
        _start("b", 2),
        _save("a", "last"),
        ("load_during_save", {"reader": "b", "writer": "a", "directory": "/home/run", "tag": "last", "at": 2}),
    ],
}
