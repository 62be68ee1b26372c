"""A save into an object store: its files go up from memory images, and the commit record is the last object.

A store has no rename, so the objects of a tag appear one by one. This order makes the tag complete or no checkpoint:

1. a mark in the tag (``checkpoint.marks``), created only where there is none: another save of the tag is noticed;
2. every rank transfers its files as multipart uploads, of which nothing is seen yet;
3. the record of an earlier save of the tag is removed, and the uploads of all ranks are completed;
4. the commit record; then the mark goes, and ``latest`` follows.

Before step 3 an earlier save of the tag is whole. DeepSpeed's own save writes into a directory of this machine, where
only the pickled parts of files appear, without payload (``torch_file.skeleton``).
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_head, record_text
from zeroelastic.checkpoint.marks import MARK_NAME, UNFINISHED_NAME, new_mark, read_unfinished
from zeroelastic.checkpoint.tag_files import is_rank_file
from zeroelastic.core.digest import ByteArray
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import LiveStreams
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.background import SnapshotMode
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import (
    PendingCommit,
    Written,
    gather_written,
    not_committed,
    read_back,
    record_of,
)
from zeroelastic.deepspeed.save.engine_proxy import not_written
from zeroelastic.deepspeed.save.mode import Destination
from zeroelastic.deepspeed.save.shard_writer import HostMemory, ShardWriter, Snapshot, writes_with_torch
from zeroelastic.deepspeed.storage_rules import saves_nothing
from zeroelastic.errors import CheckpointError, MissingFileError, SaveError, UnreadableError, UnsupportedError
from zeroelastic.io.objects import (
    Upload,
    abort_upload,
    new_upload,
    objects_below,
    open_uploads,
    put_object,
    remove_objects,
)
from zeroelastic.io.paths import RemotePath
from zeroelastic.io.remote import retrying
from zeroelastic.runs.names import LATEST
from zeroelastic.runs.object_run import unfinished_of
from zeroelastic.runs.run_store import open_run
from zeroelastic.torch_file.image import ImageBlocks

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def refuse_in_store(engine: Engine, live: LiveOptimizer) -> None:
    """Raise UnsupportedError for a run whose saves cannot go to a URL."""
    problem = None
    if not writes_with_torch(engine.checkpoint_engine):
        problem = f"this run saves with {type(engine.checkpoint_engine).__name__}, which writes to disks only"
    elif live.on_nvme:
        problem = "state on NVMe would take the host memory that it is kept out of"
    if problem is not None:
        raise UnsupportedError(
            f"saves to a URL need DeepSpeed's ordinary checkpoint engine and state in memory: {problem}. Save to a "
            "directory, and copy it."
        )


class StoreMode(SnapshotMode):
    """A save into a store that is committed before ``save_checkpoint`` returns."""

    def writer(self) -> Callable[..., ShardWriter]:
        return self.destination.snapshot_writer(HostMemory())

    def finish(self, engine: Engine) -> None:
        """Upload and commit the save. Collective."""
        self.finish_snapshot("save.finish")
        self.barrier.close()
        self.note_saved()


class StoreTarget(Destination):
    """Where a save goes in a store, and what this rank has of it there.

    ``retries`` and the bytes of a part are those of the run's options; ``scratch`` is a directory of this machine, and
    ``files`` are the bytes of this rank's files by name.
    """

    tag_dir: RemotePath

    def __init__(self, run: RemotePath, tag: str, save_id: str, options: Options, *, save_latest: bool) -> None:
        """Make a directory on this machine. Raises OSError."""
        self.scratch = Path(tempfile.mkdtemp(prefix="zeroelastic-save-"))
        staging_dir = self.scratch / "files"
        staging_dir.mkdir()
        super().__init__(
            run / tag,
            run_dir=run,
            deepspeed_dir=self.scratch,
            staging_dir=staging_dir,
            leaders=(0,) * dist.get_world_size(),
        )
        self.run, self.save_id = run, save_id
        self.retries, self._part_bytes = options.retries, options.store_part_mib * _MIB
        self._save_latest = save_latest
        self._uploads: list[Upload] = []
        self._marked = False
        self.files: dict[str, ByteArray] = {}

    def snapshot_writer(self, memory: HostMemory) -> Callable[..., ShardWriter]:
        return partial(StoreSnapshot, memory=memory, target=self)

    def begin(self) -> None:
        """Remove what dead saves have left, and mark the tag. Raises SaveError."""
        with retrying(self.retries), saves_nothing(self.tag_dir):
            open_run(self.run).remove_dead_saves()
            mark = new_mark("save", self.save_id)
            path = self.tag_dir / UNFINISHED_NAME
            try:
                put_object(path, mark.text, create=True)
            except FileExistsError:
                other = read_unfinished(self.tag_dir)
                if other is not None and other.life == "lives" and not other.is_own:
                    raise SaveError(
                        f"{self.tag_dir}: another process of this machine is saving or removing the same tag "
                        f"({UNFINISHED_NAME}). Nothing was saved, and `latest` is unchanged."
                    ) from None
                logger.warning("%s: taken over from a save that did not finish", self.tag_dir)
                left = unfinished_of(self.tag_dir, open_uploads(self.tag_dir))
                if left is not None:
                    left.remove()
                put_object(path, mark.text)
            self._marked = True

    def upload(self, name: str, data: ByteArray) -> Upload:
        """Transfer one file of the tag, which appears when its upload is completed. Raises OSError naming it."""
        made = new_upload(self.tag_dir / name, data, self._part_bytes)
        self._uploads.append(made)
        made.send()
        return made

    def discard(self) -> None:
        """Remove what this rank has made of a save that failed; what cannot be removed is left for the next one."""
        with retrying(self.retries):
            for upload in self._uploads:
                upload.discard()
            self._uploads.clear()
            if self._marked:
                self.remove_mark(failed=True)
        self.close()

    def close(self) -> None:
        """Remove the directory on this machine, and forget the images."""
        self._uploads.clear()
        self.files.clear()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remove_mark(self, *, failed: bool) -> None:
        """Take the mark away, after open uploads; nothing where another save has taken over.

        Uploads are left open by ranks that died, and by a request to begin one whose answer was lost. Of a save that
        ``failed``, what dead ranks have completed goes too. Failures are logged: the next save or ``prune`` does it.
        """
        try:
            if not self.is_ours():
                return
            for upload in open_uploads(self.tag_dir):
                abort_upload(upload)
            if failed:
                left = unfinished_of(self.tag_dir, ())
                names = [one.name for one in left.objects if is_rank_file(one.name)] if left is not None else []
                remove_objects(self.tag_dir / name for name in names)
            remove_objects([self.tag_dir / UNFINISHED_NAME])
        except (OSError, UnreadableError) as error:
            logger.warning("%s: what a save has left could not be removed: %s", self.tag_dir, error)

    def is_ours(self) -> bool:
        """Whether the mark in the tag is still that of this save. Raises UnreadableError."""
        mark = read_unfinished(self.tag_dir)
        return mark is not None and mark.save_id == self.save_id

    def commit(self, save: PendingCommit, barrier: SaveBarrier) -> int:
        """Make the tag of the files that all ranks have transferred, on all ranks or none; then ``latest``."""
        with retrying(self.retries), self.discarded_on_failure(), barrier.attribute_failures():
            own = barrier.all_or_raise(lambda: self._read_back(save), "read back")
            committed_at, _, written = gather_written(own, save.file_names, to_all=False)
            barrier.all_or_raise(lambda: self._remove_record() if self.is_leader else None, "upload")
            barrier.all_or_raise(self._complete_uploads, "complete")
            record = partial(self._write_record, save, written, committed_at)
            barrier.all_or_raise(lambda: record() if self.is_leader else None, "record")
        save.lineage.commit(save.save_id, committed_at)
        barrier.outcome_note = "The checkpoint is complete; load it by its tag."
        with retrying(self.retries):
            barrier.all_or_raise(lambda: self._point_latest(save) if self.is_leader else None, "latest")
        self.close()
        return sum({name: size for one in written for name, size in one.sizes.items()}.values())

    def _read_back(self, save: PendingCommit) -> Written:
        """Read this rank's files back, from memory, as a load would."""
        not_before = save.lineage.next_time(time.time() if dist.get_rank() == 0 else 0.0)
        blocks = {name: ImageBlocks(data) for name, data in self.files.items()}
        try:
            directories = read_back(self.tag_dir, save, blocks)
        except (CheckpointError, UnsupportedError) as error:
            raise not_committed(self.tag_dir, f"no load would take it: {str(error).rstrip('.')}") from error
        return Written({name: len(data) for name, data in self.files.items()}, directories, None, not_before)

    def _remove_record(self) -> None:
        """Remove the record of an earlier save of the tag: from here on it is no checkpoint until the new record."""
        with self._as_not_committed():
            self._require_ours()
            remove_objects([self.tag_dir / RECORD_NAME, self.tag_dir / MARK_NAME])

    def _complete_uploads(self) -> None:
        with self._as_not_committed():
            for upload in self._uploads:
                upload.complete()

    def _write_record(self, save: PendingCommit, written: Sequence[Written], committed_at: float) -> None:
        """Check that all files are there, remove those of ranks that the save does not have, and write the record."""
        record = record_of(save, written, committed_at)
        with self._as_not_committed():
            there = {one.name: one.nbytes for one in objects_below(self.tag_dir)}
            wrong = sorted(name for name, size in record.files.items() if there.get(name) != size)
            if wrong:
                why = f"{', '.join(wrong[:3])}: the store does not have what was uploaded"
                raise not_committed(self.tag_dir, why)
            self._require_ours()
            remove_objects(self.tag_dir / name for name in there if is_rank_file(name) and name not in record.files)
            try:
                put_object(self.tag_dir / RECORD_NAME, record_text(record), create=True)
            except FileExistsError:
                if read_head(self.tag_dir / RECORD_NAME).get("save_id") != save.save_id:  # else an answer was lost
                    why = "another job has committed the same tag meanwhile"
                    raise not_committed(self.tag_dir, why) from None

    def _point_latest(self, save: PendingCommit) -> None:
        """Take the mark away, put what belongs to the run and not to a tag, and let ``latest`` name the tag."""
        self.remove_mark(failed=False)
        self._marked = False
        try:
            for path in sorted(self.scratch.iterdir()):  # DeepSpeed's zero_to_fp32.py
                if path.is_file():
                    put_object(self.run / path.name, path.read_bytes())
            if self._save_latest:
                put_object(self.run / LATEST, save.tag.encode())
        except OSError as error:
            raise SaveError(
                f"{error.filename}: cannot be written: {error.strerror}. The checkpoint {save.tag} is complete; load "
                "it by its tag."
            ) from error

    def _require_ours(self) -> None:
        if not self.is_ours():
            raise not_committed(self.tag_dir, "another job has begun to save the same tag meanwhile")

    @contextmanager
    def _as_not_committed(self) -> Iterator[None]:
        """An error of the store within becomes that of a save that ends before its commit."""
        try:
            yield
        except (MissingFileError, UnreadableError) as error:
            raise not_committed(self.tag_dir, str(error).rstrip(".")) from error
        except OSError as error:
            if isinstance(error, SaveError):
                raise
            raise not_committed(self.tag_dir, f"{error.filename}: {error.strerror}") from error


class StoreSnapshot(Snapshot):
    """A snapshot whose files are uploaded; memory: that of its images, and ``objects.THREADS`` parts on their way."""

    def __init__(
        self,
        original: Any,
        live: LiveOptimizer,
        streams: LiveStreams,
        options: Options,
        memory: HostMemory,
        target: StoreTarget,
    ) -> None:
        super().__init__(original, live, streams, options, memory)
        self._target = target

    def write(self) -> None:
        """Digest and transfer all files; none appears. Raises SaveError naming the file."""
        target, files = self._target, self._target.files
        with retrying(target.retries):
            try:
                for image in self._images:
                    self._learn(image.complete(before_last=self._fill_table, executor=self._options.host_io_engine))
                    files[image.path.name] = image.data
                for path in sorted(target.staging_dir.iterdir()):  # what torch alone has written on this machine
                    if path.name not in files:
                        files[path.name] = np.memmap(path, dtype=np.uint8, mode="r")
                for name, data in files.items():
                    target.upload(name, data)
            except OSError as error:
                raise not_written(error.filename or target.tag_dir, error) from error
