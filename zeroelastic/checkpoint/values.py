"""Values of a checkpoint file, checked where they are read: scalars, hyper-parameters, and tables of parameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from zeroelastic.core.collector import paused_collector
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param, group_split_layout, layout_from_sub_groups
from zeroelastic.errors import CheckpointError, UnsupportedError, brief, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.columns import NamedColumn
from zeroelastic.torch_file.header import TensorRef, TorchFile

OptionValue = int | float | bool | str | None | tuple[object, ...]

_MAX_OPTION_DEPTH = 3
_MAX_OPTION_ITEMS = 1024
_MAX_NUMEL = 1 << 60
_MAX_DIMENSIONS = 64
_SHAPE = operator.attrgetter("shape")
_NUMPY_DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "<u1",
    "bool": "?",
}


def damaged(path: FilePath, problem: str) -> CheckpointError:
    """The error about a file that is not what its writer left."""
    return CheckpointError(f"{path}: {problem}. The file is damaged or not from this tag.")


def read_scalar(file: TorchFile, value: object, where: str) -> ScalarValue:
    """A replicated value of a file: a Python number, or a tensor of one element, which is read.

    Raises UnsupportedError, which says ``where``, for anything else.
    """
    if isinstance(value, TensorRef) and value.numel == 1 and value.dtype in (*_NUMPY_DTYPES, "bfloat16"):
        raw = file.read(value)
        if value.dtype == "bfloat16":
            return ScalarValue("bfloat16", float((raw.view("<u2").astype("<u4") << 16).view("<f4")[0]))
        return ScalarValue(value.dtype, raw.view(_NUMPY_DTYPES[value.dtype])[0].item())
    if value is None or isinstance(value, (bool, int, float)):
        return ScalarValue.of_python(value)
    raise UnsupportedError(f"{file.path}: {where} is {shown(value)}, which cannot be resharded.")


def scalar_bytes(value: ScalarValue) -> bytes | None:
    """The bytes of the tensor of one element that a value was read from; None for a Python value."""
    if value.kind == "bfloat16":
        return np.array([value.value], dtype="<f4").tobytes()[2:]
    dtype = _NUMPY_DTYPES.get(value.kind)
    return None if dtype is None else np.array([value.value], dtype=dtype).tobytes()


def read_options(file: TorchFile, group: Mapping[object, object], where: str) -> dict[str, OptionValue]:
    """The hyper-parameters of an optimizer group: all of its entries but ``params``.

    Raises CheckpointError for a name that is no text, UnsupportedError for a value that is not plain.
    """
    if not all(isinstance(key, str) for key in group):
        raise damaged(file.path, f"{where} has a hyper-parameter whose name is not text")
    return {str(k): read_option(file, v, f"{where}: {k}") for k, v in group.items() if k != "params"}


def read_option(file: TorchFile, value: object, where: str, depth: int = 0) -> OptionValue:
    """A hyper-parameter: a plain value, a short tuple of them, or a tensor of one element. Raises UnsupportedError."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and depth < _MAX_OPTION_DEPTH and len(value) <= _MAX_OPTION_ITEMS:
        return tuple(read_option(file, item, where, depth + 1) for item in value)
    if isinstance(value, TensorRef) and value.numel == 1:
        return read_scalar(file, value, where).value
    raise UnsupportedError(f"{file.path}: {where} is {shown(value)}, which is not a plain value.")


def checked_param(name: object, shape: object, path: FilePath) -> Param:
    """A parameter from a file's name and shape. Raises CheckpointError when they are not one."""
    if not isinstance(name, str) or not isinstance(shape, (tuple, list)):
        raise CheckpointError(f"{path}: a parameter table holds {shown(name)}: {shown(shape)}. The file is damaged.")
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < _MAX_NUMEL for size in shape):
        raise CheckpointError(f"{path}: parameter {brief(name)} has shape {shown(shape)}. The file is damaged.")
    return Param(name, tuple(int(size) for size in shape))


def checked_table(names: Sequence[object], shapes: Sequence[object], path: FilePath) -> list[Param]:
    """The parameters of two columns of a file, of the same length. Raises CheckpointError when they are not ones."""
    if {*map(type, names)} - {str}:
        return [checked_param(name, shape, path) for name, shape in zip(names, shapes, strict=True)]
    # Each object once: in a file that was packed, shapes that are equal are one.
    ids = [*map(id, shapes)]
    name_of = dict(zip(reversed(ids), reversed(names), strict=True))  # the first that has it
    shape_of = dict(zip(ids, shapes, strict=True))
    clean = {key: checked_param(name_of[key], shape, path).shape for key, shape in shape_of.items()}
    with paused_collector():
        return [*map(Param, map(str, names), map(clean.__getitem__, ids))]


def checked_column(column: NamedColumn, path: FilePath) -> list[Param]:
    """The parameters of a column of shapes by name. Raises CheckpointError when they are not ones."""
    first = np.unique(column.form, return_index=True)[1].tolist()
    shapes = [checked_param(column.names[row], column.forms[form], path).shape for form, row in enumerate(first)]
    with paused_collector():
        return [*map(Param, column.names, map(shapes.__getitem__, column.form.tolist()))]


def checked_params(params: Sequence[Param], path: FilePath) -> Sequence[Param]:
    """The same parameters. Raises CheckpointError when they are more than 64-bit offsets can address."""
    if sum(map(math.prod, map(_SHAPE, params))) >= _MAX_NUMEL:
        raise CheckpointError(f"{path}: its parameters have more elements than any file holds. The file is damaged.")
    return params


def checked_groups(groups: Sequence[Sequence[Param]], world_size: int, gaps: object, path: FilePath) -> Layout:
    """The group split of a file's parameters by group; ``gaps`` as the file states them, or None.

    Raises CheckpointError where there is none.
    """
    checked_params([param for group in groups for param in group], path)
    if gaps is not None and not (
        isinstance(gaps, list)
        and all(isinstance(group, list) and all(type(n) is int and 0 <= n < 16 for n in group) for group in gaps)
    ):
        raise damaged(path, f"param_alignment_paddings is {shown(gaps)}")
    try:
        return group_split_layout(groups, world_size, gaps)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}. The file is damaged.") from None


def checked_layout(sub_groups: Sequence[Sequence[Param]], world_size: int, path: FilePath) -> Layout:
    """The layout of a file's parameters by sub-group. Raises CheckpointError where there is none."""
    checked_params([param for sub_group in sub_groups for param in sub_group], path)
    try:
        return layout_from_sub_groups(sub_groups, world_size)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}. The file is damaged.") from None
