"""A tag directory as one checkpoint: its files, its record, its format, and shards opened as they are needed.

Only directory names, the commit record, and the headers of the files that are asked for are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from zeroelastic.checkpoint.commit_record import CheckpointFormat, CommitRecord
from zeroelastic.checkpoint.contradictions import check_frozen, not_committed, other_directory, other_save
from zeroelastic.checkpoint.extents import TensorExtents, extents_over_ranks
from zeroelastic.checkpoint.inventory import NO_FILES, Inventory, check_sizes, list_files
from zeroelastic.checkpoint.model_states import ModuleHeader, model_states_of
from zeroelastic.checkpoint.optimizer_file import FROZEN, OptimizerHeader, ParamGroup, configured_batch
from zeroelastic.checkpoint.optimizer_reader import OptimizerFile, read_optimizer_file
from zeroelastic.checkpoint.rank_layout import RankSlices
from zeroelastic.checkpoint.saved_layout import SavedFrozen, SavedMaps, SlicedLayout, saved_maps, sliced_layout
from zeroelastic.checkpoint.tag_files import (
    NO_TENSOR_PARALLEL,
    RankFile,
    StateFiles,
    TensorParallel,
    model_file_name,
    other_tp_size,
    parse_rank_file,
    rank_files,
    refuse_unfinished,
    watch,
)
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.layout import Layout, Param
from zeroelastic.errors import CheckpointError, MissingFileError, UndescribedSlicesError, counted, missing_file, some
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.io.storage import Blocks, file_size
from zeroelastic.torch_file.header import TorchFile, paused_collector, read_torch_file
from zeroelastic.torch_file.zip_check import ZipRecords, read_zip_records

_ON_NO_NODE = "Start the run on the nodes that have them, or use an older tag."


class FilesByRank(Sequence[FilePath]):
    """Files of a directory by rank; a path is made when it is asked for, of thousands that a rank needs few of."""

    def __init__(self, directory: FilePath, names: Mapping[int, str], count: int) -> None:
        self._directory, self._names, self._count = directory, names, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rank: int) -> FilePath: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[FilePath]: ...
    def __getitem__(self, rank: int | slice) -> FilePath | Sequence[FilePath]:
        if isinstance(rank, slice):
            return [self[each] for each in range(self._count)[rank]]
        return self._directory / self._names[range(self._count)[rank]]


@dataclass(slots=True)
class Checkpoint:
    """The files of one tag and their headers, each opened when it is asked for.

    Invariants: each of ``world_size`` ranks has an optimizer file in ``optim_files``; ``model_files`` has a file of
    each rank at ZeRO stage 3, and at stages 1 and 2 (``whole_model``) one file of the whole model of each tensor
    parallel rank; where there is a commit record, every file has the size that it states. Ranks are counted over all of
    ``topology``. Where files of several tensor parallel ranks do not say which slices they have, these are the files of
    one of these ranks, ``tp``, and ``topology`` has its data parallel ranks alone.

    ``near_rank`` chooses among headers of which any will do. Headers of files that only other ranks read
    (``inventory``) are parsed from the bytes that these have read (``through``).
    ``compare_directories``: whether a file that is opened must have the zip directory that the record states.
    ``models`` are the model states headers that were parsed; ``sliced`` is the layout of the trained parameters where
    there are slices, known when the first optimizer file is open.
    """

    tag_dir: FilePath
    topology: Topology
    optim_files: Sequence[FilePath] = ()
    model_files: Sequence[FilePath] = ()
    stale_files: tuple[str, ...] = ()
    inventory: Inventory = field(default=NO_FILES, repr=False)
    tp: TensorParallel = NO_TENSOR_PARALLEL
    compare_directories: bool = True
    whole_model: bool = False
    near_rank: int = 0
    models: dict[int, ModuleHeader] = field(default_factory=dict, repr=False)
    sliced: SlicedLayout | None = field(default=None, repr=False)
    _shards: dict[int, OptimizerHeader] = field(default_factory=dict, repr=False)
    _maps: SavedMaps | None = field(default=None, repr=False)
    _others: dict[int, Checkpoint] = field(default_factory=dict, repr=False)
    _frozen: SavedFrozen | None = field(default=None, repr=False)

    @property
    def world_size(self) -> int:
        """How many ranks saved."""
        return self.topology.world_size

    @property
    def record(self) -> CommitRecord | None:
        """The commit record."""
        return self.inventory.record

    @property
    def layout(self) -> Layout:
        """The layout of the trained parameters over all ranks.

        Opens an optimizer file's header, if none is open, and where there are slices, ``layout_models``.
        Raises as ``shard``.
        """
        shard = next(iter(self._shards.values()), None) or self.shard(self._near(0))
        return shard.layout if self.sliced is None else self.sliced.layout

    @property
    def layout_models(self) -> tuple[int, ...]:
        """The ranks whose model states headers say what slices there are: one of each tensor parallel rank."""
        opened = {self.topology.place(rank)[1]: rank for rank in reversed(self.models)}
        return tuple(opened.get(t, self._near(t)) for t in range(self.topology.tensor_size))

    def _near(self, tensor_rank: int) -> int:
        """The rank of a tensor parallel rank that is near ``near_rank``."""
        near = self.near_rank if self.near_rank < self.world_size else 0
        return self.topology.rank(self.topology.place(near)[0], tensor_rank)

    def extents(self, rank: int) -> Mapping[str, TensorExtents]:
        """Where a rank's optimizer file has its parts of the parameters of ``layout``, by state key. Opens as that."""
        return extents_over_ranks(self.layout, rank, self.shard(rank).extents)

    def groups(self, head: OptimizerHeader) -> tuple[ParamGroup, ...]:
        """The optimizer groups of one rank's file, with the parameters of all ranks by the names of whole tensors."""
        return head.groups if self.sliced is None else self.sliced.groups(head)

    @property
    def frozen(self) -> SavedFrozen:
        """The frozen parameters. Opens the headers of ``layout_models``, and of experts' files, if some are frozen."""
        if self._frozen is None:
            models = [self.model_states(rank) for rank in self.layout_models]
            self._frozen = SavedFrozen.of(models, self.topology, self._maps)
        return self._frozen

    @property
    def names_frozen(self) -> bool:
        """Whether the files say which parameters are frozen; False where these were excluded from the save."""
        return self.frozen.experts is not None or self.model_states(self.layout_models[0]).names_frozen

    def frozen_extents(self, rank: int) -> TensorExtents:
        """Where a rank of ``frozen.layout`` has its parts in files; CheckpointError where its file lists others."""
        layout, experts = self.frozen
        if experts is not None:
            return experts.extents(rank)
        model = self.model_states(rank)
        check_frozen(model, layout.on_rank(rank))
        return extents_over_ranks(layout, rank, {FROZEN: model.frozen_extents})[FROZEN]

    @property
    def expert_files(self) -> tuple[str, ...]:
        """The names of the files of experts that belong to the tag, by a model states header that was parsed."""
        return next((model.expert_files for model in self.models.values()), ())

    def use_files(self, files: StateFiles, data_size: int) -> None:
        """Take ``files`` as the files of the save, and number them, and the headers that are open, by rank."""
        self.topology, self.whole_model = Topology(data_size, files.tensor_size), files.whole_model
        self.optim_files = FilesByRank(self.tag_dir, files.optim, self.world_size)
        self.model_files = FilesByRank(self.tag_dir, files.models, files.num_models(data_size))
        rank_of = {name: rank for rank, name in files.models.items()}
        models = [(rank_of[model.path.name], model) for model in self.models.values() if model.path.name in rank_of]
        self.models = {rank: model if model.rank == rank else replace(model, rank=rank) for rank, model in models}

    def shard(self, rank: int, *, through: Blocks | None = None) -> OptimizerHeader:
        """The header of one rank's optimizer file; parsed once. Raises CheckpointError, UnsupportedError.

        Where there are slices, the headers of ``layout_models`` are opened before.
        """
        if rank not in self._shards:
            shard = self.read_shard(rank, through=through)
            if (mixed := other_save(shard, self.inventory.save_id, self.model_files[0].name)) is not None:
                raise CheckpointError(mixed)
            self._check_directory(shard.path, shard.directory)
            self._shards[rank] = shard
        return self._shards[rank]

    @paused_collector()  # until the tree of the file is gone
    def read_shard(self, rank: int, *, through: Blocks | None = None) -> OptimizerHeader:
        """Parse the header of one rank's optimizer file, which is not yet compared with other files."""
        data_rank, tensor_rank = self.topology.place(rank)
        opened = read_optimizer_file(self.optim_files[rank], world_size=self.topology.data_size, through=through)
        slices, params = self._slices(rank, opened), self._rigid_params(rank)
        tp_rank = tensor_rank if self.tp.size == 1 else self.tp.rank
        return opened.header(data_rank, params=params, tp_rank=tp_rank, slices=slices)

    @property
    def format(self) -> CheckpointFormat:
        """The format of the save, by the record or an optimizer file."""
        return self.inventory.format or self.shard(self._near(0)).format

    def train_batch_size(self, head: OptimizerHeader) -> int | None:
        """The global batch of the save, from its record, an optimizer file or the configuration in it."""
        stated = self.inventory.train_batch_size if self.inventory.is_recorded else head.train_batch_size
        return configured_batch(head.ds_config, self.topology.data_size) if stated is None else stated

    def require_committed(self, shard: OptimizerHeader) -> None:
        """Raise MissingFileError for the optimizer file of an elastic save whose commit record is not there."""
        if (missing := not_committed(shard, self.inventory)) is not None:
            raise MissingFileError(missing)

    def _rigid_params(self, rank: int) -> Sequence[Sequence[Param]] | None:
        """The parameters by flat buffer, which stock optimizer files do not name; None where no header is needed."""
        if not self.models and (self.whole_model or self.inventory.format == "rigid"):
            self.model_states(rank)
        if not self.models:
            return None
        return self.model_states(self.layout_models[self.topology.place(rank)[1]]).sub_groups

    def _slices(self, rank: int, opened: OptimizerFile) -> RankSlices | None:
        """Which slices a rank has; None where ranks have no slices, or do not say which."""
        if self.tp.size > 1 or (self.topology.tensor_size == 1 and opened.num_parts is None):
            return None
        if self.sliced is None:
            models = [self.model_states(each) for each in self.layout_models]
            assert self._maps is not None, "read with the first model states"
            self.sliced = sliced_layout(models, opened, self.topology, self._maps)
            self.topology = self.sliced.topology
        return self.sliced.of_rank(rank)

    @paused_collector()
    def model_states(self, rank: int, *, through: Blocks | None = None) -> ModuleHeader:
        """The layout part of ``model_file``; parsed once.

        Raises CheckpointError, UndescribedSlicesError.
        """
        rank, tensor_rank = self.model_rank(rank), self.topology.place(rank)[1]
        if rank not in self.models:
            file = read_torch_file(self.model_files[rank], foreign="inert", through=through)
            tp = self.tp if self.tp.size > 1 else TensorParallel(tensor_rank, self.topology.tensor_size)
            self.take_model_states(file, rank, data_size=self.topology.data_size, tp=tp)
        return self.models[rank]

    def take_model_states(
        self, file: TorchFile, rank: int, *, data_size: int | None, tp: TensorParallel | None
    ) -> ModuleHeader:
        """Parse a model states file that was read; ``data_size`` and ``tp`` as of ``model_states_of``."""
        model = model_states_of(file, rank, world_size=data_size, tp=tp)
        self._check_directory(file.path, file.directory)
        if self._maps is None and self.tp.size == 1:
            self._maps = saved_maps(file.root, model.tensor_size, file.path)
        self.models[rank] = model
        return model

    def model_rank(self, rank: int) -> int:
        """The number of the model states file of a saved rank: at stages 1 and 2 its tensor parallel rank."""
        return self.topology.place(rank)[1] if self.whole_model else rank

    def model_file(self, rank: int) -> FilePath:
        """The model states file of a saved rank, or at stages 1 and 2 of the whole tensor parallel rank."""
        return self.model_files[self.model_rank(rank)]

    def holding(self, file: RankFile) -> tuple[Checkpoint, int]:
        """The checkpoint that a file belongs to, and its rank in it; opaque tensor parallel ranks each have one."""
        if self.tp.size == 1:
            return self, self.topology.rank(file.rank, file.tp_rank)
        if file.tp_rank not in (self.tp.rank, *self._others):
            self._others[file.tp_rank] = open_checkpoint(
                self.tag_dir,
                tp=TensorParallel(file.tp_rank, self.tp.size),
                inventory=self.inventory,
                compare_directories=self.compare_directories,
            )
        return self if file.tp_rank == self.tp.rank else self._others[file.tp_rank], file.rank

    def archives(self, path: FilePath) -> Iterator[tuple[int, ZipRecords]]:
        """The archives in a file: the byte at which each begins, and its records.

        Raises MissingFileError, CheckpointError.
        """
        size = file_size(path)
        if size is None:
            raise missing_file(path)
        yield 0, read_zip_records(path, size)

    def _check_directory(self, path: FilePath, found: str) -> None:
        if self.compare_directories and self.inventory.recorded_directories.get(path.name, found) != found:
            raise CheckpointError(other_directory(path))

    @property
    def header_bytes(self) -> int:
        """Bytes read so far for headers, scalars and the commit record."""
        shards = sum(shard.header_bytes for shard in self._shards.values())
        return shards + sum(model.header_bytes for model in self.models.values()) + self.inventory.record_bytes

    @property
    def opened(self) -> tuple[FilePath, ...]:
        """The checkpoint files whose headers were read here so far."""
        shards = tuple(shard.path for shard in self._shards.values())
        opened = shards + tuple(model.path for model in self.models.values())
        return tuple(path for path in opened if self.inventory.reads(path.name))


