"""Archives laid out without their payload: what torch and zip tools make of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from zeroelastic.torch_file import graph_writer
from zeroelastic.torch_file.graph_writer import Archive
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.pickle_graph import new_storage, tensor


def test_zip_tools_find_nothing_wrong_and_an_unfinished_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    storages = [new_storage("uint8", n) for n in (0, 1, 63, 64, 65, 1000)]
    made = Archive(path, [tensor(s, 0, (s.numel,)) for s in storages])
    assert not zipfile.is_zipfile(path) and path.stat().st_size == made.nbytes
    data = {s: os.urandom(s.nbytes) for s in storages}
    with open(path, "r+b") as file:
        for storage, payload in data.items():
            file.seek(made.offsets[storage])
            file.write(payload)
    made.finish({s: zlib.crc32(payload) for s, payload in data.items()}, sync=True)
    with zipfile.ZipFile(path) as read:
        assert read.testzip() is None
        assert {name.partition("/")[0] for name in read.namelist()} == {"weights"}
    assert [bytes(t.numpy()) for t in torch.load(path)] == list(data.values())
    refs = read_torch_file(path).root
    assert [r.shape for r in refs] == [(s.numel,) for s in storages]


def test_files_beyond_4_gib_are_archives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse: the space is not really taken."""
    monkeypatch.setattr(graph_writer, "reserve_space", lambda fd, nbytes: None)
    path = tmp_path / "x.pt"
    small, large, last = new_storage("uint8", 5), new_storage("float32", (1 << 30) + 7), new_storage("uint8", 3)
    made = Archive(path, {n: tensor(s, 0, (s.numel,)) for n, s in (("s", small), ("l", large), ("e", last))})
    with open(path, "r+b") as file:
        for storage, payload in ((small, b"abcde"), (last, b"xyz")):
            file.seek(made.offsets[storage])
            file.write(payload)
        file.seek(made.offsets[large] + large.nbytes - 4)
        file.write(b"\x00\x00\x80\x3f")
    made.finish({small: zlib.crc32(b"abcde"), last: zlib.crc32(b"xyz"), large: 0})
    now = torch.load(path, mmap=True)
    assert bytes(now["s"].numpy()) == b"abcde" and bytes(now["e"].numpy()) == b"xyz"
    assert now["l"].numel() == large.numel and now["l"][-1].item() == 1.0
    with zipfile.ZipFile(path) as read:
        assert read.read("x/data/2") == b"xyz"
    assert read_torch_file(path).root["l"].shape == (large.numel,)


@pytest.mark.extended
def test_archives_of_more_than_65535_records(tmp_path: Path) -> None:
    storages = [new_storage("uint8", 0) for _ in range(66_000)]
    made = Archive(tmp_path / "x.pt", [tensor(s, 0, (0,)) for s in storages])
    made.finish({})
    assert len(torch.load(tmp_path / "x.pt")) == 66_000
    assert len(read_torch_file(tmp_path / "x.pt").root) == 66_000


def test_a_full_disk_is_noticed_before_anything_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(graph_writer, "reserve_space", full)
    with pytest.raises(OSError, match=r"x\.pt") as error:
        Archive(tmp_path / "x.pt", {})
    assert error.value.errno == errno.ENOSPC


def test_it_needs_no_torch() -> None:
    code = "import sys; from zeroelastic.torch_file import pickle_graph, graph_writer; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
