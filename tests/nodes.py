"""Nodes with disks of their own, played by ranks: the same path leads each rank to the directory of its node.

That takes a mount namespace in each rank's process and a bind mount in it, so it takes root on Linux.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


MOUNTS_NEED = "mount namespaces are not permitted here; they take root"


def can_mount() -> bool:
    """Whether a process may have mounts of its own."""
    done = subprocess.run(
        ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"], capture_output=True, check=False, timeout=20
    )
    return done.returncode == 0


class Nodes:
    """Disks of nodes below a directory; ``path`` is where each node sees its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = str(root / "disk")
        Path(self.path).mkdir(parents=True)

    def disk(self, node: int) -> Path:
        """What a node sees at ``path``, from outside of it."""
        disk = self.root / f"node{node}"
        disk.mkdir(exist_ok=True)
        return disk


def on_nodes(nodes: Nodes, placed: Sequence[int], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run ``call`` on this rank with the disk of node ``placed[rank]`` mounted."""
    rank = dist.get_rank()
    node = placed[rank]
    os.environ["LOCAL_RANK"] = str(list(placed[:rank]).count(node))
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    check(libc.mount(bytes(nodes.disk(node)), nodes.path.encode(), None, _MS_BIND, None))
    return call(*args, **options)
