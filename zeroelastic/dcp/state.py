"""A checkpoint of FSDP2 as what verbs and loads work with: the headers that files of ZeRO would have."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.model_states import ModelStates, model_states_of
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN, Shard, configured_sub_group_size
from zeroelastic.checkpoint.saved_state import SavedPart, SavedState
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.layout import Int64Array, Layout, pack_sub_groups
from zeroelastic.dcp.archives import open_archives
from zeroelastic.dcp.metadata import StoredBytes
from zeroelastic.dcp.names import NamedState
from zeroelastic.dcp.native import NativeForm
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import LocalFile, read_exactly
from zeroelastic.torch_file.graph import Archive
from zeroelastic.torch_file.header import Blocks, read_torch_file
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
    """A checkpoint whose tensors are in chunks: a saved rank stands for the chunks of its number.

    All ranks have the module's states in common, which are in ``made`` where there is a file of them.
    """

    trained: SavedPart = field(kw_only=True)
    frozen: SavedPart | None = field(kw_only=True)
    named: NamedState = field(kw_only=True, repr=False)
    made: BinaryIO | None = None
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

    def archives(self, path: FilePath, holding: Int64Array | None = None) -> Iterator[tuple[int, ZipRecords]]:
        """The archives of the chunks of parameters in a file."""
        if not self._places:
            tensors = [*self.named.others.values(), *(t for keys in self.named.trained.values() for t in keys.values())]
            for place in (chunk.place for tensor in tensors for chunk in tensor.chunks):
                self._places.setdefault(place.path, {})[place.offset] = place
        places = self._places.get(path, {})
        begins = np.sort(np.fromiter(places, dtype=np.int64, count=len(places)))
        if holding is not None and places:
            begins = begins[np.unique((np.searchsorted(begins, holding, side="right") - 1).clip(0))]
        with open_archives() as archives:
            for begin in begins.tolist():
                yield begin, archives.records(places[begin])

    def module_path(self, model: ModelStates) -> str:
        """The file of the module's states that was made; it lasts as long as this checkpoint."""
        assert self.made is not None
        return _path_of(self.made)


def checkpoint_of(form: NativeForm) -> ChunkedCheckpoint:
    """A checkpoint that a load takes as if ZeRO had saved it, whose file of module states is in memory.

    Payload of buffers alone is read.
    """
    # it has no configuration, and so no batch; its weights are as the run has them
    config = {"bf16": form.config["bf16"]} if "bf16" in form.config else {}
    checkpoint = saved_state(replace(form, config=config, batch=None)).checkpoint
    assert isinstance(checkpoint, ChunkedCheckpoint)
    checkpoint.notes, checkpoint.rederived = form.notes, form.rederived
    # a load has the tensors of frozen parameters from their chunks
    root = {**form.model_root, "frozen_param_shapes": None, "frozen_param_fragments": None}
    checkpoint.made = _file_in_memory(root)
    plain = checkpoint.model_states(0)
    file = read_torch_file(plain.path, foreign="inert", through=_Blocks(checkpoint.made), columns=True)
    checkpoint._models[0] = replace(
        model_states_of(file, 0, world_size=None),
        world_size=plain.world_size,
        sub_groups=plain.sub_groups,
        frozen=plain.frozen,
        frozen_extents=checkpoint.frozen_extents(0),
    )
    return checkpoint


def _file_in_memory(root: object) -> BinaryIO:
    """A torch file of a graph."""
    made = os.fdopen(os.memfd_create("module_states", os.MFD_CLOEXEC), "r+b", buffering=0)
    archive = Archive(Path(_path_of(made)), root)
    checksums = {}
    for storage, offset in archive.offsets.items():
        data, extent = storage.data, storage.extent
        if data is None:
            data = b"" if extent is None else read_exactly(extent.path, extent.offset, extent.nbytes)
        os.pwrite(made.fileno(), data, offset)
        checksums[storage] = zlib.crc32(data)
    archive.finish(checksums)
    return made


class _Blocks:
    """What the header of a file in memory is read through."""

    capacity = LocalFile.capacity

    def __init__(self, made: BinaryIO) -> None:
        self._fd, self.size, self.bytes_read = made.fileno(), os.fstat(made.fileno()).st_size, 0

    def read(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self._fd, nbytes, offset)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nothing: all there is is in memory."""


def _path_of(made: BinaryIO) -> str:
    return f"/proc/self/fd/{made.fileno()}"
