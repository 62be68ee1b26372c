"""Tags beyond the newest ``"keep"`` are removed after a commit.

The rules of ``runs.prune`` hold, and stricter ones, because nobody is asked: only tags with a commit record and the
trained parameters of the engine count, and only they are removed. A removal that fails warns; the save is committed by
then.
"""

from __future__ import annotations

import logging
from pathlib import Path

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save.upload import uploads
from zeroelastic.errors import ZeroElasticError, printable, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.candidates import check_quickly
from zeroelastic.runs.names import CHECKPOINT_FOLDER
from zeroelastic.runs.prune import OTHER_PARAMS, Decision, PrunePlan, plan_prune, remove_tag

logger = logging.getLogger(__name__)

_warned: set[str] = set()


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
            logger.warning('"keep" removes no checkpoints here: each has a folder of its own. Use %s.', limit)
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
