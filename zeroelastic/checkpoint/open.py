"""A tag directory as one checkpoint: its files, its record, its format, and shards opened as they are needed.

Only directory names, the commit record, and the headers of the files that are asked for are read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, overload

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, read_record
from zeroelastic.checkpoint.contradictions import other_directory, other_save, other_stage
from zeroelastic.checkpoint.file_table import FileNames, FileSizes
from zeroelastic.checkpoint.marks import refuse_unfinished
from zeroelastic.checkpoint.model_states import ModelStates, model_states_of, open_model_states
from zeroelastic.checkpoint.one_save import pin
from zeroelastic.checkpoint.optimizer_file import Shard
from zeroelastic.checkpoint.optimizer_reader import open_shard
from zeroelastic.checkpoint.shared_weights import SharedWeights
from zeroelastic.checkpoint.tag_files import (
    NO_TENSOR_PARALLEL,
    OFFLINE_TENSOR_PARALLEL,
    TensorParallel,
    claimed_twice,
    model_file_name,
    other_tp_size,
    parse_rank_file,
)
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, counted, some
from zeroelastic.io.paths import FilePath, RemotePath, as_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import Blocks, read_torch_file

_ON_NO_NODE = "The nodes that hold it have to take part, or use an older tag."


@dataclass(frozen=True, slots=True)
class Listing:
    """What the ranks of a job found in a tag directory together: the ``names`` of its files, and its ``record``.

    ``sizes`` are those of the files that this rank has looked at for all: where many ranks share the work, few of them,
    and ``names`` are patterns. ``world_size`` is what headers say where
    there is no record, if that is known. ``over_nodes``: the ranks see different directories, and this is what any of
    them sees; ``remote_files`` are the files that only other ranks see. ``record_bytes`` is what this rank read of the
    record.
    """

    names: Collection[str]
    sizes: Mapping[str, int]
    record: CommitRecord | None
    world_size: int | None = None
    remote_files: frozenset[str] = frozenset()
    record_bytes: int = 0
    over_nodes: bool = False


class FilesByRank(Sequence[FilePath]):
    """Files of a directory by rank; a path is made when it is asked for, of thousands that a rank needs few of."""

    def __init__(self, directory: FilePath, names: Iterable[str]) -> None:
        self._directory, self._names = directory, tuple(names)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, rank: int) -> FilePath: ...
    @overload
    def __getitem__(self, rank: slice) -> FilesByRank: ...
    def __getitem__(self, rank: int | slice) -> FilePath | FilesByRank:
        if isinstance(rank, slice):
            return FilesByRank(self._directory, self._names[rank])
        return self._directory / self._names[rank]


@dataclass(slots=True)
class Checkpoint:
    """The files of one tag and what is known of them.

    Invariants: each of ``world_size`` ranks has an optimizer file in ``optim_files``; ``model_files`` has a file of
    each rank at ZeRO stage 3, and one file of the whole model at stages 1 and 2 (``whole_model``); where there is a
    commit record, every file has the size that it states. Of a tensor parallel run
    these are the files of one tensor parallel rank, ``tp``, and ``world_size`` is the data parallel size.
    ``remote_files`` are names of files that only other ranks see: their headers are parsed from bytes that a rank which
    sees the file has read (``through``).
    ``compare_directories``: whether a file that is opened must have the zip directory that the record states.
    """

    tag_dir: FilePath
    world_size: int
    optim_files: Sequence[FilePath]
    model_files: Sequence[FilePath]
    record: CommitRecord | None
    stale_files: tuple[str, ...]
    record_bytes: int = 0
    tp: TensorParallel = NO_TENSOR_PARALLEL
    remote_files: frozenset[str] = frozenset()
    compare_directories: bool = True
    whole_model: bool = False
    _shards: dict[int, Shard] = field(default_factory=dict, repr=False)
    _models: dict[int, ModelStates] = field(default_factory=dict, repr=False)

    def shard(self, rank: int, *, through: Blocks | None = None) -> Shard:
        """The header of one rank's optimizer file; parsed once. Raises CheckpointError, UnsupportedError."""
        if rank not in self._shards:
            path = self.optim_files[rank]
            rigid = None
            recorded_rigid = self.record is not None and self.record.checkpoint_format == "rigid"
            if not self._models and (self.whole_model or recorded_rigid):
                self.model_states(rank)
            if self._models:
                rigid = next(iter(self._models.values())).sub_groups
            shard = open_shard(
                path, rank, world_size=self.world_size, rigid_params=rigid, tp_rank=self.tp.rank, through=through
            )
            mixed = other_stage(shard, self.model_files[0].name) or other_save(shard, self.record)
            if mixed is not None:
                raise CheckpointError(mixed)
            self._check_directory(path, shard.directory)
            self._shards[rank] = shard
        return self._shards[rank]

    def model_states(self, rank: int, *, through: Blocks | None = None) -> ModelStates:
        """The layout part of one rank's model states file, or of the only one; parsed once. Raises CheckpointError."""
        rank = 0 if self.whole_model else rank
        if rank not in self._models:
            path = self.model_file(rank)
            file = read_torch_file(path, foreign="inert", through=through, columns=True)
            model = model_states_of(file, rank, world_size=self.world_size, tp=self.tp)
            self._check_directory(path, model.directory)
            self._models[rank] = model
        return self._models[rank]

    def model_file(self, rank: int) -> FilePath:
        """The model states file that is a saved rank's: its own, or the one of the whole module."""
        return self.model_files[0 if self.whole_model else rank]

    def _check_directory(self, path: FilePath, found: str) -> None:
        recorded = self.record.directories.get(path.name) if self.record is not None else None
        if self.compare_directories and recorded not in (None, found):
            raise CheckpointError(other_directory(path))

    @property
    def has_models(self) -> bool:
        """Whether a model states header was parsed, which names the parameters of a rigid checkpoint."""
        return bool(self._models)

    @property
    def shared(self) -> SharedWeights | None:
        """What the checkpoint takes from shared files, by a model states header that was parsed."""
        return next((model.shared for model in self._models.values()), None)

    @property
    def header_bytes(self) -> int:
        """Bytes read so far for headers, scalars and the commit record."""
        shards = sum(shard.header_bytes for shard in self._shards.values())
        files = self.record.files if self.record is not None else None
        rows = files.rows.bytes_read if isinstance(files, FileSizes) else 0
        return shards + sum(model.header_bytes for model in self._models.values()) + self.record_bytes + rows

    @property
    def opened(self) -> tuple[FilePath, ...]:
        """The checkpoint files whose headers were read here so far."""
        shards = tuple(shard.path for shard in self._shards.values())
        opened = shards + tuple(model.path for model in self._models.values())
        return tuple(path for path in opened if path.name not in self.remote_files)


