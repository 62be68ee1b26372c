"""Resume from the memory of the nodes, at any number of ranks: a tag there is taken before the save that it follows.

A tag in memory has its files on several nodes, so it is loaded as from node-local disks: each byte is read once, by a
rank that sees it, and sent to the rank that needs it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.deepspeed.engine import options_of
from zeroelastic.deepspeed.engine_state import last_save_of
from zeroelastic.deepspeed.install.wrappers import loading_strictly
from zeroelastic.deepspeed.live.kinds import kind_of, trained_params
from zeroelastic.distributed.collective import all_gather, all_or_raise, broadcast_or_raise
from zeroelastic.elastic.memory.place import Place, RunPlace
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError, finding
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.order import Tag

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LATE_NODES_S = 5.0
"""How long a start waits for nodes that were late at the rendezvous before it goes back to the disk."""


@dataclass(frozen=True, slots=True)
class MemoryTag:
    """A tag in the memory of any node, by its commit record; ``is_own`` says whether it is of this engine's run."""

    name: str
    step: int
    committed_at: float
    follows: tuple[str, ...]
    content_root: str
    is_own: bool

    def is_after(self, saved: Tag | None, tags: Sequence[Tag], left: Sequence[Tag]) -> bool:
        """Whether a run that would resume from ``saved``, one of the ``tags`` on the disk, resumes from this.

        With None as ``saved``, whether it follows none of them. The run has ``left`` others, which are newer than the
        one that ``latest`` names: what was made before they were committed is left, too.
        """
        if any(tag.saved_at > self.committed_at for tag in left):
            return False
        if saved is None:
            return not any(tag.save_id in self.follows for tag in (*tags, *left))
        follows = saved.save_id in self.follows if saved.save_id is not None else not self.follows
        return (follows and self.step >= (saved.step or 0)) or self._is_the_same(saved)

    def _is_the_same(self, saved: Tag) -> bool:
        """Whether a tag on the disk has this step, with the same content: it was saved to both."""
        record = None
        if self.step == saved.step:
            with suppress(CheckpointError, UnreadableError):
                record = read_record(saved.tag_dir)
        return record is not None and record.content_root == self.content_root


class MemoryTier:
    """The tags in memory of the run that saves to ``directory`` and trains ``trained_params``, on all nodes.

    Making one is collective.
    """

    def __init__(self, directory: FilePath, trained_params: str) -> None:
        self._run = RunPlace.of(Place.of_this_job().path, directory, trained_params)
        found = {tag for tags in all_gather(self._seen()) for tag in tags}
        self.tags = sorted(found, key=lambda tag: (tag.committed_at, tag.name), reverse=True)
        self._tried = set[MemoryTag]()

    def _seen(self) -> list[MemoryTag]:
        """The tags on this node, of other engines too; a damaged record makes none."""
        found: list[MemoryTag] = []
        for run in {self._run, *self._run.others()}:
            for name in run.tags():
                try:
                    record = read_record(run.complete / name)
                except (CheckpointError, UnreadableError):
                    continue
                if record is not None:
                    facts = record.global_steps, record.committed_at or 0.0, record.follows, record.content_root
                    found.append(MemoryTag(name, *facts, is_own=run == self._run))
        return found

    def load_after(
        self,
        engine: Any,
        saved: Tag | None,
        tags: Sequence[Tag],
        left: Sequence[Tag],
        finish: Callable[[str, dict[str, Any]], T],
        *,
        strict: bool,
    ) -> tuple[T | None, tuple[str, ...]]:
        """``finish(tag, client state)`` of the newest tag after ``saved`` that loads, and why others did not.

        Collective; rank 0's arguments count, which are those of ``MemoryTag.is_after``. Tags that were tried before are
        left out. An error of a tag passes it over, an error of the run is raised. The run continues ``saved``.
        """

        def after() -> list[tuple[MemoryTag, tuple[str | None, int, float]]]:
            own = (tag for tag in self.tags if tag.is_own and tag not in self._tried)
            return [(tag, _followed(tag, saved)) for tag in own if tag.is_after(saved, tags, left)]

        passed: list[str] = []
        for tag, followed in broadcast_or_raise(after):
            self._tried.add(tag)
            try:
                client_state = self._load(engine, tag, strict=strict)
                last = last_save_of(engine)
                last.save_id, last.unsaved_steps, last.unsaved_seconds = followed
                return finish(tag.name, client_state), tuple(passed)
            except (CheckpointError, UnreadableError, SaveError) as error:
                passed.append(f"step {tag.step} in memory: {finding(error)}")
                if dist.get_rank() == 0:
                    logger.warning("passed over %s", passed[-1])
        if passed:
            _wait_for_late_nodes()
        return None, tuple(passed)

    def keep_only(self, name: str | None, step: int, tags: Sequence[Tag]) -> None:
        """Remove all other tags: the run goes on from ``step``, of this tag or of one of ``tags``. Collective."""
        all_or_raise(lambda: self._run.remove_tags(but=[] if name is None else [name]))
        if dist.get_rank() != 0:
            return
        followed = {tag.save_id for tag in tags}
        for tag in self.tags:
            if tag.step <= step or tag in self._tried:
                continue
            if tag.is_own:
                logger.warning(
                    "step %d in memory is let go of: it does not follow the save from which the run goes on", tag.step
                )
            elif not followed.isdisjoint(tag.follows):
                logger.warning(
                    "step %d in memory is not taken: the run trained other parameters when it was made. To go on from "
                    "there, build the engine with those parameters, resume, and save.",
                    tag.step,
                )

    def _load(self, engine: Any, tag: MemoryTag, *, strict: bool) -> dict[str, Any]:
        all_or_raise(lambda: self._run.require_own(tag.name))
        with loading_strictly(engine, strict):
            path, client_state = engine.load_checkpoint(str(self._run.complete), tag=tag.name)
        if path is None:
            raise CheckpointError(f"{self._run.complete / tag.name}: DeepSpeed did not load it.")
        return dict(client_state or {})


def _followed(tag: MemoryTag, saved: Tag | None) -> tuple[str | None, int, float]:
    """The save on the disk that a run continues which resumes from a tag, and the steps and seconds after it."""
    if saved is None:
        return next(iter(tag.follows), None), tag.step, 0.0
    return saved.save_id, max(tag.step - (saved.step or 0), 0), max(tag.committed_at - saved.saved_at, 0.0)


def _wait_for_late_nodes() -> None:
    """Give the agent time to start this process again, with a node that lives and has what may be lacking.

    Where nodes that were late wait at the rendezvous, torchrun ends all workers and starts them with those. Without a
    torchrun that starts workers again, there is nothing to wait for.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if dist.get_rank() == 0:
        logger.warning("waiting %.0f s for nodes that may be late: they may have what was lost", _LATE_NODES_S)
    time.sleep(_LATE_NODES_S)


def memory_tier(engine: Any, directory: FilePath) -> MemoryTier | None:
    """The memory tier of a run whose options have ``"memory"``; None for an engine that trains nothing. Collective."""
    if options_of(engine).memory is None or kind_of(engine.optimizer) is None:
        return None
    return MemoryTier(directory, params_digest(trained_params(engine) or ()))
