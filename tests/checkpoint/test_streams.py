"""zeroelastic.checkpoint.tag_headers: whole tensors once, and copies of ranks compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_files import flip
from sliced import Topology, sliced_part, tensor_lists, topologies

from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.checkpoint.tag_headers import DigestKeys, streams_of, sum_copies
from zeroelastic.core.digest import stream_seed
from zeroelastic.core.layout import Param
from zeroelastic.executors.dispatch import digest_range


def scanned(part: TensorSet, streams: DigestKeys, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The digest and the number of elements of each stream, of what the ranks' files hold."""
    digests, covered = np.zeros(len(streams.tensor), np.uint64), np.zeros(len(streams.tensor), np.int64)
    for rank in range(world_size):
        tensors, rows = part.rank_rows(rank)
        stream = streams.of_rows([part], 0, rows, rows.target)
        for i in range(rows.num_rows):
            tensor = tensors[int(rows.target[i])]
            data = rows.paths[int(rows.file[i])].read_bytes()
            begin = int(rows.file_offset[i])
            piece = np.frombuffer(data[begin : begin + int(rows.nbytes[i])], np.uint8)
            seed = stream_seed(tensor.param.name, tensor.key)
            np.add.at(digests, stream[i], np.uint64(digest_range(piece, 8, seed=seed, start=int(rows.start[i]))))
            covered[stream[i]] += rows.numel[i]
    return digests, covered


def digest_of(part: TensorSet, p: int, values: np.ndarray) -> int:
    return digest_range(values.view(np.uint8), 8, seed=stream_seed(part.params[p].name, "fp32"), start=0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensor_lists, topology=topologies, data=st.data())
def test_the_sums_are_of_whole_tensors_whatever_copies_there_are(tmp_path_factory, tensors, topology, data):
    part = sliced_part(tmp_path_factory.mktemp("tag"), tensors, topology)
    streams = streams_of([part])
    digests, covered = scanned(part, streams, topology.world_size)
    found = sum_copies(streams, digests, covered, [None] * len(part.params))
    assert found.covered.tolist() == [param.numel for param in part.params]
    number = {tensor.name: i for i, (tensor, _) in enumerate(tensors)}
    values = [np.arange(param.numel, dtype="<i8") + number[param.name] * 10**6 for param in part.params]
    assert found.digests.tolist() == [digest_of(part, p, own) for p, own in enumerate(values)]
    assert not found.differs.any() and not found.unsure.any()


def one_norm(tmp_path: Path, tp: int) -> tuple[TensorSet, DigestKeys, int]:
    part = sliced_part(
        tmp_path, [(Param("norm", (8,)), "whole"), (Param("up", (8, 2)), "dim 0")], Topology(1, tp, 1, "param")
    )
    norm = next(i for i, param in enumerate(part.params) if param.name == "norm")
    return part, streams_of([part]), norm


@pytest.mark.parametrize(("tp", "known"), [(3, False), (3, True), (2, False), (2, True)])
def test_a_copy_that_differs_is_told_from_the_others(tmp_path: Path, tp: int, known: bool) -> None:
    part, streams, norm = one_norm(tmp_path, tp)
    sound = digest_of(part, norm, np.arange(8, dtype="<i8"))
    extent = part.extents[1]["fp32"]
    slices = [p for p in np.flatnonzero(part.numbers() == norm).tolist() if extent.offset[p] >= 0]
    flip(extent.path, int(extent.offset[slices[0]]))
    digests, covered = scanned(part, streams, tp)
    want: list[int | None] = [None] * len(part.params)
    want[norm] = sound if known else None
    found = sum_copies(streams, digests, covered, want)
    certain = known or tp > 2
    assert found.unsure.any() != certain
    assert found.covered[norm] == 8 and (found.digests[norm] == sound or not certain)
    if certain:
        (bad,) = np.flatnonzero(found.differs).tolist()
        assert part.layout_holders(int(streams.slice[bad])) == [1]


def test_a_copy_that_was_not_read_is_not_compared(tmp_path: Path) -> None:
    part, streams, norm = one_norm(tmp_path, 2)
    digests, covered = scanned(part, streams, 1)  # of rank 0 alone
    found = sum_copies(streams, digests, covered, [None, None])
    assert found.covered[norm] == 8 and not found.differs.any()
