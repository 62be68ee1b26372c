"""Open a Universal checkpoint of ZeRO-3 as the source of a reshard.

The output of DeepSpeed's ``ds_to_universal`` or of ``to_universal`` is opened as a saved state of one rank, which has
all trained parameters whole; frozen parameters are in the model states files of the ranks that saved them.
``offline.reshard`` writes the new files. Only headers are read, by the allow-listed unpickler.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates, open_model_states
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, ParamGroup, Shard
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState, frozen_part
from zeroelastic.checkpoint.values import checked_params, read_scalar
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param, unpacked_layout
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnsupportedError,
    UsageError,
    brief,
    printable,
    shown,
    some,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.offline.convert.to_universal import OPTIMIZER_STATE, ZERO_FOLDER, check_file_name
from zeroelastic.offline.reshard.reshard import ReshardOptions, ReshardPlan
from zeroelastic.offline.reshard.sidecar_files import plan_sidecar_files
from zeroelastic.offline.reshard.source import (
    Group,
    ReshardSource,
    checked_sub_group_size,
    make_group,
    model_roots,
    train_batch_size,
)
from zeroelastic.offline.reshard.target import reshard_target
from zeroelastic.tags.locate import Source, find_source
from zeroelastic.tags.names import LATEST_UNIVERSAL, read_latest, why_no_tag
from zeroelastic.torch_file.graph_reader import read_graph
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile, read_torch_file
from zeroelastic.torch_file.pickle_graph import entry, pairs_of

_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_KEY = re.compile(r"[^/\x00]{1,250}")


@dataclass(frozen=True, slots=True)
class UniversalState:
    """A Universal checkpoint, opened: a state whose trained part lies in files by parameter, at a world size of 1.

    ``sub_groups`` are those of the ranks that saved it, ``groups`` the optimizer's; ``left_out`` says what state of the
    optimizer the converter has lost.
    """

    state: SavedState
    sub_groups: tuple[tuple[Param, ...], ...]
    groups: tuple[Group, ...]
    left_out: tuple[str, ...]


def find_universal(text: str | os.PathLike[str], *, tag: str | None = None) -> Source:
    """The Universal checkpoint that a path means: its tag directory, or that of ``latest_universal`` or ``tag`` above.

    Raises UsageError saying what was found instead.
    """
    path = Path(os.path.abspath(text))
    if tag is None and os.path.isdir(path / ZERO_FOLDER):
        return _universal_source(path)
    if not os.path.isdir(path):
        raise UsageError(f"{path}: no such directory.")
    if tag is None:
        tag = read_latest(path, LATEST_UNIVERSAL)
        if tag is None:
            raise UsageError(
                f"{path}: is no Universal checkpoint: it has neither a folder {ZERO_FOLDER} nor a file "
                f"{LATEST_UNIVERSAL}. Give its tag directory, or --tag."
            )
    problem = why_no_tag(tag)
    if problem is not None:
        raise UsageError(f"{path}: {printable(tag)} is not the name of a tag: {problem}.")
    if not os.path.isdir(path / tag / ZERO_FOLDER):  # which has no error for a name that is too long
        raise UsageError(f"{path}: has no Universal checkpoint {tag} (no folder {tag}/{ZERO_FOLDER}).")
    return _universal_source(path / tag)


def _universal_source(tag_dir: Path) -> Source:
    if not any(_MODEL_FILE.fullmatch(name) for name in os.listdir(tag_dir)):
        raise UnsupportedError(
            f"{tag_dir}: has no zero_pp_rank_0_mp_rank_00_model_states.pt, so it was not saved with ZeRO stage 3. Only "
            "Universal checkpoints of stage 3 are taken."
        )
    found = find_source(tag_dir)
    return Source(found.root, found.tag, found.tag_dir, found.tag, found.framework)


def open_universal(tag_dir: Path) -> UniversalState:
    """Open every header of a Universal checkpoint of ZeRO-3 and check that they belong together.

    Raises CheckpointError, MissingFileError, UnsupportedError (tensor parallelism, experts), naming the file.
    """
    models = _models(tag_dir)
    first = models[0]
    params = tuple(param for members in first.sub_groups for param in members)
    zero = tag_dir / ZERO_FOLDER
    for param in params:
        check_file_name(param.name, "a parameter")
    layout = unpacked_layout(checked_params(params, first.path), 1)
    file = read_torch_file(zero / OPTIMIZER_STATE)
    root = file.root
    saved = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(root, dict) or not isinstance(saved, dict) or not isinstance(state, dict):
        raise CheckpointError(f"{file.path}: holds no optimizer_state_dict with a state. It is not of ZeRO-3.")
    dtypes, extents, files = _tensors(zero, layout)
    scalars, lost = _scalars(file, state, first.sub_groups, dtypes)
    groups = _groups(file.path, saved.get("param_groups"), first.sub_groups)
    raw = entry(read_graph(file.path), "optimizer_state_dict", "param_groups")
    assert isinstance(raw, list), "one reader found groups, the other none"
    config = read_torch_file(first.path, foreign="inert").root
    config = config.get("ds_config") if isinstance(config, dict) else None
    head = Shard(
        path=file.path,
        size=file.size,
        rank=0,
        stage=3,
        format="rigid",
        save_id=None,
        layout=layout,
        groups=groups,
        tensor_keys=tuple(tuple(keys) for keys in dtypes),
        scalars=scalars,
        extents=extents,
        digests=None,
        scaler=None,
        ds_config={str(key): value for key, value in config.items()} if isinstance(config, dict) else {},
        train_batch_size=None,
        header_bytes=file.header_bytes,
    )
    checkpoint = Checkpoint(
        tag_dir=tag_dir,
        world_size=first.world_size,
        optim_files=(file.path, *files),
        model_files=tuple(model.path for model in models),
        record=None,
        stale_files=(),
    )
    frozen = frozen_part({model.rank: model for model in models})
    trained = SavedPart(layout, dtypes, scalars, {0: extents})
    return UniversalState(
        state=SavedState(checkpoint, head, models, (trained,) if frozen is None else (trained, frozen)),
        sub_groups=first.sub_groups,
        groups=tuple(make_group(pairs_of(options), group.params) for options, group in zip(raw, groups, strict=True)),
        left_out=lost,
    )


def plan_from_universal(source: Source, options: ReshardOptions) -> ReshardPlan:
    """The plan for ``offline.reshard.reshard.reshard`` that turns a Universal checkpoint into one of ranks.

    Raises as ``open_universal``, and UnsupportedError, UsageError as ``plan_reshard``.
    """
    assert isinstance(source.tag_dir, Path)
    opened = open_universal(source.tag_dir)
    state = opened.state
    first = state.models[0]
    config = state.head.ds_config
    size = options.sub_group_size
    if size is None:
        size = checked_sub_group_size(
            config, opened.groups, opened.sub_groups, world_size=first.world_size, path=first.path
        )
    models = [model.path for model in state.models]
    model = pairs_of(read_graph(models[0]))
    bf16 = config.get("bf16")

    saved = ReshardSource(
        parts=state.parts,
        groups=opened.groups,
        optim_root={
            "optimizer_state_dict": pairs_of(read_graph(state.head.path)),
            **{key: model[key] for key in ("ds_config", "ds_version") if key in model},
        },
        model_root=model_roots(models),
        sub_group_size=size,
        train_batch_size=train_batch_size(state.checkpoint.record, state.head, state.checkpoint.world_size),
        bf16_names=isinstance(bf16, dict) and bool(bf16.get("enabled")),
    )
    target = reshard_target(saved, options.world_size, options.format or "elastic")
    sidecar_files = plan_sidecar_files(source, saved_world_size=first.world_size, world_size=options.world_size)
    sidecar_files = replace(sidecar_files, notes=(*opened.left_out, *sidecar_files.notes))
    return ReshardPlan(source, state, saved, target, sidecar_files, options)


def _models(tag_dir: Path) -> tuple[ModelStates, ...]:
    """The module states of all ranks that saved it; of rank 0 alone where no others are there and none is needed."""
    names: dict[int, str] = {}
    for name in sorted(os.listdir(tag_dir)):
        match = _MODEL_FILE.fullmatch(name)
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
    others = (
        open_model_states(tag_dir / names[rank], rank, world_size=first.world_size)
        for rank in range(1, first.world_size)
    )
    return (first, *others)


def _tensors(
    zero: Path, layout: Layout
) -> tuple[tuple[Mapping[str, str], ...], dict[str, TensorExtents], tuple[Path, ...]]:
    """By parameter the dtype of each state key; where they are; and all their files."""
    wanted = {param.name for param in layout.params}
    there = {name for name in os.listdir(zero) if (zero / name).is_dir()}
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
        keys = [name.removesuffix(".pt") for name in names]
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


def _scalars(
    file: TorchFile,
    state: Mapping[object, object],
    sub_groups: Sequence[Sequence[Param]],
    dtypes: Sequence[Mapping[str, str]],
) -> tuple[tuple[Mapping[str, ScalarValue], ...], tuple[str, ...]]:
    """By parameter what its sub-group has beside tensors, such as step; and the states of which there is no file."""
    scalars: list[Mapping[str, ScalarValue]] = []
    lost: dict[str, None] = {}
    for i, members in enumerate(sub_groups):
        values = state.get(i, {})
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise CheckpointError(f"{file.path}: the state of sub-group {i} is {shown(values)}.")
        keys = dtypes[len(scalars)] if members else {}
        own: dict[str, ScalarValue] = {}
        for key, value in values.items():
            if isinstance(value, TensorRef) and value.shape != ():
                if key not in keys:
                    lost[key] = None
            else:
                own[key] = read_scalar(file, value, f"state {shown(key)} of sub-group {i}")
        scalars += [own] * len(members)
    sentences = (
        f"{key} of the optimizer: DeepSpeed's converter keeps rank 0's part of it only, so it is left out"
        for key in lost
    )
    return tuple(scalars), tuple(sentences)


def _groups(path: FilePath, groups: object, sub_groups: Sequence[Sequence[Param]]) -> tuple[ParamGroup, ...]:
    """The optimizer's groups, whose parameters are given by the numbers of sub-groups.

    Of their options those that are plain values; the files get all of them, as they are.
    """
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{path}: holds no optimizer groups. The file is damaged.")
    found: list[ParamGroup] = []
    seen: set[int] = set()
    for g, group in enumerate(groups):
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < len(sub_groups) for n in numbers):
            raise CheckpointError(f"{path}: optimizer group {g} lists {shown(numbers)}. The file is damaged.")
        own = list(dict.fromkeys(numbers))
        if seen & set(own):
            raise CheckpointError(f"{path}: sub-group {min(seen & set(own))} is in two optimizer groups.")
        seen |= set(own)
        options = {str(key): value for key, value in group.items() if key != "params" and _is_plain(value)}
        found.append(ParamGroup(options, tuple(param.name for n in own for param in sub_groups[n])))
    if len(seen) != len(sub_groups):
        raise CheckpointError(f"{path}: optimizer groups hold {len(seen)} sub-groups of {len(sub_groups)}.")
    return tuple(found)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
