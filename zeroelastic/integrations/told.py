"""What an integration says of a resume: added to the engine's report, and logged once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from zeroelastic.report import ResumeReport


def tell(
    logger: logging.Logger, framework: str, engine: Any, notes: Sequence[str], *, settings: str, loud: tuple[str, ...]
) -> None:
    """Add notes to the report of the engine's last load, and say them on rank 0.

    ``settings``, how to keep the global batch in the framework's own words, is added where the report says that it
    changed. That, and notes that begin with one of ``loud``, make it a warning.
    """
    report: ResumeReport | None = getattr(engine, "zeroelastic_report", None)
    changed = report is not None and any("CHANGED" in note for note in report.notes)
    told = (*notes, settings.strip()) if changed else tuple(notes)
    if report is not None:
        engine.zeroelastic_report = replace(report, notes=(*report.notes, *told))
    if told and dist.get_rank() == 0:
        level = logging.WARNING if changed or any(note.startswith(loud) for note in told) else logging.INFO
        logger.log(level, "%s, %d ranks: %s", framework, dist.get_world_size(), "; ".join(told))
