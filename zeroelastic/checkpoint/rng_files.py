"""Files of random number generators, as the Hugging Face Trainer and accelerate keep one per rank, for a new rank.

The generators that a rank's file holds (Python's, numpy's, torch's on the CPU and on GPUs) are seeded anew, each rank
with an own seed that follows from the checkpoint; everything else in the file stays. Torch's CPU generator is
the Mersenne Twister that numpy has, in a state of 5056 bytes (CPUGeneratorImpl.cpp, torch 2.13); a GPU's is 16 bytes,
seed and offset (CUDAGeneratorImpl.cpp).
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable

import numpy as np

from zeroelastic.torch_file.tree import Stub, TensorRef, new_storage, tensor

_CPU_BYTES, _GPU_BYTES = 5056, 16
_WORDS = 624


def derived_seed(identity: str, rank: int) -> int:
    """The seed of one rank's generators: 63 bits, another for each checkpoint and rank."""
    digest = hashlib.sha256(f"zeroelastic rng {identity} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reseed(root: object, seed: int) -> tuple[object, list[str]]:
    """Return the tree with every generator that is known seeded with ``seed``.

    With it the places of what looks like a generator of another kind, which kept the state that it had.
    """
    left: list[str] = []
    return _walk(root, seed, left, ""), left


def _walk(value: object, seed: int, left: list[str], where: str) -> object:
    if isinstance(value, dict):
        return {key: _walk(item, seed, left, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, seed, left, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        if len(value) == 3 and type(value[0]) is int and isinstance(value[1], tuple) and len(value[1]) == _WORDS + 1:
            return random.Random(seed).getstate()
        if len(value) == 5 and value[0] == "MT19937":
            return _numpy_state(value, seed, left, where)
        return tuple(_walk(item, seed, left, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, TensorRef):
        return _tensor_state(value, seed, left, where)
    return value


def _numpy_state(value: tuple[object, ...], seed: int, left: list[str], where: str) -> tuple[object, ...]:
    """A state of ``numpy.random``; its array is made as the old one, for the numpy that loads it."""
    old = value[1]
    if not isinstance(old, Stub) or not isinstance(old.state, tuple) or len(old.state) != 5:
        left.append(where)
        return value
    array = type(old)(*old.args)
    words = _words(seed).astype("<u4").tobytes()
    array.state = (*old.state[:4], words)
    return "MT19937", array, _WORDS, 0, 0.0


def _words(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The Mersenne Twister's state after seeding with the low 32 bits, as init_genrand does."""
    state = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)
    assert isinstance(state, dict)
    words = state["state"]["key"]
    assert isinstance(words, np.ndarray)
    return words


def _cpu_state(seed: int) -> bytes:
    head = struct.pack("<QiiQ", seed, 1, 1, 0)  # seed, words left before the next refill, seeded, next word
    return head + _words(seed).astype("<u8").tobytes() + bytes(_CPU_BYTES - len(head) - 8 * _WORDS)


_STATES: dict[int, Callable[[int], bytes]] = {
    _CPU_BYTES: _cpu_state,
    _GPU_BYTES: lambda seed: struct.pack("<QQ", seed, 0),
}


def _tensor_state(value: TensorRef, seed: int, left: list[str], where: str) -> object:
    storage = value.storage
    make = _STATES.get(storage.nbytes)
    if storage.dtype != "uint8" or make is None:
        if storage.dtype == "uint8":
            left.append(where)
        return value
    return tensor(new_storage("uint8", storage.nbytes, make(seed)), 0, (storage.nbytes,))
