"""A tag directory as one checkpoint: its files, its record, its format, and shards opened as they are needed.

Nothing is read but directory names, the commit record, and the headers of the files that are asked for. Also reads
the parts of ``*_model_states.pt`` that belong to the layout: parameter shapes and frozen parameters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, brief, shown
from zeroelastic.layout import Int64Array, Layout, Param, partition_numel, unpacked_layout
from zeroelastic.one_save import pin
from zeroelastic.record import RECORD_NAME, CommitRecord, read_record
from zeroelastic.shard import FROZEN, Pieces, Shard, checked_param, checked_params, open_shard
from zeroelastic.storage import FilePath, RemotePath, as_path, file_sizes
from zeroelastic.torchfile import DTYPE_BYTES, Blocks, Stub, TensorRef, TorchFile, read_torch_file

_OPTIM_FILE = re.compile(r"^(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
_MODEL_FILE = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_SHOWN = 6
_MAX_WORLD_SIZE = 1 << 24
_ON_NO_NODE = "The nodes that hold it have to take part, or use an older tag."
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""What DeepSpeed sets an engine's counters to."""

_STATES = ("lr_scheduler", "random_ltd", "data_sampler")
_OTHER_STAGES = re.compile(r"^mp_rank_\d+_model_states\.pt$")


class TensorParallel(NamedTuple):
    """One tensor parallel rank of several, each of which is a ZeRO-3 run of its own with its own files and slices."""

    rank: int = 0
    size: int = 1


NO_TENSOR_PARALLEL = TensorParallel()

OFFLINE_TENSOR_PARALLEL = (
    "The command line works on checkpoints without tensor parallelism. A training job of the same tensor parallel size "
    "resumes this one at any data parallel size, and DeepSpeed's ds_to_universal converts it."
)


@dataclass(frozen=True, slots=True)
class ModelStates:
    """What one rank's ``*_model_states.pt`` says about the layout; the module itself is not looked at.

    ``sub_groups`` are the trained parameters in flat order; ``frozen`` those that the optimizer does not have, or None
    where they were excluded from the save; ``frozen_pieces`` where this rank's parts of them are; ``directory`` is the
    file's digest of its zip directory. ``values`` are the counters and states that DeepSpeed loads from there;
    ``others`` the shapes of what is no parameter in the module's state, None for what is no tensor.
    """

    path: FilePath
    size: int
    rank: int
    world_size: int
    global_steps: int
    sub_groups: tuple[tuple[Param, ...], ...]
    frozen: Layout | None
    frozen_pieces: Pieces | None
    header_bytes: int
    directory: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    others: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)

    def fragments(self) -> list[tuple[int, int]]:
        """(offset, nbytes) in the file of this rank's part of each frozen parameter that has elements."""
        if self.frozen is None or self.frozen_pieces is None:
            return []
        return [
            (int(self.frozen_pieces.offset[i]), int(self.frozen.part[i]) * DTYPE_BYTES[self.frozen_pieces.dtype[i]])
            for i in range(self.frozen.num_params)
            if self.frozen_pieces.offset[i] >= 0
        ]


@dataclass(frozen=True, slots=True)
class Listing:
    """What is known of a tag directory whose files are not all seen here: the sizes of those that somebody sees.

    ``away`` are the ones that others see; ``world_size`` is what headers say where there is no ``record``.
    ``record_bytes`` is what was read here of the record.
    """

    sizes: Mapping[str, int]
    record: CommitRecord | None
    world_size: int
    away: frozenset[str]
    record_bytes: int = 0


