"""An image of a file is the file that torch saves, with the digests that the writer makes, whatever happens later."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_files import executor, sample, saved_by_torch

from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.dispatch import Executor
from zeroelastic.torch_file import image as file_image
from zeroelastic.torch_file.image import FileImage, host_memory, write_past_cache
from zeroelastic.torch_file.save import DigestRange, TorchSaveSkeleton, write_skeleton, write_torch_file

__all__ = ["executor"]

BLOCK = 4096


def image_of(obj: object, path: Path, *, room: int = 0, **kwargs: Any) -> FileImage:
    laid = write_skeleton(obj, path)
    return FileImage(laid, host_memory(laid.nbytes + room), **kwargs)


@pytest.mark.parametrize("room", [0, 1, 100_000])
def test_an_image_is_written_as_the_file_that_torch_saves(tmp_path: Path, executor: Executor, room: int) -> None:
    """The moment is the one when it was made: what the tensors hold later is not written."""
    obj = sample()
    want = saved_by_torch(obj, tmp_path)
    image = image_of(obj, tmp_path / "x.pt", room=room)
    for value in obj.values():
        if isinstance(value, torch.Tensor):
            value.detach().zero_()
    image.complete(executor=executor)
    image.write()
    assert (tmp_path / "x.pt").read_bytes() == want


@pytest.mark.parametrize("obj", [{}, torch.empty(0), torch.ones(1), {"a": torch.ones(3), "b": torch.empty(0)}])
def test_small_things_too(tmp_path: Path, executor: Executor, obj: object) -> None:
    want = saved_by_torch(obj, tmp_path)
    image = image_of(obj, tmp_path / "x.pt")
    assert image.complete(executor=executor) == []
    image.write(sync=True)
    assert (tmp_path / "x.pt").read_bytes() == want


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_digests_are_those_that_the_writer_makes(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Of runs anywhere, also such that overlap, lie in no storage of the file or have nothing in them."""
    folder = tmp_path_factory.mktemp("image")
    flats = [torch.randn(data.draw(st.integers(1, 300))) for _ in range(3)]
    runs = []
    for _ in range(data.draw(st.integers(0, 6))):
        flat = flats[data.draw(st.integers(0, 2))]
        begin = data.draw(st.integers(0, len(flat)))
        end = data.draw(st.integers(begin, len(flat)))
        runs.append(DigestRange(flat[begin:end], data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(0, 1000))))
    obj = {"a": flats[0], "b": [flats[1][5:], flats[1]]}
    want = write_torch_file(obj, folder / "x.pt", digest_ranges=runs)
    written = (folder / "x.pt").read_bytes()
    image = image_of(obj, folder / "x.pt", digest_ranges=runs)
    assert image.complete() == want
    image.write()
    assert (folder / "x.pt").read_bytes() == written


def test_the_last_tensor_is_taken_after_the_digests_are_known(tmp_path: Path, executor: Executor) -> None:
    flat, table = torch.randn(10_000), torch.zeros(3, dtype=torch.int64)
    runs = [DigestRange(flat[:5000], 1, 0), DigestRange(table, 2, 0)]
    image = image_of({"flat": flat, "table": table}, tmp_path / "x.pt", digest_ranges=runs, last=[table])
    seen: list[Sequence[int | None]] = []

    def fill(digests: Sequence[int | None]) -> None:
        seen.append(list(digests))
        table.copy_(torch.tensor([7, 8, 9]))

    digests = image.complete(before_last=fill, executor=executor)
    assert seen == [[digests[0], None]] and digests[1] is not None
    image.write()
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded["table"].tolist() == [7, 8, 9] and torch.equal(loaded["flat"], flat)
    assert (tmp_path / "x.pt").read_bytes() == saved_by_torch({"flat": flat, "table": table}, tmp_path)
    assert write_torch_file({"flat": flat, "table": table}, tmp_path / "y.pt", digest_ranges=runs) == digests


