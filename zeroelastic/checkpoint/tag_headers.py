"""The headers of a tag's files, as far as they agree, the problems of the others, and what is digested by itself.

``checker`` fills it; ``inspect`` describes what can be read, and ``verify`` reads the payload. Under tensor parallelism
ranks have copies of the same elements: these are digested by themselves, count once, and have to be the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict

from zeroelastic.checkpoint.commit_record import CheckpointFormat, CommitRecord
from zeroelastic.checkpoint.contradictions import other_directory
from zeroelastic.checkpoint.extents import ExtentTable, stream_seeds
from zeroelastic.checkpoint.inventory import Inventory
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.saved_layout import SlicedLayout
from zeroelastic.checkpoint.saved_state import SavedTensor, TensorSet, contents_of
from zeroelastic.checkpoint.tag_files import EXPERT_FILE, StateFiles, TagListing
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.digest import ParamContent, UInt64Array
from zeroelastic.core.layout import Int64Array
from zeroelastic.core.slice_plan import slices_of_layout
from zeroelastic.core.slices import first_copies, strips_of_runs
from zeroelastic.errors import some
from zeroelastic.io.paths import FilePath

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class DigestKeys:
    """The streams of the tensors of some parts, in their order, and then the streams of copies.

    A copy is a strip that more than one slice of a tensor has, for one state key. Of shape ``(num_streams,)``:
    ``tensor`` is the number of a stream's tensor; ``group`` numbers what copies there are of the same, -1 for a tensor
    itself; ``numel`` are the elements of a copy; ``part`` and ``slice`` say which parameter of which part's layout has
    it. ``first[part]`` has for each strip of a part its stream of the first state key, -1 for one without copies.
    """

    num_tensors: int
    tensor: Int64Array
    group: Int64Array
    numel: Int64Array
    part: Int64Array
    slice: Int64Array
    first: tuple[Int64Array, ...]

    @property
    def num_copies(self) -> int:
        """How many of the streams are copies."""
        return len(self.tensor) - self.num_tensors

    def of_rows(self, parts: Sequence[TensorSet], number: int, rows: ExtentTable, tensor: Int64Array) -> Int64Array:
        """The stream of each row of ``parts[number].rank_rows``, which are of these tensors of all parts."""
        first = self.first[number]
        if not len(first):  # there are no copies
            return tensor
        stream = first[strips_of_runs(slices_of_layout(parts[number].layout), rows.param, rows.start)]
        key = tensor - self.tensor[stream]
        return np.where(stream < 0, tensor, stream + key)


def streams_of(parts: Sequence[TensorSet]) -> DigestKeys:
    """The streams of these parts."""
    num_tensors = sum(len(dtypes) for part in parts for dtypes in part.dtypes)
    columns: list[npt.NDArray[np.int64]] = []
    firsts: list[Int64Array] = []
    num_streams, num_groups, base = num_tensors, 0, 0
    for number, part in enumerate(parts):
        keys = np.array([len(dtypes) for dtypes in part.dtypes], dtype=np.int64)
        begins, slices = base + np.cumsum(keys) - keys, part.layout.slices
        base += int(keys.sum())
        if slices is None:
            firsts.append(_NONE)
            continue
        strips, same = slices.strips, first_copies(slices)
        copied = np.flatnonzero(np.bincount(same, minlength=len(strips))[same] > 1)
        of = part.numbers()[strips.param[copied]]
        # A stream for each state key of each copied strip; those of equal copies and keys are a group.
        row = np.repeat(np.arange(len(copied)), keys[of])
        at = np.cumsum(keys[of]) - keys[of]
        key = np.arange(len(row)) - at[row]
        group_of, groups = at[np.searchsorted(copied, same[copied])][row] + key, len(row)
        first = np.full(len(strips), -1, dtype=np.int64)
        first[copied] = num_streams + at
        columns.append(
            np.stack(
                (
                    begins[of][row] + key,
                    num_groups + group_of,
                    (strips.numel * strips.num_runs)[copied][row],
                    np.full_like(row, number),
                    strips.param[copied][row],
                )
            )
        )
        firsts.append(first)
        num_streams, num_groups = num_streams + groups, num_groups + groups
    own = np.arange(num_tensors, dtype=np.int64)
    unknown = np.full_like(own, -1)
    columns.insert(0, np.stack((own, unknown, np.zeros_like(own), unknown, unknown)))
    tensor, group, numel, of_part, of_param = np.concatenate(columns, axis=1)
    return DigestKeys(num_tensors, tensor, group, numel, of_part, of_param, tuple(firsts))


@dataclass(frozen=True, slots=True)
class CopySums:
    """The sums of all streams by tensor, each copied strip taken once.

    ``digests`` and ``covered`` are by tensor. ``differs`` is by stream: a copy that is not what most others are, of
    those that were read as a whole. ``unsure`` are the copies of which as many are like this as like that.
    """

    digests: UInt64Array
    covered: Int64Array
    differs: npt.NDArray[np.bool_]
    unsure: npt.NDArray[np.bool_]


def sum_copies(streams: DigestKeys, digests: UInt64Array, covered: Int64Array, want: Sequence[int | None]) -> CopySums:
    """Add up the streams by tensor. ``want`` is what each tensor's digest should be, where that is known.

    Of copies that differ the one is taken with which a tensor's digest is as it should be, else that of most ranks.
    """
    count = streams.num_tensors
    total, elements = digests[:count].copy(), covered[:count].copy()
    differs, unsure = np.zeros((2, len(streams.tensor)), dtype=bool)
    disputed: dict[int, list[Int64Array]] = {}
    for members in _groups(streams, covered == streams.numel):
        tensor = int(streams.tensor[members[0]])
        elements[tensor] += streams.numel[members[0]]
        if (digests[members] == digests[members[0]]).all():
            np.add.at(total, tensor, digests[members[0]])
        else:
            disputed.setdefault(tensor, []).append(members)
    for tensor, groups in disputed.items():
        expected = want[tensor]
        # Modulo 2 ** 64, as digests are added up.
        rest = None if expected is None else np.uint64((expected - int(total[tensor])) % (1 << 64))
        for members in groups:
            values, counts = np.unique(digests[members], return_counts=True)
            confirmed = len(groups) == 1 and rest is not None and rest in values
            chosen = rest if rest is not None and confirmed else values[counts.argmax()]
            np.add.at(total, tensor, chosen)
            differs[members] = digests[members] != chosen
            unsure[members] = not confirmed and (counts == counts.max()).sum() > 1
    return CopySums(total, elements, differs, unsure)


def _groups(streams: DigestKeys, chosen: npt.NDArray[np.bool_]) -> list[Int64Array]:
    """The streams of each group of copies, of those that are chosen."""
    copies = np.flatnonzero(chosen & (streams.group >= 0))
    copies = copies[np.argsort(streams.group[copies], kind="stable")]
    bounds = np.flatnonzero(np.diff(streams.group[copies])) + 1
    return np.split(copies, bounds) if len(copies) else []


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
        return self.saved.format or next((shard.format for shard in self.shards.values()), None)

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
