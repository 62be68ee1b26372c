"""Open a checkpoint of FSDP2 as the source of a reshard, which writes native files of ZeRO at any size and stage.

What DeepSpeed's files have beside the tensors is the checkpoint's native form; what is not known of that is in the
notes of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.one_save import watch
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN, Shard, configured_sub_group_size
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState
from zeroelastic.checkpoint.topology import Topology, numbered_expert
from zeroelastic.core.layout import Layout, pack_sub_groups
from zeroelastic.dcp.archives import Archives
from zeroelastic.dcp.metadata import StoredBytes
from zeroelastic.dcp.names import NamedState
from zeroelastic.dcp.native import VERSION, NativeForm, native_form
from zeroelastic.dcp.notes import read_notes
from zeroelastic.dcp.saved import DcpCheckpoint, open_dcp
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError, printable, shown, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_whole
from zeroelastic.runs.locate import Source
from zeroelastic.torch_file.header import Blocks
from zeroelastic.torch_file.tree import entry, instance
from zeroelastic.torch_file.zip_check import ZipRecords
from zeroelastic.verbs.reshard.files import LOSS_SCALER, ZERO_STAGE
from zeroelastic.verbs.reshard.reshard import ReshardPlan
from zeroelastic.verbs.reshard.sidecar_files import SidecarFiles
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import Group, ReshardSource, with_options
from zeroelastic.verbs.reshard.target import ReshardOptions, reshard_target

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
    native = read_notes(found.native)
    known = config if config is not None else native.config
    stage = options.stage or native.stage or 3
    options.check(stage)
    form = native_form(found, known or {}, options.world_size)
    notes = form.notes
    if known is None:
        notes = (*notes, _WITHOUT_CONFIG)
    if others := _configured_otherwise(form):
        said = "a load takes them, without a warning where the run has this configuration"
        notes = (*notes, f"hyper-parameters are those of the checkpoint, and {said}: {some(others)}")
    saved = _source(form)
    saved = with_options(saved, {"zero_optimization": options.zero_options})
    if stage == 3 and options.sub_group_size is None:
        options = replace(options, sub_group_size=configured_sub_group_size(saved.config))
    try:
        target = reshard_target(saved, options, stage, Slicing(Topology(options.world_size)))
    except UnsupportedError as error:
        raise UnsupportedError(f"{root}: {error}") from None
    source = Source(root, f"global_step{saved.state.models[0].global_steps}", root, None, "deepspeed")
    return ReshardPlan(source, saved, target, SidecarFiles({}, {}, ()), options, notes)


def _configured_otherwise(form: NativeForm) -> list[str]:
    """The hyper-parameters of the groups that are others than the configuration's, each with both values."""
    params = entry(form.config, "optimizer", "params")
    found: list[str] = []
    for name, value in params.items() if isinstance(params, dict) else ():
        for g, group in enumerate(form.groups):
            key = "initial_lr" if name == "lr" and "initial_lr" in group.options else name
            own, configured = (tuple(v) if isinstance(v, list) else v for v in (group.options.get(key, value), value))
            if own != configured and value != "auto":
                found.append(f"{name} of group {g} is {shown(own)}, and {shown(value)} in the configuration")
    return found


def _check_experts(found: DcpCheckpoint) -> None:
    """Raise UnsupportedError for experts that DeepSpeed saves in files of their own, which are not made here."""
    params = (*found.trained.params, *(() if found.frozen is None else found.frozen.params))
    of_deepspeed = [param.name for param in params if numbered_expert(param.name) is not None]
    if of_deepspeed:
        raise UnsupportedError(
            f"{found.root}: {printable(of_deepspeed[0])} is an expert of DeepSpeed's own MoE layer, which keeps each "
            "expert in a file and an optimizer group of its own: such checkpoints are not written from FSDP2. "
            "Begin a run from the weights instead, which torch.distributed.checkpoint reads by name."
        )


