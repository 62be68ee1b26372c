"""Files that frameworks keep next to a tag directory, for another world size: generators, schedulers, settings.

A file that exists once (a scheduler, trainer_state.json, a tokenizer) is copied. Of the files that exist per rank,
remaining ranks keep theirs, and each new rank gets one derived from rank 0's. Files that are left out are
reported. Layouts: transformers 5 (``Trainer._save_rng_state``), accelerate 1.15 (``save_accelerator_state``), Lightning
2.6 and DeepSpeed 0.19.8 (``_copy_recovery_script``).

The generators in a derived file (Python's, numpy's, torch's on the CPU and on GPUs) are seeded anew, each rank with an
own seed that follows from the checkpoint; everything else in the file stays. Torch's CPU generator is the Mersenne
Twister that numpy has, in a state of 5056 bytes (CPUGeneratorImpl.cpp, torch 2.13); a GPU's is 16 bytes, seed and
offset (CUDAGeneratorImpl.cpp).
"""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroelastic.core.world_size import derived_seed
from zeroelastic.errors import MissingFileError, counted, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_size, file_sizes, folders, read_exactly
from zeroelastic.runs.locate import Source
from zeroelastic.runs.names import LATEST
from zeroelastic.runs.tags import NOTE, require_own_files
from zeroelastic.torch_file.header import read_tree
from zeroelastic.torch_file.tree import Stub, TensorRef, new_storage, tensor
from zeroelastic.verbs.new_files import write_archive

_SCRIPTS = re.compile(r"zero_to_(fp32|torch)\.py")
_PER_RANK = re.compile(r"(?P<stem>rng_state|random_states)(_(?P<rank>\d+))?\.(?P<kind>pth|pkl)")
_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SidecarFiles:
    """The files to write next to the tag: name -> source, and for a derived file also the rank.

    ``notes`` say what differs from the source.
    """

    copied: Mapping[str, str]
    derived: Mapping[str, tuple[str, int]]
    notes: tuple[str, ...]


def plan_sidecar_files(source: Source, *, saved_world_size: int, world_size: int) -> SidecarFiles:
    """Decide for each file in the directory above the tag whether it is copied or derived.

    Raises CheckpointError, also where the files are not of the save that the tag is of.
    """
    names = sorted(file_sizes(source.root))
    if NOTE in names:
        require_own_files(source.root)
    copied: dict[str, str] = {}
    notes: list[str] = []
    generators = SidecarFiles({}, {}, ())
    per_rank: dict[int, str] = {}
    left: list[str] = []
    carried = source.framework != "deepspeed"
    for name in names:
        match = _PER_RANK.fullmatch(name)
        if match is not None and carried:
            per_rank[int(match["rank"] or 0)] = name
        elif name == LATEST or name.startswith("."):
            continue
        elif carried or _SCRIPTS.fullmatch(name):
            copied[name] = name
        else:
            left.append(name)
    if per_rank:
        generators = _plan_generators(per_rank, saved_world_size, world_size)
        copied, notes = {**copied, **generators.copied}, [*generators.notes]
    if source.framework == "accelerate" and saved_world_size != world_size:
        schedulers = [name for name in copied if name.startswith("scheduler")]
        if schedulers:
            notes.append(
                f"{', '.join(schedulers)}: carried as it is; accelerate steps a scheduler once per process, so its "
                f"counter runs {saved_world_size} to a step there and {world_size} to a step here"
            )
        loaders = [name for name in copied if name.startswith("dl_state_dict")]
        if loaders:
            notes.append(f"{', '.join(loaders)}: carried as it is; it counts batches of {saved_world_size} processes")
    others = [name for name in folders(source.root) if name != source.tag and not name.startswith(".")]
    if others:
        notes.append(f"not carried: {some(others)} (other tags and directories)")
    if left:
        notes.append(f"not carried: {some(left)} (files that no framework of ours is known to need)")
    return SidecarFiles(copied, generators.derived, tuple(notes))