def open_checkpoint(
    tag_dir: str | os.PathLike[str] | RemotePath,
    *,
    near_rank: int = 0,
    tp: TensorParallel | None = None,
    listing: Listing | None = None,
    sizes: Mapping[str, int] | None = None,
    compare_directories: bool = True,
) -> Checkpoint:
    """Look at a tag directory: which files, how many ranks, which record. Opens at most one model states header.

    The directory is pinned: all that is read of the checkpoint later comes from it, whatever its path leads to by then.

    ``tag_dir`` is a path or a URL that fsspec reads (zeroelastic.io.paths); a remote directory is listed once.
    ``sizes`` are its files by name, where a caller has listed it already.

    ``near_rank`` is the rank whose own model states file is read when no record tells the world size; a rank that the
    save did not have takes rank 0's. ``tp`` chooses the files of one tensor parallel rank, and states how many there
    have to be; without it there may be only one. ``compare_directories`` holds the zip directory of each file that is
    opened against the record's digest of it. Raises MissingFileError (no directory, a rank's file missing),
    CheckpointError (sizes that contradict the record, files of two precisions), UnsupportedError (other stages, another
    tensor parallel size).

    Example::

        checkpoint = open_checkpoint("ckpt/global_step100")
        checkpoint.shard(0).groups[0].options["lr"]
    """
    tag_dir = pin(as_path(tag_dir))
    if listing is None:
        sizes = file_sizes(tag_dir) if sizes is None else sizes
        names: Collection[str] = sizes
    else:
        sizes, names = listing.sizes, listing.names
    refuse_unfinished(tag_dir, names)
    files, record = _files_and_record(tag_dir, names, tp, listing)
    early: ModelStates | None = None
    if record is not None:
        world_size = record.world_size
    elif listing is not None and listing.world_size is not None:
        world_size = listing.world_size
    else:
        early = _first_model_states(tag_dir, files.models, near_rank, tp)
        world_size = early.world_size
    tp_rank = tp.rank if tp is not None else 0
    over_nodes = listing is not None and listing.over_nodes
    _check_none_missing(tag_dir, files, world_size, tp_rank=tp_rank, over_nodes=over_nodes)
    if record is not None:
        check_sizes(tag_dir, names, sizes, record)
    stale = [names[rank] for names in (files.optim, files.models) for rank in sorted(names) if rank >= world_size]
    checkpoint = Checkpoint(
        tag_dir=tag_dir,
        world_size=world_size,
        optim_files=FilesByRank(tag_dir, (files.optim[rank] for rank in range(world_size))),
        model_files=FilesByRank(tag_dir, (files.models[rank] for rank in range(files.num_models(world_size)))),
        record=record,
        stale_files=tuple(stale),
        record_bytes=_record_bytes(sizes, record) if listing is None else listing.record_bytes,
        tp=tp or NO_TENSOR_PARALLEL,
        remote_files=frozenset() if listing is None else listing.remote_files,
        compare_directories=compare_directories,
        whole_model=files.whole_model,
    )
    if early is not None:
        checkpoint._models[early.rank] = early
    return checkpoint


