"""A checkpoint of FSDP2 as what a reshard works with: the headers that files of ZeRO would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN, Shard, configured_sub_group_size
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.layout import Layout, pack_sub_groups
from zeroelastic.dcp.archives import open_archives
from zeroelastic.dcp.metadata import StoredBytes
from zeroelastic.dcp.names import NamedState
from zeroelastic.dcp.native import NativeForm
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import Blocks
from zeroelastic.torch_file.zip_check import ZipRecords


def saved_state(form: NativeForm) -> SavedState:
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
    checkpoint = ChunkedCheckpoint(
        tag_dir=found.root,
        topology=Topology(found.world_size),
        optim_files=found.files,
        model_files=found.tables,
        record=None,
        stale_files=(),
        whole_model=True,
        _shards={0: head},
        _models={0: model},
        trained=trained,
        frozen=found.frozen,
        named=found.named,
    )
    parts = (trained,) if found.frozen is None else (trained, found.frozen)
    return SavedState(checkpoint, head, (model,), parts)


@dataclass(slots=True)
class ChunkedCheckpoint(Checkpoint):
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
        with open_archives() as archives:
            for begin in sorted(places):
                yield begin, archives.records(places[begin])
