"""Convert a checkpoint to one that a job of FSDP2 loads with its optimizer, written by torch's own library.

The state dict is that of ``get_model_state_dict`` and ``get_optimizer_state_dict`` (torch.distributed.checkpoint):

    model.NAME                        float32 master weights, frozen parameters, buffers
    optim.state.NAME.KEY              exp_avg, exp_avg_sq, ..., and step as torch's optimizers have it
    optim.param_groups.NUMBER.OPTION  nested, with the names under params
    optim.param_groups.NAME.OPTION    the same, flattened

A job loads it in either form. In accelerate's layout the model is in ``pytorch_model_fsdp_0`` and the optimizer, nested
and under ``optimizer``, in ``optimizer_0``. What torch has no place for is kept under ``zeroelastic``
(``dcp.saved.NativeNotes``), and named in the notes.

torch plans and writes. A SavePlanner reads one tensor at a time, or one piece of a large one, from all ranks' files
into memory. torch is imported by the functions that write.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeroelastic.checkpoint.model_states import COUNTERS, client_state_keys
from zeroelastic.checkpoint.optimizer_file import FP32, OptionValue, ParamGroup
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.core.digest import ScalarValue
from zeroelastic.dcp.names import NATIVE
from zeroelastic.dcp.saved import (
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    SCHEDULER_FILE,
    NativeNotes,
    kinds_of_scalars,
    with_kind,
)
from zeroelastic.errors import UnsupportedError, printable, require_torch, some
from zeroelastic.io.atomic import errors_of_the_system, name_in_errors
from zeroelastic.torch_file.header import DTYPE_BYTES, read_tree
from zeroelastic.torch_file.tree import entry, pairs_of
from zeroelastic.verbs.model_tensors import ModelTensor, ModelTensors, model_groups, model_tensors, part_tensors
from zeroelastic.verbs.new_files import write_archive
from zeroelastic.verbs.reading import Reading
from zeroelastic.verbs.reshard.source import no_hyper_parameters

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

FsdpLayout = Literal["torch", "accelerate"]
"""The directories of the result: one, or the two that accelerate and the Trainer have."""

_ADAM: Mapping[str, OptionValue] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""The options of torch.optim.AdamW and Adam (torch 2.13), of which a load asks for every one."""

_ALSO_OF_TORCH = ("initial_lr",)

_FILE_BYTES = 8 << 20
_SMALL_BYTES = 1 << 10  # of an object such as a number
_MAX_DEPTH = 4  # of lists in lists


