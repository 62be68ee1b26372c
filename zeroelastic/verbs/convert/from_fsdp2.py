"""Open a checkpoint of FSDP2 as the source of a reshard, which writes native files of ZeRO at any size and stage.

Weights are master weights, and the optimizer's state goes along, bit for bit. Counters, hyper-parameters, the state of
the LR scheduler and the module states without payload are made as DeepSpeed has them, for the configuration of the run
that will load the result; the notes of the plan name the missing parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, ParamGroup, configured_batch, configured_dtype
from zeroelastic.checkpoint.tag_files import watch
from zeroelastic.checkpoint.topology import Topology, numbered_expert
from zeroelastic.dcp.chunks import ChunkArchives
from zeroelastic.dcp.metadata import StoredBytes
from zeroelastic.dcp.names import NamedState
from zeroelastic.dcp.saved import SCHEDULER_FILE, DcpCheckpoint, NativeNotes, open_dcp, with_kind, with_native_options
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError, printable, shown, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, read_whole
from zeroelastic.runs.locate import Source
from zeroelastic.torch_file.header import DTYPE_BYTES, Extent, read_torch_file
from zeroelastic.torch_file.tree import Dict, Size, Storage, entry, new_storage, tensor
from zeroelastic.torch_file.zip_check import ZipRecords
from zeroelastic.verbs.reshard.new_run import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardPlan, make_plan_for
from zeroelastic.verbs.reshard.sink import NO_LOSS_SCALER, ZERO_STAGE
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import ReshardSource, make_group

VERSION = "0.19.8"
"""The DeepSpeed whose files are mirrored: its loads compare this number with what they need."""

_OWN_ADAM = frozenset(["adam", "adamw"])
"""The optimizers by their names in DeepSpeed's configuration that keep ``step`` as a Python integer."""


def open_fsdp2(
    found: DcpCheckpoint, config: Mapping[str, object], world_size: int
) -> tuple[ReshardSource, tuple[str, ...]]:
    """The source of a reshard, in the form that a run of ``world_size`` ranks with this configuration would have saved.

    ``config`` may be empty. FSDP2 cuts weights, gradients and state, so it counts as stage 3. With it sentences on what
    was inferred, and on what no file of DeepSpeed has a place for. Raises CheckpointError, UnsupportedError.
    """
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
    topology = Topology(found.world_size)
    inner = {"zero_stage": ZERO_STAGE(3), **NO_LOSS_SCALER}
    source = ReshardSource(
        checkpoint=_ChunkedCheckpoint(
            tag_dir=found.root,
            topology=topology,
            optim_files=found.files,
            model_files=found.tables,
            named=found.named,
        ),
        parts=(replace(found.trained, scalars=scalars), found.frozen),
        stage=3,
        global_steps=steps,
        train_batch_size=batch,
        groups=tuple(make_group(dict(own.options.items()), own.params, repeats=1) for own in _groups(found, native)),
        optim_root={"optimizer_state_dict": inner, "ds_config": dict(config), "ds_version": VERSION},
        model_root=lambda rank: root,
        config_path=found.tables[0],
        bf16_names=bool(entry(config, "bf16", "enabled")),
        slicing=Slicing(topology),
    )
    return source, (*notes, *rederived)


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


_MAX_CONFIG_BYTES = 1 << 24
_WITHOUT_CONFIG = (
    "without a DeepSpeed configuration: the 16-bit weights follow from the master weights when it is loaded, and step "
    "is as torch's optimizers have it. Give --ds-config, the file of the run that will load it"
)


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
    root = watch(root)
    found = open_dcp(root)
    _check_experts(found)
    native = found.native
    known = config if config is not None else native.ds_config
    options = replace(options, stage=options.stage or native.stage or 3)
    saved, notes = open_fsdp2(found, known or {}, options.world_size)
    if known is None:
        notes = (*notes, _WITHOUT_CONFIG)
    if others := _configured_otherwise(saved):
        said = "a load takes them, without a warning where the run has this configuration"
        notes = (*notes, f"hyper-parameters are those of the checkpoint, and {said}: {some(others)}")
    source = Source(root, f"global_step{saved.global_steps}", root, None, "deepspeed")
    return make_plan_for(source, saved, options, notes)


def _configured_otherwise(saved: ReshardSource) -> list[str]:
    """The hyper-parameters of the groups that are others than the configuration's, each with both values."""
    params = entry(saved.config, "optimizer", "params")
    found: list[str] = []
    for name, value in params.items() if isinstance(params, dict) else ():
        for g, group in enumerate(saved.groups):
            key = "initial_lr" if name == "lr" and "initial_lr" in group.options else name
            own, configured = (tuple(v) if isinstance(v, list) else v for v in (group.options.get(key, value), value))
            if own != configured and value != "auto":
                found.append(f"{name} of group {g} is {shown(own)}, and {shown(value)} in the configuration")
    return found


def _check_experts(found: DcpCheckpoint) -> None:
    """Raise UnsupportedError for experts that DeepSpeed saves in files of their own, which are not made here."""
    params = (*found.trained.params, *found.frozen.params)
    of_deepspeed = [param.name for param in params if numbered_expert(param.name) is not None]
    if of_deepspeed:
        raise UnsupportedError(
            f"{found.root}: {printable(of_deepspeed[0])} is an expert of DeepSpeed's own MoE layer, which keeps each "
            "expert in a file and an optimizer group of its own: such checkpoints are not written from FSDP2. "
            "Begin a run from the weights instead, which torch.distributed.checkpoint reads by name."
        )


@dataclass(slots=True)
class _ChunkedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are in chunks, each an archive in a file of many."""

    named: NamedState = field(kw_only=True, repr=False)
    _places: dict[FilePath, dict[int, StoredBytes]] = field(default_factory=dict, init=False, repr=False)

    def archives(self, path: FilePath) -> Iterator[tuple[int, ZipRecords]]:
        """The archives of the chunks of parameters in a file."""
        if not self._places:
            tensors = [*self.named.others.values(), *(t for keys in self.named.trained.values() for t in keys.values())]
            for place in (chunk.place for tensor in tensors for chunk in tensor.chunks):
                self._places.setdefault(place.path, {})[place.offset] = place
        places = self._places.get(path, {})
        with ChunkArchives() as archives:
            for begin in sorted(places):
                yield begin, archives.records(places[begin])
