"""A job that changes size without starting again: what its agents pass to their workers, by an environment variable.

``elastic.resize.rendezvous`` sets the variable, ``elastic.resize.membership`` reads it. Elsewhere it is asked whether
this process is a worker of such a job, and whether it has joined its world.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from _zeroelastic_hook import IN_PLACE
from zeroelastic.errors import ConfigError

VARIABLE = IN_PLACE
"""An environment variable that the rendezvous sets in workers: an ``InPlace`` as JSON."""
BACKEND = "zeroelastic-in-place"

_joined = False
"""Whether this process has joined a world of its job."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """The store of a job, the node of this process, which is one start of the workers of an agent, and the settings.

    The settings of ``--rdzv-conf`` are in seconds. ``join_timeout``: how long a worker waits for a world that it is in.
    ``last_call_timeout``: how long the first world waits for more nodes once there are enough. ``heartbeat_interval``:
    how often each worker tells the store that it lives, and how often rank 0 looks for newcomers; one that was silent
    for ``heartbeat_timeout`` counts as dead. ``failure_timeout``: how long the members of a world wait for one that
    lives and does not come. ``store_timeout``: how long a running world goes on while the store does not answer.
    ``close_timeout``: how long the agent that hosts the store waits at the end for the other nodes. ``notice``: how
    long a worker has to leave once it was asked to.
    """

    host: str
    port: int
    job: str
    node: int
    min_nodes: int
    max_nodes: int
    join_timeout: float = 600.0
    last_call_timeout: float = 1.0
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 5.0
    failure_timeout: float = 60.0
    store_timeout: float = 30.0
    close_timeout: float = 300.0
    notice: float = 30.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a setting that cannot be."""
        for name in TIMES:
            seconds(name, getattr(self, name))
        if self.heartbeat_timeout < 3 * self.heartbeat_interval:
            raise ConfigError(
                f"--rdzv-conf: heartbeat_timeout is {self.heartbeat_timeout:g} and heartbeat_interval "
                f"{self.heartbeat_interval:g}; a worker that is late once would count as dead. Make heartbeat_timeout "
                "3 times heartbeat_interval or more."
            )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"--nnodes is {self.min_nodes}:{self.max_nodes}; it is MIN:MAX with 1 <= MIN <= MAX. Change it."
            )

    def to_environment(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> InPlace | None:
        """What the variable says; None where it is not set. Raises ConfigError for a value that no agent has set."""
        text = environment.get(VARIABLE, "")
        if not text:
            return None
        try:
            found = json.loads(text)
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{VARIABLE} is {text[:200]!r}, which is not what torchrun --rdzv-backend={BACKEND} sets "
                f"({type(error).__name__}: {error}). Do not set the variable."
            ) from error


TIMES = {field.name: field.default for field in fields(InPlace) if isinstance(field.default, float)}
"""The settings of ``--rdzv-conf``, and what they are by default."""


def seconds(name: str, given: object) -> float:
    """A setting as a number of seconds. Raises ConfigError."""
    try:
        found = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"--rdzv-conf: {name} is {given!r}; it has to be a number of seconds above 0. Change it.")
    return found


def note_joined() -> None:
    """This process is in a world of its job from now on."""
    global _joined
    _joined = True


def refuse_outside_of_worlds(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError in a worker of a job that changes size in place and that has joined no world of it.

    Each node would train a job of its own otherwise, and all of them would save to one directory.
    """
    if environment.get(VARIABLE) and not _joined:
        raise ConfigError(
            f"torchrun runs with --rdzv-backend={BACKEND}, which starts each node by itself, and this script does not "
            "join the other nodes. Build the engine inside zeroelastic.elastic.worlds, which makes the process groups, "
            "or use another rendezvous backend, such as --rdzv-backend=c10d."
        )


def guard(torch_distributed: Any) -> None:
    """Have ``init_process_group`` of this module refuse scripts that make a process group for their node alone.

    It would try to serve the store of the job a second time, or train a job of its own.
    """
    made = torch_distributed.init_process_group

    @functools.wraps(made)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        refuse_outside_of_worlds()
        return made(*args, **kwargs)

    torch_distributed.init_process_group = init_process_group
    torch_distributed.distributed_c10d.init_process_group = init_process_group
