"""Open a Universal checkpoint of ZeRO stage 1, 2 or 3 as the source of a reshard.

The output of DeepSpeed's ``ds_to_universal`` is opened as a saved state of one rank, which has all trained parameters
whole; frozen parameters are in the model states files of the ranks that saved them. ``verbs.reshard`` writes the new
files. Only headers are read, by the allow-listed unpickler.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModuleHeader, open_model_states
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import (
    FP32,
    FROZEN,
    checked_params,
    configured_batch,
    read_scalar,
    zero_option,
)
from zeroelastic.checkpoint.saved_state import TensorSet, frozen_part
from zeroelastic.checkpoint.tag_files import list_tag, model_file_name, other_tp_size
from zeroelastic.checkpoint.topology import Topology, numbered_expert
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param, original_order, unpacked_layout
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, UsageError, printable, shown, some
from zeroelastic.io.paths import FilePath, local_paths
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.runs.names import LATEST_UNIVERSAL, not_a_directory, read_latest, why_no_tag
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, TorchFile, read_torch_file, read_tree
from zeroelastic.torch_file.tree import entry, pairs_of
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardPlan, complete_plan
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import OptimGroup, ReshardSource, make_group, model_roots

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"

_WHOLE_MODEL = model_file_name(0, 0, whole=True)
"""The model states of a checkpoint of stage 1 or 2."""

_RESHARD = "Make the new checkpoint of the one that was saved, with zeroelastic reshard."
_KEY = re.compile(r"[^/\x00]{1,250}")


def find_universal(text: str | os.PathLike[str], *, tag: str | None = None) -> Source:
    """The Universal checkpoint that a path means: its tag directory, or that of ``latest_universal`` or ``tag`` above.

    Raises UsageError saying what was found instead.
    """
    path, tag = Path(os.path.abspath(text)), None if tag is None else str(tag)
    if tag is None and os.path.isdir(path / ZERO_FOLDER):
        return _universal_source(path)
    if not os.path.isdir(path):
        raise UsageError(not_a_directory(path))
    if tag is None:
        tag = read_latest(path, LATEST_UNIVERSAL)
        if tag is None:
            raise UsageError(
                f"{path}: is no Universal checkpoint: it has neither a folder {ZERO_FOLDER} nor a file "
                f"{LATEST_UNIVERSAL}. Give its tag directory, or --tag."
            )
    problem = why_no_tag(tag)
    if problem is not None:
        raise UsageError(f"{path}: {printable(tag)} is not the name of a tag: {problem}. Give the name of a folder.")
    if not os.path.isdir(path / tag / ZERO_FOLDER):  # which has no error for a name that is too long
        raise UsageError(
            f"{path}: has no Universal checkpoint {tag} (no folder {tag}/{ZERO_FOLDER}). Give the name of one with "
            "--tag."
        )
    return _universal_source(path / tag)


def _universal_source(tag_dir: Path) -> Source:
    if not list_tag(tag_dir).files.models:
        raise MissingFileError(
            f"{tag_dir}: has neither {_WHOLE_MODEL} (stages 1 and 2) nor zero_pp_rank_0_{_WHOLE_MODEL} (stage 3). The "
            "Universal checkpoint is incomplete."
        )
    found = find_source(tag_dir, universal=True)
    return Source(found.root, found.tag, found.tag_dir, found.tag, found.framework)


def plan_from_universal(source: Source, options: ReshardOptions) -> ReshardPlan:
    """The plan for ``verbs.reshard.reshard.run_reshard`` that turns a Universal checkpoint into one of ranks.

    Raises as ``open_universal``, and UnsupportedError, UsageError as ``plan_reshard``.
    """
    saved, lost = open_universal(*local_paths([source.tag_dir]))
    return complete_plan(source, saved, options, lost)


def open_universal(tag_dir: Path) -> tuple[ReshardSource, tuple[str, ...]]:
    """A Universal checkpoint as the source of a reshard, and what state of the optimizer the converter has lost.

    Its state has a world size of 1, with the trained parameters in files by parameter. Every header is opened, and
    checked to belong to the others. Raises CheckpointError, MissingFileError, UnsupportedError (tensor parallelism,
    experts), naming the file.
    """
    models = _models(tag_dir)
    first = models[0]
    params = tuple(param for members in first.sub_groups for param in members)
    zero = tag_dir / ZERO_FOLDER
    for param in params:
        if not is_file_name(param.name):
            raise CheckpointError(f"{first.path}: {param.name!r}: a parameter of this name has no folder in {zero}.")
        if numbered_expert(param.name) is not None:
            raise UnsupportedError(
                f"{tag_dir}: has experts of DeepSpeed's own MoE layers, which cannot be taken yet. {_RESHARD}"
            )
    layout = unpacked_layout(checked_params(params, first.path), 1)
    file = read_torch_file(zero / OPTIMIZER_STATE)
    root = file.root
    saved = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    state = saved.get("state") if isinstance(saved, dict) else None
    model_root = model_roots([model.path for model in models])
    config = {str(key): value for key, value in pairs_of(model_root(0).get("ds_config")).items()}
    whole = first.path.name == _WHOLE_MODEL
    if not isinstance(root, dict) or (not whole and not (isinstance(saved, dict) and isinstance(state, dict))):
        raise CheckpointError(f"{file.path}: holds no optimizer_state_dict with a state. It is not of ZeRO-3.")
    stage = root.get("zero_stage", 1) if whole else 3  # DeepSpeed's BF16_Optimizer, of stage 1, writes none
    if stage not in ((1, 2) if whole else (3,)):
        raise UnsupportedError(f"{file.path}: was saved with ZeRO stage {shown(stage)}; stages 1, 2 and 3 are read.")
    buffers = _buffers(file, root, config, first) if whole else first.sub_groups
    rest = frozenset(map(str, pairs_of(model_root(0).get("module")))) if whole else frozenset[str]()
    dtypes, extents, files = _tensors(zero, layout, rest=rest, steps=whole)
    scalars: tuple[Mapping[str, ScalarValue], ...] = tuple(_saved_step(zero / param.name) for param in params)
    lost: tuple[str, ...] = ()
    if isinstance(state, dict) and not whole:
        scalars, lost = _scalars(file, state, first.sub_groups, dtypes)
    tree = pairs_of(read_tree(file.path))
    groups = _groups(file.path, entry(tree if whole else tree.get("optimizer_state_dict"), "param_groups"), buffers)
    checkpoint = Checkpoint(
        tag_dir=tag_dir,
        topology=Topology(first.world_size),
        optim_files=(file.path, *files),
        model_files=tuple(model.path for model in models),
    )
    frozen = frozen_part({model.rank: model for model in models})
    trained = TensorSet(layout, layout.params, dtypes, scalars, {0: extents})
    source = ReshardSource(
        checkpoint=checkpoint,
        parts=(trained, frozen),
        stage=int(stage),
        global_steps=first.global_steps,
        train_batch_size=configured_batch(config, first.world_size),
        groups=groups,
        buffers=buffers,
        optim_root={
            "optimizer_state_dict": tree,
            **{key: model_root(0)[key] for key in ("ds_config", "ds_version") if key in model_root(0)},
        },
        model_root=model_root,
        config_path=first.path,
        bf16_names=bool(entry(config, "bf16", "enabled")),
        slicing=Slicing(Topology(first.world_size)),
    )
    return source, lost


def is_file_name(name: str) -> bool:
    """Return whether a parameter's name can be that of a folder."""
    try:
        return 0 < len(name.encode()) <= 255 and not {"/", "\0"} & set(name) and name not in (".", "..")
    except UnicodeEncodeError:
        return False