def open_checkpoint(
    tag_dir: str | os.PathLike[str] | FilePath,
    *,
    near_rank: int = 0,
    tp: TensorParallel | None = None,
    inventory: Inventory | None = None,
    compare_directories: bool = True,
) -> Checkpoint:
    """Look at a tag directory: which files, how many ranks, which record. Opens at most one model states header.

    The directory is watched (``one_save``): whoever reads more of it later can tell whether it is still this save.

    ``tag_dir`` is a path or a URL that fsspec reads (zeroelastic.io.paths); a remote directory is listed once.

    ``near_rank`` is the rank whose own model states file is read when no record tells the world size; a rank that the
    save did not have takes rank 0's. Tensor parallel ranks have to say which slices of tensors they have, as
    DeepSpeed's maps do. For those that do not, ``tp`` chooses the files of one, and states how many there have to be:
    each is then a checkpoint by itself. ``compare_directories`` holds the zip directory of each file that is
    opened against the record's digest of it. Raises MissingFileError (no directory, a rank's file missing),
    CheckpointError (sizes that contradict the record, files of two precisions), UnsupportedError (other stages, another
    tensor parallel size than that of ``tp``), and its subclass UndescribedSlicesError.

    Example::

        checkpoint = open_checkpoint("ckpt/global_step100")
        checkpoint.shard(0).groups[0].options["lr"]
    """
    tag_dir = watch(as_path(tag_dir))
    if inventory is None:
        inventory = list_files(tag_dir)
    names, data_size = inventory.names, inventory.data_size
    refuse_unfinished(tag_dir, names)
    files = _state_files(tag_dir, inventory, tp)
    checkpoint = Checkpoint(
        tag_dir=tag_dir,
        topology=Topology(0, files.tensor_size),
        inventory=inventory,
        tp=tp or NO_TENSOR_PARALLEL,
        compare_directories=compare_directories,
        near_rank=near_rank,
    )
    if data_size is None:
        first = _read_first_model(checkpoint, files, tp)
        data_size = first.world_size
        if first.tensor_size != files.tensor_size and checkpoint.tp.size == 1:
            files = rank_files(tag_dir, names, tensor_size=first.tensor_size)
    checkpoint.use_files(files, data_size)
    _check_none_missing(checkpoint, files)
    check_sizes(tag_dir, inventory)
    checkpoint.stale_files = files.stale(data_size)
    return checkpoint


