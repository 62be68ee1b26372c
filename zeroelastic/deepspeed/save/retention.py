"""Retention at save time: after a commit, the tags of the run beyond the newest ``"keep"`` are removed.

The rules are those of ``tags.prune``, and stricter, because nobody is asked: only tags of the run that saves
(``tags.runs``) with a commit record count, and only they are removed. A removal that fails warns; the save is committed
by then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.deepspeed.options import Options
from zeroelastic.errors import ZeroElasticError, printable, some
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import file_sizes
from zeroelastic.tags.candidates import check_quickly
from zeroelastic.tags.names import CHECKPOINT_FOLDER
from zeroelastic.tags.prune import OTHER_RUN, Decision, PrunePlan, plan_prune, remove_tag
from zeroelastic.tags.store_prune import plan_store_prune, remove_stored_tag

logger = logging.getLogger(__name__)

_MAX_LISTED = 3

_warned: set[str] = set()


def remove_old_tags(root: FilePath, tag: str, options: Options, *, over_nodes: bool) -> tuple[str, ...]:
    """Remove the tags of ``root`` beyond the newest ``options.keep``; returns the names of those that are gone.

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
        check = _check_own_files if over_nodes else _check
        if isinstance(root, RemotePath):
            plan = plan_store_prune(root, keep=options.keep, check=check, of=tag)
        else:
            plan = plan_prune(Path(root), keep=options.keep, check=check, of=tag)
        _warn_of_others(plan)
        for decision in plan.removals:
            if not _stays(decision, options.keep_every) and _remove(plan, decision):
                removed.append(decision.tag.name)
    except Exception as error:
        expected = isinstance(error, (ZeroElasticError, OSError))
        logger.warning('%s: "keep": old tags were not removed: %s', root, error, exc_info=not expected)
    return tuple(removed)


def _warn_of_others(plan: PrunePlan) -> None:
    """Warn once per directory that it has checkpoints of other runs, which nothing removes."""
    others = [decision.tag.name for decision in plan.decisions if decision.reason == OTHER_RUN]
    if others and str(plan.root) not in _warned:
        _warned.add(str(plan.root))
        logger.warning(
            '%s: "keep" counts and removes the checkpoints of this run alone; of other runs there are %s. Remove those '
            "that are not needed by hand or with zeroelastic prune.",
            *(plan.root, some(map(printable, others), _MAX_LISTED)),
        )


def _remove(plan: PrunePlan, decision: Decision) -> bool:
    """Whether a tag is gone; where it is not, the log says why."""
    try:
        kept = (remove_stored_tag if isinstance(plan.root, RemotePath) else remove_tag)(plan, decision)
    except OSError as error:
        logger.warning(
            '%s: "keep": the old tag %s was not removed: %s: %s. Remove it by hand or with zeroelastic prune.',
            *(plan.root, decision.tag.name, error.filename, error.strerror),
        )
        return False
    if kept is not None:
        logger.info('%s: "keep": the old tag %s was not removed: %s', plan.root, decision.tag.name, kept)
    return kept is None


def _limit_of_framework(root: FilePath, tag: str) -> str | None:
    """The setting of a framework that gives each checkpoint a folder of its own, beside which it has other files."""
    if tag == "pytorch_model":
        return "total_limit of accelerate's ProjectConfiguration"
    if tag == "checkpoint":
        return "save_top_k of Lightning's ModelCheckpoint"
    return "save_total_limit of TrainingArguments" if CHECKPOINT_FOLDER.fullmatch(root.name) else None


def _stays(decision: Decision, keep_every: int | None) -> bool:
    step = decision.tag.step
    return keep_every is not None and (step is None or step % keep_every == 0)


def _check(tag_dir: FilePath) -> tuple[str, ...]:
    """The problems of a tag; one without a commit record has one, so that it neither counts nor is removed."""
    return check_quickly(tag_dir) if _is_ours(tag_dir) else ("has no commit record.",)


def _check_own_files(tag_dir: FilePath) -> tuple[str, ...]:
    """``_check`` where the files of other ranks are on other nodes."""
    record = read_record(tag_dir)
    if record is None:
        return ("has no commit record.",)
    return tuple(
        f"{name} has {size} bytes, {record.files[name]} by the commit record."
        for name, size in file_sizes(tag_dir).items()
        if name in record.files and record.files[name] != size
    )


def _is_ours(tag_dir: FilePath) -> bool:
    return RECORD_NAME in file_sizes(tag_dir)


def removal_note(removed: Sequence[str]) -> str:
    """The end of the line about a save: which tags are gone; empty where none is."""
    return f"; removed {', '.join(removed)}" if removed else ""