def _files_and_record(
    tag_dir: FilePath, names: Collection[str], tp: TensorParallel | None, listing: Listing | None
) -> tuple[StateFiles, CommitRecord | None]:
    """The optimizer and the model states files of ``tp`` by rank, and the commit record."""
    if tp is None:
        files = rank_files(tag_dir, names)
        return files, read_record(tag_dir) if listing is None else listing.record
    record = read_record(tag_dir) if listing is None else listing.record
    _check_tp_size(tag_dir, names, record, tp)
    return rank_files(tag_dir, names, tp.rank), record


def _first_model_states(
    tag_dir: FilePath, models: Mapping[int, str], near_rank: int, tp: TensorParallel | None
) -> ModelStates:
    """The model states of ``near_rank``, or of rank 0 where the save has no such rank."""
    rank = near_rank if near_rank in models else 0
    if rank not in models:
        name = model_file_name(rank, 0 if tp is None else tp.rank, whole=False)
        raise MissingFileError(f"{tag_dir}: {name} is missing. The checkpoint is incomplete.")
    return open_model_states(tag_dir / models[rank], rank, world_size=None, tp=tp)


def _check_none_missing(
    tag_dir: FilePath,
    files: StateFiles,
    world_size: int,
    *,
    tp_rank: int,
    over_nodes: bool,
) -> None:
    """Raise MissingFileError unless each rank has both files; ``over_nodes``: the files that any rank sees."""
    num_models = files.num_models(world_size)
    expected = (files.optim, world_size), (files.models, num_models)
    num_missing = sum(count - sum(rank < count for rank in names) for names, count in expected)
    if not num_missing:
        return
    names = (
        name
        for rank in range(world_size)
        for present, count, name in (
            (files.optim, world_size, f"*zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}_optim_states.pt"),
            (files.models, num_models, model_file_name(rank, tp_rank, whole=files.whole_model)),
        )
        if rank not in present and rank < count
    )
    missing = some(islice(names, 6), count=num_missing)
    why = "incomplete, or its files are on other nodes (use_node_local_storage)."
    if over_nodes:
        seen = (files.optim, range(world_size)), (files.models, range(num_models))
        gone = [str(rank) for rank in range(world_size) if any(rank in due and rank not in has for has, due in seen)]
        why = f"incomplete: no rank of this run sees what {some(gone)} of the saved ranks wrote. {_ON_NO_NODE}"
    raise MissingFileError(
        f"{tag_dir}: {num_missing} of the files of {counted(world_size, 'rank')} {'is' if num_missing == 1 else 'are'} "
        f"missing: {missing}. The checkpoint is {why}"
    )


def _record_bytes(sizes: Mapping[str, int], record: CommitRecord | None) -> int:
    return sizes.get(RECORD_NAME, 0) if record is not None else 0


def saved_sizes(tag_dir: FilePath) -> tuple[int, int]:
    """The data parallel and the tensor parallel size of a save, also of one whose layout is not covered.

    From the record, or else from one model states file. Raises MissingFileError, CheckpointError, UnsupportedError.
    """
    record = read_record(tag_dir)
    if record is not None:
        return record.world_size, record.tp_size
    names = file_sizes(tag_dir)
    models = rank_files(tag_dir, names, 0).models
    name = models.get(min(models, default=0))
    if name is None:
        rank_files(tag_dir, names)  # raises the error for what this is
        raise MissingFileError(f"{tag_dir}: holds no zero_pp_rank_*_model_states.pt. The checkpoint is incomplete.")
    return stated_sizes(tag_dir / name)


