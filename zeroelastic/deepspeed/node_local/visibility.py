"""Which rank sees which file of a tag: where each node has a disk of its own, no rank sees all of them.

In an object store every rank sees all of them; there it is decided which rank reads what several need.

Ranks that see the same files are interchangeable; a rank that sees none can still load what others see. The ranks first
agree on one commit record: files on a node beside another record belong to another save, and are ignored.

At stages 1 and 2 every node of a save writes a ``mp_rank_XX_model_states.pt`` of its own, with the same weights and its
own buffers and client state, and its commit record states the size and the digest of that one. A rank takes the file of
its node; where there is none, that of the node with the optimizer file of saved rank 0.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    CommitRecord,
    read_record,
    read_record_by_range,
    with_rows_at,
)
from zeroelastic.checkpoint.file_table import FileNames, FileSizes
from zeroelastic.checkpoint.marks import refuse_unfinished
from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.checkpoint.open import Listing, check_sizes, rank_files
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE, TensorParallel, is_rank_file, parse_rank_file
from zeroelastic.distributed.collective import all_gather, all_gather_alike, all_or_raise, broadcast_or_raise
from zeroelastic.errors import CheckpointError, MissingFileError, rank_list
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import file_names, file_size, file_sizes

_ROWS_SENT = 4096
"""Up to so many files of a store, their rows are sent to the ranks: less than a request of each rank takes."""


@dataclass(frozen=True, slots=True)
class FileVisibility:
    """The files of a tag over all ranks: their ``sizes``, and the ranks that see each, ascending.

    The same on every rank, but for ``rank``, for ``record_bytes``, which is what this rank read of a commit record, and
    for what is said of files of the whole module: there ``sizes``, ``readers_of`` and ``record`` are of the file that
    this rank takes. ``readers_of`` has the files of one save: those of ``record``, or all of them without a record.
    ``world_size`` is the saved one. ``partial_ranks`` are the ranks that do not see all files. ``stored`` are the names
    of all files where they are behind a URL, where every rank can read all of them; then ``readers_of`` says who reads
    a header for all, and ``sizes`` of many files are read from the record as they are asked for.
    """

    tag_dir: FilePath
    rank: int
    sizes: Mapping[str, int]
    readers_of: Mapping[str, tuple[int, ...]]
    record: CommitRecord | None
    world_size: int
    record_bytes: int
    partial_ranks: tuple[int, ...]
    stored: Collection[str] | None = None

    @property
    def in_store(self) -> bool:
        """Whether the files are behind a URL."""
        return self.stored is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The files, sorted: a number for each that means the same on every rank."""
        return tuple(sorted(self.readers_of))

    @property
    def listing(self) -> Listing:
        """What ``open_checkpoint`` needs to know of files that are not all seen here."""
        return Listing(
            names=self.sizes.keys() if self.stored is None else self.stored,
            sizes={} if isinstance(self.sizes, FileSizes) else self.sizes,
            record=self.record,
            world_size=self.world_size,
            remote_files=self.remote_files,
            record_bytes=self.record_bytes,
            over_nodes=not self.in_store,
        )

    @property
    def remote_files(self) -> frozenset[str]:
        """The files that others see and this rank does not, or whose headers others read for it."""
        return frozenset(name for name, ranks in self.readers_of.items() if self.rank not in ranks)

    def reader(self, name: str, requester: int = 0) -> int:
        """The rank that reads a file for others; ``requester`` spreads requests over all ranks that see the file."""
        ranks, file = self.readers_of[name], parse_rank_file(name)
        return ranks[(requester + (file.rank if file is not None else 0)) % len(ranks)]

    def label(self, name: str) -> str:
        """A file's name, with the ranks that see it where other nodes have other files of that name."""
        if self.in_store or not _is_whole_module(name):
            return name
        return f"{name} (of {rank_list(self.readers_of[name])})"

    @contextmanager
    def named_in_errors(self, path: FilePath) -> Iterator[None]:
        """Errors of reading a file say which it is, where the nodes have different ones under its name."""
        try:
            yield
        except CheckpointError as error:
            if self.in_store or not _is_whole_module(path.name):
                raise
            raise type(error)(f"{error} It is the {self.label(path.name)}.") from error


