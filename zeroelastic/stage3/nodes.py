"""Which rank sees which file of a tag: where each node has a disk of its own, no rank sees all of them.

Ranks that see the same files are as good as one; a rank that sees none can still load what others see. The ranks agree
on one commit record first: what lies on a node beside another record belongs to another save, and is not seen.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.agree import gather, settle, together
from zeroelastic.checkpoint import (
    Checkpoint,
    Listing,
    TensorParallel,
    is_rank_file,
    open_checkpoint,
    open_model_states,
    parse_rank_file,
    rank_files,
    source_ranks,
)
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.record import RECORD_NAME, CommitRecord, read_record
from zeroelastic.relayed import Ranges, ReceivedFile, RecordedFile
from zeroelastic.stage3.exchange import swap
from zeroelastic.stage3.live import LiveState
from zeroelastic.storage import file_sizes


@dataclass(frozen=True, slots=True)
class Sight:
    """The files of a tag over all ranks: ``sizes`` of those that anybody sees, and the ranks that see each, ascending.

    The same on every rank, but for ``rank`` and ``record_bytes``, which is what this rank read of a commit record.
    ``seers`` are of the files of one save: those of ``record``, or, without one, all. ``world_size`` is the saved one.
    """

    tag_dir: Path
    rank: int
    sizes: Mapping[str, int]
    seers: Mapping[str, tuple[int, ...]]
    record: CommitRecord | None
    world_size: int
    record_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """The files, sorted: a number for each that means the same on every rank."""
        return tuple(sorted(self.seers))

    @property
    def away(self) -> frozenset[str]:
        """The files that others see and this rank does not."""
        return frozenset(name for name, ranks in self.seers.items() if self.rank not in ranks)

    @property
    def short_sighted(self) -> tuple[int, ...]:
        """The ranks that do not see all files."""
        everybody = set(range(dist.get_world_size()))
        return tuple(sorted(set().union(*(everybody - set(ranks) for ranks in self.seers.values()))))

    def reader(self, name: str, requester: int = 0) -> int:
        """The rank that reads a file for others; ``requester`` spreads what several of them want over those who can."""
        ranks, file = self.seers[name], parse_rank_file(name)
        return ranks[(requester + (file.rank if file is not None else 0)) % len(ranks)]


class _Glance(NamedTuple):
    """What one rank knows of the save: which record is beside its files, and the world size that headers state."""

    save: str | None
    global_steps: int
    world_size: int | None


def look_around(tag_dir: Path, dp_rank: int, tp: TensorParallel) -> Sight | None:
    """Which ranks see which files; None where all see the same, which is found out by one small gather. Collective.

    ``dp_rank`` is this rank in the data parallel group of tensor parallel rank ``tp``.

    Raises CheckpointError on every rank where the files of two saves cannot be told apart, MissingFileError where
    nobody sees any. Files that nobody sees are left to ``open_checkpoint`` to name.
    """
    seen: dict[str, int] = {}

    def look() -> str:
        seen.update(_list(tag_dir))
        return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()

    mark, marks = together(look)
    if len(set(marks)) == 1:
        return None
    rank = dist.get_rank()
    own: list[CommitRecord | None] = []

    def glance() -> tuple[_Glance, dict[str, int] | None]:
        record = read_record(tag_dir) if RECORD_NAME in seen else None
        own.append(record)
        told = marks.index(mark) == rank  # the first of those who see the same files tells of them
        steps = 0 if record is None else record.global_steps
        return _Glance(_save_of(record), steps, _stated_size(tag_dir, seen, dp_rank, tp)), seen if told else None

    _, glances = together(glance)
    by_mark = {marks[other]: files for other, (_, files) in enumerate(glances) if files is not None}
    files = [by_mark[other] for other in marks]
    saves = [known.save for known, _ in glances]
    first = {save: other for other, save in reversed(list(enumerate(saves))) if save is not None}
    told = gather(own[0] if rank in first.values() else None)
    records = {save: told[other] for save, other in first.items()}
    record_bytes = seen[RECORD_NAME] if own[0] is not None else 0
    found = [
        (not _missing(sight), record.global_steps, sight)
        for save, record in sorted(records.items())
        if record is not None
        for sight in [_sight_of_record(tag_dir, record, save, files, saves, record_bytes)]
    ]
    if found:
        return max(found, key=lambda one: one[:2])[2]
    return _sight_without(tag_dir, files, [known.world_size for known, _ in glances])


def _list(tag_dir: Path) -> dict[str, int]:
    try:
        found = file_sizes(tag_dir)
    except MissingFileError:
        return {}
    return {name: size for name, size in found.items() if is_rank_file(name) or name == RECORD_NAME}


def _save_of(record: CommitRecord | None) -> str | None:
    return None if record is None else record.save_id + record.content_root


def _stated_size(tag_dir: Path, seen: Mapping[str, int], dp_rank: int, tp: TensorParallel) -> int | None:
    """What a model states file that is here says of the world size, where no record does."""
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


def _sight_of_record(
    tag_dir: Path,
    record: CommitRecord,
    save: str,
    files: Sequence[Mapping[str, int]],
    saves: Sequence[str | None],
    record_bytes: int,
) -> Sight:
    """The files of one record's save: of ranks beside another record none count."""
    sizes: dict[str, int] = {}
    seers: dict[str, tuple[int, ...]] = {}
    for name, want in record.files.items():
        holders = [rank for rank, other in enumerate(saves) if other in (save, None) and name in files[rank]]
        right = [rank for rank in holders if files[rank][name] == want] or holders
        if right:
            sizes[name], seers[name] = files[right[0]][name], tuple(right)
    return Sight(tag_dir, dist.get_rank(), sizes, seers, record, record.world_size, record_bytes)


