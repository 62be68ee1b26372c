"""zeroelastic.executors, numpy: every byte lands where its row says, once, or the error names file and offset."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest

from zeroelastic.executors import numpy_executor
from zeroelastic.executors.dispatch import CopyTable, read_segments

UNTOUCHED = 0xEE


read_numpy = functools.partial(read_segments, executor="numpy")


def column(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def table(rows) -> CopyTable:
    """A table from (file, file_offset, buffer, buffer_offset, nbytes) rows, sorted as it must be."""
    rows = sorted(rows)
    columns = [column(row[i] for row in rows) for i in range(5)]
    return CopyTable(*columns)


def make_file(path: Path, size: int, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    return data


def buffers_of(*sizes: int) -> list[np.ndarray]:
    return [np.full(size, UNTOUCHED, dtype=np.uint8) for size in sizes]


@pytest.fixture
def preads(monkeypatch) -> list[tuple[int, int]]:
    """(number of vectors, offset) of every read call."""
    calls: list[tuple[int, int]] = []
    real = os.preadv

    def watch(fd, views, offset):
        calls.append((len(views), offset))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", watch)
    return calls


def test_a_run_of_the_file_is_one_call_even_into_many_buffers(tmp_path, preads):
    data = make_file(tmp_path / "a", 1000)
    buffers = buffers_of(*[10] * 50)
    read_numpy(table([(0, 100 + 10 * i, (i * 7) % 50, 0, 10) for i in range(50)]), [tmp_path / "a"], buffers)
    assert preads == [(50, 100)]
    assert all(np.array_equal(buffers[(i * 7) % 50], data[100 + 10 * i :][:10]) for i in range(50))


def test_what_is_contiguous_on_both_sides_is_one_vector(tmp_path, preads):
    data = make_file(tmp_path / "a", 1000)
    buffers = buffers_of(500)
    read_numpy(table([(0, 10 * i, 0, 10 * i, 10) for i in range(50)]), [tmp_path / "a"], buffers)
    assert preads == [(1, 0)] and np.array_equal(buffers[0], data[:500])


def test_more_rows_than_one_call_takes(tmp_path, preads):
    count = 5000
    data = make_file(tmp_path / "a", 3 * count)
    buffers = buffers_of(4 * count)
    read_numpy(table([(0, 3 * i, 0, 4 * i, 3) for i in range(count)]), [tmp_path / "a"], buffers)
    assert len(preads) == 5 and all(vectors <= 1024 for vectors, _ in preads)
    assert np.array_equal(buffers[0].reshape(count, 4)[:, :3].reshape(-1), data)
    assert (buffers[0].reshape(count, 4)[:, 3] == UNTOUCHED).all()


def test_gaps_are_not_read(tmp_path, preads):
    data = make_file(tmp_path / "a", 1000)
    buffers = buffers_of(40)
    result = read_numpy(table([(0, 100 * i, 0, 10 * i, 10) for i in range(4)]), [tmp_path / "a"], buffers)
    assert result.bytes_read == 40 and [offset for _, offset in preads] == [0, 100, 200, 300]
    assert np.array_equal(buffers[0], np.concatenate([data[100 * i :][:10] for i in range(4)]))


def test_a_short_read_over_several_vectors_is_continued(tmp_path, monkeypatch):
    data = make_file(tmp_path / "a", 100)
    real = os.preadv

    def at_most_25(fd, views, offset):
        left, some = 25, []
        for view in views:
            some.append(memoryview(view)[:left])
            left -= len(some[-1])
        return real(fd, [view for view in some if len(view)], offset)

    monkeypatch.setattr(os, "preadv", at_most_25)
    buffers = buffers_of(*[10] * 10)
    read_numpy(table([(0, 10 * i, 9 - i, 0, 10) for i in range(10)]), [tmp_path / "a"], buffers)
    assert np.array_equal(np.concatenate(buffers[::-1]), data)


def test_a_large_run_is_cut_into_bounded_calls(tmp_path, preads, monkeypatch):
    monkeypatch.setattr(numpy_executor, "_MAX_CALL_BYTES", 64)
    data = make_file(tmp_path / "a", 1000)
    buffers = buffers_of(*[40] * 10)
    read_numpy(table([(0, 40 * i, i, 0, 40) for i in range(10)]), [tmp_path / "a"], buffers)
    assert len(preads) == 10 and np.array_equal(np.concatenate(buffers), data[:400])
