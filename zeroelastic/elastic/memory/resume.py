"""Resume from the memory of the nodes, at any number of ranks: the newest generation that is complete and verifies.

A checkpoint in memory has its files on several nodes, so it is loaded as from node-local disks: each byte is read once,
by a rank that sees it, and sent to the rank that needs it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.param_table import params_digest
from zeroelastic.deepspeed.engine import options_of
from zeroelastic.deepspeed.engine_state import last_save_of
from zeroelastic.deepspeed.install.wrappers import loading_strictly
from zeroelastic.deepspeed.live.kinds import kind_of, trained_params
from zeroelastic.distributed.collective import all_gather, all_or_raise, broadcast_or_raise
from zeroelastic.elastic.memory.place import MemoryNote, Place, RunPlace, lacking
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError, finding, printable, rank_list
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.order import Tag

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LATE_NODES_S = 5.0
"""How long a start waits for nodes that were late at the rendezvous before it goes back to the disk."""


@dataclass(frozen=True)
class Generation:
    """A generation over all nodes; ``on_nodes`` are the files of each and their sizes, by the node's first rank.

    ``continues`` is the save on the disk after which it was made, as far as the run has committed it.
    ``unsaved_steps`` and ``unsaved_seconds`` are what was trained after the newest save that is left there.
    """

    tag: str
    note: MemoryNote
    on_nodes: Mapping[int, Mapping[str, int]]
    continues: str | None = None
    unsaved_steps: int = 0
    unsaved_seconds: float = 0.0

    @cached_property
    def seen(self) -> Mapping[str, int]:
        """The files that are on any node."""
        return {name: size for files in self.on_nodes.values() for name, size in files.items()}

    @cached_property
    def lost(self) -> str | None:
        """What of it no node of this start has, or None."""
        if RECORD_NAME not in self.seen:
            return "its commit record is on no node that is left"
        ranks = lacking(self.note, self.seen)
        if ranks:
            return f"what {rank_list(ranks)} saved is on no node that is left"
        return None


class MemoryTier:
    """The generations of the run that saves to ``directory`` and trains ``trained_params``, on all nodes.

    Making one is collective.
    """

    def __init__(self, directory: FilePath, trained_params: str) -> None:
        place = Place.of_this_job()
        self._run = RunPlace.of(place.path, directory, trained_params)
        rank, nodes = dist.get_rank(), all_gather(f"{place.node} {place.path}")
        found: list[tuple[str, MemoryNote, str]] = []
        if nodes.index(nodes[rank]) == rank:  # the others of the node see the same
            read = ((tag, self._run.note(tag)) for tag in self._run.tags())
            found = [(tag, note, _hash(note)) for tag, note in read if note is not None]
        on_nodes = all_gather([(tag, hashed, self._run.files(tag)) for tag, _, hashed in found])
        senders: dict[tuple[str, str], int] = {}  # of equal notes the first rank that has one
        for first, rows in enumerate(on_nodes):
            for tag, hashed, _ in rows:
                senders.setdefault((tag, hashed), first)
        sent = all_gather({tag: note for tag, note, hashed in found if senders[tag, hashed] == rank})
        self.generations = sorted(
            (
                Generation(
                    tag,
                    note,
                    {first: files for first, rows in enumerate(on_nodes) for name, _, files in rows if name == tag},
                )
                for tag, note in {tag: note for notes in sent for tag, note in notes.items()}.items()
            ),
            key=lambda generation: generation.note.committed_at,
            reverse=True,
        )
        self._tried, self._left = set[str](), set[str]()

    def newer_than(self, saved: Tag | None, tags: Sequence[Tag]) -> list[Generation]:
        """The generations that a run resumes from rather than from ``saved``, newest first. Collective.

        Those that were tried are left out. Rank 0's arguments count; ``saved`` is one of ``tags``, the checkpoints on
        the disk, or None: there is none that is left.
        """

        def choose() -> dict[str, tuple[str | None, int, float]]:
            placed = [_placed(one, saved, tags) for one in self.generations if one.tag not in self._tried]
            newer = [one for one in placed if _is_newer(one, saved)]
            if saved is not None:
                self._warn_of_others(saved, tags, after=saved.saved_at)
                self._warn_of_left([one for one in placed if one not in newer], saved)
            return {one.tag: (one.continues, one.unsaved_steps, one.unsaved_seconds) for one in newer}

        newer = broadcast_or_raise(choose)
        found = [one for one in self.generations if one.tag in newer]
        places = (newer[one.tag] for one in found)
        return [
            replace(one, continues=continues, unsaved_steps=steps, unsaved_seconds=seconds)
            for one, (continues, steps, seconds) in zip(found, places, strict=True)
        ]

    def _warn_of_left(self, generations: Sequence[Generation], saved: Tag) -> None:
        """Warn once of each later generation that is not taken because it follows another save."""
        for one in generations:
            if one.tag not in self._left and one.note.committed_at > saved.saved_at:
                self._left.add(one.tag)
                logger.warning(
                    "step %d in memory is let go of: it does not continue from %s, from which the run goes on",
                    *(one.note.step, printable(saved.name)),
                )

    def _warn_of_others(self, saved: Tag, tags: Sequence[Tag], *, after: float) -> None:
        """Warn once of what this node has of the run ``after`` a time, with other trained parameters than now."""
        ids = {tag.save_id for tag in tags} - {None}
        for note in self._run.notes_of_others():
            is_of_run = not ids.isdisjoint((note.parent, note.begun))
            if is_of_run and note.committed_at > after and note.save_id not in self._left:
                self._left.add(note.save_id)
                logger.warning(
                    "step %d in memory is not taken: the run trained other parameters when it was made, and the newest "
                    "save is %s. To go on from step %d, build the engine with those parameters, resume, and save.",
                    *(note.step, printable(saved.name), note.step),
                )

    def load_newest(
        self,
        engine: Any,
        generations: Sequence[Generation],
        finish: Callable[[str, dict[str, Any]], T],
        *,
        strict: bool,
    ) -> tuple[T | None, tuple[str, ...]]:
        """What ``finish(tag, client state)`` returns for the first that loads, and why others did not. Collective.

        An error of a generation passes it over, an error of the run is raised. The run continues the save on the disk
        that the generation continued.
        """
        passed: list[str] = []
        for generation in generations:
            self._tried.add(generation.tag)
            name = f"step {generation.note.step} in memory"
            problem = generation.lost
            if problem is None:
                try:
                    return self._load(engine, generation, finish, strict=strict), tuple(passed)
                except (CheckpointError, UnreadableError, SaveError) as error:
                    problem = finding(error)
            passed.append(f"{name}: {problem}")
            if dist.get_rank() == 0:
                logger.warning("passed over %s: %s", name, problem)
        if any(generation.lost for generation in generations):
            _wait_for_late_nodes()
        return None, tuple(passed)

    def keep_only(self, tag: str | None) -> None:
        """Remove all other generations: the run does not continue from them. Collective."""
        all_or_raise(lambda: self._run.remove_tags(but=[] if tag is None else [tag]))

    def _load(
        self, engine: Any, generation: Generation, finish: Callable[[str, dict[str, Any]], T], *, strict: bool
    ) -> T:
        tag_dir = self._run.complete / generation.tag
        all_or_raise(lambda: self._run.require_own(generation.tag))
        with loading_strictly(engine, strict):
            path, client_state = engine.load_checkpoint(str(self._run.complete), tag=generation.tag)
        if path is None:
            raise CheckpointError(f"{tag_dir}: DeepSpeed did not load it.")
        last_save = last_save_of(engine)
        last_save.save_id = generation.continues
        last_save.unsaved_steps, last_save.unsaved_seconds = generation.unsaved_steps, generation.unsaved_seconds
        return finish(generation.tag, dict(client_state or {}))


def _wait_for_late_nodes() -> None:
    """Give the agent time to start this process again, with a node that lives and has what is lacking.

    Where nodes that were late wait at the rendezvous, torchrun ends all workers and starts them with those. Without a
    torchrun that starts workers again, there is nothing to wait for.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if dist.get_rank() == 0:
        logger.warning("waiting %.0f s for nodes that may be late: they may have what was lost", _LATE_NODES_S)
    time.sleep(_LATE_NODES_S)


