"""Open a checkpoint of FSDP2 as the source of a reshard, which writes native files of ZeRO at any size and stage.

Weights become master weights, and the optimizer's state goes along, bit for bit. What DeepSpeed's files have beside is
made as a run of DeepSpeed would have it: counters, configuration, and the module states without payload. What is not
known of that is in the notes of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zeroelastic.checkpoint.optimizer_file import (
    FP32,
    ParamGroup,
    configured_batch,
    configured_sub_group_size,
)
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.dcp.saved import SCHEDULER_FILE, DcpCheckpoint, open_dcp
from zeroelastic.dcp.state import saved_state
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError, printable, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, read_whole
from zeroelastic.runs.locate import Source
from zeroelastic.torch_file.graph import (
    Storage,
    called,
    entry,
    instance,
    new_storage,
    ordered_dict,
    tensor,
    torch_size,
)
from zeroelastic.torch_file.header import DTYPE_BYTES, Extent, read_torch_file
from zeroelastic.verbs.convert.native_notes import NativeNotes, read_notes, with_kind, with_native_options
from zeroelastic.verbs.reshard.reshard import ReshardPlan
from zeroelastic.verbs.reshard.sidecar_files import SidecarFiles
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import Group, ReshardSource, configured_dtype, with_options
from zeroelastic.verbs.reshard.target import ReshardOptions, reshard_target

_VERSION = "0.19.8"
"""The DeepSpeed whose files are mirrored: its loads compare this number with what they need."""

_MAX_CONFIG_BYTES = 1 << 24
_MAX_LISTED = 8
_OWN_ADAM = frozenset(["adam", "adamw"])
"""The optimizers by their names in DeepSpeed's configuration that keep ``step`` as a Python integer."""


