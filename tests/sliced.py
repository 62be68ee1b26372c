"""Layouts of slices over all ranks, and what the ranks' buffers hold, made one element at a time: a model of a save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.saved_state import TensorSet, extents_over_ranks
from zeroelastic.core.layout import (
    Layout,
    Param,
    group_split_layout,
    joined_layouts,
    layout_from_sub_groups,
    with_slices,
)
from zeroelastic.core.slices import RankSet, strips_of_box

KINDS = ("whole", "dim 0", "dim 1", "dim 2", "pairs", "experts")


@dataclass(frozen=True)
class Topology:
    """Data, tensor and expert parallel sizes; experts are cut over the data parallel ranks."""

    dp: int
    tp: int
    ep: int
    family: str

    @property
    def world_size(self) -> int:
        return self.dp * self.tp


def cut(total: int, count: int, number: int) -> tuple[int, int]:
    """The begin and the size of one of ``count`` uneven parts."""
    begins = [total * i // count for i in range(count + 1)]
    return begins[number], begins[number + 1] - begins[number]


def box_of(tensor: Param, kind: str, topology: Topology, t: int, e: int) -> list[tuple[int, int]]:
    """By dimension, the begin and the size of what a tensor parallel rank and an expert parallel rank have."""
    box = [(0, size) for size in tensor.shape]
    if kind == "experts":
        box[0] = cut(tensor.shape[0], topology.ep, e)
    dim = {"dim 0": 0, "dim 1": 1, "dim 2": 2}.get(kind)
    if kind == "experts" and len(box) > 1:
        dim = 1
    if dim is not None and dim < len(box):
        box[dim] = cut(tensor.shape[dim], topology.tp, t)
    if kind == "pairs":  # two tensor parallel ranks keep the same part, as heads of keys that are too few
        box[0] = cut(tensor.shape[0], -(-topology.tp // 2), t // 2)
    return box


def layout_of(tensors: list[tuple[Param, str]], topology: Topology) -> Layout:
    """The layout over all ranks: rank ``d * tp + t``."""
    layouts = []
    edp = topology.dp // topology.ep
    for t in range(topology.tp):
        for e in range(topology.ep):
            buffers: list[list[Param]] = [[], []]
            views = {}
            for tensor, kind in tensors:
                is_expert = kind == "experts"
                if e and not is_expert:
                    continue
                box = box_of(tensor, kind, topology, t, e)
                buffers[is_expert].append(Param(tensor.name, tuple(size for _, size in box)))
                views[tensor.name] = (tensor, strips_of_box(tensor.shape, box))
            counts = [topology.dp, edp]
            make = layout_from_sub_groups if topology.family == "param" else group_split_layout
            layout = make(buffers, topology.world_size, num_parts=counts)
            ranks = [RankSet(t, topology.tp, topology.dp), RankSet(e * topology.tp + t, topology.ep * topology.tp, edp)]
            layouts.append(with_slices(layout, ranks, views))
    return joined_layouts(layouts)


def ids(tensor: Param) -> np.ndarray:
    return np.arange(tensor.numel, dtype=np.int64).reshape(tensor.shape)


def buffers_of(tensors: list[tuple[Param, str]], topology: Topology) -> list[list[np.ndarray]]:
    """What every rank's buffers hold, made without layouts: the number of the tensor and of the element, or -1."""
    found = []
    edp = topology.dp // topology.ep
    for rank in range(topology.world_size):
        d, t = divmod(rank, topology.tp)
        e = d % topology.ep
        buffers = []
        for is_expert, parts, number in ((False, topology.dp, d), (True, edp, d // topology.ep)):
            flats = []
            for i, (tensor, kind) in enumerate(tensors):
                if (kind == "experts") != is_expert:
                    continue
                values = ids(tensor) + i * 10**6
                box = box_of(tensor, kind, topology, t, e)
                flats.append(values[tuple(slice(begin, begin + size) for begin, size in box)].reshape(-1))
            if topology.family == "param":
                parts_of = []
                for flat in flats:
                    part = math.ceil(len(flat) / parts)
                    padded = np.full(part * parts, -1, dtype=np.int64)
                    padded[: len(flat)] = flat
                    parts_of.append(padded[number * part : (number + 1) * part])
                buffers.append(np.concatenate([np.empty(0, dtype=np.int64), *parts_of]))
            else:
                whole = np.concatenate([np.empty(0, dtype=np.int64), *flats])
                part = 2 * math.ceil(len(whole) / (2 * parts))
                padded = np.full(part * parts, -1, dtype=np.int64)
                padded[: len(whole)] = whole
                buffers.append(padded[number * part : (number + 1) * part])
        found.append(buffers)
    return found


def sliced_part(folder: Path, tensors: list[tuple[Param, str]], topology: Topology) -> TensorSet:
    """The trained parameters of a save of this topology, each element its own number; one file for each rank."""
    layout, extents = layout_of(tensors, topology), {}
    for rank, buffers in enumerate(buffers_of(tensors, topology)):
        path, own = folder / f"rank{rank}", layout.on_rank(rank)
        path.write_bytes(b"".join(buffer.tobytes() for buffer in buffers))
        begins = np.cumsum([0, *(buffer.nbytes for buffer in buffers)])
        offset = np.array([begins[group] for group in own.sub_group.tolist()], dtype=np.int64) + own.offset * 8
        places = {"fp32": TensorExtents(path, {0: "int64", 1: "int64"}, offset)}
        extents[rank] = extents_over_ranks(layout, rank, places)
    params = layout.whole_tensors
    return TensorSet(layout, params, ({"fp32": "int64"},) * len(params), ({},) * len(params), extents)


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
tensor_lists = st.lists(st.tuples(shapes, st.sampled_from(KINDS)), min_size=1, max_size=5).map(
    lambda found: [(Param(f"t{i}", shape), kind) for i, (shape, kind) in enumerate(found)]
)
topologies = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["param", "group"])
).map(lambda one: Topology(one[0] * one[2], one[1], one[2], one[3]))
