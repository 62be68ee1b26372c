"""A tag checked file by file: names, sizes, the commit record and headers; a problem in one file hides none in another.

``open_checkpoint`` and ``open_state`` stop at the first contradiction, because nothing is loaded then. Here every
contradiction becomes a ``Problem``: ``inspect`` describes what can be read all the same, and ``verify`` reads the
payload of the files that agree with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Literal, TypeVar

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.contradictions import (
    MIXED,
    mixed_models,
    mixed_pair,
    mixed_shards,
    not_committed,
    other_save,
    other_step,
    param_differences,
    steps_note,
)
from zeroelastic.checkpoint.inventory import Inventory, stage_0_root, stated_sizes
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.optimizer_reader import read_optimizer_file
from zeroelastic.checkpoint.saved_state import TensorSet, contents_of, experts_part, frozen_part, trained_part
from zeroelastic.checkpoint.tag_files import (
    StateFiles,
    TagListing,
    TensorParallel,
    list_tag,
    other_tp_size,
    require_files,
)
from zeroelastic.checkpoint.tag_headers import TagHeaders
from zeroelastic.errors import CheckpointError, MissingFileError, UndescribedSlicesError, UnsupportedError, counted
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import read_torch_file

T = TypeVar("T", ModuleHeader, OptimizerHeader)

Headers = Literal["none", "first", "all"]
"""Which headers are opened. "none": none but a model states file's where there is no record to give the world size.
"first": those of the first rank whose files can be read, of a few."""

_TRIES = 3


def check_headers(
    tag_dir: FilePath, *, headers: Headers = "all", listing: TagListing | None = None, first_tp: bool = False
) -> TagHeaders:
    """Check the files of a tag, and keep those that agree with each other; ``listing`` where it was listed already.

    Of a checkpoint of ZeRO stage 0, or of tensor parallel ranks that do not say which slices they have, only names and
    sizes are checked here; it is ``unsupported``. With ``first_tp`` the headers of the first tensor parallel rank are
    opened nevertheless, and compared. Raises MissingFileError where there is no directory or no checkpoint in it.
    Everything else is returned in ``problems``.
    """
    checked = _Checker(list_tag(tag_dir) if listing is None else listing, headers, first_tp)
    checked.check()
    return checked


class _Checker(TagHeaders):
    """Finds out what the headers of a tag say: ``check`` is called once."""

    def __init__(self, listing: TagListing, headers: Headers, first_tp: bool) -> None:
        super().__init__(listing)
        self._headers, self._first_tp = headers, first_tp

    def check(self) -> None:
        """Check everything once."""
        with self._noting(RECORD_NAME):
            self.checkpoint.inventory = Inventory(self.sizes, self.sizes, read_record(self.tag_dir))
        for error in self.listing.duplicates.values():
            self.add("", error)
        files = self.listing.by_rank(self.saved.tensor_size)
        try:
            require_files(self.tag_dir, files)
        except UnsupportedError as error:
            self._check_names(error)
            return
        except MissingFileError as error:
            if not any(name.endswith("_states.pt") for name in self.sizes):
                raise
            self.add("", error)
            return
        self.stated_world_size = self.saved.data_size
        self._use_files(files, self.stated_world_size or 0)
        if self.saved.recorded_by_tensor_rank:
            self.checkpoint.tp = TensorParallel(size=files.tensor_size)
            self._check_names(other_tp_size(self.tag_dir, files.tensor_size, None))
            return
        if not self.saved.is_recorded:
            self._open_models(None)
            if self._is_opaque:
                self._check_names(None)
                return
            files = self._with_stated_tensor_size(files)
            self.stated_world_size = self._likely_world_size(files)
        self._use_files(files, self.stated_world_size or self.listing.num_ranks)
        self.find_missing(files)
        for paths in (self.optim_files, self.model_files):
            for rank in [rank for rank in paths if rank >= self.world_size]:
                del paths[rank]
        if self.saved.is_recorded and self._headers != "none":
            self._open_models(self.saved.data_size)
        if not self.saved.is_recorded or self._headers != "none":
            self._choose_models()
            self._open_shards()
            self._choose_shards()
            head = self.first_shard if RECORD_NAME not in self.sizes else None  # else it is there, and damaged
            if head is not None and (missing := not_committed(head, self.saved)) is not None:
                self.missing.append(self.add(RECORD_NAME, missing))
            self._put_together()
            self._compare_with_record()
        if self._headers != "first":
            self.find_experts()

    @property
    def _is_opaque(self) -> bool:
        """Whether there are tensor parallel ranks that do not say which slices they have."""
        return self.checkpoint.tp.size > 1

    def _use_files(self, files: StateFiles, data_size: int) -> None:
        """Take these files as the files of the save."""
        self.num_rank_files = files.tensor_size * data_size + files.num_models(data_size)
        self.optim_files, self.model_files = self._paths(files.optim), self._paths(files.models)
        self.checkpoint.use_files(files, data_size)

    def _with_stated_tensor_size(self, files: StateFiles) -> StateFiles:
        """Number files and headers by the tensor parallel size that most model states files state."""
        counts = Counter(model.tensor_size for model in self.models.values())
        if not counts or (size := counts.most_common(1)[0][0]) == files.tensor_size:
            return files
        files = self.listing.by_rank(size)
        self._use_files(files, 0)
        self.models = dict(self.checkpoint.models)
        return files

    def _check_names(self, error: UnsupportedError | None) -> None:
        """Keep the files that ranks write, whatever is in them: names, sizes and checksums are compared."""
        listing, files, root = self.listing, self.listing.files, stage_0_root(self.listing)
        names = [*files.optim.values(), *files.models.values()]
        self.is_stage_0 = root is not None
        if root is not None:
            self.root = root
            error = UnsupportedError(
                f"{self.tag_dir}: {min(files.models.values())} holds the optimizer too. It is of ZeRO stage 0, whose "
                "optimizer state does not name its parameters: only a stage 0 run resumes it."
            )
        if error is not None and (self.is_stage_0 or self._is_opaque):
            self._refuse(error)
        self.stated_world_size, tp_size = self.saved.data_size, self.saved.tensor_size or listing.tp_size
        for name in () if self.saved.is_recorded else files.models.values():
            with suppress(CheckpointError, UnsupportedError):
                self.stated_world_size, tp_size = stated_sizes(self.tag_dir, [name]) or (None, tp_size)
                break
        self._use_files(listing.by_rank(1), self.stated_world_size or max(1, listing.num_ranks))
        if not self.is_stage_0:  # which has the files of no other rank
            self.find_missing(listing.by_rank(tp_size))
        self.notes.append("not checked: what the headers of the files say")
        self._other_names = sorted({*names, *self._other_names, *self.saved.recorded_sizes})
        self.num_rank_files, self.models = 0, {}
        if not self._first_tp or self.is_stage_0:
            self.optim_files, self.model_files = {}, {}
            return
        self.num_opened = 0
        self._open_models(self.stated_world_size)
        self._choose_models()
        self._open_shards()
        self._choose_shards()

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """A block that opens a file: an error in it is noted."""
        try:
            yield
        except UnsupportedError as error:
            self._refuse(error)
        except CheckpointError as error:
            self.add(name, error)

    def _refuse(self, error: UnsupportedError) -> None:
        """Note what of a file is not read here, once where the files of several ranks have it."""
        sentence = str(error)
        reason = sentence.removeprefix(f"{self.tag_dir}: ").partition(": ")[2]
        if not any(other.endswith(f": {reason}") for other in self.unsupported):
            self.unsupported.append(sentence)

    def _paths(self, names: Mapping[int, str]) -> dict[int, FilePath]:
        """The files by rank; where many are read, those that have the size that the commit record states."""
        sizes = self.sizes if self._headers == "first" else {**self.sizes, **self.saved.recorded_sizes}
        return {rank: self.tag_dir / name for rank, name in sorted(names.items()) if self.sizes[name] == sizes[name]}

    def _each(self, files: Mapping[int, FilePath], read: Callable[[int, FilePath], None]) -> None:
        """Open headers, as many as are asked for; what cannot be read is noted."""
        few = None if self._headers == "all" else _TRIES if self._headers == "first" else len(files)
        before = self.num_opened
        for rank, path in islice(files.items(), few):
            if self._headers != "all" and self.num_opened > before:
                return
            with self._noting(path.name):
                read(rank, path)
                self.num_opened += 1

    def _open_models(self, data_size: int | None) -> None:
        """Open model states headers of a save of ``data_size`` data parallel ranks, as many as are asked for."""

        def read(rank: int, path: FilePath) -> None:
            self.models[rank] = self._read_model(rank, path, data_size)

        self._each(self.model_files, read)

    def _read_model(self, rank: int, path: FilePath, data_size: int | None) -> ModuleHeader:
        """One model states header, and with the first one the maps of slices."""
        file = read_torch_file(path, foreign="inert")
        if self.first_model is None:
            self.root = file.root if isinstance(file.root, dict) else {}
        try:
            model = self.checkpoint.take_model_states(file, rank, data_size=data_size, tp=None)
        except UndescribedSlicesError:
            tensor_size = self.root.get("mp_world_size")
            assert isinstance(tensor_size, int), "more than 1, else nothing is undescribed"
            self.checkpoint.tp = TensorParallel(size=tensor_size)
            raise other_tp_size(path, tensor_size, None) from None
        self.first_model = self.first_model or model
        return model

    def _likely_world_size(self, files: StateFiles) -> int | None:
        """The world size, without a record: what all or most model states files state, or else an optimizer file."""
        counts = Counter(model.world_size for model in self.models.values())
        if not counts:
            return self._partition_count() if self._headers != "none" else None
        said = {rank: model.world_size for rank, model in self.models.items()}
        whole = [size for size in counts if all(said.get(rank) == size for rank in range(files.num_models(size)))]
        world_size = whole[0] if whole else counts.most_common(1)[0][0]
        for rank, model in list(self.models.items()):
            if whole and rank >= files.num_models(world_size):  # of an earlier save
                del self.models[rank]
            elif model.world_size != world_size:
                saved_by = counted(model.world_size, "rank")
                self.add(
                    model.path.name, f"{model.path}: was saved by {saved_by}, most others by {world_size}. {MIXED}"
                )
                del self.models[rank]
        return world_size

    def _partition_count(self) -> int | None:
        """The ranks that an optimizer file of stage 3 states."""
        for rank, path in islice(self.optim_files.items(), _TRIES):
            with suppress(CheckpointError, UnsupportedError):
                root = read_torch_file(path).root
                state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
                count = state.get("partition_count") if isinstance(state, dict) else None
                if type(count) is int and count > rank:
                    return count
        return None

    def _choose_models(self) -> None:
        """Keep the model states files that agree with the record, or without a record with the majority.

        Tensor parallel ranks, which have parameters of other shapes, are compared each by itself.
        """
        for rank, model in list(self.models.items()):
            mixed = other_step(model, self.saved)
            if model.tensor_size != self.topology.tensor_size and not self._is_opaque:
                sizes = f"{model.tensor_size} tensor parallel ranks, the rest of the checkpoint by"
                mixed = f"{model.path}: was saved by {sizes} {self.topology.tensor_size}. {MIXED}"
            if mixed is not None:
                self.add(model.path.name, mixed)
                del self.models[rank]
        self._drop(self.models, mixed_models(self.models, self.topology.tensor_size))

    def _model_of(self, tensor_rank: int) -> ModuleHeader | None:
        """A model states header of a tensor parallel rank; None where none can be read."""
        size = self.topology.tensor_size
        found = next((model for rank, model in self.models.items() if rank % size == tensor_rank), None)
        if found is None and self._headers == "first":
            if size == 1:
                return self.first_model
            paths = {rank: path for rank, path in self.model_files.items() if rank % size == tensor_rank}
            for rank, path in islice(paths.items(), _TRIES):
                with self._noting(path.name):
                    found = self.models[rank] = self._read_model(rank, path, self.topology.data_size)
                    self.num_opened += 1
                    break
        return found

    def _known_models(self) -> list[ModuleHeader]:
        """A model states header of each tensor parallel rank of which one can be read."""
        found = map(self._model_of, range(self.topology.tensor_size))
        return [model for model in found if model is not None]

    def _open_shards(self) -> None:
        size = self.topology.tensor_size
        known = self._known_models()
        if len(known) < size and (size > 1 or self.listing.files.whole_model):
            self.notes.append(
                "of the optimizer files only checksums: the file that names their parameters is unreadable"
            )
            return

        self.checkpoint.models = {model.rank: model for model in known}
        model_name = next(iter(self.listing.files.models.values()), None)

        def read(rank: int, path: FilePath) -> None:
            if known:
                shard = self.checkpoint.read_shard(rank)
            else:
                shard = read_optimizer_file(path, world_size=self.topology.data_size).header(rank, params=None)
            self.first_shard = self.first_shard or shard
            if (mixed := other_save(shard, self.saved.save_id, model_name)) is not None:
                raise CheckpointError(mixed)
            self.shards[rank] = shard

        self._each(self.optim_files, read)

    def _choose_shards(self) -> None:
        """Keep the optimizer files that agree with the record, or without a record with the majority."""

        def fits(shard: OptimizerHeader) -> bool:
            trained = self.saved.trained
            want = {one.param.name: one for one in self.saved.contents() if one.param.name in trained}
            return not param_differences(want, contents_of([self._trained({}, shard)]))

        mixed, by_rank = mixed_shards(self.shards, self.saved, fits)
        if by_rank is not None:
            self.unsupported.append(f"{self.tag_dir}: {by_rank}")
        self._drop(self.shards, mixed)

    def _drop(self, headers: dict[int, T], mixed: Mapping[int, str]) -> None:
        """Drop headers, each with a problem."""
        for rank, sentence in mixed.items():
            self.add(headers.pop(rank).path.name, sentence)

    def _trained(self, shards: Mapping[int, OptimizerHeader], head: OptimizerHeader) -> TensorSet:
        return trained_part(shards, head, None if self.sliced is None else self.sliced.layout)

    def _put_together(self) -> None:
        head = next(iter(self.shards.values()), None)
        parts = [] if head is None else [self._trained(self.shards, head)]
        first = next(iter(self.models.values()), None)
        if first is not None:
            if head is not None:
                mixed = mixed_pair(first, head, self.saved)
                if mixed is not None:
                    self.add(first.path.name, mixed)
                elif (note := steps_note(first, head, self.saved)) is not None:
                    self.notes.append(note)
            with self._noting(first.path.name):
                sliced = 1 < self.topology.tensor_size == len(self._known_models())
                layout = self.checkpoint.frozen.layout if sliced else None
                parts.append(self._experts_part(first) or frozen_part(self.models, layout))
        self.parts = tuple(parts)
        self.tensors = tuple(tensor for part in parts for tensor in part.tensors())

    def _experts_part(self, model: ModuleHeader) -> TensorSet | None:
        """The frozen parameters where some are experts; None where none are, or where their files are damaged."""
        try:
            experts = self.checkpoint.frozen.experts if self.topology.tensor_size == 1 else None
            part = None if experts is None else experts_part(experts)
            self._has_frozen_experts = part is not None
            return part
        except CheckpointError as error:
            name = next((name for name in model.expert_files if f"{name}:" in str(error)), model.path.name)
            if name in self.sizes:  # else it is said to be missing
                self.add(name, error)
            return None

    def _compare_with_record(self) -> None:
        """Compare the headers with everything in the record except digests."""
        saved = self.saved
        if not saved.is_recorded or not self.parts:
            return
        found = contents_of(self.parts)
        have = {content.param.name for content in found}
        want = {content.param.name: content for content in saved.contents()}
        excluded = {content.param.name for content in saved.excluded()}
        want = {name: content for name, content in want.items() if name not in excluded}
        if not self.shards or not self.models:  # compare only what could be read
            want = {name: content for name, content in want.items() if name in have}
        head = next(iter(self.shards.values()), None)
        path = head.path if head is not None else next(iter(self.models.values())).path
        for name, what in param_differences(want, found):
            sentence = f"{path} and the other ranks' files contradict the commit record: {what}."
            self.add(path.name, sentence, param=name)
        if head is None:
            return
        recorded, trained = saved.trained, {param.name for param in self.parts[0].params}
        for name in want:
            if name in have and (name in recorded) != (name in trained):
                said = "trained" if name in recorded else "frozen"
                self.add(path.name, f"{name} is {said} by the commit record and not by the files.", param=name)
        for what, ours, theirs in (
            ("format", head.format, saved.format),
            ("global batch", head.train_batch_size or saved.train_batch_size, saved.train_batch_size),
        ):
            if ours != theirs:
                self.add(path.name, f"{path}: the {what} is {ours}; the commit record says {theirs}. {MIXED}")
