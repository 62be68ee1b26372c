"""The files of a tag directory by their names: ranks' files, the commit record, leftovers, and unrecognized files.

Tensor parallel ranks each save a ZeRO checkpoint of their own into the same directory. No file is opened here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    SavedAgainError,
    UnreadableError,
    UnsupportedError,
    ZeroElasticError,
    shown,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, list_directory, place

OPTIM_FILE = re.compile(r"^(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
MODEL_FILE = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
WHOLE_MODEL_FILE = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
"""What data parallel rank 0 writes where every rank has the whole weights: at ZeRO stages 0, 1 and 2."""
EXPERT_FILE = re.compile(r"^layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt$")
"""The weights of one expert of a mixture-of-experts layer, at ZeRO stages 0, 1 and 2."""
SAVE_ID = "zeroelastic_save_id"
"""The entry of a rank's files that names their save; those of DeepSpeed alone have none."""


class RankFile(NamedTuple):
    """The kind and the rank that a file name states. ``whole_model`` is written at stages 0, 1 and 2."""

    kind: Literal["optimizer", "model", "whole_model"]
    rank: int
    tp_rank: int


def parse_rank_file(name: str) -> RankFile | None:
    """Parse a file name; None for one that no rank of a ZeRO run writes."""
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


def optim_file_name(rank: int, tp_rank: int, prefix: str = "") -> str:
    """The name of a rank's optimizer file; ``prefix`` is ``bf16_`` where DeepSpeed writes that."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}_optim_states.pt"


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
    """One of several tensor parallel ranks, each of which writes own files with its slices."""

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


UNFINISHED_NAME = "zeroelastic-unfinished.json"
"""The mark of an upload to an object store, which has no rename, so that the files of a tag appear one by one.

It is there before the first of them appears, and goes after the commit record is there.
"""


def refuse_unfinished(tag_dir: FilePath, names: Container[str]) -> None:
    """Raise CheckpointError for a tag directory, with the files ``names``, whose upload did not finish."""
    if UNFINISHED_NAME in names and RECORD_NAME not in names:
        raise CheckpointError(
            f"{tag_dir}: its upload is on its way or did not finish ({UNFINISHED_NAME}, and no {RECORD_NAME}). Resume "
            "from another tag.",
            remedy="",
        )


SWAP_FOLDER = "offloaded_tensors"
"""DeepSpeed's raw copies of what a run had offloaded to NVMe, one folder per rank."""