@dataclass(frozen=True, slots=True)
class Fsdp2Plan:
    """The tensors and groups to write, as torch has them, and notes on everything that torch has no place for."""

    state: SavedState
    model: ModelTensors
    groups: tuple[ParamGroup, ...]
    layout: FsdpLayout
    native: NativeNotes
    scheduler: Mapping[str, object]
    notes: tuple[str, ...]

    @property
    def num_tensors(self) -> int:
        """Tensors that are written, tied ones under each of their names."""
        return len(self._all)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are read."""
        return sum(tensor.nbytes for tensor in self._all)

    @property
    def _all(self) -> list[ModelTensor]:
        return [*self.model.by_name().values(), *self._of_optimizer]

    @property
    def _of_optimizer(self) -> list[ModelTensor]:
        trained = self.state.parts[0]
        return part_tensors(trained, {key for dtypes in trained.dtypes for key in dtypes} - {FP32})

    def write(self, directory: Path, reading: Reading) -> None:
        """Write the files. Raises MissingPackageError without torch."""
        require_torch("convert --to fsdp2")
        reader = TensorReader(reading)
        buffers = [tensor.name for tensor in self.model.tensors if tensor.kind == "buffer"]
        kept = self.native.model_copy(update={"buffers": tuple(buffers), "tied": dict(self.model.tied)}).text()
        named = self.model.by_name().items()
        model = {name: reader.placeholder(f"model.{name}", tensor) for name, tensor in named}
        first: dict[str, Any] = {"model": model, NATIVE: kept}
        if self.layout == "torch":
            optim = self._optimizer(reader, "optim")
            flat = {
                f"optim.param_groups.{name}.{key}": value
                for group in self.groups
                for name in group.params
                for key, value in group.options.items()
            }
            scheduler = {"lr_scheduler": dict(self.scheduler)} if self.scheduler else {}
            folders: dict[Path, dict[str, Any]] = {directory: {**first, "optim": optim, **flat, **scheduler}}
        else:
            optim = self._optimizer(reader, "optimizer")
            folders = {directory / MODEL_FOLDER: first, directory / OPTIMIZER_FOLDER: {"optimizer": optim}}
        for folder, state_dict in folders.items():
            write_state_dict(state_dict, _writer(folder, min(_FILE_BYTES, reading.max_memory // 4)), reader)
        if self.layout == "accelerate" and self.scheduler:
            write_archive(directory / SCHEDULER_FILE, dict(self.scheduler))

    def _optimizer(self, reader: TensorReader, name: str) -> dict[str, Any]:
        """The optimizer's state dict, with meta tensors in place of data; ``name`` is its key in what is written.

        ``step`` is a float32 tensor, as torch's optimizers keep it.
        """
        trained = self.state.parts[0]
        states: dict[str, dict[str, Any]] = {
            param.name: {k: scalar_value(with_kind(v, "float32") if k == "step" else v) for k, v in scalars.items()}
            for param, scalars in zip(trained.params, trained.scalars, strict=True)
        }
        for tensor in self._of_optimizer:
            param_name, key = tensor.digest_name
            states[param_name][key] = reader.placeholder(f"{name}.state.{tensor.name}", tensor)
        groups = [{**group.options, "params": list(group.params)} for group in self.groups]
        return {"state": states, "param_groups": groups}


def plan_fsdp2(state: SavedState, *, layout: FsdpLayout = "torch") -> Fsdp2Plan:
    """Collect what to write.

    Raises CheckpointError, UnsupportedError for experts of AutoEP, whose tensors are not the model's, and for files
    without hyper-parameters.
    """
    if state.checkpoint.whole_model and not any(group.options for group in state.groups):
        raise no_hyper_parameters(state.head.path)
    model = model_tensors(state)
    if model.autoep_blocks:
        raise UnsupportedError(
            f"{state.checkpoint.tag_dir}: {printable(model.autoep_blocks[0])} is a layer of AutoEP, whose tensors have "
            "other names and shapes than those of the model that it replaced, which a job of FSDP2 asks for. "
            "`zeroelastic export` writes them under DeepSpeed's names."
        )
    numbers = [tensor.name for tensor in model.tensors if tensor.kind == "trained" and tensor.name.isdecimal()]
    if numbers and layout == "torch":
        raise UnsupportedError(
            f"{state.checkpoint.tag_dir}: {some(numbers)}: a parameter whose name is a number cannot be written "
            "beside the optimizer's groups, which have numbers. Give --layout accelerate, or put it into a module of "
            "the model."
        )
    saved_groups = model_groups(state)
    notes: list[str] = [f"left out: {sentence}" for sentence in model.left_out]
    groups = _torch_groups(state, saved_groups, notes)
    root = pairs_of(read_tree(state.checkpoint.model_files[0]))
    states = pairs_of(root.get("lr_scheduler"))
    scheduler = {str(key): value for key, value in states.items() if _is_plain(value)}
    if lost := [str(key) for key in states if str(key) not in scheduler]:
        notes.append(f"not carried: {some(lost)} of the lr_scheduler, which a checkpoint of FSDP2 cannot hold")
    of_torch = "last_epoch" in scheduler
    native = NativeNotes(
        counters={key: value for key in COUNTERS if type(value := root.get(key)) is int},
        # What comes back is a run of whole tensors under the model's names.
        ds_config={key: value for key, value in state.head.ds_config.items() if key != "tensor_parallel"},
        stage=state.head.stage,
        options=tuple(dict(group.options) for group in saved_groups),
        kinds=kinds_of_scalars(state.parts[0]),
        lr_scheduler=None if of_torch or not scheduler else scheduler,
    )
    if scheduler and not of_torch:
        notes.append(f"lr_scheduler: it is DeepSpeed's own, which torch does not have; kept under {NATIVE} alone")
    notes.append(f"counters, the DeepSpeed configuration and DeepSpeed's own options: kept under {NATIVE} alone")
    if client := client_state_keys(root):
        notes.append(f"not carried: the client state ({', '.join(client)}). Read it with zeroelastic.open")
    if state.head.scaler is not None and state.head.scaler.dynamic:
        notes.append("not carried: the loss scale, for which a checkpoint of FSDP2 has no place")
    return Fsdp2Plan(state, model, groups, layout, native, scheduler if of_torch else {}, tuple(notes))


def _torch_groups(state: SavedState, groups: Sequence[ParamGroup], notes: list[str]) -> tuple[ParamGroup, ...]:
    """The optimizer's groups with the options that torch's class has; other optimizers keep theirs.

    ``notes`` get what torch does not have.
    """
    head = state.head
    keys = {key for dtypes in state.parts[0].dtypes for key in dtypes} - {FP32}
    if not {"exp_avg", "exp_avg_sq"} <= keys:
        return tuple(groups)
    base = entry(head.ds_config, "optimizer", "params", "lr")
    made: list[ParamGroup] = []
    left: dict[str, None] = {}
    for group in groups:
        options = {key: group.options.get(key, default) for key, default in _ADAM.items()}
        options |= {key: group.options[key] for key in _ALSO_OF_TORCH if key in group.options}
        if isinstance(base, (int, float)):  # for a job that has made a scheduler, which asks for it
            options.setdefault("initial_lr", base)
        left |= dict.fromkeys(key for key in group.options if key not in options)
        if group.options.get("bias_correction") is False:
            notes.append("bias_correction is off in the ZeRO run; torch's Adam always corrects")
        made.append(ParamGroup(options, group.params))
    if "decoupled_weight_decay" not in groups[0].options:
        notes.append("the optimizer's groups are those of torch.optim.AdamW")
    if left:
        notes.append(f"{', '.join(left)}: options that torch's Adam does not have; kept under {NATIVE} alone")
    return tuple(made)


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < _MAX_DEPTH and all(_is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _writer(folder: Path, most: int) -> FileSystemWriter:
    """torch's writer, with a file for so many bytes of tensors: torch keeps all tensors of a file in memory."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class Writer(FileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            written: list[WriteResult] = []
            for number, items in enumerate(_by_bytes(plan.items, most)):
                prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
                written += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
            done: Future[list[WriteResult]] = Future()
            done.set_result(written)
            return done

    return Writer(folder, single_file_per_rank=True, sync_files=False, thread_count=1)


