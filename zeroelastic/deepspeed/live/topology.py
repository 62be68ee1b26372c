"""How a running engine shares its parameters: its topology, each rank's part of whole tensors, and process groups.

A run is *described* where DeepSpeed says which slice of which tensor each rank has: AutoTP by
``universal_checkpoint_info`` of the module, AutoEP by an attribute of each expert, DeepSpeed's own experts by their
names. Its layouts are of all ranks. Any other tensor parallelism is opaque: each tensor parallel rank is a run of its
own. Sources: ``collect_autotp_universal_checkpoint_info`` of module_inject/layers.py, module_inject/auto_ep_layer.py,
``_create_expert_and_data_parallel`` of utils/groups.py, ``DeepSpeedEngine._save_moe_checkpoint`` (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from zeroelastic.checkpoint.model_states import ModuleHeader, model_states_of
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.optimizer_reader import read_optimizer_file
from zeroelastic.checkpoint.rank_layout import RankSlices
from zeroelastic.checkpoint.tag_files import NO_TENSOR_PARALLEL, TensorParallel
from zeroelastic.checkpoint.topology import (
    SliceMap,
    SliceMaps,
    Topology,
    expert_maps,
    layout_over_ranks,
    native_expert_maps,
    numbered_expert,
    tensor_maps,
)
from zeroelastic.core.layout import Layout, Param, group_split_layout, layout_from_sub_groups
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import TorchFile

Buffers = Sequence[Sequence[Param]]

_parsed: WeakKeyDictionary[torch.nn.Module, tuple[object, int, SliceMaps | None]] = WeakKeyDictionary()
"""The maps of AutoTP of a module that were read last, after what they are of: DeepSpeed makes them once."""

_THIS_RUN = "this run"
_EXPERT_META = "ds_autoep_uc_meta"
_TENSOR_META = "universal_checkpoint_info"


@dataclass(frozen=True, slots=True)
class LiveTopology:
    """How a rank shares parameters with others.

    ``group`` are the ranks of the layouts in the order of their numbers, of which this one has the number ``rank``.
    ``tp`` is the place of a rank whose tensor parallelism is opaque; ``topology`` is then its data parallel group's.
    ``maps`` and ``expert_sizes``, the expert parallel size of each expert, are by the names of parameters on this rank.
    """

    topology: Topology
    rank: int
    group: dist.ProcessGroup
    tp: TensorParallel = NO_TENSOR_PARALLEL
    maps: SliceMaps = field(default_factory=dict)
    expert_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, TensorParallel]:
        """The data parallel and the tensor parallel rank of this rank, by which its files are named."""
        data_rank, tensor_rank = self.topology.place(self.rank)
        return data_rank, self.tp if self.tp.size > 1 else TensorParallel(tensor_rank, self.topology.tensor_size)

    @property
    def has_slices(self) -> bool:
        """Whether ranks have different parts of whole tensors."""
        return self.topology.tensor_size > 1 or bool(self.expert_sizes)

    def whole_name(self, name: str) -> str:
        """The name of the whole tensor of which a parameter is a slice."""
        found = self.maps.get(name)
        return name if found is None else found.view(self.topology, self.rank).tensor.name

    def whole_shape(self, param: Param) -> tuple[int, ...]:
        """The shape of the whole tensor of which a parameter is a slice."""
        found = self.maps.get(param.name)
        return param.shape if found is None else found.view(self.topology, self.rank).tensor.shape

    def open_files(
        self, model_file: TorchFile, optim_path: FilePath, layout: Layout
    ) -> tuple[ModuleHeader, OptimizerHeader]:
        """The headers of the two files of the saved rank in this rank's place, whose ``layout`` was that of this run.

        Raises CheckpointError, UnsupportedError.
        """
        data_rank, tp = self.place
        slices, size = None, self.topology.data_size
        if layout.slices is not None:
            names = {local: whole for local in self.maps if (whole := self.whole_name(local)) != local}
            slices = RankSlices(self.topology, self.rank, layout, names)
        model = model_states_of(model_file, data_rank, world_size=size, tp=tp if tp.size > 1 else None)
        optimizer_file = read_optimizer_file(optim_path, world_size=size)
        return model, optimizer_file.header(data_rank, params=model.sub_groups, tp_rank=tp.rank, slices=slices)

    def layout(
        self,
        buffers: Buffers,
        *,
        stage: int,
        gaps: Sequence[Sequence[int]] | None = None,
        of_tensor_rank: Callable[[int], Buffers] | None = None,
    ) -> Layout:
        """Return the layout over all ranks of flat buffers with these parameters of this rank.

        ``gaps`` as in ``group_split_layout``. ``of_tensor_rank`` gives the buffers of other tensor parallel ranks if
        they may be cut in another way. Raises UnsupportedError for slices that do not make up their tensors.
        """
        if not self.has_slices:
            size = self.topology.data_size
            return layout_from_sub_groups(buffers, size) if stage == 3 else group_split_layout(buffers, size, gaps)

        def own(tensor_rank: int) -> Buffers:
            return buffers

        try:
            return layout_over_ranks(
                own if of_tensor_rank is None or self.topology.tensor_size == 1 else of_tensor_rank,
                self.topology,
                self.maps,
                stage=stage,
                expert_sizes=[self.expert_sizes.get(members[0].name, 1) if members else 1 for members in buffers],
                gaps=gaps,
            )
        except ValueError as error:
            raise UnsupportedError(f"the slices of this run are not those of whole tensors: {error}.") from None


def read_topology(
    optimizer: Any, module: torch.nn.Module, names: Mapping[torch.nn.Parameter, str], *, opaque: bool = False
) -> LiveTopology:
    """Return how the ranks of an engine share the module's parameters; ``names`` are of all parameters.

    ``opaque`` takes tensor parallelism for opaque, whatever the module says of it. Raises UnsupportedError for experts
    that DeepSpeed does not describe, or shares in another way than is known.
    """
    dp_group, tp = optimizer.dp_process_group, tensor_parallel(optimizer)
    data_size, data_rank = dist.get_world_size(group=dp_group), dist.get_rank(group=dp_group)
    experts = {names[param]: param for param in module.parameters() if param in names and is_expert(param)}
    if experts:
        if tp.size > 1:
            raise UnsupportedError("mixture-of-experts layers with tensor parallelism")
        return _with_experts(experts, data_size, data_rank, dp_group)
    maps = None if opaque or is_opaque(optimizer, module) else _tensor_maps(module, tp)
    if not maps:
        return LiveTopology(Topology(data_size), data_rank, dp_group, tp)
    topology, world = Topology(data_size, tp.size), dist.group.WORLD
    assert world is not None
    return LiveTopology(topology, topology.rank(data_rank, tp.rank), world, maps=maps)


def is_opaque(optimizer: Any, module: torch.nn.Module) -> bool:
    """Return whether a run has tensor parallelism that is opaque.

    AutoTP's is not, if its maps are of all parameters, each rank has elements of each, and the ranks are placed as
    DeepSpeed places them.
    """
    tp, dp_group = tensor_parallel(optimizer), optimizer.dp_process_group
    if getattr(optimizer, "model_parallel_group", None) is None:
        return False
    topology = Topology(dist.get_world_size(group=dp_group), tp.size)
    place = topology.rank(dist.get_rank(group=dp_group), tp.rank), topology.world_size
    maps = _tensor_maps(module, tp)
    if not maps or place != (dist.get_rank(), dist.get_world_size()):
        return True
    described = {name: found.views[tp.rank].shape for name, found in maps.items()}
    return any(described.get(name) != _shape(param) for name, param in module.named_parameters())


def _uncovered_sharing(optimizer: Any, engine: Any) -> str | None:
    """Return a reason why the sharing of a run is not covered, or None. ``engine`` is the optimizer's."""
    if not getattr(engine, "has_moe_layers", False):
        return None
    params = list(engine.module.parameters())
    if not any(map(is_expert, params)):
        return "mixture-of-experts layers (of which no parameter is an expert's)"
    try:
        read_topology(optimizer, engine.module, {param: name for name, param in engine.module.named_parameters()})
    except (CheckpointError, UnsupportedError) as error:
        return str(error)
    return None


