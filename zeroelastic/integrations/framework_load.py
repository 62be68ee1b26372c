"""A framework's own load of a checkpoint, with what the integrations do before and after it.

Before: what the checkpoint says of the run that wrote it. After: state outside of the engine is corrected, and notes on
that are added to the engine's resume report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from zeroelastic.deepspeed.live.kinds import kind_of
from zeroelastic.distributed.collective import all_or_raise, broadcast_or_raise
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import StrictError, ZeroElasticError
from zeroelastic.report import Note, ResumeReport

S = TypeVar("S")
T = TypeVar("T")


class Notes(list[Note]):
    """Notes for the resume report."""

    def info(self, text: str) -> None:
        self.append(Note(logging.INFO, text))

    def warn(self, text: str) -> None:
        self.append(Note(logging.WARNING, text))

    @property
    def texts(self) -> list[str]:
        return [note.text for note in self]

    @property
    def level(self) -> int:
        """The highest level of the notes; INFO without any."""
        return max((note.level for note in self), default=logging.INFO)


def is_loaded_here(engine: Any) -> bool:
    """Whether zeroelastic loads this engine's checkpoints: ZeRO-1, 2 or 3, and not a run that is left to DeepSpeed."""
    return kind_of(getattr(engine, "optimizer", None)) is not None


def read_on_rank_0(read: Callable[[], T | None]) -> T | None:
    """What ``read`` returns on rank 0, on every rank. Collective, where there is a process group.

    None where it finds no ZeRO checkpoint that can be read: the engine's own load then raises the reason.
    """

    def look() -> T | None:
        with suppress(ZeroElasticError):
            return read()
        return None

    if not dist.is_initialized():
        return look()
    require_partners()
    return broadcast_or_raise(look)


def load_and_correct(
    logger: logging.Logger,
    framework: str,
    engine: Any,
    load: Callable[[], T],
    *,
    read: Callable[[], S | None],
    refuse: Callable[[S], None],
    correct: Callable[[S, T, Notes], None],
    settings: str,
) -> T:
    """Return the result of ``load``, after ``correct`` has corrected what it restored. Collective.

    ``read`` returns what the checkpoint says of the run that wrote it, and ``refuse`` raises, before anything is
    changed, where that run cannot go on here; where it is None, nothing is corrected. The notes of ``correct`` are
    added to the report of the engine's load, and rank 0 logs them at the highest of their levels. ``settings``, how to
    keep the global batch in the framework's own words, is added where the report says that the batch changed, which
    makes it a warning, and to a StrictError of the load.
    """
    saved = read_on_rank_0(read)
    if saved is not None:
        all_or_raise(lambda: refuse(saved))
    try:
        loaded = load()
    except StrictError as error:
        raise StrictError(f"{error}{settings}") from None
    if saved is None:
        return loaded
    notes = Notes()
    all_or_raise(lambda: correct(saved, loaded, notes))
    report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
    if report is not None:
        if report.batch_changed:
            notes.warn(settings.strip())
        engine.zeroelastic_report = replace(report, notes=(*report.notes, *notes.texts))
    if notes and dist.get_rank() == 0:
        logger.log(notes.level, "%s, %d ranks: %s", framework, dist.get_world_size(), "; ".join(notes.texts))
    return loaded
