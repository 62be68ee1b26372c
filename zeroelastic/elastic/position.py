"""The position in the data and the random generators, which a run saves in the client state.

The position is the same on every rank and fits any world size. Generators belong to a rank: they are restored where
the world size is the saved one; elsewhere they are seeded from the checkpoint and the rank. Where one client state is
kept, at stages 1 and 2, it has the generators of all ranks, about 15 KiB of each. Everything is saved as
numbers, strings and tensors, so that ``"weights_only_load": true`` reads it.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from zeroelastic.core.world_size import derived_seed
from zeroelastic.distributed.collective import all_gather, all_gather_mostly_equal, all_or_raise, any_rank
from zeroelastic.errors import StrictError

KEY = "zeroelastic"
"""The key of our entry in the client state."""

DERIVED = "random generators were derived anew, from the checkpoint and the rank"
DERIVED_ELSEWHERE = f"{DERIVED}, on all ranks but the one whose client state was kept"

_NUMPY = ("keys", "position", "has_gauss", "gauss")


class Position(Protocol):
    """An object with a position in the data: our samplers, or anything with torchdata's Stateful protocol."""

    def state_dict(self) -> dict[str, Any]:
        """The position; the same on every rank."""

    def load_state_dict(self, state: Any) -> None:
        """Go to a saved position. Where it takes ``strict``, False allows another global batch, as for our samplers."""


def pack_position(data: Position | None, device: torch.device, *, for_all_ranks: bool = False) -> dict[str, Any]:
    """The entry for this rank's client state. Collective ``for_all_ranks``: it has the generators of each then."""
    generators = generators_of(device)
    entry = {
        "data": None if data is None else data.state_dict(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "generators": generators,
    }
    if for_all_ranks:
        by_rank = all_gather(generators)
        if all(one.keys() == generators.keys() for one in by_rank):  # a rank may have a numpy generator of its own kind
            entry["generators_by_rank"] = _stacked(by_rank)
    return entry


def different_positions(data: Position | None) -> list[str]:
    """The positions that the ranks have, if they are not all the same; else nothing. Collective."""
    by_rank = all_gather_mostly_equal(_comparable(None if data is None else data.state_dict()))
    found = sorted({str(position) for position in by_rank})
    return found if len(found) > 1 else []


def _comparable(value: object) -> object:
    """A position of which the text has all elements of all tensors."""
    if isinstance(value, Mapping):
        return {str(key): _comparable(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [*map(_comparable, value)]
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value


def unpack_position(
    entry: Mapping[str, Any] | None, data: Position | None, device: torch.device, *, identity: str, strict: bool
) -> tuple[str, ...]:
    """Restore an entry of ``pack_position``; returns a note for each thing not restored exactly. Collective.

    New generators are seeded from ``identity``. Raises, the same on every rank, StrictError when ``strict`` and the
    entry has no position, and CheckpointError for an entry that cannot be restored.
    """
    notes, is_exact = all_or_raise(lambda: _unpack(entry, data, device, identity, strict))
    if not any_rank(not is_exact):
        return notes
    if entry is not None and entry.get("world_size") == dist.get_world_size():
        return (*notes, DERIVED_ELSEWHERE)
    return (*notes, DERIVED)


def _unpack(
    entry: Mapping[str, Any] | None, data: Position | None, device: torch.device, identity: str, strict: bool
) -> tuple[tuple[str, ...], bool]:
    """The notes, and whether this rank's generators are the saved ones."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    notes: list[str] = []
    saved = None if entry is None else entry.get("data")
    if data is not None and saved is not None:
        notes += _load_data(data, saved, strict)
    elif data is not None:
        problem = "the checkpoint has no position in the data: it was not saved through zeroelastic.elastic"
        if strict:
            raise StrictError(
                f"{problem}. Set the position yourself and call resume without data; or pass strict=False to continue "
                "from the current position of data (in a new run, the first sample)."
            )
        notes.append(f"{problem}; data stays where it was, in a new run at the first sample")
    generators = None
    if entry is not None and entry.get("world_size") == world_size:
        if "generators_by_rank" in entry:
            generators = _of_rank(entry["generators_by_rank"], rank)
        elif entry.get("rank") == rank:
            generators = entry["generators"]
    if generators is not None:
        restore_generators(generators, device)
    else:
        seed_generators(identity, rank)
    return tuple(notes), generators is not None


def _load_data(data: Position, saved: Any, strict: bool) -> list[str]:
    """Go to a saved position, unless ``strict`` also one with another global batch, and return a note on that."""
    load: Callable[..., None] = data.load_state_dict
    is_ours = isinstance(saved, Mapping) and {"consumed", "global_batch"} <= saved.keys()
    if strict or not is_ours or "strict" not in inspect.signature(load).parameters:
        load(saved)
        return []
    load(saved, strict=False)
    now = data.state_dict()
    if now.get("global_batch", saved["global_batch"]) == saved["global_batch"]:
        return []
    again = saved["consumed"] - now["consumed"] if saved.get("epoch") == now.get("epoch") else 0
    return [
        f"the position in the data is from a global batch of {saved['global_batch']}, and goes on with one of "
        f"{now['global_batch']}: {_place(saved)} -> {_place(now)}" + (f"; {again} samples come again" if again else "")
    ]


def _place(position: Mapping[str, Any]) -> str:
    epoch = f"epoch {position['epoch']}, " if "epoch" in position else ""
    return f"{epoch}{position['consumed']} samples"


def _stacked(by_rank: Sequence[Mapping[str, Any]]) -> Any:
    """Stack the dicts of ``generators_of`` of all ranks into one: few tensors, however many ranks there are."""
    return tree_map(lambda *one: torch.stack(one) if isinstance(one[0], torch.Tensor) else list(one), *by_rank)


def _of_rank(stacked: Mapping[str, Any], rank: int) -> Any:
    """One rank's part of ``_stacked``. Tensors are copies: ``torch.set_rng_state`` crashes with a row of a tensor."""
    return tree_map(
        lambda one: one[rank].clone() if isinstance(one, torch.Tensor) else one[rank],
        stacked,
        is_leaf=lambda one: isinstance(one, list),
    )


def generators_of(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, and of that of the GPU."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    state = legacy["state"]
    found: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if legacy["bit_generator"] == "MT19937":
        keys = torch.from_numpy(state["key"].astype(np.int64))
        values = (keys, int(state["pos"]), int(legacy["has_gauss"]), float(legacy["gauss"]))
        found["numpy"] = dict(zip(_NUMPY, values, strict=True))
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_generators(saved: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what ``generators_of`` returned."""
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(saved["torch"])
    if "numpy" in saved:
        keys, position, has_gauss, gauss = (saved["numpy"][name] for name in _NUMPY)
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if "cuda" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)


def seed_generators(identity: str, rank: int) -> None:
    """Seed the generators of Python, numpy and torch, on GPUs too, from a text that all ranks have and the rank."""
    seed = derived_seed(identity, rank)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