def open_committed(tag_dir: str | os.PathLike[str] | FilePath) -> Checkpoint:
    """Open a checkpoint. Raises as ``open_checkpoint``, and MissingFileError for an elastic save without a record."""
    checkpoint = open_checkpoint(tag_dir)
    if not checkpoint.inventory.is_recorded:
        checkpoint.require_committed(checkpoint.shard(0))
    return checkpoint


def _state_files(tag_dir: FilePath, inventory: Inventory, tp: TensorParallel | None) -> StateFiles:
    """The optimizer and the model states files by rank: of all ranks, or of one of several tensor parallel ranks.

    Raises UnsupportedError where another number of tensor parallel ranks saved than ``tp`` states.
    """
    names, tensor_size = inventory.names, inventory.tensor_size
    if tp is None or tp.size == 1:
        if inventory.recorded_by_tensor_rank:
            raise UndescribedSlicesError(
                f"{other_tp_size(tag_dir, tensor_size, tp)} Its tensor parallel ranks were recorded each by itself."
            )
        return rank_files(tag_dir, names, tensor_size=tensor_size)
    ranks = (file.tp_rank for file in map(parse_rank_file, names) if file is not None)
    saved = max(ranks, default=tp.size - 1) + 1 if tensor_size is None else tensor_size
    if saved != tp.size:
        raise other_tp_size(tag_dir, saved, tp)
    return rank_files(tag_dir, names, tp.rank)


