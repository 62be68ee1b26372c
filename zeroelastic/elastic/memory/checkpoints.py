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
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, record_text
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE
from zeroelastic.deepspeed.engine import Engine, options_of
from zeroelastic.deepspeed.engine_state import lineage_of, refuse_to_save, state_of
from zeroelastic.deepspeed.live.digests import whole_contents
from zeroelastic.deepspeed.live.kinds import covered_live
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import difference, replicated_facts, token_of
from zeroelastic.deepspeed.load.load import is_of_all_ranks
from zeroelastic.deepspeed.options import MemoryOptions
from zeroelastic.deepspeed.save.commit import (
    Expected,
    PendingCommit,
    Written,
    gather_written,
    record_of,
    written_files,
)
from zeroelastic.distributed.collective import (
    all_gather,
    all_gather_alike,
    all_or_raise,
    broadcast,
    collectives_over,
    end_group,
    gather,
)
from zeroelastic.elastic.memory.capture import CompleteFile, MemorySnapshot, capture
from zeroelastic.elastic.memory.copies import Placement, nodes_of, protect
from zeroelastic.elastic.memory.generation import NOTE_NAME, MemoryNote, RunPlace, tag_of
from zeroelastic.elastic.memory.memory_file import MemoryFile
from zeroelastic.elastic.memory.place import Place
from zeroelastic.elastic.memory.reaper import start_reaper
from zeroelastic.errors import ConfigError, SaveError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.monitoring.observers import publish
from zeroelastic.report import MemoryReport

logger = logging.getLogger(__name__)

RACK = "ZEROELASTIC_RACK"
"""An environment variable: the rack, power supply or zone of this node. Copies go to another one where there is one."""

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


