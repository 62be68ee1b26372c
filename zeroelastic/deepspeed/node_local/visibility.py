"""Which rank sees which file of a tag: where each node has its own disk, no rank sees all of them.

In an object store every rank sees all of them; there it is decided which rank reads a file that several need.

Ranks that see the same files are interchangeable; a rank that sees none can still load files that others see. The ranks
first agree on one commit record: files on a node that has another record belong to another save, and are ignored.

At stages 1 and 2 every node of a save writes a ``mp_rank_XX_model_states.pt`` of its own, with the same weights and its
own buffers and client state, and its commit record states the size and the digest of that one. A rank takes the file of
its node; where there is none, that of the node with the optimizer file of saved rank 0.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, read_record
from zeroelastic.checkpoint.inventory import Inventory, list_files, stated_sizes
from zeroelastic.checkpoint.tag_files import (
    WHOLE_MODEL_FILE,
    is_rank_file,
    parse_rank_file,
    rank_files,
    refuse_unfinished,
)
from zeroelastic.distributed.collective import all_gather, all_gather_mostly_equal, all_or_raise, broadcast_or_raise
from zeroelastic.errors import CheckpointError, MissingFileError, rank_list
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import file_size, file_sizes, place

_Identity = tuple[int, int, int]


class _Version(NamedTuple):
    """One node's file of the whole module, by its commit record: its size, and its zip directory's digest."""

    size: int
    directory: str | None


@dataclass(eq=False, slots=True)
class _Node:
    """A directory that ``ranks`` see, as the first of them found it: the files of ranks and the commit record.

    ``save`` is the save of that record; ``world_size`` is stated by a header where there is no record. ``modules`` are
    the files of the whole module that are as the record states; ``lacks_module``: it states others, too.
    """

    files: Mapping[str, int]
    save: str | None = None
    world_size: int | None = None
    modules: dict[str, _Version] = field(default_factory=dict)
    lacks_module: bool = False
    ranks: tuple[int, ...] = ()


class _Place(NamedTuple):
    """A file's size, the ranks that see the file that this rank takes, and all ranks that see one of the save."""

    size: int
    readers: tuple[int, ...]
    holders: tuple[int, ...]


def gather_inventory(tag_dir: FilePath) -> Inventory:
    """List a tag directory, and find out which rank sees which file of it. Collective.

    Of the ranks that see one directory, the first lists it and sends the others the result: on a file system that all
    ranks share, one rank lists the names and reads the record; ``stat_assigned_files`` is for the sizes. Raises
    CheckpointError on every rank where the files belong to two saves and no record says which, MissingFileError where
    no rank sees any. ``open_checkpoint`` names files that no rank sees.
    """
    local = local_path(tag_dir)
    if local is None:
        return _of_store(tag_dir)
    tag_dir = local
    rank = dist.get_rank()
    firsts: dict[_Identity | None, int] = {}
    node_of = [firsts.setdefault(one, other) for other, one in enumerate(all_gather_mostly_equal(_identity(tag_dir)))]
    if len(firsts) == 1:
        return _list_together(tag_dir)
    record, own = all_or_raise(lambda: _look(tag_dir) if node_of[rank] == rank else (None, None))
    nodes = {first: node for first, node in enumerate(all_gather(own)) if node is not None}
    members: dict[int, list[int]] = {}
    for other, first in enumerate(node_of):
        members.setdefault(first, []).append(other)
    for first, node in nodes.items():
        node.ranks = tuple(members[first])
    here = nodes[node_of[rank]]
    if all((node.files, node.save) == (here.files, here.save) for node in nodes.values()):
        return replace(all_or_raise(lambda: list_files(tag_dir)), rank=rank)
    saves = {node.save for node in nodes.values() if node.save is not None}
    leaders = {save: _leader_of_save(save, nodes) for save in saves}
    sent = all_gather(record if rank in leaders.values() else None)
    record_bytes = here.files[RECORD_NAME] if record is not None else 0
    found = [
        (led.committed_at or 0.0, _of_record(led, save, nodes, nodes[leader], here, record_bytes))
        for save, leader in sorted(leaders.items())
        if (led := sent[leader]) is not None
    ]
    if not found:
        said = all_or_raise(lambda: stated_sizes(tag_dir, here.files) if node_of[rank] == rank else None)
        for first, sizes in enumerate(all_gather(said)):
            if first in nodes and sizes is not None:
                nodes[first].world_size = sizes[0]
        return _without_record(tag_dir, nodes, here)

    def order(one: tuple[float, Inventory]) -> tuple[bool, float]:
        committed_at, seen = one
        return dict(seen.recorded_sizes) == dict(seen.sizes), committed_at

    return max(found, key=order)[1]  # the one committed last of the complete saves, or else of all


