"""A checkpoint of FSDP2 as the saved state that verbs work with: the headers that files of ZeRO would have."""

from __future__ import annotations

from collections.abc import Mapping

from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import ParamGroup, Shard, configured_sub_group_size
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.layout import pack_sub_groups
from zeroelastic.dcp.saved import DcpCheckpoint


def saved_state(
    found: DcpCheckpoint,
    *,
    trained: SavedPart,
    groups: tuple[ParamGroup, ...],
    config: Mapping[str, object],
    steps: int,
    batch: int | None = None,
) -> SavedState:
    """The state of a checkpoint: ``trained`` and ``groups`` are those of ``found``, in the form that is wanted.

    FSDP2 cuts weights, gradients and state, so it counts as stage 3.
    """
    table = {param.name: param for param in trained.params}
    members = [[table[name] for name in group.params] for group in groups]
    size = configured_sub_group_size(config)
    buffers = pack_sub_groups(members, world_size=found.world_size, sub_group_size=size)
    number = {param.name: i for i, param in enumerate(trained.params)}
    firsts = [number[own[0].name] for own in buffers]
    head = Shard(
        path=found.tables[0],
        size=0,
        rank=0,
        stage=3,
        format="rigid",
        save_id=None,
        layout=trained.layout,
        groups=groups,
        tensor_keys=tuple(tuple(trained.dtypes[first]) for first in firsts),
        scalars=tuple(trained.scalars[first] for first in firsts),
        extents=trained.extents[0],
        digests=None,
        scaler=None,
        ds_config=config,
        train_batch_size=batch,
        header_bytes=0,
    )
    models = ModelStates(
        path=found.tables[0],
        size=0,
        rank=0,
        world_size=found.world_size,
        tensor_size=1,
        global_steps=steps,
        sub_groups=tuple(map(tuple, buffers)),
        frozen=None if found.frozen is None else found.frozen.layout,
        frozen_extents=None,
        header_bytes=0,
    )
    checkpoint = Checkpoint(
        tag_dir=found.root,
        topology=Topology(found.world_size),
        optim_files=found.files,
        model_files=found.tables,
        record=None,
        stale_files=(),
        _shards={0: head},
        _models={0: models},
    )
    parts = (trained,) if found.frozen is None else (trained, found.frozen)
    return SavedState(checkpoint, head, (models,), parts)