def _models(tag_dir: Path) -> tuple[ModuleHeader, ...]:
    """The module states of all ranks that saved it; of rank 0 alone where no others are there and none is needed.

    At stages 1 and 2 there is one file.
    """
    files = list_tag(tag_dir).files
    names = files.models
    if sliced := [name for rank, name in names.items() if rank % files.tensor_size]:
        raise UnsupportedError(
            f"{tag_dir}: {sliced[0]} is of a tensor parallel rank, which cannot be taken yet. {_RESHARD}"
        )
    if 0 not in names:
        raise MissingFileError(f"{tag_dir}: zero_pp_rank_0_mp_rank_00_model_states.pt is missing.")
    first = open_model_states(tag_dir / names[0], 0, world_size=None)
    if first.tensor_size > 1:
        raise other_tp_size(first.path, first.tensor_size, None)
    if files.whole_model:
        return (first,)
    missing = [rank for rank in range(first.world_size) if rank not in names]
    if missing and first.frozen.num_params:
        raise MissingFileError(
            f"{tag_dir}: {first.world_size} ranks saved it; the module states of rank {missing[0]} are missing, which "
            "hold a part of each frozen parameter."
        )
    ranks = () if missing else range(1, first.world_size)
    others = (open_model_states(tag_dir / names[rank], rank, world_size=first.world_size) for rank in ranks)
    return (first, *others)


