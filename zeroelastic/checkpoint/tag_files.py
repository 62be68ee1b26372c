"""The files of a tag directory by their names: ranks' files, the commit record, leftovers, and unrecognized files.

Tensor parallel ranks each save a ZeRO checkpoint of their own into the same directory. No file is opened here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, shown
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, list_directory

OPTIM_FILE = re.compile(r"^(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
MODEL_FILE = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
WHOLE_MODEL_FILE = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
"""What data parallel rank 0 writes where every rank has the whole weights: at ZeRO stages 0, 1 and 2."""
EXPERT_FILE = re.compile(r"^layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt$")
"""The weights of one expert of a mixture-of-experts layer, at ZeRO stages 0, 1 and 2."""
SAVE_ID = "zeroelastic_save_id"
"""The entry of a rank's files that names their save; those of DeepSpeed alone have none."""


class RankFile(NamedTuple):
    """What a file name says: which kind of file it is, and of which rank. ``whole_model`` is that of stages 0, 1, 2."""

    kind: Literal["optimizer", "model", "whole_model"]
    rank: int
    tp_rank: int


def parse_rank_file(name: str) -> RankFile | None:
    """What a file name says, or None for one that no rank of a ZeRO run writes."""
    match = OPTIM_FILE.match(name)
    if match is not None:
        return RankFile("optimizer", int(match[2]), int(match[3]))
    match = MODEL_FILE.match(name)
    if match is not None:
        return RankFile("model", int(match[1]), int(match[2]))
    match = WHOLE_MODEL_FILE.match(name)
    return None if match is None else RankFile("whole_model", 0, int(match[1]))


def model_file_name(rank: int, tp_rank: int, *, whole: bool) -> str:
    """The name of a rank's model states file; ``whole`` where rank 0 writes the weights for all ranks."""
    return f"{'' if whole else f'zero_pp_rank_{rank}_'}mp_rank_{tp_rank:02d}_model_states.pt"


def expert_file_name(layer: int, expert: int, tp_rank: int = 0) -> str:
    """The name of the file with the weights of one expert."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{tp_rank:02d}_model_states.pt"


def saved_as(folder: str, name: str) -> str | None:
    """The name under which a rank's file was saved, where that is another's; torch calls an archive after its file."""
    saved = f"{folder}.pt"
    if saved.removeprefix("bf16_") == name.removeprefix("bf16_") or not is_rank_file(saved):
        return None
    return saved


def is_rank_file(name: str) -> bool:
    """Whether a file name is one that a rank of DeepSpeed writes into a tag directory, at any ZeRO stage."""
    return parse_rank_file(name) is not None or EXPERT_FILE.match(name) is not None


class TensorParallel(NamedTuple):
    """One tensor parallel rank of several, each of which is a ZeRO-3 run of its own with its own files and slices."""

    rank: int = 0
    size: int = 1


NO_TENSOR_PARALLEL = TensorParallel()

OFFLINE_TENSOR_PARALLEL = (
    "Its files do not say which slices of tensors they have. A training job of the same tensor parallel size resumes "
    "it at any data parallel size, and DeepSpeed's ds_to_universal converts it."
)


def other_tp_size(where: FilePath, saved: object, tp: TensorParallel | None, *, stage: int = 3) -> UnsupportedError:
    """The error about a save of another tensor parallel size than the run's; without ``tp``, than 1.

    ``stage`` is the run's. DeepSpeed's conversion of a save without tensor parallelism fails at stage 3 (0.19.8).
    """
    if tp is None:
        return UnsupportedError(
            f"{where}: was saved with {shown(saved)} tensor parallel ranks. {OFFLINE_TENSOR_PARALLEL}"
        )
    convert = ", or convert the checkpoint with DeepSpeed's ds_to_universal first"
    if saved == 1:
        convert = "" if stage == 3 else f"{convert} (--inject_missing_state)"
    return UnsupportedError(
        f"{where}: was saved with tensor parallel size {shown(saved)}, and the run has {tp.size}. The tensor parallel "
        f"size may not change: resume with the saved one{convert}."
    )


SWAP_FOLDER = "offloaded_tensors"
"""DeepSpeed's raw copies of what a run had offloaded to NVMe, one folder per rank."""

Kind = Literal["zero-3", "zero-1-2", "universal"]

_TEMPORARY = re.compile(r".*\.(tmp|temp|part|partial|incomplete)|\.nfs.*")
_MAX_NAMES = 1000


