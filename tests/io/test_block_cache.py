"""Blocks of remote files: the bytes of the file, each requested once, in few requests."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from counted import CountedFileSystem, counted, forget, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroelastic.io.storage import BlockFile

pytestmark = pytest.mark.usefixtures("counted")
__all__ = ["counted"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 300_000),
    asked=st.lists(st.tuples(st.integers(0, 320_000), st.integers(0, 100_000), st.booleans()), max_size=12),
)
def test_blocks_are_the_bytes_of_the_file_and_come_once(size, asked):
    forget()
    data = os.urandom(size)
    path = put("counted://run/f", data)
    file = BlockFile(path)
    for offset, nbytes, ahead in asked:
        if ahead:
            file.prefetch([(offset, nbytes), (offset // 2, 10)])
        assert file.read(offset, nbytes) == data[offset : offset + nbytes]
    covered = sorted((start, end) for _, start, end in CountedFileSystem.ranges)
    assert all(first[1] <= second[0] for first, second in pairwise(covered)), "read twice"
    assert file.bytes_read == sum(end - start for start, end in covered) <= size
    assert file.size == size


def test_blocks_that_are_kept_are_bounded_and_neighbours_are_one_request(counted):
    path = put("counted://run/f", bytes(64 << 20))
    file = BlockFile(path)
    assert len(counted.ranges) == 2 and file.bytes_read == 128 << 10
    assert len(file.read(0, 40 << 20)) == 40 << 20
    assert len(counted.ranges) == 2 + 5 and file.bytes_read == (40 << 20) + (64 << 10)
    assert sum(map(len, file._blocks.values())) <= 4 << 20
    forget()
    scattered = [(i * 100_000, 30) for i in range(file.capacity)]
    file.prefetch(scattered)
    prefetched = len(counted.ranges)
    for offset, nbytes in scattered:
        file.read(offset, nbytes)
    assert len(counted.ranges) == prefetched <= 2 * file.capacity