def test_a_view_is_of_the_copy(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    image = image_of({"base": base, "other": torch.ones(5)}, tmp_path / "x.pt")
    view = image.view(base[1:, ::2])
    assert view is not None and torch.equal(view, base[1:, ::2]) and view.stride() == base[1:, ::2].stride()
    base.zero_()
    assert view[0, 1] == 8
    assert image.view(torch.ones(3)) is None


def test_nothing_of_what_was_saved_is_kept_alive(tmp_path: Path) -> None:
    import weakref

    flat = torch.ones(1000)
    alive = weakref.ref(flat)
    image = image_of([flat], tmp_path / "x.pt", digest_ranges=[DigestRange(flat, 1, 0)])
    del flat
    assert alive() is None
    (digest,) = image.complete()
    assert digest is not None


class Device:
    """Stands in for ``os``: what is written past the page cache, and what that comes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, opens: int = 0, writes: Sequence[int] = ()) -> None:
        self.opens, self.writes, self.direct = opens, list(writes), list[tuple[int, int]]()
        self._fds: set[int] = set()
        self._open, self._pwrite = os.open, os.pwrite
        monkeypatch.setattr(file_image.os, "open", self.open)
        monkeypatch.setattr(file_image.os, "pwrite", self.pwrite)
        self._close = os.close
        monkeypatch.setattr(file_image.os, "close", self.close)

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_DIRECT:
            return self._open(path, flags, *args, **kwargs)
        if self.opens:
            raise OSError(self.opens, os.strerror(self.opens), path)
        fd = self._open(path, flags & ~os.O_DIRECT)
        self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._fds.discard(fd)  # its number may come again
        self._close(fd)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd not in self._fds:
            return self._pwrite(fd, data, offset)
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        assert address % BLOCK == offset % BLOCK == len(data) % BLOCK == 0, "the kernel would refuse this"
        self.direct.append((offset, len(data)))
        most = self.writes.pop(0) if self.writes else len(data)
        if most < 0:
            raise OSError(-most, os.strerror(-most))
        return self._pwrite(fd, data[:most], offset)


def filled(size: int) -> np.ndarray:
    memory = host_memory(size).numpy()
    memory[:] = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return memory


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 17, 3 * (1 << 20) + 5])
def test_all_but_the_last_bytes_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(file_image, "_CALL_BYTES", 1 << 20)
    data = filled(size)
    (tmp_path / "x").write_bytes(b"older" * 10)
    write_past_cache(str(tmp_path / "x"), data, sync=True)
    assert (tmp_path / "x").read_bytes()[:size] == data.tobytes()
    assert sum(nbytes for _, nbytes in device.direct) == size // BLOCK * BLOCK


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("writes", [None, [], [BLOCK], [BLOCK * 256, 3 * BLOCK]])
def test_a_file_system_that_knows_no_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[int] | None, code: int
) -> None:
    """When it says so: as the file is opened, at the first write or at a later one."""
    Device(monkeypatch, opens=code) if writes is None else Device(monkeypatch, writes=[*writes, -code])
    monkeypatch.setattr(file_image, "_CALL_BYTES", 1 << 20)
    data = filled((5 << 20) + 100)
    (tmp_path / "x").touch()
    write_past_cache(str(tmp_path / "x"), data, sync=False)
    assert (tmp_path / "x").read_bytes() == data.tobytes()


@pytest.mark.parametrize("short", [0, 100, BLOCK + 1])
def test_a_write_that_stops_inside_a_block_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    device = Device(monkeypatch, writes=[2 * BLOCK, short])
    data = filled(20 * BLOCK)
    (tmp_path / "x").touch()
    write_past_cache(str(tmp_path / "x"), data, sync=False)
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert len(device.direct) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_the_device_says_is_raised_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    image = image_of(torch.ones(100_000), tmp_path / "x.pt")
    image.complete()
    before = len(os.listdir("/proc/self/fd"))
    Device(monkeypatch, writes=[BLOCK, -code])
    with pytest.raises(OSError, match=r"x\.pt") as caught:
        image.write()
    assert caught.value.errno == code
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_an_error_before_the_payload_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_of(torch.ones(1 << 20), tmp_path / "x.pt")
    image.complete()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(file_image, "reserve", full)
    with pytest.raises(OSError, match=r"No space left on device.*x\.pt"):
        image.write()
    assert os.stat(tmp_path / "x.pt").st_blocks * 512 < 1 << 20


def test_it_is_flushed_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents: list[bytes] = []
    flushed = os.fsync
    seen = lambda fd: (flushed(fd), contents.append((tmp_path / "x.pt").read_bytes()))  # noqa: E731
    monkeypatch.setattr(file_image.os, "fsync", seen)
    obj = sample()
    image = image_of(obj, tmp_path / "x.pt")
    image.complete()
    image.write(sync=True)
    assert contents == [saved_by_torch(obj, tmp_path)]


def test_a_file_that_is_no_longer_as_it_was_laid_out_is_named(tmp_path: Path) -> None:
    image = image_of(torch.ones(1000), tmp_path / "short.pt")
    os.truncate(tmp_path / "short.pt", 10)
    with pytest.raises(OSError, match=r"short\.pt"):
        image.complete()
    image = image_of(torch.ones(1000), tmp_path / "other.pt")
    (tmp_path / "other.pt").write_bytes(bytes(os.stat(tmp_path / "other.pt").st_size))
    with pytest.raises(UnsupportedError, match=r"other\.pt.*no descriptor follows"):
        image.complete()


def test_memory_begins_at_a_page_and_has_room(tmp_path: Path) -> None:
    for nbytes in (0, 1, BLOCK, 10_000_001):
        memory = host_memory(nbytes)
        assert memory.numel() == nbytes and memory.dtype == torch.uint8 and memory.data_ptr() % BLOCK == 0
    laid = write_skeleton(torch.ones(1000), tmp_path / "x.pt")
    assert isinstance(laid, TorchSaveSkeleton)
    with pytest.raises(AssertionError):
        FileImage(laid, host_memory(laid.nbytes - 1))
    with pytest.raises(AssertionError):
        FileImage(laid, host_memory(laid.nbytes + 8)[8:])


def test_the_real_device_takes_it(tmp_path: Path) -> None:
    """Without anything in between; where the file system knows no direct writes, the ordinary ones."""
    weights = torch.randn(5_000_003)
    image = image_of(weights, tmp_path / "archive")
    image.complete()
    image.write(sync=True)
    assert torch.equal(torch.load(tmp_path / "archive"), weights)