def _tensors(
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


def _saved_step(folder: Path) -> dict[str, ScalarValue]:
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
            raise UnsupportedError(
                f"{file.path}: holds AutoEP expert parameters, which cannot be taken yet. {_RESHARD}"
            )
        root = root.get("param")
    if not isinstance(root, TensorRef) or root.dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file.path}: holds {shown(root)}, not a tensor. The file is damaged.")
    if root.numel != param.numel:
        raise CheckpointError(
            f"{file.path}: has {root.numel} elements; {printable(param.name)} has {param.numel} of shape "
            f"{list(param.shape)}. The file is damaged, or was saved with tensor parallelism."
        )
    return root


def _buffers(
    file: TorchFile, root: Mapping[object, object], config: object, model: ModuleHeader
) -> tuple[tuple[Param, ...], ...]:
    """The parameters of each optimizer group of stage 1 or 2, in the order of the optimizer.

    Raises UnsupportedError for what DeepSpeed's converter made wrong: under ``round_robin_gradients`` it takes the
    order of the optimizer for that of the buffer, where no gaps of ``parameter_alignment`` lie between parameters.
    """
    if "zero_stage" not in root or not zero_option(config, "round_robin_gradients"):
        return model.sub_groups
    buffers = tuple(tuple(original_order(members, model.world_size)) for members in model.sub_groups)
    found = root.get("param_alignment_paddings")
    gaps: list[object] = found if isinstance(found, list) and len(found) == len(buffers) else [None] * len(buffers)
    wrong = [
        listed != members and not (isinstance(gap, list) and any(gap))
        for listed, members, gap in zip(buffers, model.sub_groups, gaps, strict=True)
    ]
    if any(wrong):
        raise UnsupportedError(
            f"{file.path.parent.parent}: was saved with round_robin_gradients and converted by DeepSpeed's "
            f"ds_to_universal.py, which gave parameters the values of others. {_RESHARD}"
        )
    return buffers


def _scalars(
    file: TorchFile,
    state: Mapping[object, object],
    sub_groups: Sequence[Sequence[Param]],
    dtypes: Sequence[Mapping[str, str]],
) -> tuple[tuple[Mapping[str, ScalarValue], ...], tuple[str, ...]]:
    """The scalars of each parameter's sub-group, such as step; and the states of which there is no file."""
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


def _groups(path: FilePath, groups: object, sub_groups: Sequence[Sequence[Param]]) -> tuple[OptimGroup, ...]:
    """The optimizer's groups, which list the numbers of sub-groups."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{path}: holds no optimizer groups. The file is damaged.")
    found: list[OptimGroup] = []
    seen: set[int] = set()
    for g, group in enumerate(groups):
        numbers = group.get("params")
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < len(sub_groups) for n in numbers):
            raise CheckpointError(f"{path}: optimizer group {g} lists {shown(numbers)}. The file is damaged.")
        own = list(dict.fromkeys(numbers))
        if seen & set(own):
            raise CheckpointError(f"{path}: sub-group {min(seen & set(own))} is in two optimizer groups.")
        seen |= set(own)
        found.append(make_group(group, tuple(param.name for n in own for param in sub_groups[n])))
    if len(seen) != len(sub_groups):
        raise CheckpointError(f"{path}: optimizer groups hold {len(seen)} sub-groups of {len(sub_groups)}.")
    return tuple(found)
