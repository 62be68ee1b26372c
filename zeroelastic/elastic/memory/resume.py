"""Resume from the memory of the nodes, at any number of ranks: a tag there is taken before the save that it follows.

A tag in memory has its files on several nodes, so it is loaded as from node-local disks: each byte is read once, by a
rank that sees it, and sent to the rank that needs it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import params_digest
from zeroelastic.deepspeed.engine import options_of
from zeroelastic.deepspeed.engine_state import last_save_of
from zeroelastic.deepspeed.live.kinds import kind_of, trained_params
from zeroelastic.distributed.collective import all_gather, all_or_raise, broadcast_or_raise
from zeroelastic.elastic.memory.place import JobPlace, RunPlace
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.tags import Tag, committed_tag, newest_first

logger = logging.getLogger(__name__)

_LATE_NODES_S = 5.0
"""How long a start waits for nodes that were late at the rendezvous before it goes back to the disk."""


def _is_after(tag: Tag, saved: Tag | None, tags: Sequence[Tag], left: Sequence[Tag]) -> bool:
    """Return whether a run that would resume from ``saved``, one of the ``tags`` on the disk, takes a tag in memory.

    With None as ``saved``, whether that follows none of them. The run has ``left`` others, newer than the one that
    ``latest`` names: tags in memory from before their commit are left, too.
    """
    if any(other.saved_at > tag.saved_at for other in left):
        return False
    if saved is None:
        return not any(other.save_id in tag.follows for other in (*tags, *left))
    if (tag.step, tag.content_root) == (saved.step, saved.content_root):  # it was saved to both
        return True
    follows = saved.save_id in tag.follows if saved.save_id is not None else not tag.follows
    return follows and (tag.step or 0) >= (saved.step or 0)


class MemoryTier:
    """The tags in memory of the run that saves to ``directory`` and trains ``trained_params``, on all nodes.

    ``tags`` are newest first; ``others`` are of other engines of the job. Making one is collective.
    """

    def __init__(self, directory: FilePath, trained_params: str) -> None:
        self._run = RunPlace.of(JobPlace.of_this_job().path, directory, trained_params)
        found = all_gather((_seen([self._run]), _seen(self._run.others())))
        self.tags = newest_first({tag.save_id: tag for own, _ in found for tag in own}.values())
        self.others = newest_first({tag.save_id: tag for _, others in found for tag in others}.values())
        self._tried = set[str | None]()
        self._followed: dict[str | None, tuple[str | None, int, float]] = {}
        self._waits = False

    def ordered(self, tags: Sequence[Tag], left: Sequence[Tag]) -> tuple[Tag, ...]:
        """Return the tags to try: each on the disk after those in memory that a run takes in its place (``_is_after``).

        Tags in memory that follow none of them come last. Collective; rank 0's arguments count.
        """

        def order() -> tuple[tuple[Tag, ...], dict[str | None, tuple[str | None, int, float]]]:
            ordered: list[Tag] = []
            followed: dict[str | None, tuple[str | None, int, float]] = {}
            for saved in (*tags, None):
                for tag in self.tags:
                    if tag.save_id not in followed and _is_after(tag, saved, tags, left):
                        followed[tag.save_id] = _followed(tag, saved)
                        ordered.append(tag)
                ordered += [] if saved is None else [saved]
            return tuple(ordered), followed

        ordered, self._followed = broadcast_or_raise(order)
        return ordered

    def asked_for(self, tag: Tag) -> tuple[FilePath, str]:
        """Return the directory and the tag to give to ``load_checkpoint``, for one of ``ordered``. Collective."""
        if not tag.in_memory:
            self.wait_for_late_nodes()
            return tag.asked_for
        self._tried.add(tag.save_id)
        self._waits = True
        all_or_raise(lambda: self._run.require_own(tag.name))
        return self._run.complete, tag.name

    def loaded(self, engine: Any, tag: Tag) -> None:
        """Let the run continue the save on the disk that a tag in memory follows."""
        if tag.in_memory:
            last = last_save_of(engine)
            last.save_id, last.unsaved_steps, last.unsaved_seconds = self._followed[tag.save_id]

    def wait_for_late_nodes(self) -> None:
        """If a tag in memory did not load, give the agent time to start this process again, with a late node.

        The node may have the missing files. Where nodes that were late wait at the rendezvous, torchrun ends all
        workers and starts them with those. Without a torchrun that starts workers again, there is nothing to wait for.
        """
        if self._waits and "TORCHELASTIC_RUN_ID" in os.environ:
            if dist.get_rank() == 0:
                logger.warning("waiting %.0f s for nodes that may be late: they may have what was lost", _LATE_NODES_S)
            time.sleep(_LATE_NODES_S)
        self._waits = False

    def keep_only(self, name: str | None, step: int, tags: Sequence[Tag]) -> None:
        """Remove all other tags: the run goes on from ``step``, of this tag or of one of ``tags``. Collective."""
        all_or_raise(lambda: self._run.remove_tags(but=name))
        if dist.get_rank() != 0:
            return
        for tag in self.tags:
            if (tag.step or 0) > step and tag.save_id not in self._tried:
                logger.warning(
                    "step %d in memory is let go of: it does not follow the save from which the run goes on", tag.step
                )
        followed = {tag.save_id for tag in tags}
        for tag in self.others:
            if (tag.step or 0) > step and not followed.isdisjoint(tag.follows):
                logger.warning(
                    "step %d in memory is not taken: the run trained other parameters when it was made. To go on from "
                    "there, build the engine with those parameters, resume, and save.",
                    tag.step,
                )


def _seen(runs: Iterable[RunPlace]) -> list[Tag]:
    """Return the tags of some places on this node; a damaged record makes none."""
    found = (committed_tag(run.complete, name) for run in runs for name in run.tags())
    return [replace(tag, in_memory=True) for tag in found if tag is not None]


def _followed(tag: Tag, saved: Tag | None) -> tuple[str | None, int, float]:
    """Return the save on the disk that a run continues which resumes from a tag, and the steps and seconds after it."""
    step = tag.step or 0
    if saved is None:
        return next(iter(tag.follows), None), step, 0.0
    return saved.save_id, max(step - (saved.step or 0), 0), max(tag.saved_at - saved.saved_at, 0.0)


def memory_tier(engine: Any, directory: FilePath) -> MemoryTier | None:
    """Return the memory tier of a run with ``"memory"``; None for an engine that trains nothing. Collective."""
    if options_of(engine).memory is None or kind_of(engine.optimizer) is None:
        return None
    return MemoryTier(directory, params_digest(trained_params(engine) or ()))
