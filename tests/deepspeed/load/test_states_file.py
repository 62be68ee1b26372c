"""The model states file as torch reads it: parameters are left out, and a file that is written again is an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zeroelastic.deepspeed.load.module_states import StatesFile
from zeroelastic.torch_file.header import read_torch_file

NUMEL = 40_000
NOTHING = np.zeros((0, 2), dtype=np.int64)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    both = torch.arange(2 * NUMEL, dtype=torch.float32)
    state = {"a": torch.rand(NUMEL), "first": both[:NUMEL], "second": both[NUMEL:], "buffer": torch.rand(7)}
    torch.save(state, tmp_path / "states.pt")
    return str(tmp_path / "states.pt"), state


def ranges_of(path: str, *names: str) -> Any:
    file = read_torch_file(Path(path))
    root: Any = file.root
    file.locate(ref.storage.key for ref in root.values())
    extents = sorted((file.extent(root[name]).offset, file.extent(root[name]).nbytes) for name in names)
    return np.array(extents, dtype=np.int64).reshape(-1, 2)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read."""
    counts: list[int] = []
    original = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        counts.append(original(fd, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


def load(file: StatesFile) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)  # type: ignore[arg-type]
    return state


def test_what_is_left_out_is_not_read_until_it_is_asked_for(
    saved: tuple[str, dict[str, torch.Tensor]], count: list[int]
) -> None:
    path, state = saved
    left_out = ranges_of(path, "a", "first")
    with StatesFile(path, left_out) as file:
        found = load(file)
        assert sum(count) < os.path.getsize(path) - 2 * 4 * NUMEL + 20_000  # the directory is looked for in blocks
        assert all(torch.equal(found[name], state[name]) for name in ("second", "buffer"))
        before = sum(count)
        file.fill([found["second"], found["buffer"]])  # shares a storage with one that was left out
        assert sum(count) - before == 4 * NUMEL
        assert torch.equal(found["first"], state["first"]) and torch.equal(found["second"], state["second"])
        file.fill(found.values())
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_overlapping_ranges_are_left_out_once(saved: tuple[str, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    ((begin, nbytes),) = ranges_of(path, "first").tolist()
    left_out = np.array([(begin, nbytes), (begin + 40, 80), (begin + nbytes - 8, 16)], dtype=np.int64)
    with StatesFile(path, left_out) as file:
        found = load(file)
        file.fill([found["first"]])
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(saved: tuple[str, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    with StatesFile(path, ranges_of(path, "a")) as file:
        found = load(file)
        os.truncate(path, 100)
        with pytest.raises(EOFError, match="it ends at byte"):
            file.fill(found.values())
    with StatesFile(path, NOTHING) as file:
        os.truncate(path, 10)
        with pytest.raises(RuntimeError, match="zip"):
            load(file)
        assert isinstance(file.error, EOFError)


def test_an_error_of_the_disk_is_kept_for_who_reads(
    saved: tuple[str, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.preadv

    def fail(fd: int, buffers: Any, offset: int) -> int:
        if len(buffers[0]) > 2 * NUMEL:
            raise OSError(errno.EIO, "Input/output error")
        return original(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with StatesFile(saved[0], NOTHING) as file:
        with pytest.raises(RuntimeError):
            load(file)
        assert isinstance(file.error, OSError) and file.error.errno == errno.EIO
