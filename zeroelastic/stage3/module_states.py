"""The module states as DeepSpeed's own load reads them: once, from a surveyed file, without frozen payload."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler

from zeroelastic.errors import CheckpointError, ConfigError, UnsafePickleError
from zeroelastic.patching import patched
from zeroelastic.safepickle import split_global
from zeroelastic.stage3.schedule import rearranged
from zeroelastic.stage3.survey import Survey
from zeroelastic.storage import read_range

_FRAGMENTS = "frozen_param_fragments"


@contextmanager
def model_states_reader(
    engine: Any, found: Survey, path: str, *, safe_load: bool, allow_globals: Sequence[str] = ()
) -> Iterator[None]:
    """While it lasts, DeepSpeed reads the module states of the survey once, from ``path``, without frozen payload.

    With ``safe_load``, objects are made of torch's allow-list, DeepSpeed's own and ``allow_globals`` only. Raises
    ConfigError for one of these that cannot be imported.
    """
    safe = [*_safe_classes(), *map(_imported, allow_globals)] if safe_load else None
    reader = _ModelStatesReader(engine.checkpoint_engine, found, path, safe, engine.lr_scheduler)
    with patched(engine, checkpoint_engine=reader, _zeroelastic_module_paths=reader.paths):
        yield


class _ModelStatesReader:
    """Stands in for the checkpoint engine while the module states are loaded; everything else is the original's."""

    def __init__(self, original: Any, found: Survey, path: str, safe: list[Any] | None, scheduler: Any) -> None:
        self._original, self._found, self._path = original, found, path
        # DeepSpeed wants one for each tensor parallel rank, and that of its own to exist.
        away = found.model.path.name in found.checkpoint.away
        self.paths = (path,) * found.checkpoint.tp.size if away else found.model_paths
        self._safe, self._scheduler = safe, scheduler
        self._loaded: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """DeepSpeed's loader asks twice for the same file; the second time it gets the first result."""
        if os.fspath(path) not in self.paths:
            return self._original.load(path, map_location=map_location)
        if self._loaded is None:  # of its tensor parallel peers' files it looks at what is in this rank's own, too
            self._loaded = self._read()
        return dict(self._loaded)

    def _read(self) -> dict[str, Any]:
        frozen = self._found.model.frozen
        mapped = frozen is not None and bool(frozen.numel.any())
        state = self._unpickle(mmap=mapped)  # maps the payload, so that fragments left out are never read
        state[_FRAGMENTS] = None  # DeepSpeed then leaves frozen parameters to us
        schedule = state.get("lr_scheduler")
        if self._scheduler is not None and isinstance(schedule, Mapping) and not self._found.membership.same_groups:
            state["lr_scheduler"] = rearranged(schedule, self._scheduler.state_dict(), self._found.membership.groups)
        # nothing may keep a mapping of a file that a later save overwrites
        return copy.deepcopy(state) if mapped else state

    def _unpickle(self, *, mmap: bool) -> dict[str, Any]:
        path = self._found.model.path
        if path.name not in self._found.checkpoint.away:
            assert isinstance(path, Path), "loads read local files"
            read_range(path, 0, 1)  # refuses what is no file, and links that lead elsewhere
        try:
            with torch.serialization.safe_globals(self._safe or []):
                state = torch.load(self._path, map_location="cpu", mmap=mmap, weights_only=self._safe is not None)
        except Exception as error:
            if self._safe is not None:
                raise UnsafePickleError(
                    f'{path}: refused by "safe_load": {error} To let objects of a class be made all the same, name it '
                    'in "allow_globals": ["package.module.Class"] in the "zeroelastic" block.'
                ) from None
            raise CheckpointError(f"{path}: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: is not a DeepSpeed model states file.")
        return state


def _safe_classes() -> list[Any]:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return [ZeroStageEnum, ds_loss_scaler.LossScaler, ds_loss_scaler.DynamicLossScaler]


def _imported(name: str) -> Any:
    """The class that the user has named."""
    module, qualname = split_global(name)
    try:
        return attrgetter(qualname)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'"zeroelastic": allow_globals names {name}, which cannot be imported: {error}.') from None
