"""A worker of a job that changes size in place, without a model: it says what it sees, and follows its world.

    torchrun ... in_place_worker.py DIRECTORY

Its lines go to ``DIRECTORY/log``. It ends well when ``DIRECTORY/stop`` or ``DIRECTORY/stop-NODE`` exists. Rank 0 takes
in newcomers and lets those leave that got SIGTERM; a worker that has died is noticed by its heartbeat.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from zeroelastic.elastic.resize.membership import Membership
from zeroelastic.elastic.resize.roster import World

DIRECTORY = Path(sys.argv[1])
LIMIT_S = 120.0


def say(event: str, **facts: object) -> None:
    line = json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n"
    with open(DIRECTORY / "log", "a") as log:
        log.write(line)


def main() -> None:
    member = Membership.of_this_process()
    assert member is not None
    leaving = DIRECTORY / f"leaving-{member.number}"

    def leave(*_: object) -> None:
        say("SIGTERM", number=member.number)
        leaving.touch()

    signal.signal(signal.SIGTERM, leave)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    say("start", number=member.number, node=member.node, restarts=restarts, on=os.environ["ZEROELASTIC"])
    world = member.first()
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        say("world", number=member.number, world=world.number, members=world.members)
        if member.number not in world.members:
            sys.exit(1)  # to be started again
        following = next_world(member, world) if member.meet(world) else member.after_failure(world)
        if following is None:
            break
        world = following
    member.leave()


def next_world(member: Membership, world: World) -> World | None:
    """Train until there is another world; None when this worker has left it or the job has ended."""
    while True:
        time.sleep(0.05)
        if (DIRECTORY / "stop").exists() or (DIRECTORY / f"stop-{member.node}").exists():
            return None
        if member.number == world.members[0]:
            gone = [one for one in world.members if (DIRECTORY / f"leaving-{one}").exists()]
            newcomers = member.waiting(gone)
            if gone or newcomers:
                stay = [one for one in world.members if one not in gone]
                member.decide(World(world.number + 1, (*stay, *newcomers), world.members))
        found = member._roster.read().world
        assert found is not None
        if found.number > world.number:
            return found if member.number in found.members else None
        if any(one != member.number for one in member.died(world.members)):
            return member.after_failure(world)


if __name__ == "__main__":
    main()
