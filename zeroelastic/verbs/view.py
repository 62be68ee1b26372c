"""``zeroelastic.open``: a checkpoint as a read-only mapping from names to tensors, read lazily."""

from __future__ import annotations

import difflib
import html
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType, TracebackType

from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.checkpoint.contradictions import check_same_models, check_same_save
from zeroelastic.checkpoint.extents import ExtentsOnDemand, TensorExtents
from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.open import open_committed
from zeroelastic.checkpoint.optimizer_file import FP32, ParamGroup
from zeroelastic.checkpoint.saved_state import SavedState, frozen_part, saved_parts
from zeroelastic.checkpoint.tag_files import one_save, parse_rank_file
from zeroelastic.core.digest import ByteArray
from zeroelastic.errors import CheckpointError, UnknownTensorError, UsageError, counted, printable, with_remedy
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.torch_file.header import TensorRef, TorchFile, read_torch_file
from zeroelastic.torch_file.zip_check import ZipRecords
from zeroelastic.verbs.interface import Part
from zeroelastic.verbs.model_tensors import ModelTensor, ModelTensors, StoredBuffer, model_tensors, stored_tensor
from zeroelastic.verbs.reading import Reading
from zeroelastic.verbs.tensor import TensorHandle

_LISTED = 20
_NEAR = 3


@with_remedy()
def open(path: str | os.PathLike[str], *, tag: str | None = None) -> CheckpointView:
    """Open a checkpoint, rigid or elastic, as a read-only mapping from the names of the model's tensors to the tensors.

    ``path`` is a tag directory, the directory above it (the tag that ``latest`` names is taken, or ``tag``), a
    ``checkpoint-N`` of the Hugging Face Trainer, a directory of accelerate or Lightning, or a URL that fsspec reads.
    File names, the commit record and at most one header are read; everything else when it is asked for.

    Raises UsageError where there is no checkpoint, CheckpointError, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        with zeroelastic.open("ckpt") as ck:
            print(ck.world_size, ck.step, len(ck))
            print(ck["model.norm.weight"][3:7].numpy())
            print(ck.optimizer("model.norm.weight")["step"])
    """
    return CheckpointView(find_source(path, tag=tag))


class TensorPlace(Part):
    """A run of elements in the file of a saved rank: ``numel`` from ``start`` on are ``bytes`` from ``offset``."""

    rank: int
    file: str
    offset: int
    bytes: int
    start: int
    numel: int


