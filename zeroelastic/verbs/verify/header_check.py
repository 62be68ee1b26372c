"""The headers of all files of a tag, checked file by file: a problem in one file hides no problem in another.

``open_checkpoint`` and ``open_state`` stop at the first contradiction, because nothing is loaded then. Here every
contradiction becomes a ``Problem``, and the files that agree with each other can still be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from zeroelastic.checkpoint.check import MIXED, other_save, other_trained_params
from zeroelastic.checkpoint.commit_record import RECORD_NAME, CheckpointFormat, CommitRecord, read_record
from zeroelastic.checkpoint.extents import stream_seeds
from zeroelastic.checkpoint.model_states import ModelStates, open_model_states, other_step
from zeroelastic.checkpoint.open import StateFiles, rank_files, stated_sizes
from zeroelastic.checkpoint.optimizer_file import Shard
from zeroelastic.checkpoint.optimizer_reader import open_shard
from zeroelastic.checkpoint.saved_state import (
    SEPARATE_EXPERTS,
    VALUE_FACTS,
    SavedPart,
    SavedTensor,
    frozen_part,
    shard_facts,
    trained_part,
    values_by_rank,
)
from zeroelastic.checkpoint.tag_files import list_tag
from zeroelastic.core.digest import ParamContent, UInt64Array
from zeroelastic.errors import CheckpointError, UnsupportedError, counted, some
from zeroelastic.io.paths import FilePath
from zeroelastic.verbs.inspect.other_kinds import is_stage_0
from zeroelastic.verbs.verify.report import Problem

T = TypeVar("T", ModelStates, Shard)

_NAMED = 100


@dataclass(frozen=True, slots=True)
class TagHeaders:
    """The files of a tag and what their headers say.

    ``sizes`` are those of all files in the directory; ``num_files`` counts those that ranks write. ``optim_files`` and
    ``model_files`` are, by rank, the files that are there and have the size that the commit record states. ``shards``
    and ``models`` are the headers that agree with each other and with the record; ``parts`` the parameters in them, and
    ``tensors`` the tensors of all parts, whose digests have the seeds ``seeds``. ``other_files`` are further files that
    DeepSpeed loads, such as those of experts, dealt to the ranks: of them checksums alone are compared. ``unsupported``
    says what of a checkpoint that may be sound is not read here; ``notes`` are observations that are not problems. With
    ``quick`` no header is opened, except one model states file where there is no commit record to give the world size.
    """

    tag_dir: FilePath
    sizes: Mapping[str, int]
    record: CommitRecord | None
    world_size: int
    num_files: int
    optim_files: Mapping[int, FilePath]
    model_files: Mapping[int, FilePath]
    shards: Mapping[int, Shard]
    models: Mapping[int, ModelStates]
    parts: tuple[SavedPart, ...]
    tensors: tuple[SavedTensor, ...]
    seeds: UInt64Array
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    other_files: Mapping[int, tuple[FilePath, ...]] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()

    @property
    def format(self) -> CheckpointFormat | None:
        """The format of the save; None where no file could be read that states it."""
        if self.record is not None:
            return self.record.checkpoint_format
        return next((shard.format for shard in self.shards.values()), None)

    @property
    def num_trained(self) -> int:
        """How many of ``tensors`` belong to trained parameters; they come first."""
        return sum(len(dtypes) for dtypes in self.parts[0].dtypes) if self.shards else 0

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
        """What was saved of each parameter, given the digest of each of ``tensors``."""
        found = iter(digests.tolist())
        return [
            ParamContent(param, {key: (dtype, next(found)) for key, dtype in part.dtypes[p].items()}, part.scalars[p])
            for part in self.parts
            for p, param in enumerate(part.layout.params)
        ]


def check_headers(tag_dir: FilePath, *, quick: bool = False) -> TagHeaders:
    """Check the headers of every file of a tag, and keep the files that agree.

    Of a checkpoint of ZeRO stage 0 or of several tensor parallel ranks only names and sizes are checked here; it is
    ``unsupported``. Raises MissingFileError where there is no directory or no checkpoint in it, UnsupportedError for a
    Universal one. Everything else is returned in ``problems``.
    """
    return _HeaderCheck(tag_dir, quick).take()


class _HeaderCheck:
    def __init__(self, tag_dir: FilePath, quick: bool) -> None:
        self.tag_dir, self.quick = tag_dir, quick
        self.listing = list_tag(tag_dir)
        self.sizes = self.listing.sizes
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.unsupported: dict[str, None] = {}
        others = (name for name in self.listing.unknown_files if name.endswith("_states.pt"))  # of pipelines
        self.other_names: list[str] = [*self.listing.expert_files, *others]
        self.models: dict[int, ModelStates] = {}
        self.shards: dict[int, Shard] = {}
        self.parts: tuple[SavedPart, ...] = ()
        self.files = StateFiles({}, {}, False)
        self.optim: Mapping[int, str] = {}
        self.model: Mapping[int, str] = {}
        self.by_name = False
        self.optim_paths: dict[int, FilePath] = {}
        self.model_paths: dict[int, FilePath] = {}

    def take(self) -> TagHeaders:
        self.record = self._record()
        try:
            self.files = rank_files(self.tag_dir, self.sizes)
            self.optim, self.model = self.files.optim, self.files.models
        except UnsupportedError as error:
            return self._take_by_name(error)
        except CheckpointError as error:
            if not any(name.endswith("_states.pt") for name in self.sizes):
                raise
            self._add("", error)
            self.world_size = 0
            return self._result()
        self.optim_paths, self.model_paths = self._paths(self.optim), self._paths(self.model)
        if self.record is not None:
            self.world_size = self.record.world_size
        else:
            self._open_models(None)
            if self.unsupported and not self.models:  # the files of one of several tensor parallel ranks
                return self._take_by_name(None)
            self.world_size = self._likely_world_size()
        self._find_missing()
        if not self.quick:
            if self.record is not None:
                self._open_models(self.record.world_size)
            self._choose_models()
            self._open_shards()
            self._choose_shards()
            self._put_together()
            if self.record is not None and self.parts:
                self._compare_with_record(self.record)
        self._find_experts()
        return self._result()

    def _take_by_name(self, error: UnsupportedError | None) -> TagHeaders:
        """Keep the files that ranks write, whatever is in them: names, sizes and checksums are compared."""
        listing, record = self.listing, self.record
        whole, tp_size = is_stage_0(listing), 1
        if error is not None and (whole or listing.tp_size > 1):
            self._refuse(error)
        if record is not None:
            self.world_size, tp_size = record.world_size, record.tp_size
        else:
            self.world_size = max(1, listing.num_ranks)
            for name in listing.models.values():
                with suppress(CheckpointError, UnsupportedError):
                    self.world_size, tp_size = stated_sizes(self.tag_dir / name)
                    break
        if not whole:  # which has the files of no other rank
            self._find_missing(tp_size)
        recorded = () if record is None else record.files
        self.other_names = sorted({*listing.optim.values(), *listing.models.values(), *self.other_names, *recorded})
        self.by_name = True
        self.notes.append("not checked: what the headers of the files say")
        return self._result()

    def _result(self) -> TagHeaders:
        tensors = tuple(tensor for part in self.parts for tensor in part.tensors())
        here = range(self.world_size)
        return TagHeaders(
            tag_dir=self.tag_dir,
            sizes=self.sizes,
            record=self.record,
            world_size=self.world_size,
            num_files=len(self.other_names) + (0 if self.by_name else self._num_rank_files()),
            optim_files={rank: path for rank, path in self.optim_paths.items() if rank in here},
            model_files={rank: path for rank, path in self.model_paths.items() if rank in here},
            shards=self.shards,
            models=self.models,
            parts=self.parts,
            tensors=tensors,
            seeds=stream_seeds([(tensor.param.name, tensor.key) for tensor in tensors]),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            other_files=self._others_by_rank(),
            unsupported=tuple(self.unsupported),
        )

    def _num_rank_files(self) -> int:
        return self.world_size + self.files.num_models(self.world_size)

    def _refuse(self, error: UnsupportedError) -> None:
        """Note what of a file is not read here, once where the files of several ranks have it."""
        sentence = str(error).replace(f"{self.tag_dir}/", "").replace(f"{self.tag_dir}: ", "")
        reason = sentence.partition(": ")[2]
        if not any(other.partition(": ")[2] == reason for other in self.unsupported):
            self.unsupported[sentence] = None

    def _others_by_rank(self) -> dict[int, tuple[FilePath, ...]]:
        """The other files that are there, dealt to the ranks, so that several processes share the reading."""
        here = [self.tag_dir / name for name in self.other_names if name in self.sizes]
        ranks = max(1, self.world_size)
        return {rank: tuple(here[rank::ranks]) for rank in range(min(ranks, len(here)))}

    def _find_experts(self) -> None:
        """Find which files of experts the save wrote: those that the model states count."""
        model = next(iter(self.models.values()), None)
        names = () if model is None else model.expert_files
        for name in names:
            if name not in self.sizes:
                self._add(name, f"{name}: is missing. The checkpoint is incomplete.")
        self.other_names += sorted({*names} - {*self.other_names})
        if names or self.listing.expert_files:
            self.unsupported[SEPARATE_EXPERTS] = None
        unread = [name for name in self.listing.unknown_files if name.endswith(".pt") and name not in self.other_names]
        if unread:
            self.notes.append(f"not checked, because no rank of a ZeRO run writes files of such names: {some(unread)}")

    def _add(self, file: str, what: object) -> None:
        """Add a problem; the path of the directory is removed from its sentence."""
        self.problems.append(Problem(file=file, sentence=str(what).replace(f"{self.tag_dir}/", "")))

    def _record(self) -> CommitRecord | None:
        try:
            return read_record(self.tag_dir)
        except CheckpointError as error:
            self._add(RECORD_NAME, error)
            return None

    def _paths(self, names: Mapping[int, str]) -> dict[int, FilePath]:
        """The files that have the size that the commit record states, by rank."""
        sizes = self.sizes if self.record is None else {**self.sizes, **self.record.files}
        return {rank: self.tag_dir / name for rank, name in sorted(names.items()) if self.sizes[name] == sizes[name]}

    def _open_models(self, world_size: int | None) -> None:
        """Open the headers of the model states files; with ``quick`` only the first one that can be opened."""
        for rank, path in self.model_paths.items():
            if world_size is not None and rank >= world_size:
                continue
            try:
                self.models[rank] = open_model_states(path, rank, world_size=world_size)
            except UnsupportedError as error:
                self._refuse(error)
            except CheckpointError as error:
                self._add(path.name, error)
            if self.quick and self.models:
                return

    def _likely_world_size(self) -> int:
        """The world size, without a record: what all or most model states files state, or else by names."""
        counts = Counter(model.world_size for model in self.models.values())
        if not counts:
            return max({*self.optim, *self.model}) + 1
        said = {rank: model.world_size for rank, model in self.models.items()}
        whole = [size for size in counts if all(said.get(rank) == size for rank in range(self.files.num_models(size)))]
        world_size = whole[0] if whole else counts.most_common(1)[0][0]
        for rank, model in list(self.models.items()):
            if whole and rank >= world_size:  # of an earlier save
                del self.models[rank]
            elif model.world_size != world_size:
                saved_by = counted(model.world_size, "rank")
                self._add(
                    model.path.name, f"{model.path}: was saved by {saved_by}, most others by {world_size}. {MIXED}"
                )
                del self.models[rank]
        return world_size

    def _find_missing(self, tp_size: int = 1) -> None:
        recorded = self.record.files if self.record is not None else {}
        for name, want in sorted(recorded.items()):
            if (have := self.sizes.get(name)) is None:
                self._add(name, f"{name}: is missing. The checkpoint is incomplete.")
            elif have != want:
                self._add(
                    name,
                    f"{name}: has {have} bytes; the commit record says {want}. The file is truncated, damaged or from "
                    "another save.",
                )
        if self.record is not None:
            for files in (self.optim, self.model):
                for rank, name in sorted(files.items()):
                    if rank < self.world_size and name not in recorded:
                        self._add(name, f"{name}: is not in the commit record, which lists all files.")
        count, missing = self.listing.missing(self.world_size, tp_size)
        for name in missing[: max(0, _NAMED - len(self.problems))]:
            if name not in recorded:
                self._add(
                    name,
                    f"{name}: is missing. The checkpoint is incomplete, or its files are on other nodes "
                    "(use_node_local_storage).",
                )
        if count > _NAMED:
            self._add("", f"{count} files of {self.world_size} ranks are missing.")
        if stale := self.listing.stale(self.world_size):
            self.notes.append(f"{some(stale)}: left by an earlier save with more ranks, not part of this checkpoint")

    def _choose_models(self) -> None:
        """Keep the model states files that agree with the record, or without a record with the majority."""
        facts = {rank: _model_facts(model) for rank, model in self.models.items()}
        record = self.record
        if record is not None:
            for rank, model in list(self.models.items()):
                if (mixed := other_step(model, record)) is not None:
                    self._add(model.path.name, mixed)
                    del self.models[rank], facts[rank]
        self._keep_most_common(self.models, facts, facts)

    def _open_shards(self) -> None:
        params = next((model.sub_groups for model in self.models.values()), None)
        if params is None and self.files.whole_model:
            self.notes.append(
                "of the optimizer files only checksums: the file that names their parameters is unreadable"
            )
            return
        for rank, path in self.optim_paths.items():
            if rank >= self.world_size:
                continue
            try:
                shard = open_shard(path, rank, world_size=self.world_size, rigid_params=params)
            except UnsupportedError as error:
                self._refuse(error)
                continue
            except CheckpointError as error:
                self._add(path.name, error)
                continue
            if (mixed := other_save(shard, self.record)) is not None:
                self._add(path.name, mixed)
                continue
            self.shards[rank] = shard

    def _choose_shards(self) -> None:
        """Keep the optimizer files that agree with the record, or without a record with the majority."""
        facts = {rank: shard_facts(shard) for rank, shard in self.shards.items()}
        if self.record is None and self.shards:
            head = next(iter(self.shards.values()))
            if (by_rank := values_by_rank(self.shards.values(), head)) is not None:
                self.unsupported[by_rank] = None
                facts = {rank: {key: fact[key] for key in fact.keys() - VALUE_FACTS} for rank, fact in facts.items()}
        fitting = facts
        if self.record is not None:
            want = {param.name: param.content() for param in self.record.params if param.trainable}
            fits: dict[tuple[str, ...], bool] = {}
            for rank, shard in self.shards.items():
                said = tuple(facts[rank].values())
                if said not in fits:
                    fits[said] = not _differences(want, _contents((trained_part({}, shard),)))
            fitting = {rank: fact for rank, fact in facts.items() if fits[tuple(fact.values())]} or facts
        self._keep_most_common(self.shards, facts, fitting)

    def _keep_most_common(
        self, headers: dict[int, T], facts: Mapping[int, Mapping[str, str]], fitting: Mapping[int, Mapping[str, str]]
    ) -> None:
        """Drop the headers whose facts are not those of the largest group among ``fitting``, each with a problem."""
        counts = Counter(tuple(fact.values()) for fact in fitting.values())
        keep = max(fitting, key=lambda rank: counts[tuple(fitting[rank].values())], default=None)
        for rank, fact in facts.items():
            if keep is not None and fact != facts[keep]:
                what = ", ".join(name for name, value in fact.items() if value != facts[keep][name])
                path, other = headers[rank].path, headers[keep].path
                self._add(path.name, f"{path}: differs from {other.name} in {what}. {MIXED}")
                del headers[rank]

    def _put_together(self) -> None:
        head = next(iter(self.shards.values()), None)
        parts = [] if head is None else [trained_part(self.shards, head)]
        first = next(iter(self.models.values()), None)
        if first is not None:
            if head is not None and (mixed := other_trained_params(first, head)) is not None:
                self._add(first.path.name, mixed)
            frozen = frozen_part(self.models)
            parts += [] if frozen is None else [frozen]
        self.parts = tuple(parts)

    def _compare_with_record(self, record: CommitRecord) -> None:
        """Compare the headers with everything in the record except digests."""
        have = _contents(self.parts)
        want = {param.name: param.content() for param in record.params}
        if not self.shards or not self.models:  # compare only what could be read
            want = {name: content for name, content in want.items() if name in have}
        head = next(iter(self.shards.values()), None)
        paths = [shard.path for shard in self.shards.values()] + [model.path for model in self.models.values()]
        where = paths[0].name
        for name, what in _differences(want, have):
            sentence = f"{where} and the other ranks' files contradict the commit record: {what}."
            self.problems.append(Problem(file=where, sentence=sentence, param=name))
        trained = {param.name for param in head.layout.params} if head is not None else set()
        for param in record.params:
            if head is not None and param.name in have and param.trainable != (param.name in trained):
                said = "trained" if param.trainable else "frozen"
                sentence = f"{param.name} is {said} by the commit record and not by the files."
                self.problems.append(Problem(file=where, sentence=sentence, param=param.name))
        if head is not None:
            for what, ours, theirs in (
                ("format", head.format, record.checkpoint_format),
                ("global batch", head.train_batch_size or record.train_batch_size, record.train_batch_size),
            ):
                if ours != theirs:
                    self._add(where, f"{where}: the {what} is {ours}; the commit record says {theirs}. {MIXED}")


def _contents(parts: Iterable[SavedPart]) -> dict[str, ParamContent]:
    """Each parameter as the headers describe it, with 0 for every digest."""
    return {
        param.name: ParamContent(param, {key: (dtype, 0) for key, dtype in part.dtypes[p].items()}, part.scalars[p])
        for part in parts
        for p, param in enumerate(part.layout.params)
    }


def _differences(want: Mapping[str, ParamContent], have: Mapping[str, ParamContent]) -> list[tuple[str, str]]:
    """(parameter, clause) for every way in which two parameter tables disagree, digests aside."""
    found = [(name, f"they do not hold {name}") for name in want if name not in have]
    found += [(name, f"it does not have {name}") for name in have if name not in want]
    for name, content in want.items():
        other = have.get(name)
        if other is None:
            continue
        for what, ours, theirs in (
            ("shape", list(content.param.shape), list(other.param.shape)),
            ("state keys and dtypes", _dtypes(content), _dtypes(other)),
            ("scalars", _scalars(content), _scalars(other)),
        ):
            if ours != theirs:
                found.append((name, f"the {what} of {name} are {theirs} there and {ours} in the record"))
    return found


def _dtypes(content: ParamContent) -> dict[str, str]:
    return {key: dtype for key, (dtype, _) in sorted(content.tensors.items())}


def _scalars(content: ParamContent) -> dict[str, str]:
    return {key: value.canonical() for key, value in sorted(content.scalars.items())}


def _model_facts(model: ModelStates) -> dict[str, str]:
    frozen = None if model.frozen is None else model.frozen.params
    dtypes = None if model.frozen_extents is None else sorted(model.frozen_extents.dtype.items())
    return {
        "the step": str(model.global_steps),
        "parameters": repr(model.sub_groups),
        "frozen parameters": repr(frozen),
        "the dtypes of frozen parameters": repr(dtypes),
    }