def stated_sizes(path: FilePath) -> tuple[int, int]:
    """The data parallel and the tensor parallel size by a model states file. Raises CheckpointError."""
    root = read_torch_file(path, foreign="inert", columns=True).root
    dp_size, tp_size = (root.get(f"{group}_world_size") if isinstance(root, dict) else None for group in ("dp", "mp"))
    if type(dp_size) is not int or type(tp_size) is not int:
        raise CheckpointError(f"{path}: states no world size. It is not a ZeRO model states file.")
    return dp_size, tp_size


def _check_tp_size(tag_dir: FilePath, names: Iterable[str], record: CommitRecord | None, tp: TensorParallel) -> None:
    """Raise UnsupportedError where another number of tensor parallel ranks saved, by the record or by the names."""
    if record is not None:
        saved = record.tp_size
    else:
        files = [file for file in map(parse_rank_file, names) if file is not None]
        saved = max((file.tp_rank + 1 for file in files), default=tp.size)
    if saved != tp.size:
        raise other_tp_size(tag_dir, saved, tp)


class StateFiles(NamedTuple):
    """The names of the optimizer and the model states files of a tag by rank.

    ``whole_model``: rank 0's model states file has the whole weights, and no other rank writes one (stages 1 and 2).
    """

    optim: dict[int, str]
    models: dict[int, str]
    whole_model: bool

    def num_models(self, world_size: int) -> int:
        """How many ranks of a save of ``world_size`` ranks write a model states file."""
        return 1 if self.whole_model else world_size


def rank_files(tag_dir: FilePath, names: Iterable[str], tp_rank: int | None = None) -> StateFiles:
    """The optimizer and the model states file of each rank among the files of a directory.

    Without ``tp_rank``, files of several tensor parallel ranks are refused. Raises MissingFileError where there are
    none, CheckpointError where two claim the same rank, UnsupportedError.
    """
    found: dict[str, dict[int, str]] = {"optimizer": {}, "model": {}, "whole_model": {}}
    for name in sorted(names):
        file = parse_rank_file(name)
        if file is None or (tp_rank is not None and file.tp_rank != tp_rank):
            continue
        if tp_rank is None and file.tp_rank != 0:
            raise UnsupportedError(
                f"{tag_dir}: {name} belongs to tensor parallel rank {file.tp_rank}. {OFFLINE_TENSOR_PARALLEL}"
            )
        files = found[file.kind]
        if file.rank in files:
            raise claimed_twice(tag_dir, files[file.rank], name, file.rank)
        files[file.rank] = name
    optim, models, whole = found.values()
    if whole and not models and not optim:
        raise UnsupportedError(
            f"{tag_dir}: has {whole[0]} and no optimizer files (*_optim_states.pt). It is of ZeRO stage 0, whose "
            "optimizer state does not name its parameters, so that only a stage 0 run resumes it, or of stage 1 or 2 "
            "without its optimizer files."
        )
    if not models and not optim:
        raise MissingFileError(
            f"{tag_dir}: holds no ZeRO checkpoint (zero_pp_rank_*_optim_states.pt and *_model_states.pt)."
        )
    return StateFiles(optim, models or whole, bool(whole) and not models)


def check_sizes(tag_dir: FilePath, names: Collection[str], sizes: Mapping[str, int], record: CommitRecord) -> None:
    """Raise CheckpointError unless all files of the record are there, with its sizes where these are known."""
    want = record.files
    all_there = isinstance(want, FileSizes) and isinstance(names, FileNames) and want.rows.names <= names
    missing = [] if all_there else [name for name in want if name not in names]
    other = [name for name, size in sizes.items() if name in want and size != want[name]]
    wrong = [
        f"{name} has {sizes[name]} bytes, not {want[name]}" if name in sizes else f"{name} is missing"
        for name in sorted([*missing, *other])
    ]
    if wrong:
        raise CheckpointError(
            f"{tag_dir}: contradicts its commit record: {some(wrong)}. Files are truncated, damaged or from another "
            f"save. (If DeepSpeed overwrote this tag without zeroelastic, remove {RECORD_NAME}.)"
        )