def uncovered_groups(optimizer: Any, engine: object) -> list[str]:
    """Return the names of the process groups in use that elastic checkpoints do not cover.

    Covered: one ZeRO run over all ranks (sequence parallel ranks included), or one in each tensor parallel rank, which
    slices parameters first: ``data parallel size x tensor parallel size`` is the world.
    """
    problems: list[str] = []
    if (experts := _uncovered_sharing(optimizer, engine)) is not None:
        problems.append(experts)
    world_size = dist.get_world_size()
    data_parallel = dist.get_world_size(group=optimizer.dp_process_group)
    tp = tensor_parallel(optimizer)
    if data_parallel * tp.size == world_size and tp.size == int(getattr(engine, "mp_world_size", 1) or 1):
        return problems
    if tp.size > 1:
        problems.append(
            f"an mpu whose groups do not make up the world (data parallel {data_parallel} x model parallel {tp.size} "
            f"of {world_size} ranks)"
        )
    else:
        problems.append(
            f"a data parallel group of {data_parallel} of {world_size} ranks (for sequence parallelism, give "
            "deepspeed.initialize an mpu with get_sequence_data_parallel_group in place of data_parallel_size, so that "
            "the ranks of a sequence share one set of partitions)"
        )
    return problems


def is_expert(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter is an expert's: DeepSpeed marks those that not all data parallel ranks share."""
    return not getattr(param, "allreduce", True) and isinstance(getattr(param, "group_name", None), str)


def has_expert_buffers(module: torch.nn.Module) -> bool:
    """Return whether experts of DeepSpeed's own layers have saved buffers: only files of experts have these."""
    return any(
        numbered_expert(f"{name}.") is not None and part._buffers.keys() - part._non_persistent_buffers_set
        for name, part in module.named_modules()
    )


def expert_group(param: torch.nn.Parameter) -> dist.ProcessGroup:
    """The ranks that share an expert."""
    group: dist.ProcessGroup = groups._get_expert_data_parallel_group(param.group_name)  # type: ignore[attr-defined]
    return group


def tensor_parallel(optimizer: Any) -> TensorParallel:
    """Return this rank's place among its tensor parallel peers, each of which partitions its own slices."""
    group = getattr(optimizer, "model_parallel_group", None)
    if group is None:
        return NO_TENSOR_PARALLEL
    return TensorParallel(int(optimizer.model_parallel_rank), dist.get_world_size(group=group))


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(map(int, getattr(param, "ds_shape", param.shape)))


def _tensor_maps(module: torch.nn.Module, tp: TensorParallel) -> SliceMaps | None:
    """Return the maps of AutoTP; None if there are none, or a rank has no elements of a parameter."""
    info = getattr(module, _TENSOR_META, None)
    known = _parsed.get(module)
    if known is None or known[0] is not info or known[1] != tp.size:
        known = _parsed[module] = info, tp.size, _parse(info, tp.size)
    return known[2]


def _parse(info: object, size: int) -> SliceMaps | None:
    try:
        maps = tensor_maps(info, size, _THIS_RUN)
    except (CheckpointError, UnsupportedError):  # scaled slices, and maps of another version
        return None
    return None if maps is None or any(0 in view.shape for each in maps.values() for view in each.views) else maps


def _with_experts(
    experts: Mapping[str, torch.nn.Parameter], data_size: int, data_rank: int, dp_group: dist.ProcessGroup
) -> LiveTopology:
    sizes = {name: data_size // dist.get_world_size(group=expert_group(param)) for name, param in experts.items()}
    neighbours = (dist.get_process_group_ranks(expert_group(param))[:2] for param in experts.values())
    steps = {ranks[1] - ranks[0] for ranks in neighbours if len(ranks) > 1}
    topology = Topology(data_size, data_first=steps == {1} and max(sizes.values()) > 1)
    for name, param in experts.items():
        ep = sizes[name]
        first, step, count = topology.sharers(0, topology.expert_rank(data_rank, ep), ep)
        if dist.get_process_group_ranks(expert_group(param)) != list(range(first, first + step * count, step)):
            raise UnsupportedError(
                f"mixture-of-experts layers whose ranks are not placed as by DeepSpeed 0.19.8 (of {name})"
            )
    meta = {name: getattr(param, _EXPERT_META, None) for name, param in experts.items()}
    by_size = {
        ep: {name: found["affine_map"] for name, found in meta.items() if isinstance(found, dict) and sizes[name] == ep}
        for ep in {*sizes.values()}
    }
    maps: dict[str, SliceMap] = {}
    for ep, table in by_size.items():
        layer = {"ep_size": ep, "affine_maps": {"version": 1, "params": table}}
        maps |= expert_maps([layer], _THIS_RUN)[0] if table else {}
        own = [Param(name, _shape(param)) for name, param in experts.items() if name not in table and sizes[name] == ep]
        maps |= native_expert_maps(own, ep)
    unknown = [name for name in experts if name not in maps]
    if unknown:
        raise UnsupportedError(f"mixture-of-experts layers that DeepSpeed does not describe (of {unknown[0]})")
    return LiveTopology(topology, data_rank, dp_group, maps=maps, expert_sizes=sizes)
