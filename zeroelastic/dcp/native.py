"""A checkpoint of FSDP2 in the form of a ZeRO run: all content of files but tensors, made as DeepSpeed has it.

Weights are master weights, and the optimizer's state goes along, bit for bit. Counters, hyper-parameters, the state of
the LR scheduler and the module states without payload are made for the DeepSpeed configuration of the run that takes
them. What is not known of these is in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroelastic.checkpoint.optimizer_file import FP32, ParamGroup, configured_batch, configured_dtype
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.dcp.notes import NativeNotes, with_kind, with_native_options
from zeroelastic.dcp.saved import SCHEDULER_FILE, DcpCheckpoint
from zeroelastic.errors import UnsupportedError, printable, some
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import DTYPE_BYTES, Extent, read_torch_file
from zeroelastic.torch_file.tree import Dict, Size, Storage, entry, new_storage, tensor

VERSION = "0.19.8"
"""The DeepSpeed whose files are mirrored: its loads compare this number with what they need."""

_OWN_ADAM = frozenset(["adam", "adamw"])
"""The optimizers by their names in DeepSpeed's configuration that keep ``step`` as a Python integer."""


@dataclass(frozen=True, slots=True)
class NativeForm:
    """A checkpoint of FSDP2 in the form of a ZeRO run with the configuration ``config``, which may be empty.

    ``trained`` and ``groups`` are taken from ``found``, in the form that DeepSpeed's optimizers have; ``batch`` is the
    global batch that the configuration states; ``model_root`` are the module states, a tree for a torch file.
    ``notes`` are sentences on what was inferred, and on what no file of DeepSpeed has a place for.
    """

    found: DcpCheckpoint
    config: Mapping[str, object]
    trained: TensorSet
    groups: tuple[ParamGroup, ...]
    steps: int
    batch: int | None
    model_root: Mapping[object, object]
    notes: tuple[str, ...]


def native_form(found: DcpCheckpoint, config: Mapping[str, object], world_size: int) -> NativeForm:
    """The form for a run of ``world_size`` ranks. Raises CheckpointError, UnsupportedError."""
    native = found.native
    if configured_dtype(config) == "float16":
        raise UnsupportedError(
            "a run in fp16 has a loss scale, of which a checkpoint of FSDP2 has no state. Use it for a run in bf16."
        )
    for param, dtypes in zip(found.trained.params, found.trained.dtypes, strict=True):
        if dtypes[FP32] != "float32":
            raise UnsupportedError(
                f"{found.root}: {printable(param.name)} is {dtypes[FP32]}. ZeRO keeps float32 master weights, which "
                "FSDP2 has where the parameters are float32 and MixedPrecisionPolicy chooses the dtype to compute in."
            )
    notes = list(found.notes)
    kinds = native.kinds or ({"step": "pyint"} if _has_own_adam(config) else {})
    scalars = tuple(
        {key: with_kind(value, kinds.get(key)) for key, value in own.items()} for own in found.trained.scalars
    )
    steps = found.steps
    if "global_steps" not in native.counters:
        counted = "the optimizer's step: the checkpoint has no counter that is known"
        notes.append(f"global_steps is {steps}, {counted if found.named.steps is None else 'as the job counted'}")
    batch = configured_batch(config, world_size)
    scheduler = _scheduler(found, native, config, steps, notes)
    samples, rederived = native.counters.get("global_samples"), list[str]()
    if samples is None:
        samples = steps * (batch or 0)
        known = f"{steps} steps of this run's batch of {batch}"
        by = "the configuration has no global batch" if batch is None else known
        rederived = [f"re-derived: global_samples ({samples}: {by})"]
    root = _model_root(found, config, scheduler) | {
        "global_steps": steps,
        "global_samples": samples,
        "skipped_steps": native.counters.get("skipped_steps", 0),
    }
    left = [*found.named.rest, *_left_beside(found)]
    if left:
        notes.append(f"not carried: {some(left)}, for which DeepSpeed's files have no place")
    groups = _groups(found, native)
    trained = replace(found.trained, scalars=scalars)
    return NativeForm(found, config, trained, groups, steps, batch, root, (*notes, *rederived))


def _has_own_adam(config: Mapping[str, object]) -> bool:
    """Return whether DeepSpeed makes its own Adam for a run with this configuration."""
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


def _scheduler(
    found: DcpCheckpoint, native: NativeNotes, config: Mapping[str, object], steps: int, notes: list[str]
) -> dict[str, object] | None:
    """The state of the LR scheduler, in the form of the scheduler that the run makes."""
    state = dict(found.named.scheduler) or _scheduler_of_accelerate(found)
    if not state and native.counters:  # the run that was converted is known, with its scheduler or without one
        return native.lr_scheduler
    name = entry(config, "scheduler", "type")
    if isinstance(name, str) and "last_batch_iteration" not in state:
        notes.append(f"lr_scheduler: {name} of DeepSpeed goes on at step {steps}; the saved scheduler is another")
        return {"last_batch_iteration": steps - 1}
    if not state:
        notes.append("lr_scheduler: the checkpoint has no state of one. Load with load_lr_scheduler_states=False")
        return None
    notes.append("lr_scheduler: carried as saved, for a run with a scheduler of the same class")
    return state


def _scheduler_of_accelerate(found: DcpCheckpoint) -> dict[str, object]:
    """The scheduler's state that accelerate keeps next to the folders; empty where there is none that is plain."""
    if SCHEDULER_FILE not in file_sizes(found.root):
        return {}
    state = read_torch_file(found.root / SCHEDULER_FILE, foreign="inert").root
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        return {}
    return {str(key): value for key, value in state.items() if isinstance(value, (bool, int, float, str, list))}


def _left_beside(found: DcpCheckpoint) -> list[str]:
    """Files of accelerate or of the Trainer next to the folders, which no file of DeepSpeed takes."""
    names = file_sizes(found.root)
    return [name for name in names if name.endswith((".pkl", ".bin", ".pth")) and name != SCHEDULER_FILE]


def _model_root(
    found: DcpCheckpoint, config: Mapping[str, object], scheduler: Mapping[str, object] | None
) -> dict[object, object]:
    """The module states as a run of stage 3 has them: parameters without elements, buffers whole."""
    dtype = configured_dtype(config) if config else "float32"
    module: list[tuple[object, object]] = [
        (param.name, tensor(new_storage(dtype, 0), 0, (0,))) for param in (*found.trained.params, *found.frozen.params)
    ]
    module += [(alias, tensor(new_storage(dtype, 0), 0, (0,))) for alias in found.tied]
    module += [(name, tensor(_stored(extent), 0, shape)) for name, (shape, extent) in found.buffers.items()]
    return {
        "module": Dict(module),
        "buffer_names": list(found.buffers),
        "optimizer": None,
        "param_shapes": [],
        "frozen_param_shapes": Dict((param.name, Size(param.shape)) for param in found.frozen.params),
        "shared_params": dict(found.tied),
        "frozen_param_fragments": Dict(),
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
        "ds_version": VERSION,
    }


def _stored(extent: Extent) -> Storage:
    """A storage whose bytes are in a chunk."""
    storage = new_storage(extent.dtype, extent.nbytes // DTYPE_BYTES[extent.dtype])
    storage.source = lambda _: extent
    return storage
