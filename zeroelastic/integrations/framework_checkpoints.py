"""A framework's own loads and saves of a checkpoint: engines, and the files that it writes next to their tags.

A load finds out which of the framework's checkpoints is the newest complete one, and what is corrected after the load.

A save changes the note of ``runs.tags`` in this order: before an engine's save, the files are of the tag
that exists; after it, they are being written; when all ranks have written theirs, they are of the new save. A save in
the background may make its tag later than that: until then the tag is of another save.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from zeroelastic import last_report
from zeroelastic.checkpoint.open import Checkpoint, open_checkpoint
from zeroelastic.deepspeed.engine_state import last_save_of
from zeroelastic.deepspeed.live.kinds import kind_of
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.background import pending_of
from zeroelastic.distributed.collective import all_or_raise, broadcast_or_raise
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    StrictError,
    UnsupportedError,
    ZeroElasticError,
    finding,
    some,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import directory_exists
from zeroelastic.runs.locate import find_source
from zeroelastic.runs.names import LATEST, normal, save_directory
from zeroelastic.runs.tag_directory import read_tag, recover_all
from zeroelastic.runs.tags import UNFINISHED, expect_files, note_files, require_own_files, saved_id
from zeroelastic.runs.verdicts import check_quickly, is_damage

S = TypeVar("S")
T = TypeVar("T")


class Notes:
    """Notes for the resume report, and the level at which rank 0 logs them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.level = logging.INFO

    def info(self, text: str) -> None:
        self.texts.append(text)

    def warn(self, text: str) -> None:
        self.texts.append(text)
        self.level = logging.WARNING


def is_loaded_here(engine: Any) -> bool:
    """Whether zeroelastic loads this engine's checkpoints: ZeRO-1, 2 or 3, and not a run that is left to DeepSpeed."""
    return kind_of(getattr(engine, "optimizer", None)) is not None


class BatchSettings(NamedTuple):
    """How a run makes its global batch: each rank adds up ``accumulation`` micro batches of ``micro`` samples."""

    world_size: int
    micro: int | None
    accumulation: int

    @classmethod
    def saved(cls, checkpoint: Checkpoint) -> BatchSettings:
        """The settings of the run that wrote a checkpoint, from the configuration in its first file."""
        config = checkpoint.shard(0).ds_config
        micro, steps = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
        return cls(
            checkpoint.world_size,
            micro if type(micro) is int else None,
            steps if type(steps) is int else 1,
        )

    @classmethod
    def of(cls, engine: Any, accumulation: int) -> BatchSettings:
        """The settings of this run."""
        return cls(dist.get_world_size(), int(engine.train_micro_batch_size_per_gpu()), accumulation)

    @property
    def samples(self) -> int | None:
        """The global batch, where the micro batch is known."""
        return None if self.micro is None else self.world_size * self.micro * self.accumulation

    def refuse_other(self, now: BatchSettings, what: str, instead: str) -> None:
        """Raise UnsupportedError where a saved count of batches means another place in the data in this run."""
        if now != self:
            then, this = (f"{n} ranks (micro batch {micro}, accumulation {steps})" for n, micro, steps in (self, now))
            raise UnsupportedError(
                f"{what}, which counts the batches of {then}; this run has {this}, where that is another place in the "
                f"data. {instead}"
            )


def read_checkpoint(find: Callable[[], FilePath], read: Callable[[Checkpoint], T | None]) -> T | None:
    """Return, on every rank, what ``read`` returns on rank 0 for the tag directory that ``find`` finds. Collective.

    None where there is no ZeRO checkpoint that can be read: the engine's own load then raises the reason.
    """

    def look() -> T | None:
        with suppress(ZeroElasticError):
            return read_tag(find(), lambda opened: read(open_checkpoint(opened)))
        return None

    return on_rank_0(look)


def read_folder(folder: Path, read: Callable[[Checkpoint], T | None]) -> T | None:
    """``read_checkpoint`` of the tag in a folder of a framework. Collective."""
    return read_checkpoint(lambda: find_source(folder).tag_dir, read)


def on_rank_0(read: Callable[[], T]) -> T:
    """Return what ``read`` returns on rank 0, on every rank; its errors too. Collective, with a process group."""
    if not dist.is_initialized():
        return read()
    require_partners()
    return broadcast_or_raise(read)


def refuse_cut_short(directory: Path) -> None:
    """Raise CheckpointError where the files that a framework writes next to a tag are of another save. Collective."""
    on_rank_0(lambda: _require_one_save(directory))


def _require_one_save(directory: Path) -> None:
    """``refuse_cut_short`` on this rank; a replacement of a tag that was killed is finished before."""
    with suppress(OSError):  # nothing is there, or a directory that cannot be written: what is missing is reported
        recover_all(directory)
    require_own_files(directory)


@contextmanager
def _saying_cut_short(directory: Path, tag: str) -> Iterator[None]:
    """Within this context, a framework's own error on a directory without its tag, or ``latest``, names the cause."""
    try:
        yield
    except ZeroElasticError:
        raise
    except Exception as error:
        missing = [name for name in (tag, LATEST) if not (directory / name).exists()]
        if not missing or not directory.is_dir():
            raise
        raise MissingFileError(
            f"{directory}: has no {some(missing)}: it is not a checkpoint, or its save was cut short.",
            remedy="Give another directory.",
        ) from error


