"""A checkpoint of FSDP2 as a read-only mapping from names to tensors: what ``zeroelastic.open`` returns for one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from zeroelastic.checkpoint.one_save import pin
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.core.layout import Int64Array
from zeroelastic.dcp.native import NativeForm
from zeroelastic.dcp.saved import dcp_folders, open_dcp
from zeroelastic.dcp.state import saved_state
from zeroelastic.errors import CheckpointError, UnreadableError
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.runs.locate import Source
from zeroelastic.torch_file.zip_check import ZipRecords
from zeroelastic.verbs.model_tensors import Buffer, Kind, ModelTensor, ModelTensors, Place
from zeroelastic.verbs.view import CheckpointView

_RANK_FILE = re.compile(r"__(?P<rank>\d{1,9})_.*\.distcp")


def dcp_root(text: str | os.PathLike[str]) -> FilePath | None:
    """The directory of a checkpoint of FSDP2 that a path means; None where it means none."""
    path = as_path(text)
    path = Path(os.path.abspath(path)) if isinstance(path, Path) else path
    try:
        return path if dcp_folders(path) else None
    except (CheckpointError, UnreadableError):  # what is wrong with it is said by who looks for other formats
        return None


class DcpView(CheckpointView):
    """A checkpoint of FSDP2, whose tables and headers are read when it is opened.

    It has neither a tag nor a commit record. ``stage`` is 3: FSDP2 cuts weights, gradients and state.
    """

    def __init__(self, root: FilePath) -> None:
        root = pin(root)
        self._begin(Source(root, root.name, root, None, "deepspeed"))
        with self._reading():
            self._found = open_dcp(root)
        self._checkpoint = self._state.checkpoint

    def _archives(self, path: FilePath, holding: Int64Array) -> Iterable[tuple[int, ZipRecords]]:
        return self._checkpoint.archives(path, holding)  # each of them holds one chunk

    @cached_property
    def format(self) -> str:
        """``"dcp"``."""
        return "dcp"

    @cached_property
    def client_state(self) -> Mapping[str, object]:
        """Empty: a checkpoint of FSDP2 has none."""
        return MappingProxyType({})

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the directory has and this mapping has not, and what was inferred, as sentences."""
        return (*self._found.notes, *(f"{key}: it is neither of the model nor of the optimizer" for key in self._rest))

    @property
    def _rest(self) -> tuple[str, ...]:
        return self._found.named.rest

    @cached_property
    def _state(self) -> SavedState:
        found = self._found
        return saved_state(NativeForm(found, {}, found.trained, found.named.groups, found.steps, None, {}, ()))

    @cached_property
    def _model(self) -> ModelTensors:
        tensors: list[ModelTensor] = []
        for number, part in enumerate(self._state.parts):
            for i, param in enumerate(part.params):
                key = FP32 if FP32 in part.dtypes[i] else FROZEN
                kind: Kind = "trained" if key == FP32 else "frozen"
                place = Place(number, i, key)
                tensors.append(ModelTensor(param.name, param.shape, part.dtypes[i][key], kind, place))
        for name, (shape, extent) in self._found.buffers.items():
            tensors.append(ModelTensor(name, shape, extent.dtype, "buffer", Buffer(extent, None)))
        return ModelTensors(tuple(tensors), self._found.tied, ())

    def _rank_of(self, path: FilePath) -> int:
        match = _RANK_FILE.fullmatch(path.name)
        return 0 if match is None else int(match["rank"])
