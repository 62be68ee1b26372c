"""How the ranks of a run are grouped, and which slice of each tensor each of them has, as DeepSpeed describes it.

DeepSpeed describes slices in the same plain dictionaries in its files and on a running engine:
``universal_checkpoint_info`` of AutoTP and ``ds_autoep_layers`` of AutoEP have affine maps (deepspeed.checkpoint.affine
and autoep_affine, 0.19.8), which are read without DeepSpeed. Experts of DeepSpeed's own MoE layers have local numbers
in their names. Ranks are counted as their files are: rank ``data rank * tensor size + tensor rank``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zeroelastic.core.layout import (
    Layout,
    Param,
    group_split_layout,
    joined_layouts,
    layout_from_sub_groups,
    with_slices,
)
from zeroelastic.core.slice_plan import check_slices
from zeroelastic.core.slices import RankSet, Strip, strips_of_box, strips_of_view
from zeroelastic.errors import CheckpointError, UnsupportedError, shown

_AFFINE_VERSION = 1
_MAX_PIECES = 1 << 16
MAX_STRIPS = 1 << 18  # of all maps of a file
MAX_EXPERT_RANKS = 1 << 13  # whose layouts take two seconds
_MAX_RANKS = 1 << 16
_MAX_DIMENSIONS = 64
_MAX_NUMEL = 1 << 60
_NUMBERED_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,6})(\..*)")


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks share what.

    ``data_size`` ranks of each of ``tensor_size`` tensor parallel ranks; every rank of a tensor parallel rank is one of
    ``ep`` expert parallel ranks, where ``ep`` is the size of a group of experts. ``data_first`` is DeepSpeed's
    ``use_data_before_expert_parallelism``: the ranks that share an expert are neighbours, not ``ep`` apart.
    """

    data_size: int
    tensor_size: int = 1
    data_first: bool = False

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data_size * self.tensor_size

    def rank(self, data_rank: int, tensor_rank: int) -> int:
        """The number of a rank."""
        return data_rank * self.tensor_size + tensor_rank

    def place(self, rank: int) -> tuple[int, int]:
        """The data parallel and the tensor parallel rank of a rank."""
        return divmod(rank, self.tensor_size)

    def expert_rank(self, rank: int, ep: int) -> int:
        """The expert parallel rank of a rank among groups of ``ep``."""
        data_rank = rank // self.tensor_size
        return data_rank // (self.data_size // ep) if self.data_first else data_rank % ep

    def sharers(self, tensor_rank: int, expert_rank: int, ep: int) -> RankSet:
        """The ranks that share what one tensor parallel and one expert parallel rank have; ``ep`` 1: all data ranks."""
        size = self.data_size // ep
        first, step = (expert_rank * size, 1) if self.data_first else (expert_rank, ep)
        return RankSet(self.rank(first, tensor_rank), step * self.tensor_size, size)


class SliceView(NamedTuple):
    """The slice of a tensor that one rank has: the whole tensor, the shape and the strips of the slice."""

    tensor: Param
    shape: tuple[int, ...]
    strips: tuple[Strip, ...]


class SliceMap(NamedTuple):
    """The slices of a parameter that the ``"tensor"`` or ``"expert"`` parallel ranks have."""

    axis: Literal["tensor", "expert"]
    views: tuple[SliceView, ...]

    def view(self, topology: Topology, rank: int) -> SliceView:
        """Return the slice of a rank."""
        if self.axis == "tensor":
            return self.views[topology.place(rank)[1]]
        return self.views[topology.expert_rank(rank, len(self.views))]


SliceMaps = Mapping[str, SliceMap]
"""By the name that the parameter has on a rank; parameters without a map are whole on every rank."""


def tensor_maps(info: object, tensor_size: int, where: object) -> dict[str, SliceMap] | None:
    """The maps in ``universal_checkpoint_info`` of an AutoTP run of ``tensor_size`` ranks; None where there are none.

    ``where`` is named in errors. Raises CheckpointError for maps that are damaged, UnsupportedError for maps of
    another version, and for slices that hold other values than the whole tensor.
    """
    table = info.get("affine_map") if isinstance(info, Mapping) else None
    if table is None:
        return None
    return _maps_of(_entries(table, where, pattern=True), "tensor", tensor_size, where)


