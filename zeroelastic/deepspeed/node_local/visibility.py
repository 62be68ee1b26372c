"""Which rank sees which file of a tag: where each node has a disk of its own, no rank sees all of them.

Ranks that see the same files are interchangeable; a rank that sees none can still load what others see. The ranks first
agree on one commit record: files on a node beside another record belong to another save, and are ignored.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, read_record
from zeroelastic.checkpoint.file_names import is_rank_file, parse_rank_file
from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.checkpoint.open import Checkpoint, Listing, open_checkpoint, rank_files
from zeroelastic.checkpoint.tensor_parallel import TensorParallel
from zeroelastic.core.plan import source_ranks
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.node_local.all_to_all import all_to_all_bytes
from zeroelastic.deepspeed.node_local.headers import Ranges, ReceivedFile, RecordedFile
from zeroelastic.distributed.collective import all_gather, all_or_raise, broadcast
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError
from zeroelastic.io.storage import file_sizes


@dataclass(frozen=True, slots=True)
class FileVisibility:
    """The files of a tag over all ranks: their ``sizes``, and the ranks that see each, ascending.

    The same on every rank, but for ``rank`` and ``record_bytes``, which is what this rank read of a commit record.
    ``readers_of`` has the files of one save: those of ``record``, or all of them without a record. ``world_size`` is
    the saved one.
    """

    tag_dir: Path
    rank: int
    sizes: Mapping[str, int]
    readers_of: Mapping[str, tuple[int, ...]]
    record: CommitRecord | None
    world_size: int
    record_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """The files, sorted: a number for each that means the same on every rank."""
        return tuple(sorted(self.readers_of))

    @property
    def listing(self) -> Listing:
        """What ``open_checkpoint`` needs to know of files that are not all seen here."""
        return Listing(self.sizes, self.record, self.world_size, self.remote_files, self.record_bytes)

    @property
    def remote_files(self) -> frozenset[str]:
        """The files that others see and this rank does not."""
        return frozenset(name for name, ranks in self.readers_of.items() if self.rank not in ranks)

    @property
    def partial_ranks(self) -> tuple[int, ...]:
        """The ranks that do not see all files."""
        everybody = set(range(dist.get_world_size()))
        return tuple(sorted(set().union(*(everybody - set(ranks) for ranks in self.readers_of.values()))))

    def reader(self, name: str, requester: int = 0) -> int:
        """The rank that reads a file for others; ``requester`` spreads requests over all ranks that see the file."""
        ranks, file = self.readers_of[name], parse_rank_file(name)
        return ranks[(requester + (file.rank if file is not None else 0)) % len(ranks)]


class _LocalSave(NamedTuple):
    """What one rank knows of the save: which record is beside its files, or the world size that headers state."""

    save: str | None
    world_size: int | None


def gather_visibility(
    tag_dir: Path, dp_rank: int, tp: TensorParallel
) -> tuple[Mapping[str, int], FileVisibility | None]:
    """The files that this rank sees, with their sizes, and which ranks see which; None where all see the same.

    Of the ranks that see one directory, the first lists it and sends the others what it found: on a file system that
    all ranks share, the directory is listed once. ``dp_rank`` is this rank in the data parallel group of tensor
    parallel rank ``tp``. Collective.

    Raises CheckpointError on every rank where the files of two saves cannot be told apart, MissingFileError where no
    rank sees any. Files that no rank sees are left to ``open_checkpoint`` to name.
    """
    rank = dist.get_rank()
    identities = all_gather(_identity(tag_dir))
    listing_rank = [identities.index(identity) for identity in identities]
    own = all_or_raise(lambda: _list(tag_dir) if listing_rank[rank] == rank else None)
    if len(set(identities)) == 1:
        return broadcast(own) or {}, None
    listings = all_gather(own)
    files = [_of_ranks(listings[lister] or {}) for lister in listing_rank]
    sizes = listings[listing_rank[rank]] or {}
    if all(seen == files[0] for seen in files):
        return sizes, None

    def read() -> tuple[CommitRecord | None, _LocalSave]:
        record = read_record(tag_dir) if RECORD_NAME in files[rank] else None
        return record, _LocalSave(_save_of(record), _stated_size(tag_dir, files[rank], dp_rank, tp))

    record, local = all_or_raise(read)
    locals_ = all_gather(local)
    saves = [known.save for known in locals_]
    first = {save: other for other, save in reversed(list(enumerate(saves))) if save is not None}
    sent = all_gather(record if rank in first.values() else None)
    records = {save: sent[other] for save, other in first.items()}
    record_bytes = files[rank][RECORD_NAME] if record is not None else 0
    found = [
        (not _missing(visibility), record.global_steps, visibility)
        for save, record in sorted(records.items())
        if record is not None
        for visibility in [_visibility_of_record(tag_dir, record, save, files, saves, record_bytes)]
    ]
    if found:
        return sizes, max(found, key=lambda one: one[:2])[2]
    return sizes, _visibility_without_record(tag_dir, files, [known.world_size for known in locals_])


def _identity(tag_dir: Path) -> tuple[int, int, int] | None:
    """What tells one directory, in one state, from all others: alike on all nodes that share its file system.

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


