"""One suite for all executors: they fill the same bytes, report the same digests and fail with the same words."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic import executors
from zeroelastic.digest import combine, digest_range_reference
from zeroelastic.errors import CheckpointError, ConfigError, MissingFileError
from zeroelastic.executors import DigestRows, ReadTable, SegmentTable, read_segments
from zeroelastic.executors.build_info import _load, describe_build

EXECUTORS = ["numpy", "native"]
UNTOUCHED = 0xA5


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not describe_build("native").usable:
        pytest.skip(f"the native engine is not built: {describe_build('native').reason}")
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@dataclass(frozen=True)
class Case:
    files: tuple[bytes, ...]
    buffer_sizes: tuple[int, ...]
    rows: SegmentTable
    digest: DigestRows


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Files, buffers, and rows that do not overlap in the buffers; sources may overlap."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    files = tuple(
        rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        for size in draw(st.lists(st.integers(0, 40_000), min_size=1, max_size=4))
    )
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    num_buffers = draw(st.integers(1, 4))
    filled = [0] * num_buffers
    rows = []
    shape = st.tuples(
        st.integers(0, len(files) - 1),
        st.integers(0, 40_000),
        st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(0, 10_000)),
        st.integers(0, num_buffers - 1),
        st.integers(0, 9),
    )
    for file, offset, count, buffer, gap in draw(st.lists(shape, max_size=40)):
        offset = min(offset, len(files[file]))
        nbytes = min(count * itemsize, (len(files[file]) - offset) // itemsize * itemsize)
        rows.append((file, offset, buffer, filled[buffer] + gap, nbytes))
        filled[buffer] += gap + nbytes
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    streams = draw(st.integers(1, 3))
    return Case(
        files=files,
        buffer_sizes=tuple(size + draw(st.integers(0, 5)) for size in filled),
        rows=SegmentTable(*(np.ascontiguousarray(column) for column in table.T)),
        digest=DigestRows(
            seeds=rng.integers(0, 2**64, streams, dtype=np.uint64),
            stream=rng.integers(0, streams, len(rows)),
            start=rng.integers(0, 2**40, len(rows)),
            itemsize=np.full(len(rows), itemsize, dtype=np.int64),
        ),
    )


def write_files(folder: Path, files: tuple[bytes, ...]) -> tuple[Path, ...]:
    paths = tuple(folder / f"{i}.bin" for i in range(len(files)))
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    return paths


def read_table(paths: tuple[Path, ...], rows: SegmentTable) -> ReadTable:
    return ReadTable(paths, rows.src, rows.src_offset, rows.dst, rows.dst_offset, rows.nbytes)


def one_row(path: Path, offset: int, nbytes: int) -> ReadTable:
    columns = (np.array([value], dtype=np.int64) for value in (0, offset, 0, 0, nbytes))
    return ReadTable((path,), *columns)


def expected(case: Case) -> tuple[list[np.ndarray], list[int]]:
    """The buffers and the digests, one row after the other."""
    buffers = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.buffer_sizes]
    digests = [0] * len(case.digest.seeds)
    table = case.rows
    columns = (table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (file, offset, buffer, buffer_offset, nbytes) in enumerate(rows):
        data = np.frombuffer(case.files[file], dtype=np.uint8)[offset : offset + nbytes]
        buffers[buffer][buffer_offset : buffer_offset + nbytes] = data
        stream = int(case.digest.stream[i])
        part = digest_range_reference(
            data, int(case.digest.itemsize[i]), seed=int(case.digest.seeds[stream]), start=int(case.digest.start[i])
        )
        digests[stream] = combine(digests[stream], part)
    return buffers, digests


@settings(max_examples=150)
@given(case=cases())
def test_every_row_and_nothing_else_is_filled(case: Case, executor: str, folder: Path) -> None:
    paths = write_files(folder, case.files)
    buffers = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.buffer_sizes]
    result = read_segments(read_table(paths, case.rows), buffers, digest=case.digest, executor=executor)
    want, digests = expected(case)
    for got, wanted in zip(buffers, want, strict=True):
        assert np.array_equal(got, wanted)
    assert result.digests is not None and result.digests.tolist() == digests
    assert result.bytes_read == int(case.rows.nbytes.sum())
    assert result.files == tuple(paths[i] for i in sorted(set(case.rows.src.tolist())))


def test_without_rows_no_file_is_opened(executor: str, tmp_path: Path) -> None:
    empty = np.empty(0, dtype=np.int64)
    table = ReadTable((tmp_path / "missing",), empty, empty, empty, empty, empty)
    result = read_segments(table, [np.zeros(3, dtype=np.uint8)], executor=executor)
    assert result.bytes_read == 0 and result.files == () and result.digests is None


def test_many_tiny_rows_of_many_files(executor: str, tmp_path: Path) -> None:
    num_files, num_rows = 40, 30_000
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (num_files, 20_000), dtype=np.uint8)
    paths = write_files(tmp_path, tuple(row.tobytes() for row in data))
    file = np.sort(rng.integers(0, num_files, num_rows))
    offset = rng.integers(0, 19_990, num_rows)
    order = np.lexsort((offset, file))
    offset = offset[order]
    nbytes = rng.integers(0, 10, num_rows)
    place = rng.permutation(num_rows)
    ends = np.cumsum(nbytes[place])
    dst_offset = np.empty(num_rows, dtype=np.int64)
    dst_offset[place] = ends - nbytes[place]
    zero = np.zeros(num_rows, dtype=np.int64)
    buffer = np.zeros(int(nbytes.sum()), dtype=np.uint8)
    result = read_segments(ReadTable(paths, file, offset, zero, dst_offset, nbytes), [buffer], executor=executor)
    want = np.concatenate([data[file[i], offset[i] : offset[i] + nbytes[i]] for i in place])
    assert np.array_equal(buffer, want)
    assert result.bytes_read == len(want)


def test_rows_longer_than_any_request(executor: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    data = rng.integers(0, 256, 37_000_003, dtype=np.uint8)
    (path,) = write_files(tmp_path, (data.tobytes(),))
    cuts = np.array([0, 3, 11_000_004, 11_000_008, 36_999_999], dtype=np.int64)
    lengths = np.diff(cuts)
    nbytes = lengths // 4 * 4
    zero = np.zeros(len(nbytes), dtype=np.int64)
    place = np.array([3, 1, 0, 2])
    dst_offset = np.empty(len(nbytes), dtype=np.int64)
    dst_offset[place] = np.cumsum(nbytes[place]) - nbytes[place] + 5
    buffer = np.zeros(int(nbytes.sum()) + 5, dtype=np.uint8)
    digest = DigestRows(
        seeds=np.array([7, 9], dtype=np.uint64),
        stream=np.array([0, 1, 0, 1]),
        start=np.array([0, 999, 5, 1024]),
        itemsize=zero + 4,
    )
    table = ReadTable((path,), zero, cuts[:-1], zero, dst_offset, nbytes)
    result = read_segments(table, [buffer], digest=digest, executor=executor)
    totals = [0, 0]
    for i in range(len(nbytes)):
        source = data[cuts[i] : cuts[i] + nbytes[i]]
        assert np.array_equal(buffer[dst_offset[i] : dst_offset[i] + nbytes[i]], source)
        stream = int(digest.stream[i])
        part = digest_range_reference(source, 4, seed=int(digest.seeds[stream]), start=int(digest.start[i]))
        totals[stream] = combine(totals[stream], part)
    assert result.digests is not None and result.digests.tolist() == totals


def test_offsets_beyond_4_gib(executor: str, tmp_path: Path) -> None:
    path = tmp_path / "sparse.bin"
    offsets = [2**31 - 3, 2**32 - 3, 2**32 + 12_345, 5 * 2**30 - 7]
    with path.open("wb") as file:
        for i, offset in enumerate(offsets):
            file.seek(offset)
            file.write(bytes([i + 1] * 7))
    count = len(offsets)
    zero = np.zeros(count, dtype=np.int64)
    table = ReadTable((path,), zero, np.array(offsets), zero, np.arange(count) * 8, zero + 7)
    buffer = np.full(8 * count, UNTOUCHED, dtype=np.uint8)
    result = read_segments(table, [buffer], executor=executor)
    assert buffer.reshape(count, 8).tolist() == [[i + 1] * 7 + [UNTOUCHED] for i in range(count)]
    assert result.bytes_read == 7 * count


def message(table: ReadTable, buffers: list[np.ndarray], executor: str) -> tuple[type[BaseException], str]:
    with pytest.raises(CheckpointError) as caught:
        read_segments(table, buffers, executor=executor)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 4096, 3_000_000, 9_999_999])
def test_a_short_file_is_named_with_the_byte_where_it_ends(executor: str, tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(size))
    buffers = [np.zeros(10_000_000, dtype=np.uint8)]
    got = message(one_row(path, 0, 10_000_000), buffers, executor)
    assert got == (CheckpointError, f"{path}: ends at byte {size}. The file is truncated.")
    # A row that begins behind the end is reported where it begins.
    got = message(one_row(path, size + 10, 100), buffers, executor)
    assert got == (CheckpointError, f"{path}: ends at byte {size + 10}. The file is truncated.")


def test_of_several_bad_files_the_first_is_named(executor: str, tmp_path: Path) -> None:
    size = 3_000_000
    paths = tuple(tmp_path / f"{i}.bin" for i in range(6))
    for i, path in enumerate(paths):
        path.write_bytes(bytes(size if i < 2 else size - 1000 * i))
    count = len(paths)
    files = np.arange(count)
    zero = np.zeros(count, dtype=np.int64)
    table = ReadTable(paths, files, zero, files, zero, zero + size)
    buffers = [np.zeros(size, dtype=np.uint8) for _ in paths]
    want = f"{paths[2]}: ends at byte {size - 2000}. The file is truncated."
    assert message(table, buffers, executor) == (CheckpointError, want)


def test_a_missing_file_is_named(executor: str, tmp_path: Path) -> None:
    path = tmp_path / "gone.bin"
    want = f"{path}: no such file. The checkpoint is incomplete."
    for nbytes in (0, 4):
        got = message(one_row(path, 0, nbytes), [np.zeros(4, dtype=np.uint8)], executor)
        assert got == (MissingFileError, want)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(executor: str, tmp_path: Path) -> None:
    buffers = [np.zeros(4, dtype=np.uint8)]
    got = message(one_row(tmp_path, 12, 4), buffers, executor)
    assert got == (CheckpointError, f"{tmp_path}: reading at byte 12 failed: Is a directory.")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    got = message(one_row(loop, 0, 4), buffers, executor)
    assert got == (CheckpointError, f"{loop}: cannot be opened: Too many levels of symbolic links.")


def test_names_that_are_not_utf8_are_opened(executor: str, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.bin")
    path.write_bytes(b"1234")
    buffer = np.zeros(4, dtype=np.uint8)
    read_segments(one_row(path, 0, 4), [buffer], executor=executor)
    assert buffer.tobytes() == b"1234"


def test_a_row_that_leaves_its_buffer_is_a_bug_of_ours(executor: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(100))
    with pytest.raises(AssertionError):
        read_segments(one_row(path, 0, 5), [np.zeros(4, dtype=np.uint8)], executor=executor)


def test_an_unknown_executor_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no executor 'abacus'; there are: auto, native, numpy"):
        read_segments(one_row(Path("x"), 0, 0), [], executor="abacus")  # type: ignore[arg-type]


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The package as it is where no compiler was found."""
    (tmp_path / "_native.log").write_text("there was no C++ compiler\n")
    monkeypatch.setattr("zeroelastic.executors.build_info._PACKAGE", tmp_path)
    _load.cache_clear()
    executors._fastest.cache_clear()
    yield tmp_path
    _load.cache_clear()
    executors._fastest.cache_clear()


def test_a_named_executor_that_is_not_built_says_how_to_build_it(nothing_built: Path) -> None:
    with pytest.raises(ConfigError, match=r"there was no C\+\+ compiler.*ZEROELASTIC_BUILD_NATIVE=1 pip install"):
        read_segments(one_row(Path("x"), 0, 0), [], executor="native")


def test_auto_falls_back_to_numpy_and_says_so_once(
    nothing_built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"abcd")
    for _ in range(2):
        buffer = np.zeros(4, dtype=np.uint8)
        read_segments(one_row(path, 0, 4), [buffer])
        assert buffer.tobytes() == b"abcd"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "numpy" in caplog.text and "there was no C++ compiler" in caplog.text


def test_auto_takes_the_native_engine_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    if not describe_build("native").usable:
        pytest.skip("the native engine is not built")
    executors._fastest.cache_clear()
    with caplog.at_level(logging.INFO, logger="zeroelastic.executors"):
        assert executors.choose_executor("auto") == "native"
        assert executors.choose_executor("auto") == "native"
    assert len(caplog.records) == 1 and "native engine" in caplog.text