_Identity = tuple[int, int, int]


class _Version(NamedTuple):
    """What a commit record states of one node's file of the whole module: its size, and its zip directory's digest."""

    size: int
    directory: str | None


class _LocalSave(NamedTuple):
    """What one rank knows of the save: the world size that headers state, where there is no record.

    The first rank of a node also says of which save the record is, and what it states of files of the whole module.
    """

    save: str | None
    world_size: int | None
    modules: Mapping[str, _Version]


class _Stored(NamedTuple):
    """What rank 0 found behind a URL; without ``sizes`` they are in the record, which has all files as they are."""

    names: Collection[str]
    sizes: Mapping[str, int] | None
    record: CommitRecord | None
    world_size: int
    record_bytes: int


@dataclass(slots=True)
class _Node:
    """The ranks that see one directory, what it has of the files of ranks, and of which save its record says that.

    ``modules`` is what the record states of files of the whole module.
    """

    ranks: tuple[int, ...]
    files: Mapping[str, int]
    save: str | None = None
    modules: Mapping[str, _Version] = field(default_factory=dict)


class _Place(NamedTuple):
    """Of one file: its size, the ranks that see what this rank takes, and all ranks that see one of the save."""

    size: int
    readers: tuple[int, ...]
    holders: tuple[int, ...]


def gather_visibility(tag_dir: FilePath, dp_rank: int, tp: TensorParallel) -> Listing | FileVisibility:
    """What a tag directory has that all ranks see alike, or else which rank sees which file. Collective.

    Of the ranks that see one directory, the first lists it and sends the others what it found: on a file system that
    all ranks share, one rank lists the names and reads the record but for its rows of files; ``stat_assigned_files``
    is for the rest. ``dp_rank`` is this rank in the data parallel group of tensor parallel rank ``tp``.

    Raises CheckpointError on every rank where the files of two saves cannot be told apart, MissingFileError where no
    rank sees any. Files that no rank sees are left to ``open_checkpoint`` to name.
    """
    if isinstance(tag_dir, RemotePath):
        return _of_store(tag_dir, tp)
    rank = dist.get_rank()
    identities = all_gather_alike(_identity(tag_dir))
    firsts: dict[_Identity | None, int] = {}
    listing_rank = [firsts.setdefault(identity, other) for other, identity in enumerate(identities)]
    if len(firsts) == 1:
        return _list_together(tag_dir)
    own = all_or_raise(lambda: _list(tag_dir) if listing_rank[rank] == rank else None)
    listings = all_gather(own)
    nodes = _nodes(listing_rank, listings)
    here = nodes[listing_rank[rank]]
    if all(node.files == here.files for node in nodes.values()):
        sizes = listings[listing_rank[rank]] or {}
        record = all_or_raise(lambda: read_record(tag_dir) if RECORD_NAME in sizes else None)
        return Listing(sizes.keys(), sizes, record, record_bytes=sizes.get(RECORD_NAME, 0))
    reads = RECORD_NAME in here.files and listing_rank[rank] == rank

    def read() -> tuple[CommitRecord | None, _LocalSave]:
        record = read_record(tag_dir) if reads else None
        stated = _stated_size(tag_dir, here.files, dp_rank, tp)
        return record, _LocalSave(_save_of(record), stated, _modules_of(record))

    record, local = all_or_raise(read)
    locals_ = all_gather(local)
    for first, node in nodes.items():
        node.save, node.modules = locals_[first].save, locals_[first].modules
    saves = {node.save for node in nodes.values() if node.save is not None}
    leader_of_save = {save: _leader_of_save(save, nodes) for save in saves}
    sent = all_gather(record if rank in leader_of_save.values() else None)
    record_bytes = here.files[RECORD_NAME] if record is not None else 0
    found = [
        (not _missing(visibility), record.global_steps, visibility)
        for save, leader in sorted(leader_of_save.items())
        if (record := sent[leader]) is not None
        for visibility in [_visibility_of_record(tag_dir, record, save, nodes, leader, here, record_bytes)]
    ]
    if found:
        return max(found, key=lambda one: one[:2])[2]
    return _visibility_without_record(tag_dir, nodes, here, [known.world_size for known in locals_])


