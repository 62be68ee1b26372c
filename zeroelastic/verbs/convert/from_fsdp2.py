"""Open a checkpoint of FSDP2 as the source of a reshard, which writes native files of ZeRO at any size and stage.

The rest of DeepSpeed's files is made of the checkpoint's native form; the notes of the plan name the missing parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zeroelastic.checkpoint.one_save import watch
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.topology import Topology, numbered_expert
from zeroelastic.dcp.archives import ChunkArchives
from zeroelastic.dcp.metadata import StoredBytes
from zeroelastic.dcp.names import NamedState
from zeroelastic.dcp.native import VERSION, NativeForm, native_form
from zeroelastic.dcp.saved import DcpCheckpoint, open_dcp
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError, printable, shown, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_whole
from zeroelastic.runs.locate import Source
from zeroelastic.torch_file.tree import entry
from zeroelastic.torch_file.zip_check import ZipRecords
from zeroelastic.verbs.reshard.options import ReshardOptions
from zeroelastic.verbs.reshard.plan import ReshardPlan, make_plan_for
from zeroelastic.verbs.reshard.sink import NO_LOSS_SCALER, ZERO_STAGE
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import ReshardSource, make_group

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
    form = native_form(found, known or {}, options.world_size)
    notes = form.notes
    if known is None:
        notes = (*notes, _WITHOUT_CONFIG)
    if others := _configured_otherwise(form):
        said = "a load takes them, without a warning where the run has this configuration"
        notes = (*notes, f"hyper-parameters are those of the checkpoint, and {said}: {some(others)}")
    source = Source(root, f"global_step{form.steps}", root, None, "deepspeed")
    return make_plan_for(source, _source(form), options, notes)


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
    params = (*found.trained.params, *found.frozen.params)
    of_deepspeed = [param.name for param in params if numbered_expert(param.name) is not None]
    if of_deepspeed:
        raise UnsupportedError(
            f"{found.root}: {printable(of_deepspeed[0])} is an expert of DeepSpeed's own MoE layer, which keeps each "
            "expert in a file and an optimizer group of its own: such checkpoints are not written from FSDP2. "
            "Begin a run from the weights instead, which torch.distributed.checkpoint reads by name."
        )


def _source(form: NativeForm) -> ReshardSource:
    """The source of a reshard. FSDP2 cuts weights, gradients and state, so it counts as stage 3."""
    found, trained, groups = form.found, form.trained, form.groups
    topology = Topology(found.world_size)
    inner = {"zero_stage": ZERO_STAGE(3), **NO_LOSS_SCALER}
    return ReshardSource(
        checkpoint=_ChunkedCheckpoint(
            tag_dir=found.root,
            topology=topology,
            optim_files=found.files,
            model_files=found.tables,
            named=found.named,
        ),
        parts=(trained, found.frozen),
        stage=3,
        global_steps=form.steps,
        train_batch_size=form.batch,
        groups=tuple(make_group(dict(own.options.items()), own.params, repeats=1) for own in groups),
        optim_root={"optimizer_state_dict": inner, "ds_config": dict(form.config), "ds_version": VERSION},
        model_root=lambda rank: form.model_root,
        config_path=found.tables[0],
        bf16_names=bool(entry(form.config, "bf16", "enabled")),
        slicing=Slicing(topology),
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