def _by_bytes(items: Sequence[WriteItem], most: int) -> Iterator[list[WriteItem]]:
    """The items in their order, as many at a time as have ``most`` bytes; at least one."""
    some: list[WriteItem] = []
    total = 0
    for item in items:
        data = item.tensor_data
        nbytes = _SMALL_BYTES if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if some and total + nbytes > most:
            yield some
            some, total = [], 0
        some.append(item)
        total += nbytes
    if some:
        yield some


def write_state_dict(state_dict: dict[str, Any], writer: FileSystemWriter, reader: TensorReader) -> None:
    """Let torch write a state dict whose meta tensors are read when they are due. Raises what reading raises."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    save = state_dict_saver.save
    if "no_dist" not in inspect.signature(save).parameters:  # torch 2.6
        save = state_dict_saver.save_state_dict
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", message="`save_state_dict` is deprecated", category=FutureWarning)
        try:
            with name_in_errors(Path(writer.path)):
                save(state_dict, storage_writer=writer, planner=_planner_class()(reader), no_dist=True)
        except CheckpointException as error:
            directory = Path(writer.path)
            with name_in_errors(directory), errors_of_the_system(directory):
                for failure in error.failures.values():
                    raise failure[0] from None
            raise


class TensorReader:
    """Reads tensors by the flattened keys of torch's state dict."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._most = reading.max_memory // 4  # bytes of a tensor that are in memory at once
        self._held = 0  # since the collector ran
        self._tensors: dict[str, ModelTensor] = {}

    def placeholder(self, key: str, tensor: ModelTensor) -> torch.Tensor:
        """A meta tensor for the key, which is read when torch writes it. Raises UnsupportedError."""
        import torch

        if key in self._tensors:
            raise UnsupportedError(f"{key}: two tensors would have this key in a distributed checkpoint.")
        self._tensors[key] = replace(tensor, name=key)  # each of its names is digested by itself
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    def pieces(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the blocks of a large tensor, each one contiguous run that fits in memory.

        Empty for a tensor that is written as a whole.
        """
        tensor = self._tensors.get(key)
        if tensor is None or tensor.kind == "buffer" or tensor.nbytes <= self._most:
            return []
        shape, row_nbytes, dim = tensor.shape, tensor.nbytes, -1
        while row_nbytes > self._most and dim + 1 < len(shape):
            dim += 1
            row_nbytes //= shape[dim]
        step = max(1, self._most // row_nbytes)
        return [
            ((*outer, first, *(0 for _ in shape[dim + 1 :])), (*(1 for _ in outer), count, *shape[dim + 1 :]))
            for outer in itertools.product(*map(range, shape[:dim]))
            for first in range(0, shape[dim], step)
            for count in (min(step, shape[dim] - first),)
        ]

    def read(self, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor | None:
        """A whole tensor or one of the ``pieces``; None for a key that is not one of these tensors."""
        import torch

        tensor = self._tensors.get(key)
        if tensor is None:
            return None
        numel = math.prod(shape)
        self._held += numel * DTYPE_BYTES[tensor.dtype]
        if self._held > self._most:  # torch 2.6 leaves what it has written to the collector
            gc.collect(1)
            self._held = numel * DTYPE_BYTES[tensor.dtype]
        first = sum(o * math.prod(tensor.shape[dim + 1 :]) for dim, o in enumerate(offsets))
        dtype = getattr(torch, tensor.dtype)
        if not numel:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._reading.read(tensor, first, first + numel)).view(dtype).view(shape)


def scalar_value(value: ScalarValue) -> Any:
    """A scalar of optimizer state as it was saved: a 0-dim tensor or a Python value."""
    import torch

    if value.value is None or value.kind.startswith("py"):
        return value.value
    return torch.tensor(value.value, dtype=getattr(torch, value.kind), device="cpu")


@cache
def _planner_class() -> Any:
    """torch's own planner, except that it cuts large tensors and reads data when torch writes it.

    The class is made once: it refers to itself, and one that referred to a reader would keep its files open.
    """
    from torch import Size
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

    class Planner(DefaultSavePlanner):
        def __init__(self, reader: TensorReader) -> None:
            super().__init__()
            self._reader = reader

        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
            return self.plan

        def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
            whole = item.tensor_data
            pieces = self._reader.pieces(item.index.fqn)
            if whole is None or not pieces:
                yield item
                return
            for offsets, sizes in pieces:
                chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
                data = TensorWriteData(chunk=chunk, properties=whole.properties, size=whole.size)
                index = MetadataIndex(item.index.fqn, Size(offsets))
                yield replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)

        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.tensor_data is not None:
                chunk = write_item.tensor_data.chunk
                found = self._reader.read(write_item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))
                if found is not None:
                    return found
            return super().resolve_data(write_item)

    return Planner