def _nodes(listing_rank: Sequence[int], listings: Sequence[Mapping[str, int] | None]) -> dict[int, _Node]:
    """The nodes by their first rank, ascending; ``listing_rank`` has for each rank the first one of its node."""
    ranks: dict[int, list[int]] = {}
    for rank, first in enumerate(listing_rank):
        ranks.setdefault(first, []).append(rank)
    return {first: _Node(tuple(members), _of_ranks(listings[first] or {})) for first, members in ranks.items()}


def _of_store(tag_dir: RemotePath, tp: TensorParallel) -> FileVisibility:
    """A directory behind a URL: rank 0 lists it and reads the record; each header is read by one rank. Collective.

    A saved rank's files are read by the rank of its number, which needs them itself in most resumes. Of many files the
    ranks are sent the patterns of their names, not their rows in the record: rank 0 compares the sizes of all with
    these, and each rank reads those of the headers that it reads.
    """

    def look() -> _Stored:
        sizes = file_sizes(tag_dir)
        record, nbytes = None, 0
        if RECORD_NAME in sizes and len(sizes) > _ROWS_SENT:
            record, nbytes = read_record_by_range(tag_dir)
        elif RECORD_NAME in sizes:
            record, nbytes = read_record(tag_dir), sizes[RECORD_NAME]
        refuse_unfinished(tag_dir, sizes)
        if record is None:
            return _Stored(sizes, sizes, None, _stored_size(tag_dir, sizes, tp), 0)
        if not isinstance(record.files, FileSizes):
            return _Stored(sizes, sizes, record, record.world_size, nbytes)
        rows = record.files.rows
        rows.share(0, 1)
        check_sizes(tag_dir, sizes, sizes, record)
        return _Stored(
            FileNames.of(sizes), None, with_rows_at(record, None), record.world_size, nbytes + rows.bytes_read
        )

    found = broadcast_or_raise(look)
    record = None if found.record is None else with_rows_at(found.record, tag_dir)
    sizes = found.sizes
    if sizes is None:
        assert record is not None, "without a record all sizes are sent"
        sizes = record.files
    num_ranks, readers = dist.get_world_size(), dict[str, tuple[int, ...]]()
    for name in found.names:
        file = parse_rank_file(name)
        if file is not None:
            readers[name] = ((file.rank * tp.size + file.tp_rank) % num_ranks,)
    rank = dist.get_rank()
    return FileVisibility(
        tag_dir=tag_dir,
        rank=rank,
        sizes=sizes,
        readers_of=readers,
        record=record,
        world_size=found.world_size,
        record_bytes=found.record_bytes if rank == 0 else 0,
        partial_ranks=(),
        stored=found.names,
    )


def _stored_size(tag_dir: RemotePath, sizes: Mapping[str, int], tp: TensorParallel) -> int:
    """The world size that the first model states file states, where there is no record."""
    models = rank_files(tag_dir, sizes, tp.rank).models
    if not models:
        raise MissingFileError(f"{tag_dir}: has no *_model_states.pt. It is incomplete.")
    first = min(models)
    return open_model_states(tag_dir / models[first], first, world_size=None, tp=tp).world_size


def _list_together(tag_dir: Path) -> Listing:
    """A directory that all ranks see: rank 0 lists it and reads the record. Collective."""

    def read() -> tuple[FileNames, CommitRecord | None, int]:
        names = FileNames.of(_names(tag_dir))
        record, nbytes = read_record_by_range(tag_dir) if RECORD_NAME in names else (None, 0)
        return names, None if record is None else with_rows_at(record, None), nbytes

    names, record, nbytes = broadcast_or_raise(read)
    record = None if record is None else with_rows_at(record, tag_dir)
    return Listing(names, {}, record, record_bytes=nbytes if dist.get_rank() == 0 else 0)