class _Slot:
    """The files of one generation that this rank fills: its own, and what it keeps for others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, MemoryFile] = {}
        self._used: set[str] = set()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def begin(self) -> None:
        """Begin a generation: nothing refers to the last one in this slot any more."""
        self._used = set()

    def take(self, name: str, nbytes: int, pinned: bool = False) -> torch.Tensor:
        self._used.add(name)
        if name not in self._files:
            self._files[name] = MemoryFile(self.directory / name)
        return self._files[name].take(nbytes, pinned=pinned)

    def link(self, directory: Path) -> None:
        """Link the files of this generation into a directory, and free the memory of other files. Raises OSError."""
        for name in set(self._files) - self._used:
            self._files.pop(name).path.unlink(missing_ok=True)
        for name in self._used:
            os.link(self._files[name].path, directory / name)


@dataclass(slots=True)
class _Generation:
    """A generation in the making: what the thread needs of the moment in which the state was copied."""

    step: int
    save_id: str
    slot: _Slot
    began: float
    live: LiveOptimizer | None = None
    shard: MemorySnapshot | None = None
    failure: Exception | None = None
    batch: int = 0
    parent: str | None = None
    begun: str | None = None
    allow_globals: tuple[str, ...] = ()
    stall_seconds: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return tag_of(self.step, self.save_id)


class MemoryCheckpoints:
    """The memory checkpoints of one engine, whose run saves to ``directory``. Making one is collective.

    ``capture`` after each step for which ``due`` is true, ``close`` at the end. Errors of a generation are logged and
    end only that one. ``last`` is the report of the last generation that has ended, on rank 0.
    """

    def __init__(self, engine: Engine, directory: FilePath) -> None:
        """Raises ConfigError without ``"memory"`` in the options, UnsupportedError for a run that is not covered."""
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
        self._slots = [_Slot(own / "0"), _Slot(own / "1")]
        self._next = self._number = 0
        all_or_raise(self._make_directories)
        self._written = written_files(engine, self._run.path, "tag")
        self._tied: Mapping[str, str] = broadcast(all_or_raise(engine._get_shared_params))
        timeout = timedelta(seconds=options.save_timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._timeout_s = options.save_timeout_s
        self._thread: threading.Thread | None = None
        self._is_broken = False
        self._logged: set[str] = set()
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
        if self._is_broken:
            return
        engine, options = self._engine, self._run_options
        self._number += 1
        save_id = hashlib.sha256(f"{self._attempt} {self._number}".encode()).hexdigest()[:32]
        slot = self._slots[self._next]
        slot.begin()
        made = _Generation(int(engine.global_steps), save_id, slot, began)
        lineage = lineage_of(engine)
        made.batch, made.parent, made.begun = int(engine.train_batch_size()), lineage.save_id, lineage.begun
        made.allow_globals = tuple(options.allow_globals)
        try:
            refuse_to_save(engine, "memory")
            made.live = covered_live(engine, engine.optimizer)
            made.facts = replicated_facts(made.live)
            made.shard = capture(
                engine,
                made.live,
                options,
                slot.take,
                directory=slot.directory.parent / "layout" / "tag",
                save_id=save_id,
                client_state=client_state,
                writes_module=self._leads_node,
                tied=self._tied,
            )
        except Exception as error:  # raised on all ranks by the thread, for which they wait
            made.failure = error
        made.stall_seconds = self._stall_seconds + time.monotonic() - began
        self._stall_seconds = 0.0
        self._thread = threading.Thread(target=self._complete, args=(made,), name="zeroelastic-memory", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the generation in the making is complete, or has failed."""
        if self._thread is None:
            return
        began = time.monotonic()
        self._thread.join(2 * self._timeout_s)
        if self._thread.is_alive():
            self._is_broken = True
            logger.error("a memory checkpoint did not end within %.0f s; no more are made", 2 * self._timeout_s)
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
            if not self._is_broken:
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
            self._is_broken = not is_of_all_ranks(caught)
            if self._is_broken and dist.is_initialized():
                # A rank that still waits for this one in a collective of the group fails too, when its connections end.
                traceback.clear_frames(caught.__traceback__)
                dist.destroy_process_group(self._group)
                del self._group
            if self._leads_node:
                shutil.rmtree(self._staging(made), ignore_errors=True)
        if dist.is_initialized() and dist.get_rank() == 0:
            self._report(made, error, figures)

    def _finish(self, made: _Generation) -> list[tuple[int, int]]:
        """Complete a generation on all nodes, or raise on all ranks; by rank, bytes of memory and bytes sent."""
        files = all_or_raise(lambda: _complete_files(made))
        assert made.live is not None and made.shard is not None
        live, group = made.live, self._group
        contents = tuple(whole_contents(live, made.shard.digests(), device=torch.device("cpu"), group=group))
        different = difference(made.facts, all_gather_alike(token_of(made.facts)))
        if different is not None:
            raise different
        sizes = {file.name: len(file.data) for file in files}
        directories = {file.name: file.directory for file in files}
        not_before = lineage_of(self._engine).next_time(time.time() if dist.get_rank() == 0 else 0.0)
        committed_at, _, written = gather_written(
            Written(sizes, directories, None, not_before), self._written, to_all=True
        )
        shared = _on_other_nodes(written)
        made.own = {file.name: file.data for file in files}
        staging = self._staging(made)

        def prepare() -> Callable[[], int]:
            staging.mkdir(mode=0o700, exist_ok=True)
            return protect(shared, self.placement, made.own, made.slot.take, group)[1]

        sent = all_or_raise(_as_save_errors(prepare))()
        all_or_raise(_as_save_errors(lambda: made.slot.link(staging)))

        def record() -> None:
            if self._leads_node:
                made_record = record_of(self._pending(made, live, contents), written, committed_at)
                (staging / RECORD_NAME).write_bytes(record_text(made_record))
                (staging / NOTE_NAME).write_text(self._note(made, made_record, shared).model_dump_json())

        all_or_raise(_as_save_errors(record))
        try:
            all_or_raise(_as_save_errors(lambda: self._run.publish(staging, made.tag) if self._leads_node else None))
        except SaveError:  # other nodes may have it, and the next generation is written to the same files
            all_or_raise(lambda: self._run.remove_tag(made.tag) if self._leads_node else None)
            raise
        figures = gather((sum(slot.nbytes for slot in self._slots), sent))
        if self._leads_node:
            self._run.remove_tags(but=[made.tag])
        all_or_raise(lambda: None)  # only now may the files of the generation before be written to
        return figures

    def _note(self, made: _Generation, record: CommitRecord, shared: Sequence[dict[str, int]]) -> MemoryNote:
        assert record.committed_at is not None
        return MemoryNote(
            step=made.step,
            save_id=made.save_id,
            committed_at=record.committed_at,
            parent=made.parent,
            begun=made.begun,
            world_size=len(shared),
            content_root=record.content_root,
            files=tuple(shared),
        )

    def _pending(self, made: _Generation, live: LiveOptimizer, contents: tuple[Any, ...]) -> PendingCommit:
        return PendingCommit(
            tag=made.tag,
            save_id=made.save_id,
            checkpoint_format="elastic" if live.per_param else "rigid",
            expected=Expected(
                rank=live.rank,
                tp=live.tp,
                global_steps=made.step,
                layout=live.layout,
                groups=live.groups,
                frozen=live.frozen.params,
                allow_globals=made.allow_globals,
            ),
            train_batch_size=made.batch,
            file_names=self._written,
            lineage=lineage_of(self._engine),
            lost_micro_batches=0,
            contents=contents,
            trained=frozenset(param.name for param in live.layout.params),
        )

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
        if error is not None and str(error) not in self._logged:
            self._logged.add(str(error))
            after = "No more are made." if self._is_broken else "The next step tries again."
            logger.warning("no memory checkpoint of step %d: %s. %s", made.step, str(error).rstrip("."), after)
        publish(self.last, self._engine)

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
        start_reaper(place.launcher.pid, place.launcher.started, str(place.path))
    return place


def _placement(found: list[tuple[str, str]], options: MemoryOptions) -> Placement:
    nodes = nodes_of([node for node, _ in found])
    racks = tuple(found[ranks[0]][1] for ranks in nodes)
    return Placement(nodes, racks, options.copies)


def _require_covered(engine: Engine) -> LiveOptimizer:
    """The live state. Raises UnsupportedError where it cannot be copied without collectives. Collective."""
    live = covered_live(engine, engine.optimizer)
    problem = None
    if live.tp.size > 1:
        problem = "tensor parallelism"
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


def _complete_files(made: _Generation) -> tuple[CompleteFile, ...]:
    if made.failure is not None:
        raise made.failure
    assert made.shard is not None
    return made.shard.complete_files()


def _as_save_errors(action: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        try:
            return action()
        except OSError as error:
            raise SaveError(f"{error.filename or 'shared memory'}: {error.strerror}") from error

    return run
