"""Loads during which the job died, by tag: a load is recorded when it begins and removed when it ends.

A signal from outside says nothing about a checkpoint, and torchrun sends SIGTERM at each change of membership. So every
rank records such a signal in a shared file, at once and from C (``faulthandler``), whatever the process is doing. A
death that all ranks recorded does not count, nor does one before a change of the world size or more than a day ago.
In an object store nothing is recorded: a process that is being killed cannot reach it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.io.atomic import write_atomically
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.order import Tag

logger = logging.getLogger(__name__)

ATTEMPTS_NAME = ".zeroelastic-attempts.json"
"""Loads that were begun and not finished, by tag. The file exists only while there are any."""

_SIGNALS_NAME = ".zeroelastic-attempts.signals"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_RECORDED = b"most recent call first"
_MAX_DEATHS = 2
_DAY_S = 86400.0


@dataclass(slots=True)
class _Loads:
    """The loads of one save of a tag: the times of those in which the job died, and time and world size of the last."""

    save: str
    ended: list[float] = field(default_factory=list)
    begun: tuple[float, int] | None = None


_LOADS = TypeAdapter(_Loads)


class Attempts:
    """The unfinished loads of a directory, kept in ``ATTEMPTS_NAME``; rank 0 reads and writes the file."""

    def __init__(self, root: FilePath) -> None:
        self._root = root if isinstance(root, Path) else None
        self._loads = _read(self._root) if self._root is not None and dist.get_rank() == 0 else {}

    def postpone(self, tag: Tag) -> str | None:
        """Why a tag is tried after all others: the job has died while loading it. None if it has not."""
        if self._root is None:
            return None
        loads = self._loads.get(_key(self._root, Path(str(tag.tag_dir))))
        if loads is None or loads.save != _save(tag) or len(loads.ended) < _MAX_DEATHS:
            return None
        last = datetime.fromtimestamp(loads.ended[-1], timezone.utc).isoformat(" ", "seconds")
        return (
            f"the job ended {len(loads.ended)} times while it was being loaded, last at {last}: it is tried after all "
            f"others. If that was not the checkpoint's fault, remove {self._root / ATTEMPTS_NAME}"
        )

    @contextmanager
    def of(self, tag_dir: FilePath, find: Callable[[], Tag]) -> Iterator[None]:
        """Record a load of a tag, which ``find`` returns on rank 0, while it lasts. Collective.

        A directory that cannot be written to is loaded from all the same.
        """
        root = self._root
        if root is None or not isinstance(tag_dir, Path):
            yield
            return
        key = _key(root, tag_dir)

        def begin() -> None:
            if dist.get_rank() == 0:
                save = _save(find())
                found = self._loads.get(key)
                if found is None or found.save != save:
                    found = self._loads[key] = _Loads(save)
                found.begun = (time.time(), dist.get_world_size())
                try:
                    root.mkdir(parents=True, exist_ok=True)  # on a node that just joined the job
                    _create_anew(root / _SIGNALS_NAME)
                    self._write(root)
                except OSError as error:
                    place, why = error.filename or root, error.strerror
                    logger.warning(
                        "%s: %s. If the job dies during this load, the next start loads it again", place, why
                    )

        def end() -> None:
            if dist.get_rank() == 0:
                self._loads.pop(key, None)
                (root / _SIGNALS_NAME).unlink(missing_ok=True)
                self._write(root)

        all_or_raise(begin)
        try:
            with _recording_signals(root / _SIGNALS_NAME):
                yield
        finally:
            with suppress(OSError):
                end()

    def _write(self, root: Path) -> None:
        if self._loads:
            text = json.dumps({key: asdict(loads) for key, loads in self._loads.items()}, indent=1)
            write_atomically(root / ATTEMPTS_NAME, text.encode())
        else:
            (root / ATTEMPTS_NAME).unlink(missing_ok=True)


def _create_anew(path: Path) -> None:
    """Make an empty file. What has its name goes: a link that another user has put there is not followed."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _key(root: Path, tag_dir: Path) -> str:
    return os.path.relpath(tag_dir, root)


def _save(tag: Tag) -> str:
    return tag.save_id or f"of {tag.modified_at}"


def _read(root: Path) -> dict[str, _Loads]:
    """The loads in the file. One that was begun is counted as a death where the checkpoint may be the cause."""
    try:
        found = json.loads((root / ATTEMPTS_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    try:
        signalled = (root / _SIGNALS_NAME).read_bytes().count(_RECORDED)
    except OSError:
        signalled = 0
    read: dict[str, _Loads] = {}
    for key, entry in found.items() if isinstance(found, dict) else ():
        try:
            loads = _LOADS.validate_python(entry)
        except ValidationError:  # not what this class writes
            continue
        if loads.begun is not None:
            began, world_size = loads.begun
            if world_size == dist.get_world_size() and signalled < world_size:
                loads.ended.append(began)
            loads.begun = None
        loads.ended = [died for died in loads.ended if 0 <= time.time() - died < _DAY_S]
        if loads.ended:
            read[key] = loads
    return read


@contextmanager
def _recording_signals(path: Path) -> Iterator[None]:
    """While it lasts, a signal that ends this process is first recorded in ``path``, if that file exists."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # on another node, or not writable: then the death counts
        yield
        return
    try:
        for number in _SIGNALS:
            faulthandler.register(number, fd, all_threads=False, chain=True)
        yield
    finally:
        for number in _SIGNALS:
            faulthandler.unregister(number)
        os.close(fd)