def _source(form: NativeForm) -> ReshardSource:
    state = _saved_state(form)
    inner = {
        "zero_stage": ZERO_STAGE(3),
        "loss_scaler": instance(LOSS_SCALER, {"cur_scale": 1.0, "dynamic": False}),
        "dynamic_loss_scale": False,
        "overflow": False,
    }
    return ReshardSource(
        state=state,
        groups=tuple(Group({str(k): v for k, v in group.options.items()}, group.params, 1) for group in form.groups),
        buffers=state.models[0].sub_groups,
        optim_root={"optimizer_state_dict": inner, "ds_config": dict(form.config), "ds_version": VERSION},
        model_root=lambda rank: form.model_root,
        config=form.config,
        config_path=form.found.tables[0],
        bf16_names=bool(entry(form.config, "bf16", "enabled")),
        slicing=Slicing(state.checkpoint.topology),
    )


def _saved_state(form: NativeForm) -> SavedState:
    """The state of a checkpoint in the form that is wanted.

    FSDP2 cuts weights, gradients and state, so it counts as stage 3.
    """
    found, trained, groups, config = form.found, form.trained, form.groups, form.config
    table = {param.name: param for param in trained.params}
    members = [[table[name] for name in group.params] for group in groups]
    size = configured_sub_group_size(config)
    buffers = pack_sub_groups(members, world_size=found.world_size, sub_group_size=size)
    layout, numbers = trained.layout, trained.numbers().tolist()
    whole_of = dict(zip(layout.sub_group.tolist(), numbers, strict=True))
    firsts = [whole_of[sub_group] for sub_group in range(layout.num_sub_groups)]
    head = Shard(
        path=found.tables[0],
        size=0,
        rank=0,
        stage=3,
        format="rigid",
        save_id=None,
        layout=layout.on_rank(0),  # a first chunk is there of every parameter
        groups=groups,
        tensor_keys=tuple(tuple(trained.dtypes[first]) for first in firsts),
        scalars=tuple(trained.scalars[first] for first in firsts),
        extents=trained.extents[0],
        digests=None,
        scaler=None,
        ds_config=config,
        train_batch_size=form.batch,
        header_bytes=0,
    )
    model = ModelStates(
        path=found.tables[0],
        size=0,
        rank=0,
        world_size=found.world_size,
        tensor_size=1,
        global_steps=form.steps,
        sub_groups=tuple(map(tuple, buffers)),
        frozen=None if found.frozen is None else found.frozen.layout,
        frozen_extents=None,
        header_bytes=0,
    )
    checkpoint = _ChunkedCheckpoint(
        tag_dir=found.root,
        topology=Topology(found.world_size),
        optim_files=found.files,
        model_files=found.tables,
        record=None,
        stale_files=(),
        whole_model=True,
        _shards={0: head},
        models={0: model},
        trained=trained,
        frozen=found.frozen,
        named=found.named,
    )
    parts = (trained,) if found.frozen is None else (trained, found.frozen)
    return SavedState(checkpoint, head, (model,), parts)


@dataclass(slots=True)
class _ChunkedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are in chunks: a saved rank stands for the chunks of its number."""

    trained: SavedPart = field(kw_only=True)
    frozen: SavedPart | None = field(kw_only=True)
    named: NamedState = field(kw_only=True, repr=False)
    _places: dict[FilePath, dict[int, StoredBytes]] = field(default_factory=dict, init=False, repr=False)

    @property
    def layout(self) -> Layout:
        """The layout of the trained parameters over all ranks."""
        return self.trained.layout

    def shard(self, rank: int, *, through: Blocks | None = None) -> Shard:
        """What is known of a rank's chunks; the headers of their archives are read here."""
        if rank not in self._shards:
            head = next(iter(self._shards.values()))
            self._shards[rank] = replace(head, rank=rank, extents=self.trained.extents[rank])
        return self._shards[rank]

    def extents(self, rank: int) -> Mapping[str, TensorExtents]:
        """By state key, as of ``layout``."""
        return self.trained.extents[rank]

    def frozen_extents(self, rank: int) -> TensorExtents | None:
        """As of ``frozen_layout``."""
        return None if self.frozen is None else self.frozen.extents[rank].get(FROZEN)

    def archives(self, path: FilePath) -> Iterator[tuple[int, ZipRecords]]:
        """The archives of the chunks of parameters in a file."""
        if not self._places:
            tensors = [*self.named.others.values(), *(t for keys in self.named.trained.values() for t in keys.values())]
            for place in (chunk.place for tensor in tensors for chunk in tensor.chunks):
                self._places.setdefault(place.path, {})[place.offset] = place
        places = self._places.get(path, {})
        with Archives() as archives:
            for begin in sorted(places):
                yield begin, archives.records(places[begin])
