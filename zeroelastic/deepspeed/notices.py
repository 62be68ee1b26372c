"""The output of loads and saves without any logging set up: one line for each, from rank 0, on stderr.

A record is printed only if no other handler gets it, whenever that was attached, so nothing appears twice. Where INFO
is logged, a notice is an ordinary record with all its details, and no second line is printed.
"""

from __future__ import annotations

import logging
import os
import sys

from zeroelastic.errors import ConfigError

VARIABLE = "ZEROELASTIC_LOG"

_LEVELS = {"warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}

_package = logging.getLogger("zeroelastic")
_notices = logging.getLogger(__name__)


class _Console(logging.Handler):
    """Prints the records that no other handler gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if _is_taken(record):
            return
        try:
            sys.stderr.write(f"[zeroelastic] {self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


_console = _Console()
_levels_before: tuple[int, int] | None = None


def notice(logger: logging.Logger, line: str, *, details: str = "") -> None:
    """Log a line at level INFO, with ``details``; where INFO is not logged, show the line alone as a notice."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s%s", line, details)
    else:
        _notices.info("%s", line)


def show_notices() -> None:
    """Show notices and warnings on stderr where no handler does, or the level in ``ZEROELASTIC_LOG``. Idempotent.

    Raises ConfigError for an unknown value of ``ZEROELASTIC_LOG``.
    """
    global _levels_before
    value = os.environ.get(VARIABLE, "")
    if value and value.lower() not in _LEVELS:
        raise ConfigError(f"{VARIABLE} is {value!r}; set it to one of {', '.join(_LEVELS)}, or leave it out.")
    if _levels_before is not None:
        return
    _levels_before = (_package.level, _notices.level)
    if value:
        _package.setLevel(_LEVELS[value.lower()])
    else:
        _notices.setLevel(logging.INFO)
    _package.addHandler(_console)


def hide_notices() -> None:
    """Restore logging to its state before ``show_notices``."""
    global _levels_before
    if _levels_before is not None:
        _package.removeHandler(_console)
        _package.setLevel(_levels_before[0])
        _notices.setLevel(_levels_before[1])
        _levels_before = None


def _is_taken(record: logging.LogRecord) -> bool:
    """Whether another handler, of the record's logger or a logger above it, gets the record."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        others = (one for one in logger.handlers if one is not _console and not isinstance(one, logging.NullHandler))
        if any(record.levelno >= handler.level for handler in others):
            return True
        logger = logger.parent if logger.propagate else None
    return False
