"""A save into an object store: its files go up from memory images, and the commit record is the last object.

A store has no rename, so the objects of a tag appear one by one. This order makes the tag complete or no checkpoint:

1. a mark in the tag (``checkpoint.marks``), created only where there is none: another save of the tag is noticed;
2. every rank transfers its files as multipart uploads, of which nothing is seen yet;
3. the record of an earlier save of the tag is removed, and the uploads of all ranks are completed;
4. the commit record; then the mark goes, and ``latest`` follows.

Before step 3 an earlier save of the tag is whole. DeepSpeed's own save writes into a directory of this machine, where
only the pickled parts of files appear, without payload (``torch_file.save``).
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_head, record_text
from zeroelastic.checkpoint.marks import MARK_NAME, UNFINISHED_NAME, new_mark, read_unfinished
from zeroelastic.checkpoint.shared_files import check_shared_files
from zeroelastic.checkpoint.tag_files import is_rank_file
from zeroelastic.core.digest import ByteArray
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import PendingCommit, Written, not_committed, read_back, record_of
from zeroelastic.deepspeed.save.directory import Destination, Steps, not_pointed
from zeroelastic.deepspeed.save.engine_proxy import not_written
from zeroelastic.deepspeed.save.shard_writer import Snapshot, writes_with_torch
from zeroelastic.deepspeed.storage_rules import saves_nothing
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError, UnsupportedError
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
from zeroelastic.torch_file.image import FileImage, ImageBlocks

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


class StoreTarget(Destination):
    """Where a save goes in a store, and what this rank has of it there.

    ``scratch`` is a directory of this machine, and ``files`` are the bytes of this rank's files by name.
    """

    tag_dir: RemotePath
    run_dir: RemotePath
    reading = "read back"

    def __init__(self, run: RemotePath, tag: str, save_id: str, options: Options, *, save_latest: bool) -> None:
        """Make a directory on this machine. Raises OSError."""
        self.scratch = Path(tempfile.mkdtemp(prefix="zeroelastic-save-"))
        staging_dir = self.scratch / "files"
        staging_dir.mkdir()
        super().__init__(
            run / tag,
            place=run / tag,
            run_dir=run,
            deepspeed_dir=self.scratch,
            staging_dir=staging_dir,
            leaders=(0,) * dist.get_world_size(),
        )
        self.save_id, self._save_latest = save_id, save_latest
        self._retries, self._part_bytes = options.retries, options.store_part_mib * _MIB
        self._uploads: list[Upload] = []
        self._marked = self._may_have_record = False
        self.files: dict[str, ByteArray] = {}

    def begin(self) -> None:
        """Remove what dead saves have left, and mark the tag. Raises SaveError."""
        with retrying(self._retries), saves_nothing(self.tag_dir):
            open_run(self.run_dir).remove_dead_saves()
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

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Transfer this rank's files as uploads of which none is completed. Raises SaveError naming the object."""

        def keep(image: FileImage) -> None:
            self.files[image.path.name] = image.data

        snapshot.write(keep)
        with retrying(self._retries):
            try:
                for path in sorted(self.staging_dir.iterdir()):  # what torch alone has written on this machine
                    if path.name not in self.files:
                        self.files[path.name] = np.memmap(path, dtype=np.uint8, mode="r")
                for name, data in self.files.items():
                    self._uploads.append(new_upload(self.tag_dir / name, data, self._part_bytes))
                    self._uploads[-1].send()
            except OSError as error:
                raise not_written(error.filename or self.tag_dir, error) from error

    def discard(self) -> None:
        """Remove what this rank has made of a save that failed; what cannot be removed is left for the next one."""
        with retrying(self._retries):
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
        ``failed``, its record and what dead ranks have completed go too. Failures are logged: the next save or
        ``prune`` does it.
        """
        try:
            if not self.is_ours():
                return
            for upload in open_uploads(self.tag_dir):
                abort_upload(upload)
            if failed:
                remove_objects([self.tag_dir / RECORD_NAME] if self._may_have_record else ())
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
        with retrying(self._retries):
            nbytes = super().commit(save, barrier)
        self.close()
        return nbytes

    def read_back(self, save: PendingCommit, barrier: SaveBarrier) -> Written:
        """Read this rank's files back, from memory, as a load would."""
        blocks = {name: ImageBlocks(data) for name, data in self.files.items()}
        try:
            directories = read_back(self.tag_dir, save, blocks)
        except (CheckpointError, UnsupportedError) as error:
            raise not_committed(self.tag_dir, f"no load would take it: {str(error).rstrip('.')}") from error
        return Written({name: len(data) for name, data in self.files.items()}, directories)

    def steps(
        self, save: PendingCommit, barrier: SaveBarrier, written: Sequence[Written], committed_at: float
    ) -> Steps:
        """The record of an earlier save goes, the uploads are completed, and the record of this one comes last."""
        return (
            ("upload", self._remove_record),
            ("complete", self._complete_uploads),
            ("record", lambda: self._write_record(save, written, committed_at)),
        )

    def _remove_record(self) -> None:
        """Remove the record of an earlier save of the tag: from here on it is no checkpoint until the new record."""
        if not self.is_leader:
            return
        with self.as_not_committed():
            self._require_ours()
            remove_objects([self.tag_dir / RECORD_NAME, self.tag_dir / MARK_NAME])

    def _complete_uploads(self) -> None:
        with self.as_not_committed():
            for upload in self._uploads:
                upload.complete()

    def _write_record(self, save: PendingCommit, written: Sequence[Written], committed_at: float) -> None:
        """Check that all files are there, remove those of ranks that the save does not have, and write the record."""
        if not self.is_leader:
            return
        record = record_of(save, written, committed_at)
        with self.as_not_committed():
            there = {one.name: one.nbytes for one in objects_below(self.tag_dir)}
            wrong = sorted(name for name, size in record.files.items() if there.get(name) != size)
            if wrong:
                why = f"{', '.join(wrong[:3])}: the store does not have what was uploaded"
                raise not_committed(self.tag_dir, why)
            check_shared_files(record.shared, self.tag_dir)
            self._require_ours()
            remove_objects(self.tag_dir / name for name in there if is_rank_file(name) and name not in record.files)
            self._may_have_record = True
            try:
                put_object(self.tag_dir / RECORD_NAME, record_text(record), create=True)
            except FileExistsError:
                if read_head(self.tag_dir / RECORD_NAME).get("save_id") != save.save_id:  # else an answer was lost
                    why = "another job has committed the same tag meanwhile"
                    raise not_committed(self.tag_dir, why) from None

    def point_latest(self, save: PendingCommit) -> None:
        """Take the mark away, put what belongs to the run and not to a tag, and let ``latest`` name the tag."""
        self.remove_mark(failed=False)
        self._marked = False
        try:
            for path in sorted(self.scratch.iterdir()):  # DeepSpeed's zero_to_fp32.py
                if path.is_file():
                    put_object(self.run_dir / path.name, path.read_bytes())
            if self._save_latest:
                put_object(self.run_dir / LATEST, save.tag.encode())
        except OSError as error:
            raise not_pointed(error.filename, save.tag, error) from error

    def _require_ours(self) -> None:
        if not self.is_ours():
            raise not_committed(self.tag_dir, "another job has begun to save the same tag meanwhile")
