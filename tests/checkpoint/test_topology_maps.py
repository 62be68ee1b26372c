"""DeepSpeed's maps of slices in files that are damaged or hostile: refused by name, in little time and memory."""

from __future__ import annotations

import copy
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zeroelastic.checkpoint.topology import Topology, expert_maps, layout_over_ranks, pattern_maps, tensor_maps
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, UnsupportedError

NAME = "layers.0.down_proj.weight"


def piece(shape: list[int], start: int, strides: list[int], offset: int, steps: list[int]) -> dict[str, Any]:
    return {"shape": shape, "source": [start, strides], "dest": [offset, steps], "locations": [0]}


def column(t: int) -> dict[str, Any]:
    """Half of the columns of a weight of 6 rows and 8 columns."""
    return {"shard_shape": [6, 4], "pieces": [piece([6, 4], 4 * t, [8, 1], 0, [4, 1])]}


def info() -> dict[str, Any]:
    entry = {"logical_shape": [6, 8], "ranks": {0: column(0), 1: column(1)}}
    return {"affine_map": {"version": 1, "params": {f"^{re.escape(NAME)}$": entry}}}


def entry_of(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(table["affine_map"]["params"].values()))
    return found


def bend_piece(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: entry_of(table)["ranks"][1]["pieces"][0].update(changes)


def bend_entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: entry_of(table).update(changes)


def many_pieces(table: dict[str, Any]) -> None:
    """Pieces of a million strips each, which are one object in the file."""
    one = piece([1 << 16], 0, [2], 0, [2])
    one = {**one, "shape": [1 << 16, 1, 2], "source": [0, [4, 1, 2]], "dest": [0, [4, 1, 2]]}
    huge = {"shard_shape": [1 << 20], "pieces": [one] * 60_000}
    entry_of(table).update(logical_shape=[1 << 20], ranks={0: huge, 1: huge})


BENT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no ranks": (bend_entry(ranks={}), "is not of 2 ranks"),
    "other ranks": (bend_entry(ranks={0: column(0), 7: column(1)}), "is not of 2 ranks"),
    "a shape of 2^200 elements": (bend_entry(logical_shape=[1 << 50] * 4), "is not of 2 ranks"),
    "a shape of a thousand dimensions": (bend_entry(logical_shape=[1] * 1000), "is not of 2 ranks"),
    "a shape below zero": (bend_entry(logical_shape=[-6, -8]), "is not of 2 ranks"),
    "no pieces": (lambda table: entry_of(table)["ranks"][1].pop("pieces"), "has no slice of rank 1"),
    "too few elements": (lambda table: entry_of(table)["ranks"][1]["pieces"].clear(), "do not make up"),
    "a piece that is none": (lambda table: entry_of(table)["ranks"][1].update(pieces=[7]), "has a piece 7"),
    "a piece behind the end": (bend_piece(source=[8, [8, 1]]), "has a piece"),
    "a piece far behind the end": (bend_piece(source=[1 << 59, [8, 1]]), "has a piece"),
    "a piece that leaves the slice": (bend_piece(dest=[4, [4, 1]]), "has a piece"),
    "strides below zero": (bend_piece(source=[4, [-8, 1]]), "has a piece"),
    "too few strides": (bend_piece(source=[4, [1]]), "has a piece"),
    "the same columns twice": (bend_piece(source=[0, [8, 1]]), "is not held as a whole"),
    "columns that overlap": (bend_piece(source=[2, [8, 1]]), "has strips that overlap"),
    "a piece that is scaled": (bend_piece(scale=0.5), "multiplied by 0.5"),
    "the same row six times": (bend_piece(source=[4, [0, 1]]), "not made of runs"),
    "strips without end": (many_pieces, "strips of more elements than the 1048576 of rank 0"),
    "another version": (lambda table: table["affine_map"].update(version=2), "in version 2"),
    "no table": (lambda table: table["affine_map"].update(params=[1, 2]), "has no maps"),
    "a name that is none": (lambda table: table["affine_map"]["params"].update({7: {}}), "has a map of 7"),
    "a pattern": (lambda table: table["affine_map"]["params"].update({"(a+)+$": {}}), "has a map of"),
}


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    tracemalloc.start()
    begin = time.process_time()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - begin < 20 and peak < 512 << 20


def layout_by(maps: Any) -> None:
    layout_over_ranks(lambda t: [[Param(NAME, (6, 4))]], Topology(1, 2), maps, stage=3)


@pytest.mark.parametrize("name", BENT)
def test_a_map_that_is_damaged_is_refused(name: str) -> None:
    bend, said = BENT[name]
    table = info()
    layout_by(tensor_maps(copy.deepcopy(table), 2, "file.pt"))
    bend(table)
    with pytest.raises((CheckpointError, UnsupportedError, ValueError), match=said):
        layout_by(tensor_maps(table, 2, "file.pt"))


@pytest.mark.parametrize("ep_size", [0, -1, True, 1 << 40, "2", None])
def test_a_layer_of_another_number_of_ranks_is_refused(ep_size: object) -> None:
    layer = {"ep_size": ep_size, "affine_maps": {"version": 1, "params": {}}}
    with pytest.raises(CheckpointError, match="has ep_size"):
        expert_maps([layer], "file.pt")


@pytest.mark.parametrize(
    "damaged",
    [
        {"parameter_with_sub_params": 5},
        {"parameter_with_sub_params": [{"patterns": 5}]},
        {"parameter_with_sub_params": [5]},
        {"autotp_unsupported_parameter_patterns": 7},
        {"tp_replicated_parameter_patterns": "x"},
        {"parameter_with_row_parallelism_patterns": True},
    ],
)
def test_patterns_that_are_no_lists_describe_nothing(damaged: dict[str, Any]) -> None:
    assert pattern_maps({"tp_replicated_parameter_patterns": []}, [Param("a", (4,))], 2, "file.pt")
    assert pattern_maps({"tp_replicated_parameter_patterns": [], **damaged}, [Param("a", (4,))], 2, "file.pt") is None


def test_patterns_are_names_and_are_not_run() -> None:
    """A pattern that takes for ever on a name that is in the file, too."""
    hostile = {"tp_replicated_parameter_patterns": ["^(a+)+$"]}
    assert pattern_maps(hostile, [Param("a" * 40 + "b", (4, 4))], 2, "file.pt") is None
    named = {
        "tp_replicated_parameter_patterns": [r"^a\.norm$"],
        "parameter_with_row_parallelism_patterns": [r"^a\.down$"],
    }
    maps = pattern_maps(named, [Param("a.norm", (4,)), Param("a.down", (4, 2)), Param("a.up", (2, 4))], 2, "file.pt")
    assert maps is not None and {name: one.views[1].tensor.shape for name, one in maps.items()} == {
        "a.down": (4, 4),
        "a.up": (4, 4),
    }
    fused = {**named, "parameter_with_sub_params": [{"patterns": [r"^a\.up$"]}]}
    with pytest.raises(UnsupportedError, match="cut each by itself"):
        pattern_maps(fused, [Param("a.up", (2, 4))], 2, "file.pt")
