"""Resume a job from the newest checkpoint that loads, at whatever world size it has now; or begin, when there is none.

Newest is what was committed last, unless ``latest`` was pointed at an older tag since: so a run is rolled back. The
ranks agree on the tag before any of them opens it. A tag that is damaged is passed over, loudly, for the one before it;
one in whose loads the job died twice is tried after all others. What is wrong with the run rather than with the tag
(another model, another global batch) is raised.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroelastic.agree import broadcast, gather, settle
from zeroelastic.commit_order import Tag, about_left, about_pointed, left_behind
from zeroelastic.elastic.attempts import Attempts
from zeroelastic.elastic.position import KEY, Position, unpack_position
from zeroelastic.errors import CheckpointError
from zeroelastic.report import ResumeReport
from zeroelastic.storage import absolute

if TYPE_CHECKING:
    from zeroelastic.elastic.events import Events

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a job goes on from: ``tag`` None is a fresh start.

    ``passed_over`` says, newest first, which tags were not used and why; ``notes`` what was not restored exactly
    besides what ``report`` lists. ``client_state`` is what the checkpoint carried of the caller's own.
    """

    tag: str | None
    global_steps: int
    client_state: Mapping[str, Any]
    report: ResumeReport | None
    passed_over: tuple[str, ...]
    notes: tuple[str, ...]


def resume(
    engine: Any,
    directory: str | os.PathLike[str],
    *,
    data: Position | None = None,
    strict: bool = True,
    fresh: bool = False,
    required: bool = False,
    log: Events | None = None,
) -> Resumed:
    """Load the newest checkpoint of ``directory`` that can be loaded, with the position of ``data``. Collective.

    A tag that is damaged although its save was finished is marked (zeroelastic.quarantine) and not read by the next
    ``resume``; nothing is deleted. ``strict`` refuses a changed global batch and a checkpoint without a position in the
    data. With an empty or missing directory nothing happens, and ``Resumed.tag`` is None, unless a checkpoint is
    ``required``, here or in the "zeroelastic" block: then it is a MissingFileError. Where a directory holds anything of
    a checkpoint that cannot be resumed, the run begins only with ``fresh``. ``log`` is told what the job goes on from.
    Raises CheckpointError when there are checkpoints and none can be loaded, and whatever
    ``engine.load_checkpoint`` raises for a run that does not fit::

        sampler = ElasticDistributedSampler(dataset, global_batch=512)
        start = resume(engine, "ckpt", data=sampler)
        for step in range(start.global_steps, total_steps): ...
    """
    from zeroelastic.stage3.fallback import none_loads, walk_back
    from zeroelastic.stage3.node_tags import tags_of_all_nodes
    from zeroelastic.stage3.partners import require_partners
    from zeroelastic.stage3.pending import flush
    from zeroelastic.stage3.saving import options_of
    from zeroelastic.stage3.seams import install
    from zeroelastic.stage3.tag_choice import nothing_to_load
    from zeroelastic.stage3.wrappers import loading_strictly
    from zeroelastic.tags import going_on_from, refuse_fresh_start

    install()
    require_partners()
    began = time.monotonic()
    root = Path(absolute(directory))

    def load(load_dir: str, name: str, passed: tuple[str, ...]) -> tuple[Path, Resumed]:
        with attempts.of(tag_dir := Path(load_dir) / name, lambda: next(tag for tag in tags if tag.tag_dir == tag_dir)):
            with loading_strictly(engine, strict):
                path, client_state = engine.load_checkpoint(load_dir, tag=name)
            if path is None:
                raise CheckpointError(f"{load_dir}: DeepSpeed did not load {name}.")
            resumed = _finish(engine, root, name, dict(client_state or {}), data, strict, passed)
            return tag_dir, resumed

    flush(engine, before="resume()")
    tags = tags_of_all_nodes(root)
    at = settle(lambda: going_on_from(root, tags) if _rank() == 0 else 0)
    attempts = settle(partial(Attempts, root))
    found, passed = walk_back(root, tags[at:], load, engine=engine, postpone=attempts.postpone)
    if found is not None:
        return _logged(_with_branches(engine, *found, tags, at), log, began)
    if passed:
        raise none_loads(root, passed)
    must = required or options_of(engine).required
    if not must and not fresh:
        settle(partial(refuse_fresh_start, root))
    nothing_to_load(root, required=must)
    return _logged(Resumed(None, 0, {}, None, (), ()), log, began)


def _logged(resumed: Resumed, log: Events | None, began: float) -> Resumed:
    if log is not None:
        report = resumed.report
        log.resumed(
            tag=resumed.tag,
            saved_world_size=report.saved_world_size if report is not None else None,
            proved=report.root_matches if report is not None else None,
            seconds=time.monotonic() - began,
            load_seconds=report.seconds if report is not None else None,
            passed_over=len(resumed.passed_over),
        )
    return resumed


def _finish(
    engine: Any,
    root: Path,
    name: str,
    client_state: dict[str, Any],
    data: Position | None,
    strict: bool,
    passed: tuple[str, ...],
) -> Resumed:
    import torch.distributed as dist

    from zeroelastic.stage3.fallback import UnusableError

    report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
    root_digest = report.loaded_root if report is not None and report.loaded_root is not None else name
    entry = client_state.pop(KEY, None)
    try:
        notes = settle(
            lambda: unpack_position(
                entry,
                data,
                identity=f"{root_digest} {engine.global_steps}",
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                device=engine.device,
                strict=strict,
            )
        )
    except CheckpointError as error:
        raise UnusableError(str(error)) from None
    positions = gather(json.dumps(data.state_dict(), default=str, sort_keys=True) if data is not None else "")
    if len(set(positions)) > 1:
        raise UnusableError(
            f"{root / name}: the ranks came to different positions in the data "
            f"({', '.join(sorted(set(positions))[:4])}). "
            "Its client state is of two saves, or the position depends on the rank."
        )
    if _rank() == 0:
        for note in notes:
            logger.info("%s: %s", name, note)
    return Resumed(name, int(engine.global_steps), client_state, report, passed, notes)


def _with_branches(engine: Any, tag_dir: Path, resumed: Resumed, tags: Sequence[Tag], at: int) -> Resumed:
    """With notes about newer tags that were not taken, and about branches that the run has left. Collective."""

    def notes() -> list[str]:
        chosen = next(tag for tag in tags if tag.tag_dir == tag_dir)
        pointed = about_pointed(tags[at].name, [tag.name for tag in tags[:at]]) if at else None
        return [note for note in (pointed, about_left(left_behind(tags, chosen))) if note is not None]

    said = broadcast(settle(lambda: notes() if _rank() == 0 else []))
    if not said:
        return resumed
    if _rank() == 0:
        logger.warning("%s: %s", tag_dir, ". ".join(said))
    report = resumed.report
    if report is not None:
        report = engine.zeroelastic_report = replace(report, notes=(*said, *report.notes))
    return replace(resumed, notes=(*said, *resumed.notes), report=report)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()
