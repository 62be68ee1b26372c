"""Checkpoints in the memory of the nodes: one of this job's, every few steps, complete on all nodes or not there.

Training waits while its state is copied. A thread does the rest: digests, copies for other nodes, the commit record,
and the rename that makes the generation. The generation before stays until the new one is complete on all nodes. A
training step waits for that before it changes a weight, so that a loss of nodes costs one step at most.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeroelastic import observers
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE
from zeroelastic.deepspeed.engine import Engine, options_of
from zeroelastic.deepspeed.engine_state import last_save_of, refuse_to_save, state_of
from zeroelastic.deepspeed.live.digests import live_streams, whole_contents
from zeroelastic.deepspeed.live.kinds import covered_live
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import difference, replicated_facts, token_of
from zeroelastic.deepspeed.load.load import is_of_all_ranks
from zeroelastic.deepspeed.options import MemoryOptions, Options
from zeroelastic.deepspeed.save.changed_modules import refuse_changed_module
from zeroelastic.deepspeed.save.commit import PendingCommit, Written, gather_written, record_of, written_files
from zeroelastic.deepspeed.save.shard_writer import HostMemory, Snapshot, write_local_files
from zeroelastic.distributed.collective import (
    all_gather,
    all_gather_alike,
    all_or_raise,
    broadcast,
    collectives_over,
    end_group,
    gather,
)
from zeroelastic.elastic.memory.copies import Placement, nodes_of, protect
from zeroelastic.elastic.memory.memory_file import Slot
from zeroelastic.elastic.memory.place import NOTE_NAME, MemoryNote, Place, RunPlace, tag_of
from zeroelastic.elastic.memory.reaper import start_reaper
from zeroelastic.errors import ConfigError, SaveError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.report import MemoryReport
from zeroelastic.torch_file.image import FileImage, ImageBlocks
from zeroelastic.torch_file.save import write_skeleton
from zeroelastic.torch_file.zip_directory import read_directory

logger = logging.getLogger(__name__)

T = TypeVar("T")

RACK = "ZEROELASTIC_RACK"
"""An environment variable: the rack, power supply or zone of this node. Copies go to another one where there is one."""

_MOST_LOST = 2
"""A rank that has lost the process group makes it fail on the others with the next generation at the latest."""

_EXIT_S = 5.0
_threads = weakref.WeakSet[threading.Thread]()
_open = weakref.WeakValueDictionary[Path, "MemoryCheckpoints"]()
"""Those of this process that are not closed, by the directory of their run."""


@atexit.register
def _await_threads() -> None:
    """Wait for the threads before the interpreter ends: in a collective, one would end the process by SIGABRT then."""
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


class _MemorySnapshot(Snapshot):
    """Keeps what it gets in files of shared memory, which ``take`` gives by name and size, pinned or not.

    The pickled part of each file is written by torch (``torch_file.save``); storages are copied straight to their
    places in the file.
    """

    def __init__(
        self,
        original: Any,
        live: LiveOptimizer,
        options: Options,
        take: Callable[[str, int, bool], torch.Tensor],
    ) -> None:
        super().__init__(original, live, live_streams(live, with_frozen=True), options, HostMemory())
        self._take = take
        self._files: list[tuple[FileImage, Path, str]] = []

    def save(self, state_dict: Any, path: str) -> None:
        """Copy one file: torch writes its pickled part to ``path``. Raises SaveError, UnsupportedError."""
        name, skeleton_path = Path(path).name, Path(path)
        try:
            skeleton = write_skeleton(state_dict, skeleton_path)
            memory = self._take(name, skeleton.nbytes, skeleton.on_gpu)
            image = FileImage(skeleton, memory, digest_ranges=self._runs, last=[self.table])
        except OSError as error:
            skeleton_path.unlink(missing_ok=True)
            raise SaveError(f"{error.filename or path}: {error.strerror}") from error
        self._keep(image)
        self._files.append((image, skeleton_path, name))

    def complete_files(self) -> dict[str, tuple[torch.Tensor, str]]:
        """Read what was not copied, digest and checksum all of it; by name, a file and the digest of its zip directory.

        Raises SaveError.
        """
        done = {}
        for image, skeleton_path, name in self._files:
            try:
                found = image.complete(before_last=self._fill_table, executor=self._options.host_io_engine)
                self.learn_of_runs(found)
                skeleton_path.unlink()
            except OSError as error:
                raise SaveError(f"{error.filename or name}: {error.strerror}") from error
            blocks = ImageBlocks(image.data)
            directory = read_directory(blocks.read, blocks.size).digest
            done[name] = torch.from_numpy(image.data), directory
        return done


@dataclass(frozen=True, slots=True)
class _Copied:
    """The state of this rank, copied into shared memory between two steps, and what the commit record says of it."""

    live: LiveOptimizer
    facts: dict[str, str]
    shard: _MemorySnapshot
    save: PendingCommit


@dataclass(slots=True)
class _Generation:
    """A generation in the making: what the thread needs of the moment in which the state was copied."""

    step: int
    save_id: str
    slot: Slot
    began: float
    parent: str | None
    begun: str | None
    copied: _Copied | Exception
    stall_seconds: float = 0.0

    @property
    def tag(self) -> str:
        return tag_of(self.step, self.save_id)


class MemoryCheckpoints:
    """The memory checkpoints of one engine, whose run saves to ``directory``. Making one is collective.

    ``capture`` after each step for which ``due`` is true, ``close`` at the end. Errors of a generation are logged and
    end only that one. ``last`` is the report of the last generation that has ended, on rank 0. ``is_broken`` says that
    this rank has lost the process group: as soon as all ranks know of it, others are made ``after`` these.
    """

    def __init__(self, engine: Engine, directory: FilePath, *, after: MemoryCheckpoints | None = None) -> None:
        """Those ``after`` leave out more generations each time, unless one was complete: each failure may take long.

        Raises ConfigError without ``"memory"`` in the options, UnsupportedError for a run that is not covered.
        """
        options = options_of(engine)
        if options.memory is None:
            raise ConfigError('"memory" is not in the "zeroelastic" block. Add {"memory": {"every": 1, "copies": 1}}.')
        self.options: MemoryOptions = options.memory
        self.last: MemoryReport | None = None
        self.complete_step: int | None = None
        self._engine, self._run_options = engine, options
        live = all_or_raise(lambda: _require_covered(engine))
        place = all_or_raise(_own_place)
        rack = os.environ.get(RACK, "")
        self.placement = _placement(all_gather((f"{place.node} {place.path}", rack)), self.options)
        self._run = RunPlace.of(place.path, directory, params_digest(live.layout.params))
        all_or_raise(lambda: self._require_no_twin(directory))
        self._attempt = broadcast(uuid.uuid4().hex)
        rank = dist.get_rank()
        self._node = self.placement.nodes[self.placement.node_of[rank]]
        self._leads_node = self._node[0] == rank
        own = self._run.writing(self._attempt) / f"rank{rank}"
        self._slots = [Slot(own / "0"), Slot(own / "1")]
        self._next = self._number = 0
        all_or_raise(self._make_directories)
        self._written = written_files(engine, self._run.path, "tag")
        self._tied: Mapping[str, str] = broadcast(all_or_raise(engine._get_shared_params))
        timeout = timedelta(seconds=options.save_timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._timeout_s = options.save_timeout_s
        self._thread: threading.Thread | None = None
        self.is_broken = False
        self._logged: set[str] = set()
        self._pause: int = 0 if after is None or after._number > _MOST_LOST else 2 * after._pause + 1
        self._left_out = 0
        self._stall_seconds = 0.0
        base = engine.optimizer.optimizer
        hook = getattr(base, "register_step_pre_hook", None)
        self._hook = hook(lambda *args: self.wait()) if hook is not None else None
        state_of(engine).memory = self
        _open[self._run.path] = self
        if dist.get_rank() == 0:
            logger.info("%s", self._describe())

    def due(self, step: int) -> bool:
        """Whether the state of this step is to be kept."""
        return step % self.options.every == 0

    def capture(self, client_state: Mapping[str, Any]) -> None:
        """Copy the state as it is now; a thread completes the generation. No collective; waits for the last one."""
        began = time.monotonic()
        self.wait()
        if self._left_out < self._pause:
            self._left_out += 1
            return
        self._number += 1
        if self.is_broken:
            return
        save_id = hashlib.sha256(f"{self._attempt} {self._number}".encode()).hexdigest()[:32]
        slot, followed = self._slots[self._next], last_save_of(self._engine)
        slot.begin()
        copied: _Copied | Exception
        try:
            refuse_to_save(self._engine, "memory")
            copied = self._copy(slot, save_id, client_state)
        except Exception as error:  # raised on all ranks by the thread, for which they wait
            copied = error
        step = int(self._engine.global_steps)
        made = _Generation(step, save_id, slot, began, followed.save_id, followed.begun, copied)
        made.stall_seconds = self._stall_seconds + time.monotonic() - began
        self._stall_seconds = 0.0
        self._thread = threading.Thread(target=self._complete, args=(made,), name="zeroelastic-memory", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def _copy(self, slot: Slot, save_id: str, client_state: Mapping[str, Any]) -> _Copied:
        """Copy the state of this rank, which may change when this returns. Raises SaveError where memory is lacking."""
        engine, options = self._engine, self._run_options
        if not (slot.directory.is_dir() and self._run.complete.is_dir()):  # somebody has emptied the shared memory
            _own_place()
            self._run.create()
            slot.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        live = covered_live(engine, engine.optimizer)
        refuse_changed_module(engine, live, "memory", with_frozen=True)
        facts = replicated_facts(live)
        shard = _MemorySnapshot(engine.checkpoint_engine, live, options, slot.take)
        directory = slot.directory.parent / "layout" / "tag"  # a private one of this rank, for what torch writes
        directory.mkdir(parents=True, exist_ok=True)
        write_local_files(
            engine,
            live,
            shard,
            directory=directory,
            save_id=save_id,
            client_state=client_state,
            writes_module=self._leads_node,
            tied=self._tied,
        )
        shard.complete()
        save = PendingCommit(
            tag=tag_of(int(engine.global_steps), save_id),
            save_id=save_id,
            checkpoint_format="elastic" if live.per_param else "rigid",
            sharing=live.sharing,
            global_steps=int(engine.global_steps),
            layout=live.layout,
            sub_groups=live.local_params(live.layout),
            groups=live.groups,
            frozen=live.frozen.params,
            allow_globals=tuple(options.allow_globals),
            train_batch_size=int(engine.train_batch_size()),
            file_names=self._written,
            last_save=last_save_of(engine),
            lost_micro_batches=0,
            trained=frozenset(param.name for param in live.layout.params),
        )
        return _Copied(live, facts, shard, save)

    def wait(self) -> None:
        """Wait until the generation in the making is complete, or has failed."""
        if self._thread is None:
            return
        began = time.monotonic()
        self._thread.join(2 * self._timeout_s)
        if self._thread.is_alive():
            self.is_broken = True
            logger.error("a memory checkpoint did not end within %.0f s, and is given up", 2 * self._timeout_s)
        self._thread = None
        self._stall_seconds += time.monotonic() - began

    def forget(self) -> None:
        """Remove the generations: the run does not continue from them. Collective."""
        self.wait()
        all_or_raise(lambda: self._run.remove_tags() if self._leads_node else None)
        self.complete_step = None

    def close(self, *, failed: bool = False) -> None:
        """Wait for the generation in the making, unless training has failed. Generations stay until the job ends.

        After a failure the other ranks may be gone, or wait for this one: it must end.
        """
        if _open.get(self._run.path) is self:
            del _open[self._run.path]
        if not failed:
            self.wait()
            if not self.is_broken:
                end_group(self._group)
                del self._group
        if self._hook is not None:
            self._hook.remove()

    def _require_no_twin(self, directory: FilePath) -> None:
        """Raise ConfigError where another engine of this process keeps its checkpoints in the same place."""
        other = _open.get(self._run.path)
        if other is not None and other._engine is not self._engine:
            raise ConfigError(
                f"{directory}: two engines with the same trained parameters would keep memory checkpoints for this "
                "directory, and each would remove those of the other. Give each a directory of its own, or leave "
                '"memory" out of the "zeroelastic" block of one.'
            )

    def _make_directories(self) -> None:
        try:
            self._run.create()
            for slot in self._slots:
                slot.directory.mkdir(mode=0o700, parents=True)
            if self._leads_node:
                self._run.remove_writing(but=self._attempt)
        except OSError as error:
            raise SaveError(
                f"{error.filename or self._run.path}: {error.strerror}: shared memory for checkpoints cannot be used. "
                'Leave out "memory", or set ZEROELASTIC_MEMORY_DIR to a directory in memory that can be written.'
            ) from error

    def _complete(self, made: _Generation) -> None:
        """What the thread does. Collective over the threads."""
        error: BaseException | None = None
        figures: list[tuple[int, int]] = []
        try:
            with collectives_over(self._group):
                figures = self._finish(made)
            self._next ^= 1
            self.complete_step = made.step
        except Exception as caught:
            error = caught
            self.is_broken |= not is_of_all_ranks(caught)
            if self.is_broken and dist.is_initialized():
                # A rank that still waits for this one in a collective of the group fails too, when its connections end.
                traceback.clear_frames(caught.__traceback__)
                dist.destroy_process_group(self._group)
                del self._group
            if self._leads_node:
                shutil.rmtree(self._staging(made), ignore_errors=True)
        if dist.is_initialized():
            self._log(made, error)
            if dist.get_rank() == 0:
                self._report(made, error, figures)

    def _finish(self, made: _Generation) -> list[tuple[int, int]]:
        """Complete a generation on all nodes, or raise on all ranks; by rank, bytes of memory and bytes sent."""
        copied, files = all_or_raise(lambda: _complete_files(made))
        group = self._group
        contents = tuple(whole_contents(copied.live, copied.shard.digests(), device=torch.device("cpu"), group=group))
        different = difference(copied.facts, all_gather_alike(token_of(copied.facts)))
        if different is not None:
            raise different
        sizes = {name: len(data) for name, (data, _) in files.items()}
        directories = {name: directory for name, (_, directory) in files.items()}
        own_files, followed = Written(sizes, directories), last_save_of(self._engine)
        committed_at, _, written = gather_written(own_files, copied.save.file_names, followed, to_all=True)
        shared = _on_other_nodes(written)
        own = {name: data for name, (data, _) in files.items()}
        staging = self._staging(made)

        def prepare() -> Callable[[], int]:
            staging.mkdir(mode=0o700, exist_ok=True)
            return protect(shared, self.placement, own, made.slot.take, group)[1]

        def stage() -> None:
            made.slot.link(staging)
            if self._leads_node:
                record = record_of(replace(copied.save, contents=contents), written, committed_at)
                (staging / RECORD_NAME).write_bytes(record_text(record))
                note = MemoryNote(
                    step=made.step,
                    save_id=made.save_id,
                    committed_at=committed_at,
                    parent=made.parent,
                    begun=made.begun,
                    world_size=len(shared),
                    content_root=record.content_root,
                    files=tuple(shared),
                )
                (staging / NOTE_NAME).write_text(note.model_dump_json())

        def publish() -> None:
            if self.is_broken:  # the training loop waits no more, and may have changed what was being copied
                raise SaveError("it was given up")
            if self._leads_node:
                self._run.publish(staging, made.tag)

        sent = _write_on_all(prepare)()
        _write_on_all(stage)
        try:
            _write_on_all(publish)
        except SaveError:  # other nodes may have it, and the next generation is written to the same files
            all_or_raise(lambda: self._run.remove_tag(made.tag) if self._leads_node else None)
            raise
        figures = gather((sum(slot.nbytes for slot in self._slots), sent))
        if self._leads_node:
            self._run.remove_tags(but=[made.tag])
        all_or_raise(lambda: None)  # only now may the files of the generation before be written to
        return figures

    def _staging(self, made: _Generation) -> Path:
        return self._run.writing(self._attempt) / made.tag

    def _report(self, made: _Generation, error: BaseException | None, figures: list[tuple[int, int]]) -> None:
        by_node = [sum(figures[rank][0] for rank in ranks) for ranks in self.placement.nodes] if figures else [0]
        self.last = MemoryReport(
            step=made.step,
            world_size=dist.get_world_size(),
            num_nodes=len(self.placement.nodes),
            stall_seconds=made.stall_seconds,
            seconds=time.monotonic() - made.began,
            node_bytes=max(by_node),
            network_bytes=max((sent for _, sent in figures), default=0),
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        if error is None and dist.get_rank() == 0:
            event = observers.Saved(
                tag=made.tag,
                path=str(self._run.path / made.tag),
                step=made.step,
                world_size=self.last.world_size,
                bytes=sum(nbytes for nbytes, _ in figures),
                seconds=self.last.seconds,
                stall_seconds=made.stall_seconds,
                background=True,
                tier="memory",
            )
            observers.publish(event)

    def _log(self, made: _Generation, error: BaseException | None) -> None:
        """Log an error once: one of all ranks on rank 0, that of a rank alone there."""
        if error is None or str(error) in self._logged or (dist.get_rank() > 0 and not self.is_broken):
            return
        self._logged.add(str(error))
        logger.warning("no memory checkpoint of step %d: %s. It is tried again.", made.step, str(error).rstrip("."))

    def _describe(self) -> str:
        nodes, every = len(self.placement.nodes), self.options.every
        if nodes == 1:
            kept = "one node: they survive the loss of processes, not of the node"
        else:
            kept = f"{self.placement.num_copies} copies of each on other nodes, of {nodes}"
        return f"memory checkpoints every {every} steps in {self._run.path}: {kept}"


def _own_place() -> Place:
    place = Place.of_this_job()
    place.create()
    if place.launcher is not None:
        start_reaper(*place.launcher, str(place.path))
    return place


def _placement(found: list[tuple[str, str]], options: MemoryOptions) -> Placement:
    nodes = nodes_of([node for node, _ in found])
    racks = tuple(found[ranks[0]][1] for ranks in nodes)
    return Placement(nodes, racks, options.copies)


def _require_covered(engine: Engine) -> LiveOptimizer:
    """The live state. Raises UnsupportedError where it cannot be copied without collectives. Collective."""
    live = covered_live(engine, engine.optimizer)
    problem = None
    if live.sharing.place[1].size > 1:
        problem = "tensor parallelism"
    elif live.sharing.has_slices:
        problem = "mixture-of-experts layers"
    elif live.on_nvme:
        problem = "state on NVMe, whose copies would take the memory that it is kept out of"
    elif live.layout.world_size != dist.get_world_size():
        problem = "a data parallel group that is not all ranks"
    if problem is not None:
        raise UnsupportedError(f'"memory" does not cover {problem}. Leave it out of the "zeroelastic" block.')
    return live


def _on_other_nodes(written: Sequence[Written]) -> list[dict[str, int]]:
    """The files of each rank that others keep: not that of the whole module, of which every node writes one."""
    return [
        {name: size for name, size in sorted(own.sizes.items()) if WHOLE_MODEL_FILE.match(name) is None}
        for own in written
    ]


def _complete_files(made: _Generation) -> tuple[_Copied, dict[str, tuple[torch.Tensor, str]]]:
    if isinstance(made.copied, Exception):
        raise made.copied
    return made.copied, made.copied.shard.complete_files()


def _write_on_all(action: Callable[[], T]) -> T:
    """The result of an action on this rank; an error of the system is a SaveError, on all ranks. Collective."""

    def write() -> T:
        try:
            return action()
        except OSError as error:
            raise SaveError(f"{error.filename or 'shared memory'}: {error.strerror}") from error

    return all_or_raise(write)
