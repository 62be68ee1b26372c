"""The header of a file that only another rank sees is parsed from what that rank has read of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zeroelastic.deepspeed.node_local.peers import ReceivedFile, joined, recording
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.torch_file.header import read_torch_file, walk_refs


def test_a_header_is_parsed_alike_from_the_ranges_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(5000), "step": torch.tensor(7), "text": "x" * 300}, path)
    with recording(path) as (file, ranges):
        here = read_torch_file(path, through=file)
        step = here.read(here.root["step"]).tobytes()  # type: ignore[index]
        for ref in walk_refs(here.root):
            here.extent(ref)
    read = sum(len(data) for _, data in joined(ranges))
    assert here.header_bytes == file.bytes_read >= read and read < path.stat().st_size / 4
    path.unlink()
    there = read_torch_file(path, through=ReceivedFile(path, file.size, joined(ranges)))
    assert repr(there.root) == repr(here.root) and there.header_bytes == 0
    assert [there.extent(ref) for ref in walk_refs(there.root)] == [here.extent(ref) for ref in walk_refs(here.root)]
    assert there.read(there.root["step"]).tobytes() == step  # type: ignore[index]
    with pytest.raises(CheckpointError, match="did not come from the rank that sees it"):
        there.read(there.root["a"])  # type: ignore[index]
    with pytest.raises(MissingFileError), recording(path):
        pass
