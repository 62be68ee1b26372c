"""Messages between a worker and the warm process of its node: JSON over a Unix socket, length first."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zeroelastic import in_place

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20

PER_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}
    | {in_place.VARIABLE}
)
"""Variables that a launcher sets anew for each worker or each start."""
_PER_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "NCCL_ASYNC")
_OF_THE_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})


def is_per_rank(name: str) -> bool:
    """Whether launchers set this environment variable anew for each worker or each start."""
    return name in PER_RANK or name.startswith(_PER_RANK_PREFIXES)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that modules may have looked at while they were imported: all but those of ranks and shells."""
    return {name: value for name, value in environment.items() if not is_per_rank(name) and name not in _OF_THE_SHELL}


@dataclass(frozen=True, slots=True)
class Request:
    """A worker to start: the arguments of ``zeroelastic.run``, and what else it would have got from the launcher.

    ``target`` is the script among the arguments, or the module where ``is_module``. Standard input, output and error
    travel beside the request.
    """

    arguments: list[str]
    target: str
    is_module: bool
    directory: str
    environment: dict[str, str]
    processors: list[int]
    umask: int

    @classmethod
    def of_this_process(cls, arguments: list[str], target: str, *, is_module: bool) -> Request:
        """A worker like this process."""
        umask = os.umask(0o077)
        os.umask(umask)
        processors = sorted(os.sched_getaffinity(0))
        return cls(arguments, target, is_module, os.getcwd(), dict(os.environ), processors, umask)

    @property
    def source_directory(self) -> str:
        """Where the worker finds modules that are not installed: beside its script, or where it is started."""
        return self.directory if self.is_module else os.path.dirname(os.path.join(self.directory, self.target))

    def to_message(self) -> dict[str, Any]:
        """As ``send`` takes it."""
        return asdict(self)


def send(connection: socket.socket, message: Mapping[str, Any], files: tuple[int, ...] = ()) -> None:
    """Send a message, with copies of file descriptors. Raises OSError."""
    data = json.dumps(message).encode()
    header = _LENGTH.pack(len(data))
    if files:
        socket.send_fds(connection, [header], files)
    else:
        connection.sendall(header)
    connection.sendall(data)


def receive(connection: socket.socket, max_files: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its file descriptors; None at the end of the connection. Raises OSError."""
    if max_files:
        header, files, _, _ = socket.recv_fds(connection, _LENGTH.size, max_files)
    else:
        header, files = connection.recv(_LENGTH.size), []
    try:
        header += _exactly(connection, _LENGTH.size - len(header)) if header else b""
        if not header:
            return None
        (nbytes,) = _LENGTH.unpack(header)
        if nbytes > _MAX_BYTES:
            raise OSError(f"a message of {nbytes} bytes")
        return json.loads(_exactly(connection, nbytes)), files
    except (OSError, ValueError) as error:
        for file in files:
            os.close(file)
        raise OSError(f"no message: {error}") from error


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = connection.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise OSError("it ended in the middle")
        data += part
    return bytes(data)