def expert_maps(layers: object, where: object) -> tuple[dict[str, SliceMap], int]:
    """The maps in ``ds_autoep_layers``, and the expert parallel size; none, and 1, where ``layers`` is None.

    Raises as ``tensor_maps``.
    """
    entries: list[tuple[str, Mapping[object, object]]] = []
    sizes: set[int] = set()
    if layers is None:
        return {}, 1
    if not isinstance(layers, (list, tuple)):
        raise CheckpointError(f"{where}: ds_autoep_layers is {shown(layers)}. The file is damaged.")
    for layer in layers:
        size = layer.get("ep_size") if isinstance(layer, Mapping) else None
        if type(size) is not int or not 1 <= size <= _MAX_RANKS:
            raise CheckpointError(
                f"{where}: a layer of ds_autoep_layers has ep_size {shown(size)}. The file is damaged."
            )
        sizes.add(size)
        entries += _entries(layer.get("affine_maps"), where, pattern=False)
    if len(sizes) != 1:
        raise UnsupportedError(f"{where}: layers of AutoEP have the expert parallel sizes {sorted(sizes)}, not one.")
    size = sizes.pop()
    return _maps_of(entries, "expert", size, where), size


class NumberedExpert(NamedTuple):
    """The name of a parameter of an expert of DeepSpeed's own MoE layers, around the number of the expert."""

    prefix: str
    number: int
    suffix: str


def numbered_expert(name: str) -> NumberedExpert | None:
    """The parts of a name; None for a parameter that is not of such an expert."""
    match = _NUMBERED_EXPERT.fullmatch(name)
    return None if match is None else NumberedExpert(match[1], int(match[2]), match[3])


def native_expert_maps(params: Sequence[Param], ep: int) -> dict[str, SliceMap]:
    """The maps of the experts of DeepSpeed's own MoE layers on one rank of a group of ``ep`` expert parallel ranks.

    Expert ``local`` of expert parallel rank e is expert ``e * num_local + local`` of the model. Source:
    ``DeepSpeedEngine._save_moe_checkpoint`` (DeepSpeed 0.19.8).
    """
    found = [(param, expert) for param in params if (expert := numbered_expert(param.name)) is not None]
    num_local = local_experts(param.name for param in params)
    maps: dict[str, SliceMap] = {}
    for param, (prefix, number, suffix) in found:
        names = [f"{prefix}{e * num_local[prefix] + number}{suffix}" for e in range(ep)]
        maps[param.name] = SliceMap("expert", tuple(_whole_view(Param(name, param.shape)) for name in names))
    return maps


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """How many experts of each of DeepSpeed's own MoE layers there are among parameters; other names do not count."""
    counts: dict[str, int] = {}
    for name in names:
        expert = numbered_expert(name)
        if expert is not None:
            counts[expert.prefix] = max(counts.get(expert.prefix, 0), expert.number + 1)
    return counts


def in_order_of_experts(names: Sequence[str]) -> list[str]:
    """Return the names with the experts of each of DeepSpeed's own MoE layers together, by number."""
    first: dict[str, int] = {}

    def place(numbered: tuple[int, str]) -> tuple[int, int, int]:
        position, name = numbered
        expert = numbered_expert(name)
        if expert is None:
            return position, 0, 0
        return first.setdefault(expert.prefix, position), expert.number, position

    return [name for _, name in sorted(enumerate(names), key=place)]


def _whole_view(param: Param) -> SliceView:
    return SliceView(param, param.shape, (Strip(0, 0, param.numel),) if param.numel else ())


