"""After a commit: a tag is uploaded to a store by a thread behind training, and tags beyond the newest ``"keep"`` go.

An object store has no rename. In this order a store never has a tag with a record and without its files, or with those
of another save, wherever an upload ends:

1. rank 0's node puts a mark, removes the record of an earlier save of the tag and then the rest of it, and puts the
   save's id into the mark;
2. each node puts its files, and then an object that says so;
3. when all of them are there, rank 0's node puts the record; the marks go, and ``latest`` follows.

There is no collective: nodes meet in the store. What failed is tried again after the next commit.

Old tags are removed by the rules of ``runs.verdicts``, and stricter ones, because nobody is asked: only tags with a
commit record and the trained parameters of the engine count, and only they are removed. A removal that fails warns; the
save is committed by then.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  registers its handler for the end, before this module does
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, read_record
from zeroelastic.checkpoint.tag_files import UNFINISHED_NAME
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.directory import SaveDirectory
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    SaveError,
    ZeroElasticError,
    missing_directory,
    printable,
    some,
)
from zeroelastic.io.atomic import put_file, put_object, remove_objects, sizes_below
from zeroelastic.io.paths import FilePath, relative_name, store_path
from zeroelastic.io.remote import RemotePath
from zeroelastic.io.retries import reason, retrying
from zeroelastic.io.storage import file_sizes, read_whole
from zeroelastic.observers import Uploaded, publish
from zeroelastic.runs.names import CHECKPOINT_FOLDER, LATEST, run_of
from zeroelastic.runs.verdicts import OTHER_PARAMS, Decision, PrunePlan, check_quickly, plan_prune, remove_tag

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0

_warned: set[str] = set()


class Upload:
    """The upload of a committed tag, as far as this node's leader does it.

    ``run`` is the directory of the run in the store, or in it the folder that a framework has for this checkpoint;
    ``target`` is the tag directory there.
    """

    def __init__(self, saved: SaveDirectory, options: Options) -> None:
        self.saved, self.options, self.began = saved, options, time.monotonic()
        root = store_path(str(options.upload))
        folder = relative_name(saved.run_dir, run_of(saved.run_dir))
        self.run = root if folder == "." else root / folder
        self.target = self.run / saved.tag

    def send(self) -> int:
        """Upload this node's part of the files that are not up yet; returns the bytes of the tag's files.

        Raises MissingFileError where the tag is gone, replaced or has no record; OSError, ZeroElasticError.
        """
        saved, target, record = self.saved, self.target, self._record()
        done = f"{UNFINISHED_NAME}.{saved.save_id}"  # and the rank of a node's leader: the node has uploaded its files
        if saved.rank == 0:
            self._make_room()
        else:
            self._wait(lambda: self._is_begun() or self._is_committed(), "rank 0's node has not begun to upload it")
        if not self._is_committed():
            there = sizes_below(target)
            for name in sorted(record.files.keys() - saved.elsewhere):
                if there.get(name) != record.files[name]:  # from an attempt that failed
                    put_file(saved.place / name, target / name)
            content = (saved.place / RECORD_NAME).read_bytes()
            self._record()  # all that was read is still of this save
            if saved.rank != 0:
                put_object(target / f"{done}.{saved.rank}", b"")
            else:
                files = record.files | {f"{done}.{rank}": 0 for rank in {*saved.leaders} - {0}}
                self._wait(lambda: files.items() <= sizes_below(target).items(), "other nodes have not uploaded theirs")
                if not self._is_begun():
                    raise SaveError("another job has begun to upload the same tag")
                put_object(target / RECORD_NAME, content)
        if saved.rank == 0:
            remove_objects(target / name for name in sizes_below(target) if name.startswith(UNFINISHED_NAME))
        return sum(record.files.values())

    def _record(self) -> CommitRecord:
        """The commit record of this save. Raises MissingFileError where the tag is gone or of another save."""
        if (record := self._record_at(self.saved.place)) is None:
            raise missing_directory(self.saved.place)
        return record

    def _record_at(self, tag_dir: FilePath) -> CommitRecord | None:
        record = read_record(tag_dir)
        return record if record is not None and record.save_id == self.saved.save_id else None

    def _make_room(self) -> None:
        """Mark the tag as one of this save, after all that there is of another one was removed."""
        if self._is_begun() or self._is_committed():
            return
        mark = self.target / UNFINISHED_NAME
        there = [self.target / name for name in sizes_below(self.target)]
        if there:
            put_object(mark, b"")
            remove_objects([self.target / RECORD_NAME])
            remove_objects(path for path in there if path != mark)
        put_object(mark, self.saved.save_id.encode())

    def _is_begun(self) -> bool:
        with suppress(MissingFileError):
            return read_whole(self.target / UNFINISHED_NAME, limit=1 << 20) == self.saved.save_id.encode()
        return False

    def _is_committed(self) -> bool:
        with suppress(CheckpointError):  # a record that is damaged is none
            return self._record_at(self.target) is not None
        return False

    def _wait(self, ready: Callable[[], bool], why: str) -> None:
        end = time.monotonic() + self.options.save_timeout_s
        while not ready():
            if time.monotonic() > end:
                raise SaveError(f"{why} within {self.options.save_timeout_s:g} s")
            time.sleep(_PAUSE_S)


class Uploads:
    """The uploads of this process, oldest first: those that wait, after the one that is under way, and that failed."""

    def __init__(self) -> None:
        """Have none; also called in a process that was forked: they are its parent's."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="zeroelastic-upload", daemon=True)
        self._waiting: list[Upload] = []
        self._failed: list[Upload] = []
        self._latest: dict[RemotePath, float] = {}

    def add(self, saved: SaveDirectory, options: Options) -> None:
        """Have a tag that was just committed uploaded, if the options say where to. Called on leaders."""
        if options.upload is None:
            return
        with self._changed:
            others = [one for one in (*self._failed, *self._waiting[1:]) if one.saved.place != saved.place]
            self._waiting, self._failed = [*self._waiting[:1], *others, Upload(saved, options)], []
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.notify_all()

    def has(self, tag_dir: Path) -> bool:
        """Whether a tag is being uploaded, or waits for the one before it."""
        return any(one.saved.place == tag_dir for one in self._waiting)

    def wait(self, timeout_s: float | None = None) -> list[Upload]:
        """Wait until nothing is under way, and return the uploads that failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
            return [*self._failed, *self._waiting]

    def at_exit(self) -> None:
        """Wait for the last upload, ``save_timeout_s`` at most, and log the tags that are not uploaded."""
        for one in self.wait(max((one.options.save_timeout_s for one in self._waiting), default=0.0)):
            logger.error("%s: NOT UPLOADED to %s. Copy it, %s last.", one.saved.place, one.target, RECORD_NAME)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                upload = self._waiting[0]
            done = self._try(upload)
            with self._changed:
                self._waiting.remove(upload)
                self._failed += [] if done else [upload]
                self._changed.notify_all()

    def _try(self, upload: Upload) -> bool:
        """Return whether a tag is uploaded, or is not to be uploaded any more."""
        saved, run = upload.saved, upload.run
        try:
            with retrying(upload.options.retries):
                nbytes = upload.send()
                if saved.rank == 0 and saved.save_latest and upload.began > self._latest.get(run, 0.0):
                    put_object(run / LATEST, saved.tag.encode())
                    self._latest[run] = upload.began
        except MissingFileError:
            logger.warning(
                "%s: not uploaded: the tag was removed, was saved again, or has no commit record", saved.place
            )
            return True
        except Exception as error:  # file systems raise errors of many kinds
            why = f"{reason(error)}. It is tried again after the next commit"
            logger.error("%s: NOT UPLOADED to %s: %s", saved.place, upload.target, why)
            return False
        if saved.rank == 0:
            publish(Uploaded(saved.tag, str(saved.place), str(upload.target), nbytes, time.monotonic() - upload.began))
        return True


uploads = Uploads()
os.register_at_fork(after_in_child=uploads.__init__)  # type: ignore[misc]
# This is called before executors end, without which the name of a host is not looked up; ``atexit`` is called later.
getattr(threading, "_register_atexit", atexit.register)(uploads.at_exit)


def remove_old_tags(root: Path, tag: str, options: Options, *, over_nodes: bool) -> tuple[str, ...]:
    """Remove the tags of ``root`` beyond the newest ``options.keep``; return the names of the removed ones.

    ``tag`` was just committed. ``over_nodes``: this directory has the files of some ranks only. Never raises: this is
    called on one rank, and others would wait for it.
    """
    if options.keep is None:
        return ()
    if (limit := _limit_of_framework(root, tag)) is not None:
        if limit not in _warned:
            _warned.add(limit)
            logger.warning('"keep" removes no checkpoints here: each has its own folder. Use %s.', limit)
        return ()
    removed: list[str] = []
    try:
        check = _check_own_files if over_nodes else check_quickly
        plan = plan_prune(root, keep=options.keep, check=check, of=tag)
        _warn_of_others(plan)
        for decision in plan.removals:
            step, every = decision.tag.step, options.keep_every
            stays = every is not None and (step is None or step % every == 0)
            stays = stays or uploads.has(Path(str(decision.tag.tag_dir)))
            if not stays and _remove(plan, decision):
                removed.append(decision.tag.name)
    except Exception as error:
        expected = isinstance(error, (ZeroElasticError, OSError))
        logger.warning('%s: "keep": old tags were not removed: %s', root, error, exc_info=not expected)
    return tuple(removed)


def _warn_of_others(plan: PrunePlan) -> None:
    """Warn once per directory that it has checkpoints of other parameters, which nothing removes."""
    others = [decision.tag.name for decision in plan.decisions if decision.reason == OTHER_PARAMS]
    if others and str(plan.root) not in _warned:
        _warned.add(str(plan.root))
        logger.warning(
            '%s: "keep" counts and removes only checkpoints with the trained parameters of this engine; others are %s. '
            "Remove those that are not needed by hand or with zeroelastic prune.",
            *(plan.root, some(map(printable, others))),
        )


def _remove(plan: PrunePlan, decision: Decision) -> bool:
    """Return whether a tag is gone; the log says why it is not."""
    try:
        kept = remove_tag(plan, decision)
    except OSError as error:
        logger.warning(
            '%s: "keep": the old tag %s was not removed: %s: %s. Remove it by hand or with zeroelastic prune.',
            *(plan.root, decision.tag.name, error.filename, error.strerror),
        )
        return False
    if kept is not None:
        logger.info('%s: "keep": the old tag %s was not removed: %s', plan.root, decision.tag.name, kept)
    return kept is None


def _limit_of_framework(root: Path, tag: str) -> str | None:
    """Return the setting of a framework that gives each checkpoint a folder with other files in it."""
    if tag == "pytorch_model":
        return "total_limit of accelerate's ProjectConfiguration"
    if tag == "checkpoint":
        return "save_top_k of Lightning's ModelCheckpoint"
    return "save_total_limit of TrainingArguments" if CHECKPOINT_FOLDER.fullmatch(root.name) else None


def _check_own_files(tag_dir: FilePath) -> tuple[str, ...]:
    """``check_quickly`` where the files of other ranks are on other nodes. Raises CheckpointError."""
    record = read_record(tag_dir)
    if record is None:
        return ("has no commit record.",)
    return tuple(
        f"{name} has {size} bytes, {record.files[name]} by the commit record."
        for name, size in file_sizes(tag_dir).items()
        if name in record.files and record.files[name] != size
    )