def _of_ranks(sizes: Mapping[str, int]) -> dict[str, int]:
    """The files of ranks and the commit record."""
    return {name: size for name, size in sizes.items() if is_rank_file(name) or name == RECORD_NAME}


def _save_of(record: CommitRecord | None) -> str | None:
    return None if record is None else record.save_id + record.content_root


def _stated_size(tag_dir: Path, seen: Mapping[str, int], dp_rank: int, tp: TensorParallel) -> int | None:
    """The world size that a model states file on this node states, where there is no record."""
    if RECORD_NAME in seen:
        return None
    ranks = {
        file.rank: name
        for name in seen
        if (file := parse_rank_file(name)) is not None and file.kind == "model" and file.tp_rank == tp.rank
    }
    if not ranks:
        return None
    rank = dp_rank if dp_rank in ranks else min(ranks)
    return open_model_states(tag_dir / ranks[rank], rank, world_size=None, tp=tp).world_size


def _visibility_of_record(
    tag_dir: Path,
    record: CommitRecord,
    save: str,
    files: Sequence[Mapping[str, int]],
    saves: Sequence[str | None],
    record_bytes: int,
) -> FileVisibility:
    """The files of one record's save; files that a rank sees beside another record are left out."""
    sizes: dict[str, int] = {}
    readers_of: dict[str, tuple[int, ...]] = {}
    for name, want in record.files.items():
        holders = [rank for rank, other in enumerate(saves) if other in (save, None) and name in files[rank]]
        right = [rank for rank in holders if files[rank][name] == want] or holders
        if right:
            sizes[name], readers_of[name] = files[right[0]][name], tuple(right)
    return FileVisibility(tag_dir, dist.get_rank(), sizes, readers_of, record, record.world_size, record_bytes)


def _missing(visibility: FileVisibility) -> bool:
    return visibility.record is not None and dict(visibility.record.files) != dict(visibility.sizes)


def _visibility_without_record(
    tag_dir: Path, files: Sequence[Mapping[str, int]], stated: Sequence[int | None]
) -> FileVisibility:
    """The files of a save without a record, of which the nodes must not contradict each other."""
    sizes: dict[str, int] = {}
    readers_of: dict[str, tuple[int, ...]] = {}
    for name in sorted(set().union(*files)):
        holders = [rank for rank, seen in enumerate(files) if name in seen]
        sizes[name], readers_of[name] = files[holders[0]][name], tuple(holders)
        if len({files[rank][name] for rank in holders}) > 1:
            raise CheckpointError(
                f"{tag_dir}: {name} has {' and '.join(sorted({str(files[rank][name]) for rank in holders}))} bytes, "
                f"depending on the node (ranks {_numbers(holders)}). Files of two saves are on the nodes."
            )
    world_sizes = {size: rank for rank, size in reversed(list(enumerate(stated))) if size is not None}
    if len(world_sizes) > 1:
        by_rank = " and ".join(f"{size} (rank {rank})" for size, rank in sorted(world_sizes.items()))
        raise CheckpointError(
            f"{tag_dir}: the nodes have files of saves by different numbers of ranks: {by_rank}. Remove those that "
            "do not belong."
        )
    if not world_sizes:
        rank_files(tag_dir, sizes)
        raise MissingFileError(f"{tag_dir}: no rank sees a zero_pp_rank_*_model_states.pt. It is incomplete.")
    return FileVisibility(tag_dir, dist.get_rank(), sizes, readers_of, None, world_sizes.popitem()[0], 0)


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


