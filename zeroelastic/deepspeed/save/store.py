"""A save into an object store: its files go up from memory images, and the commit record is the last object.

A store has no rename, so the objects of a tag appear one by one. This order makes the tag complete or no checkpoint:

1. a mark in the tag (``checkpoint.unfinished``), created only where there is none: another save of the tag is noticed;
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_head, record_text
from zeroelastic.checkpoint.file_names import is_rank_file
from zeroelastic.checkpoint.quarantine import MARK_NAME
from zeroelastic.checkpoint.unfinished import UNFINISHED_NAME, new_mark, read_unfinished
from zeroelastic.core.digest import ByteArray
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import LiveStreams
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import PendingCommit, not_committed, read_back, record_of
from zeroelastic.deepspeed.save.engine_proxy import not_written
from zeroelastic.deepspeed.save.shard_writer import writes_with_torch
from zeroelastic.deepspeed.save.snapshot import HostMemory, Snapshot
from zeroelastic.deepspeed.save.written import Written, gather_written
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
from zeroelastic.io.remote import Retries, retrying
from zeroelastic.tags.names import LATEST, directory_of
from zeroelastic.tags.store_leftovers import leftover_of, remove_dead_saves, remove_leftover
from zeroelastic.torch_file.header import Blocks
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


@dataclass(slots=True)
class StoreTarget:
    """Where a save goes in a store, and what this rank has of it there; ``scratch`` is a directory of this machine.

    ``retries`` and ``part_bytes`` are those of the run's options.
    """

    run: RemotePath
    tag: str
    save_id: str
    scratch: Path
    retries: Retries
    part_bytes: int
    uploads: list[Upload] = field(default_factory=list)
    marked: bool = False

    @property
    def tag_dir(self) -> RemotePath:
        """The directory of the tag."""
        found = directory_of(self.run, self.tag)
        assert isinstance(found, RemotePath)
        return found

    @property
    def staging_dir(self) -> Path:
        """Where the files of this rank are laid out."""
        return self.scratch / "files"

    def begin(self) -> None:
        """On one rank: remove what dead saves have left, and mark the tag. Raises SaveError."""
        with retrying(self.retries), saves_nothing(self.tag_dir):
            remove_dead_saves(self.run)
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
                left = leftover_of(self.tag_dir, open_uploads(self.tag_dir))
                if left is not None:
                    remove_leftover(left)
                put_object(path, mark.text)
            self.marked = True

    def upload(self, name: str, data: ByteArray) -> Upload:
        """Transfer one file of the tag, which appears when its upload is completed. Raises OSError naming it."""
        made = new_upload(self.tag_dir / name, data, self.part_bytes)
        self.uploads.append(made)
        made.send()
        return made

    def discard(self) -> None:
        """Remove what this rank has made of a save that failed; what cannot be removed is left for the next one."""
        with retrying(self.retries):
            for upload in self.uploads:
                upload.discard()
            self.uploads.clear()
            if self.marked:
                self.remove_mark(failed=True)
        self.close()

    def close(self) -> None:
        """Remove the directory on this machine, and forget the images."""
        self.uploads.clear()
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
                left = leftover_of(self.tag_dir, ())
                names = [one.name for one in left.objects if is_rank_file(one.name)] if left is not None else []
                remove_objects(self.tag_dir / name for name in names)
            remove_objects([self.tag_dir / UNFINISHED_NAME])
        except (OSError, UnreadableError) as error:
            logger.warning("%s: what a save has left could not be removed: %s", self.tag_dir, error)

    def is_ours(self) -> bool:
        """Whether the mark in the tag is still that of this save. Raises UnreadableError."""
        mark = read_unfinished(self.tag_dir)
        return mark is not None and mark.save_id == self.save_id


def store_target(run: RemotePath, tag: str, save_id: str, options: Options) -> StoreTarget:
    """The target of a save, with a directory on this machine of its own. Raises OSError."""
    scratch = Path(tempfile.mkdtemp(prefix="zeroelastic-save-"))
    target = StoreTarget(run, tag, save_id, scratch, options.retries, options.store_part_mib * _MIB)
    target.staging_dir.mkdir()
    return target


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
        self.files: dict[str, ByteArray] = {}

    def write(self) -> None:
        """Digest and transfer all files; none appears. Raises SaveError naming the file."""
        with retrying(self._target.retries):
            try:
                self._complete()
                for name, data in self.files.items():
                    self._target.upload(name, data)
            except OSError as error:
                raise not_written(error.filename or self._target.tag_dir, error) from error

    def _complete(self) -> None:
        """Make the files in memory: the images, and what torch alone has written on this machine."""
        for image in self._images:
            self._learn(image.complete(before_last=self._fill_table, executor=self._options.host_io_engine))
            self.files[image.path.name] = image.data
        for path in sorted(self._target.staging_dir.iterdir()):
            if path.name not in self.files:
                self.files[path.name] = np.memmap(path, dtype=np.uint8, mode="r")

    @property
    def blocks(self) -> Mapping[str, Blocks]:
        """The files of this rank, to be read back."""
        return {name: ImageBlocks(data) for name, data in self.files.items()}


def commit_to_store(save: PendingCommit, shard: StoreSnapshot, target: StoreTarget, barrier: SaveBarrier) -> int:
    """Make the tag of the files that all ranks have transferred, on all ranks or none; then ``latest``. Collective.

    Returns the bytes of all files on rank 0, 0 elsewhere. Raises SaveError on every rank, as ``commit``.
    """
    first = dist.get_rank() == 0
    with retrying(target.retries), discarded(target), barrier.attribute_failures():
        own = barrier.all_or_raise(lambda: _settled(save, shard), "its files were read back")
        committed_at, _, written = gather_written(own, save.written, to_all=False)
        barrier.all_or_raise(lambda: _replace(save, target) if first else None, "its files were transferred")
        barrier.all_or_raise(lambda: _complete(save, target), "its uploads were completed")
        barrier.all_or_raise(
            lambda: _record(save, target, written, committed_at) if first else None, "its commit record was written"
        )
    save.lineage.commit(save.save_id, committed_at)
    barrier.outcome_note = "The checkpoint is complete; load it by its tag."
    with retrying(target.retries):
        barrier.all_or_raise(lambda: _follow(save, target) if first else None, "`latest` was written")
    target.close()
    return sum({name: size for one in written for name, size in one.sizes.items()}.values())


@contextmanager
def discarded(target: StoreTarget) -> Iterator[None]:
    """Remove what this rank has made of a save when it fails."""
    try:
        yield
    except Exception:
        target.discard()
        raise


def _settled(save: PendingCommit, shard: StoreSnapshot) -> Written:
    """Read this rank's files back, from memory, as a load would."""
    not_before = save.lineage.next_time(time.time() if dist.get_rank() == 0 else 0.0)
    try:
        directories = read_back(
            save.tag_dir / save.written[0],
            save.tag_dir / save.written[1],
            save.expected,
            format=save.checkpoint_format,
            save_id=save.save_id,
            contents=save.contents,
            through=shard.blocks,
        )
    except (CheckpointError, UnsupportedError) as error:
        raise not_committed(save, f"no load would take it: {str(error).rstrip('.')}") from error
    return Written({name: len(data) for name, data in shard.files.items()}, directories, None, not_before)


