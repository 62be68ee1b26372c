"""A training job over worlds, as one process of it: ``worlds_job.py DIRECTORY``. What it sees goes to DIRECTORY/seen.

JOB in the environment has its settings as JSON: ``steps``, what a ``training.Job`` takes, and ``die``: the phase of a
change at which this process kills itself, once there is a file DIRECTORY/armed.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def die_at(phase: str, directory: Path) -> None:
    """Kill this process when it comes to a phase of the next change."""
    from zeroelastic.deepspeed import process_world
    from zeroelastic.deepspeed.resize import restore
    from zeroelastic.elastic.resize import job, membership, world

    changing = [False]

    def killed_in(function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if changing[0] and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if changing[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    decide = world.Changes.change

    def change(self: Any, *, leaves: bool) -> bool:
        changes = decide(self, leaves=leaves)
        changing[0] = self.following is not None and (directory / "armed").exists()
        if phase == "decided" and changing[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return changes

    world.Changes.change = change
    first = membership.Membership.first

    def came(self: Any) -> Any:
        found = first(self)
        changing[0] = bool(found.previous) and (directory / "armed").exists()
        return found

    membership.Membership.first = came
    places: dict[str, tuple[Any, str, bool]] = {
        "holding": (restore, "leave_world", False),
        "held": (restore, "leave_world", True),
        "meeting": (membership.Membership, "meet", False),
        "groups": (process_world, "begin_world", True),
        "built": (job, "build_engine", True),
        "peers": (job.Job, "_peers", True),
        "moving": (restore, "move", False),
        "moved": (restore, "move", True),
    }
    if phase in places:
        owner, name, after = places[phase]
        setattr(owner, name, killed_in(getattr(owner, name), after=after))


def main(directory: Path) -> None:
    settings = json.loads(os.environ["JOB"])
    import torch
    import torch.distributed as dist
    from training import Job, build_engine, ds_config, look, train_step

    from zeroelastic.elastic import ElasticDistributedSampler, every
    from zeroelastic.elastic.resize.job import worlds

    if "die" in settings:
        die_at(settings["die"], directory)
    if settings.get("fixed"):
        from zeroelastic.deepspeed.resize import restore

        restore.why_fixed = lambda engine: "a test says so"
    job = Job(
        stage=settings["stage"],
        options=settings["options"],
        extra=settings.get("extra", ""),
        optimizer=settings.get("optimizer", "adamw"),
    )

    def build() -> Any:
        """With ``partitioned``, a model of so many columns is partitioned while it is made, and left."""
        note(generator=hashlib.sha256(repr(random.getstate()).encode()).hexdigest())
        if columns := settings.get("partitioned"):
            import deepspeed

            with deepspeed.zero.Init(config_dict_or_path=ds_config(job)):
                torch.nn.Linear(3, columns)
        return build_engine(job)

    def note(**entry: Any) -> None:
        line = json.dumps({"node": settings["node"], "time": time.monotonic(), **entry}) + "\n"
        with open(directory / "seen", "ab", buffering=0) as file:
            file.write(line.encode())

    def state(engine: Any) -> str:
        return hashlib.sha256(repr([sorted(part.items()) for part in look(engine)]).encode()).hexdigest()

    data = ElasticDistributedSampler(range(2000), job.batch, seed=4)

    faulthandler.register(signal.SIGUSR2, all_threads=True)
    note(pid=os.getpid())
    atexit.register(lambda: note(groups_at_exit=dist.is_initialized()))
    for world in worlds(
        build,
        directory / "ckpt",
        data=data,
        client_state=lambda: {"note": "hello", "of": settings["node"]},
        saving=every(steps=settings.get("save", 1000)),
        log=directory / "events.jsonl",
    ):
        with world as engine:
            first = dist.get_rank() == 0
            found = state(engine)
            report = None if world.report is None else [world.report.seconds, world.report.bytes_moved]
            if first:
                note(begin=engine.global_steps, size=dist.get_world_size(), state=found, tier=world.start.tier,
                     report=report)  # fmt: skip
            own = world.start.client_state.get("of")
            note(member=engine.global_steps, size=dist.get_world_size(), position=data.global_step, own=own)
            save_at = (
                engine.global_steps + 2 if world.start.tier == "memory" and settings.get("save_after_death") else -1
            )
            while engine.global_steps < settings["steps"]:
                if settings.get("raise") == engine.global_steps:
                    raise ValueError("a mistake of the script")
                random.random()
                loss = train_step(engine, engine.global_steps)
                world.log.step(loss)
                found = state(engine)
                if first:
                    note(step=engine.global_steps, size=dist.get_world_size(), loss=loss, state=found)
                if engine.global_steps == save_at:
                    gathered, tag = look(engine)[1], world.save()
                    if first:
                        note(saved=tag, size=dist.get_world_size(), gathered=gathered)
                time.sleep(settings.get("pause", 0.1))
                if world.ends() or settings.get("break") == engine.global_steps:
                    break
            if world.stopped:
                gathered = look(engine)[1]
                note(gathered=gathered)
        if settings.get("break") is not None and world.changes is not None and world.changes.following is None:
            break  # out of the loop over worlds, too
    note(end=True, stopped=world.stopped, saves=world.saves)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
