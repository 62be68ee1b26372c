"""One suite for all executors: they move the same bytes, report the same digests and fail with the same words."""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import (
    DTYPES,
    UNTOUCHED,
    Engine,
    cases,
    checksums,
    convert,
    expected,
    open_engine,
    patterns,
    ranges,
    run_case,
    segment,
    shuffled,
    write_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.core.digest import combine, digest_range
from zeroelastic.errors import CheckpointError, ConfigError, MissingFileError, UnreadableError
from zeroelastic.executors import cuda_executor, dispatch
from zeroelastic.executors.batches import batches, join_crc32_groups
from zeroelastic.executors.build_info import _load, describe_build
from zeroelastic.executors.dispatch import (
    OPERATIONS,
    Cast,
    ConvertedCopies,
    CopyTable,
    DeviceBuffer,
    DigestRows,
    Ranges,
    copy_segments,
    move_segments,
    read_segments,
    scan_segments,
    sum_segments,
    write_segments,
)
from zeroelastic.executors.tables import CASTS, cast_itemsizes

# --- every table ----------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(data=st.data(), digested=st.booleans(), summed=st.booleans(), with_progress=st.booleans(), sync=st.booleans())
def test_every_operation_moves_its_rows_and_nothing_else(
    data: st.DataObject, digested: bool, summed: bool, with_progress: bool, sync: bool, engine: Engine, folder: Path
) -> None:
    """With digests, checksums and progress in the same pass, by any number of threads."""
    operation = data.draw(st.sampled_from(OPERATIONS[engine.name]))
    fills = operation not in ("scan", "sum")
    case = data.draw(cases(aligned=engine.on_device and operation == "copy", casts=CASTS if fills else ("none",)))
    if operation != "read":
        case = shuffled(case, np.array(data.draw(st.permutations(range(len(case.rows.nbytes)))), dtype=np.int64))
    options: dict[str, Any] = {"threads": data.draw(st.sampled_from([None, 1, 3]))}
    if digested or operation == "sum":
        options["digest"] = case.digest
    on_host = engine.can("scan") and operation in ("move", "scan", "sum")
    if summed and (on_host or operation == "write" or (operation == "read" and case.cast == "none")):
        options["crc32"] = np.full(len(case.rows.nbytes), 1, dtype=np.uint32)
    reported: list[int] = []
    if with_progress and operation not in ("copy", "sum"):
        options["progress"] = reported.append
    if operation == "write":
        options["sync"] = sync
    made, totals = run_case(operation, engine, case, folder, **options)
    want, digests = expected(case)
    assert made is None if not fills else made == [part.tobytes() for part in want]
    assert totals is None if "digest" not in options else totals is not None and totals.tolist() == digests
    assert "crc32" not in options or options["crc32"].tolist() == checksums(case)
    assert "progress" not in options or sum(reported) == int(case.rows.nbytes.sum())


@pytest.mark.parametrize("cast", DTYPES)
def test_conversions_are_torch_bit_for_bit(engine: Engine, tmp_path: Path, cast: Cast) -> None:
    """NaN and infinities included, which are the same on every engine; torch on a GPU makes float16 NaN of its own."""
    src = patterns(cast)
    want = convert(cast, src)
    table = segment(0, 0, len(src))
    dst = engine.put(np.zeros(len(want), dtype=np.uint8))
    read_segments(table, write_files(tmp_path, (src,)), [dst], cast=cast, executor=engine.name)
    assert np.array_equal(engine.get(dst), want)
    dst = engine.put(np.zeros(len(want), dtype=np.uint8))
    copy_segments(table, [engine.put(src)], [dst], cast=cast, executor=engine.name)
    got = engine.get(dst)
    narrows = cast.startswith("float32")
    if engine.on_device and not (narrows and (engine.name == "cuda" or cast == "float32->bfloat16")):
        bits = src.view(np.uint32 if narrows else np.uint16)
        most = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[cast.split("-")[0]]
        nan = (bits & (2 ** (bits.itemsize * 8 - 1) - 1)) > most
        got, want = (part.view(np.uint16 if narrows else np.uint32) for part in (got, want))
        if narrows:
            assert (got[nan] == 0x7FFF).all()
        else:
            assert np.isnan(got[nan].view(np.float32)).all()
        got, want = got[~nan], want[~nan]
    assert np.array_equal(got, want)
    engine.free()


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("cast", ["float32->bfloat16", "float32->float16", "bfloat16->float32"])
def test_what_is_read_is_converted_beside_it(data: st.DataObject, scanner: Engine, folder: Path, cast: Cast) -> None:
    """Of buffers that have a second one; the first has the bytes as they are, and the digests are of these."""
    itemsize, converted = cast_itemsizes(cast)
    source = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, 600_000, dtype=np.uint8)
    paths = write_files(folder, (source, source[::-1].copy()))
    rows, ends = [], [0, 0, 0]
    for _ in range(data.draw(st.integers(0, 12))):
        dst, numel = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([0, 1, 3, 700, 40_000]))
        gap = data.draw(st.integers(0, 2))
        nbytes = numel * itemsize
        begin = data.draw(st.integers(0, len(source) - nbytes))
        rows.append((data.draw(st.integers(0, 1)), begin, dst, (ends[dst] + gap) * itemsize, nbytes))
        ends[dst] += gap + numel
    table = CopyTable(*(np.array([row[i] for row in rows], dtype=np.int64) for i in range(5)))
    kept = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    buffers = [np.full((end + 1) * itemsize, UNTOUCHED, dtype=np.uint8) for end in ends]
    copies = [
        np.full((end + 1) * converted, UNTOUCHED, dtype=np.uint8) if keep else None
        for end, keep in zip(ends, kept, strict=True)
    ]
    want = [None if copy is None else copy.copy() for copy in copies]
    for file, begin, dst, offset, nbytes in rows:
        if (wanted := want[dst]) is not None:
            made = convert(cast, (source if file == 0 else source[::-1])[begin : begin + nbytes].copy())
            wanted[offset // itemsize * converted :][: len(made)] = made
    plain = [buffer.copy() for buffer in buffers]
    read_segments(table, paths, plain, executor=scanner.name)
    digest = DigestRows(
        np.array([7], dtype=np.uint64), np.zeros(len(rows), dtype=np.int64),
        np.arange(len(rows), dtype=np.int64) * len(source), np.full(len(rows), itemsize, dtype=np.int64),
    ) if data.draw(st.booleans()) else None  # fmt: skip
    result = read_segments(
        table, paths, buffers, digest=digest, copies=ConvertedCopies(cast, copies),
        threads=data.draw(st.sampled_from([None, 1, 3])), executor=scanner.name,
    )  # fmt: skip
    for got, wanted in zip([*buffers, *copies], [*plain, *want], strict=True):
        assert (got is None and wanted is None) or np.array_equal(got, wanted)
    alone = read_segments(table, paths, plain, digest=digest, executor=scanner.name)
    assert (result.digests is None) == (digest is None)
    assert digest is None or (result.digests == alone.digests).all()


@pytest.mark.parametrize("row", [(0, 0, 0, 2, 8), (0, 0, 0, 4, 6), (0, 0, 0, 60, 8)])
def test_a_row_whose_elements_cannot_be_converted_beside_it_is_a_bug_that_is_caught(
    scanner: Engine, tmp_path: Path, row: tuple[int, ...]
) -> None:
    table = CopyTable(
        *(np.array([first, value], dtype=np.int64) for first, value in zip((0, 0, 0, 0, 4), row, strict=True))
    )
    paths = write_files(tmp_path, (np.zeros(100, dtype=np.uint8),))
    buffer, copy = np.full(80, UNTOUCHED, dtype=np.uint8), np.full(32, UNTOUCHED, dtype=np.uint8)
    copies = ConvertedCopies("float32->bfloat16", [copy])
    with pytest.raises(AssertionError, match="row 1 of a segment table"):
        read_segments(table, paths, [buffer], copies=copies, executor=scanner.name)
    assert (buffer == UNTOUCHED).all() and (copy == UNTOUCHED).all()


# --- reads ----------------------------------------------------------------------------------------------------------


def test_without_rows_no_file_is_opened(engine: Engine, tmp_path: Path) -> None:
    empty = np.empty(0, dtype=np.int64)
    table, missing = CopyTable(empty, empty, empty, empty, empty), tmp_path / "missing"
    result = read_segments(table, [missing], [engine.put(np.zeros(3, dtype=np.uint8))], executor=engine.name)
    assert result.bytes_read == 0 and result.files == () and result.digests is None
    if engine.can("scan"):
        assert scan(Ranges(empty, empty, empty), (missing,), engine) == []


def test_many_tiny_rows_of_many_files(engine: Engine, tmp_path: Path) -> None:
    num_files, num_rows = 40, 30_000
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (num_files, 20_000), dtype=np.uint8)
    paths = write_files(tmp_path, tuple(data))
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
    buffer = engine.put(np.zeros(int(nbytes.sum()), dtype=np.uint8))
    result = read_segments(CopyTable(file, offset, zero, dst_offset, nbytes), paths, [buffer], executor=engine.name)
    want = np.concatenate([data[file[i], offset[i] : offset[i] + nbytes[i]] for i in place])
    assert np.array_equal(engine.get(buffer), want)
    engine.free()
    assert result.bytes_read == len(want)


