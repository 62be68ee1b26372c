"""Resume a job from the newest checkpoint that loads, at its present world size, or begin where there is none.

The newest is the tag that ``latest`` names, or the newest committed one of the engine's parameters (``runs.tags``).
The ranks agree on the tag before any of them opens it. A damaged tag is passed over, with a warning, for the one
before it, in memory or on the disk. A problem of the run rather than of the tag (another model, another global batch)
is raised.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from zeroelastic import observers
from zeroelastic.distributed.collective import all_or_raise, any_rank
from zeroelastic.elastic.position import KEY, Position, different_positions, unpack_position
from zeroelastic.errors import CheckpointError, brief, some, with_remedy
from zeroelastic.io.paths import FilePath, absolute, as_path
from zeroelastic.observers import Tier
from zeroelastic.report import ResumeReport
from zeroelastic.runs.tags import Tag

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The checkpoint that a job resumed from; ``tag`` is None for a fresh start.

    ``tier`` says where it was: in the memory of the nodes, on their own disks, or in a directory or store for all.
    ``passed_over`` lists, newest first, the tags that were not used and why. ``notes`` lists what was not restored
    exactly, in addition to ``report``. ``client_state`` holds the caller's own entries of the saved client state.
    """

    tag: str | None
    global_steps: int
    client_state: Mapping[str, Any]
    report: ResumeReport | None
    passed_over: tuple[str, ...]
    notes: tuple[str, ...]
    tier: Tier | None = None


@with_remedy()
def resume(
    engine: Any,
    directory: str | os.PathLike[str],
    *,
    data: Position | None = None,
    strict: bool = True,
    fresh: bool = False,
    required: bool = False,
) -> ResumedRun:
    """Load the newest checkpoint of ``directory`` that can be loaded, with the position of ``data``. Collective.

    With ``"memory"`` in the options, that is one in the memory of the nodes where it follows the newest on the disk.

    Nothing is written or deleted. ``strict`` refuses a changed global batch and a checkpoint without a position in the
    data. With an empty or missing directory nothing is loaded and ``ResumedRun.tag`` is None; if a checkpoint is
    ``required``, here or in the "zeroelastic" block, MissingFileError is raised instead. Where a directory holds parts
    of checkpoints that cannot be resumed, the run begins only with ``fresh``. Raises CheckpointError when there are
    checkpoints and none can be loaded, and the errors of ``engine.load_checkpoint`` for a run that does not fit. An
    error says so where a load has changed the engine before it failed; no run begins from such an engine::

        sampler = ElasticDistributedSampler(dataset, global_batch=512)
        start = resume(engine, "ckpt", data=sampler)
        for step in range(start.global_steps, total_steps): ...
    """
    began = time.monotonic()
    from zeroelastic.deepspeed.engine_state import changing
    from zeroelastic.deepspeed.save.background import finish_pending
    from zeroelastic.deepspeed.seams import install
    from zeroelastic.distributed.partners import require_partners

    install()
    require_partners()
    root = as_path(absolute(directory))
    with changing(engine):
        finish_pending(engine, before="resume()")
        resumed = _load_newest(engine, root, data, strict=strict, fresh=fresh, required=required)
        if dist.get_rank() == 0:
            step, seconds = int(engine.global_steps), time.monotonic() - began
            observers.publish(observers.Resumed(resumed.tag, resumed.tier, step, dist.get_world_size(), seconds))
        return resumed


def _load_newest(
    engine: Any, root: FilePath, data: Position | None, *, strict: bool, fresh: bool, required: bool
) -> ResumedRun:
    """Load the newest checkpoint that can be loaded, of those in memory and on the disk, or begin anew. Collective."""
    from zeroelastic.deepspeed.engine import options_of
    from zeroelastic.deepspeed.engine_state import state_of
    from zeroelastic.deepspeed.load.tag_choice import add_notes, load_first, none_loads, nothing_to_load
    from zeroelastic.deepspeed.node_local.node_tags import find_tags_to_try
    from zeroelastic.deepspeed.wrappers import loading_strictly
    from zeroelastic.elastic.memory.resume import memory_tier
    from zeroelastic.runs.verdicts import refuse_fresh_start

    tags, newer, notes = find_tags_to_try(engine, root)
    memory, finish = memory_tier(engine, root), _Finish(engine, root, data, strict)

    def load(tag: Tag) -> ResumedRun:
        load_dir, name = tag.asked_for if memory is None else memory.asked_for(tag)
        with loading_strictly(engine, strict):
            path, client_state = engine.load_checkpoint(str(load_dir), tag=name)
        if path is None:
            raise CheckpointError(f"{load_dir}: DeepSpeed did not load {name}.")
        if memory is not None:
            memory.loaded(engine, tag)
        on_disk: Tier = "node-local" if engine.use_node_local_storage() else "directory"
        return replace(finish(name, dict(client_state or {})), tier="memory" if tag.in_memory else on_disk)

    ordered = tags if memory is None else memory.ordered(tags, newer)
    resumed, passed = load_first(ordered, load, engine=engine)
    if resumed is None:
        if memory is not None:
            memory.wait_for_late_nodes()
        if tags or (passed and any_rank(state_of(engine).damage is not None)):
            raise none_loads(root, passed)
        must = required or options_of(engine).required
        if not must and not fresh:
            all_or_raise(partial(refuse_fresh_start, root))
        nothing_to_load(engine, root, required=must)
        resumed = ResumedRun(None, 0, {}, None, (), ())
    elif resumed.tier != "memory":
        resumed = replace(resumed, notes=(*notes, *resumed.notes), report=add_notes(engine, root, notes))
    if memory is not None:
        memory.keep_only(resumed.tag if resumed.tier == "memory" else None, int(engine.global_steps), tags)
    return replace(resumed, passed_over=passed)


class _Finish:
    """The end of one of the loads of a resume: position and generators are restored, and compared. Collective."""

    def __init__(self, engine: Any, root: FilePath, data: Position | None, strict: bool) -> None:
        self._engine, self._root, self._data, self._strict = engine, root, data, strict
        self._has_moved = False

    def __call__(self, name: str, client_state: dict[str, Any]) -> ResumedRun:
        notes = self._restore(name, client_state.pop(KEY, None))
        if dist.get_rank() == 0:
            for note in notes:
                logger.info("%s: %s", name, note)
        report: ResumeReport | None = getattr(self._engine, "zeroelastic_report", None)
        return ResumedRun(name, int(self._engine.global_steps), client_state, report, (), notes)

    def _restore(self, name: str, entry: Mapping[str, Any] | None) -> tuple[str, ...]:
        engine, data = self._engine, self._data
        has_position = entry is not None and entry.get("data") is not None
        if self._has_moved and not has_position:
            raise CheckpointError(
                f"{self._root / name}: has no position in the data, and a load that failed has changed that of the run."
            )
        self._has_moved = data is not None and has_position
        report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
        root_digest = report.loaded_root if report is not None and report.loaded_root is not None else name
        identity = f"{root_digest} {engine.global_steps}"
        notes = unpack_position(entry, data, engine.device, identity=identity, strict=self._strict)
        if positions := different_positions(data):
            raise CheckpointError(
                f"{self._root / name}: the ranks came to different positions in the data "
                f"({some(map(brief, positions))}). "
                "Its client state is from two saves, or the position depends on the rank."
            )
        return notes