def _plan_generators(per_rank: dict[int, str], saved_world_size: int, world_size: int) -> SidecarFiles:
    """``rng_state_3.pth`` of the Trainer (``rng_state.pth`` on one rank), ``random_states_3.pkl`` of accelerate."""
    match = _PER_RANK.fullmatch(next(iter(per_rank.values())))
    assert match is not None
    stem, kind = match["stem"], match["kind"]
    if 0 not in per_rank:
        return SidecarFiles({}, {}, (f"not carried: {stem}_*.{kind}, because that of rank 0 is missing",))
    copied: dict[str, str] = {}
    derived: dict[str, tuple[str, int]] = {}
    alone = stem == "rng_state"
    reshaped = alone and (saved_world_size == 1) != (world_size == 1)
    kept = [rank for rank in range(min(saved_world_size, world_size)) if rank in per_rank]
    for rank in range(world_size):
        name = f"{stem}.{kind}" if alone and world_size == 1 else f"{stem}_{rank}.{kind}"
        if rank not in kept:
            derived[name] = (per_rank[0], rank)
        elif reshaped:  # the same state, in the shape for another number of ranks
            derived[name] = (per_rank[rank], -1)
        else:
            copied[name] = per_rank[rank]
    new, dropped = world_size - len(kept), len(per_rank) - world_size
    missing = [str(rank) for rank in range(min(saved_world_size, world_size)) if rank not in per_rank]
    said = (
        f"those of {counted(len(kept), 'rank')} are the saved ones" if kept else "",
        f"{counted(new, 'rank')} new, seeded from the checkpoint and the rank" if new else "",
        f"those of {counted(dropped, 'rank')} are dropped" if dropped > 0 else "",
        f"none was saved for ranks {some(missing)}" if missing else "",
    )
    return SidecarFiles(copied, derived, tuple(f"random number generators: {clause}" for clause in said if clause))


def write_sidecar_files(source: Source, sidecar_files: SidecarFiles, root: Path, *, identity: str) -> tuple[str, ...]:
    """Write the files into ``root``; seeds of new ranks are derived from ``identity``.

    Returns notes on generators that could not be reseeded. Raises OSError, CheckpointError.
    """
    notes: list[str] = []
    for name, origin in sidecar_files.copied.items():
        _copy_file(source.root / origin, root / name)
    for name, (origin, rank) in sidecar_files.derived.items():
        left = _derive(source.root / origin, root / name, rank, identity, single=name == "rng_state.pth")
        if left:
            notes.append(f"{name}: {', '.join(left)} is rank 0's, because its kind of generator is not known")
    return tuple(notes)


def _derive(origin: FilePath, path: Path, rank: int, identity: str, *, single: bool) -> list[str]:
    root, left = read_tree(origin), list[str]()
    if rank >= 0:
        root, left = reseed(root, derived_seed(identity, rank))
    if isinstance(root, dict):
        for device, state in list(root.items()):
            if device in ("python", "numpy", "cpu"):
                continue
            if single and isinstance(state, list) and state:
                root = {**root, device: state[0]}
            elif not single and path.name.startswith("rng_state") and not isinstance(state, (list, type(None))):
                root = {**root, device: [state]}
    write_archive(path, root, sync=True)
    return left


def _copy_file(origin: FilePath, path: Path) -> None:
    """Copy a file, local or remote, in pieces. Raises OSError, CheckpointError."""
    size = file_size(origin)
    if size is None:
        raise MissingFileError(f"{origin}: is no longer there.")
    with open(path, "wb") as file:
        for offset in range(0, size, _COPY_BYTES):
            file.write(read_exactly(origin, offset, min(_COPY_BYTES, size - offset)))
        file.flush()
        os.fsync(file.fileno())


_CPU_BYTES, _GPU_BYTES = 5056, 16
_WORDS = 624


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