def test_rows_longer_than_any_request(engine: Engine, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    data = rng.integers(0, 256, 37_000_003, dtype=np.uint8)
    (path,) = write_files(tmp_path, (data,))
    cuts = np.array([0, 3, 11_000_004, 11_000_008, 36_999_999], dtype=np.int64)
    lengths = np.diff(cuts)
    nbytes = lengths // 4 * 4
    zero = np.zeros(len(nbytes), dtype=np.int64)
    place = np.array([3, 1, 0, 2])
    dst_offset = np.empty(len(nbytes), dtype=np.int64)
    dst_offset[place] = np.cumsum(nbytes[place]) - nbytes[place] + 5
    buffer = engine.put(np.zeros(int(nbytes.sum()) + 5, dtype=np.uint8))
    digest = DigestRows(
        seeds=np.array([7, 9], dtype=np.uint64),
        stream=np.array([0, 1, 0, 1]),
        start=np.array([0, 999, 5, 1024]),
        itemsize=zero + 4,
    )
    table = CopyTable(zero, cuts[:-1], zero, dst_offset, nbytes)
    result = read_segments(table, [path], [buffer], digest=digest, executor=engine.name)
    totals = [0, 0]
    filled = engine.get(buffer)
    engine.free()
    for i in range(len(nbytes)):
        source = data[cuts[i] : cuts[i] + nbytes[i]]
        assert np.array_equal(filled[dst_offset[i] : dst_offset[i] + nbytes[i]], source)
        stream = int(digest.stream[i])
        part = digest_range(source, 4, seed=int(digest.seeds[stream]), start=int(digest.start[i]))
        totals[stream] = combine(totals[stream], part)
    assert result.digests is not None and result.digests.tolist() == totals


def test_offsets_beyond_4_gib(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "sparse.bin"
    offsets = [2**31 - 3, 2**32 - 3, 2**32 + 12_345, 5 * 2**30 - 7]
    with path.open("wb") as file:
        for i, offset in enumerate(offsets):
            file.seek(offset)
            file.write(bytes([i + 1] * 7))
    count = len(offsets)
    zero = np.zeros(count, dtype=np.int64)
    table = CopyTable(zero, np.array(offsets), zero, np.arange(count) * 8, zero + 7)
    buffer = engine.put(np.full(8 * count, UNTOUCHED, dtype=np.uint8))
    result = read_segments(table, [path], [buffer], executor=engine.name)
    assert engine.get(buffer).reshape(count, 8).tolist() == [[i + 1] * 7 + [UNTOUCHED] for i in range(count)]
    assert result.bytes_read == 7 * count
    if engine.can("scan"):
        assert scan(ranges(table), (path,), engine) == [zlib.crc32(bytes([i + 1] * 7)) for i in range(count)]


def failures(
    engine: Engine, table: CopyTable, paths: Sequence[Path], folder: Path
) -> set[tuple[type[BaseException], str]]:
    """What each operation that the engine has on files raises, for rows of up to 10 MB into one destination each."""
    found, before = set(), len(os.listdir("/proc/self/fd"))
    target = folder / "target"
    target.touch()
    for operation in filter(engine.can, ("read", "move", "scan")):
        with pytest.raises((CheckpointError, UnreadableError)) as caught:
            if operation == "read":
                buffers = [engine.put(np.zeros(10_000_000, dtype=np.uint8)) for _ in paths]
                read_segments(table, paths, buffers, executor=engine.name)
            elif operation == "move":
                move_segments(table, paths, [target] * len(paths), executor=engine.name)
            else:
                scan(ranges(table), paths, engine)
        engine.free()
        assert len(os.listdir("/proc/self/fd")) == before
        found.add((type(caught.value), str(caught.value)))
    return found


@pytest.mark.parametrize("size", [0, 5, 4096, 3_000_000, 9_999_999])
def test_a_short_file_is_named_with_the_byte_where_it_ends(engine: Engine, tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(size))
    got = failures(engine, segment(0, 0, 10_000_000), [path], tmp_path)
    assert got == {(CheckpointError, f"{path}: ends at byte {size}. The file is truncated.")}
    # A row that begins behind the end is reported where it begins.
    got = failures(engine, segment(size + 10, 0, 100), [path], tmp_path)
    assert got == {(CheckpointError, f"{path}: ends at byte {size + 10}. The file is truncated.")}


def test_of_several_bad_files_the_first_is_named(engine: Engine, tmp_path: Path) -> None:
    size = 3_000_000
    paths = tuple(tmp_path / f"{i}.bin" for i in range(6))
    for i, path in enumerate(paths):
        path.write_bytes(bytes(size if i < 2 else size - 1000 * i))
    files, zero = np.arange(len(paths)), np.zeros(len(paths), dtype=np.int64)
    with pytest.raises(CheckpointError, match=f"^{paths[2]}: ends at byte {size - 2000}. The file is truncated.$"):
        buffers = [engine.put(np.zeros(size, dtype=np.uint8)) for _ in paths]
        read_segments(CopyTable(files, zero, files, zero, zero + size), paths, buffers, executor=engine.name)
    engine.free()


def test_a_file_that_cannot_be_read_is_named_with_the_reason(engine: Engine, tmp_path: Path) -> None:
    missing, loop = tmp_path / "gone.bin", tmp_path / "loop"
    loop.symlink_to(loop)
    for nbytes in (0, 4):
        got = failures(engine, segment(0, 0, nbytes), [missing], tmp_path)
        assert got == {(MissingFileError, f"{missing}: no such file. The checkpoint is incomplete.")}
    got = failures(engine, segment(12, 0, 4), [tmp_path], tmp_path)
    assert got == {(UnreadableError, f"{tmp_path}: reading at byte 12 failed: Is a directory.")}
    got = failures(engine, segment(0, 0, 4), [loop], tmp_path)
    assert got == {(UnreadableError, f"{loop}: cannot be opened: Too many levels of symbolic links.")}


def test_names_that_are_not_utf8_are_opened(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.bin")
    path.write_bytes(b"1234")
    buffer = engine.put(np.zeros(4, dtype=np.uint8))
    read_segments(segment(0, 0, 4), [path], [buffer], executor=engine.name)
    assert engine.get(buffer).tobytes() == b"1234"


BAD_ROWS = [
    (1, 0, 0, 0, 4), (-1, 0, 0, 0, 4), (0, 0, 1, 0, 4), (0, 0, -1, 0, 4), (0, -1, 0, 0, 4), (0, 0, 0, -1, 4),
    (0, 0, 0, 0, -4), (0, 0, 0, 77, 4), (0, 2**63 - 1, 0, 0, 4), (0, 0, 0, 2**63 - 2, 4), (0, 0, 0, 0, 2**63 - 1),
]  # fmt: skip
OF_DESTINATIONS = [(0, 0, 1, 0, 4), (0, 0, -1, 0, 4), (0, 0, 0, -1, 4), (0, 0, 0, 77, 4), (0, 0, 0, 2**63 - 2, 4)]


@pytest.mark.parametrize("row", [*BAD_ROWS, (0, 97, 0, 0, 4)])
def test_a_row_out_of_bounds_is_a_bug_that_is_caught_before_anything_moves(
    engine: Engine, tmp_path: Path, row: tuple[int, ...]
) -> None:
    columns = np.array([(0, 0, 0, 0, 10), row], dtype=np.int64).T
    table = CopyTable(*(np.ascontiguousarray(column) for column in columns))
    dst = engine.put(np.full(80, UNTOUCHED, dtype=np.uint8))
    src = np.zeros(100, dtype=np.uint8)
    with pytest.raises(AssertionError, match="row 1 of a segment table"):
        copy_segments(table, [engine.put(src)], [dst], executor=engine.name)
    if row in BAD_ROWS:  # a file that is too short is an error of the checkpoint
        with pytest.raises(AssertionError, match="row 1 of a segment table"):
            read_segments(table, write_files(tmp_path, (src,)), [dst], executor=engine.name)
    if engine.can("scan") and row not in OF_DESTINATIONS:
        with pytest.raises(AssertionError, match="row 1 of a segment table"):
            sum_segments(ranges(table), [src], executor=engine.name)
    if engine.can("scan") and row in BAD_ROWS and row not in OF_DESTINATIONS:
        with pytest.raises(AssertionError, match="row 1 of a segment table"):
            scan(ranges(table), [tmp_path / "missing"], engine)
    assert (engine.get(dst) == UNTOUCHED).all()
    engine.free()


# --- writes and moves -----------------------------------------------------------------------------------------------


def test_writing_and_moving_behind_4_gib_keeps_what_is_before(engine: Engine, tmp_path: Path) -> None:
    data = np.arange(1, 10, dtype=np.uint8)
    (source,) = write_files(tmp_path, (data,))
    for move in ways(engine):
        path = tmp_path / f"sparse{move}"
        path.write_bytes(b"before")
        os.truncate(path, 5 * 2**30)
        table = segment(0, 2**32 + 3, len(data))
        if move:
            move_segments(table, [source], [path], executor=engine.name)
        else:
            write_segments(table, [engine.put(data)], [path], executor=engine.name)
        with path.open("rb") as file:
            assert file.read(6) == b"before"
            file.seek(2**32 + 3)
            assert file.read(10) == data.tobytes() + b"\0"
        assert path.stat().st_size == 5 * 2**30
    engine.free()


def ways(engine: Engine) -> tuple[bool, ...]:
    """Whether to move: writes alone, by an engine that cannot."""
    return (False, True) if engine.can("move") else (False,)


def test_long_rows_are_written_and_moved_whole(engine: Engine, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5_000_008, dtype=np.uint8)
    digest = DigestRows(np.array([5], dtype=np.uint64), *(np.array([v]) for v in (0, 1000, 8)))
    want = [digest_range(data, 8, seed=5, start=1000)]
    first, second = write_files(tmp_path, (bytes(len(data) + 20),) * 2, "dst")
    source = engine.put(data)
    got = write_segments(segment(0, 13, len(data)), [source], [first], digest=digest, executor=engine.name)
    engine.free()
    assert got is not None and got.tolist() == want
    assert first.read_bytes() == bytes(13) + data.tobytes() + bytes(7)
    if engine.can("move"):
        got = move_segments(segment(13, 5, len(data)), [first], [second], digest=digest, executor=engine.name)
        assert got is not None and got.tolist() == want
        assert second.read_bytes() == bytes(5) + data.tobytes() + bytes(15)


def test_a_write_that_fails_names_the_file_the_byte_and_the_reason(engine: Engine, tmp_path: Path) -> None:
    full = Path("/dev/full")
    (source,) = write_files(tmp_path, (bytes(8),))
    for move in ways(engine):
        with pytest.raises(OSError, match="No space left on device, writing at byte 12") as caught:
            if move:
                move_segments(segment(0, 12, 8), [source], [full], executor=engine.name)
            else:
                data = engine.put(np.zeros(8, dtype=np.uint8))
                write_segments(segment(0, 12, 8), [data], [full], executor=engine.name)
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(full)
    engine.free()


def test_files_are_never_created_by_writing(engine: Engine, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    (source,) = write_files(tmp_path, (bytes(8),))
    data = engine.put(np.zeros(8, dtype=np.uint8))
    for nbytes in (0, 8):
        with pytest.raises(FileNotFoundError) as caught:
            write_segments(segment(0, 0, nbytes), [data], [missing], executor=engine.name)
        assert caught.value.filename == str(missing) and not missing.exists()
    engine.free()
    if engine.can("move"):
        with pytest.raises(FileNotFoundError) as caught:
            move_segments(segment(0, 0, 8), [source], [missing], executor=engine.name)
        assert caught.value.filename == str(missing)


# --- scans ----------------------------------------------------------------------------------------------------------


def scan(table: Ranges, paths: Sequence[Path], scanner: Engine, threads: int | None = None) -> list[int]:
    """The checksums, which are asked for at least."""
    sums = np.full(len(table.nbytes), 1, dtype=np.uint32)
    assert scan_segments(table, paths, crc32=sums, threads=threads, executor=scanner.name) is None
    return sums.tolist()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_rows_are_summed_by_several_threads_in_any_order(scanner: Engine, tmp_path: Path, threads: int) -> None:
    """In files and in memory."""
    rng = np.random.default_rng(5)
    data = [rng.integers(0, 256, size, dtype=np.uint8) for size in (23_000_001, 9_000_003)]
    paths = write_files(tmp_path, tuple(data))
    rows = np.array(  # two that overlap, one of nothing, one of the whole file, neighbours of odd lengths
        [(0, 11_000_001, 12_000_000), (1, 0, 9_000_003), (0, 1, 20_000_000), (1, 4, 0), (0, 0, 1), (1, 5, 40_003),
         (1, 40_008, 8_000_000), (0, 22_999_999, 2)]
    )  # fmt: skip
    file, offset, nbytes = (np.ascontiguousarray(column) for column in rows.T)
    digest = DigestRows(
        seeds=np.array([3, 2**64 - 1], dtype=np.uint64),
        stream=np.array([0, 1] * 4),
        start=np.arange(8) * 1000,
        itemsize=np.array([8, 1, 4, 2, 1, 1, 8, 2]),
    )
    sums = np.zeros((2, 8), dtype=np.uint32)
    table, more = Ranges(file, offset, nbytes), {"digest": digest, "threads": threads, "executor": scanner.name}
    scanned = scan_segments(table, paths, crc32=sums[0], **more)
    summed = sum_segments(table, data, crc32=sums[1], **more)
    want = [0, 0]
    for i, (number, begin, length) in enumerate(rows.tolist()):
        part = data[number][begin : begin + length]
        assert (sums[:, i] == zlib.crc32(part.data)).all()
        stream = i % 2
        one = digest_range(part, int(digest.itemsize[i]), seed=int(digest.seeds[stream]), start=1000 * i)
        want[stream] = combine(want[stream], one)
    assert all(totals is not None and totals.tolist() == want for totals in (scanned, summed))


def test_many_tiny_rows_are_scanned(scanner: Engine, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    num_rows = 40_000
    data = rng.integers(0, 256, 200_000, dtype=np.uint8)
    offset, nbytes = rng.integers(0, 199_990, num_rows), rng.integers(0, 10, num_rows)
    # One half lies anywhere, the other one row behind the other.
    offset[: num_rows // 2] = np.cumsum(nbytes[: num_rows // 2]) - nbytes[: num_rows // 2]
    got = scan(Ranges(offset * 0, offset, nbytes), write_files(tmp_path, (data,)), scanner, threads=2)
    bounds = zip(offset.tolist(), nbytes.tolist(), strict=True)
    assert got == [zlib.crc32(data[begin : begin + length].data) for begin, length in bounds]


def test_checksums_without_a_place_for_each_row_are_a_bug_that_is_caught(scanner: Engine, tmp_path: Path) -> None:
    table, paths = ranges(segment(0, 0, 4)), write_files(tmp_path, (bytes(4),))
    for sums in (np.zeros(2, dtype=np.uint32), np.zeros(1, dtype=np.int64)):
        with pytest.raises(AssertionError):
            scan_segments(table, paths, crc32=sums, executor=scanner.name)


# --- names ----------------------------------------------------------------------------------------------------------


def test_an_unknown_executor_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no executor 'abacus'; there are: auto, cuda, native, numpy"):
        read_segments(segment(0, 0, 0), [Path("x")], [], executor="abacus")  # type: ignore[arg-type]


def test_an_executor_without_an_operation_names_those_that_have_it() -> None:
    with pytest.raises(ConfigError, match="'cuda' has no scan_segments; these have: auto, native, numpy"):
        scan_segments(ranges(segment(0, 0, 4)), (Path("x"),), executor="cuda")
    with pytest.raises(ConfigError, match="'cuda' has no move_segments; these have: auto, native, numpy"):
        move_segments(segment(0, 0, 4), [Path("x")], [Path("y")], executor="cuda")


def test_memory_that_an_executor_does_not_move_is_an_error_that_names_one_that_does() -> None:
    on_gpu = [DeviceBuffer(4096, 4)]
    with pytest.raises(ConfigError, match=r"a device address is moved by the executor 'cuda' alone"):
        read_segments(segment(0, 0, 0), [Path("x")], on_gpu, executor="numpy")
    with open_engine("fake-cuda"):
        host = [np.zeros(4, dtype=np.uint8)]
        with pytest.raises(ConfigError, match=r"'cuda' does not move memory of: host. Use auto"):
            read_segments(segment(0, 0, 0), [Path("x")], host, executor="cuda")
        two = [DeviceBuffer(4096, 4, 0), DeviceBuffer(4096, 4, 1)]
        with pytest.raises(ConfigError, match=r"for one device; these buffers are on \[0, 1\]"):
            read_segments(segment(0, 0, 0), [Path("x")], two, executor="cuda")


def test_tensors_are_moved_by_their_bytes(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32)
    paths = write_files(tmp_path, (values.numpy().tobytes(),))
    for name in ("auto", "numpy"):
        target = torch.zeros(3, 4)
        read_segments(segment(0, 0, 48), paths, [target], executor=name)  # type: ignore[arg-type]
        assert torch.equal(target, values.view(3, 4))
        other = torch.zeros(12)
        copy_segments(segment(8, 0, 40), [target], [other], executor=name)  # type: ignore[arg-type]
        assert torch.equal(other[:10], values[2:])
    with pytest.raises(ConfigError, match=r"shape \(4, 3\) is not contiguous"):
        copy_segments(segment(0, 0, 4), [target.t()], [other])


def test_auto_moves_device_memory_by_the_cuda_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dispatch._fastest.cache_clear()
    with open_engine("fake-cuda") as engine, caplog.at_level(logging.DEBUG, logger="zeroelastic.executors"):
        paths = write_files(tmp_path, (b"12345678",))
        for _ in range(2):
            buffer = engine.put(np.zeros(8, dtype=np.uint8))
            read_segments(segment(0, 0, 8), paths, [buffer])
            assert engine.get(buffer).tobytes() == b"12345678"
        engine.free()
    dispatch._fastest.cache_clear()
    assert len(caplog.records) == 1 and "moved by the cuda engine" in caplog.text


def forget_what_is_built() -> None:
    _load.cache_clear()
    cuda_executor._library.cache_clear()
    dispatch._fastest.cache_clear()


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The package as it is where no compiler was found."""
    (tmp_path / "_native.log").write_text("there was no C++ compiler\n")
    monkeypatch.setattr("zeroelastic.executors.build_info._PACKAGE", tmp_path)
    monkeypatch.setattr("zeroelastic.executors.build_info._load", _load)
    forget_what_is_built()
    yield tmp_path
    forget_what_is_built()


def test_a_named_executor_that_is_not_built_says_how_to_build_it(nothing_built: Path) -> None:
    with pytest.raises(ConfigError, match=r"there was no C\+\+ compiler.*ZEROELASTIC_BUILD_NATIVE=1 pip install"):
        read_segments(segment(0, 0, 0), [Path("x")], [], executor="native")
    with pytest.raises(ConfigError, match=r"it was not built.*zeroelastic doctor --build-cuda"):
        read_segments(segment(0, 0, 0), [Path("x")], [DeviceBuffer(4096, 4)], executor="cuda")
    with pytest.raises(ConfigError, match=r"it was not built.*zeroelastic doctor --build-cuda"):
        read_segments(segment(0, 0, 0), [Path("x")], [DeviceBuffer(4096, 4)])


def test_auto_falls_back_to_numpy_and_says_so_once(
    nothing_built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"abcd")
    for _ in range(2):
        buffer = np.zeros(4, dtype=np.uint8)
        read_segments(segment(0, 0, 4), [path], [buffer])
        assert buffer.tobytes() == b"abcd"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "numpy" in caplog.text and "there was no C++ compiler" in caplog.text


def test_auto_takes_the_native_engine_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    if not describe_build("native").usable:
        pytest.skip("the native engine is not built")
    dispatch._fastest.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="zeroelastic.executors"):
        assert dispatch.choose_executor("auto") == "native"
        assert dispatch.choose_executor("auto") == "native"
    assert len(caplog.records) == 1 and "native engine" in caplog.text


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