_TEMPORARY = re.compile(r".*\.(tmp|temp|part|partial|incomplete)|\.nfs.*")
_MAX_NAMES = 1000


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The names of the optimizer and the model states files of a tag by rank.

    Ranks are counted over ``tensor_size`` tensor parallel ranks. ``whole_model``: the model states files have the whole
    weights of a tensor parallel rank, by which they are numbered (stages 1 and 2). ``others`` are files of further
    tensor parallel ranks. ``tp_rank`` is that of all files where these are of one tensor parallel rank alone.
    """

    optim: Mapping[int, str]
    models: Mapping[int, str]
    whole_model: bool
    tensor_size: int = 1
    others: tuple[str, ...] = ()
    tp_rank: int = 0

    def num_models(self, data_size: int) -> int:
        """How many model states files a save of ``data_size`` data parallel ranks has."""
        return self.tensor_size if self.whole_model else self.tensor_size * data_size

    def missing(self, data_size: int) -> tuple[int, tuple[str, ...]]:
        """How many files of ``data_size`` data parallel ranks are missing, and the names of the first of them."""
        num_ranks, num_models = self.tensor_size * data_size, self.num_models(data_size)
        count = num_ranks + num_models
        count -= sum(rank < num_ranks for rank in self.optim) + sum(rank < num_models for rank in self.models)
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optim.values()) else ""
        names = (
            name
            for rank in range(num_ranks if count else 0)
            for data_rank, tp_rank in [(rank // self.tensor_size, rank % self.tensor_size + self.tp_rank)]
            for files, end, name in (
                (self.optim, num_ranks, optim_file_name(data_rank, tp_rank, prefix)),
                (self.models, num_models, model_file_name(data_rank, tp_rank, whole=self.whole_model)),
            )
            if rank not in files and rank < end
        )
        return count, tuple(islice(names, min(count, _MAX_NAMES)))

    def stale(self, data_size: int) -> tuple[str, ...]:
        """The files of ranks that a save of ``data_size`` data parallel ranks does not have."""
        further = (
            name
            for files in (self.optim, self.models)
            for rank, name in files.items()
            if rank >= self.tensor_size * data_size
        )
        return tuple(sorted((*further, *self.others)))


def rank_files(
    tag_dir: FilePath, names: Iterable[str], tp_rank: int | None = None, *, tensor_size: int | None = None
) -> StateFiles:
    """Return the optimizer and the model states file of each rank among the files of a directory.

    With ``tp_rank``, the files of that tensor parallel rank alone; else of ``tensor_size`` such ranks, by default as
    many as there are names of. Raises MissingFileError where there are none, CheckpointError where two claim the same
    rank, UnsupportedError for ZeRO stage 0.
    """
    files = {name: file for name in sorted(names) if (file := parse_rank_file(name)) is not None}
    if tp_rank is not None:
        files = {name: file._replace(tp_rank=0) for name, file in files.items() if file.tp_rank == tp_rank}
    found, duplicates = _by_rank(tag_dir, files, tensor_size)
    for error in duplicates.values():
        raise error
    require_files(tag_dir, found)
    return replace(found, tp_rank=tp_rank or 0)


def require_files(tag_dir: FilePath, files: StateFiles) -> None:
    """Raise MissingFileError where there are no files of ranks, UnsupportedError for ZeRO stage 0."""
    if files.whole_model and not files.optim:
        raise UnsupportedError(
            f"{tag_dir}: has {files.models[min(files.models)]} and no optimizer files (*_optim_states.pt). Either it "
            "was saved at ZeRO stage 0, whose optimizer state does not name its parameters: only a stage 0 run resumes "
            "it. Or it was saved at stage 1 or 2, and its optimizer files are missing. A run at stage 1 or 2 loads the "
            "weights alone with load_optimizer_states=False."
        )
    if not files.models and not files.optim:
        raise MissingFileError(
            f"{tag_dir}: holds no ZeRO checkpoint (zero_pp_rank_*_optim_states.pt and *_model_states.pt)."
        )


def _by_rank(
    tag_dir: FilePath, files: Mapping[str, RankFile], tensor_size: int | None
) -> tuple[StateFiles, dict[str, CheckpointError]]:
    """Number files by rank; of further files of the same rank, return the error about each."""
    if tensor_size is None:
        tensor_size = max((file.tp_rank + 1 for file in files.values()), default=1)
    found: dict[str, dict[int, str]] = {"optimizer": {}, "model": {}, "whole_model": {}}
    others: list[str] = []
    duplicates: dict[str, CheckpointError] = {}
    for name, file in files.items():
        rank = file.rank * tensor_size + file.tp_rank
        if file.tp_rank >= tensor_size:
            others.append(name)
        elif (other := found[file.kind].setdefault(rank, name)) != name:
            duplicates[name] = CheckpointError(
                f"{tag_dir}: both {other} and {name} claim rank {file.rank}. Files of two saves are mixed in this "
                "directory; remove those that do not belong."
            )
    optim, models, whole = found.values()
    return StateFiles(optim, models or whole, bool(whole) and not models, tensor_size, tuple(others)), duplicates


@dataclass(frozen=True, slots=True)
class TagListing:
    """All files of a tag directory.

    ``files`` are the files of ranks, numbered over as many tensor parallel ranks as there are names of. ``duplicates``
    are further files of a rank that already has one, each with the error about it. ``temporaries`` are files of a save
    that was interrupted or is still running; ``expert_files`` have the weights of experts; ``unknown_files`` are none
    of these.
    """

    directory: FilePath
    is_universal: bool
    sizes: Mapping[str, int]
    files: StateFiles
    duplicates: Mapping[str, CheckpointError]
    temporaries: tuple[str, ...]
    expert_files: tuple[str, ...]
    unknown_files: tuple[str, ...]
    folders: tuple[str, ...]

    @property
    def tp_size(self) -> int:
        """Tensor parallel ranks by the names of files; at least 1."""
        return self.files.tensor_size

    @property
    def num_ranks(self) -> int:
        """One more than the highest data parallel rank that a file is named after."""
        return max((*self.files.optim, *self.files.models), default=-self.tp_size) // self.tp_size + 1

    def by_rank(self, tensor_size: int | None) -> StateFiles:
        """Number the files over another number of tensor parallel ranks; None: as the names say."""
        if tensor_size in (None, self.tp_size):
            return self.files
        names = (name for name in sorted(self.sizes) if name not in self.duplicates)
        parsed = {name: file for name in names if (file := parse_rank_file(name)) is not None}
        return _by_rank(self.directory, parsed, tensor_size)[0]


def list_tag(directory: FilePath) -> TagListing:
    """List a tag directory. Raises MissingFileError, UnreadableError where it cannot be listed."""
    sizes, inside = list_directory(directory)
    parsed = {name: parse_rank_file(name) for name in sorted(sizes)}
    files, duplicates = _by_rank(directory, {name: file for name, file in parsed.items() if file is not None}, None)
    others = [name for name, file in parsed.items() if file is None]
    expert_files = [name for name in others if EXPERT_FILE.match(name)]
    temporaries = [name for name in others if is_temporary(name)]
    known = {*expert_files, *temporaries, RECORD_NAME}
    return TagListing(
        directory=directory,
        is_universal=not files.optim and _holds_whole_params(directory, inside),
        sizes=sizes,
        files=files,
        duplicates=duplicates,
        temporaries=tuple(temporaries),
        expert_files=tuple(expert_files),
        unknown_files=tuple(name for name in others if name not in known),
        folders=inside,
    )


def is_temporary(name: str) -> bool:
    """Whether a file has the name of one that is being written, or was when its writer died."""
    return _TEMPORARY.fullmatch(name) is not None


def is_universal(directory: FilePath) -> bool:
    """Whether a directory was written by ``ds_to_universal``: one folder for each whole parameter."""
    try:
        return list_tag(directory).is_universal
    except (CheckpointError, UnreadableError):
        return False


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


def watch(tag_dir: FilePath) -> FilePath:
    """A path of this directory that remembers the state of the files; a missing directory's path is unchanged."""
    return place(tag_dir).watched(RECORD_NAME)


