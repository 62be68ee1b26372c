"""A whole checkpoint of FSDP2: its parameters as parts of a saved state, with their layout and extents.

``open_dcp`` takes a DCP directory with the model and the optimizer, as ``torch.distributed.checkpoint.save`` writes it,
or the directory of accelerate's ``save_state`` and of the Trainer, whose folders ``pytorch_model_fsdp_0`` and
``optimizer_0`` have one each.

``NativeNotes`` are what FSDP2 has no place for, so that the way back loses nothing: a conversion to FSDP2 writes them
as JSON under the key ``zeroelastic`` of the model's DCP directory, which torch does not read; the way back takes them.
A job of FSDP2 that saves again does not write them: what they then say is no longer there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, ParamGroup
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import ScalarValue
from zeroelastic.dcp.chunks import ChunkArchives, StateKeys, tensor_set
from zeroelastic.dcp.metadata import METADATA, ChunkedTensor, DcpMetadata, read_metadata
from zeroelastic.dcp.names import NATIVE, NamedState, named_state
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, UsageError, brief, printable, some
from zeroelastic.io.paths import FilePath, absolute, as_path
from zeroelastic.io.storage import list_directory, read_exactly
from zeroelastic.torch_file.header import DTYPE_BYTES, Extent

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""The names that accelerate gives to the DCP directories of the first model and the first optimizer."""

SCHEDULER_FILE = "scheduler.bin"
"""Where accelerate keeps the state of the first scheduler, beside these folders."""