def _look(tag_dir: Path) -> tuple[CommitRecord | None, _Node]:
    """Look at a directory for all ranks of a node."""
    sizes = _list(tag_dir)
    record = read_record(tag_dir) if RECORD_NAME in sizes else None
    node = _Node({name: size for name, size in sizes.items() if is_rank_file(name) or name == RECORD_NAME})
    if record is None:
        return None, node
    node.save = record.save_id + record.content_root
    stated = {name: size for name, size in record.files.items() if _is_whole_module(name)}
    node.modules = {
        name: _Version(size, record.directories.get(name))
        for name, size in stated.items()
        if node.files.get(name) == size
    }
    node.lacks_module = len(node.modules) < len(stated)
    return record, node


def _of_store(tag_dir: FilePath) -> Inventory:
    """List a directory behind a URL on rank 0, and assign each header to one rank. Collective.

    The rank of a saved rank's number reads its files: in most resumes it needs them itself.
    """

    def look() -> Inventory:
        found = list_files(tag_dir)
        refuse_unfinished(tag_dir, found.names)
        if found.is_recorded:
            return found
        rank_files(tag_dir, found.names)  # raises the error for what is no checkpoint of ranks
        sizes = stated_sizes(tag_dir, found.names)
        if sizes is None:
            raise MissingFileError(f"{tag_dir}: has no *_model_states.pt. It is incomplete.")
        return replace(found, world_size=sizes[0])

    found, rank, num_ranks = broadcast_or_raise(look), dist.get_rank(), dist.get_world_size()
    files = {name: file for name in found.names if (file := parse_rank_file(name)) is not None}
    tensor_size = max((file.tp_rank + 1 for file in files.values()), default=1)
    readers = {name: ((file.rank * tensor_size + file.tp_rank) % num_ranks,) for name, file in files.items()}
    return replace(found, readers_of=readers, rank=rank, record_bytes=found.record_bytes if rank == 0 else 0)


def _list_together(tag_dir: Path) -> Inventory:
    """List a directory that all ranks see, and read the record, on rank 0. Collective."""

    def look() -> Inventory:
        try:
            names = place(tag_dir).file_names()
        except MissingFileError:
            names = frozenset()
        record = read_record(tag_dir) if RECORD_NAME in names else None
        return Inventory(names, {}, record, record_bytes=file_size(tag_dir / RECORD_NAME) or 0)

    found, rank = broadcast_or_raise(look), dist.get_rank()
    return found if rank == 0 else replace(found, rank=rank, record_bytes=0)


def stat_assigned_files(tag_dir: FilePath, listing: Inventory) -> Inventory:
    """Add the sizes of this rank's share of the files, where the listing has none. Raises UnreadableError."""
    if listing.record is None or listing.sizes:
        return listing
    rank, num_ranks, files = dist.get_rank(), dist.get_world_size(), listing.record.files
    sizes = {name: file_size(tag_dir / name) for name in sorted(files)[rank::num_ranks]}
    return replace(listing, sizes={name: size for name, size in sizes.items() if size is not None})


def _identity(tag_dir: Path) -> _Identity | None:
    """Identify one directory in one state; the same on all nodes that share its file system.

    Copies of a directory on several disks differ in the time of their last change, which no tool sets. The device's
    number is left out, because each node numbers what it has mounted.
    """
    try:
        found = os.stat(tag_dir)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _list(tag_dir: Path) -> dict[str, int]:
    try:
        return file_sizes(tag_dir)
    except MissingFileError:
        return {}


def _is_whole_module(name: str) -> bool:
    return WHOLE_MODEL_FILE.match(name) is not None


def _leader_of_save(save: str, nodes: Mapping[int, _Node]) -> int:
    """Return the rank whose record counts, and whose files of the whole module ranks take that see none."""
    having = [node for node in nodes.values() if node.save == save]
    return _first_with_rank_0([node for node in having if not node.lacks_module] or having).ranks[0]


