"""Statistics of elements, against torch: of every dtype, in any windows, with numbers that are none."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.verbs.show import TensorStats, tensor_stats

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "int64", "int8", "uint8", "bool")


def raw(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype=np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_torch(dtype: str) -> None:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(1)) * 3
    tensor = (values > 0) if dtype == "bool" else values.abs().to(getattr(torch, dtype))
    wide = tensor.to(torch.float64)
    stats = tensor_stats(raw(tensor), dtype)
    got = (stats.min, stats.max, stats.mean, stats.std, stats.norm, stats.zeros)
    want = (wide.min(), wide.max(), wide.mean(), wide.std(correction=0), wide.norm(), (wide == 0).sum())
    assert got == pytest.approx([float(value) for value in want], rel=1e-9)
    assert stats.numel == 70_001 and stats.nans == stats.infs == 0


@given(
    st.lists(st.floats(width=32), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_windows_add_up_to_the_whole(values: list[float], cuts: list[int]) -> None:
    data = np.array(values, dtype="<f4")
    whole = tensor_stats(data.view(np.uint8), "float32")
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = sum(
        (tensor_stats(data[a:b].view(np.uint8), "float32") for a, b in pairwise(bounds)),
        TensorStats(),
    )
    for name in ("numel", "num_finite", "min", "max", "zeros", "nans", "infs"):
        assert getattr(parts, name) == getattr(whole, name)
    assert parts.centre == pytest.approx(whole.centre, rel=1e-9, abs=1e-30)
    assert parts.deviations == pytest.approx(whole.deviations, rel=1e-6, abs=1e-9 * max(whole.squares, 1e-30))
    assert whole.nans == sum(map(math.isnan, data)) and whole.infs == sum(map(math.isinf, data))


def test_a_large_mean_does_not_drown_the_deviation() -> None:
    values = torch.tensor([1e8, 1e8 + 16, 1e8 - 16] * 50_000, dtype=torch.float32)
    stats = tensor_stats(raw(values), "float32")
    assert stats.std == pytest.approx(float(values.double().std(correction=0)), rel=1e-9)


def test_nothing_has_no_statistics() -> None:
    empty = tensor_stats(np.empty(0, dtype=np.uint8), "float32")
    assert (empty.numel, empty.min, empty.max, empty.std, empty.norm) == (0, None, None, None, 0.0)
    nan = tensor_stats(raw(torch.tensor([math.nan, math.inf])), "float32")
    assert (nan.numel, nan.num_finite, nan.min, nan.std) == (2, 0, None, None)