def read_config(path: Path) -> dict[str, object]:
    """A DeepSpeed configuration file. Raises UsageError for one that is no JSON object."""
    try:
        found = json.loads(read_whole(path, limit=_MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no DeepSpeed configuration: {error}.") from None
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if not isinstance(found, dict):
        raise UsageError(
            f"{path}: is no DeepSpeed configuration: it holds no JSON object. Give that of the run that will load."
        )
    return found


def plan_from_fsdp2(
    root: FilePath, options: ReshardOptions, *, config: Mapping[str, object] | None = None
) -> ReshardPlan:
    """The plan for ``verbs.reshard.reshard.run_reshard`` that makes a native checkpoint of one of FSDP2.

    ``config`` is the DeepSpeed configuration of the run that will load it. Raises CheckpointError, UnsupportedError,
    UsageError.
    """
    found = open_dcp(root)
    native = read_notes(found.native)
    notes = list(found.notes)
    config = _config(config, native, notes)
    stage = options.stage or native.stage or 3
    options.check(stage)
    saved = _source(found, native, config, options.world_size, notes)
    saved = with_options(saved, {"zero_optimization": options.zero_options})
    if stage == 3 and options.sub_group_size is None:
        options = replace(options, sub_group_size=configured_sub_group_size(saved.config))
    try:
        target = reshard_target(saved, options, stage, Slicing(Topology(options.world_size)))
    except UnsupportedError as error:
        raise UnsupportedError(f"{root}: {error}") from None
    source = Source(root, f"global_step{saved.state.models[0].global_steps}", root, None, "deepspeed")
    return ReshardPlan(source, saved, target, SidecarFiles({}, {}, ()), options, tuple(notes))


def _config(given: Mapping[str, object] | None, native: NativeNotes, notes: list[str]) -> Mapping[str, object]:
    """The configuration that the new files state."""
    config = given if given is not None else native.config
    if config is None:
        notes.append(
            "without a DeepSpeed configuration: the 16-bit weights follow from the master weights when it is loaded, "
            "and step is as torch's optimizers have it. Give --ds-config, the file of the run that will load it"
        )
        return {}
    if configured_dtype(config) == "float16":
        raise UnsupportedError(
            "a run in fp16 has a loss scale, of which a checkpoint of FSDP2 has no state. Convert for a run in bf16."
        )
    return config


def _source(
    found: DcpCheckpoint, native: NativeNotes, config: Mapping[str, object], world_size: int, notes: list[str]
) -> ReshardSource:
    for param, dtypes in zip(found.trained.params, found.trained.dtypes, strict=True):
        if dtypes[FP32] != "float32":
            raise UnsupportedError(
                f"{found.root}: {printable(param.name)} is {dtypes[FP32]}. ZeRO keeps float32 master weights, which "
                "FSDP2 has where the parameters are float32 and MixedPrecisionPolicy chooses the dtype to compute in."
            )
    kinds = native.kinds or ({"step": "pyint"} if _has_own_adam(config) else {})
    trained = replace(
        found.trained,
        scalars=tuple(
            {key: with_kind(value, kinds.get(key)) for key, value in scalars.items()}
            for scalars in found.trained.scalars
        ),
    )
    groups = _groups(found, native)
    steps = _steps(found, native, notes)
    batch = configured_batch(config, world_size)
    state = saved_state(found, trained=trained, groups=groups, config=config, steps=steps, batch=batch)
    scheduler = _scheduler(found, native, config, steps, notes)
    samples = native.counters.get("global_samples", steps * (batch or 0))
    root = _model_root(found, config, scheduler)
    root |= {"global_steps": steps, "global_samples": samples}
    root["skipped_steps"] = native.counters.get("skipped_steps", 0)
    left = [*found.named.rest, *_left_beside(found.root)]
    if left:
        notes.append(f"not carried: {some(left, _MAX_LISTED)}, for which DeepSpeed's files have no place")
    inner = {
        "zero_stage": called("deepspeed.runtime.zero.config", "ZeroStageEnum", 3),
        "loss_scaler": instance(
            "deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 1.0, "dynamic": False}
        ),
        "dynamic_loss_scale": False,
        "overflow": False,
    }
    return ReshardSource(
        state=state,
        groups=tuple(Group({str(k): v for k, v in group.options.items()}, group.params, 1) for group in groups),
        buffers=state.models[0].sub_groups,
        optim_root={"optimizer_state_dict": inner, "ds_config": dict(config), "ds_version": _VERSION},
        model_root=lambda rank: root,
        config=config,
        config_path=found.tables[0],
        bf16_names=bool(entry(config, "bf16", "enabled")),
        slicing=Slicing(state.checkpoint.topology),
    )


def _has_own_adam(config: Mapping[str, object]) -> bool:
    """Whether DeepSpeed makes an Adam of its own for a run with this configuration."""
    name = entry(config, "optimizer", "type")
    return (
        isinstance(name, str) and name.lower() in _OWN_ADAM and not entry(config, "optimizer", "params", "torch_adam")
    )


def _groups(found: DcpCheckpoint, native: NativeNotes) -> tuple[ParamGroup, ...]:
    """The optimizer's groups with the options of the run that was converted, if it was; else with torch's.

    DeepSpeed's Adam asks its groups for ``bias_correction``, which torch's does not know and always does.
    """
    if native.options:
        return with_native_options(found.named.groups, native)
    is_adam = all("exp_avg_sq" in keys for keys in found.trained.dtypes)
    added = {"bias_correction": True} if is_adam else {}
    return tuple(ParamGroup({**added, **group.options}, group.params) for group in found.named.groups)


def _steps(found: DcpCheckpoint, native: NativeNotes, notes: list[str]) -> int:
    """The number of optimizer steps: as it was kept, as the job counted, or as the optimizer did."""
    steps = found.steps
    if "global_steps" in native.counters:
        return steps
    if found.named.steps is not None:
        notes.append(f"global_steps is {steps}, as the job counted")
    else:
        notes.append(f"global_steps is {steps}, the optimizer's step: the checkpoint has no counter that is known")
    return steps


def _scheduler(
    found: DcpCheckpoint, native: NativeNotes, config: Mapping[str, object], steps: int, notes: list[str]
) -> dict[str, object] | None:
    """The state of the LR scheduler, in the form of the scheduler that the run makes."""
    state = dict(found.named.scheduler) or _scheduler_of_accelerate(found.root)
    if not state and native.counters:  # the run that was converted is known, with its scheduler or without one
        return None if native.scheduler is None else dict(native.scheduler)
    name = entry(config, "scheduler", "type")
    if isinstance(name, str) and "last_batch_iteration" not in state:
        notes.append(f"lr_scheduler: {name} of DeepSpeed goes on at step {steps}; the saved scheduler is another")
        return {"last_batch_iteration": steps - 1}
    if not state:
        notes.append("lr_scheduler: the checkpoint has no state of one. Load with load_lr_scheduler_states=False")
        return None
    notes.append("lr_scheduler: carried as saved, for a run with a scheduler of the same class")
    return state


def _scheduler_of_accelerate(root: FilePath) -> dict[str, object]:
    """The scheduler's state that accelerate keeps beside its folders; empty where there is none that is plain."""
    if SCHEDULER_FILE not in file_sizes(root):
        return {}
    state = read_torch_file(root / SCHEDULER_FILE, foreign="inert").root
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        return {}
    return {str(key): value for key, value in state.items() if isinstance(value, (bool, int, float, str, list))}


def _left_beside(root: FilePath) -> list[str]:
    """Files of accelerate or of the Trainer beside the folders, which no file of DeepSpeed takes."""
    names = file_sizes(root)
    return [name for name in names if name.endswith((".pkl", ".bin", ".pth")) and name != SCHEDULER_FILE]


def _model_root(
    found: DcpCheckpoint, config: Mapping[str, object], scheduler: Mapping[str, object] | None
) -> dict[object, object]:
    """The module states as a run of stage 3 has them: parameters without elements, buffers whole."""
    frozen = () if found.frozen is None else found.frozen.params
    dtype = configured_dtype(config) if config else "float32"
    module: list[tuple[object, object]] = [
        (param.name, tensor(new_storage(dtype, 0), 0, (0,))) for param in (*found.trained.params, *frozen)
    ]
    module += [(alias, tensor(new_storage(dtype, 0), 0, (0,))) for alias in found.tied]
    module += [(name, tensor(_stored(extent), 0, shape)) for name, (shape, extent) in found.buffers.items()]
    return {
        "module": ordered_dict(module),
        "buffer_names": list(found.buffers),
        "optimizer": None,
        "param_shapes": [],
        "frozen_param_shapes": ordered_dict((param.name, torch_size(param.shape)) for param in frozen),
        "shared_params": dict(found.tied),
        "frozen_param_fragments": ordered_dict([]),
        "lr_scheduler": None if scheduler is None else dict(scheduler),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 0,
        "global_samples": 0,
        "dp_world_size": found.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": dict(config),
        "ds_version": _VERSION,
    }


def _stored(extent: Extent) -> Storage:
    """A storage whose bytes are in a chunk."""
    storage = new_storage(extent.dtype, extent.nbytes // DTYPE_BYTES[extent.dtype])
    storage.find = lambda: extent
    return storage