def numbered(directory: Path, pattern: str) -> list[Path]:
    """The folders whose names match a pattern with a number, by this number."""
    found = {int(match[1]): path for path in directory.glob("*/") if (match := re.fullmatch(pattern, path.name))}
    return [found[number] for number in sorted(found)]


def newest_complete(
    logger: logging.Logger, folders: Callable[[], list[Path]], check: Callable[[Path], None], to_choose: str
) -> tuple[Path | None, tuple[Path, ...]]:
    """The last of the folders that ``check`` finds complete, and whose files are of one save, or None. Collective.

    With the later ones, which are passed over; rank 0 warns of them. One that cannot be read here and now is not passed
    over: its load says why.
    """

    def look() -> tuple[Path | None, dict[Path, str]]:
        problems: dict[Path, str] = {}
        for folder in reversed(folders()):
            try:
                _require_one_save(folder)
                check(folder)
            except CheckpointError as error:
                if is_damage(error):
                    problems[folder] = finding(error)
            except ZeroElasticError:
                pass
            if folder not in problems:
                return folder, problems
        return None, {}

    newest, problems = on_rank_0(look)
    if problems and (not dist.is_initialized() or dist.get_rank() == 0):
        passed = ", ".join(folder.name for folder in problems)
        logger.warning(
            "PASSED OVER: %s, from which no run can go on: the save was cut short, or files are missing or damaged. "
            "The run goes on from %s. %s (%s)",
            *(passed, newest, to_choose, " ".join(problems.values())),
        )
    return newest, tuple(problems)


def check_tag(tag_dir: FilePath, *, on_this_node_only: bool) -> None:
    """Raise CheckpointError where a tag does not exist, or lacks files; other nodes may have theirs on their disks."""

    def check(opened: FilePath) -> None:
        if not directory_exists(opened):
            raise MissingFileError(f"{tag_dir}: is not there.")
        if not on_this_node_only:
            check_quickly(opened)

    read_tag(tag_dir, check)


def load_and_correct(
    framework: str,
    engine: Any,
    load: Callable[[], T],
    *,
    directory: Path,
    tag: str,
    read: Callable[[Checkpoint], S | None],
    refuse: Callable[[S], None],
    correct: Callable[[S, T, Notes], None] = lambda *_: None,
    settings: str,
) -> T:
    """Return the result of ``load`` of a tag, after ``correct`` has corrected what it restored. Collective.

    ``read`` returns what the checkpoint says of the run that wrote it; where it is None, nothing is corrected.
    ``refuse`` raises, before anything is changed, where that run cannot go on here. Rank 0 logs the notes of
    ``correct``, and the engine's report gets them. ``settings``, how to keep the global batch in the framework's own
    words, is added to a StrictError and where the report says that the batch changed.
    """
    refuse_cut_short(directory)
    saved = read_checkpoint(lambda: directory / tag, read)
    if saved is not None:
        all_or_raise(lambda: refuse(saved))
    try:
        with _saying_cut_short(directory, tag):
            loaded = load()
    except StrictError as error:
        raise StrictError(f"{error} {settings}") from None
    if saved is None:
        return loaded
    notes = Notes()
    all_or_raise(lambda: correct(saved, loaded, notes))
    report = last_report(engine)
    if report is not None and report.batch_changed:
        notes.warn(settings)
    add_to_report(engine, notes.texts)
    if notes.texts and dist.get_rank() == 0:
        logger = logging.getLogger(f"{__package__}.{framework.lower()}")  # of the module for the framework
        logger.log(notes.level, "%s, %d ranks: %s", framework, dist.get_world_size(), "; ".join(notes.texts))
    return loaded


def add_to_report(engine: Any, notes: Iterable[str]) -> None:
    """Add notes to the report of the engine's last load, if there is one."""
    report = last_report(engine)
    if report is not None:
        engine.zeroelastic_report = replace(report, notes=(*report.notes, *notes))


def save_with_files(engines: Iterable[Any], save: Callable[[], T]) -> T:
    """Return the result of ``save``, which saves engines and writes files next to their tags. Collective.

    An error of a rank is raised on all; then the note says that the files are not all of one save.
    """
    saved: dict[Path, dict[str, Any]] = {}

    def noting(engine: Any) -> Callable[..., Any]:
        original = engine.save_checkpoint

        @functools.wraps(original)
        def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            directory = save_directory(save_dir)
            tag = normal(f"global_step{engine.global_steps}" if tag is None else str(tag))
            tags = saved.setdefault(directory, {})
            if dist.get_rank() == 0:  # no collective: ranks may be missing, which the engine's save says
                with suppress(OSError):  # with which the engine's save fails on all ranks
                    expect_files(directory, tag)
            done = original(save_dir, tag, *args, **kwargs)
            tags[tag] = engine
            broadcast_or_raise(partial(note_files, directory, dict.fromkeys(tags, UNFINISHED)))
            return done

        return save_checkpoint

    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(patched(engine, save_checkpoint=noting(engine)))
        done = all_or_raise(save)
    for directory, tags in saved.items():
        broadcast_or_raise(partial(_note_complete, directory, tags))
    return done


def _note_complete(directory: Path, tags: Mapping[str, Any]) -> None:
    note_files(directory, {tag: _save_id(engine, directory, tag) for tag, engine in tags.items()})


def _save_id(engine: Any, directory: Path, tag: str) -> str | None:
    """Return the id of the save that was begun last: of one in the background it is not on the disk yet."""
    if pending_of(engine) is not None:
        return last_save_of(engine).begun
    return saved_id(directory, tag)
