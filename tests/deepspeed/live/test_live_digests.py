"""What was read, what is live and what was saved are compared by their digests, and scalars as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.checkpoint.extents import ExtentTable
from zeroelastic.core.digest import DigestKey, ParamContent, ScalarValue
from zeroelastic.core.layout import Param, layout_from_sub_groups
from zeroelastic.deepspeed.fill import RowStreams, Target
from zeroelastic.deepspeed.live.digests import (
    LivePiece,
    ReadDigest,
    digest_pieces,
    known_digests,
)
from zeroelastic.deepspeed.load.verify import differences, with_saved_kinds

PLAN: Any = SimpleNamespace(dst=layout_from_sub_groups([[Param("other", (5,)), Param("weight", (1000,))]], 1))
STREAM = DigestKey("weight", "exp_avg")


def rows_into(target_offset: np.ndarray, start: np.ndarray, numel: np.ndarray) -> ExtentTable:
    """Rows of fp32 of the second parameter, into the second target."""
    ones = np.ones(len(numel), dtype=np.int64)
    return ExtentTable((Path("f"),), 0 * ones, 4 * start, ones, target_offset, numel, 4 * ones, ones, start)


def read_of(rows: ExtentTable, targets: list[Target], halves: int) -> ReadDigest:
    """What is known of the tensor when the rows have been read in two calls."""
    digests: dict[tuple[str, str], ReadDigest] = {}
    for some in (np.arange(halves), np.arange(halves, rows.num_rows)):
        streams = RowStreams.of(PLAN, rows.take(some), targets)
        streams.add_read(np.full(len(streams.names), 5, dtype=np.uint64), digests)
    assert set(digests) == {STREAM}
    return digests[STREAM]


@given(
    numels=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    first=st.integers(0, 50),
    room=st.integers(0, 20),
    moved=st.none() | st.tuples(st.integers(0, 5), st.integers(-8, 8).filter(bool)),
    data=st.data(),
)
@settings(deadline=None)
def test_a_read_shows_a_tensor_if_no_row_went_elsewhere(
    numels: list[int], first: int, room: int, moved: tuple[int, int] | None, data: st.DataObject
) -> None:
    numel = np.array(numels, dtype=np.int64)
    begin = np.cumsum(numel) - numel
    flat = torch.zeros(room + int(numel.sum()) + 9)
    targets = [Target("fp32", 0, torch.zeros(3), "float32"), Target("exp_avg", 0, flat, "float32")]
    target_offset = room + begin
    if moved is not None:
        target_offset[moved[0] % len(numels)] += moved[1]
    order = np.array(data.draw(st.permutations(range(len(numels)))))
    rows = rows_into(target_offset, first + begin, numel).take(order)
    read = read_of(rows, targets, data.draw(st.integers(0, len(numels))))
    piece = LivePiece(*STREAM[:2], flat[room : room + int(numel.sum())], first)
    assert read.shows(piece) == (moved is None)
    assert known_digests([piece], {STREAM: read}) == [read.digest if moved is None else None]


def test_the_digest_of_no_elements_is_known_without_a_read() -> None:
    piece = LivePiece(*STREAM[:2], torch.zeros(0), 7)
    assert known_digests([piece], {}) == digest_pieces([piece]) == [0]


def test_a_read_does_not_show_what_is_another_tensor_or_not_all_of_it() -> None:
    flat = torch.zeros(20)
    targets = [Target("fp32", 0, torch.zeros(3), "float32"), Target("exp_avg", 0, flat, "float32")]
    one = np.array([1])
    read = read_of(rows_into(2 * one, 7 * one, 10 * one), targets, 1)
    assert read.shows(LivePiece(*STREAM[:2], flat[2:12], 7))
    assert read.shows(LivePiece(*STREAM[:2], flat[1:13], 6))  # the digest is short of two elements, and so is not right
    for other, start in (
        (flat.clone()[2:12], 7),
        (flat[2:11], 7),
        (flat[3:12], 8),
        (flat[2:12], 8),
        (flat[2:12].double(), 7),
        (torch.zeros(40)[4:24:2], 7),
    ):
        assert not read.shows(LivePiece(*STREAM[:2], other, start))
    strided = [targets[0], Target("exp_avg", 0, torch.zeros(40)[::2], "float32")]
    assert read_of(rows_into(2 * one, 7 * one, 10 * one), strided, 1).origin is None


INT_3, FLOAT_3, FLOAT_4 = ScalarValue("pyint", 3), ScalarValue("float32", 3.0), ScalarValue("float32", 4.0)


def content(name: str, scalars: Mapping[str, ScalarValue], digest: int = 7) -> ParamContent:
    return ParamContent(Param(name, (2,)), {"fp32": ("float32", digest), "exp_avg": ("float32", digest)}, scalars)


def test_every_parameter_with_another_number_is_named() -> None:
    saved_3, live_3, live_4, none = {"step": INT_3}, {"step": FLOAT_3}, {"step": FLOAT_4}, dict[str, ScalarValue]()
    saved = [content(name, saved_3) for name in "abcde"]
    live = [
        content("a", live_3),
        content("b", live_4),
        content("c", live_4),
        content("d", none),
        content("e", live_3, digest=8),
    ]
    digests = [("e", "exp_avg"), ("e", "fp32")]
    steps = [("b", "step"), ("c", "step"), ("d", "step")]
    assert differences(saved, live, weights_only=False) == [*steps, *digests]
    assert differences(saved, live, weights_only=True) == [("e", "fp32")]
    assert differences(saved, live[1:], weights_only=True) == [("a", "the parameter itself"), ("e", "fp32")]


def test_equal_numbers_take_the_kind_of_the_saved_one() -> None:
    live_3, live_4 = {"step": FLOAT_3}, {"step": FLOAT_4}
    saved = [content("a", {"step": INT_3}), content("b", {"step": INT_3}), content("d", {})]
    live = [content(name, live_3) for name in "acd"] + [content("b", live_4)]
    found = {each.param.name: each.scalars["step"] for each in with_saved_kinds(live, saved)}
    assert found == {"a": INT_3, "b": FLOAT_4, "c": FLOAT_3, "d": FLOAT_3}
