"""Every source into every sink: the content root of the table, and no more bytes or opens than it says."""

from __future__ import annotations

import json

import pytest

from oracle import make
from zeroelastic.testing import RankPool

FEWER = 512
"""Bytes that /proc and the lengths of paths and numbers make of difference."""


RESHARDED = [
    pytest.mark.support(
        "Using it", "`zeroelastic reshard --stage`: stages 1, 2 and 3 into each other", "exact", "the same content root"
    ),
    pytest.mark.support("Using it", "stage 1 and 2 checkpoints: reshard to stage 3", "exact", "the same content root"),
]
CONVERTED = [
    pytest.mark.support(
        "Using it",
        "`zeroelastic convert` from Universal Checkpoint",
        "exact",
        "to elastic or rigid files for any world size",
    )
]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=RESHARDED if source in make.WHOLE else CONVERTED * (source == make.UNIVERSAL))
        for source in make.SOURCES
    ],
)
def test_a_source_becomes_each_sink(rank_pool: RankPool, source: str) -> None:
    found = rank_pool.run(make.measure, 1, source, timeout=240)[0]
    expected = json.loads(make.TABLE.read_text())[source]
    assert found.keys() == expected.keys()
    worse = {
        sink: (cell, expected[sink])
        for sink, cell in found.items()
        if cell[0] != expected[sink][0] or cell[1] > expected[sink][1] + FEWER or cell[2] > expected[sink][2]
    }
    assert not worse


@pytest.mark.parametrize("stage", make.STAGES)
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[pytest.mark.extended] * (size not in (1, 3))) for size in make.SIZES]
)
def test_each_source_is_loaded_into_a_live_engine(rank_pool: RankPool, stage: int, size: int) -> None:
    expected = json.loads(make.TABLE.read_text())[f"live stage {stage} ranks {size}"]
    found = rank_pool.run(make.load_each, size, stage)[0]
    assert found.keys() == expected.keys()
    for source, (root, payload, headers, files) in found.items():
        expected_root, most_payload, most_headers, most_files = expected[source]
        assert root == expected_root, source
        assert payload <= most_payload and headers <= most_headers and files <= most_files, source
