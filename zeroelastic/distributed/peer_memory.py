"""Copies memory from other processes of this machine, where the kernel lets it, in place of sending it by sockets.

Linux copies between two processes of a user at the speed of a plain copy (``process_vm_readv``; MPI libraries call it
cross-memory attach), in a third of the time that gloo takes for the same bytes. It refuses that where Yama or seccomp
restrict ptrace, and between containers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os

import torch
import torch.distributed as dist

from zeroelastic.distributed.process_identity import machine

_TOKEN_BYTES = 8


class _Range(ctypes.Structure):
    """A range of memory: the kernel's ``struct iovec``."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def gather_from_peers(whole: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Fill ``whole``, flat and in host memory: equal parts, of which each rank of the group has its own. Collective.

    Returns whether that was done, the same on all ranks. If not, the parts of other ranks are undefined, and this
    rank's own is as it was. ``group`` has a backend that reduces host memory.
    """
    rank, size = dist.get_rank(group=group), dist.get_world_size(group=group)
    part_bytes = whole.nbytes // size
    here = int.from_bytes(hashlib.sha256(machine().encode()).digest()[:8], "little", signed=True)
    # Machines that were cloned have one name: there, a process of the same id may be another, which lacks the token.
    token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.int64)
    table = torch.zeros(size, 5, dtype=torch.int64, device="cpu")
    own = [here, os.getpid(), int(token), token.data_ptr(), whole.data_ptr()]
    table[rank] = torch.tensor(own, device="cpu")
    dist.all_reduce(table, group=group)
    found = torch.zeros_like(token)
    done = bool((table[:, 0] == here).all())
    for number in ((rank + step) % size for step in range(1, size)):
        _, process, expected, token_address, address = table[number].tolist()
        begin = number * part_bytes
        done = (
            done
            and _copy(process, token_address, found.data_ptr(), _TOKEN_BYTES)
            and int(found) == expected
            and _copy(process, address + begin, whole.data_ptr() + begin, part_bytes)
        )
    on_all = torch.tensor([int(done)], device="cpu")
    dist.all_reduce(on_all, op=dist.ReduceOp.MIN, group=group)  # and no rank changes its part before others have it
    return bool(on_all)


def _copy(process: int, src: int, dst: int, nbytes: int) -> bool:
    """Copy memory of another process to an address of this one; whether the kernel did all of it."""
    read = ctypes.CDLL(None).process_vm_readv
    read.restype = ctypes.c_ssize_t
    done = 0
    while done < nbytes:
        here, there = (ctypes.byref(_Range(begin + done, nbytes - done)) for begin in (dst, src))
        copied = read(process, here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0))
        if copied <= 0:
            return False
        done += copied
    return True