def _hash(note: MemoryNote) -> str:
    return hashlib.sha256(note.model_dump_json().encode()).hexdigest()


def _placed(generation: Generation, saved: Tag | None, tags: Sequence[Tag]) -> Generation:
    """A generation with what it continues of the ``tags`` on the disk, where ``saved`` is the newest that is left."""
    note = generation.note
    continues = note.begun if note.begun in {tag.save_id for tag in tags} else note.parent
    step, seconds = (0, 0.0) if saved is None else (saved.step or 0, note.committed_at - saved.saved_at)
    return replace(
        generation, continues=continues, unsaved_steps=max(note.step - step, 0), unsaved_seconds=max(seconds, 0.0)
    )


def _is_newer(generation: Generation, saved: Tag | None) -> bool:
    """Whether a run resumes from a generation rather than from a checkpoint on the disk, or from none.

    It does where the generation follows that save. Of one step, saved to both, the one in memory is taken: they have
    the same content.
    """
    if saved is None or (saved.save_id is not None and generation.continues == saved.save_id):
        return True
    if generation.note.step == saved.step:
        with suppress(CheckpointError, UnreadableError):
            record = read_record(saved.tag_dir)
            return record is not None and record.content_root == generation.note.content_root
    return False


def memory_tier(engine: Any, directory: FilePath) -> MemoryTier | None:
    """The memory tier of a run whose options have ``"memory"``; None for an engine that trains nothing. Collective."""
    if options_of(engine).memory is None or kind_of(engine.optimizer) is None:
        return None
    return MemoryTier(directory, params_digest(trained_params(engine) or ()))