_OF_PARAMETERS = (".weight", ".bias")
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_COMPARED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
    """A checkpoint of FSDP2, opened.

    ``trained`` and ``frozen`` are the parameters, as of ``world_size`` ranks; ``buffers`` where the model's other
    tensors are, with their shapes; ``tied`` gives further names of parameters. ``notes`` are sentences on what the
    checkpoint does not say and was inferred. ``native`` is what a conversion kept of a ZeRO run, if it made it.
    """

    root: FilePath
    files: tuple[FilePath, ...]
    tables: tuple[FilePath, ...]
    world_size: int
    named: NamedState
    trained: TensorSet
    frozen: TensorSet
    buffers: Mapping[str, tuple[tuple[int, ...], Extent]]
    tied: Mapping[str, str]
    native: NativeNotes
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The number of optimizer steps: as a conversion kept it, as the job counted, or as the optimizer did."""
        if "global_steps" in self.native.counters:
            return self.native.counters["global_steps"]
        own = [int(scalars["step"].value or 0) for scalars in self.named.scalars.values() if "step" in scalars]
        return max(own, default=0) if self.named.steps is None else self.named.steps


def dcp_folders(path: FilePath) -> tuple[FilePath, ...]:
    """The DCP directories that a path means: itself, or the two in a directory of accelerate. Empty: it means none.

    Raises MissingFileError.
    """
    names, inside = list_directory(path)
    if METADATA in names:
        return (path,)
    return tuple(
        path / name
        for name in (MODEL_FOLDER, OPTIMIZER_FOLDER)
        if name in inside and METADATA in list_directory(path / name)[0]
    )


def find_dcp(text: str | os.PathLike[str]) -> FilePath:
    """The directory of a checkpoint of FSDP2 that a path means. Raises UsageError that names what there is instead."""
    path = as_path(absolute(text))
    try:
        if dcp_folders(path):
            return path
        below = [name for name in list_directory(path)[1] if dcp_folders(path / name)]
    except MissingFileError:
        raise UsageError(f"{path}: is not a directory. Give that of a checkpoint of FSDP2.") from None
    there = f"There are: {some(map(printable, below))}. Give the path of one." if below else ""
    raise UsageError(
        f"{path}: holds no checkpoint of FSDP2: neither {METADATA} of torch.distributed.checkpoint nor the folder "
        f"{MODEL_FOLDER} of accelerate. {there}".rstrip()
    )


def open_dcp(root: FilePath) -> DcpCheckpoint:
    """Read the tables of a checkpoint of FSDP2 and the header of every chunk; no payload but of small objects.

    Only where a tensor may be another name of a parameter are the two compared. Raises CheckpointError,
    MissingFileError, UnsafePickleError, UnsupportedError.

    Example::

        found = open_dcp(find_dcp("runs/fsdp/step-100"))
        found.trained.params, found.named.groups
    """
    folders = dcp_folders(root)
    metadata = _joined(root, [read_metadata(folder) for folder in folders])
    with ChunkArchives() as archives:
        named = named_state(metadata, archives)
        native = _native(named, root)
        notes: list[str] = []
        frozen_names, buffer_names, tied = _others(named, native, metadata.parts, notes)
        trained = tensor_set(named.trained, metadata.parts, named.scalars)
        frozen = {name: {FROZEN: named.others[name]} for name in frozen_names}
        buffers = {name: _buffer(name, named.others[name], archives, root) for name in buffer_names}
        kept = tensor_set(frozen, metadata.parts, {})
        for part in (trained, kept):
            dict(part.extents)
        return DcpCheckpoint(
            root=root,
            files=metadata.files,
            tables=tuple(folder / METADATA for folder in folders),
            world_size=trained.layout.world_size,
            named=named,
            trained=trained,
            frozen=kept,
            buffers=buffers,
            tied=tied,
            native=native,
            notes=tuple(notes),
        )


def _joined(root: FilePath, found: Sequence[DcpMetadata]) -> DcpMetadata:
    """The tables of several directories as one."""
    tensors = {key: tensor for one in found for key, tensor in one.tensors.items()}
    objects = {key: place for one in found for key, place in one.objects.items()}
    if len(tensors) + len(objects) < sum(len(one.tensors) + len(one.objects) for one in found):
        raise CheckpointError(f"{root}: its folders have entries of the same name. They are of different saves.")
    return DcpMetadata(root, tensors, objects)


def _native(named: NamedState, root: FilePath) -> NativeNotes:
    """Return the notes that a conversion of a ZeRO run kept; empty ones where there was none."""
    try:
        return NativeNotes() if named.native is None else read_notes(named.native)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{root}: {NATIVE} is no JSON object of ours. The checkpoint is damaged.") from error


def _buffer(
    name: str, tensor: ChunkedTensor, archives: ChunkArchives, root: FilePath
) -> tuple[tuple[int, ...], Extent]:
    """The shape of a buffer, and where it is. Raises UnsupportedError for one that is in several chunks."""
    if not tensor.numel:
        return tensor.shape, Extent(root / METADATA, 0, 0, tensor.dtype)
    if len(tensor.chunks) != 1:
        raise UnsupportedError(f"buffer {brief(name)}: is in {len(tensor.chunks)} chunks; buffers are whole.")
    place = tensor.chunks[0].place
    offset = archives.payload(place, tensor.dtype, tensor.shape, f"buffer {brief(name)}")
    nbytes = tensor.numel * DTYPE_BYTES[tensor.dtype]
    return tensor.shape, Extent(place.path, offset, nbytes, tensor.dtype)


def _others(
    named: NamedState, native: NativeNotes, parts: int, notes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Return the frozen parameters, the buffers, and the further names of tied parameters with the parameter's.

    DCP does not say which they are. Tensors of a conversion are what its own list says. Of others, FSDP2 cuts
    parameters alone; where one rank saved, names and dtypes decide. ``notes`` get all that was inferred.
    """
    if (stated := native.buffers) is not None and native.tied is not None:
        known = {a: name for a, name in native.tied.items() if name in named.trained or name in named.others}
        tied = {name: known[name] for name in named.others if name in known}
        buffers = tuple(name for name in named.others if name in stated and name not in tied)
        frozen = tuple(name for name in named.others if name not in buffers and name not in tied)
        return frozen, buffers, tied
    tied = {name: twin for name, tensor in named.others.items() if (twin := _twin(tensor, named.trained)) is not None}
    rest = {name: tensor for name, tensor in named.others.items() if name not in tied}
    frozen = tuple(
        name
        for name, tensor in rest.items()
        if tensor.num_listed > 1 or (parts == 1 and name.endswith(_OF_PARAMETERS) and tensor.dtype in _FLOATS)
    )
    buffers = tuple(name for name in rest if name not in frozen)
    for names, what in (
        (tied, "taken as further names of trained parameters, with which they are equal"),
        (frozen, "taken as frozen parameters: the optimizer has no state of them"),
        (buffers, "taken as buffers: they are not cut, and the optimizer has no state of them"),
    ):
        if names:
            notes.append(f"{some(names)}: {what}")
    return frozen, buffers, tied


