"""A rendezvous for torchrun that forms a new group of nodes within a second or two of a loss.

    torchrun --rdzv-backend=zeroelastic --rdzv-endpoint=HOST:29400 --rdzv-conf=last_call_timeout=0.5 ...

It is torch's own ``c10d`` rendezvous (``torch.distributed.elastic.rendezvous``) with shorter times, which may be
fractions of a second: torch's are whole seconds, and it looks for changes once a second. torchrun finds it by the entry
point ``torchrun.handlers`` of the package (``_zeroelastic_hook.rendezvous``).

Source: ``create_handler`` and ``_DistributedRendezvousOpExecutor.run`` of ``dynamic_rendezvous`` (torch 2.13).
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING

from zeroelastic.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "zeroelastic"

DEFAULTS = {
    "join_timeout": 600.0,
    "last_call_timeout": 1.0,
    "close_timeout": 30.0,
    "heartbeat_timeout": 5.0,
    "keep_alive_interval": 0.5,
    "keep_alive_max_attempt": 6.0,
    "poll_interval": 0.2,
}
"""The settings of ``--rdzv-conf`` in seconds; ``keep_alive_max_attempt`` is a number of intervals.

``last_call_timeout``: how long nodes wait for more once there are enough. A node that was not heard of for
``keep_alive_interval`` times ``keep_alive_max_attempt`` counts as lost. ``poll_interval``: how often each node looks.
"""


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of one agent. Raises ConfigError for a setting that is no number of seconds."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    seconds = {name: _seconds(params, name) for name in DEFAULTS}
    _poll_every(seconds["poll_interval"])
    backend, store = create_backend(params)

    class Handler(dynamic_rendezvous.DynamicRendezvousHandler):
        """Torch's, under the name that it was asked for by."""

        def get_backend(self) -> str:
            return BACKEND

    made: RendezvousHandler = Handler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        dynamic_rendezvous.RendezvousTimeout(
            join=timedelta(seconds=seconds["join_timeout"]),
            last_call=timedelta(seconds=seconds["last_call_timeout"]),
            close=timedelta(seconds=seconds["close_timeout"]),
            heartbeat=timedelta(seconds=seconds["heartbeat_timeout"]),
        ),
        keep_alive_interval=seconds["keep_alive_interval"],  # type: ignore[arg-type]  # a timedelta is made of it
        keep_alive_max_attempt=math.ceil(seconds["keep_alive_max_attempt"]),
    )
    return made


def _seconds(params: RendezvousParameters, name: str) -> float:
    given = params.get(name, DEFAULTS[name])
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"--rdzv-conf: {name} is {given!r}; it has to be a number above 0. Change it.")
    return found


def _poll_every(interval: float) -> None:
    """Let this process, an agent with one rendezvous, look for changes so often; torch waits a second in between."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    original = getattr(dynamic_rendezvous, "_delay", None)
    if original is None:  # of another torch: it looks once a second
        return

    def delay(seconds: float | tuple[float, float]) -> None:
        original(interval if seconds == 1 else seconds)

    vars(dynamic_rendezvous)["_delay"] = delay
