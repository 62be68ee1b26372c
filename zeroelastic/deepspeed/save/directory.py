"""The directory of a save, and the steps of a commit, which makes its files a tag.

The tag appears by one rename of the hidden directory in which everything was written (``runs.tag_directory``).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import (
    PendingCommit,
    Written,
    as_save_error,
    gather_written,
    not_committed,
    read_back,
    record_of,
)
from zeroelastic.deepspeed.save.shard_writer import Snapshot
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    SaveError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
)
from zeroelastic.io.atomic import sync_path, write_atomically
from zeroelastic.io.storage import file_size, place
from zeroelastic.runs.names import LATEST, run_of
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.tag_directory import PublishedTag, carry_over, make_staging_dir, publish_tag, staging_dir_of

logger = logging.getLogger(__name__)


class SaveDirectory:
    """The directory in which a save is written, and the tag ``tag_dir`` that it becomes by a rename.

    DeepSpeed saves to ``deepspeed_dir``; what it writes for the tag goes into ``staging_dir``. ``run_dir`` has the tags
    of the run, and ``place`` is the tag directory: symbolic links on the way to them are followed once, when the save
    begins, because they may lead somewhere else when the tag is published. Ranks that see the same directory have the
    same one of ``leaders``, by rank: the first of them, which acts for all of them. ``elsewhere`` are files that rank
    0's record names and that are in other directories.
    """

    def __init__(
        self, directory: Path, tag: str, save_id: str, leaders: tuple[int, ...], *, save_latest: bool, fsync: bool
    ) -> None:
        self.tag_dir, self.deepspeed_dir, self.leaders = directory / tag, directory, leaders
        self.run_dir, self.place = Path(os.path.realpath(directory)), Path(os.path.realpath(directory / tag))
        self.staging_dir = staging_dir_of(self.place, save_id)
        self.rank = dist.get_rank()
        self.is_leader = leaders[self.rank] == self.rank
        self.tag, self.save_id, self.save_latest, self._fsync = tag, save_id, save_latest, fsync
        self.elsewhere: frozenset[str] = frozenset()
        self._published: PublishedTag | None = None

    def begin(self) -> None:
        """Make the hidden directory, and check that files can be made in the directory of the run."""
        try:
            with as_save_error(self.place):
                self.run_dir.mkdir(parents=True, exist_ok=True)
                for directory in {self.run_dir, self.place.parent, run_of(self.run_dir)}:
                    RunStore(directory).sweep()
                make_staging_dir(self.place, self.save_id)
                with tempfile.TemporaryFile(dir=self.run_dir):
                    pass
        except SaveError:
            shutil.rmtree(self.staging_dir, ignore_errors=True)
            raise

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Write this rank's files from a snapshot. Raises SaveError."""
        snapshot.write(lambda image: image.write(sync=self._fsync))

    def discard(self) -> None:
        """Put the tag back as it was, and remove the hidden directory, on the rank that made it."""
        if not self.is_leader:
            return
        try:
            if self._published is not None:  # and another rank has not, or has ended
                self._published.take_back()
        except OSError as error:
            logger.error(
                "%s: the tag of a save that was not committed is left in place, and what it replaced beside it: %s",
                *(self.tag_dir, error),
            )
        else:
            shutil.rmtree(self.staging_dir, ignore_errors=True)

    @contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Discard the save if it fails within this context."""
        try:
            yield
        except Exception:
            self.discard()
            raise

    @contextmanager
    def as_not_committed(self) -> Iterator[None]:
        """Within this context, an error of the disk becomes that of a save that ends before its commit."""
        try:
            yield
        except (MissingFileError, UnreadableError) as error:
            raise not_committed(self.tag_dir, str(error).rstrip(".")) from error
        except SaveError:
            raise
        except OSError as error:
            raise not_committed(self.tag_dir, f"{error.filename or self.tag_dir}: {error.strerror}") from error

    def commit(self, save: PendingCommit, barrier: SaveBarrier) -> int:
        """Make the tag of files that are all written, on all ranks or none; then ``latest``. Collective.

        Returns the bytes of all files on rank 0, and 0 on the others. Raises SaveError on every rank when a file is
        missing or wrong, or a rank does not arrive: then the tag is what it was before the save.
        """
        with self.discarded_on_failure(), barrier.attribute_failures():
            own = barrier.all_or_raise(lambda: self._read_back(save), "fsync")
            committed_at, written = gather_written(own, save.last_save)
            barrier.all_or_raise(lambda: self._record(save, written, committed_at), "record")
            barrier.all_or_raise(lambda: self._publish(barrier), "publish")
        if all(each.unreadable is None for each in written):
            save.last_save.commit(save.save_id, committed_at)
        barrier.outcome_note = "The checkpoint is complete; load it by its tag."
        barrier.all_or_raise(lambda: self._point_latest() if self.is_leader else None, "latest")
        if self.rank != 0:
            return 0
        # Ranks that see one directory may name the same file: that of the whole module, at stages 1 and 2.
        by_leader = zip(self.leaders, written, strict=True)
        return sum({(leader, name): size for leader, own in by_leader for name, size in own.sizes.items()}.values())

    def _read_back(self, save: PendingCommit) -> Written:
        """Make this rank's files durable, and read them back as a load would."""
        sizes: dict[str, int] = {}
        with self.as_not_committed():
            for name in (*save.file_names, *save.expert_files):
                path = self.staging_dir / name
                sizes[name] = path.stat().st_size
                if self._fsync:
                    sync_path(path)
            try:
                return Written(sizes, read_back(self.staging_dir, save), own_weights=save.own_weights)
            except (CheckpointError, UnsupportedError) as error:
                only_stock_reads = isinstance(error, (UnsafePickleError, UnsupportedError))
                if save.checkpoint_format == "rigid" and only_stock_reads:
                    return Written(sizes, {}, str(error))  # as stock DeepSpeed saves it
                raise not_committed(self.tag_dir, f"no load would take it: {str(error).rstrip('.')}") from error

    def _record(self, save: PendingCommit, written: Sequence[Written], committed_at: float) -> None:
        """Check that this rank sees another's files; a leader writes the record of the whole save to its directory.

        There is none where only DeepSpeed reads the files.
        """
        self._check_sizes(written)
        if not self.is_leader:
            return
        found = place(self.staging_dir).file_names()
        here = [each.sizes if self.leaders[rank] == self.rank else {} for rank, each in enumerate(written)]
        self._require_seen({rank: [name for name in sizes if name not in found] for rank, sizes in enumerate(here)})
        unreadable = next((each.unreadable for each in written if each.unreadable is not None), None)
        if unreadable is not None and self.rank == 0:
            logger.warning("%s: saved without a commit record, only DeepSpeed loads it: %s", self.tag_dir, unreadable)
        record = record_of(save, written, committed_at)
        owners = {name: rank for rank in (*range(len(written)), 0) for name in written[rank].sizes}
        self.elsewhere = frozenset(name for name, rank in owners.items() if self.leaders[rank] != self.rank)
        with self.as_not_committed():
            carry_over(self.place, self.staging_dir)
            if unreadable is None:
                write_atomically(self.staging_dir / RECORD_NAME, record_text(record), sync=self._fsync)

    def _check_sizes(self, written: Sequence[Written]) -> None:
        """Raise SaveError if this rank does not see the files of another one as that one does.

        The other is half of their directory's ranks away, and so on another node wherever there are two or more.
        """
        mates = [rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[self.rank]]
        other = mates[(mates.index(self.rank) + len(mates) // 2) % len(mates)]
        sizes = written[other].sizes.items()
        self._require_seen({other: [name for name, n in sizes if file_size(self.staging_dir / name) != n]})

    def _require_seen(self, unseen: Mapping[int, Sequence[str]]) -> None:
        """Raise SaveError for files, by the rank that wrote them, that this rank does not see as that rank does."""
        ranks = [rank for rank, names in unseen.items() if names]
        if ranks:
            raise not_committed(
                self.tag_dir,
                f"rank {self.rank} does not see what rank{'s' if len(ranks) > 1 else ''} "
                f"{', '.join(map(str, ranks))} wrote "
                f"({', '.join(unseen[ranks[0]])}): the directory is not the same on all nodes (which "
                '"use_node_local_storage": true allows), or another save is using it',
            )

    def _publish(self, barrier: SaveBarrier) -> None:
        """Make the tag by one rename. This process may have been stopped since the save began.

        The replaced tag stays until all ranks have done this: nodes may have directories of their own.
        """
        if self.is_leader:
            if barrier.is_given_up():
                return  # the others have said that the tag is not committed
            with self.as_not_committed():
                self._published = publish_tag(self.staging_dir, self.place, sync=self._fsync)

    def _point_latest(self) -> None:
        """Remove the replaced tag, and let ``latest`` name the new one, if the save asks for it. Raises SaveError."""
        if self._published is not None:
            self._published.finish()
        if self.save_latest:
            try:
                write_atomically(self.run_dir / LATEST, self.tag.encode(), sync=self._fsync)
            except OSError as error:
                raise SaveError(
                    f"{self.run_dir / LATEST}: cannot be written: {error.strerror}. The checkpoint {self.tag} is "
                    "complete; load it by its tag."
                ) from error