def stat_assigned_files(tag_dir: FilePath, listing: Listing) -> Listing:
    """With the sizes of this rank's share of the files, where the listing has none. Raises UnreadableError."""
    if listing.record is None or listing.sizes:
        return listing
    rank, num_ranks, files = dist.get_rank(), dist.get_world_size(), listing.record.files
    share = files.rows.share(rank, num_ranks) if isinstance(files, FileSizes) else sorted(files)[rank::num_ranks]
    sizes = {name: file_size(tag_dir / name) for name in share}
    return replace(listing, sizes={name: size for name, size in sizes.items() if size is not None})


def _identity(tag_dir: Path) -> _Identity | None:
    """What tells one directory, in one state, from all others: alike on all nodes that share its file system.

    Copies of a directory on several disks differ in the time of their last change, which no tool sets. The device's
    number is left out, because each node numbers what it has mounted.
    """
    try:
        found = os.stat(tag_dir)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _names(tag_dir: Path) -> frozenset[str]:
    try:
        return file_names(tag_dir)
    except MissingFileError:
        return frozenset()


def _list(tag_dir: Path) -> dict[str, int]:
    try:
        return file_sizes(tag_dir)
    except MissingFileError:
        return {}


def _of_ranks(sizes: Mapping[str, int]) -> dict[str, int]:
    """The files of ranks and the commit record."""
    return {name: size for name, size in sizes.items() if is_rank_file(name) or name == RECORD_NAME}


def _save_of(record: CommitRecord | None) -> str | None:
    return None if record is None else record.save_id + record.content_root


def _modules_of(record: CommitRecord | None) -> dict[str, _Version]:
    files = record.files if record is not None else {}
    directories = record.directories if record is not None else {}
    return {name: _Version(size, directories.get(name)) for name, size in files.items() if _is_whole_module(name)}


def _is_whole_module(name: str) -> bool:
    return WHOLE_MODEL_FILE.match(name) is not None


def _leader_of_save(save: str, nodes: Mapping[int, _Node]) -> int:
    """The rank whose record counts, and whose files of the whole module ranks take that see none."""
    having = [first for first, node in nodes.items() if node.save == save]
    if not nodes[having[0]].modules:
        return having[0]
    whole = [
        first
        for first in having
        if all(nodes[first].files.get(name) == version.size for name, version in nodes[first].modules.items())
    ]
    return _first_with_rank_0(whole or having, nodes)


def _first_with_rank_0(firsts: Sequence[int], nodes: Mapping[int, _Node]) -> int:
    """The first of some nodes that has the optimizer file of saved rank 0, or else the first of them."""

    def has(first: int) -> bool:
        parsed = map(parse_rank_file, nodes[first].files)
        return any(file is not None and file.kind == "optimizer" and file.rank == 0 for file in parsed)

    return next((first for first in firsts if has(first)), firsts[0])


def _holders(nodes: Mapping[int, _Node]) -> dict[str, list[_Node]]:
    """The nodes that have each file, by their first rank."""
    found: dict[str, list[_Node]] = {}
    for node in nodes.values():
        for name in node.files:
            found.setdefault(name, []).append(node)
    return found


def _ranks(nodes: Iterable[_Node]) -> tuple[int, ...]:
    """The ranks of some nodes, ascending."""
    return tuple(sorted(rank for node in nodes for rank in node.ranks))


def _stated_size(tag_dir: Path, seen: Mapping[str, int], dp_rank: int, tp: TensorParallel) -> int | None:
    """The world size that a model states file on this node states, where there is no record."""
    if RECORD_NAME in seen:
        return None
    ranks = {
        file.rank: name
        for name in seen
        if (file := parse_rank_file(name)) is not None and file.kind != "optimizer" and file.tp_rank == tp.rank
    }
    if not ranks:
        return None
    rank = dp_rank if dp_rank in ranks else min(ranks)
    return open_model_states(tag_dir / ranks[rank], rank, world_size=None, tp=tp).world_size