@dataclass(frozen=True, slots=True)
class TagListing:
    """What is in a tag directory.

    ``optim`` and ``models`` are the file names by (rank, tensor parallel rank); of ``zero-1-2`` only rank 0 has model
    states. ``duplicates`` are further files of a (rank, tensor parallel rank) that already has one, each with the error
    about it. ``temporaries`` are
    files of a save that was interrupted or is still running; ``expert_files`` have the weights of experts;
    ``unknown_files`` are none of these.
    """

    directory: FilePath
    kind: Kind
    sizes: Mapping[str, int]
    optim: Mapping[tuple[int, int], str]
    models: Mapping[tuple[int, int], str]
    duplicates: Mapping[str, CheckpointError]
    temporaries: tuple[str, ...]
    expert_files: tuple[str, ...]
    unknown_files: tuple[str, ...]
    folders: tuple[str, ...]

    @property
    def tp_size(self) -> int:
        """Tensor parallel ranks by the names of files; at least 1."""
        return max((tp_rank for _, tp_rank in (*self.optim, *self.models)), default=0) + 1

    @property
    def num_ranks(self) -> int:
        """One more than the highest rank that a file is named after."""
        return max((rank for rank, _ in (*self.optim, *self.models)), default=-1) + 1

    def missing(self, data_size: int, tp_size: int | None = None) -> tuple[int, tuple[str, ...]]:
        """How many files of ``data_size`` data parallel ranks are missing, and the names of the first of them.

        ``tp_size`` is the tensor parallel size, by default that of the names.
        """
        num_models = 1 if self.kind == "zero-1-2" else data_size
        tp_size = self.tp_size if tp_size is None else tp_size
        ranks = (place for files in (self.optim, self.models) for place in files)
        present = sum(rank < data_size and tp_rank < tp_size for rank, tp_rank in ranks)
        count = (data_size + num_models) * tp_size - present
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optim.values()) else ""
        names = (
            name
            for rank in range(data_size if count else 0)
            for tp_rank in range(tp_size)
            for files, name in (
                (self.optim, f"{prefix}zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}_optim_states.pt"),
                (self.models, model_file_name(rank, tp_rank, whole=self.kind == "zero-1-2")),
            )
            if (rank, tp_rank) not in files and (files is self.optim or rank < num_models)
        )
        return count, tuple(islice(names, min(count, _MAX_NAMES)))

    def stale(self, data_size: int, tp_size: int | None = None) -> tuple[str, ...]:
        """Files of ranks that a save of ``data_size`` data and ``tp_size`` tensor parallel ranks does not have."""
        tp_size = self.tp_size if tp_size is None else tp_size
        names = [
            name
            for files in (self.optim, self.models)
            for (rank, tp_rank), name in files.items()
            if rank >= data_size or tp_rank >= tp_size
        ]
        return tuple(sorted(names))


def list_tag(directory: FilePath) -> TagListing:
    """List a tag directory. Raises MissingFileError, UnreadableError where it cannot be listed."""
    sizes, inside = list_directory(directory)
    found: dict[str, dict[tuple[int, int], str]] = {"optimizer": {}, "model": {}, "whole_model": {}}
    duplicates: dict[str, CheckpointError] = {}
    others: list[str] = []
    for name in sorted(sizes):
        file = parse_rank_file(name)
        if file is None:
            others.append(name)
        elif file.kind != "whole_model" and (other := found[file.kind].get((file.rank, file.tp_rank))) is not None:
            duplicates[name] = claimed_twice(directory, other, name, file.rank)
        else:
            found[file.kind][file.rank, file.tp_rank] = name
    optim, models, whole = found.values()
    expert_files = [name for name in others if EXPERT_FILE.match(name)]
    temporaries = [name for name in others if is_temporary(name)]
    known = {*expert_files, *temporaries, RECORD_NAME}
    kind: Kind = "zero-1-2" if whole and not models else "zero-3"
    if not optim and _holds_whole_params(directory, inside):
        kind = "universal"
    return TagListing(
        directory=directory,
        kind=kind,
        sizes=sizes,
        optim=optim,
        models=whole if kind == "zero-1-2" else models,
        duplicates=duplicates,
        temporaries=tuple(temporaries),
        expert_files=tuple(expert_files),
        unknown_files=tuple(name for name in others if name not in known),
        folders=inside,
    )


def claimed_twice(directory: FilePath, first: str, second: str, rank: int) -> CheckpointError:
    """The error about two files of one rank."""
    return CheckpointError(
        f"{directory}: both {first} and {second} claim rank {rank}. Files of two saves are mixed in this directory; "
        "remove those that do not belong."
    )


def is_temporary(name: str) -> bool:
    """Whether a file has the name of one that is being written, or was when its writer died."""
    return _TEMPORARY.fullmatch(name) is not None


def is_universal(directory: FilePath) -> bool:
    """Whether a directory is what ``ds_to_universal`` writes: a folder of whole parameters, each one of its own."""
    try:
        names, inside = list_directory(directory)
    except (CheckpointError, UnreadableError):
        return False
    files = (file for name in names if (file := parse_rank_file(name)) is not None)
    return not any(file.kind == "optimizer" for file in files) and _holds_whole_params(directory, inside)


def _holds_whole_params(directory: FilePath, inside: tuple[str, ...]) -> bool:
    """A folder ``zero`` with ``optimizer_state.pt`` or, by parameter, ``fp32.pt``."""
    if "zero" not in inside:
        return False
    zero = directory / "zero"
    try:
        names, params = list_directory(zero)
        return "optimizer_state.pt" in names or any("fp32.pt" in file_sizes(zero / name) for name in params[:1])
    except (CheckpointError, UnreadableError):
        return False
