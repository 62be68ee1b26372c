"""The live ZeRO-3 optimizer: the place of each parameter's part in this rank's flat buffers, and its state.

The layout is read off the optimizer, never recomputed: ``grad_position[ds_id] = [sub_group, offset, part]`` is
DeepSpeed's own table. Under partial offload a second, backup optimizer steps the sub-groups that stay on the GPU.
Source: ``DeepSpeedZeroOptimizer_Stage3`` (``set_grad_positions``, ``_optimizer_step``), DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param, pack_sub_groups
from zeroelastic.deepspeed.engine import Engine, Stage3Optimizer
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.stage3_storage import SwapFiles, gather_persistent_params, is_param_on_nvme, on_nvme
from zeroelastic.deepspeed.live.topology import LiveTopology, expert_group, is_expert, uncovered_groups
from zeroelastic.deepspeed.patching import patched
from zeroelastic.errors import UnsupportedError

_DUPLICATE = "_offload_buffer"
"""The end of the names under which offload_states() keeps second copies among the optimizer state."""

_OTHER_OPTIMIZERS = {
    "SuperOffloadOptimizer_Stage3": "SuperOffload (its moments are in another process, and DeepSpeed saves none)",
    "MiCS_Optimizer": "MiCS (parameters are partitioned within shard groups, not over all ranks)",
}


class Stage3(LiveOptimizer):
    """A ``DeepSpeedZeroOptimizer_Stage3``, with offloading to the CPU and NVMe and with Muon."""

    optimizer: Stage3Optimizer

    def _module(self) -> torch.nn.Module:
        return self.optimizer.module

    def _read(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        optimizer, sharing = self.optimizer, self.sharing
        self.on_nvme = on_nvme(optimizer)
        self._swap = SwapFiles(optimizer)
        self.group_of = tuple(optimizer.sub_group_to_group_id[i] for i in range(len(optimizer.fp16_groups)))
        self.refresh()
        sub_groups = [[self._param(param, names) for param in members] for members in optimizer.fp16_groups]
        if max(self.group_of, default=0) >= len(self.base.param_groups):
            raise UnsupportedError(
                f"DeepSpeed made the optimizer anew with {len(self.base.param_groups)} of its {max(self.group_of) + 1} "
                "groups, as it does with torch's Adagrad, and fails at the first step. Give the optimizer one group."
            )
        groups: list[list[Param]] = [[] for _ in self.base.param_groups]
        for g, members in zip(self.group_of, sub_groups, strict=True):
            groups[g] += members
        added = [g for g, group in enumerate(self.base.param_groups) if group["params"] and not groups[g]]
        if added:
            raise UnsupportedError(
                f"optimizer group {added[0]} was added after deepspeed.initialize: ZeRO-3 partitions nothing of it, "
                "and DeepSpeed does not train it. Give the optimizer all of its groups before."
            )
        self.groups = tuple(tuple(sharing.whole_name(param.name) for param in members) for members in groups)
        params = list(chain(*optimizer.fp16_groups))
        self.trained = frozenset(params)
        self._frozen = [param for param in self.module.parameters() if param not in self.trained]
        whole = sharing.layout(sub_groups, stage=3, of_tensor_rank=partial(self._sub_groups_of, groups))
        self._take_layouts(whole, sharing.layout([[self._param(param, names)] for param in self._frozen], stage=3))
        layout = self.layout
        placed = [optimizer.grad_position[optimizer.get_param_id(param)] for param in params]
        computed = list(zip(layout.sub_group.tolist(), layout.offset.tolist(), layout.part.tolist(), strict=True))
        in_order = [param.name for members in sub_groups for param in members] == [
            *map(self.local_name, layout.index())
        ]
        if not in_order or [tuple(map(int, place[:3])) for place in placed] != computed:
            raise UnsupportedError(
                "DeepSpeed places this model's parameters in another way than ZeRO-3's ceil split (is ZenFlow on?)."
            )

    def _sub_groups_of(self, groups: Sequence[Sequence[Param]], tensor_rank: int) -> list[list[Param]]:
        """Return the sub-groups of a tensor parallel rank, whose slices may have other sizes than this rank's."""
        maps, size = self.maps, self.optimizer.sub_group_size
        theirs = [
            [Param(p.name, maps[p.name].views[tensor_rank].shape) if p.name in maps else p for p in members]
            for members in groups
        ]
        return pack_sub_groups(theirs, world_size=self.topology.data_size, sub_group_size=size)

    @staticmethod
    def uncovered(optimizer: Any, engine: Engine) -> list[str]:
        problems = _uncovered_offload(optimizer)
        if getattr(optimizer, "zenflow", False):
            problems.append("ZenFlow (parameters are transposed, and moments are kept beside the optimizer's)")
        kind = type(optimizer).__name__
        if kind != DeepSpeedZeroOptimizer_Stage3.__name__:
            problems.append(_OTHER_OPTIMIZERS.get(kind, kind))
        problems += uncovered_groups(optimizer, engine)
        shards = (getattr(param, "ds_tensor", None) for param in optimizer.module.parameters())
        if any(getattr(shard, "ds_quant_scale", None) is not None for shard in shards):
            problems.append("zero_quantized_nontrainable_weights")
        return problems

    def _param(self, param: Any, names: Mapping[torch.nn.Parameter, str]) -> Param:
        """Describe a parameter. Raises UnsupportedError if it is not cut over the ranks that share it."""
        name = names.get(param)
        if name is None or not hasattr(param, "ds_id"):
            raise UnsupportedError(
                f"parameter {name or '(without a name)'} is not managed by ZeRO-3: it was not in the model when "
                "deepspeed.initialize was called. Build the whole model before."
            )
        shared_by = expert_group(param) if is_expert(param) else self.dp_group
        world_size, group = dist.get_world_size(group=shared_by), getattr(param, "ds_process_group", None)
        count = world_size if group is None else dist.get_world_size(group=group)
        if count != world_size or (group is not None and dist.get_rank(group=group) != dist.get_rank(group=shared_by)):
            raise UnsupportedError(
                f"parameter {name} is partitioned over {count} ranks, the model over {world_size}. Expert and other "
                "per-parameter partition groups cannot be resharded yet. (Under tensor parallelism, "
                "deepspeed.zero.Init partitions what is not sliced over all ranks: build the model without it.) Save "
                'with "format": "rigid", and resume at the saved world size.'
            )
        return Param(name, tuple(map(int, param.ds_shape)))

    def flat(self, sub_group: int) -> torch.Tensor:
        return self.optimizer.fp32_partitioned_groups_flat[sub_group]

    def frozen_tensor(self, param: int) -> torch.Tensor:
        return self._swap.param(self._frozen[param])

    def owner(self, sub_group: int) -> torch.optim.Optimizer:
        """The optimizer that steps a sub-group: the backup optimizer for the GPU's share under partial offload."""
        optimizer: Any = self.optimizer
        backup: torch.optim.Optimizer | None = getattr(optimizer, "backup_optimizer", None)
        by_muon = getattr(optimizer, "use_muon", False) and optimizer.sub_groups_using_muon[sub_group]
        if backup is None or by_muon or optimizer.subgroup_to_device[sub_group] == "cpu":
            return self.base
        return backup

    def _is_backup(self, sub_group: int) -> bool:
        """Whether the backup optimizer, a torch AdamW, steps a sub-group in place of DeepSpeedCPUAdam."""
        return self.owner(sub_group) is not self.base

    def own_options(self) -> list[str]:
        """Return the options of the backup optimizer's copy of group 0 that are not the group's.

        Of further groups both optimizers share one dict. Source: ``DeepSpeedZeroOptimizer_Stage3.__init__`` (0.19.8).
        """
        sub_groups = [i for i, group in enumerate(self.group_of) if group == 0 and self._is_backup(i)]
        if not sub_groups:
            return []
        copied, group = self.owner(sub_groups[0]).param_groups[0], self.base.param_groups[0]
        own = {name: copied[name] for name in ("lr", "betas", "eps", "weight_decay") if name in copied}
        return [f"{name} {value}" for name, value in own.items() if group.get(name) != value]

    def _has_duplicates(self, sub_group: int) -> bool:
        return any(str(key).endswith(_DUPLICATE) for key in super().state(sub_group))

    def stepper(self, sub_group: int) -> torch.optim.Optimizer:
        """Muon leaves the sub-groups that are not its own to an Adam, if it has one."""
        aux: torch.optim.Optimizer | None = getattr(self.base, "aux_optimizer", None)
        return self.base if aux is None or self.group(sub_group).get("use_muon", True) else aux

    def fp32(self, sub_group: int) -> torch.Tensor:
        return self._swap.fp32(sub_group) if self._swap.has(sub_group) else super().fp32(sub_group)

    def state(self, sub_group: int) -> MutableMapping[str, Any]:
        """A sub-group's whole state: swapped tensors mapped, the backup optimizer's ``step`` a number as in the rest.

        The duplicates that offload_states() keeps are left out.
        """
        state = super().state(sub_group)
        if self._has_duplicates(sub_group):
            state = {key: value for key, value in state.items() if not key.endswith(_DUPLICATE)}
        if self._is_backup(sub_group):
            state = {key: _as_number(key, value) for key, value in state.items()}
        return self._swap.state(sub_group, state) if self._swap.has(sub_group) else state

    def begin_load(self) -> None:
        if getattr(self.optimizer, "offloaded_states", None):
            self.optimizer.reload_states()
        self.optimizer.checkpoint_event_prologue()

    def refresh(self) -> None:
        """Put the momentum from which Muon continues into the optimizer state, where DeepSpeed keeps it outside.

        Under ``save_muon_momentum_buffer_in_memory`` DeepSpeed steps with its own buffer, and puts it into the
        state at each step; a stock load replaces only the tensor in the state.
        """
        self._swap.wait()
        for i, buffer in self._muon_momentum().items():
            self.base.state[self.flat(i)]["momentum_buffer"] = buffer

    def destination(self, sub_group: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A swapped tensor is a map of the file, which is created if the state has none.

        Raises OSError when the disk has no room for it.
        """
        if key != FP32 and self._swap.has(sub_group):
            return self._swap.writable(sub_group, key, self.own_state(sub_group))
        return super().destination(sub_group, key, dtype)

    def drop_state(self, sub_group: int, *, keep: tuple[str, ...] = ()) -> None:
        state = self.own_state(sub_group)
        dropped = {key for key in state if key not in keep}
        # Without the tensor itself, a duplicate is the place that offload_states() fills again.
        super().drop_state(
            sub_group,
            keep=(*keep, *(k for k in dropped if k.endswith(_DUPLICATE) and k.removesuffix(_DUPLICATE) not in dropped)),
        )
        if self._swap.has(sub_group):
            self._swap.keep_only(sub_group, state.values())

    def state_filled(self) -> None:
        """Let Muon step with the momentum that the state now holds, where DeepSpeed keeps it outside of the state."""
        buffers = self._muon_momentum()
        for i, buffer in list(buffers.items()):
            held: Any = self.base.state[self.flat(i)].setdefault("momentum_buffer", torch.zeros_like(buffer))
            if held is not buffer:
                held.swappable, held.ds_id = getattr(buffer, "swappable", False), getattr(buffer, "ds_id", None)
                buffers[i] = held

    def _muon_momentum(self) -> dict[int, torch.Tensor]:
        return getattr(self.optimizer, "muon_momentum_buffer_partitioned_groups_flat", None) or {}

    def set_scalar(self, sub_group: int, key: str, value: ScalarValue) -> None:
        if key == "step" and value.kind == "pyint" and self._is_backup(sub_group):
            # torch's AdamW, which is the backup optimizer, counts in a tensor
            value = ScalarValue("float32", float(value.value or 0))
        super().set_scalar(sub_group, key, value)

    def low(self, sub_group: int) -> torch.Tensor | None:
        flat = self.optimizer.fp16_partitioned_groups_flat[sub_group]
        return None if flat is None else flat.detach()

    def rounded(self, sub_group: int) -> torch.Tensor | None:
        return None if self._swap.has(sub_group) else super().rounded(sub_group)

    def finish_weights(
        self, *, from_16_bit: bool, rounded: Collection[int] = (), restored: Layout | None = None
    ) -> None:
        optimizer = self.optimizer
        for i in range(self.layout.num_sub_groups):
            low = self.low(i)
            if low is not None and i in rounded:
                for begin, end in self.layout.padding(self.rank, i):
                    low[begin:end].zero_()
                optimizer._unflatten_partitioned_parameters(i)
            else:
                with self._swap.resident(i) if self._swap.has(i) else nullcontext():
                    optimizer._reassign_or_swap_out_partitioned_parameters(i)
            if from_16_bit:
                self.fp32(i).copy_(self.fp32(i).to(optimizer.dtype) if low is None else low)
        params: Iterator[Any] = self.module.parameters()
        for param in params:
            if getattr(param, "ds_secondary_tensor", None) is not None:
                param.ds_secondary_tensor = None
        if len(optimizer.persistent_parameters) > 0:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        self.sync()

    def end_load(self) -> None:
        gather_persistent_params(self.optimizer, self.optimizer.checkpoint_event_epilogue)

    @contextmanager
    def saving(self, engine: Engine, *, elastic: bool, written: Callable[[], object]) -> Iterator[None]:
        """Within this context, DeepSpeed's save has frozen parameters on NVMe, and makes no copy of swap files.

        DeepSpeed writes one element in place of a frozen parameter that is not in memory. Its copy of the swap files
        (``offloaded_tensors``) is left out of elastic saves, whose files hold all of it. After offload_states() nothing
        is gathered after the save: DeepSpeed would gather persistent parameters from where other parameters' parts now
        lie.
        """
        original, epilogue = engine._get_param_fragment_func, self.optimizer.checkpoint_event_epilogue
        gathers = not getattr(self.optimizer, "offloaded_states", None)
        frozen = set(self._frozen)

        def fragment(param: Any) -> Any:
            return self._swap.param(param) if param in frozen and is_param_on_nvme(param) else original(param)

        def written_and_gathered() -> None:
            written()
            if gathers:
                gather_persistent_params(self.optimizer, epilogue)

        without_copy = {"zero_nvme_offload_optimizer": lambda: False} if elastic else {}
        with (
            patched(engine, _get_param_fragment_func=fragment, **without_copy),
            patched(self.optimizer, checkpoint_event_epilogue=written_and_gathered),
        ):
            yield

    @contextmanager
    def saving_alone(self, engine: Engine, *, writes_module: bool, tied: Mapping[str, str]) -> Iterator[None]:
        original = engine.module_state_dict

        def without_whole_params(*args: Any, **kwargs: Any) -> dict[str, Any]:
            state = original(*args, **kwargs)
            for name, param in engine.module.named_parameters(remove_duplicate=False):
                if name in state and hasattr(param, "ds_id"):
                    state[name] = torch.empty(0, dtype=param.dtype, device=param.device)
            return state

        with patched(engine, module_state_dict=without_whole_params):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Add the state that DeepSpeed leaves out: on NVMe, or with the backup optimizer."""
        state = self.optimizer._rigid_state_dict()
        sub_groups = range(self.layout.num_sub_groups)
        away = [i for i in sub_groups if self._is_backup(i) or self._swap.has(i) or self._has_duplicates(i)]
        if away:
            number = {i: n for n, i in enumerate(sorted(sub_groups, key=self.group_of.__getitem__))}  # group by group
            nested = state["optimizer_state_dict"]
            own = {number[i]: dict(self.state(i)) for i in away}
            state["optimizer_state_dict"] = {**nested, "state": {**nested["state"], **own}}
            state["fp32_flat_groups"] = [self.fp32(i) for i in sub_groups]
        return state

    def _base_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer._rigid_state_dict()["optimizer_state_dict"]
        return state

    def sync(self) -> None:
        self._swap.sync()

    def lost_in_stock_files(self) -> str | None:
        sub_groups = range(self.layout.num_sub_groups)
        if any(map(self._swap.has, sub_groups)):
            return "master weights and optimizer state on NVMe"
        if any(map(self._is_backup, sub_groups)):
            return "the optimizer state that partial offload keeps on the GPU"
        return None


class Evaluation(Stage3):
    """A ``DeepSpeedZeRoOffload``, which has no optimizer: all parameters are ``frozen``.

    DeepSpeed makes one where ``deepspeed.initialize`` gets no optimizer, to evaluate, and has no way to load a
    checkpoint into it (0.19.8).
    """

    trains = False

    def __init__(self, optimizer: Any, names: Mapping[torch.nn.Parameter, str], *, opaque: bool = False) -> None:
        self.optimizer = optimizer
        no_optimizer: Any = SimpleNamespace(param_groups=[], state={}, defaults={})
        self.base = no_optimizer
        params = list(optimizer.module.parameters())
        world: Any = dist.group.WORLD
        self.dp_group = next((param.ds_process_group for param in params if hasattr(param, "ds_id")), world)
        self.tp_group, self.grad_scaler, self.module = None, None, optimizer.module
        size, rank = dist.get_world_size(group=self.dp_group), dist.get_rank(group=self.dp_group)
        self._share(LiveTopology(Topology(size), rank, self.dp_group), names)
        self._read(names)

    def _read(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        self._swap = SwapFiles(self.optimizer)
        self.groups, self.group_of = (), ()
        self.trained = frozenset()
        self._frozen = list(self.module.parameters())
        frozen = [[self._param(param, names)] for param in self._frozen]
        self._take_layouts(self.sharing.layout([], stage=3), self.sharing.layout(frozen, stage=3))

    @staticmethod
    def uncovered(optimizer: Any, engine: Engine) -> list[str]:
        params = list(optimizer.module.parameters())
        used = {
            "mixture-of-experts layers": bool(getattr(engine, "has_moe_layers", False)),
            "tensor parallelism": int(getattr(engine, "mp_world_size", 1) or 1) > 1,
            "parameters on NVMe": any(hasattr(param, "ds_id") and is_param_on_nvme(param) for param in params),
            "quantized weights": any(hasattr(getattr(param, "ds_tensor", None), "ds_quant_scale") for param in params),
        }
        return [what for what, is_used in used.items() if is_used]

    def _base_state_dict(self) -> dict[str, Any]:
        return {}

    def begin_load(self) -> None:
        offload: Any = self.optimizer
        offload.partition_all_parameters()

    def end_load(self) -> None:
        def gather_the_rest() -> None:
            left = [param for param in kept if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            if left:
                left[0].all_gather(left)

        kept = list(self.optimizer.persistent_parameters)
        gather_persistent_params(self.optimizer, gather_the_rest)


def _uncovered_offload(optimizer: Any) -> list[str]:
    problems: list[str] = []
    if getattr(optimizer, "swap_optimizer", False):
        if getattr(optimizer, "use_muon", False):
            problems.append("Muon with offload_optimizer to NVMe")
        if isinstance(optimizer.optimizer, torch.optim.Adagrad):
            problems.append(
                "torch's Adagrad with offload_optimizer to NVMe (DeepSpeed makes its state without elements)"
            )
    half = getattr(optimizer, "master_weights_and_grads_dtype", torch.float32) != torch.float32
    if half and getattr(optimizer, "backup_optimizer", None) is not None:
        problems.append("partial optimizer offload with master weights in 16 bits (its two optimizers differ in dtype)")
    return problems


def _as_number(key: str, value: Any) -> Any:
    """Return ``step`` as DeepSpeedCPUAdam keeps it, so that it does not matter which optimizer has it."""
    return int(value.item()) if key == "step" and isinstance(value, torch.Tensor) and value.dim() == 0 else value