def _visibility_of_record(
    tag_dir: Path,
    record: CommitRecord,
    save: str,
    nodes: Mapping[int, _Node],
    leader: int,
    here: _Node,
    record_bytes: int,
) -> FileVisibility:
    """The files of one save, of which ``record`` is that of rank ``leader``, as a rank of the node ``here`` takes them.

    Files that a node has beside another record are left out.
    """
    places: dict[str, _Place] = {}
    taken: dict[str, _Version] = {}
    having = _holders({first: node for first, node in nodes.items() if node.save in (save, None)})
    for name, want in record.files.items():
        holders = having.get(name, [])
        if not holders:
            continue
        if _is_whole_module(name):
            stated = [(node, node.modules.get(name)) for node in holders]
            versions = [(node, one) for node, one in stated if one and one.size == node.files[name]]
            if versions:  # a file without a record beside it counts only where there is no other
                own = taken[name] = _version_for(here, nodes[leader], versions)
                readers = _ranks(node for node, version in versions if version == own)
                places[name] = _Place(own.size, readers, _ranks(node for node, _ in versions))
                continue
        right = [node for node in holders if node.files[name] == want] or holders
        places[name] = _Place(right[0].files[name], _ranks(right), _ranks(right))
    record = record.model_copy(
        update={
            "files": {**record.files, **{name: version.size for name, version in taken.items()}},
            "directories": {**record.directories}
            | {name: version.directory for name, version in taken.items() if version.directory is not None},
        }
    )
    return _visibility(tag_dir, places, record, record.world_size, record_bytes)


def _version_for(here: _Node, leader: _Node, versions: Sequence[tuple[_Node, _Version]]) -> _Version:
    """The file of the whole module that a node takes: its own, else that of the leader, else the first."""
    for wanted in (here, leader):
        for node, version in versions:
            if node is wanted:
                return version
    return versions[0][1]


def _visibility(
    tag_dir: Path, places: Mapping[str, _Place], record: CommitRecord | None, world_size: int, record_bytes: int
) -> FileVisibility:
    num_held = Counter(rank for place in places.values() for rank in place.holders)
    return FileVisibility(
        tag_dir=tag_dir,
        rank=dist.get_rank(),
        sizes={name: place.size for name, place in places.items()},
        readers_of={name: place.readers for name, place in places.items()},
        record=record,
        world_size=world_size,
        record_bytes=record_bytes,
        partial_ranks=tuple(rank for rank in range(dist.get_world_size()) if num_held[rank] < len(places)),
    )


def _missing(visibility: FileVisibility) -> bool:
    return visibility.record is not None and dict(visibility.record.files) != dict(visibility.sizes)


def _visibility_without_record(
    tag_dir: Path, nodes: Mapping[int, _Node], here: _Node, stated: Sequence[int | None]
) -> FileVisibility:
    """The files of a save without a record, of which the nodes must not contradict each other.

    ``here`` is the node of this rank.
    """
    places: dict[str, _Place] = {}
    for name, holders in sorted(_holders(nodes).items()):
        readers = holders
        if _is_whole_module(name):
            firsts = [node.ranks[0] for node in holders]
            readers = [here if name in here.files else nodes[_first_with_rank_0(firsts, nodes)]]
        places[name] = _Place(readers[0].files[name], _ranks(readers), _ranks(holders))
        if len({node.files[name] for node in readers}) > 1:
            raise CheckpointError(
                f"{tag_dir}: {name} has {' and '.join(sorted({str(node.files[name]) for node in holders}))} bytes, "
                f"depending on the node (ranks {_numbers(_ranks(holders))}). Files of two saves are on the nodes."
            )
    world_sizes = {size: rank for rank, size in reversed(list(enumerate(stated))) if size is not None}
    if len(world_sizes) > 1:
        by_rank = " and ".join(f"{size} (rank {rank})" for size, rank in sorted(world_sizes.items()))
        raise CheckpointError(
            f"{tag_dir}: the nodes have files of saves by different numbers of ranks: {by_rank}. Remove those that "
            "do not belong."
        )
    if not world_sizes:
        rank_files(tag_dir, places)
        raise MissingFileError(f"{tag_dir}: no rank sees a *_model_states.pt. It is incomplete.")
    return _visibility(tag_dir, places, None, world_sizes.popitem()[0], 0)


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
