"""Shared files written to stores: of any cut over the ranks, in bounded memory, as a whole or not at all."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFile
from io_counts import process_status, reset_peak
from s3_server import S3Server

from zeroelastic.checkpoint.shared_files import digest_of, metadata_of, read_shared_head, shared_name
from zeroelastic.deepspeed.live.digests import LivePiece
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.deepspeed.save.shared_file import NewFile, _write_to_store
from zeroelastic.errors import SaveError
from zeroelastic.io.paths import RemotePath, as_path
from zeroelastic.io.storage import read_range
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.safetensors import lay_out

MIB = 1 << 20
PARTS_OF_5_MIB = parse_options({"zeroelastic": {"lean": True, "store_part_mib": 5}})


def new_file(folder: str, numels: dict[str, int]) -> tuple[NewFile, dict[str, torch.Tensor]]:
    """A file of int16 tensors that are cut over the ranks in equal parts, and the tensors; the first is on rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = {name: torch.arange(numel, dtype=torch.int16) * 3 + i for i, (name, numel) in enumerate(numels.items())}
    pieces = []
    for i, (name, tensor) in enumerate(whole.items()):
        begin, end = (
            ((0, len(tensor)) if rank == 0 else (0, 0))
            if i == 0
            else (len(tensor) * rank // size, len(tensor) * (rank + 1) // size)
        )
        pieces.append(LivePiece(name, "frozen", tensor[begin:end].clone(), begin))
    digests = dict.fromkeys(whole, 5)
    name = shared_name(digest_of({name: ("int16", tuple(t.shape), 5) for name, t in whole.items()}))
    header, head = lay_out(name, [(name, "int16", tuple(t.shape)) for name, t in whole.items()], metadata_of(digests))
    path = as_path(folder) / name
    return NewFile(as_path(folder), path, header, head, pieces), whole


def write(folder: str, numels: dict[str, int]) -> bool:
    """Whether rank 0 finds in the file what the ranks had."""
    file, whole = new_file(folder, numels)
    assert isinstance(file.path, RemotePath)
    _write_to_store(file, file.path, PARTS_OF_5_MIB)
    if dist.get_rank() != 0:
        return True
    places = read_shared_head(file.path)[0].tensors
    found = {name: read_range(file.path, place.offset, place.nbytes) for name, place in places.items()}
    return found == {name: tensor.numpy().tobytes() for name, tensor in whole.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_shared_file_has_what_all_ranks_had(rank_pool: RankPool, s3: S3Server, ranks: int) -> None:
    numels = {"one": 3_000_001, "two": 2, "none": 0, "three": 5_000_003}
    for folder in (f"memory://run{ranks}", s3.url(f"run{ranks}")):
        assert all(rank_pool.run(write, ranks, folder, numels))


def fail(folder: str) -> tuple[str, list[str]]:
    """The second part fails: the error of this rank, and the objects that it finds afterwards."""
    file, _ = new_file(folder, {"one": 8_000_000})
    assert isinstance(file.path, RemotePath)
    written = 0

    def part(stream: Any, data: bytes) -> int:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(5, "the disk of the store is full")
        return io.BytesIO.write(stream, data)

    with mock.patch.object(MemoryFile, "write", part), pytest.raises(SaveError) as raised:
        _write_to_store(file, file.path, PARTS_OF_5_MIB)
    return str(raised.value), fsspec.filesystem("memory").find("/fails")


def test_a_stream_that_fails_leaves_no_object(rank_pool: RankPool) -> None:
    outcomes = rank_pool.run(fail, 2, "memory://fails")
    assert {text for text, _ in outcomes} == {outcomes[0][0]} and outcomes[0][1] == []
    assert "the disk of the store is full" in outcomes[0][0]


def write_large(folder: str, nbytes: int) -> int:
    """Bytes of memory that writing takes beside what is there."""
    write(folder, {"warm": 3_000_000})
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.from_numpy(np.ones(nbytes // 2 // size, dtype=np.int16))
    header, head = lay_out("large", [("large", "int16", (nbytes // 2,))], metadata_of({"large": 1}))
    name = shared_name(digest_of({"large": ("int16", (nbytes // 2,), 1)}))
    path = as_path(folder) / name
    assert isinstance(path, RemotePath)
    file = NewFile(as_path(folder), path, header, head, [LivePiece("large", "frozen", tensor, len(tensor) * rank)])
    with suppress(PermissionError):
        reset_peak()
    before = process_status("VmRSS")
    _write_to_store(file, path, parse_options({}))
    return process_status("VmHWM") - before


def test_writing_to_a_store_takes_little_memory(rank_pool: RankPool, s3: S3Server) -> None:
    for used in rank_pool.run(write_large, 2, s3.url("large"), 192 * MIB):
        assert used <= 48 * MIB
