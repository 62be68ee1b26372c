"""The digest is additive over any partition, changed by any change, equal to its definition, fixed for ever."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.core.digest import (
    BLOCK,
    ParamContent,
    ScalarValue,
    block_weights,
    combine,
    content_root,
    digest_range,
    element_weights,
    stream_seed,
)
from zeroelastic.core.layout import Param
from zeroelastic.executors import dispatch

MOD = 1 << 64
ITEMSIZES = (1, 2, 4, 8)
SEED = stream_seed("model.weight", "exp_avg")

itemsizes = st.sampled_from(ITEMSIZES)
lengths = st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 2048, 2049]), st.integers(0, 5000))


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MOD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MOD
    return z ^ (z >> 31)


def weight(j: int) -> int:
    return mix((j + 1) * 0x9E3779B97F4A7C15 % MOD) | 1


def block_weight(seed: int, b: int) -> int:
    return mix((seed + (b + 1) * 0x9E3779B97F4A7C15) % MOD) | 1


def by_definition(data: bytes, itemsize: int, seed: int, start: int) -> int:
    """The sum of the module's docstring, one element at a time with Python's integers."""
    blocks: dict[int, int] = {}
    for i in range(len(data) // itemsize):
        bits = int.from_bytes(data[i * itemsize : (i + 1) * itemsize], "little")
        b, j = divmod(start + i, 1024)
        blocks[b] = blocks.get(b, 0) + weight(j) * bits
    return sum(block_weight(seed, b) * total for b, total in blocks.items()) % MOD


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def digest(data: np.ndarray, itemsize: int, start: int = 0, seed: int = SEED) -> int:
    """The reference; whatever else computes digests is held against it."""
    return digest_range(data, itemsize, seed=seed, start=start)


@given(itemsize=itemsizes, numel=lengths, start=st.integers(0, 3000), seed=st.integers(0, MOD - 1))
@settings(max_examples=60)
def test_it_is_what_its_definition_says(itemsize, numel, start, seed):
    data = random_bytes(numel * itemsize, numel)
    assert digest(data, itemsize, start, seed) == by_definition(data.tobytes(), itemsize, seed, start)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("start", [0, 1, 1023, 1024, 512 * 1024 - 1, 2**40 + 5])
def test_chunks_and_blocks_meet_without_a_seam(itemsize, start):
    numel = BLOCK * 513 + 3
    data = random_bytes(numel * itemsize)
    whole = digest(data, itemsize, start)
    split = [0, 1, 1024 - start % 1024, BLOCK * 512 - start % 1024, BLOCK * 512 + 7, numel]
    parts = [
        digest(data[a * itemsize : b * itemsize], itemsize, start + a)
        for a, b in zip(sorted(split), sorted(split)[1:], strict=False)
    ]
    assert sum(parts) % MOD == whole


@given(
    itemsize=itemsizes,
    numel=st.integers(1, 4000),
    cuts=st.lists(st.integers(0, 4000), max_size=6),
    start=st.integers(0, 10**12),
    seed=st.integers(0, MOD - 1),
)
def test_any_partition_adds_up(itemsize, numel, cuts, start, seed):
    data = random_bytes(numel * itemsize, numel)
    bounds = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    total = 0
    for begin, end in itertools.pairwise(bounds):
        total = combine(total, digest(data[begin * itemsize : end * itemsize], itemsize, start + begin, seed))
    assert total == digest(data, itemsize, start, seed)


@given(itemsize=itemsizes, numel=st.integers(1, 3000), data=st.data())
def test_any_changed_element_changes_it(itemsize, numel, data):
    before = random_bytes(numel * itemsize, numel)
    after = before.copy()
    at = data.draw(st.integers(0, len(before) - 1))
    after[at] ^= data.draw(st.integers(1, 255))
    assert digest(before, itemsize) != digest(after, itemsize)


@given(itemsize=itemsizes, numel=st.integers(2, 3000), data=st.data())
def test_swapped_elements_change_it(itemsize, numel, data):
    elements = random_bytes(numel * itemsize, numel).view(f"<u{itemsize}")
    i, j = data.draw(st.tuples(*[st.integers(0, numel - 1)] * 2).filter(lambda pair: pair[0] != pair[1]))
    if elements[i] == elements[j]:
        elements[j] ^= 1
    swapped = elements.copy()
    swapped[[i, j]] = elements[[j, i]]
    assert digest(elements.view(np.uint8), itemsize) != digest(swapped.view(np.uint8), itemsize)


def test_streams_are_told_apart():
    data = random_bytes(400)
    seeds = {stream_seed(name, key) for name in ("a", "b") for key in ("fp32", "exp_avg")}
    assert len({digest(data, 4, seed=seed) for seed in seeds}) == 4
    assert stream_seed("a", "bc") != stream_seed("ab", "c")


def test_the_bits_count_and_not_the_values():
    zero, minus_zero = np.array([0.0], "<f4"), np.array([-0.0], "<f4")
    assert digest(zero.view(np.uint8), 4) == 0 != digest(minus_zero.view(np.uint8), 4)
    nans = np.array([0x7FC00000, 0x7FC00001], "<u4").view(np.uint8)
    assert digest(nans[:4], 4) != digest(nans[4:], 4)


def test_unaligned_and_read_only_data_do_not_matter():
    raw = random_bytes(8001)
    data = np.frombuffer(raw.tobytes(), np.uint8)
    assert digest(raw[1:], 8) == digest(raw[1:].copy(), 8) == digest(data[1:], 8)


def test_weights_are_odd_and_distinct():
    weights = element_weights()
    assert weights.shape == (BLOCK,) and weights.dtype == np.uint64
    assert (weights & np.uint64(1)).all() and len(set(weights.tolist())) == BLOCK
    assert weights.tolist() == [weight(j) for j in range(BLOCK)]
    blocks = block_weights(SEED, 2**40, 100)
    assert (blocks & np.uint64(1)).all() and len(set(blocks.tolist())) == 100
    assert blocks.tolist() == [block_weight(SEED, 2**40 + b) for b in range(100)]


def test_the_format_has_not_drifted():
    """Checkpoints hold these numbers: a change of any is a new format, not a fix."""
    assert BLOCK == 1024
    assert hex(int(element_weights()[0])) == "0xe220a8397b1dcdaf"
    assert hex(stream_seed("model.weight", "exp_avg")) == GOLDEN["seed"]
    assert hex(int(block_weights(1, 3, 1)[0])) == GOLDEN["block"]
    ramp = np.arange(5000, dtype="<u8")
    for itemsize in ITEMSIZES:
        data = ramp.astype(f"<u{itemsize}").view(np.uint8)
        for function in (digest_range, dispatch.digest_range):
            assert hex(function(data, itemsize, seed=SEED, start=1000)) == GOLDEN[f"ramp{itemsize}"]
    assert content_root(CONTENTS) == GOLDEN["root"]


CONTENTS = (
    ParamContent(Param("w", (2, 3)), {"fp32": ("float32", 1), "exp_avg": ("bfloat16", 2)},
                 {"step": ScalarValue("float32", 3.0)}),
    ParamContent(Param("b", (3,)), {"frozen": ("float16", 7)}, {}),
)  # fmt: skip

GOLDEN = {
    "seed": "0xd08f58e75e544d55",
    "block": "0x71c18690ee42c90b",
    "root": "dfe69e4b208674e0c154b24b13c2c1a502e37f0de6eed517f98d982b194f8c3e",
    "ramp1": "0xfbfa79f7f1396088",
    "ramp2": "0xeb2c374da6edcc88",
    "ramp4": "0xeb2c374da6edcc88",
    "ramp8": "0xeb2c374da6edcc88",
}


def test_the_root_does_not_depend_on_order():
    first = ParamContent(
        CONTENTS[0].param, dict(reversed(CONTENTS[0].tensors.items())), dict(reversed(CONTENTS[0].scalars.items()))
    )
    assert content_root([CONTENTS[1], first]) == content_root(CONTENTS)


def test_the_root_is_a_sha256_of_sorted_lines():
    lines = [
        json.dumps(["b", [3], [["frozen", "float16", f"{7:016x}"]], []]),
        json.dumps(["w", [2, 3], [["exp_avg", "bfloat16", f"{2:016x}"], ["fp32", "float32", f"{1:016x}"]],
                    [["step", "float32:0x1.8000000000000p+1"]]]),
    ]  # fmt: skip
    assert content_root(CONTENTS) == hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


CHANGES = {
    "name": ParamContent(Param("v", (2, 3)), CONTENTS[0].tensors, CONTENTS[0].scalars),
    "shape": ParamContent(Param("w", (3, 2)), CONTENTS[0].tensors, CONTENTS[0].scalars),
    "flat shape": ParamContent(Param("w", (6,)), CONTENTS[0].tensors, CONTENTS[0].scalars),
    "digest": ParamContent(CONTENTS[0].param, {**CONTENTS[0].tensors, "fp32": ("float32", 2)}, CONTENTS[0].scalars),
    "dtype": ParamContent(CONTENTS[0].param, {**CONTENTS[0].tensors, "fp32": ("float16", 1)}, CONTENTS[0].scalars),
    "key": ParamContent(CONTENTS[0].param, {"fp32": ("float32", 1), "m": ("bfloat16", 2)}, CONTENTS[0].scalars),
    "one tensor less": ParamContent(CONTENTS[0].param, {"fp32": ("float32", 1)}, CONTENTS[0].scalars),
    "scalar value": ParamContent(CONTENTS[0].param, CONTENTS[0].tensors, {"step": ScalarValue("float32", 4.0)}),
    "scalar kind": ParamContent(CONTENTS[0].param, CONTENTS[0].tensors, {"step": ScalarValue("pyfloat", 3.0)}),
    "scalar type": ParamContent(CONTENTS[0].param, CONTENTS[0].tensors, {"step": ScalarValue("float32", 3)}),
    "scalar key": ParamContent(CONTENTS[0].param, CONTENTS[0].tensors, {"steps": ScalarValue("float32", 3.0)}),
    "no scalar": ParamContent(CONTENTS[0].param, CONTENTS[0].tensors, {}),
    "tensor parallel rank": ParamContent(CONTENTS[0].param, CONTENTS[0].tensors, CONTENTS[0].scalars, tp_rank=1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_field_counts_for_the_root(what):
    assert content_root([CHANGES[what], CONTENTS[1]]) != content_root(CONTENTS)


def test_a_parameter_more_or_less_counts_for_the_root():
    assert len({content_root(CONTENTS), content_root(CONTENTS[:1]), content_root([]), content_root(CONTENTS * 2)}) == 4


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ScalarValue("pyfloat", 0.0), ScalarValue("pyfloat", -0.0)),
        (ScalarValue("pyfloat", 0.1), ScalarValue("pyfloat", 0.1 + 1e-17 + 2e-17)),
        (ScalarValue("pyint", 1), ScalarValue("bool", True)),
        (ScalarValue("none", None), ScalarValue("bool", False)),
        (ScalarValue("pyfloat", float("inf")), ScalarValue("pyfloat", float("-inf"))),
        (ScalarValue("pyint", 2**53), ScalarValue("pyint", 2**53 + 1)),
    ],
)
def test_scalars_that_differ_have_different_texts(left, right):
    assert left.canonical() != right.canonical()


def test_equal_scalars_have_equal_texts():
    assert ScalarValue("pyfloat", float("nan")).canonical() == ScalarValue("pyfloat", float("nan")).canonical()
    assert ScalarValue("float32", 10.0).canonical() == ScalarValue("float32", 1e1).canonical()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ScalarValue("pyint", 3), ScalarValue("float32", 3.0)),
        (ScalarValue("pyfloat", 0.5), ScalarValue("bfloat16", 0.5)),
        (ScalarValue("pybool", True), ScalarValue("bool", True)),
    ],
)
def test_the_same_number_kept_in_two_forms(left, right):
    assert left.number() == right.number() and left.canonical() != right.canonical()


@pytest.mark.parametrize(
    ("left", "right"),
    [(0.0, -0.0), (3.0, 3.0000000000000004), (2.0**53, 2**53 + 1), (float("inf"), float("-inf")), (1, True), (0, None)],
)
def test_other_numbers_are_other_numbers(left, right):
    assert ScalarValue.of_python(left).number() != ScalarValue.of_python(right).number()
