"""The headers of a tag's files, as far as they agree, and the problems of the others.

``checker`` fills it; ``inspect`` describes what can be read, and ``verify`` reads the payload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from zeroelastic.checkpoint.commit_record import CheckpointFormat, CommitRecord
from zeroelastic.checkpoint.contradictions import other_directory
from zeroelastic.checkpoint.extents import stream_seeds
from zeroelastic.checkpoint.inventory import Inventory
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.saved_layout import SlicedLayout
from zeroelastic.checkpoint.saved_state import SavedTensor, TensorSet, contents_of
from zeroelastic.checkpoint.streams import DigestKeys, streams_of
from zeroelastic.checkpoint.tag_files import EXPERT_FILE, StateFiles, TagListing
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.digest import ParamContent, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import some
from zeroelastic.io.paths import FilePath

_NAMED = 100


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: a sentence, the name of the file, and where known the parameter, the state key and the byte range.

    ``file`` is empty where no single file is to blame. ``offset`` and ``bytes`` are bytes of the file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, json_schema_serialization_defaults_required=True
    )  # within a report

    file: str
    sentence: str
    param: str | None = None
    key: str | None = None
    offset: int | None = None
    bytes: int | None = None


class TagHeaders:
    """The files of a tag and their headers.

    ``sizes`` has all files in the directory. ``optim_files`` and ``model_files`` are, by rank, the files that
    are there and have the size that the commit record states. ``shards`` and ``models`` are the headers that agree with
    each other and with the record; ``parts`` the parameters in them. ``first_shard`` and ``first_model`` are the first
    that could be read, whatever contradicts them, and ``root`` is the tree of that model states file.

    Ranks are counted over all of ``topology``. ``sliced`` is the layout of the trained parameters where there are
    slices. Where tensor parallel ranks do not say which slices they have, all ranks are of the first one.

    ``problems`` are about the files by their paths, ``missing`` the ones about files that are not there. Of ranks'
    files, ``num_missing`` are missing, the first of them are ``missing_files``; ``stale_files`` are of further ranks.
    ``unsupported`` says what of a checkpoint that may be sound is not read here; ``notes`` are observations that are
    not problems. ``stated_world_size`` is the data parallel size, None where no file states one, and ``topology`` then
    a guess.
    """

    def __init__(self, listing: TagListing) -> None:
        self.tag_dir, self.listing, self.sizes = listing.directory, listing, listing.sizes
        self.problems: list[Problem] = []
        self.missing: list[Problem] = []
        self.notes: list[str] = []
        self.unsupported: list[str] = []
        self.checkpoint = Checkpoint(listing.directory, Topology(0), compare_directories=False)
        self.stated_world_size: int | None = None
        self.optim_files: dict[int, FilePath] = {}
        self.model_files: dict[int, FilePath] = {}
        self.models: dict[int, ModuleHeader] = {}
        self.shards: dict[int, OptimizerHeader] = {}
        self.first_model: ModuleHeader | None = None
        self.first_shard: OptimizerHeader | None = None
        self.root: Mapping[object, object] = {}
        self.num_opened = 0
        self.parts: tuple[TensorSet, ...] = ()
        self.tensors: tuple[SavedTensor, ...] = ()
        self.is_stage_0 = False
        self.num_rank_files = self.num_missing = 0
        self.missing_files: tuple[str, ...] = ()
        self.stale_files: tuple[str, ...] = ()
        self._has_frozen_experts = False
        pipelines = (name for name in listing.unknown_files if name.endswith("_states.pt"))
        self._other_names = [*listing.expert_files, *pipelines]

    @property
    def record(self) -> CommitRecord | None:
        """The commit record; None also where it is damaged."""
        return self.checkpoint.record

    @property
    def saved(self) -> Inventory:
        """The files of the tag, and what the commit record says."""
        return self.checkpoint.inventory

    @property
    def topology(self) -> Topology:
        """How many ranks share what."""
        return self.checkpoint.topology

    @property
    def sliced(self) -> SlicedLayout | None:
        """The layout of the trained parameters where there are slices."""
        return self.checkpoint.sliced

    @property
    def world_size(self) -> int:
        """How many ranks saved."""
        return self.topology.world_size

    @property
    def format(self) -> CheckpointFormat | None:
        """The format of the save; None where no file could be read that states it."""
        if self.record is not None:
            return self.record.checkpoint_format
        return next((shard.format for shard in self.shards.values()), None)

    @cached_property
    def seeds(self) -> UInt64Array:
        """The digest seed of each of ``tensors``."""
        return stream_seeds([(tensor.param.name, tensor.key) for tensor in self.tensors])

    @cached_property
    def streams(self) -> DigestKeys:
        """The digests that are computed of ``tensors``: of each, or of each copy."""
        return streams_of(self.parts)

    @cached_property
    def param_of(self) -> Int64Array:
        """The number of the parameter of each of ``tensors``, counted over all parts."""
        counts = [len(dtypes) for part in self.parts for dtypes in part.dtypes]
        return np.repeat(np.arange(len(counts), dtype=np.int64), np.array(counts, dtype=np.int64))

    @property
    def num_trained(self) -> int:
        """How many of ``tensors`` belong to trained parameters; they come first."""
        return sum(len(dtypes) for dtypes in self.parts[0].dtypes) if self.shards else 0

    @property
    def num_files(self) -> int:
        """How many files the ranks of the save have written."""
        return len(self._other_names) + self.num_rank_files

    @cached_property
    def other_files(self) -> dict[int, tuple[FilePath, ...]]:
        """Further files that DeepSpeed loads, such as experts' files, dealt to the ranks: checksums are compared."""
        dealt: dict[int, list[FilePath]] = {}
        here = [name for name in self._other_names if name in self.sizes]
        for number, name in enumerate(here):
            expert = (
                EXPERT_FILE.match(name) if self._has_frozen_experts else None
            )  # a rank of their layout is an expert
            rank = number % max(1, self.world_size) if expert is None else int(expert[2])
            dealt.setdefault(rank, []).append(self.tag_dir / name)
        return {rank: tuple(paths) for rank, paths in dealt.items()}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which at least one file can be read."""
        return tuple(sorted({*self.optim_files, *self.model_files, *self.other_files}))

    def files(self, rank: int) -> tuple[FilePath, ...]:
        """The files of one rank that can be read."""
        files = tuple(files[rank] for files in (self.optim_files, self.model_files) if rank in files)
        return (*files, *self.other_files.get(rank, ()))

    @property
    def nbytes(self) -> int:
        """Bytes of all files that can be read."""
        return sum(self.sizes[path.name] for rank in self.ranks for path in self.files(rank))

    def contents(self, digests: UInt64Array) -> list[ParamContent]:
        """Return the saved tensors of each parameter, given the digest of each of ``tensors``."""
        names = [(tensor.param.name, tensor.key) for tensor in self.tensors]
        found = contents_of(self.parts, dict(zip(names, digests.tolist(), strict=True)))
        return [*found, *self.saved.excluded()]

    def other_directories(self, blamed: Collection[str]) -> list[Problem]:
        """Files that are not ``blamed`` already and whose zip directory is not the one in the commit record."""
        recorded = self.saved.recorded_directories
        opened: list[OptimizerHeader | ModuleHeader] = [*self.shards.values(), *self.models.values()]
        return [
            Problem(header.path.name, other_directory(header.path))
            for header in opened
            if header.path.name not in blamed and recorded.get(header.path.name, header.directory) != header.directory
        ]

    def add(self, file: str, what: object, *, param: str | None = None) -> Problem:
        """Note a problem of a file."""
        self.problems.append(Problem(file, str(what), param))
        return self.problems[-1]

    def find_missing(self, files: StateFiles) -> None:
        """Compare the names and sizes of the files with the save: find missing files, and those that are left over."""
        recorded, num_ranks = self.saved.recorded_sizes, files.tensor_size * self.topology.data_size
        for name, want in sorted(recorded.items()):
            path, have = self.tag_dir / name, self.sizes.get(name)
            if have is None:
                self.missing.append(self.add(name, f"{path}: is missing. The checkpoint is incomplete."))
            elif have != want:
                self.add(
                    name,
                    f"{path}: has {have} bytes; the commit record says {want}. The file is truncated, damaged or from "
                    "another save.",
                )
        for names in (files.optim, files.models) if self.saved.is_recorded else ():
            for rank, name in sorted(names.items()):
                if rank < num_ranks and name not in recorded:
                    self.add(name, f"{self.tag_dir / name}: is not in the commit record, which lists all files.")
        self.num_missing, self.missing_files = count, missing = files.missing(self.topology.data_size)
        for name in missing[: max(0, _NAMED - len(self.problems))]:
            if not {name, f"bf16_{name}"} & recorded.keys():
                why = "The checkpoint is incomplete, or its files are on other nodes (use_node_local_storage)."
                self.missing.append(self.add(name, f"{self.tag_dir / name}: is missing. {why}"))
        if count > _NAMED:
            self.missing.append(self.add("", f"{count} files of {self.world_size} ranks are missing."))
        self.stale_files = files.stale(self.topology.data_size)
        if self.stale_files:
            self.notes.append(
                f"{some(self.stale_files)}: left by an earlier save with more ranks, not part of this checkpoint"
            )

    def find_experts(self) -> None:
        """Find which files of experts the save wrote: those in the record, or those that the model states count."""
        model = next(iter(self.models.values()), None)
        found = self.listing.expert_files
        names: Collection[str] = found if model is None else model.expert_files
        recorded = self.saved.recorded_sizes
        if self.saved.is_recorded:
            names = [name for name in recorded if EXPERT_FILE.match(name)]
        for name in names:
            if name not in self.sizes and name not in recorded:  # else it is missing already
                path = self.tag_dir / name
                self.missing.append(self.add(name, f"{path}: is missing. The checkpoint is incomplete."))
        stale = sorted({*found} - {*names})
        if stale:
            self.notes.append(f"{some(stale)}: left by an earlier save with more experts, not part of this checkpoint")
        self._other_names = sorted({*names, *self._other_names} - {*stale})
        unread = [name for name in self.listing.unknown_files if name.endswith(".pt") and name not in self._other_names]
        if unread:
            self.notes.append(f"not checked, because no rank of a ZeRO run writes files of such names: {some(unread)}")
