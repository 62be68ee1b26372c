"""A connection to the store of a job, of which every request has a limit.

torch has a limit for connecting and for waiting for a key. A request whose answer is lost, as when the network is cut
in two, would wait until the kernel gives the connection up, in a quarter of an hour or never. So the socket itself gets
a limit, by SO_RCVTIMEO and SO_SNDTIMEO, at which torch raises DistNetworkError ("Socket Timeout"). It has none while
torch makes the connection and waits for a first answer: a thread breaks the connection then.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from zeroelastic.errors import MembershipError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_AGAIN_S = 0.1


def connect(host: str, port: int, limit_s: float, *, setting: str = "store_timeout") -> TCPStore:
    """Connect within ``limit_s``, of the ``--rdzv-conf`` of this name; each request may then take half of that.

    Raises MembershipError where no store answers.
    """
    from torch._C._distributed_c10d import TCPStore

    before = sockets_to(port).keys()
    half = timedelta(seconds=limit_s / 2)
    made = threading.Event()
    cuts = threading.Thread(target=_cut_off, args=(port, before, limit_s / 2, made), daemon=True)
    cuts.start()
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=half)  # torch tries twice
    except RuntimeError as error:
        raise MembershipError(
            f"the store of the job does not answer at {host}:{port} within {limit_s:g} s ({setting}): {error} If the "
            "job has ended, there is nothing to join. If not, look at the process that hosts the store "
            "(--rdzv-endpoint) and at the network between."
        ) from None
    finally:
        made.set()
        cuts.join()
    seconds, microseconds = divmod(int(limit_s / 2 * 1e6), 1_000_000)
    for name, descriptor in sockets_to(port).items():
        if name not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))
    return store


def _cut_off(port: int, but: Collection[str], limit_s: float, made: threading.Event) -> None:
    """Break connections to a port that were begun and not made within the limit, those of later tries included."""
    wait_s = limit_s
    while not made.wait(wait_s):
        wait_s = _AGAIN_S
        break_connections(port, [name for name in sockets_to(port) if name not in but])


def break_connections(port: int, names: Collection[str]) -> None:
    """End every wait in these connections to a port, in any thread, with an error."""
    for name, descriptor in sockets_to(port).items():
        if name in names:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def sockets_to(port: int) -> dict[str, int]:
    """The connections of this process to a port, by the kernel's name for each, with their descriptors."""
    found: dict[str, int] = {}
    for text in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{text}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(text))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                        found[name] = int(text)
    return found