@dataclass(slots=True)
class Checkpoint:
    """The files of one tag and what is known of them.

    Invariants: ``world_size`` ranks each have one optimizer and one model states file in ``optim_files`` and
    ``model_files``; where there is a commit record, every file has the size that it states. Of a tensor parallel run
    these are the files of one tensor parallel rank, ``tp``, and ``world_size`` is the data parallel size. ``away`` are
    files that this process does not see: their headers are parsed from what those who do have read (``through``).
    ``compare_directories``: whether a file that is opened must have the zip directory that the record states.
    """

    tag_dir: FilePath
    world_size: int
    optim_files: tuple[FilePath, ...]
    model_files: tuple[FilePath, ...]
    record: CommitRecord | None
    stale_files: tuple[str, ...]
    record_bytes: int = 0
    tp: TensorParallel = NO_TENSOR_PARALLEL
    away: frozenset[str] = frozenset()
    compare_directories: bool = True
    _shards: dict[int, Shard] = field(default_factory=dict, repr=False)
    _models: dict[int, ModelStates] = field(default_factory=dict, repr=False)

    def shard(self, rank: int, *, through: Blocks | None = None) -> Shard:
        """The header of one rank's optimizer file; parsed once. Raises CheckpointError, UnsupportedError."""
        if rank not in self._shards:
            path = self.optim_files[rank]
            rigid = None
            if not self._models and self.record is not None and self.record.checkpoint_format == "rigid":
                self.model_states(rank)
            if self._models:
                rigid = next(iter(self._models.values())).sub_groups
            shard = open_shard(
                path, rank, world_size=self.world_size, rigid_params=rigid, tp_rank=self.tp.rank, through=through
            )
            if self.record is not None and shard.save_id not in (None, self.record.save_id):
                raise CheckpointError(
                    f"{path}: belongs to save {str(shard.save_id)[:8]}, the commit record to "
                    f"{self.record.save_id[:8]}. Files of two saves are mixed in this directory."
                )
            self._check_directory(path, shard.directory)
            self._shards[rank] = shard
        return self._shards[rank]

    def model_states(self, rank: int, *, through: Blocks | None = None) -> ModelStates:
        """The layout part of one rank's model states file; parsed once. Raises CheckpointError."""
        if rank not in self._models:
            path = self.model_files[rank]
            file = read_torch_file(path, foreign="inert", through=through)
            model = model_states_of(file, rank, world_size=self.world_size, tp=self.tp)
            self._check_directory(path, model.directory)
            self._models[rank] = model
        return self._models[rank]

    def _check_directory(self, path: FilePath, found: str) -> None:
        recorded = self.record.directories.get(path.name) if self.record is not None else None
        if self.compare_directories and recorded not in (None, found):
            raise CheckpointError(other_directory(path))

    @property
    def has_models(self) -> bool:
        """Whether a model states header was parsed, which names the parameters of a rigid checkpoint."""
        return bool(self._models)

    @property
    def header_bytes(self) -> int:
        """Bytes read so far for headers, scalars and the commit record."""
        shards = sum(shard.header_bytes for shard in self._shards.values())
        return shards + sum(model.header_bytes for model in self._models.values()) + self.record_bytes

    @property
    def opened(self) -> tuple[FilePath, ...]:
        """The checkpoint files whose headers were read here so far."""
        shards = tuple(shard.path for shard in self._shards.values())
        opened = shards + tuple(model.path for model in self._models.values())
        return tuple(path for path in opened if path.name not in self.away)


def other_directory(path: FilePath) -> str:
    """The sentence about a file whose zip directory is not the one that the commit record states."""
    return (
        f"{path}: its zip directory, which has the sizes and checksums of everything in it, is not the one that "
        f"{RECORD_NAME} states. One of the two is damaged, altered or from another save."
    )


