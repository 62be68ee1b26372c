"""The directory of an archive in columns: the same as zipfile reads, whatever the names and lengths of its entries."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.torch_file.header import Storage, read_torch_file
from zeroelastic.torch_file.zip_directory import ENTRY, ZipDirectory, read_directory

NAMES = st.one_of(
    st.integers(0, 2000).map(lambda number: f"f/data/{number}"),
    st.sampled_from(["f/data.pkl", "f/data/007", "f/data/-1", "f/data/1a", "g/data/5", "plain", "f/data/", "f/data/²"]),
    st.text(min_size=1, max_size=30).map(lambda name: f"f/{name}"),
)


def directory_of(data: bytes) -> ZipDirectory:
    return read_directory(lambda offset, nbytes: data[offset : offset + nbytes], len(data))


def plain_info(number: int) -> zipfile.ZipInfo:
    """The record of a storage, whose writer's system is the one that torch states."""
    info = zipfile.ZipInfo(f"f/data/{number}")
    info.create_system = 0
    return info


def archive_of(names: list[str], *, comment: bytes = b"", compressed: int = -1) -> bytes:
    """An archive with one record for each name; one of them with a comment, and compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for i, name in enumerate(names):
            info = zipfile.ZipInfo(name)
            info.create_system = 0  # as torch writes it
            info.comment = comment if i == compressed else b""
            info.compress_type = zipfile.ZIP_DEFLATED if i == compressed else zipfile.ZIP_STORED
            out.writestr(info, b"x" * (i % 7))
    return file.getvalue()


@given(st.lists(NAMES, max_size=60, unique=True), st.integers(-1, 60), st.binary(max_size=9))
@settings(max_examples=80, deadline=None)
def test_entries_are_those_that_zipfile_finds(names: list[str], odd: int, comment: bytes) -> None:
    names = [name for name in names if "\0" not in name and "\\" not in name and not name.endswith("/")]
    data = archive_of(names, comment=comment, compressed=odd)
    directory = directory_of(data)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        infos = sorted(file.infolist(), key=lambda info: info.header_offset)
    found = sorted(directory, key=lambda entry: entry.at)
    want = [(i.filename, i.header_offset, i.compress_size, i.file_size, i.CRC, i.flag_bits) for i in infos]
    assert [(e.text, e.header, e.stored_bytes, e.nbytes, e.crc32, e.flags) for e in found] == want
    short = [name.partition("/")[2] or name for name in names]
    assert (directory.twice is not None) == (len({*short}) < len(short))
    if directory.twice is None:
        assert [directory.find(name) for name in short] == found
        assert directory.find("data/2001") is None and directory.find("data/1.5") is None
        assert sorted(directory.storages()) == sorted(name[5:] for name in short if name.startswith("data/"))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 18, 40, 1003])
def test_runs_of_entries_of_one_length(count: int) -> None:
    names = [f"f/data/{number}" for number in range(count)] + ["f/last"]
    assert [entry.text for entry in directory_of(archive_of(names))] == names


@pytest.mark.parametrize("row", [0, 3, 20, 99])
def test_a_directory_that_is_damaged_in_a_run_is_refused_or_has_a_fault(row: int) -> None:
    """As without columns: one entry says something else than it did."""
    data = archive_of([f"f/data/{number:04}" for number in range(100)])
    sound = directory_of(data)
    begin = sound[row].at
    for offset in range(ENTRY.size):
        bent = bytearray(data)
        bent[begin + offset] ^= 0x40
        try:
            found = directory_of(bytes(bent))
        except ValueError as error:
            assert "directory cannot be read" in str(error)
            continue
        assert found.faults or [*found] != [*sound]


def test_a_header_behind_4_gib_is_a_column(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(plain_info(0), b"abc")
        assert file.fp is not None
        file.fp.seek(1 << 32)
        file.start_dir = 1 << 32
        for number in range(1, 30):
            file.writestr(plain_info(number), b"x" * number)
    with open(path, "rb") as data:

        def read(offset: int, nbytes: int) -> bytes:
            data.seek(offset)
            return data.read(nbytes)

        directory = read_directory(read, path.stat().st_size)
    assert directory.header[-1] > 1 << 32 and not directory.faults
    assert len(directory.number) == 30 and directory.nbytes.tolist() == [3, *range(1, 30)]


@pytest.mark.parametrize("sparse", [False, True])
def test_payload_is_found_for_many_storages_as_for_one(tmp_path: Path, sparse: bool) -> None:
    path = tmp_path / "f.pt"
    torch.save([torch.zeros(i % 3 if not sparse else 2000) for i in range(300)], path)
    data = bytearray(path.read_bytes())
    data[data.index(b"f/data/7") - 30] ^= 1  # the mark of the record's own header
    path.write_bytes(data)
    file = read_torch_file(path)
    root: Any = file.root
    numbers = np.array([5, 3, 299, 7, 5, 0, 300], dtype=np.int64)
    numels = [ref.numel for ref in root] + [0]
    nbytes = np.array([4 * numels[number] for number in numbers.tolist()], dtype=np.int64)

    def read(offset: int, nbytes: int) -> bytes:
        return bytes(data[offset : offset + nbytes])

    found = file._records.payload_offsets(numbers, nbytes, read, file.size).tolist()
    want = [
        file.storage_extent(Storage(str(number), "float32", numels[number])).offset if number not in (7, 300) else -1
        for number in numbers.tolist()
    ]
    assert found == want
    assert (file._records.payload_offsets(numbers, nbytes + 4, read, file.size) == -1).all()