def _first_with_rank_0(nodes: Sequence[_Node]) -> _Node:
    """Return the first of some nodes that has the optimizer file of saved rank 0, or else the first of them."""

    def has(node: _Node) -> bool:
        parsed = map(parse_rank_file, node.files)
        return any(file is not None and file.kind == "optimizer" and file.rank == 0 for file in parsed)

    return next(filter(has, nodes), nodes[0])


def _holders(nodes: Iterable[_Node]) -> dict[str, list[_Node]]:
    found: dict[str, list[_Node]] = {}
    for node in nodes:
        for name in node.files:
            found.setdefault(name, []).append(node)
    return found


def _ranks(nodes: Iterable[_Node]) -> tuple[int, ...]:
    return tuple(sorted(rank for node in nodes for rank in node.ranks))


def _of_record(
    record: CommitRecord, save: str, nodes: Mapping[int, _Node], leader: _Node, here: _Node, record_bytes: int
) -> Inventory:
    """Return the files of a save as a rank of the node ``here`` takes them; ``record`` is that of the ``leader``.

    Files that a node has with another record are left out.
    """
    places: dict[str, _Place] = {}
    taken: dict[str, _Version] = {}
    having = _holders(node for node in nodes.values() if node.save in (save, None))
    for name, want in record.files.items():
        holders = having.get(name, [])
        with_record = [node for node in holders if name in node.modules]
        if with_record:  # a file of the whole module without a record beside it counts only where there is no other
            chosen = next((node for node in (here, leader) if node in with_record), with_record[0])
            own = taken[name] = chosen.modules[name]
            readers = _ranks(node for node in with_record if node.modules[name] == own)
            places[name] = _Place(own.size, readers, _ranks(with_record))
        elif holders:
            right = [node for node in holders if node.files[name] == want] or holders
            places[name] = _Place(right[0].files[name], _ranks(right), _ranks(right))
    record = record.model_copy(
        update={
            "files": {**record.files, **{name: version.size for name, version in taken.items()}},
            "directories": {**record.directories}
            | {name: version.directory for name, version in taken.items() if version.directory is not None},
        }
    )
    return _inventory(places, record, record.world_size, record_bytes)


def _inventory(
    places: Mapping[str, _Place], record: CommitRecord | None, world_size: int, record_bytes: int
) -> Inventory:
    num_held = Counter(rank for place in places.values() for rank in place.holders)
    sizes = {name: place.size for name, place in places.items()}
    return Inventory(
        names=sizes.keys(),
        sizes=sizes,
        record=record,
        world_size=world_size,
        record_bytes=record_bytes,
        over_nodes=True,
        readers_of={name: place.readers for name, place in places.items()},
        rank=dist.get_rank(),
        partial_ranks=tuple(rank for rank in range(dist.get_world_size()) if num_held[rank] < len(places)),
    )


def _without_record(tag_dir: Path, nodes: Mapping[int, _Node], here: _Node) -> Inventory:
    """Return the files of a save without a record, of which the nodes must not contradict each other.

    ``here`` is the node of this rank.
    """
    places: dict[str, _Place] = {}
    for name, holders in sorted(_holders(nodes.values()).items()):
        readers = holders
        if _is_whole_module(name):
            readers = [here if name in here.files else _first_with_rank_0(holders)]
        places[name] = _Place(readers[0].files[name], _ranks(readers), _ranks(holders))
        if len({node.files[name] for node in readers}) > 1:
            raise CheckpointError(
                f"{tag_dir}: {name} has {' and '.join(sorted({str(node.files[name]) for node in holders}))} bytes, "
                f"depending on the node ({rank_list(_ranks(holders))}). Files of two saves are on the nodes."
            )
    world_sizes = {
        node.world_size: first for first, node in reversed(list(nodes.items())) if node.world_size is not None
    }
    if len(world_sizes) > 1:
        by_rank = " and ".join(f"{size} (rank {rank})" for size, rank in sorted(world_sizes.items()))
        raise CheckpointError(
            f"{tag_dir}: the nodes have files of saves by different numbers of ranks: {by_rank}. Remove those that "
            "do not belong."
        )
    if not world_sizes:
        rank_files(tag_dir, places)
        raise MissingFileError(f"{tag_dir}: no rank sees a *_model_states.pt. It is incomplete.")
    return _inventory(places, None, world_sizes.popitem()[0], 0)
