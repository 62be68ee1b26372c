"""The running optimizer as saves and loads see it: its layout, flat tensors, groups and state dict.

``save`` and ``load`` reach DeepSpeed's optimizer through a ``LiveOptimizer`` alone. Each kind of optimizer is one
subclass, listed in ``kinds``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import engine_of, state_of
from zeroelastic.deepspeed.live.optimizers import (
    common_state,
    common_state_made_later,
    live_form,
    scalar_value,
    state_dtype,
)
from zeroelastic.deepspeed.live.topology import LiveTopology, read_topology
from zeroelastic.errors import UnsupportedError
from zeroelastic.errors import buffer_kind as word_for_buffer
from zeroelastic.io.large_pages import ask_for_large_pages


class LiveOptimizer(ABC):
    """One rank's view of the ZeRO optimizer of an engine.

    A *sub-group* is one flat buffer of master weights and its optimizer state. Invariants: ``layout`` matches the
    optimizer's own table; ``groups[g]`` names the parameters of optimizer group g in flat order, and ``group_of[i]`` is
    the group of sub-group i; ``trained`` are the parameters that the optimizer has, ``frozen`` is the layout of every
    other parameter of ``module``. Tensors are looked up when they are asked for, because DeepSpeed may replace them.

    Layouts go by the names of whole tensors: ``layout`` and ``frozen`` are this rank's, ``whole`` and ``whole_frozen``
    are of all ranks of ``process_group``; without slices they are the same. ``rank`` is the number of this rank in
    them. Where tensor parallelism is opaque (``topology``), they are of one tensor parallel rank, ``tp``, over its data
    parallel group. ``tied`` has the further names of parameters, each with the one that is used.

    A subclass gives the attributes and the abstract methods. The methods with a body here are right for an optimizer
    that keeps all state in memory, in ``owner(i).state[flat(i)]``.
    """

    layout: Layout
    whole: Layout
    groups: tuple[tuple[str, ...], ...]
    group_of: tuple[int, ...]
    trained: frozenset[torch.nn.Parameter]
    frozen: Layout
    whole_frozen: Layout
    module: torch.nn.Module
    per_param: bool = True
    """Whether each parameter is cut by itself (ZeRO-3), or each optimizer group as a whole (ZeRO-1 and 2)."""
    has_elastic_form: bool = True
    """Whether saves can be elastic; else DeepSpeed's own files have all that another size needs."""
    trains: bool = True
    """Whether there is an optimizer; else every parameter counts as frozen, and only weights are loaded."""
    on_nvme: bool = False
    """Whether the state of any sub-group, or parameters, may lie on NVMe and not in memory."""
    buffer_kind: str = word_for_buffer(3)
    """The word for a flat buffer in messages."""

    def __init__(self, optimizer: Any, names: Mapping[torch.nn.Parameter, str], *, opaque: bool = False) -> None:
        """``names`` are of all parameters, ``opaque`` as of ``read_topology``.

        Raises UnsupportedError for a layout that is not covered.
        """
        self.optimizer = optimizer
        self.base: torch.optim.Optimizer = optimizer.optimizer
        self.dp_group: dist.ProcessGroup = optimizer.dp_process_group
        self.tp_group: dist.ProcessGroup | None = getattr(optimizer, "model_parallel_group", None)
        self.grad_scaler: torch.amp.GradScaler | None = getattr(optimizer, "torch_autocast_gradscaler", None)
        self.module = self._module()
        self._share(read_topology(optimizer, self.module, names, opaque=opaque), names)
        self._read(names)

    def _share(self, sharing: LiveTopology, names: Mapping[torch.nn.Parameter, str]) -> None:
        named = self.module.named_parameters(remove_duplicate=False)
        self.tied = {name: names[param] for name, param in named if names.get(param, name) != name}
        self.sharing = sharing
        self.topology, self.maps, self.rank, self.tp = sharing.topology, sharing.maps, sharing.rank, sharing.tp
        self.process_group = sharing.group

    @abstractmethod
    def _module(self) -> torch.nn.Module:
        """The module whose parameters the optimizer has."""

    @abstractmethod
    def _read(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Set the layouts, the groups and ``trained``."""

    def local_name(self, name: str) -> str:
        """The name on this rank of the parameter that is a slice of a whole tensor."""
        return self._local_names.get(name, name)

    def local_params(self, layout: Layout) -> list[list[Param]]:
        """The parameters of each flat buffer of this rank, in buffer order, as DeepSpeed's files name them."""
        buffers: list[list[Param]] = [[] for _ in range(layout.num_sub_groups)]
        for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True):
            buffers[i].append(Param(self.local_name(param.name), param.shape))
        return buffers

    def _take_layouts(self, whole: Layout, frozen: Layout) -> None:
        """Set the layouts, of those over all ranks."""
        self.whole, self.whole_frozen = whole, frozen
        self.layout, self.frozen = whole.on_rank(self.rank), frozen.on_rank(self.rank)
        named = ((self.sharing.whole_name(name), name) for name in self.maps)
        self._local_names = {name: local for name, local in named if name != local}

    @classmethod
    def left_to_deepspeed(cls, optimizer: Any) -> str | None:
        """Return why loads and saves of this optimizer are DeepSpeed's own; None where they are ours.

        Its state is not read then. ``uncovered`` names the features that are ours and refused.
        """
        return None

    @staticmethod
    @abstractmethod
    def uncovered(optimizer: Any, engine: Engine) -> list[str]:
        """The names of the features in use whose state cannot be read or restored right."""

    def own_options(self) -> list[str]:
        """Return hyper-parameters of steps that are outside of the groups: no load and no scheduler sets them."""
        return []

    @abstractmethod
    def flat(self, sub_group: int) -> torch.Tensor:
        """DeepSpeed's own flat buffer of a sub-group, under which its optimizer keeps state."""

    @abstractmethod
    def frozen_tensor(self, param: int) -> torch.Tensor:
        """This rank's part of a frozen parameter, by its number in ``frozen.params``."""

    def group(self, sub_group: int) -> MutableMapping[str, Any]:
        """The optimizer group that a sub-group belongs to, live."""
        group: MutableMapping[str, Any] = self.base.param_groups[self.group_of[sub_group]]
        return group

    def stepper(self, sub_group: int) -> torch.optim.Optimizer:
        """The optimizer whose class says what the state of a sub-group is."""
        return self.base

    def owner(self, sub_group: int) -> torch.optim.Optimizer:
        """The optimizer that keeps the state of a sub-group."""
        return self.base

    def fp32(self, sub_group: int) -> torch.Tensor:
        """The flat fp32 master weights of a sub-group: 1-D, padding included."""
        return self.flat(sub_group).detach()

    @property
    def on_gpu(self) -> bool:
        """Whether all master weights of this rank are in the memory of a GPU; False where it has none."""
        kinds = {self.flat(i).device.type for i in range(self.layout.num_sub_groups)}
        return kinds == {"cuda"}

    def own_state(self, sub_group: int) -> MutableMapping[str, Any]:
        """The optimizer's own dict of a sub-group's state, created if there is none."""
        state: MutableMapping[str, Any] = self.owner(sub_group).state[self.flat(sub_group)]
        return state

    def state(self, sub_group: int) -> MutableMapping[str, Any]:
        """The state of a sub-group, live tensors; empty before the first step. May be a copy of the dict."""
        state: MutableMapping[str, Any] = self.owner(sub_group).state.get(self.flat(sub_group), {})
        return state

    def split_state(self, sub_group: int) -> tuple[dict[str, torch.Tensor], dict[str, ScalarValue]]:
        """Tensors shaped like the flat buffer, and replicated scalars. Raises UnsupportedError for anything else."""
        shape = self.fp32(sub_group).shape
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, ScalarValue] = {}
        for key, value in self.state(sub_group).items():
            where = (
                f"{type(self.stepper(sub_group)).__name__}'s optimizer state {key!r} of {self.buffer_kind} {sub_group}"
            )
            if not isinstance(key, str):
                raise UnsupportedError(
                    f'{where} has a key that is not text. Save with "format": "rigid", and resume at the '
                    "saved world size."
                )
            if isinstance(value, torch.Tensor) and value.shape == shape and value.is_contiguous():
                tensors[key] = value.detach()
            else:
                scalars[key] = scalar_value(value, where)
        return tensors, scalars

    def state_dtype(self, sub_group: int, key: str) -> torch.dtype | None:
        """The dtype in which the optimizer keeps a state tensor; None: as it was saved."""
        return state_dtype(self.stepper(sub_group), self.group(sub_group), key, self.fp32(sub_group).dtype)

    def live_form(self, sub_group: int, key: str, value: ScalarValue, where: str) -> ScalarValue:
        """A saved scalar in the form that this sub-group's optimizer keeps. Raises UnsupportedError if it cannot."""
        return live_form(
            value,
            key=key,
            current=self.state(sub_group).get(key),
            optimizer=self.stepper(sub_group),
            options=self.group(sub_group),
            where=where,
        )

    def zero_padding(self, *, weights_only: bool = False) -> None:
        """Set the padding of every flat buffer to zero; DeepSpeed never sets or reads it."""
        for i in range(self.layout.num_sub_groups):
            flats = [self.fp32(i), *({} if weights_only else self.split_state(i)[0]).values()]
            for begin, end in self.layout.padding(self.rank, i):
                for flat in flats:
                    flat[begin:end].zero_()

    def zero_frozen_padding(self) -> None:
        """Set the padding of this rank's parts of frozen parameters to zero, whatever their dtype."""
        for p, numel in enumerate(self.frozen.owned(self.rank)[1].tolist()):
            self.frozen_tensor(p).view(-1)[numel:].view(torch.uint8).zero_()

    # What a load calls, in this order.

    @abstractmethod
    def begin_load(self) -> None:
        """Prepare DeepSpeed's own part of a load. Collective."""

    def refresh(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Take notice of tensors that DeepSpeed's own part of a load may have replaced."""

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Within this context, a load fills every ``destination``, padding and fresh state included.

        If it fails, sub-groups with state of which ``destination`` made a tensor are reset: no step can use memory that
        was not filled.
        """
        self._uninitialised: set[int] = set()  # sub-groups with state in memory that nothing was written to yet
        try:
            yield
        except BaseException:
            for i in self._uninitialised:
                self.reset_state(i)
            raise

    def destination(self, sub_group: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """The live tensor that a key fills: the one that is there, or a new one of this dtype, not initialised.

        Called within ``filling``. The system gives the memory of a new one page by page to the threads that fill it.
        """
        flat = self.fp32(sub_group)
        if key == FP32:
            return flat
        state = self.own_state(sub_group)
        current = state.get(key)
        if not (isinstance(current, torch.Tensor) and current.shape == flat.shape and current.dtype == dtype):
            self._uninitialised.add(sub_group)
            current = state[key] = torch.empty(flat.shape, dtype=dtype, device=flat.device)
            if current.device.type == "cpu":
                ask_for_large_pages(current.data_ptr(), current.nbytes)
        return current.detach()

    @abstractmethod
    def low(self, sub_group: int) -> torch.Tensor | None:
        """This rank's part of the weights of the model, flat; None where it is on NVMe."""

    def rounded(self, sub_group: int) -> torch.Tensor | None:
        """The 16-bit weights of ``fp32(sub_group)``, in host memory, where a fill may make them in its pass."""
        low = self.low(sub_group)
        if low is None or low.device.type != "cpu" or not low.is_contiguous():
            return None
        is_rounded = low.dtype in (torch.bfloat16, torch.float16) and self.fp32(sub_group).dtype == torch.float32
        return low if is_rounded else None

    def drop_state(self, sub_group: int, *, keep: tuple[str, ...] = ()) -> None:
        """Forget live state that the checkpoint does not have; a checkpoint from before the first step has none."""
        state = self.own_state(sub_group)
        for key in [key for key in state if key not in keep]:
            del state[key]
        if not state:
            self.owner(sub_group).state.pop(self.flat(sub_group), None)
        # State of no parameter, as MADGRAD's counter: saves refuse it, so no checkpoint has it.
        base_state: MutableMapping[Any, Any] = self.base.state
        for common in common_state(self.base):
            del base_state[common]
        base_state.update(copy.deepcopy(self._fresh_common_state()))

    def _fresh_common_state(self) -> Mapping[str, Any]:
        engine = engine_of(self.optimizer)
        return {} if engine is None else state_of(engine).fresh_common_state

    def common_state(self) -> list[str]:
        """The names of state that belongs to no parameter, which the optimizer has or is known to make."""
        made = common_state_made_later(self.base)
        kept = {*map(str, common_state(self.base)), *map(str, self._fresh_common_state())}
        return sorted({*kept, *made, *self.own_entries()})

    def own_entries(self) -> list[str]:
        """The entries of the optimizer's state dict beyond its groups and its parameters' state."""
        return sorted(self._base_state_dict().keys() - {"param_groups", "state"})

    def _base_state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def reset_state(self, sub_group: int) -> None:
        """Reset the state of a sub-group to that before the first step: for most optimizers, none."""
        owner = self.owner(sub_group)
        state = owner.state.get(self.flat(sub_group))
        if state is not None and isinstance(owner, torch.optim.Adagrad):  # creates its state in its constructor
            state["sum"].fill_(self.initial_value(sub_group, "sum"))
            state["step"].zero_()
        else:
            self.drop_state(sub_group)

    def initial_value(self, sub_group: int, key: str) -> float:
        """The value of an element of a state tensor before the first step."""
        begins_at = {"sum": "initial_accumulator_value", "step_size": "lr"}.get(key, "")  # of Adagrad, and of Rprop
        return float(self.group(sub_group).get(begins_at, 0.0))

    def state_filled(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Called when the tensors of the optimizer state are the ones that a load fills."""

    def set_scalar(self, sub_group: int, key: str, value: ScalarValue) -> None:
        """Set a replicated value of a sub-group's state; a 0-dim tensor is copied, never an alias."""
        state, dtype = self.own_state(sub_group), getattr(torch, value.kind, None)
        if not isinstance(dtype, torch.dtype):
            state[key] = value.value
            return
        made, current, group = (
            torch.tensor(value.value, dtype=dtype, device="cpu"),
            state.get(key),
            self.group(sub_group),
        )
        if isinstance(current, torch.Tensor) and current.dim() == 0 and current.dtype == dtype:
            current.copy_(made)
        else:  # torch keeps a step beside the parameter only for these two
            on_device = group.get("capturable") or group.get("fused")
            state[key] = made.to(self.flat(sub_group).device if on_device else "cpu")

    def weights(self, sub_group: int) -> torch.Tensor | None:
        """The weights of the model for ``fp32(sub_group)``, where a file of the whole module has them, too."""
        return None

    @abstractmethod
    def finish_weights(
        self, *, from_16_bit: bool, rounded: Collection[int] = (), restored: Layout | None = None
    ) -> None:
        """Bring the 16-bit weights in line with the master weights, and partition the parameters that memory has whole.

        Sub-groups in ``rounded`` are in line already, except for padding; the parameters of ``restored`` are as they
        were saved. ``from_16_bit`` then rounds the master weights to the values of the 16-bit weights.
        """

    @abstractmethod
    def end_load(self) -> None:
        """End DeepSpeed's own part of a load. Collective."""

    # What a save calls.

    @abstractmethod
    def saving(self, engine: Engine, *, elastic: bool, written: Callable[[], object]) -> AbstractContextManager[None]:
        """While it lasts, DeepSpeed's save writes all of the state, and calls ``written`` before its last collectives.

        ``elastic`` leaves out copies of what the elastic state dict holds.
        """

    @abstractmethod
    def saving_alone(
        self, engine: Engine, *, writes_module: bool, tied: Mapping[str, str]
    ) -> AbstractContextManager[None]:
        """While it lasts, DeepSpeed's save needs no other rank: neither whole parameters nor their names there.

        ``writes_module`` says whether this rank writes the file of the whole module, if there is one, and ``tied`` is
        ``engine._get_shared_params()`` of rank 0.
        """

    @property
    def params_in_expert_files(self) -> Collection[str]:
        """The names of the parameters that DeepSpeed writes into files of experts."""
        return ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's own (rigid) state dict, with the state that DeepSpeed leaves out of it."""

    def sync(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Write changes to the disk, where the optimizer keeps state on one."""

    # What DeepSpeed's own (rigid) files have.

    def lost_in_stock_files(self) -> str | None:
        """Return the state that DeepSpeed's own files of this optimizer would lack, or None."""
        return None
