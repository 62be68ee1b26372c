"""The files of a Universal checkpoint: its model states, and the tensors of each parameter; only headers are read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates, open_model_states
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, read_scalar
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE, model_file_name
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, brief, shown, some
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile, read_torch_file

WHOLE_MODEL = model_file_name(0, 0, whole=True)
"""The model states of a checkpoint of stage 1 or 2."""

MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")

_KEY = re.compile(r"[^/\x00]{1,250}")


def universal_models(tag_dir: Path) -> tuple[ModelStates, ...]:
    """The module states of all ranks that saved it; of rank 0 alone where no others are there and none is needed.

    At stages 1 and 2 there is one file, under two names where ``to_universal`` wrote it.
    """
    names: dict[int, str] = {}
    if (tag_dir / WHOLE_MODEL).exists():
        others = {name for name in os.listdir(tag_dir) if WHOLE_MODEL_FILE.match(name)} - {WHOLE_MODEL}
        if others:
            raise UnsupportedError(f"{tag_dir}: {min(others)} is of a tensor parallel rank, which cannot be taken yet.")
        return (open_model_states(tag_dir / WHOLE_MODEL, 0, world_size=None),)
    for name in sorted(os.listdir(tag_dir)):
        match = MODEL_FILE.fullmatch(name)
        if match is not None:
            if int(match[2]) != 0:
                raise UnsupportedError(f"{tag_dir}: {name} is of a tensor parallel rank, which cannot be taken yet.")
            names[int(match[1])] = name
    if 0 not in names:
        raise MissingFileError(f"{tag_dir}: zero_pp_rank_0_mp_rank_00_model_states.pt is missing.")
    first = open_model_states(tag_dir / names[0], 0, world_size=None)
    missing = [rank for rank in range(first.world_size) if rank not in names]
    if missing:
        if first.frozen is not None and first.frozen.num_params:
            raise MissingFileError(
                f"{tag_dir}: {first.world_size} ranks saved it; the module states of rank {missing[0]} are missing, "
                "which hold a part of each frozen parameter."
            )
        return (first,)
    return (
        first,
        *(
            open_model_states(tag_dir / names[rank], rank, world_size=first.world_size)
            for rank in range(1, first.world_size)
        ),
    )


def universal_tensors(
    zero: Path, layout: Layout, *, rest: frozenset[str], steps: bool
) -> tuple[tuple[Mapping[str, str], ...], dict[str, TensorExtents], tuple[Path, ...]]:
    """By parameter the dtype of each state key; where they are; and all their files.

    ``rest`` are the folders that need not be there, ``steps`` tells whether ``step.pt`` holds the step.
    """
    wanted = {param.name for param in layout.params}
    there = {name for name in os.listdir(zero) if (zero / name).is_dir()} - (rest - wanted)
    if wanted != there:
        what = (
            f"{some(sorted(wanted - there))} missing"
            if wanted - there
            else f"{some(sorted(there - wanted))} not in param_shapes"
        )
        raise CheckpointError(f"{zero}: {what}. The Universal checkpoint is incomplete, or two are mixed.")
    dtypes: list[Mapping[str, str]] = []
    offsets: dict[str, Int64Array] = {}
    paths: dict[str, list[FilePath]] = {}
    files: list[Path] = []
    for p, param in enumerate(layout.params):
        found: dict[str, str] = {}
        names = sorted(name for name in os.listdir(zero / param.name) if name.endswith(".pt"))
        keys = [key for name in names if (key := name.removesuffix(".pt")) != "step" or not steps]
        if FP32 not in keys:
            raise MissingFileError(f"{zero / param.name / FP32}.pt: no such file. The checkpoint is incomplete.")
        for key in sorted(keys, key=lambda key: (key != FP32, key)):
            if key == FROZEN or _KEY.fullmatch(key) is None:
                raise UnsupportedError(f"{zero / param.name}: {shown(key)} is not the name of a state.")
            path = zero / param.name / f"{key}.pt"
            file = read_torch_file(path)
            ref = _whole_tensor(file, param)
            found[key] = ref.dtype
            offsets.setdefault(key, np.full(layout.num_params, -1, dtype=np.int64))[p] = file.extent(ref).offset
            paths.setdefault(key, [path] * layout.num_params)[p] = path
            files.append(path)
        dtypes.append(found)
    extents = {
        key: TensorExtents(
            paths[key][0],
            {p: found[key] for p, found in enumerate(dtypes) if key in found},
            offset,
            tuple(paths[key]),
        )
        for key, offset in offsets.items()
    }
    return tuple(dtypes), extents, tuple(files)


def saved_step(folder: Path) -> dict[str, ScalarValue]:
    """The step of a parameter, where it has one."""
    path = folder / "step.pt"
    if not path.exists():
        return {}
    file = read_torch_file(path)
    file.locate()
    return {"step": read_scalar(file, file.root, "the step")}


def _whole_tensor(file: TorchFile, param: Param) -> TensorRef:
    """The tensor of a state file: alone, or under "param" as other stages' converters write it."""
    root = file.root
    if isinstance(root, dict):
        if root.get("is_expert_param"):
            raise UnsupportedError(f"{file.path}: holds AutoEP expert parameters, which cannot be taken yet.")
        root = root.get("param")
    if not isinstance(root, TensorRef) or root.dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file.path}: holds {shown(root)}, not a tensor. The file is damaged.")
    if root.numel != param.numel:
        raise CheckpointError(
            f"{file.path}: has {root.numel} elements; {brief(param.name)} has {param.numel} of shape "
            f"{list(param.shape)}. The file is damaged, or was saved with tensor parallelism."
        )
    return root
