"""The structure of an archive is read by few operations on the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from zeroelastic.torch_file.integrity import check_archive
from zeroelastic.torch_file.zip_reader import read_zip_records


@pytest.mark.parametrize("window_bytes", [512, 64 << 10])
def test_an_archive_of_many_records_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    """Each opening is a request to the server of metadata where the file is on a network."""
    path = tmp_path / "f.pt"
    torch.save([torch.full((1000,), float(i)) for i in range(50)], path)
    opened: list[str] = []
    opening = os.open
    monkeypatch.setattr(os, "open", lambda file, *rest, **more: opened.append(file) or opening(file, *rest, **more))
    archive = read_zip_records(path, path.stat().st_size, window_bytes=window_bytes)
    assert len(archive.records) > 50 and not archive.faults and opened == [path]


def test_the_file_is_closed_when_it_has_been_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"x": torch.zeros(3)}, path)
    before = len(os.listdir("/proc/self/fd"))
    check_archive(path, path.stat().st_size)
    with pytest.raises(Exception, match="does not end as"):
        read_zip_records(path, path.stat().st_size - 7)
    assert len(os.listdir("/proc/self/fd")) == before
