"""elastic.memory.memory_file: sizes, pages that are used again, and no byte more than the system has to spare."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zeroelastic.elastic.memory import memory_file
from zeroelastic.elastic.memory.memory_file import MemoryFile, require_memory, spare_memory


def test_the_file_has_the_size_that_was_asked_for_and_its_bytes(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "file")
    for size in (100_000, 99_000, 100_500, 400_000, 10, 400_000):
        data = file.take(size)
        data.fill_(7)
        assert len(data) == size == (tmp_path / "file").stat().st_size
        assert (tmp_path / "file").read_bytes() == b"\7" * size


def test_its_pages_are_used_again(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "file")
    first = file.take(1 << 20).data_ptr()
    number = os.stat(tmp_path / "file").st_ino
    assert file.take((1 << 20) - 50).data_ptr() == first
    assert file.take(1 << 20).data_ptr() == first and os.stat(tmp_path / "file").st_ino == number


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "file")
    before = file.take(100_000)
    (tmp_path / "file").unlink()
    after = file.take(90_000)
    after.fill_(7)
    before.fill_(8)
    assert (tmp_path / "file").read_bytes() == b"\7" * 90_000


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def large_pages_of(data: torch.Tensor) -> int:
    """The bytes of large pages (PMD-mapped) in the mapping that ``data`` begins in, by proc_pid_smaps(5)."""
    of_this = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            begin, end = (int(number, 16) for number in first.split("-"))
            of_this = begin <= data.data_ptr() < end
        elif of_this and first == "ShmemPmdMapped:":
            return int(rest.split()[0]) << 10
    return 0


def test_pages_are_large_where_a_whole_one_fits_and_where_it_grows(shared_memory: Path) -> None:
    file = MemoryFile(shared_memory / "file")
    data = file.take((9 << 20) + 5)
    data.fill_(1)
    if large_pages_of(data) == 0:
        pytest.skip("this system makes no pages of 2 MiB of shared memory")
    assert large_pages_of(data) == 8 << 20
    taken = 512 * (shared_memory / "file").stat().st_blocks
    assert taken < (9 << 20) + (1 << 20), "a large page takes no memory that a file does not need"
    data = file.take(21 << 20)
    data.fill_(2)
    assert (shared_memory / "file").read_bytes() == b"\2" * (21 << 20)
    assert large_pages_of(data) >= 18 << 20


def test_nothing_is_lost_where_the_system_has_no_large_pages(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_file, "_MADV_COLLAPSE", 1 << 20)  # no advice that any system knows
    file = MemoryFile(shared_memory / "file")
    file.take(5 << 20).fill_(3)
    assert (shared_memory / "file").read_bytes() == b"\3" * (5 << 20)


def test_what_the_system_cannot_spare_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MemoryFile(tmp_path / "file")
    file.take(1000)
    monkeypatch.setattr(memory_file, "_available", lambda: [300 << 20])
    with pytest.raises(OSError, match="more of shared memory") as caught:
        file.take(100 << 20)
    assert caught.value.filename is not None and (tmp_path / "file").stat().st_size == 1000
    assert len(file.take(1000)) == 1000


def test_a_file_system_that_is_full_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise OSError(28, "No space left on device")

    file = MemoryFile(tmp_path / "file")
    file.take(1000)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        file.take(1 << 20)
    assert (tmp_path / "file").stat().st_size == 1000


def test_a_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{900 << 20}\n")
    assert memory_file._left_in_group(tmp_path) == [124 << 20]
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_file._left_in_group(tmp_path) == []
    assert memory_file._left_in_group(tmp_path / "none") == []
    monkeypatch.setattr(memory_file, "_left_in_group", lambda: [124 << 20])
    assert spare_memory(tmp_path) == (124 << 20) - (256 << 20)
    with pytest.raises(OSError, match="0 B are to spare"):
        require_memory(tmp_path, 1)