def _missing(sight: Sight) -> bool:
    return sight.record is not None and dict(sight.record.files) != dict(sight.sizes)


def _sight_without(tag_dir: Path, files: Sequence[Mapping[str, int]], stated: Sequence[int | None]) -> Sight:
    """The files of a save without a record, of which the nodes must not contradict each other."""
    sizes: dict[str, int] = {}
    seers: dict[str, tuple[int, ...]] = {}
    for name in sorted(set().union(*files)):
        holders = [rank for rank, seen in enumerate(files) if name in seen]
        sizes[name], seers[name] = files[holders[0]][name], tuple(holders)
        if len({files[rank][name] for rank in holders}) > 1:
            raise CheckpointError(
                f"{tag_dir}: {name} has {' and '.join(sorted({str(files[rank][name]) for rank in holders}))} bytes, "
                f"depending on the node (ranks {_numbers(holders)}). Files of two saves are on the nodes."
            )
    world_sizes = {size: rank for rank, size in reversed(list(enumerate(stated))) if size is not None}
    if len(world_sizes) > 1:
        said = " and ".join(f"{size} (rank {rank})" for size, rank in sorted(world_sizes.items()))
        raise CheckpointError(
            f"{tag_dir}: the nodes have files of saves by different numbers of ranks: {said}. Remove those that do not "
            "belong."
        )
    if not world_sizes:
        rank_files(tag_dir, sizes)
        raise MissingFileError(f"{tag_dir}: no rank sees a zero_pp_rank_*_model_states.pt. It is incomplete.")
    return Sight(tag_dir, dist.get_rank(), sizes, seers, None, world_sizes.popitem()[0], 0)


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


@dataclass(slots=True)
class _Headers:
    """The headers of a checkpoint that this rank reads, for itself and for others, each once; by file name.

    ``checkpoints`` are by tensor parallel rank: this rank's own, and those of which it has read a header for others.
    """

    sight: Sight
    listing: Listing
    tp_size: int
    checkpoints: dict[int, Checkpoint]
    recorded: dict[str, tuple[int, Ranges]] = field(default_factory=dict)

    def fetch(self, wanted: Iterable[str]) -> None:
        """Parse the wanted headers that others see, and give them those that they want. Collective."""
        asked: dict[int, list[str]] = {}
        for name in wanted:
            if name in self.listing.away:
                asked.setdefault(self.sight.reader(name), []).append(name)
        requests = [row.get(self.sight.rank, []) for row in gather(asked)]
        settle(partial(self.record, [name for names in requests for name in names]))
        answers = {
            peer: pickle.dumps([(name, *self.recorded[name]) for name in names])
            for peer, names in enumerate(requests)
            if names
        }
        arrived = swap(answers)
        settle(partial(self.take, [one for data in arrived.values() for one in pickle.loads(data)]))

    def record(self, names: Iterable[str]) -> None:
        """Read headers of files that this rank sees, those that it has not read yet."""
        for name in dict.fromkeys(names):
            if name in self.recorded:
                continue
            file = RecordedFile(self.sight.tag_dir / name)
            try:
                self.parse(name, file)
            finally:
                file.close()
            self.recorded[name] = (file.size, file.ranges)

    def take(self, arrived: Iterable[tuple[str, int, Ranges]]) -> None:
        """Parse headers that others have read."""
        for name, size, ranges in arrived:
            self.parse(name, ReceivedFile(self.sight.tag_dir / name, size, ranges))

    def parse(self, name: str, through: RecordedFile | ReceivedFile) -> None:
        file = parse_rank_file(name)
        assert file is not None
        if file.tp_rank not in self.checkpoints:
            tp = TensorParallel(file.tp_rank, self.tp_size)
            self.checkpoints[file.tp_rank] = open_checkpoint(self.sight.tag_dir, tp=tp, listing=self.listing)
        checkpoint = self.checkpoints[file.tp_rank]
        if file.kind == "model":
            checkpoint.model_states(file.rank, through=through)
            return
        model = checkpoint.model_files[file.rank].name
        if not checkpoint.has_models and model not in self.listing.away:
            self.record([model])  # rigid optimizer files do not name their parameters
        checkpoint.shard(file.rank, through=through)


def open_apart(sight: Sight, live: LiveState) -> Checkpoint:
    """The checkpoint, with every header that this rank needs and does not see from one that does. Collective.

    Raises on every rank what ``open_checkpoint`` and the parsing of headers raise on any.
    """
    listing = Listing(sight.sizes, sight.record, sight.world_size, sight.away, sight.record_bytes)
    checkpoint = settle(lambda: open_checkpoint(sight.tag_dir, tp=live.tp, listing=listing))
    headers = _Headers(sight, listing, live.tp.size, {live.tp.rank: checkpoint})
    saved, rank = checkpoint.world_size, live.rank
    own = rank if rank < saved else 0
    own_file = checkpoint.model_files[own].name
    settle(partial(headers.record, [own_file] if own_file not in listing.away else []))
    headers.fetch([own_file])
    numels = [*live.layout.numel.tolist(), *live.frozen.numel.tolist()]
    needed = {min(rank, saved - 1)}
    needed.update(source_ranks(numels, saved_world_size=saved, world_size=live.layout.world_size, rank=rank))
    wanted = [checkpoint.optim_files[source].name for source in sorted(needed)]
    if checkpoint.model_states(own).frozen is not None:
        wanted += [checkpoint.model_files[source].name for source in sorted(needed - {own})]
    headers.fetch(wanted)
    return checkpoint
