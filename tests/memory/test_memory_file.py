"""zeroelastic.memory.memory_file: sizes, pages that are used again, and no byte more than the system has to spare."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroelastic.memory import memory_file
from zeroelastic.memory.memory_file import MemoryFile, require_memory, spare_memory


def test_the_file_has_the_size_that_was_asked_for_and_its_bytes(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "file")
    for size in (100_000, 99_000, 100_500, 400_000, 10, 400_000):
        data = file.take(size)
        data.fill_(7)
        assert len(data) == size == (tmp_path / "file").stat().st_size
        assert (tmp_path / "file").read_bytes() == b"\7" * size
    assert 400_000 <= file.nbytes < 500_000


def test_its_pages_are_used_again(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "file")
    first = file.take(1 << 20).data_ptr()
    number = os.stat(tmp_path / "file").st_ino
    assert file.take((1 << 20) - 50).data_ptr() == first
    assert file.take(1 << 20).data_ptr() == first and os.stat(tmp_path / "file").st_ino == number


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