def was_saved_again(tag_dir: FilePath) -> bool:
    """Whether a directory is gone or has files of another save by now; False where that cannot be found out.

    One that is not watched was not there when it was first looked at.
    """
    try:
        return place(tag_dir).has_changed(RECORD_NAME) or watch(tag_dir) is not tag_dir
    except UnreadableError:  # the caller has an error already
        return False


def check_one_save(tag_dir: FilePath) -> None:
    """Raise SavedAgainError where a watched directory is gone or has files of another save; UnreadableError."""
    if place(tag_dir).has_changed(RECORD_NAME):
        raise saved_again(tag_dir)


@contextmanager
def one_save(*tag_dirs: FilePath) -> Iterator[None]:
    """A block that reads watched directories: where one was saved again, it ends with SavedAgainError."""
    try:
        yield
    except (ZeroElasticError, OSError) as error:
        for tag_dir in tag_dirs:
            if not isinstance(error, SavedAgainError) and was_saved_again(tag_dir):
                raise saved_again(tag_dir) from error
        raise
    for tag_dir in tag_dirs:
        check_one_save(tag_dir)


def saved_again(tag_dir: FilePath) -> SavedAgainError:
    """The error for a tag that changed while it was read."""
    return SavedAgainError(f"{tag_dir}: the checkpoint was saved again, or removed, while it was read. Run it again.")
