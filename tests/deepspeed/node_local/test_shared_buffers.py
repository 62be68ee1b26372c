"""Buffers that a lean save has in shared files: each arrives whole, wherever the file is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fsspec
from counted import CountedFileSystem, put

from zeroelastic.checkpoint.shared_files import SharedFile
from zeroelastic.checkpoint.shared_weights import SharedTensor, SharedWeights
from zeroelastic.deepspeed.node_local.shared_places import SharedPlaces, read_shared_buffers
from zeroelastic.io.paths import as_path
from zeroelastic.io.remote import Retries, retrying
from zeroelastic.testing import RankPool


def read_from_a_store_with_short_answers() -> tuple[bool, int]:
    """Whether the buffers are whole, and how many answers of the store were too short."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    data = bytes(range(200))
    path = put(f"counted://b/run/frozen/{'a' * 64}.safetensors", data)
    asked = set[int]()

    def answer(path: str, start: int, found: bytes) -> bytes:
        short = start not in asked
        asked.add(start)
        return found[:-3] if short else found

    CountedFileSystem.answer = answer
    file = SharedFile(path=str(path), nbytes=len(data), digest="a" * 64)
    buffers = {
        "mean": SharedTensor(0, 16, "uint8", (100,), 0),
        "table": SharedTensor(0, 120, "float32", (4, 5), 0),
    }
    model: Any = SimpleNamespace(shared=SharedWeights((file,), {}, buffers, frozenset(buffers)))
    places = SharedPlaces(as_path("counted://b/run/tag"), {file.path: path}, {file.path: (0,)})
    with retrying(Retries(1, first_pause_s=0.0)):
        found = read_shared_buffers(None, places, model)
    return found == {"mean": data[16:116], "table": data[120:200]}, len(asked)


def test_a_short_answer_of_a_store_is_asked_for_again(rank_pool: RankPool) -> None:
    assert rank_pool.run(read_from_a_store_with_short_answers, 1) == [(True, 2)]