def _replace(save: PendingCommit, target: StoreTarget) -> None:
    """Remove the record of an earlier save of the tag: from here on the tag is no checkpoint until the new record."""
    try:
        if not target.is_ours():
            raise not_committed(save, "another job has begun to save the same tag meanwhile")
        remove_objects([target.tag_dir / RECORD_NAME, target.tag_dir / MARK_NAME])
    except SaveError:
        raise
    except UnreadableError as error:
        raise not_committed(save, str(error).rstrip(".")) from error
    except OSError as error:
        raise not_committed(save, f"{error.filename}: {error.strerror}") from error


def _complete(save: PendingCommit, target: StoreTarget) -> None:
    try:
        for upload in target.uploads:
            upload.complete()
    except OSError as error:
        raise not_committed(save, f"{error.filename}: {error.strerror}") from error


def _record(save: PendingCommit, target: StoreTarget, written: Sequence[Written], committed_at: float) -> None:
    """Check that all files are there, remove those of ranks that the save does not have, and write the record."""
    record = record_of(save, written, committed_at)
    try:
        there = {one.name: one.nbytes for one in objects_below(target.tag_dir)}
        wrong = sorted(name for name, size in record.files.items() if there.get(name) != size)
        if wrong:
            raise not_committed(save, f"{', '.join(wrong[:3])}: the store does not have what was uploaded")
        if not target.is_ours():
            raise not_committed(save, "another job has begun to save the same tag meanwhile")
        remove_objects(target.tag_dir / name for name in there if is_rank_file(name) and name not in record.files)
        put_object(target.tag_dir / RECORD_NAME, record_text(record), create=True)
    except SaveError:
        raise
    except (MissingFileError, UnreadableError) as error:
        raise not_committed(save, str(error).rstrip(".")) from error
    except FileExistsError:
        if read_head(target.tag_dir / RECORD_NAME).get("save_id") != save.save_id:  # else an answer was lost
            raise not_committed(save, "another job has committed the same tag meanwhile") from None
    except OSError as error:
        raise not_committed(save, f"{error.filename}: {error.strerror}") from error


def _follow(save: PendingCommit, target: StoreTarget) -> None:
    """Take the mark away, put what belongs to the run and not to a tag, and let ``latest`` name the tag."""
    target.remove_mark(failed=False)
    target.marked = False
    try:
        for path in sorted(target.scratch.iterdir()):  # DeepSpeed's zero_to_fp32.py
            if path.is_file():
                put_object(target.run / path.name, path.read_bytes())
        if save.latest is not None:
            put_object(target.run / LATEST, save.tag.encode())
    except OSError as error:
        raise SaveError(
            f"{error.filename}: cannot be written: {error.strerror}. The checkpoint {save.tag} is complete; load it "
            "by its tag."
        ) from error
