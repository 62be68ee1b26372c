"""Checkpoints in the memory of the nodes: one of this job's, every few steps, complete on all nodes or not there.

Training waits while its state is copied. A thread does the rest: digests, copies for other nodes, the commit record,
and the rename that makes the tag. The one before stays until the new one is complete on all nodes. A
training step waits for that before it changes a weight, so that a loss of nodes costs one step at most.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import params_digest
from zeroelastic.deepspeed.engine import Engine, options_of, ordinary_tensors
from zeroelastic.deepspeed.engine_state import last_save_of, refuse_to_save, state_of
from zeroelastic.deepspeed.live.kinds import covered_live
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import MemoryOptions, SaveRequest
from zeroelastic.deepspeed.save.checks import refuse_changed_module
from zeroelastic.distributed import collective
from zeroelastic.elastic.memory.memory_file import Slot
from zeroelastic.elastic.memory.place import JobPlace, RunPlace
from zeroelastic.elastic.memory.reaper import start_reaper
from zeroelastic.elastic.memory.save import GroupBarrier, MemoryDirectory, MemorySave, Placement, nodes_of
from zeroelastic.errors import ConfigError, SaveError, UnsupportedError
from zeroelastic.io.paths import FilePath

logger = logging.getLogger(__name__)

RACK = "ZEROELASTIC_RACK"
"""An environment variable: the rack, power supply or zone of this node. Copies go to another one where there is one."""

_MOST_LOST = 2
"""A rank that has lost the process group makes it fail on the others with the next checkpoint at the latest."""

_EXIT_S = 5.0
_threads = weakref.WeakSet[threading.Thread]()
_open = weakref.WeakValueDictionary[Path, "MemoryCheckpoints"]()
"""The MemoryCheckpoints of this process that are not closed, by the directory of the run."""


@atexit.register
def _await_threads() -> None:
    """Wait for the threads before the interpreter ends: in a collective, one would end the process by SIGABRT then."""
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


class MemoryCheckpoints:
    """The memory checkpoints of one engine, whose run saves to ``directory``. Making one is collective.

    ``capture`` after each step for which ``due`` is true, ``close`` at the end. Errors of a checkpoint are logged and
    end only that one. ``complete_step`` is the step of the newest complete checkpoint, ``error`` what the last one has
    failed with. ``is_broken`` says that this rank has lost the process group: as soon as all ranks know of it, others
    are made ``after`` these.
    """

    def __init__(self, engine: Engine, directory: FilePath, *, after: MemoryCheckpoints | None = None) -> None:
        """Leave out more checkpoints each time that these follow ``after`` others of which none was complete.

        Raises ConfigError without ``"memory"`` in the options, UnsupportedError for a run that is not covered.
        """
        options = options_of(engine)
        if options.memory is None:
            raise ConfigError('"memory" is not in the "zeroelastic" block. Add {"memory": {"every": 1, "copies": 1}}.')
        self.options: MemoryOptions = options.memory
        self.complete_step: int | None = None
        self.error: BaseException | None = None
        self._engine = engine
        live = collective.all_or_raise(lambda: _require_covered(engine))
        place = collective.all_or_raise(_own_place)
        rack = os.environ.get(RACK, "")
        by_rank = collective.all_gather((f"{place.node} {place.path}", rack))
        nodes = nodes_of([node for node, _ in by_rank])
        self.placement = Placement(nodes, tuple(by_rank[ranks[0]][1] for ranks in nodes), self.options.copies)
        self._run = RunPlace.of(place.path, directory, params_digest(live.layout.params))
        collective.all_or_raise(lambda: self._require_no_twin(directory))
        self._attempt = collective.broadcast(uuid.uuid4().hex)
        rank = dist.get_rank()
        self._leaders = tuple(self.placement.nodes[node][0] for node in self.placement.node_of)
        self._leads_node = self._leaders[rank] == rank
        own = self._run.writing(self._attempt) / f"rank{rank}"
        self._slots = [Slot(own / "0"), Slot(own / "1")]
        self._next = self._number = 0
        collective.all_or_raise(self._make_directories)
        self._saved = replace(last_save_of(engine))
        self._tied: Mapping[str, str] = collective.broadcast(collective.all_or_raise(engine._get_shared_params))
        self._timeout_s = min(options.save_timeout_s, collective.limit())
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
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
        return step % self.options.every == 0

    @ordinary_tensors()
    def capture(self, client_state: Mapping[str, Any]) -> None:
        """Copy the state as it is now; a thread completes the checkpoint. No collective; waits for the last one."""
        began = time.monotonic()
        self.wait()
        if self._left_out < self._pause:
            self._left_out += 1
            return
        self._number += 1
        if self.is_broken:
            return
        step = int(self._engine.global_steps)
        save_id = hashlib.sha256(f"{self._attempt} {self._number}".encode()).hexdigest()[:32]
        slot, tag = self._slots[self._next], f"step{step}-{save_id}"
        node = MemoryDirectory(self._run, slot, tag, save_id, self._leaders)
        captured: MemorySave | Exception
        try:
            refuse_to_save(self._engine, "memory")
            captured = self._copy(node, began, save_id, client_state)
            captured.stalled = captured.seconds + self._stall_seconds
        except Exception as error:  # raised on all ranks by the thread, for which they wait
            captured = error
        self._stall_seconds = 0.0
        args = step, node, captured
        self._thread = threading.Thread(target=self._complete, args=args, name="zeroelastic-memory", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def _copy(self, node: MemoryDirectory, began: float, save_id: str, client_state: Mapping[str, Any]) -> MemorySave:
        """Copy the state of this rank, which may change when this returns. Raises SaveError where memory is lacking."""
        engine = self._engine
        if not (node.slot.directory.is_dir() and self._run.complete.is_dir()):  # somebody has emptied the shared memory
            _own_place()
            self._run.create()
            node.slot.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        live = covered_live(engine, engine.optimizer)
        refuse_changed_module(engine, live, "memory", with_frozen=True)
        save = MemorySave(
            SaveRequest(str(self._run.complete), node.place.name, "memory", client_state, False, None),
            live,
            GroupBarrier(lambda: self.is_broken),
            options_of(engine).model_copy(update={"upload": None}),
            save_id,
            elastic=live.has_elastic_form,
            memory=node.slot,
            tier="memory",
            step=int(engine.global_steps),
            began=began,
            destination=node,
            placement=self.placement,
            tied=self._tied,
        )
        node.begin()
        try:
            save.capture(engine, self._saved)
        except OSError as error:
            raise SaveError(f"{error.filename or node.staging_dir}: {error.strerror}") from error
        return save

    def wait(self) -> None:
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
        """Remove the checkpoints: the run does not continue from them. Collective."""
        self.wait()
        collective.all_or_raise(lambda: self._run.remove_tags() if self._leads_node else None)
        self.complete_step = None

    def close(self, *, failed: bool = False) -> None:
        """Wait for the unfinished checkpoint, unless training has failed. Checkpoints stay until the job ends.

        After a failure the other ranks may be gone, or wait for this one: it must end.
        """
        if _open.get(self._run.path) is self:
            del _open[self._run.path]
        if not failed:
            self.wait()
            if not self.is_broken:
                collective.end_group(self._group)
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

    def _complete(self, step: int, node: MemoryDirectory, captured: MemorySave | Exception) -> None:
        """Complete a checkpoint in the thread. Collective over the threads."""
        self.error = None
        try:
            with collective.collectives_over(self._group):
                self._finish(node, captured)
            self._next ^= 1
            self.complete_step = step
        except Exception as caught:
            self.error = caught
            self.is_broken |= not collective.is_raised_on_all_ranks(caught)
            if self.is_broken and dist.is_initialized():
                # A rank that still waits for this one in a collective of the group fails too, when its connections end.
                traceback.clear_frames(caught.__traceback__)
                dist.destroy_process_group(self._group)
                del self._group
            if dist.is_initialized():
                self._log(step, caught)

    def _finish(self, node: MemoryDirectory, captured: MemorySave | Exception) -> None:
        """Complete a checkpoint on all nodes, or raise on all ranks, also if one could not copy its state."""

        def give() -> MemorySave:
            if isinstance(captured, Exception):
                raise captured
            return captured

        try:
            with node.discarded_on_failure():
                save = collective.all_or_raise(give)
            save.commit()
        except Exception as error:
            if collective.is_raised_on_all_ranks(error):
                # only then may its files be written to: it is on no node any more
                collective.all_or_raise(lambda: None)
            raise

    def _log(self, step: int, error: BaseException) -> None:
        """Log an error once: one of all ranks on rank 0, that of a rank alone there."""
        if str(error) in self._logged or (dist.get_rank() > 0 and not self.is_broken):
            return
        self._logged.add(str(error))
        logger.warning("no memory checkpoint of step %d: %s. It is tried again.", step, str(error).rstrip("."))

    def _describe(self) -> str:
        nodes, every = len(self.placement.nodes), self.options.every
        if nodes == 1:
            kept = "one node: they survive the loss of processes, not of the node"
        else:
            kept = f"{self.placement.num_copies} copies of each on other nodes, of {nodes}"
        return f"memory checkpoints every {every} steps in {self._run.path}: {kept}"


def _own_place() -> JobPlace:
    place = JobPlace.of_this_job()
    place.create()
    if place.launcher is not None:
        start_reaper(*place.launcher, str(place.path))
    return place


def _require_covered(engine: Engine) -> LiveOptimizer:
    """Return the live state. Raises UnsupportedError if it cannot be copied without collectives. Collective."""
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
