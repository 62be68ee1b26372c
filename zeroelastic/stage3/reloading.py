"""A load begins again when the tag was saved again while it was read, on all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from zeroelastic.agree import gather, is_agreed
from zeroelastic.errors import SavedAgainError, ZeroElasticError
from zeroelastic.one_save import was_saved_again
from zeroelastic.pinned import PinnedPath
from zeroelastic.save_place import MAX_LOOKS, open_tag
from zeroelastic.stage3.load import accumulated_micro_batches

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S = 0.05


class Attempt:
    """One of several attempts to load a tag.

    ``pending_micro_batches`` are the engine's own, from before the first attempt, which may have loaded others.
    """

    def __init__(self, pending_micro_batches: int) -> None:
        self.pending_micro_batches = pending_micro_batches
        self.opened: list[Path] = []

    def open_tag(self, tag_dir: Path) -> Path:
        """The tag directory, pinned, from which this attempt reads everything."""
        opened = open_tag(tag_dir)
        assert isinstance(opened, Path)
        self.opened.append(opened)
        return opened

    def was_saved_again(self) -> bool:
        """Whether any rank sees that what it opened was saved again, or is being written to. Collective."""
        return any(gather(any(map(_changes, self.opened))))


def load_one_save(engine: Any, load: Callable[[Attempt], T]) -> T:
    """What ``load`` returns, which reads what its attempt opens; repeated where that was saved again. Collective.

    ``load`` raises errors of ours, and those that were agreed on, on all ranks at the same place. What an attempt has
    filled is filled anew by the next. Raises SavedAgainError when the tag changed under each of MAX_LOOKS attempts.
    """
    pending = accumulated_micro_batches(engine)
    for number in range(1, MAX_LOOKS + 1):
        attempt = Attempt(pending)
        try:
            return load(attempt)
        except Exception as error:
            if not is_of_all_ranks(error):
                raise
            changed = [str(path) for path in attempt.opened if _changes(path)]
            names = sorted({name for found in gather(changed) for name in found})
            if not names and not isinstance(error, SavedAgainError):
                raise
            where = ", ".join(names) or str(attempt.opened[0])
            if number == MAX_LOOKS:
                raise SavedAgainError(
                    f"{where}: was saved again, or written to, during each of {number} attempts to load it. Load a tag "
                    f"that is not being saved, or save it less often. The last attempt ended with: {error}"
                ) from error
            if dist.get_rank() == 0:
                logger.warning("%s: was saved again while it was loaded; the load begins again (%s)", where, error)
        time.sleep(_PAUSE_S * number)
    raise AssertionError("the last attempt returns or raises")


def is_of_all_ranks(error: Exception) -> bool:
    """Whether every rank raises an error here; else the others are elsewhere."""
    return isinstance(error, ZeroElasticError) or is_agreed(error)


def _changes(opened: Path) -> bool:
    """Whether a tag was saved again since it was opened, or is being written to now."""
    if was_saved_again(opened):
        return True
    if isinstance(opened, PinnedPath):
        with suppress(OSError):
            opened.note_all()
        time.sleep(_PAUSE_S)  # for files that DeepSpeed alone is writing in place
    return was_saved_again(opened)
