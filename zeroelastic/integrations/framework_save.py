"""A framework's own save of a checkpoint: engines, and the files that it writes next to their tags.

The order in which the note of ``runs.framework_files`` changes: before an engine's save, the files are of the tag that
exists; after it, they are being written; when all ranks have written theirs, they are of the new save. A save in the
background may make its tag later than that: until then the tag is of another save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from zeroelastic.deepspeed.engine_state import last_save_of
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.background import pending_of
from zeroelastic.distributed.collective import all_or_raise, broadcast_or_raise
from zeroelastic.runs.framework_files import UNFINISHED, expect_files, note_files, saved_id
from zeroelastic.runs.names import normal, save_directory

T = TypeVar("T")


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