@dataclass(slots=True)
class _Headers:
    """The headers of a checkpoint that this rank reads, for itself and for others, each once; by file name.

    ``checkpoints`` are by tensor parallel rank: this rank's own, and those of which it has read a header for others.
    """

    visibility: FileVisibility
    listing: Listing
    tp_size: int
    checkpoints: dict[int, Checkpoint]
    compare_directories: bool
    recorded: dict[str, tuple[int, Ranges]] = field(default_factory=dict)

    def fetch(self, wanted: Iterable[str]) -> None:
        """Parse the wanted headers of files that other ranks see, and send theirs to other ranks. Collective."""
        asked: dict[int, list[str]] = {}
        for name in wanted:
            if name in self.listing.remote_files:
                asked.setdefault(self.visibility.reader(name), []).append(name)
        requests = [row.get(self.visibility.rank, []) for row in all_gather(asked)]
        all_or_raise(partial(self.record, [name for names in requests for name in names]))
        answers = {
            peer: pickle.dumps([(name, *self.recorded[name]) for name in names])
            for peer, names in enumerate(requests)
            if names
        }
        arrived = all_to_all_bytes(answers)
        all_or_raise(partial(self.take, [one for data in arrived.values() for one in pickle.loads(data)]))

    def record(self, names: Iterable[str]) -> None:
        """Read the headers, not read before, of files that this rank sees."""
        for name in dict.fromkeys(names):
            if name in self.recorded:
                continue
            file = RecordedFile(self.visibility.tag_dir / name)
            try:
                self.parse(name, file)
            finally:
                file.close()
            self.recorded[name] = (file.size, file.ranges)

    def take(self, arrived: Iterable[tuple[str, int, Ranges]]) -> None:
        """Parse headers that others have read."""
        for name, size, ranges in arrived:
            self.parse(name, ReceivedFile(self.visibility.tag_dir / name, size, ranges))

    def parse(self, name: str, through: RecordedFile | ReceivedFile) -> None:
        file = parse_rank_file(name)
        assert file is not None
        if file.tp_rank not in self.checkpoints:
            tp = TensorParallel(file.tp_rank, self.tp_size)
            self.checkpoints[file.tp_rank] = open_checkpoint(
                self.visibility.tag_dir, tp=tp, listing=self.listing, compare_directories=self.compare_directories
            )
        checkpoint = self.checkpoints[file.tp_rank]
        if file.kind == "model":
            checkpoint.model_states(file.rank, through=through)
            return
        model = checkpoint.model_files[file.rank].name
        if not checkpoint.has_models and model not in self.listing.remote_files:
            self.record([model])  # rigid optimizer files do not name their parameters
        checkpoint.shard(file.rank, through=through)


def open_with_peers(visibility: FileVisibility, live: LiveOptimizer, *, compare_directories: bool = True) -> Checkpoint:
    """The checkpoint, with every header that this rank needs and does not see from one that does. Collective.

    ``compare_directories`` is that of ``open_checkpoint``.
    Raises on every rank what ``open_checkpoint`` and the parsing of headers raise on any, and UnsupportedError for a
    checkpoint of stage 1 or 2.
    """
    listing = visibility.listing

    def opened() -> Checkpoint:
        found = open_checkpoint(
            visibility.tag_dir, tp=live.tp, listing=listing, compare_directories=compare_directories
        )
        if found.whole_model:
            raise UnsupportedError(
                f"{visibility.tag_dir}: ranks {list(visibility.partial_ranks)} do not see all files of this checkpoint "
                "of ZeRO stage 1 or 2. Loading these from disks that differ between nodes is not supported: copy all "
                "files to every node, or to a disk that all nodes share."
            )
        return found

    checkpoint = all_or_raise(opened)
    headers = _Headers(visibility, listing, live.tp.size, {live.tp.rank: checkpoint}, compare_directories)
    saved, rank = checkpoint.world_size, live.rank
    own = rank if rank < saved else 0
    own_file = checkpoint.model_files[own].name
    all_or_raise(partial(headers.record, [own_file] if own_file not in listing.remote_files else []))
    headers.fetch([own_file])
    numels = [*live.layout.numel.tolist(), *live.frozen.numel.tolist()]
    needed = {min(rank, saved - 1)}
    needed.update(source_ranks(numels, saved_world_size=saved, world_size=live.layout.world_size, rank=rank))
    wanted = [checkpoint.optim_files[source].name for source in sorted(needed)]
    if checkpoint.model_states(own).frozen is not None:
        wanted += [checkpoint.model_files[source].name for source in sorted(needed - {own})]
    headers.fetch(wanted)
    return checkpoint