def source_ranks(numels: Iterable[int], *, saved_world_size: int, world_size: int, rank: int) -> tuple[int, ...]:
    """The saved ranks that hold elements of what ``rank`` of ``world_size`` owns, from parameter sizes alone.

    Closed form; empty when the rank owns nothing.
    """
    numel = np.array([n for n in numels if n > 0], dtype=np.int64)
    part = -(-numel // world_size)
    start = np.minimum(part * rank, numel)
    end = np.minimum(part * (rank + 1), numel)
    owner = end > start
    saved_part = -(-numel[owner] // saved_world_size)
    first, last = start[owner] // saved_part, (end[owner] - 1) // saved_part
    marks = np.zeros(saved_world_size + 1, dtype=np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, last + 1, -1)
    return tuple(np.flatnonzero(np.cumsum(marks)[:-1] > 0).tolist())


def open_checkpoint(
    tag_dir: str | os.PathLike[str] | RemotePath,
    *,
    near_rank: int = 0,
    tp: TensorParallel | None = None,
    listing: Listing | None = None,
    compare_directories: bool = True,
) -> Checkpoint:
    """Look at a tag directory: which files, how many ranks, which record. Opens at most one model states header.

    The directory is pinned: all that is read of the checkpoint later comes from it, whatever its path leads to by then.

    ``tag_dir`` is a path or a URL that fsspec reads (zeroelastic.storage); a remote directory is listed once.

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
    sizes = file_sizes(tag_dir) if listing is None else listing.sizes
    if tp is not None:
        record = read_record(tag_dir) if listing is None else listing.record
        _check_tp_size(tag_dir, sizes, record, tp)
        optim, models = _rank_files(tag_dir, sizes, tp.rank)
    else:
        optim, models = _rank_files(tag_dir, sizes)
        record = read_record(tag_dir) if listing is None else listing.record
    mp_rank = f"mp_rank_{tp.rank if tp is not None else 0:02d}"
    early: ModelStates | None = None
    if record is not None:
        world_size = record.world_size
    elif listing is not None:
        world_size = listing.world_size
    else:
        rank = near_rank if near_rank in models else 0
        if rank not in models:
            raise MissingFileError(
                f"{tag_dir}: zero_pp_rank_{rank}_{mp_rank}_model_states.pt is missing. The checkpoint is incomplete."
            )
        early = open_model_states(tag_dir / models[rank], rank, world_size=None, tp=tp)
        world_size = early.world_size
    num_missing = sum(world_size - sum(rank < world_size for rank in files) for files in (optim, models))
    if num_missing:
        names = (
            pattern
            for rank in range(world_size)
            for files, pattern in (
                (optim, f"*zero_pp_rank_{rank}_{mp_rank}_optim_states.pt"),
                (models, f"zero_pp_rank_{rank}_{mp_rank}_model_states.pt"),
            )
            if rank not in files
        )
        missing = _some(tuple(islice(names, _SHOWN)), num_missing)
        why = "incomplete, or its files are on other nodes (use_node_local_storage)."
        if listing is not None:
            gone = [str(rank) for rank in range(world_size) if rank not in optim or rank not in models]
            why = f"incomplete: no rank of this run sees what {_some(gone)} of the saved ranks wrote. {_ON_NO_NODE}"
        raise MissingFileError(
            f"{tag_dir}: {num_missing} of the files of {world_size} ranks are missing: {missing}. The checkpoint is "
            + why
        )
    if record is not None:
        _check_sizes(tag_dir, sizes, record)
    stale = [files[rank] for files in (optim, models) for rank in sorted(files) if rank >= world_size]
    checkpoint = Checkpoint(
        tag_dir=tag_dir,
        world_size=world_size,
        optim_files=tuple(tag_dir / optim[rank] for rank in range(world_size)),
        model_files=tuple(tag_dir / models[rank] for rank in range(world_size)),
        record=record,
        stale_files=tuple(stale),
        record_bytes=_record_bytes(sizes, record) if listing is None else listing.record_bytes,
        tp=tp or NO_TENSOR_PARALLEL,
        away=frozenset() if listing is None else listing.away,
        compare_directories=compare_directories,
    )
    if early is not None:
        checkpoint._models[early.rank] = early
    return checkpoint


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
    name = next((name for name in sorted(names) if _MODEL_FILE.match(name) is not None), None)
    if name is None:
        _rank_files(tag_dir, names)  # says what this is
        raise MissingFileError(f"{tag_dir}: holds no zero_pp_rank_*_model_states.pt. The checkpoint is incomplete.")
    root = read_torch_file(tag_dir / name, foreign="inert").root
    dp_size, tp_size = (root.get(f"{group}_world_size") if isinstance(root, dict) else None for group in ("dp", "mp"))
    if type(dp_size) is not int or type(tp_size) is not int:
        raise CheckpointError(f"{tag_dir / name}: states no world size. It is not a ZeRO-3 model states file.")
    return dp_size, tp_size


class RankFile(NamedTuple):
    """What the name of a stage 3 file says: whose it is, and which of that rank's two."""

    kind: Literal["optimizer", "model"]
    rank: int
    tp_rank: int


def parse_rank_file(name: str) -> RankFile | None:
    """What a file name says, or None for one that no rank of a stage 3 run writes."""
    match = _OPTIM_FILE.match(name)
    if match is not None:
        return RankFile("optimizer", int(match[2]), int(match[3]))
    match = _MODEL_FILE.match(name)
    return None if match is None else RankFile("model", int(match[1]), int(match[2]))


def saved_as(folder: str, name: str) -> str | None:
    """The name under which a rank's file was saved, where that is another's; torch calls an archive after its file."""
    saved = f"{folder}.pt"
    if saved.removeprefix("bf16_") == name.removeprefix("bf16_") or not is_rank_file(saved):
        return None
    return saved


def is_rank_file(name: str) -> bool:
    """Whether a file name is one that a rank of DeepSpeed writes into a tag directory, at any ZeRO stage."""
    return any(pattern.match(name) is not None for pattern in (_OPTIM_FILE, _MODEL_FILE, _OTHER_STAGES))


def rank_files(tag_dir: FilePath, names: Iterable[str]) -> tuple[dict[int, str], dict[int, str]]:
    """The optimizer and the model states file of each rank among the files of a directory.

    Raises MissingFileError where there are none, CheckpointError where two claim the same rank, UnsupportedError.
    """
    return _rank_files(tag_dir, names)


def _check_tp_size(tag_dir: FilePath, names: Iterable[str], record: CommitRecord | None, tp: TensorParallel) -> None:
    """Raise UnsupportedError where another number of tensor parallel ranks saved, by the record or by the names."""
    if record is not None:
        saved = record.tp_size
    else:
        files = [file for file in map(parse_rank_file, names) if file is not None]
        saved = max((file.tp_rank + 1 for file in files), default=tp.size)
    if saved != tp.size:
        raise _other_tp_size(tag_dir, saved, tp)


def _other_tp_size(where: FilePath, saved: object, tp: TensorParallel | None) -> UnsupportedError:
    if tp is None:
        return UnsupportedError(
            f"{where}: was saved with {shown(saved)} tensor parallel ranks. {OFFLINE_TENSOR_PARALLEL}"
        )
    return UnsupportedError(
        f"{where}: was saved with tensor parallel size {shown(saved)}, and the run has {tp.size}. The data "
        "parallel size may change, the tensor parallel size may not: resume with the saved one, or convert the "
        "checkpoint with DeepSpeed's ds_to_universal first."
    )


def _rank_files(
    tag_dir: FilePath, names: Iterable[str], tp_rank: int | None = None
) -> tuple[dict[int, str], dict[int, str]]:
    optim: dict[int, str] = {}
    models: dict[int, str] = {}
    other_stage = False
    for name in sorted(names):
        other_stage |= _OTHER_STAGES.match(name) is not None
        for pattern, rank_at, files in ((_OPTIM_FILE, 2, optim), (_MODEL_FILE, 1, models)):
            match = pattern.match(name)
            if match is None:
                continue
            rank, mp_rank = int(match[rank_at]), int(match[rank_at + 1])
            if tp_rank is not None and mp_rank != tp_rank:
                continue
            if tp_rank is None and mp_rank != 0:
                raise UnsupportedError(
                    f"{tag_dir}: {name} belongs to tensor parallel rank {mp_rank}. {OFFLINE_TENSOR_PARALLEL}"
                )
            if rank in files:
                raise CheckpointError(
                    f"{tag_dir}: both {files[rank]} and {name} claim rank {rank}. Files of two saves are mixed in this "
                    "directory; remove those that do not belong."
                )
            files[rank] = name
    if not models and other_stage:
        raise UnsupportedError(
            f"{tag_dir}: is a ZeRO stage 1 or 2 checkpoint (mp_rank_*_model_states.pt); only stage 3 checkpoints are "
            "loaded into a stage 3 run. Resume with the stage that saved it, or take its weights with zero_to_fp32.py."
        )
    if not models and not optim:
        raise MissingFileError(f"{tag_dir}: holds no ZeRO-3 checkpoint (zero_pp_rank_*_model_states.pt).")
    return optim, models


def _check_sizes(tag_dir: FilePath, sizes: Mapping[str, int], record: CommitRecord) -> None:
    wrong = [
        f"{name} has {sizes[name]} bytes, not {want}" if name in sizes else f"{name} is missing"
        for name, want in sorted(record.files.items())
        if sizes.get(name) != want
    ]
    if wrong:
        raise CheckpointError(
            f"{tag_dir}: contradicts its commit record: {_some(wrong)}. Files are truncated, damaged or from another "
            f"save. (If DeepSpeed overwrote this tag without zeroelastic, remove {RECORD_NAME}.)"
        )


def _some(names: Sequence[str], count: int | None = None) -> str:
    count = len(names) if count is None else count
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def open_model_states(
    path: FilePath, rank: int, *, world_size: int | None, tp: TensorParallel | None = None
) -> ModelStates:
    """Parse what a model states file says about the layout; objects of unknown classes in it stay inert.

    With ``world_size`` given, a file that says otherwise raises CheckpointError.
    """
    return model_states_of(read_torch_file(path, foreign="inert"), rank, world_size=world_size, tp=tp)


def model_states_of(
    file: TorchFile, rank: int, *, world_size: int | None, tp: TensorParallel | None = None
) -> ModelStates:
    """``open_model_states`` of a file that was read already."""
    path, root = file.path, file.root
    if not isinstance(root, dict):
        raise CheckpointError(f"{path}: is not a DeepSpeed model states file.")
    misplaced = saved_as(file.folder, path.name)
    if misplaced is not None:
        raise CheckpointError(f"{path}: was saved as {misplaced}. Files of different ranks have changed places.")
    count = root.get("dp_world_size")
    if type(count) is not int or not 1 <= count <= _MAX_WORLD_SIZE:
        raise CheckpointError(f"{path}: dp_world_size is {shown(count)}. It is not a ZeRO-3 model states file.")
    if world_size is not None and count != world_size:
        raise CheckpointError(
            f"{path}: was saved by {count} ranks, the rest of the checkpoint by {world_size}. Files of two saves are "
            "mixed in this directory."
        )
    mp_world_size = root.get("mp_world_size", 1)
    if mp_world_size != (1 if tp is None else tp.size):
        raise _other_tp_size(path, mp_world_size, tp)
    tables = root.get("param_shapes")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f"{path}: holds no param_shapes. It is not a ZeRO-3 model states file.")
    module = root.get("module")
    if not isinstance(module, (dict, type(None))):
        raise CheckpointError(f"{path}: holds no state of the module: {shown(module)}. The file is damaged.")
    steps = root.get("global_steps")
    shapes, fragments = root.get("frozen_param_shapes"), root.get("frozen_param_fragments")
    frozen, pieces = None, None
    if isinstance(shapes, dict) and isinstance(fragments, dict):
        trained = {name for table in tables for name in table}  # DeepSpeed lists by requires_grad, which may change
        params = [checked_param(name, shape, path) for name, shape in shapes.items() if name not in trained]
        frozen = unpacked_layout(checked_params(params, path), count)
        offset = np.full(len(params), -1, dtype=np.int64)
        found = (fragments.get(param.name) for param in params)
        file.locate(fragment.storage.key for fragment in found if isinstance(fragment, TensorRef))
        dtype: dict[int, str] = {}
        for i, param in enumerate(params):
            fragment = fragments.get(param.name)
            want = partition_numel(param.numel, count)
            if not isinstance(fragment, TensorRef) or (param.numel > 0 and fragment.shape != (want,)):
                got = fragment.shape if isinstance(fragment, TensorRef) else shown(fragment)
                raise CheckpointError(
                    f"{path}: the part of frozen parameter {brief(param.name)} is {got}; {count} ranks imply "
                    f"({want},). The file is damaged, or the parameter was offloaded to NVMe when it was saved."
                )
            if param.numel > 0:
                offset[i] = file.extent(fragment).offset
            dtype[i] = fragment.dtype
        pieces = Pieces(path, dtype, offset)
    params_of = {name for table in (*tables, shapes if isinstance(shapes, dict) else {}) for name in table}
    return ModelStates(
        path=path,
        size=file.size,
        rank=rank,
        world_size=count,
        global_steps=steps if type(steps) is int else 0,
        sub_groups=tuple(tuple(checked_param(name, shape, path) for name, shape in table.items()) for table in tables),
        frozen=frozen,
        frozen_pieces=pieces,
        header_bytes=file.header_bytes,
        directory=file.directory,
        values={key: root[key] for key in (*COUNTERS, *_STATES) if key in root},
        others={
            str(name): value.shape if isinstance(value, TensorRef) else None
            for name, value in (module or {}).items()
            if name not in params_of and not isinstance(value, Stub)
        },
    )


def other_step(model: ModelStates, record: CommitRecord | None) -> str | None:
    """The sentence about module states of another step than the record's; None where they are of the same save.

    The zip directory that the record states for the file proves that: client state may have set the step.
    """
    if record is None or model.global_steps == record.global_steps:
        return None
    if record.directories.get(model.path.name) == model.directory:
        return None
    return (
        f"{model.path}: was saved at step {model.global_steps}, the commit record at step {record.global_steps}. "
        "Files of two saves are mixed in this directory."
    )


def compare_params(saved: Iterable[Param], live: Iterable[Param], *, kind: str) -> list[str]:
    """Every way in which two parameter lists disagree, as sentences: missing, unknown, and other shapes."""
    saved_shapes = {param.name: param.shape for param in saved}
    live_shapes = {param.name: param.shape for param in live}
    problems = [
        f"{kind} {name} {list(shape)} of the model is not in the checkpoint"
        for name, shape in live_shapes.items()
        if name not in saved_shapes
    ]
    problems += [
        f"{kind} {name} {list(shape)} of the checkpoint is not in the model"
        for name, shape in saved_shapes.items()
        if name not in live_shapes
    ]
    problems += [
        f"{kind} {name} has shape {list(saved_shapes[name])} in the checkpoint and {list(shape)} in the model"
        for name, shape in live_shapes.items()
        if name in saved_shapes and saved_shapes[name] != shape
    ]
    return problems


def frozen_layouts(models: Mapping[int, ModelStates]) -> Layout:
    """The saved layout of the frozen parameters; all the given ranks must agree on it."""
    layouts = [model.frozen for model in models.values() if model.frozen is not None]
    first = layouts[0]
    for model in models.values():
        if model.frozen is None or model.frozen.params != first.params:
            raise CheckpointError(
                f"{model.path}: lists other frozen parameters than its neighbours. Files of two saves are mixed."
            )
    return first


__all__ = [
    "COUNTERS",
    "FROZEN",
    "NO_TENSOR_PARALLEL",
    "OFFLINE_TENSOR_PARALLEL",
    "Checkpoint",
    "Int64Array",
    "Listing",
    "ModelStates",
    "RankFile",
    "TensorParallel",
    "compare_params",
    "frozen_layouts",
    "is_rank_file",
    "model_states_of",
    "open_checkpoint",
    "open_model_states",
    "other_directory",
    "other_step",
    "parse_rank_file",
    "rank_files",
    "saved_as",
    "saved_sizes",
    "source_ranks",
]
