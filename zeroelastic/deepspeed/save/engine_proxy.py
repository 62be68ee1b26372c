"""The stand-in for a checkpoint engine during a save: it redirects files and keeps errors for later."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine

from zeroelastic.deepspeed.storage_rules import NOT_SEEN
from zeroelastic.errors import SaveError, ZeroElasticError

logger = logging.getLogger(__name__)


class CheckpointEngineProxy:
    """Stands in for a checkpoint engine during one save, so that an error of one rank leaves no other rank waiting.

    DeepSpeed's save has barriers between its parts. So the first error is kept, the rest of this rank's part is left
    out, and ``raise_failure`` raises the error when all ranks have finished. ``save`` writes one file; files for
    ``tag_dir`` go to ``staging_dir``, the directory that becomes it. Everything else is the original engine's.
    ``commit_info`` is what DeepSpeed announced, and ``names`` are those of the files that were written for the tag.
    """

    def __init__(self, original: Any, save: Callable[[Any, str], None], *, tag_dir: Path, staging_dir: Path) -> None:
        self._original, self._save = original, save
        self._tag_dir, self._staging_dir = tag_dir, staging_dir
        self._failure: ZeroElasticError | None = None
        self.commit_info: Any = None
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory; DeepSpeed does it on some ranks only. That of the tag is made by one rename, later."""
        if Path(path) != self._tag_dir:
            self.guarded(self._original.makedirs)(path, exist_ok=exist_ok)

    def create(self, info: Any) -> Any:
        """Announce a save; engines with a process of their own measure the directory, on all ranks together."""
        self.commit_info = info
        return self._original.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""
        wanted = Path(path)
        place = path
        if wanted.parent == self._tag_dir:
            self.names.append(wanted.name)
            place = os.fspath(self._staging_dir / wanted.name)
        self.guarded(self._save, path)(state_dict, place)

    def commit(self, info: Any) -> bool:
        """Commit at the end of the save itself; DeepSpeed calls it for engines that are not decoupled."""
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
                    self._failure = SaveError(f"{self._failure} {NOT_SEEN}")

        return attempt

    def raise_failure(self) -> None:
        """Raise the first error of this rank, if there was one."""
        if self._failure is not None:
            raise self._failure


def not_written(path: object, error: Exception) -> SaveError:
    """The error for a file of a save that could not be written."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    return SaveError(f"{path}: cannot be written: {why}. The tag is not committed, and `latest` is unchanged.")


class CopyingSave:
    """``save`` for a checkpoint engine that writes later: its tensors do not change until it has committed.

    ``constant`` are live tensors that only an optimizer step or a load changes; the engine commits before either, so
    they are passed on without a copy. Every other tensor, such as a buffer that the next forward pass updates, is
    copied. DeepSpeed's own engine pickles the state dict into another process. Each storage is sent there once,
    whatever the number of its views, because each transfer takes a file descriptor.
    """

    def __init__(self, original: Any, constant: Iterable[torch.Tensor], *, shares_storage: bool) -> None:
        self._original = original
        self._copied = frozenset() if shares_storage else frozenset({"base_optimizer_state"})
        self._constant = {tensor.untyped_storage().data_ptr() for tensor in constant if tensor.numel()}
        self._pickled = isinstance(original, DecoupledCheckpointEngine)

    def __call__(self, state_dict: Any, path: str) -> None:
        """Pass one file on to the checkpoint engine."""
        self._original.save(self._prepared(state_dict, {}), path)

    def _prepared(self, tree: Any, known: dict[Any, Any]) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._tensor(tree.detach(), known)
        if isinstance(tree, dict):
            made = copy.copy(tree)  # keeps the kind of dict, and the attributes of a module's state dict
            for key, value in tree.items():
                if key not in self._copied:  # unpadded clones, made for an engine that writes every tensor on its own
                    made[key] = self._prepared(value, known)
            return made
        if type(tree) in (list, tuple):
            return type(tree)(self._prepared(value, known) for value in tree)
        return tree

    def _tensor(self, tensor: torch.Tensor, known: dict[Any, Any]) -> Any:
        if tensor.layout is not torch.strided:
            return tensor.clone()
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), tensor.dtype)
        if tensor.numel() == 0 or place[0] not in self._constant:
            return tensor.clone()
        if not self._pickled:
            return tensor
        if place not in known:
            known[place] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        return _View(known[place], tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


class _View:
    """A view of a tensor that is pickled once: the view is made where it is unpickled."""

    def __init__(self, *place: Any) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.as_strided, self._place