class CheckpointView(Mapping[str, TensorHandle]):
    """A checkpoint as a mapping: the parameters, as fp32 master weights where they are trained, and the buffers.

    The keys are the names in the model's state dict: first every tensor once, in the order of the state dict, then the
    further names of tied parameters (``tied``), under which the same tensor is found. Frozen parameters and buffers
    have the dtype in which they were saved.

    All that is read belongs to one save: when a job saves the tag again meanwhile, reading raises SavedAgainError.
    The view is a context manager; after ``close`` nothing can be read. Headers of the other ranks are read when a
    tensor needs them, and must agree with rank 0's (CheckpointError).
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._is_open = True
        self._records: dict[FilePath, list[tuple[int, ZipRecords]]] = {}
        with self._reading():
            self._checkpoint = open_committed(source.tag_dir)

    # --- the mapping ---------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> TensorHandle:
        """The tensor of this name. Raises UnknownTensorError, which is a KeyError."""
        return self._handle(self._tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def optimizer(self, name: str) -> Mapping[str, TensorHandle | object]:
        """The optimizer's state of a parameter by state key: handles of tensors, and scalars such as ``step``.

        The master weights are ``self[name]``. Empty for frozen parameters. Raises UnknownTensorError.

        Example::

            import zeroelastic
            with zeroelastic.open("ckpt") as ck:
                state = ck.optimizer("model.norm.weight")
                print(state["exp_avg"].numpy().mean(), state["step"])
        """
        tensor = self._tensor(name)
        place = tensor.source
        if isinstance(place, StoredBuffer):
            raise UnknownTensorError(
                f"{self.path}: {printable(name)} is a buffer; only parameters have optimizer state. Read it with [...]."
            )
        part = place.part
        state: dict[str, TensorHandle | object] = {
            key: self._handle(
                ModelTensor(f"{tensor.name}.{key}", tensor.shape, dtype, "state", replace(place, key=key))
            )
            for key, dtype in part.dtypes[place.param].items()
            if key not in (FP32, place.key)
        }
        return MappingProxyType(state | {key: value.value for key, value in part.scalars[place.param].items()})

    def places(self, name: str, *, key: str | None = None) -> tuple[TensorPlace, ...]:
        """Where the files have a tensor, in element order; ``key`` is a state key, None: the weight.

        Opens the headers of the ranks that hold it. Raises UnknownTensorError.
        """
        tensor = self._tensor(name)
        if key is not None and not isinstance(tensor.source, StoredBuffer):
            tensor = replace(tensor, source=replace(tensor.source, key=key))
        with self._reading():
            rows = tensor.rows()
        files = [parse_rank_file(path.name) for path in rows.paths]
        topology = self._checkpoint.topology
        ranks = [0 if file is None else topology.rank(file.rank, file.tp_rank) for file in files]
        columns = (rows.file, rows.file_offset, rows.nbytes, rows.start, rows.numel)
        places = [
            TensorPlace(rank=ranks[i], file=rows.paths[i].name, offset=at, bytes=nbytes, start=start, numel=numel)
            for i, at, nbytes, start, numel in zip(*(column.tolist() for column in columns), strict=True)
        ]
        return tuple(sorted(places, key=lambda place: place.start))

    def unknown(self, name: str) -> UnknownTensorError:
        """The error for a name that no tensor has, with the names that are near."""
        saved = self._checkpoint.inventory
        if name in {content.param.name for content in saved.excluded()}:
            return UnknownTensorError(
                f"{self.path}: the weights of frozen parameter {printable(name)} are not in the checkpoint, which was "
                f"saved with {saved.excluded_how}. Take them from the base model."
            )
        parts = [known for known in self if name and name in known]
        near = (difflib.get_close_matches(name, self, _NEAR, cutoff=0.7) + parts)[:_NEAR]
        meant = f"Did you mean {' or '.join(map(printable, dict.fromkeys(near)))}?"
        hint = meant if near else "List the names with `zeroelastic inspect --params`."
        return UnknownTensorError(f"{self.path}: has no tensor {printable(name)}. {hint}")

    # --- the checkpoint ------------------------------------------------------------------------------------------

    @property
    def path(self) -> FilePath:
        """The tag directory."""
        return self._source.tag_dir

    @property
    def tag(self) -> str:
        """The name of the tag."""
        return self._source.tag

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self._checkpoint.world_size

    @property
    def stage(self) -> int:
        """The ZeRO stage that saved it: 1, 2 or 3."""
        return self._checkpoint.shard(0).stage

    @cached_property
    def format(self) -> str:
        """``"elastic"`` or ``"rigid"``."""
        with self._reading():
            return self._checkpoint.format

    @cached_property
    def step(self) -> int:
        """``global_steps`` of the engine that saved it."""
        steps = self._checkpoint.inventory.global_steps
        if steps is not None:
            return steps
        with self._reading():
            return self._checkpoint.model_states(0).global_steps

    @property
    def content_root(self) -> str | None:
        """The content root that the commit record states, the same at every world size; None without a record."""
        return self._checkpoint.inventory.content_root

    @property
    def record(self) -> CommitRecord | None:
        """The commit record; None where there is none."""
        return self._checkpoint.record

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        """The optimizer's parameter groups: ``options`` (the hyper-parameters) and ``params`` (names) of each."""
        return self._state.groups

    @property
    def tied(self) -> Mapping[str, str]:
        """The further names of tied parameters: name -> the name under which the tensor was saved."""
        return MappingProxyType(dict(self._model.tied))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return a sentence on each tensor of the model that this mapping does not have, and why."""
        return self._model.left_out

    @cached_property
    def client_state(self) -> Mapping[str, object]:
        """The ``client_state`` of ``save_checkpoint``, read from rank 0's file without running anything of it.

        Tensors are handles; an object of a class that is not on the allow-list is an inert ``Stub`` of it.
        """
        with self._reading():
            file = read_torch_file(self._checkpoint.model_files[0], foreign="inert")
        root = file.root
        if not isinstance(root, dict):
            raise CheckpointError(f"{file.path}: is not a DeepSpeed model states file.")
        seen: dict[int, object] = {}
        return MappingProxyType(
            {key: self._with_handles(key, root[key], file, seen) for key in client_state_keys(root)}
        )

    # --- opening and closing -------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the use of the checkpoint: whatever is read from it, or from its handles, raises UsageError."""
        self._is_open = False

    def __enter__(self) -> CheckpointView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<zeroelastic checkpoint {self.path}: step {self.step}, {counted(self.world_size, 'rank')}>"

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><td>{html.escape(t.name)}</td><td>{t.kind}</td><td>{list(t.shape)}</td><td>{t.dtype}</td></tr>"
            for t in self._model.tensors[:_LISTED]
        ]
        more = len(self._model.tensors) - len(rows)
        end = f"<p>and {more} more</p>" if more > 0 else ""
        return f"<p>{html.escape(repr(self))}</p><table>{''.join(rows)}</table>{end}"

    # --- reading -------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if not self._is_open:
            raise UsageError(f"{self.path}: the checkpoint was closed. Open it again to read from it.")
        with with_remedy(), one_save(self._source.tag_dir):
            yield

    @cached_property
    def _state(self) -> SavedState:
        """The state as ``open_state`` opens it, but other headers than rank 0's when their extents are asked for."""
        checkpoint = self._checkpoint
        with self._reading():
            head, model = checkpoint.shard(0), checkpoint.model_states(0)
            check_same_models((model,), head, checkpoint.inventory)
            trained, frozen = saved_parts(checkpoint, {0: head}, (model,))
            has_experts = checkpoint.frozen.experts is not None

        def trained_extents(rank: int) -> Mapping[str, TensorExtents]:
            shard = checkpoint.shard(rank)
            check_same_save({rank: shard}, head, checkpoint.inventory, resizable=False)
            return checkpoint.extents(rank)

        def frozen_extents(rank: int) -> Mapping[str, TensorExtents]:
            other = checkpoint.model_states(rank)
            check_same_models((model, other), head, checkpoint.inventory)
            return frozen_part({0: model, rank: other}, checkpoint.frozen.layout).extents[rank]

        trained = replace(trained, extents=ExtentsOnDemand(trained.layout.world_size, trained_extents))
        frozen = (
            frozen
            if has_experts
            else replace(frozen, extents=ExtentsOnDemand(frozen.layout.world_size, frozen_extents))
        )
        return SavedState(checkpoint, head, (model,), (trained, frozen))

    @cached_property
    def _model(self) -> ModelTensors:
        state = self._state
        with self._reading():
            return model_tensors(state)

    @cached_property
    def _by_name(self) -> dict[str, ModelTensor]:
        return self._model.by_name()

    def _tensor(self, name: str) -> ModelTensor:
        try:
            return self._by_name[name]
        except KeyError:
            raise self.unknown(str(name)) from None

    def _handle(self, tensor: ModelTensor) -> TensorHandle:
        """A handle refers to this view. The view keeps none: it is freed, and its directory closed, with the last."""
        return TensorHandle(tensor.name, tensor.shape, tensor.dtype, tensor.kind, partial(self._read, tensor))

    def _read(self, tensor: ModelTensor, start: int, numel: int, compared: bool) -> ByteArray:
        """The bytes of ``numel`` elements of the flattened tensor from ``start`` on: shape ``(nbytes,)``.

        A whole tensor is compared: with its digest if ``compared``, and where files have none, with the CRC-32 of
        records that are read whole, or nearly so. Raises DigestMismatchError.
        """
        with self._reading():
            reading = Reading(self._checkpoint, archives=self._archives)
            known = compared or not reading.is_recorded or tensor.kind == "buffer"
            data = reading.read(tensor, start, start + numel, check=known and numel == tensor.numel)
            reading.end()
        return data

    def _archives(self, path: FilePath) -> Iterable[tuple[int, ZipRecords]]:
        if path not in self._records:
            self._records[path] = [*self._checkpoint.archives(path)]
        return self._records[path]

    def _with_handles(self, name: str, value: object, file: TorchFile, seen: dict[int, object]) -> object:
        """A value of the client state with handles in place of tensors; a container may hold itself."""
        if isinstance(value, TensorRef):
            return replace(self._handle(stored_tensor(name, value, file)), kind="client")
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, dict):
            made: dict[object, object] = {}
            seen[id(value)] = made
            made |= {key: self._with_handles(f"{name}.{key}", item, file, seen) for key, item in value.items()}
            return made
        if isinstance(value, list):
            items: list[object] = []
            seen[id(value)] = items
            items += [self._with_handles(f"{name}.{i}", item, file, seen) for i, item in enumerate(value)]
            return items
        if isinstance(value, tuple):
            return tuple(self._with_handles(f"{name}.{i}", item, file, seen) for i, item in enumerate(value))
        return value
