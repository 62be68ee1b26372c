from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.executors.batches import batches, join_crc32_groups


@given(
    sizes=st.lists(st.one_of(st.integers(0, 30), st.integers(0, 3000)), max_size=30),
    capacity=st.integers(8, 500),
)
def test_batches_hold_every_byte_once_and_fit(sizes: list[int], capacity: int) -> None:
    pieces: list[tuple[int, int, int]] = []
    for batch in batches(np.array(sizes, dtype=np.int64), capacity):
        assert len(batch.row) == len(np.unique(batch.row))
        assert (batch.offset % 8 == 0).all() and (batch.start % 8 == 0).all()
        ends = batch.offset + batch.nbytes
        assert (ends[:-1] <= batch.offset[1:]).all() and ends[-1] <= capacity
        pieces += zip(batch.row.tolist(), batch.start.tolist(), batch.nbytes.tolist(), strict=True)
    reached = [0] * len(sizes)
    for row, start, nbytes in pieces:
        assert start == reached[row]
        reached[row] += nbytes
    assert reached == sizes
    assert [row for row, _, _ in pieces] == sorted(row for row, _, _ in pieces)
    assert {row for row, _, _ in pieces} == set(range(len(sizes)))


@given(st.lists(st.tuples(st.integers(-1, 4), st.binary(max_size=20)), max_size=12))
def test_the_checksums_of_groups_are_those_of_their_bytes(runs: list[tuple[int, bytes]]) -> None:
    group = np.array([number for number, _ in runs], dtype=np.int64)
    crc32 = np.array([zlib.crc32(data) for _, data in runs], dtype=np.uint32)
    nbytes = np.array([len(data) for _, data in runs], dtype=np.int64)
    want = [zlib.crc32(b"".join(data for number, data in runs if number == i)) for i in range(5)]
    assert join_crc32_groups(group, crc32, nbytes, 5).tolist() == want
