"""Pages of 2 MiB: asked for inside new memory alone, and only where they come faster."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch

from zeroelastic.io import large_pages


@pytest.fixture(autouse=True)
def measured_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(large_pages.VARIABLE, raising=False)
    large_pages.large_pages_pay.cache_clear()
    yield
    large_pages.large_pages_pay.cache_clear()


def advised(begin: int, end: int) -> int:
    """The bytes between two addresses for which large pages were asked for; none beyond them."""
    found = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if not line.split(maxsplit=1)[0].endswith(":"):
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
            elif line.startswith("VmFlags") and first < end and last > begin and "hg" in line.split():
                assert begin <= first and last <= end
                found += last - first
    return found


@pytest.mark.parametrize("pay", [False, True])
def test_large_pages_are_asked_for_within_a_tensor_alone(monkeypatch: pytest.MonkeyPatch, pay: bool) -> None:
    monkeypatch.setenv(large_pages.VARIABLE, str(int(pay)))
    memory = mmap.mmap(-1, 40 << 20)  # of its own: nothing that was advised earlier borders on the tensor
    tensor = torch.frombuffer(memory, dtype=torch.float32, count=9 << 20, offset=4096)
    large_pages.ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
    found = advised(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    assert found >= tensor.nbytes - 2 * large_pages.LARGE_PAGE if pay else found == 0
    large_pages.ask_for_large_pages(torch.empty(3).data_ptr(), 12)


@pytest.mark.parametrize(("large", "small", "pay"), [(0.001, 0.002, True), (0.02, 0.002, False)])
def test_the_slower_pages_are_not_used(monkeypatch: pytest.MonkeyPatch, large: float, small: float, pay: bool) -> None:
    asked: list[int] = []

    def seconds(advice: int) -> float:
        asked.append(advice)
        return large if advice == mmap.MADV_HUGEPAGE else small

    monkeypatch.setattr(large_pages, "seconds_for_memory", seconds)
    assert [large_pages.large_pages_pay() for _ in range(3)] == [pay] * 3
    assert len(asked) == 2


def test_new_memory_is_measured() -> None:
    assert 0 < large_pages.seconds_for_memory(mmap.MADV_HUGEPAGE) < 5
