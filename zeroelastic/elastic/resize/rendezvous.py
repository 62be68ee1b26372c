"""A rendezvous for torchrun that starts each node by itself: the workers meet, and running ones stay when others come.

    torchrun --nnodes=1:4 --rdzv-backend=zeroelastic-in-place --rdzv-endpoint=HOST:29400 --rdzv-id=JOB ... train.py

torch's agent stops its workers when nodes wait to join, so here none ever wait: to each agent its node is a group of
its own. What it does for its own workers stays as it is: it starts them again when one fails, and passes SIGTERM on.
Their membership of the job (``elastic.resize.membership``) goes by the store at the endpoint and by an environment
variable. torchrun finds this by the entry point ``torchrun.handlers`` (``_zeroelastic_hook.rendezvous_in_place``).
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from _zeroelastic_hook import VARIABLE as ACTIVATION
from zeroelastic.elastic.resize.roster import Roster, Watch, connect
from zeroelastic.errors import ConfigError, MembershipError
from zeroelastic.in_place import BACKEND, TIMES, VARIABLE, InPlace, seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.elastic.rendezvous import RendezvousParameters

logger = logging.getLogger(__name__)

_OF_TORCH = ("is_host", "read_timeout", "timeout")
"""Settings of torch's own: the first two as for ``c10d``; torchrun always adds the last."""
_DEFAULT_PORT = 29400
_LOOK_S = 0.2


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of one agent, which hosts the store where the endpoint is its own. Raises ConfigError."""
    unknown = sorted(params.config.keys() - TIMES.keys() - set(_OF_TORCH))
    if unknown:
        raise ConfigError(
            f"--rdzv-conf: {', '.join(unknown)} is not known to --rdzv-backend={BACKEND}. Leave it out, or take one of "
            f"{', '.join((*TIMES, *_OF_TORCH[:2]))}."
        )
    if os.environ.get(ACTIVATION) == "0":
        raise ConfigError(
            f"{ACTIVATION} is 0, and --rdzv-backend={BACKEND} needs it to refuse scripts that would train one job on "
            "each node. Leave the variable out."
        )
    times = {name: seconds(name, params.get(name, default)) for name, default in TIMES.items()}
    connect_s = seconds("read_timeout", params.get("read_timeout", 60))
    return _Handler(params, times, connect_s)


class _Handler(RendezvousHandler):
    """Gives the workers of this agent a node number at each start, and says in the store when they have ended."""

    def __init__(self, params: RendezvousParameters, times: dict[str, float], connect_s: float) -> None:
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        self._host, self._port = parse_rendezvous_endpoint(params.endpoint, default_port=_DEFAULT_PORT)
        self._job, self._connect_s = params.run_id, connect_s
        self._settings = InPlace(self._host, self._port, params.run_id, -1, params.min_nodes, params.max_nodes, **times)
        server = self._serve(params)
        self._hosts = server is not None
        if server is not None:
            self._port = server.port
        self._tcp = self._connect() if server is None else server
        self._fresh = True
        self._roster = Roster(self._store_of_job)
        self._roster.open()
        self._node: int | None = None

    def get_backend(self) -> str:
        """The name that it was asked for by."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """A group of this node alone, at once; the workers of the start before have ended."""
        self._end()
        if self._node is None:
            atexit.register(self._end)  # a signal ends the agent without a word to its rendezvous
        self._node = self._roster.new_node()
        passed = replace(self._settings, port=self._port, node=self._node)
        os.environ[VARIABLE] = passed.to_environment()
        os.environ[ACTIVATION] = "1"
        store = PrefixStore(f"zeroelastic/{self._job}/agent/{self._node}", self._tcp)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._host, self._port))

    def is_closed(self) -> bool:
        """Never: a job ends when its workers end."""
        return False

    def set_closed(self) -> None:
        """Nothing: see ``is_closed``."""

    def num_nodes_waiting(self) -> int:
        """None, as far as the agent is concerned: it would stop its workers. Those let newcomers in themselves."""
        return 0

    def get_run_id(self) -> str:
        """The job."""
        return self._job

    def shutdown(self) -> bool:
        """The workers have ended for good. Where the store is here, wait for those of other nodes."""
        self._end()
        if self._hosts:
            self._wait_for_others()
        return True

    def _end(self) -> None:
        """Say that the workers of this node have ended, so that the others need not wait for them."""
        if self._node is not None:
            self._roster.try_to_end(f"n{self._node}")

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self._settings.close_timeout
        watch = Watch(self._settings.heartbeat_timeout, max(1.0, 2 * self._settings.heartbeat_interval))
        left: set[int] = set()
        said = False
        with suppress(MembershipError):
            while time.monotonic() < deadline:
                now = self._roster.read(watch, left)
                members = {member for node in now.nodes for member in node.members}
                left = {member for member in members - now.ended if not watch.silent(member)}
                if not left:
                    return
                if not said:
                    logger.warning("this node hosts the store of the job: waiting for %d workers of others", len(left))
                    said = True
                time.sleep(_LOOK_S)
            logger.warning("%d workers still run; the store of the job ends now (close_timeout)", len(left))

    def _serve(self, params: RendezvousParameters) -> TCPStore | None:
        """The store, if it is for this agent to host: if so configured, or the endpoint is this machine and free."""
        from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

        configured = params.get_as_bool("is_host")
        if configured is False or (configured is None and not _matches_machine_hostname(self._host)):
            return None
        try:
            return TCPStore(self._host, self._port, is_master=True, multi_tenant=True, wait_for_workers=False)
        except RuntimeError as error:  # another agent on this machine was the first
            if configured:
                raise ConfigError(
                    f"the store of the job cannot listen on {self._host}:{self._port}, as --rdzv-conf=is_host=1 asks: "
                    f"{error}. Give --rdzv-endpoint a port that is free."
                ) from error
            return None

    def _connect(self) -> TCPStore:
        """A connection to the store. Raises MembershipError where it does not answer."""
        return connect(self._host, self._port, self._connect_s, setting="read_timeout")

    def _store_of_job(self) -> Store:
        """What the workers use too; over another connection where the one there was is lost."""
        if not self._fresh:
            self._tcp = self._connect()
        self._fresh = False
        return PrefixStore(f"zeroelastic/{self._job}/job", self._tcp)
