"""Open a Universal checkpoint of ZeRO stage 1, 2 or 3 as the source of a reshard.

The output of DeepSpeed's ``ds_to_universal`` or of ``to_universal`` is opened as a saved state of one rank, which has
all trained parameters whole; frozen parameters are in the model states files of the ranks that saved them.
``verbs.reshard`` writes the new files. Only headers are read, by the allow-listed unpickler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import (
    ParamGroup,
    Shard,
    checked_params,
    configured_sub_group_size,
    read_scalar,
    zero_option,
)
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState, frozen_part
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Param, original_order, unpacked_layout
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnsupportedError,
    UsageError,
    printable,
    shown,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.runs.names import LATEST_UNIVERSAL, not_a_directory, read_latest, why_no_tag
from zeroelastic.torch_file.graph import entry, pairs_of, read_graph
from zeroelastic.torch_file.header import TensorRef, TorchFile, read_torch_file
from zeroelastic.verbs.convert.to_universal import OPTIMIZER_STATE, ZERO_FOLDER, check_file_name
from zeroelastic.verbs.convert.universal_files import (
    MODEL_FILE,
    WHOLE_MODEL,
    saved_step,
    universal_models,
    universal_tensors,
)
from zeroelastic.verbs.reshard.options import ReshardOptions, check_options, stage_notes
from zeroelastic.verbs.reshard.reshard import ReshardPlan
from zeroelastic.verbs.reshard.sidecar_files import plan_sidecar_files
from zeroelastic.verbs.reshard.source import (
    Group,
    ReshardSource,
    checked_sub_group_size,
    make_group,
    model_roots,
    train_batch_size,
    with_zero_options,
)
from zeroelastic.verbs.reshard.target import reshard_target


@dataclass(frozen=True, slots=True)
class UniversalState:
    """A Universal checkpoint, opened: a state whose trained part lies in files by parameter, at a world size of 1.

    ``buffers`` are the parameters of each flat buffer of the ranks that saved it, in the order of the optimizer;
    ``groups`` are the optimizer's; ``left_out`` says what state of the optimizer the converter has lost.
    """

    state: SavedState
    buffers: tuple[tuple[Param, ...], ...]
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
    names = os.listdir(tag_dir)
    if WHOLE_MODEL not in names and not any(MODEL_FILE.fullmatch(name) for name in names):
        raise MissingFileError(
            f"{tag_dir}: has neither {WHOLE_MODEL} (stages 1 and 2) nor zero_pp_rank_0_{WHOLE_MODEL} (stage 3). The "
            "Universal checkpoint is incomplete."
        )
    found = find_source(tag_dir, universal=True)
    return Source(found.root, found.tag, found.tag_dir, found.tag, found.framework)


def open_universal(tag_dir: Path) -> UniversalState:
    """Open every header of a Universal checkpoint and check that they belong together.

    Raises CheckpointError, MissingFileError, UnsupportedError (tensor parallelism, experts), naming the file.
    """
    models = universal_models(tag_dir)
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
    model = read_torch_file(first.path, foreign="inert").root
    assert isinstance(model, dict), "one reader found a model, the other none"
    config = model.get("ds_config")
    whole = first.path.name == WHOLE_MODEL
    if not isinstance(root, dict) or (not whole and not (isinstance(saved, dict) and isinstance(state, dict))):
        raise CheckpointError(f"{file.path}: holds no optimizer_state_dict with a state. It is not of ZeRO-3.")
    stage = root.get("zero_stage", 1) if whole else 3  # DeepSpeed's BF16_Optimizer, of stage 1, writes none
    if stage not in ((1, 2) if whole else (3,)):
        raise UnsupportedError(f"{file.path}: was saved with ZeRO stage {shown(stage)}; stages 1, 2 and 3 are read.")
    buffers = _buffers(file, root, config, first) if whole else first.sub_groups
    module = model.get("module")
    rest = frozenset(map(str, module)) if whole and isinstance(module, dict) else frozenset[str]()
    dtypes, extents, files = universal_tensors(zero, layout, rest=rest, steps=whole)
    scalars, lost = _scalars(file, state if isinstance(state, dict) else {}, first.sub_groups, dtypes)
    if whole:
        scalars = tuple({**own, **saved_step(zero / param.name)} for param, own in zip(params, scalars, strict=True))
    own_groups = root.get("param_groups") if whole else entry(saved, "param_groups")
    groups = _groups(file.path, own_groups, buffers)
    graph = read_graph(file.path)
    raw = entry(graph, "param_groups") if whole else entry(graph, "optimizer_state_dict", "param_groups")
    assert isinstance(raw, list), "one reader found groups, the other none"
    head = Shard(
        path=file.path,
        size=file.size,
        rank=0,
        stage=int(stage),
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
        whole_model=whole,
    )
    frozen = frozen_part({model.rank: model for model in models})
    trained = SavedPart(layout, dtypes, scalars, {0: extents})
    return UniversalState(
        state=SavedState(checkpoint, head, models, (trained,) if frozen is None else (trained, frozen)),
        buffers=buffers,
        groups=tuple(make_group(pairs_of(options), group.params) for options, group in zip(raw, groups, strict=True)),
        left_out=lost,
    )


def plan_from_universal(source: Source, options: ReshardOptions) -> ReshardPlan:
    """The plan for ``verbs.reshard.reshard.reshard`` that turns a Universal checkpoint into one of ranks.

    Raises as ``open_universal``, and UnsupportedError, UsageError as ``plan_reshard``.
    """
    assert isinstance(source.tag_dir, Path)
    opened = open_universal(source.tag_dir)
    state = opened.state
    first = state.models[0]
    config = state.head.ds_config
    if options.stage == 0:
        raise UsageError(
            "a Universal checkpoint does not become one of stage 0. Make one of stage 1, 2 or 3, then reshard it with "
            "--stage 0."
        )
    stage = options.stage or state.head.stage
    check_options(options, stage)
    size = options.sub_group_size
    if size is None and (stage, state.head.stage) == (3, 3):
        saved_buffers, world_size = opened.buffers, first.world_size
        size = checked_sub_group_size(config, opened.groups, saved_buffers, world_size=world_size, path=first.path)
    elif size is None:
        size = configured_sub_group_size(config)
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
        stage=state.head.stage,
        config=config,
    )
    saved = with_zero_options(saved, options.zero_options)
    try:
        target = reshard_target(saved, options.world_size, options.format or "elastic", stage=stage)
    except UnsupportedError as error:
        raise UnsupportedError(f"{source.tag_dir}: {error}") from None
    sidecar_files = plan_sidecar_files(source, saved_world_size=first.world_size, world_size=options.world_size)
    notes = (*stage_notes(saved, stage, options), *opened.left_out, *sidecar_files.notes)
    sidecar_files = replace(sidecar_files, notes=notes)
    return ReshardPlan(source, state, saved, target, sidecar_files, options)


def _buffers(
    file: TorchFile, root: Mapping[object, object], config: object, model: ModelStates
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
    if any(wrong) and "optimizer_state_dict" not in root:  # which to_universal writes
        raise UnsupportedError(
            f"{file.path.parent.parent}: was saved with round_robin_gradients and converted by DeepSpeed's "
            "ds_to_universal.py, which gave parameters the values of others. Convert the checkpoint that was saved "
            "with zeroelastic convert --to universal, or reshard it."
        )
    return buffers


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
