"""How the ranks of a run share its tensors, as DeepSpeed cuts them: of a saved run, or of a new one.

AutoTP cuts weights over tensor parallel ranks, AutoEP and DeepSpeed's own MoE layers give each expert parallel rank
some of the experts. For another number of ranks the slices are made anew: experts are dealt evenly, and a weight that
was cut evenly along one dimension is cut so again. A run without any has whole tensors on every rank.

Source: ``DeepSpeedEngine._save_moe_checkpoint``, ``DeepSpeedZeroOptimizer_Stage3._get_trainable_parameter_groups``,
deepspeed.checkpoint.affine and autoep_affine (DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroelastic.checkpoint.optimizer_file import configured_sub_group_size, steps_with_bf16_optimizer, zero_option
from zeroelastic.checkpoint.topology import (
    SliceMaps,
    Topology,
    even_map,
    expert_sizes,
    layout_over_ranks,
    local_experts,
    native_expert_maps,
    numbered_expert,
    view_of,
)
from zeroelastic.core.layout import (
    Layout,
    Param,
    buffer_order,
    group_split_layout,
    layout_from_sub_groups,
    pack_sub_groups,
    unpacked_layout,
)
from zeroelastic.errors import CheckpointError, UnsupportedError, shown, some
from zeroelastic.torch_file.tree import pairs_of

Root = Mapping[object, object]

LAYERS = "ds_autoep_layers"
INFO = "universal_checkpoint_info"
_MOST_EXPERTS = 1 << 16
EXPERT_WEIGHTS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """A layer with experts: its number among these layers, and how its parameters' names begin.

    ``table`` is its entry in ``ds_autoep_layers`` of AutoEP; DeepSpeed's own MoE layers have none.
    """

    number: int
    prefix: str
    num_experts: int
    table: Root | None = None


@dataclass(frozen=True, slots=True)
class Slicing:
    """Which slice of each tensor every rank of a run has.

    ``maps`` are by the name that a parameter has in the run's own files. ``layers`` are those with experts, which
    ``expert_size`` expert parallel ranks share. ``info`` is ``universal_checkpoint_info`` of the files of AutoTP.
    """

    topology: Topology
    maps: SliceMaps = field(default_factory=dict)
    expert_size: int = 1
    layers: tuple[MoeLayer, ...] = ()
    info: Root | None = None

    @property
    def has_slices(self) -> bool:
        """Return whether some ranks have other parts of whole tensors than others, or could have at another size."""
        return self.topology.tensor_size > 1 or self.has_experts

    @property
    def has_experts(self) -> bool:
        """Return whether some parameters are experts."""
        return bool(self.layers)

    @property
    def has_own_experts(self) -> bool:
        """Return whether experts are in DeepSpeed's own MoE layers."""
        return bool(self.layers) and self.layers[0].table is None

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter, by its name in files, is of experts."""
        return (found := self.maps.get(name)) is not None and found.axis == "expert"

    def expert_size_of(self, members: Sequence[Param]) -> int:
        """The expert parallel size of the experts in a buffer; 1 for one without experts."""
        return self.expert_size if members and self.is_expert(members[0].name) else 1

    def num_parts(self, members: Sequence[Param]) -> int:
        """How many ranks share a buffer."""
        return self.topology.data_size // self.expert_size_of(members)

    def file_names(self) -> dict[str, str]:
        """The name in files of each whole tensor that has another one there."""
        return {
            view.tensor.name: name
            for name, found in self.maps.items()
            for view in found.views
            if view.tensor.name != name
        }

    def with_experts(self, tensors: Sequence[Param], size: int) -> Slicing:
        """The slicing with these experts, dealt evenly to ``size`` expert parallel ranks."""
        if not self.has_own_experts:
            maps = {tensor.name: even_map(tensor, 0, size, "expert") for tensor in tensors}
        else:
            counts = {layer.prefix: layer.num_experts for layer in self.layers}
            found = [(tensor, numbered_expert(tensor.name)) for tensor in tensors]
            firsts = [each for each, expert in found if expert and expert.number < counts[expert.prefix] // size]
            maps = native_expert_maps(firsts, size)
        return replace(self, maps=maps, expert_size=size)

    def in_files(self, params: Sequence[Param], tensor_rank: int) -> list[Param]:
        """Parameters, given whole, as the files of a tensor parallel rank and of expert parallel rank 0 have them.

        DeepSpeed's own experts are given in the order of their numbers, which is that of the module.
        """
        is_own = self.has_own_experts
        return [
            Param(param.name, view_of(self.maps, param, tensor_rank, 0).shape)
            for param in params
            if not is_own or self.is_expert(param.name) or numbered_expert(param.name) is None
        ]

    def sub_groups(
        self, groups: Sequence[Sequence[Param]], sub_group_size: int | None, tensor_rank: int = 0
    ) -> Buffers:
        """The sub-groups of stage 3 of a tensor parallel rank, of optimizer groups with whole parameters.

        Parameters that other ranks share are in other sub-groups, also those of one optimizer group.
        """
        buffers: Buffers = []
        for group in groups:
            members = self.in_files(group, tensor_rank)
            dense = [param for param in members if not self.is_expert(param.name)]
            experts = [param for param in members if self.is_expert(param.name)]
            parts = [dense, experts] if not members or not self.is_expert(members[0].name) else [experts, dense]
            for part in parts:
                buffers += pack_sub_groups([part], world_size=self.num_parts(part), sub_group_size=sub_group_size)
        return buffers

    def layout(
        self,
        groups: Sequence[Sequence[Param]],
        stage: int,
        config: Mapping[str, object],
        *,
        itemsizes: Sequence[int],
        sub_group_size: int | None = None,
    ) -> tuple[Layout, list[list[int]]]:
        """The layout that DeepSpeed makes of optimizer groups with a configuration, and the gaps below stage 3.

        ``itemsizes`` are the bytes of an element of each group's weights. Raises UnsupportedError for a group of
        experts and others below stage 3, and for buffers or gaps that differ between tensor parallel ranks.
        """
        if stage == 3:
            size = sub_group_size or configured_sub_group_size(config)
            return self._over_ranks([self.sub_groups(groups, size, t) for t in self._tensor_ranks], stage), []
        found = [[self.in_files(group, t) for group in groups] for t in self._tensor_ranks]
        kinds = [{self.is_expert(param.name) for param in group} for group in found[0]]
        if mixed := [number for number, kind in enumerate(kinds) if len(kind) > 1]:
            raise UnsupportedError(
                f"optimizer group {mixed[0]} has experts and other parameters, which DeepSpeed does not keep in one "
                "buffer at stages 1 and 2."
            )
        knows_both = stage != 1 or not steps_with_bf16_optimizer(config)  # a BF16_Optimizer knows neither option
        is_dealt = knows_both and bool(zero_option(config, "round_robin_gradients"))
        is_aligned = knows_both and bool(zero_option(config, "parameter_alignment"))
        parts = [self.num_parts(group) for group in found[0]]
        ordered = [
            buffer_order(members, parts, round_robin=is_dealt, itemsizes=itemsizes if is_aligned else None)
            for members in found
        ]
        gaps = ordered[0][1]
        if any(behind != gaps for _, behind in ordered):
            raise UnsupportedError(
                "the slices of tensor parallel ranks have different sizes, which parameter_alignment places "
                "differently: such checkpoints are not written. Leave parameter_alignment out."
            )
        return self._over_ranks([buffers for buffers, _ in ordered], stage, gaps), gaps

    def frozen_layout(self, params: Sequence[Param], topology: Topology) -> Layout:
        """The layout of frozen parameters, each in its own buffer, over the ranks of ``topology`` that write them.

        Raises UnsupportedError for frozen experts.
        """
        if any(self.is_expert(param.name) for param in params):
            raise UnsupportedError("has experts that are frozen, which are not written for another run.")
        if topology.tensor_size == 1 or not params:
            return unpacked_layout(params, topology.world_size)
        buffers = [[[param] for param in self.in_files(params, t)] for t in self._tensor_ranks]
        return replace(self, topology=topology)._over_ranks(buffers, 3)

    @property
    def _tensor_ranks(self) -> range:
        return range(self.topology.tensor_size)

    def _over_ranks(self, buffers: Sequence[Buffers], stage: int, gaps: list[list[int]] | None = None) -> Layout:
        """The layout over all ranks, from the buffers of each tensor parallel rank."""
        if not self.has_slices:
            if stage == 3:
                return layout_from_sub_groups(buffers[0], self.topology.world_size)
            return group_split_layout(buffers[0], self.topology.world_size, gaps)
        sizes = [self.expert_size_of(members) for members in buffers[0]]
        try:
            return layout_over_ranks(
                lambda t: buffers[t], self.topology, self.maps, stage=stage, expert_sizes=sizes, gaps=gaps
            )
        except ValueError as error:
            raise UnsupportedError(f"its tensors are not cut into the slices of these ranks: {error}.") from None


Buffers = list[list[Param]]


def any_slices(*runs: Slicing) -> bool:
    """Whether the ranks of any of these runs have slices of tensors."""
    return any(run.has_slices for run in runs)


def expert_slicing(root: Root, trained: Layout, topology: Topology, own_layers: Sequence[str]) -> Slicing:
    """The slicing of a run without tensor parallelism, from its first module states and its trained parameters.

    ``own_layers`` are the prefixes of DeepSpeed's own MoE layers, in the order in which their files count them.
    Raises CheckpointError for layers of AutoEP that are none, UnsupportedError for a layer whose experts are frozen.
    """
    tables = root.get(LAYERS) or root.get("autoep_layers") or []
    assert isinstance(tables, list), "the checkpoint was opened with these layers"
    counts = local_experts(tensor.name for tensor in trained.whole_tensors)
    if frozen := [prefix for prefix in own_layers if prefix not in counts]:
        raise UnsupportedError(f"{some(frozen)}: has experts that are frozen, which are not written for another run.")
    layers = [MoeLayer(number, prefix, counts[prefix]) for number, prefix in enumerate(own_layers)]
    if tables:
        layers = [_expert_layer(table) for table in map(pairs_of, tables)]
        if sum(layer.num_experts for layer in layers) > _MOST_EXPERTS:
            raise CheckpointError(f"its layers have more than {_MOST_EXPERTS} experts. The file is damaged.")
    if not layers:
        return Slicing(topology)
    names = {f"{layer.prefix}.{weight}" for layer in layers for weight in EXPERT_WEIGHTS}
    experts = [
        tensor for tensor in trained.whole_tensors if tensor.name in names or numbered_expert(tensor.name) is not None
    ]
    size = max(expert_sizes(trained, topology), default=1)
    return Slicing(topology, layers=tuple(layers)).with_experts(experts, size)


def _expert_layer(table: Root) -> MoeLayer:
    """A layer of AutoEP."""
    number, prefix, count = (table.get(key) for key in ("moe_layer_id", "expert_key_prefix", "num_experts"))
    if type(number) is not int or not isinstance(prefix, str) or type(count) is not int or count < 1:
        raise CheckpointError(
            f"a layer of ds_autoep_layers has moe_layer_id {shown(number)}, expert_key_prefix {shown(prefix)} and "
            f"num_experts {shown(count)}. The file is damaged."
        )
    return MoeLayer(number, prefix, count, table)