def _twin(tensor: ChunkedTensor, trained: Mapping[str, StateKeys]) -> str | None:
    """The trained parameter that a matrix is equal to, byte for byte."""
    if len(tensor.shape) < 2 or not tensor.numel:
        return None
    for name, keys in trained.items():
        if _same(tensor, keys[FP32]):
            return name
    return None


def _same(tensor: ChunkedTensor, other: ChunkedTensor) -> bool:
    """Return whether two tensors are cut in the same way and their archives hold the same bytes."""
    if (tensor.dtype, tensor.shape, len(tensor.chunks)) != (other.dtype, other.shape, len(other.chunks)):
        return False
    for one, two in zip(tensor.chunks, other.chunks, strict=True):
        if (one.begin, one.shape, one.place.nbytes) != (two.begin, two.shape, two.place.nbytes):
            return False
        for at in range(0, one.place.nbytes, _COMPARED_BYTES):
            nbytes = min(_COMPARED_BYTES, one.place.nbytes - at)
            pair = [read_exactly(place.path, place.offset + at, nbytes) for place in (one.place, two.place)]
            if pair[0] != pair[1]:
                return False
    return True


NOTES_VERSION = 1


def _with_tuples(value: object) -> object:
    """A value of JSON, which has lists in place of tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Option = Annotated[Any, BeforeValidator(_with_tuples)]


class NativeNotes(BaseModel):
    """The facts of a ZeRO checkpoint that FSDP2 has no place for.

    ``options`` are the hyper-parameters of each group as the ZeRO run had them; ``kinds`` the type of each value of the
    optimizer's state that is no tensor, such as "pyint" for ``step``, where all parameters have the same.
    ``lr_scheduler`` is the state of a scheduler that torch does not have. ``buffers`` and ``tied`` say which tensors of
    the model are no parameters of their own; None where that is not known.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format_version: int = NOTES_VERSION
    counters: dict[str, _Count] = {}
    ds_config: dict[str, Any] | None = None
    stage: Annotated[int, Field(ge=1, le=3)] | None = None
    options: tuple[dict[str, _Option], ...] = ()
    kinds: dict[str, str] = {}
    lr_scheduler: dict[str, Any] | None = None
    buffers: tuple[str, ...] | None = None
    tied: dict[str, str] | None = None

    def text(self) -> str:
        """The notes as JSON."""
        return json.dumps(self.model_dump())


def read_notes(text: str) -> NativeNotes:
    """The notes of a JSON object; of another version none is known. Raises ValueError for other text."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return NativeNotes.model_validate_json(text) if found.get("format_version") == NOTES_VERSION else NativeNotes()


def kinds_of_scalars(part: TensorSet) -> dict[str, str]:
    """The type of each value that all parameters keep in one type."""
    kinds: dict[str, set[str]] = {}
    for scalars in part.scalars:
        for key, value in scalars.items():
            kinds.setdefault(key, set()).add(value.kind)
    return {key: found.pop() for key, found in kinds.items() if len(found) == 1}


def with_kind(value: ScalarValue, kind: str | None) -> ScalarValue:
    """Return the number in another type, or as it is where the type does not hold it."""
    if kind is None or value.value is None:
        return value
    made = ScalarValue(kind, int(value.value) if kind in _INTEGERS else float(value.value))
    return made if made.number() == value.number() else value


_INTEGERS = frozenset(["pyint", "int64", "int32", "int16", "int8", "uint8"])


def with_native_options(groups: Sequence[ParamGroup], notes: NativeNotes) -> tuple[ParamGroup, ...]:
    """The groups with the options that the ZeRO run had, in the values of now; as they are where it had others."""
    if len(notes.options) != len(groups):
        return tuple(groups)
    return tuple(
        ParamGroup({key: group.options.get(key, value) for key, value in own.items()}, group.params)
        for group, own in zip(groups, notes.options, strict=True)
    )
