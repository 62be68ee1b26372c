"""A save into a directory that is waited for; and how files on a disk become a tag, also in the other modes.

The tag appears by one rename of the hidden directory in which everything was written (``runs.tag_directory``).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import (
    PendingCommit,
    Written,
    gather_written,
    not_committed,
    read_back,
    record_of,
)
from zeroelastic.deepspeed.save.mode import Destination, SaveMode
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError, UnsafePickleError, UnsupportedError
from zeroelastic.io.atomic import sync_path, write_atomically
from zeroelastic.io.storage import file_names, file_size
from zeroelastic.monitoring.spans import span
from zeroelastic.runs.names import LATEST
from zeroelastic.runs.run_store import open_run
from zeroelastic.runs.tag_directory import carry_over, make_staging_dir, publish_tag, staging_dir_of

logger = logging.getLogger(__name__)


class PlainMode(SaveMode):
    """A save that is written and committed before ``save_checkpoint`` returns."""

    def finish(self, engine: Engine) -> None:
        """Commit the save. Collective."""
        with self.destination.discarded_on_failure():
            self.add_contents(engine.device)
        with span("save.commit"):
            nbytes = self.destination.commit(self.save, self.barrier)
        self.barrier.close()
        self.after.committed(nbytes)
        self.note_saved()


class Directory(Destination):
    """A directory on a disk: a hidden directory beside the tag becomes the tag by one rename.

    Symbolic links are followed once, when the save begins: they may lead somewhere else when the tag is published.
    """

    def __init__(
        self, directory: Path, tag: str, save_id: str, leaders: tuple[int, ...], *, save_latest: bool, fsync: bool
    ) -> None:
        run_dir, self._place = Path(os.path.realpath(directory)), Path(os.path.realpath(directory / tag))
        staging_dir = staging_dir_of(self._place, save_id)
        super().__init__(
            directory / tag, run_dir=run_dir, deepspeed_dir=directory, staging_dir=staging_dir, leaders=leaders
        )
        self._root, self._save_id, self._fsync = run_dir, save_id, fsync
        self._latest = run_dir / LATEST if save_latest else None

    def begin(self) -> None:
        """Make the directory in which this rank sees others' files appear, where ``latest`` can be written too."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for directory in {self._root, self._place.parent}:
                open_run(directory).remove_dead_saves()
            make_staging_dir(self._place, self._save_id)
            with tempfile.TemporaryFile(dir=self._root):
                pass
        except OSError as error:
            shutil.rmtree(self.staging_dir, ignore_errors=True)
            raise SaveError(
                f"{self._place}: cannot be written: {error.strerror} ({error.filename or self._place}). Nothing was "
                "saved, and `latest` is unchanged."
            ) from error

    def discard(self) -> None:
        """Remove the hidden directory, on the rank that made it."""
        if self.is_leader:
            shutil.rmtree(self.staging_dir, ignore_errors=True)

    def commit(self, save: PendingCommit, barrier: SaveBarrier) -> int:
        """Make the files durable, write the record and publish the tag, on all ranks or none; then ``latest``."""
        with self.discarded_on_failure(), barrier.attribute_failures():
            own = barrier.all_or_raise(lambda: self._sync_and_read_back(save, barrier), "fsync")
            # to the ranks that write a record: rank 0, or leaders
            committed_at, unreadable, written = gather_written(own, save.file_names, to_all=any(self.leaders))
            barrier.all_or_raise(lambda: self._check_and_record(save, barrier, written, committed_at), "record")
            barrier.all_or_raise(lambda: self._publish() if self.is_leader else None, "publish")
        if not unreadable:
            save.lineage.commit(save.save_id, committed_at)
        barrier.outcome_note = "The checkpoint is complete; load it by its tag."
        if self._latest is not None:
            barrier.all_or_raise(lambda: self._point_latest(save) if self.is_leader else None, "latest")
        if dist.get_rank() != 0:
            return 0
        # Ranks that see one directory may name the same file: that of the whole module, at stages 1 and 2.
        by_leader = zip(self.leaders, written, strict=True)
        return sum({(leader, name): size for leader, own in by_leader for name, size in own.sizes.items()}.values())

    def _sync_and_read_back(self, save: PendingCommit, barrier: SaveBarrier) -> Written:
        """Make this rank's files durable, read them back as a load would, and leave their sizes to another rank."""
        not_before = save.lineage.next_time(time.time() if dist.get_rank() == 0 else 0.0)
        sizes: dict[str, int] = {}
        try:
            for name in save.file_names:
                path = self.staging_dir / name
                sizes[name] = path.stat().st_size
                if self._fsync:
                    sync_path(path)
            barrier.leave_note(json.dumps(sizes))
            directories = read_back(self.staging_dir, save)
        except UnreadableError as error:
            raise self._not_committed(str(error).rstrip(".")) from error
        except OSError as error:
            raise self._not_written(error) from error
        except (CheckpointError, UnsupportedError) as error:
            if save.checkpoint_format == "rigid" and isinstance(error, (UnsafePickleError, UnsupportedError)):
                return Written(sizes, {}, str(error), not_before)  # as stock DeepSpeed saves it
            raise self._not_committed(f"no load would take it: {str(error).rstrip('.')}") from error
        return Written(sizes, directories, None, not_before)

    def _check_and_record(
        self, save: PendingCommit, barrier: SaveBarrier, written: Sequence[Written], committed_at: float
    ) -> None:
        """Check what this rank sees of the files of another; the leader of a directory also writes the record."""
        self._check_sizes(barrier)
        if self.is_leader:
            self._write_record(save, written, committed_at)

    def _check_sizes(self, barrier: SaveBarrier) -> None:
        """Raise SaveError if this rank does not see the files of another one as that one does.

        The other is half of their directory's ranks away, and so on another node wherever there are two or more.
        """
        mates = [rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[dist.get_rank()]]
        other = mates[(mates.index(dist.get_rank()) + len(mates) // 2) % len(mates)]
        sizes = json.loads(barrier.note_of(other))
        self._require_seen({other: [name for name, n in sizes.items() if file_size(self.staging_dir / name) != n]})

    def _require_seen(self, unseen: Mapping[int, Sequence[str]]) -> None:
        """Raise SaveError if there are files, by the rank that wrote them, that this rank does not see as it does."""
        ranks = [rank for rank, names in unseen.items() if names]
        if ranks:
            raise self._not_committed(
                f"rank {dist.get_rank()} does not see what rank{'s' if len(ranks) > 1 else ''} "
                f"{', '.join(map(str, ranks))} wrote "
                f"({', '.join(unseen[ranks[0]])}): the directory is not the same on all nodes (which "
                '"use_node_local_storage": true allows), or another save is using it'
            )

    def _write_record(self, save: PendingCommit, written: Sequence[Written], committed_at: float) -> None:
        """Write the record of the whole save to each directory with a part of it, unless only DeepSpeed reads it."""
        found = file_names(self.staging_dir)
        here = [each.sizes if self.leaders[rank] == dist.get_rank() else {} for rank, each in enumerate(written)]
        self._require_seen({rank: [name for name in sizes if name not in found] for rank, sizes in enumerate(here)})
        unreadable = next((each.unreadable for each in written if each.unreadable is not None), None)
        if unreadable is not None and dist.get_rank() == 0:
            logger.warning("%s: saved without a commit record, only DeepSpeed loads it: %s", self.tag_dir, unreadable)
        record = record_of(save, written, committed_at)
        try:
            carry_over(self._place, self.staging_dir)
            if unreadable is None:
                write_atomically(self.staging_dir / RECORD_NAME, record_text(record), sync=self._fsync)
        except OSError as error:
            raise self._not_written(error) from error

    def _publish(self) -> None:
        """The one rename that makes the tag."""
        try:
            publish_tag(self.staging_dir, self._place, sync=self._fsync)
        except OSError as error:
            raise self._not_written(error) from error

    def _point_latest(self, save: PendingCommit) -> None:
        assert self._latest is not None
        try:
            write_atomically(self._latest, save.tag.encode(), sync=self._fsync)
        except OSError as error:
            raise SaveError(
                f"{self._latest}: cannot be written: {error.strerror}. The checkpoint {save.tag} is complete; load it "
                "by its tag."
            ) from error

    def _not_committed(self, why: str) -> SaveError:
        return not_committed(self.tag_dir, why)

    def _not_written(self, error: OSError) -> SaveError:
        return not_committed(self.tag_dir, f"{error.filename or self.tag_dir}: {error.strerror}")
