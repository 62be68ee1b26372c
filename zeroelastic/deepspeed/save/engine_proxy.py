"""The stand-in for a checkpoint engine during a save: it redirects files and keeps errors for later."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroelastic.checkpoint.tag_files import SAVE_ID, parse_rank_file
from zeroelastic.errors import SaveError, ZeroElasticError

logger = logging.getLogger(__name__)


class CheckpointEngineProxy:
    """The checkpoint engine of one save, in which an error of one rank leaves no other rank waiting.

    DeepSpeed's save has barriers between its parts. So the first error is kept, the rest of this rank's part is left
    out, and ``raise_failure`` raises the error when all ranks have finished. ``save`` writes one file; files for
    ``tag_dir`` go to ``staging_dir``, the directory that becomes it. Everything else is the original engine's.
    ``names`` are of the files that were written for the tag.
    """

    def __init__(
        self, original: Any, save: Callable[[Any, str], None], *, save_id: str, tag_dir: Path, staging_dir: Path
    ) -> None:
        self._original, self._save, self._save_id = original, save, save_id
        self._tag_dir, self._staging_dir = tag_dir, staging_dir
        self._failure: ZeroElasticError | None = None
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory, as DeepSpeed does on some ranks; that of the tag is made by one rename."""
        if Path(path) != self._tag_dir:
            self.guarded(self._original.makedirs)(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        wanted = Path(path)
        place = path
        if wanted.parent == self._tag_dir:
            self.names.append(wanted.name)
            place = os.fspath(self._staging_dir / wanted.name)
        self.guarded(self._save, path)(with_save_id(state_dict, wanted.name, self._save_id), place)

    def commit(self, info: Any) -> bool:
        self.guarded(self._original.commit, getattr(info, "tag", None))(info)
        return True

    def guarded(self, action: Callable[..., Any], where: object = None) -> Callable[..., None]:
        """The action, with its error kept for later; after an error it does nothing."""

        def attempt(*args: Any, **kwargs: Any) -> None:
            if self._failure is not None:
                return
            try:
                action(*args, **kwargs)
            except ZeroElasticError as error:
                self._failure = error
            except Exception as error:
                logger.debug("a save failed", exc_info=True)
                self._failure = not_written(where if where is not None else args[0], error)
                if not self._staging_dir.is_dir():
                    self._failure = SaveError(
                        f"{self._failure} This rank does not see the directory that another one made for the save: "
                        'the directory is not the same on all nodes, which "use_node_local_storage": true allows.'
                    )

        return attempt

    def raise_failure(self) -> None:
        """Raise the first error of this rank, if there was one."""
        if self._failure is not None:
            raise self._failure


def with_save_id(state_dict: Any, name: str, save_id: str) -> Any:
    """Add the id of the save to the content of a rank's file, other than a file of an expert."""
    return state_dict if parse_rank_file(name) is None else {**state_dict, SAVE_ID: save_id}


def not_written(path: object, error: Exception) -> SaveError:
    """The error for a file of a save that could not be written."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    return SaveError(f"{path}: cannot be written: {why}. The tag is not committed, and `latest` is unchanged.")
