"""Host memory is pinned to the page, for as long as it is there, and never by torch's own allocator."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from zeroelastic.deepspeed.save.shard_writer import HostMemory
from zeroelastic.elastic.memory.memory_file import MemoryFile
from zeroelastic.torch_file import image as module
from zeroelastic.torch_file.image import FileImage, host_memory, pinned_bytes
from zeroelastic.torch_file.save import TorchSaveSkeleton, write_skeleton

PAGE = mmap.PAGESIZE


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Driver:
    """Stands in for ``torch.cuda.cudart()``: which ranges are registered, and every call."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("register")
        assert address % PAGE == nbytes % PAGE == 0 and nbytes > 0 and flags == 1
        assert all(address + nbytes <= at or at + size <= address for at, size in self.ranges.items()), "twice"
        if self.refuses:
            return 2
        self.ranges[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.ranges.pop(address))  # the memory is still there
        self.calls.append("unregister")
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    @property
    def nbytes(self) -> int:
        return sum(self.ranges.values())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    waits = lambda: found.calls.append("synchronize")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda number: contextlib.nullcontext(found.calls.append(f"on {number}")))
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    monkeypatch.setattr(module, "_warned", False)
    yield found
    gc.collect()
    assert not found.ranges and pinned_bytes() == 0, "what is freed is unpinned"


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 5 * PAGE + 1, (17 << 20) + 3])
def test_just_the_pages_that_are_asked_for_are_pinned_until_they_are_freed(driver: Driver, nbytes: int) -> None:
    memory = host_memory(nbytes, pinned=True)
    assert memory.numel() == nbytes and memory.data_ptr() % PAGE == 0
    assert driver.nbytes == pinned_bytes() == pages(nbytes)
    part = memory[: nbytes // 2]
    del memory
    gc.collect()
    assert driver.calls.count("unregister") == 0, "a view keeps it"
    part.fill_(1)
    del part
    gc.collect()
    assert driver.nbytes == pinned_bytes() == 0
    assert driver.calls == (["register", "on 3", "synchronize", "unregister"] if nbytes else [])


def test_memory_that_need_not_be_pinned_is_not(driver: Driver) -> None:
    host_memory(100_000).fill_(1)
    assert driver.calls == []


def test_memory_that_the_driver_refuses_is_used_all_the_same_and_that_is_logged_once(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refuses = True
    with caplog.at_level(logging.WARNING):
        kept = [host_memory(10_000, pinned=True).fill_(5) for _ in range(2)]
    assert all(bool((memory == 5).all()) for memory in kept) and driver.nbytes == pinned_bytes() == 0
    (message,) = (record.getMessage() for record in caplog.records)
    assert "not pinned" in message and f"{pages(10_000)} bytes" in message and "error 2" in message


def test_a_forked_process_neither_has_the_content_nor_unpins_it(driver: Driver) -> None:
    memory = host_memory(3 * PAGE, pinned=True).fill_(7)
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            content = int(memory[PAGE])
            del memory
            gc.collect()
            code = 0 if content == 0 and driver.calls == ["register"] else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert int(memory[PAGE]) == 7 and driver.nbytes == 3 * PAGE


def test_a_snapshot_uses_pinned_memory_again(driver: Driver) -> None:
    kept = HostMemory()
    for _ in range(3):
        kept.begin()
        on_gpu, on_host = kept.take(5_000_000, pinned=True), kept.take(400_000)
        kept.end()
        assert driver.calls == ["register"]
        assert driver.nbytes == pages(on_gpu.numel()) < 5_000_000 * 1.05
        assert on_gpu.data_ptr() in driver.ranges and on_host.data_ptr() not in driver.ranges
    del on_gpu
    kept.begin()
    kept.end()
    assert driver.nbytes == 0, "what the last snapshot did not need is freed"


def test_a_memory_file_has_pinned_just_the_pages_that_it_has(driver: Driver, tmp_path: Path) -> None:
    """Pages that a smaller size has freed are not the file's any more, when it grows again."""
    file = MemoryFile(tmp_path / "file")
    truncate = os.ftruncate

    def checked(fd: int, nbytes: int) -> None:
        assert driver.nbytes <= pages(nbytes), "a page is freed that a GPU may write to"
        truncate(fd, nbytes)

    with mock.patch.object(os, "ftruncate", checked):
        for size in (9 * PAGE + 5, 9 * PAGE + 50, 9 * PAGE + 1):
            data = file.take(size, pinned=True)
            assert driver.ranges == {data.data_ptr(): 10 * PAGE} and driver.calls.count("register") == 1
        for size in (3 * PAGE, 3 * PAGE + 1, 40 * PAGE, 100):
            data = file.take(size, pinned=True)
            assert driver.ranges == {data.data_ptr(): pages(size)}
        file.take(50)
        assert driver.nbytes == 0
        file.take(60, pinned=True)
        driver.refuses = True
        before = len(driver.calls)
        for size in (2 * PAGE, 2 * PAGE - 1, 2 * PAGE):
            file.take(size, pinned=True).fill_(1)
        assert driver.calls[before:].count("register") == 1, "what was refused is not asked for at each step"
    del file, data


class Recorded(torch.Tensor):
    """A storage's bytes, said to be on a GPU; notes how they are copied."""

    asynchronous: list[bool] = []  # noqa: RUF012

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.copy_:
            cls.asynchronous.append(bool((kwargs or {}).get("non_blocking", False)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("pinned", [False, True])
def test_only_copies_to_pinned_memory_are_asynchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    monkeypatch.setattr(TorchSaveSkeleton, "on_gpu", True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    as_bytes = module.as_bytes
    monkeypatch.setattr(module, "as_bytes", lambda storage: as_bytes(storage).as_subclass(Recorded))
    monkeypatch.setattr(Recorded, "asynchronous", [])
    laid = write_skeleton({"a": torch.ones(1000), "b": torch.zeros(10)}, tmp_path / "x.pt")
    FileImage(laid, host_memory(laid.nbytes))
    assert Recorded.asynchronous == [pinned] * 2


@pytest.mark.gpu
def test_a_gpu_copies_to_it_and_torch_allocates_nothing(tmp_path: Path) -> None:
    weights = torch.randn(5_000_000, device="cuda")
    stats = getattr(torch.cuda, "host_memory_stats", dict)  # of torch 2.7
    before = stats().get("allocated_bytes.current", 0)
    laid = write_skeleton({"weights": weights}, tmp_path / "x.pt")
    memory = host_memory(laid.nbytes, pinned=laid.on_gpu)
    assert laid.on_gpu and memory.is_pinned() and pinned_bytes() == pages(laid.nbytes)
    made = FileImage(laid, memory)
    torch.cuda.current_stream().synchronize()
    made.complete()
    made.write()
    assert torch.equal(torch.load(tmp_path / "x.pt")["weights"], weights)
    assert stats().get("allocated_bytes.current", 0) == before
    del memory, made
    gc.collect()
    assert pinned_bytes() == 0


@pytest.mark.gpu
def test_an_error_of_the_driver_is_no_error_of_a_later_kernel() -> None:
    torch.zeros(1, device="cuda")
    assert not module._register(4096, 4096), "nothing is mapped there"
    assert float(torch.ones(10, device="cuda").sum()) == 10


@pytest.mark.gpu
def test_a_gpu_writes_to_the_pages_of_a_memory_file(tmp_path: Path) -> None:
    file = MemoryFile(Path("/dev/shm") / f"zeroelastic-test-{os.getpid()}")
    try:
        for number, size in enumerate((5 << 20, 3 << 20, (5 << 20) + 100, 9 << 20)):
            data = file.take(size, pinned=True)
            assert data.is_pinned()
            data.copy_(torch.full((size,), number, dtype=torch.uint8, device="cuda"), non_blocking=True)
            torch.cuda.synchronize()
            assert file.path.read_bytes() == bytes([number]) * size
    finally:
        file.path.unlink()