def even_shape(shape: Sequence[int], dim: int | None, size: int) -> tuple[int, ...]:
    """The shape of a slice that each of ``size`` ranks has; ``dim`` as of ``even_map``."""
    return tuple(n // size if d == dim else n for d, n in enumerate(shape))


def even_map(tensor: Param, dim: int | None, size: int, axis: Literal["tensor", "expert"] = "tensor") -> SliceMap:
    """The map of a tensor that ``size`` ranks cut evenly along a dimension, or that each has (``dim`` None)."""
    shape = even_shape(tensor.shape, dim, size)
    boxes = ([(rank * n if d == dim else 0, n) for d, n in enumerate(shape)] for rank in range(size))
    return SliceMap(axis, tuple(SliceView(tensor, shape, strips_of_box(tensor.shape, box)) for box in boxes))


def pattern_maps(info: object, params: Sequence[Param], tensor_size: int, where: object) -> dict[str, SliceMap] | None:
    """The maps that the patterns of an older AutoTP save imply; ``params`` are of tensor parallel rank 0.

    None where ``info`` has no patterns, or others than AutoTP's, which are names. Raises UnsupportedError for a
    parameter that they do not describe: one of several parts that are cut each by itself.
    """
    if not isinstance(info, Mapping) or "tp_replicated_parameter_patterns" not in info:
        return None
    try:
        parts = _listed(info.get("parameter_with_sub_params"))
        fused = [_named(part.get("patterns") if isinstance(part, Mapping) else part) for part in parts]
        unknown = _named(info.get("autotp_unsupported_parameter_patterns")).union(*fused)
        replicated = _named(info.get("tp_replicated_parameter_patterns"))
        by_row = _named(info.get("parameter_with_row_parallelism_patterns"))
    except ValueError:
        return None
    maps: dict[str, SliceMap] = {}
    for param in params:
        if param.name in unknown:
            raise UnsupportedError(
                f"{where}: {param.name} is made of parts that tensor parallel ranks cut each by itself, and the "
                "checkpoint has no map of them. Resume at the tensor parallel size that saved."
            )
        if param.name in replicated:
            continue
        dim = 1 if param.name in by_row else 0
        if dim >= len(param.shape):
            raise CheckpointError(f"{where}: {param.name} {list(param.shape)} cannot be cut. The file is damaged.")
        whole = tuple(size * tensor_size if d == dim else size for d, size in enumerate(param.shape))
        maps[param.name] = even_map(Param(param.name, whole), dim, tensor_size)
    return maps


def layout_over_ranks(
    buffers: Callable[[int], Sequence[Sequence[Param]]],
    topology: Topology,
    maps: SliceMaps,
    *,
    stage: int,
    expert_sizes: Sequence[int] = (),
    gaps: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """The layout of all ranks, by whole tensors.

    ``buffers(t)`` are the parameters of each flat buffer of tensor parallel rank t and expert parallel rank 0, in
    buffer order and under the names that they have there. ``expert_sizes[i]`` is the expert parallel size of buffer i,
    1 for one without experts. ``gaps`` as in ``group_split_layout``, at stages 1 and 2. Raises ValueError for slices
    that do not make up their tensors.
    """
    layouts: list[Layout] = []
    for t in range(topology.tensor_size):
        own = buffers(t)
        sizes = list(expert_sizes) or [1] * len(own)
        for e in range(max(sizes, default=1)):
            local = [
                [Param(param.name, view_of(maps, param, t, e).shape) for param in members] if e < size else []
                for members, size in zip(own, sizes, strict=True)
            ]
            parts = [topology.data_size // size for size in sizes]
            if stage == 3:
                layout = layout_from_sub_groups(local, topology.world_size, num_parts=parts)
            else:
                own_gaps = None if gaps is None else [g if m else [] for g, m in zip(gaps, local, strict=True)]
                layout = group_split_layout(local, topology.world_size, own_gaps, num_parts=parts)
            ranks = [topology.sharers(t, e if e < size else 0, size) for size in sizes]
            views = {param.name: view_of(maps, param, t, e) for members in local for param in members}
            layouts.append(with_slices(layout, ranks, {name: (v.tensor, v.strips) for name, v in views.items()}))
    found = joined_layouts(layouts)
    check_slices(found)
    return found


def expert_sizes(layout: Layout, topology: Topology) -> tuple[int, ...]:
    """The expert parallel sizes of the groups of experts in a layout over all ranks, ascending; without 1."""
    return tuple(sorted({topology.data_size // count for count in layout.num_parts.tolist()} - {1}))


def view_of(maps: SliceMaps, param: Param, tensor_rank: int, expert_rank: int) -> SliceView:
    """Return a rank's slice of a parameter, all of it without a map. Raises ValueError for a rank that a map lacks."""
    found = maps.get(param.name)
    if found is None:
        return _whole_view(param)
    number = tensor_rank if found.axis == "tensor" else expert_rank
    if number >= len(found.views):
        raise ValueError(f"{param.name} has no map of {found.axis} parallel rank {number}")
    return found.views[number]


def _named(patterns: object) -> frozenset[str]:
    """The names that patterns are of. Raises ValueError for a pattern of another kind: it is not run."""
    names = [_literal(pattern) for pattern in _listed(patterns) if isinstance(pattern, str)]
    if None in names:
        raise ValueError("a pattern is not that of a name")
    return frozenset(name for name in names if name is not None)


def _listed(value: object) -> Iterable[object]:
    """The entries of a list that may be missing. Raises ValueError for anything else."""
    if value is not None and not isinstance(value, (list, tuple, Mapping)):
        raise ValueError(f"{shown(value)} is no list")
    return value or ()


def _literal(pattern: str) -> str | None:
    """The name that a pattern is of, where it is DeepSpeed's ``^re.escape(name)$``; None for any other."""
    inner = pattern[1:-1] if pattern.startswith("^") and pattern.endswith("$") else ""
    name = re.sub(r"\\(.)", r"\1", inner)
    return name if name and re.escape(name) == inner else None


def _entries(table: object, where: object, *, pattern: bool) -> list[tuple[str, Mapping[object, object]]]:
    """The names and maps of a table of affine maps."""
    version, params = (table.get("version"), table.get("params")) if isinstance(table, Mapping) else (None, None)
    if version != _AFFINE_VERSION:
        raise UnsupportedError(
            f"{where}: describes its slices in version {shown(version)} of DeepSpeed's maps, and {_AFFINE_VERSION} is "
            "read. Resume at the sizes that saved, or upgrade zeroelastic."
        )
    if not isinstance(params, Mapping):
        raise CheckpointError(f"{where}: has no maps of its slices. The file is damaged.")
    found: list[tuple[str, Mapping[object, object]]] = []
    for key, entry in params.items():
        name = _literal(key) if pattern and isinstance(key, str) else key
        if not isinstance(name, str) or not isinstance(entry, Mapping):
            raise CheckpointError(f"{where}: has a map of {shown(key)}. The file is damaged.")
        found.append((name, entry))
    return found


def _maps_of(
    entries: Sequence[tuple[str, Mapping[object, object]]],
    axis: Literal["tensor", "expert"],
    size: int,
    where: object,
) -> dict[str, SliceMap]:
    """A table of affine maps. Raises CheckpointError, UnsupportedError."""
    maps: dict[str, SliceMap] = {}
    room = MAX_STRIPS
    for name, entry in entries:
        maps[name] = _map_of(name, entry, axis, size, where, room)
        room -= sum(len(view.strips) for view in maps[name].views)
    return maps


def _map_of(
    name: str, entry: Mapping[object, object], axis: Literal["tensor", "expert"], size: int, where: object, room: int
) -> SliceMap:
    """One affine map, of at most ``room`` strips."""
    shape, ranks = _ints(entry.get("logical_shape")), entry.get("ranks")
    if shape is None or math.prod(shape) >= _MAX_NUMEL or not isinstance(ranks, Mapping) or {*ranks} != {*range(size)}:
        raise CheckpointError(f"{where}: the map of {name} is not of {size} ranks. The file is damaged.")
    views: list[SliceView] = []
    for number in range(size):
        own = ranks[number]
        local, pieces = (own.get("shard_shape"), own.get("pieces")) if isinstance(own, Mapping) else (None, None)
        local = _ints(local)
        if local is None or not isinstance(pieces, (list, tuple)) or len(pieces) > _MAX_PIECES:
            raise CheckpointError(f"{where}: the map of {name} has no slice of rank {number}. The file is damaged.")
        view = SliceView(Param(name, shape), local, ())
        strips: list[Strip] = []
        left = math.prod(local)
        for piece in pieces:
            found = _strips(view, piece, where)
            left -= sum(strip.num_runs * strip.numel for strip in found)
            if left < 0:
                raise CheckpointError(
                    f"{where}: the map of {name} has strips of more elements than the {math.prod(local)} of rank "
                    f"{number}'s slice. The file is damaged."
                )
            strips += found
            if len(strips) > room:
                raise UnsupportedError(f"{where}: the maps up to that of {name} are of more than {MAX_STRIPS} strips.")
        views.append(view._replace(strips=tuple(strips)))
        room -= len(strips)
    return SliceMap(axis, tuple(views))


def _strips(view: SliceView, piece: object, where: object) -> tuple[Strip, ...]:
    """The strips of a piece of a map, which is inside of the whole tensor and of the slice of ``view``."""
    name = view.tensor.name
    if not isinstance(piece, Mapping):
        raise CheckpointError(f"{where}: the map of {name} has a piece {shown(piece)}. The file is damaged.")
    if piece.get("scale", 1.0) != 1.0:
        raise UnsupportedError(
            f"{where}: ranks hold {name} multiplied by {shown(piece.get('scale'))}, with optimizer state of another "
            "scale. Resume at the sizes that saved."
        )
    shape = _ints(piece.get("shape"))
    (start, strides), (offset, steps) = (_place(piece.get(side)) for side in ("source", "dest"))
    if (
        shape is None
        or strides is None
        or steps is None
        or not len(shape) == len(strides) == len(steps)
        or not _is_inside(shape, start, strides, view.tensor.shape)
        or not _is_inside(shape, offset, steps, view.shape)
    ):
        raise CheckpointError(f"{where}: the map of {name} has a piece {shown(piece)}. The file is damaged.")
    try:
        return strips_of_view(shape, start, strides, offset, steps)
    except ValueError as error:
        raise UnsupportedError(f"{where}: {name}: {error}. Resume at the sizes that saved.") from None


def _is_inside(shape: Sequence[int], start: int, strides: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether all elements of a view are elements of a tensor of the shape ``whole``."""
    last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return 0 in shape or last < math.prod(whole)


def _ints(value: object) -> tuple[int, ...] | None:
    """A short list of sizes."""
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_DIMENSIONS:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 60 for n in value) else None


def _place(value: object) -> tuple[int, tuple[int, ...] | None]:
    """An offset and strides."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
        return 0, None
    return value[0], _ints(value[1])