def _read_first_model(checkpoint: Checkpoint, files: StateFiles, tp: TensorParallel | None) -> ModuleHeader:
    """Open the model states of ``near_rank``, or of rank 0 where the save has no such rank: they state the sizes."""
    tag_dir, near = checkpoint.tag_dir, checkpoint.near_rank
    rank = near % files.tensor_size if files.whole_model else near
    rank = rank if rank in files.models else 0
    if rank not in files.models:
        name = model_file_name(rank, 0 if tp is None else tp.rank, whole=False)
        raise MissingFileError(f"{tag_dir}: {name} is missing. The checkpoint is incomplete.")
    file = read_torch_file(tag_dir / files.models[rank], foreign="inert")
    try:
        return checkpoint.take_model_states(file, rank, data_size=None, tp=tp if checkpoint.tp.size > 1 else None)
    except UndescribedSlicesError as error:
        saved = file.root.get("mp_world_size") if isinstance(file.root, dict) else None
        raise UndescribedSlicesError(f"{other_tp_size(tag_dir, saved, tp)} {error}") from None


def _check_none_missing(checkpoint: Checkpoint, files: StateFiles) -> None:
    """Raise MissingFileError unless each rank has both files."""
    num_missing, names = files.missing(checkpoint.topology.data_size)
    if not num_missing:
        return
    why = "incomplete, or its files are on other nodes (use_node_local_storage)."
    if checkpoint.inventory.over_nodes:
        seen = (files.optim, range(checkpoint.world_size)), (files.models, range(len(checkpoint.model_files)))
        gone = sorted({rank for has, due in seen for rank in due if rank not in has})
        ranks = f"rank{'s' if len(gone) > 1 else ''} {some(map(str, gone))}"
        why = f"incomplete: no rank of this run sees the files of saved {ranks}. {_ON_NO_NODE}"
    raise MissingFileError(
        f"{checkpoint.tag_dir}: {num_missing} of the files of {counted(checkpoint.world_size, 'rank')} "
        f"{'is' if num_missing == 1 else 'are'} missing: {some(names, count=num_missing)}. The checkpoint is {why}"
    )
