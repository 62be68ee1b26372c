"""The structure of an archive is read by few operations on the file."""

from __future__ import annotations

import os
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zeroelastic.errors import CheckpointError
from zeroelastic.torch_file import zip_check
from zeroelastic.torch_file.zip_check import check_archive, read_zip_records


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
    assert len(archive) > 50 and not archive.faults and opened == [path]


def test_the_file_is_closed_when_it_has_been_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"x": torch.zeros(3)}, path)
    before = len(os.listdir("/proc/self/fd"))
    check_archive(path, path.stat().st_size)
    with pytest.raises(Exception, match="does not end as"):
        read_zip_records(path, path.stat().st_size - 7)
    assert len(os.listdir("/proc/self/fd")) == before


def archives(folder: Path) -> dict[str, bytes]:
    """Archives as different writers make them, sound and damaged."""
    made: dict[str, bytes] = {}
    path = folder / "f.pt"
    tensors = {f"t{i}": torch.full((i % 70,), float(i)) for i in range(300)}
    torch.save(tensors, path)
    made["torch"] = sound = path.read_bytes()
    torch.save([torch.zeros(3 << 18), torch.ones(5)], path)
    made["torch, far apart"] = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(40):
            archive.writestr(f"f/data/{i}", b"x" * i)
    made["another writer"] = path.read_bytes()
    for at, seed in product((300, len(sound) // 2, len(sound) // 3, len(sound) - 9000), range(4)):
        damaged = bytearray(sound)
        damaged[at + 7 * seed] ^= 1 << seed
        made[f"bit {seed} of byte {at + 7 * seed}"] = bytes(damaged)
    made["bytes before the first record"] = b"?" * 64 + sound
    return made


@pytest.mark.parametrize("window_bytes", [1, 512, 64 << 10])
def test_what_is_usual_is_found_in_columns_as_it_is_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    """Places, faults and errors; of a sound archive no record is looked at by itself."""
    one_by_one = 0
    payload = zip_check._payload

    def counting(*arguments: Any) -> Any:
        nonlocal one_by_one
        one_by_one += 1
        return payload(*arguments)

    def found(content: bytes) -> object:
        path = tmp_path / "g.pt"
        path.write_bytes(content)
        try:
            archive = read_zip_records(path, len(content), window_bytes=window_bytes)
        except CheckpointError as error:
            return str(error)
        return list(archive), archive.faults, archive.directory.folder

    monkeypatch.setattr(zip_check, "_payload", counting)
    for name, content in archives(tmp_path).items():
        in_columns = found(content)
        if name.startswith("torch"):
            assert isinstance(in_columns, tuple) and not in_columns[1] and one_by_one == 0
        with monkeypatch.context() as patch:
            patch.setattr(
                zip_check, "_usual_payloads", lambda window, directory, rows, following: np.full(len(rows), -1)
            )
            assert found(content) == in_columns, name
        one_by_one = 0
