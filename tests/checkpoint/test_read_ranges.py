"""Ranges that ranks have read of an archive, in any pieces, against the checksums that it states."""

from __future__ import annotations

import pickle
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.errors import CheckpointError
from zeroelastic.torch_file.zip_check import ZipRecord, ZipRecords, read_zip_records
from zeroelastic.verbs.reading import ReadFiles, ReadRanges, faults_of_archive, faults_of_file

NUMEL = (1, 40, 3000, 100_000)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("archive") / "tensors.pt"
    torch.save([torch.arange(numel, dtype=torch.int64) * 7919 for numel in NUMEL], made)
    return made


def records_of(path: Path) -> tuple[ZipRecords, list[ZipRecord]]:
    """All records, and those of the tensors."""
    records = read_zip_records(path, path.stat().st_size)
    return records, [record for record in records if "/data/" in record.name]


def ranges(data: bytes, *places: tuple[int, int]) -> ReadRanges:
    """Ranges (begin, end) of a file, as they are in it."""
    columns = [(begin, end - begin, zlib.crc32(data[begin:end])) for begin, end in places]
    offset, nbytes, crc32 = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    return ReadRanges.joined([ReadRanges(offset, nbytes, crc32.astype(np.uint32))])


@settings(max_examples=100)
@given(data=st.data())
def test_pieces_of_any_ranks_are_put_together(path: Path, data: st.DataObject) -> None:
    """Cut anywhere, read by one rank or by several, sent through bytes; one that is damaged contradicts its record."""
    content = path.read_bytes()
    records, tensors = records_of(path)
    parts: list[ReadRanges] = []
    chosen = data.draw(st.lists(st.sampled_from(tensors), unique=True, min_size=1))
    damaged = data.draw(st.none() | st.sampled_from(chosen))
    if damaged is not None:
        at = damaged.offset + data.draw(st.integers(0, damaged.nbytes - 1))
        content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    for record in chosen:
        cuts = data.draw(st.lists(st.integers(0, record.nbytes), max_size=6))
        bounds = sorted({0, record.nbytes, *cuts})
        pieces = [(record.offset + a, record.offset + b) for a, b in pairwise(bounds)]
        copies = data.draw(st.integers(1, 2))
        for piece in data.draw(st.permutations(pieces * copies)):
            parts.append(ranges(content, piece))
    ranks = data.draw(st.integers(1, 3))
    sent = [pickle.dumps(ReadRanges.joined(parts[rank::ranks])) for rank in range(min(ranks, len(parts)))]
    arrived = [pickle.loads(each) for each in sent]
    joined = ReadRanges.joined(arrived)
    num_ranges, faults = faults_of_archive(path, records, 0, joined)
    assert num_ranges == len(joined.offset)
    assert len(faults) == (damaged is not None)
    if damaged is not None:
        assert f"record {damaged.name.partition('/')[2]}, bytes {damaged.offset} to " in faults[0]


def test_what_was_read_twice_counts_once() -> None:
    data = bytes(range(200))
    read = ranges(data, (20, 35), (10, 20), (50, 60), (10, 20))
    assert [*zip(read.offset.tolist(), read.nbytes.tolist(), strict=True)] == [(10, 10), (20, 15), (50, 10)]
    assert read.crc32.tolist() == [zlib.crc32(data[a:b]) for a, b in [(10, 20), (20, 35), (50, 60)]]
    files = ReadFiles()
    for offset in (0, 4):
        files.add(
            (Path("a"), Path("b")),
            np.array([0, 1], dtype=np.int64),
            np.array([offset, 7], dtype=np.int64),
            np.array([4, 0], dtype=np.int64),
            np.array([offset + 1, 0], dtype=np.uint32),
        )
    assert {path.name: [column.tolist() for column in read] for path, read in files.items()} == {
        "a": [[0, 4], [4, 4], [1, 5]]
    }


def is_compared(path: Path, records: ZipRecords, record: ZipRecord, *places: tuple[int, int], at: int = 0) -> bool:
    """Whether damage in one of some ranges of a record is noticed; without it there is no fault."""
    content = path.read_bytes()
    assert faults_of_archive(path, records, at, ranges(content, *places)) == (len(places), [])
    begin = places[0][0]
    damaged = content[:begin] + bytes([content[begin] ^ 1]) + content[begin + 1 :]
    num_ranges, faults = faults_of_archive(path, records, at, ranges(damaged, *places))
    assert num_ranges == len(places) and all(record.name.partition("/")[2] in fault for fault in faults)
    return len(faults) == 1


def test_gaps_are_read_where_they_are_little(path: Path) -> None:
    records, tensors = records_of(path)
    large = tensors[-1]
    begin, end = large.offset, large.offset + large.nbytes
    assert is_compared(path, records, large, (begin + 100, begin + 5000), (begin + 6000, end - 1))
    most = large.nbytes // 8
    assert is_compared(path, records, large, (begin + most, end))
    assert not is_compared(path, records, large, (begin + most + 1, end))


def test_bytes_of_no_record_are_an_error(path: Path) -> None:
    """So a file that is looked up under a wrong name, or replaced meanwhile, is never passed over."""
    content = path.read_bytes()
    records, tensors = records_of(path)
    inside = (tensors[-1].offset, tensors[-1].offset + tensors[-1].nbytes)
    assert faults_of_file(path, [(0, records)], ranges(content, inside)) == []
    with pytest.raises(CheckpointError, match="1 of 2 ranges that were read are in no record of the file"):
        faults_of_file(path, [(0, records)], ranges(content, inside, (len(content) - 9, len(content))))
    with pytest.raises(CheckpointError, match="1 of 1 ranges"):
        faults_of_file(path, [], ranges(content, inside))


def test_ranges_that_overlap_are_used_where_they_fit(path: Path) -> None:
    records, tensors = records_of(path)
    begin, end = tensors[-1].offset, tensors[-1].offset + tensors[-1].nbytes
    for places in (
        [(begin, end), (begin, begin + 9000)],
        [(begin, begin + 400_000), (begin + 100_000, begin + 200_000), (begin + 400_000, end)],
        [(begin, begin + 740_000), (begin + 700_000, end)],
    ):
        assert is_compared(path, records, tensors[-1], *places)


def test_bytes_that_are_others_the_second_time_are_named(path: Path) -> None:
    content = path.read_bytes()
    records, tensors = records_of(path)
    begin, end = tensors[2].offset, tensors[2].offset + tensors[2].nbytes
    other = content[:begin] + b"!" + content[begin + 1 :]
    read = ReadRanges.joined([ranges(content, (begin, end)), ranges(other, (begin, end))])
    _, faults = faults_of_archive(path, records, 0, read)
    assert f"{path}: bytes at {begin} were not the same the second time that they were read." in faults


def test_an_archive_inside_a_file_and_one_without_checksums(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    records, tensors = records_of(path)
    (tmp_path / "row").write_bytes(b"before" * 50 + content)
    begin, end = (tensors[1].offset + 300, tensors[1].offset + tensors[1].nbytes + 300)
    assert is_compared(tmp_path / "row", records, tensors[1], (begin, end - 8), at=300)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save([torch.ones(3000)], tmp_path / "plain.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    records, (tensor,) = records_of(tmp_path / "plain.pt")
    assert not is_compared(tmp_path / "plain.pt", records, tensor, (tensor.offset, tensor.offset + tensor.nbytes))
