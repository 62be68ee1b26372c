"""The comparison of two checkpoints: against an oracle, across world sizes, formats and dtypes, in bounded memory."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Done, no_result, run_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import GROUPS, Truth, edit, edit_optim, model_name, optim_name, write_checkpoint

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.core.layout import Param
from zeroelastic.errors import UsageError
from zeroelastic.testing.sample import write_sample
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs import new_files
from zeroelastic.verbs.diff import diff
from zeroelastic.verbs.diff.diff import DiffReport, ParamAndKey, compare_checkpoints
from zeroelastic.verbs.diff.element_stats import CHUNK, ElementStats, compare_elements
from zeroelastic.verbs.diff.tensors import ComparedTensor, comparison_nbytes
from zeroelastic.verbs.report import Sides

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")


def compare(left: Path, right: Path, **options: Any) -> DiffReport:
    return compare_checkpoints(open_state(open_checkpoint(left)), open_state(open_checkpoint(right)), **options)


def named(found: DiffReport) -> dict[tuple[str, str], ComparedTensor]:
    return {(tensor.param, tensor.key): tensor for tensor in (*found.tensors, *found.equal_tensors)}


def pairs(only: tuple[ParamAndKey, ...]) -> set[tuple[str, str]]:
    return {(one.param, one.key) for one in only}


# --- elements ---------------------------------------------------------------------------------------------------------


def values_of(data: bytes, dtype: str) -> np.ndarray:
    """The oracle of the dtypes: torch itself."""
    if not data:
        return np.empty(0)
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return tensor.to(torch.float64).numpy() if dtype not in ("int64",) else tensor.numpy()


def expected(left: bytes, right: bytes, dtype: str) -> dict[str, float]:
    """What the statistics must be, element by element."""
    size = DTYPE_BYTES[dtype]
    x, y = values_of(left, dtype), values_of(right, dtype)
    stats = {"num_different": 0, "num_nonfinite": 0, "max_abs": 0.0, "square": 0.0, "left_square": 0.0}
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        same = left[i * size : (i + 1) * size] == right[i * size : (i + 1) * size]
        stats["num_different"] += not same
        if math.isfinite(a):
            stats["left_square"] += float(a) ** 2
        if not same and not (math.isfinite(a) and math.isfinite(b)):
            stats["num_nonfinite"] += 1
        elif not same:
            stats["max_abs"] = max(stats["max_abs"], float(abs(a - b)))
            stats["square"] += float(abs(a - b)) ** 2
    return stats


@settings(max_examples=150)
@given(dtype=st.sampled_from(FLOATS + INTEGERS), data=st.data())
def test_statistics_are_those_of_the_elements_one_by_one(dtype: str, data: st.DataObject) -> None:
    size, numel = DTYPE_BYTES[dtype], data.draw(st.integers(0, 40))
    left = bytearray(data.draw(st.binary(min_size=numel * size, max_size=numel * size)))
    right = bytearray(data.draw(st.sampled_from([left, data.draw(st.binary(min_size=len(left), max_size=len(left)))])))
    if dtype == "bool":
        left, right = bytearray(b & 1 for b in left), bytearray(b & 1 for b in right)
    if dtype == "float64":  # squares of larger ones overflow, in the oracle too
        for side in (left, right):
            np.frombuffer(side, "<f8")[:] = np.clip(np.nan_to_num(np.frombuffer(side, "<f8")), -1e100, 1e100)
    found = compare_elements(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8), dtype, dtype)
    want = expected(bytes(left), bytes(right), dtype)
    assert found.num == numel
    for name, value in want.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    x, y = values_of(bytes(left), dtype), values_of(bytes(right), dtype)
    assert (found.left_nan, found.right_nan) == (np.isnan(x).sum(), np.isnan(y).sum())
    assert (found.left_inf, found.right_inf) == (np.isinf(x).sum(), np.isinf(y).sum())
    assert (found.max_ulp is None) == (dtype in INTEGERS)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_representable_number_is_one_ulp_wherever_it_is(dtype: str) -> None:
    size = DTYPE_BYTES[dtype]
    bits = np.arange(1 << 8 * min(size, 2), dtype=f"<u{min(size, 2)}").astype(f"<u{size}")
    if size > 2:  # every pattern of the upper two bytes, and what lies around zero
        bits = np.concatenate([bits << np.uint64(8 * size - 16), bits]).astype(f"<u{size}")
    finite = bits[np.isfinite(values_of(bits.tobytes(), dtype))]
    values = values_of(finite.tobytes(), dtype)
    positive = finite[values > 0]
    below = (positive - 1).astype(positive.dtype)
    found = compare_elements(positive.view(np.uint8), below.view(np.uint8), dtype, dtype)
    assert found.max_ulp == 1 and found.num_different == len(positive)
    sign = positive.dtype.type(1 << (8 * size - 1))
    smallest = np.array([1, 0, 1 | sign], dtype=positive.dtype)
    other = np.array([1 | sign, sign, 1 | sign], dtype=positive.dtype)
    found = compare_elements(smallest.view(np.uint8), other.view(np.uint8), dtype, dtype)
    assert (found.max_ulp, found.num_different, found.num_sign_changed) == (0, 2, 1)  # 0 is -0, but for a bit


def test_numbers_on_two_sides_of_zero_are_counted_and_have_no_distance_in_ulp() -> None:
    """All the small numbers lie between them: 1e-3 and -1e-3 would be two thousand million ulp apart."""
    x = np.array([1e-3, 1.0, 0.0, 5.0], dtype="<f4")
    y = np.array([-1e-3, np.nextafter(np.float32(1.0), np.float32(2.0)), -0.0, 5.0], dtype="<f4")
    found = compare_elements(x.view(np.uint8), y.view(np.uint8), "float32", "float32")
    assert (found.max_ulp, found.num_different, found.num_sign_changed) == (1, 3, 1)
    assert found.max_abs == pytest.approx(2e-3)


def test_the_distance_of_whole_numbers_does_not_overflow() -> None:
    x = np.array([-(2**63), 5, 2**63 - 1], dtype="<i8")
    y = np.array([2**63 - 1, 7, 2**63 - 2], dtype="<i8")
    found = compare_elements(x.view(np.uint8), y.view(np.uint8), "int64", "int64")
    assert found.max_abs == float(2**64 - 1) and found.num_different == 3
    found = compare_elements(x[1:].view(np.uint8), y[1:].view(np.uint8), "int64", "int64")
    assert found.max_abs == 2.0


def test_equal_bits_are_equal_and_others_are_not_numbers_or_infinite() -> None:
    nan, other_nan, inf = 0x7FC00000, 0x7FC00001, 0x7F800000
    x = np.array([nan, nan, inf, inf, 0x3F800000], dtype="<u4")
    y = np.array([nan, other_nan, inf, inf | 1 << 31, 0x3F800001], dtype="<u4")
    found = compare_elements(x.view(np.uint8), y.view(np.uint8), "float32", "float32")
    assert (found.num_different, found.num_nonfinite, found.max_ulp) == (3, 2, 1)
    assert (found.left_nan, found.right_nan, found.left_inf, found.right_inf) == (2, 2, 2, 2)
    assert math.isfinite(found.max_abs) and math.isfinite(found.square)


def test_what_is_not_finite_is_the_worst_difference_whatever_the_rest_is_like() -> None:
    form = {"key": "fp32", "dtype": Sides(a="float32", b="float32"), "shape": Sides(a=[4], b=[4]), "num_elements": 4}
    small, large = (ComparedTensor(param=f"{norm}", num_different=4, relative_norm=norm, **form) for norm in (0.1, 9.0))
    broken = ComparedTensor(param="nan", num_different=1, num_nonfinite=1, relative_norm=0.0, **form)
    from_zero = ComparedTensor(param="from zero", num_different=2, num_nonfinite=0, **form)
    assert sorted([small, broken, large, from_zero], key=attrgetter("difference_key")) == [
        from_zero,
        broken,
        large,
        small,
    ]


def test_other_dtypes_are_compared_by_value() -> None:
    x = np.array([1.0, 2.5, np.nan, 1e-3], dtype="<f4")
    y = torch.tensor(x).to(torch.bfloat16).view(torch.uint8).numpy()
    found = compare_elements(x.view(np.uint8), y, "float32", "bfloat16")
    assert (found.num_different, found.max_ulp) == (1, None) and 0 < found.max_abs < 1e-5


@settings(max_examples=20)
@given(st.integers(0, 3 * CHUNK), st.integers(0, 3 * CHUNK))
def test_statistics_of_parts_add_up(numel: int, cut: int) -> None:
    rng = np.random.default_rng(numel)
    x, y = (rng.standard_normal(numel, dtype=np.float32).view(np.uint8) for _ in range(2))
    cut = min(cut, numel) * 4
    whole = compare_elements(x, y, "float32", "float32")
    sides = [(x[:cut], y[:cut]), (x[cut:], y[cut:])]
    parts = sum((compare_elements(a, b, "float32", "float32") for a, b in sides), ElementStats())
    assert parts.num == whole.num and parts.max_abs == whole.max_abs and parts.max_ulp == whole.max_ulp
    assert parts.square == pytest.approx(whole.square)


# --- checkpoints ------------------------------------------------------------------------------------------------------

STATES = (
    {},
    {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    {"a": torch.bfloat16, "b": torch.uint8, "c": torch.float64, "d": torch.int64},
)


def nudged(truth: Truth, tag_dir: Path, world_size: int, changes: list[tuple[str, str, int]], format: str) -> Truth:
    """Save files anew in which the lowest bit of some elements is another; returns what they hold then."""
    changed = {name: {key: (dtype, bytearray(data)) for key, (dtype, data) in t.items()} for name, t in truth.items()}
    state = open_state(open_checkpoint(tag_dir))
    for name, key, element in changes:
        for part in state.parts:
            index = part.layout.index().get(name)
            if index is None or key not in part.dtypes[index]:
                continue
            tensors, rows = part.whole_rows([index], keys={key})
            size = DTYPE_BYTES[tensors[0].dtype]
            row = next(i for i in range(rows.num_rows) if 0 <= element - rows.start[i] < rows.numel[i])
            with open(rows.paths[int(rows.file[row])], "r+b") as file:
                at = int(rows.file_offset[row]) + (element - int(rows.start[row])) * size
                file.seek(at)
                byte = file.read(1)[0] ^ 1
                file.seek(at)
                file.write(bytes([byte]))
            edit(Path(rows.paths[int(rows.file[row])]), lambda data: None)
            changed[name][key][1][element * size] ^= 1
    return {name: {key: (dtype, bytes(data)) for key, (dtype, data) in t.items()} for name, t in changed.items()}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_differs_is_what_was_changed_at_any_world_sizes_and_formats(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("pair")
    states = data.draw(st.sampled_from(STATES))
    sizes, formats = [], []
    for side in "ab":
        sizes.append(data.draw(st.integers(1, 6)))
        formats.append(data.draw(st.sampled_from(["elastic", "rigid"])))
        truth = write_checkpoint(
            root / side, world_size=sizes[-1], format=formats[-1], states=states,
            sub_group_size=data.draw(st.sampled_from([1, 7, 10, None])),
        )  # fmt: skip
    streams = [(name, key) for name, tensors in truth.items() for key, (_, raw) in tensors.items() if raw]
    changes = data.draw(
        st.lists(
            st.sampled_from(streams).flatmap(
                lambda s: st.tuples(
                    st.just(s[0]), st.just(s[1]),
                    st.integers(0, len(truth[s[0]][s[1]][1]) // DTYPE_BYTES[truth[s[0]][s[1]][0]] - 1),
                )
            ),
            max_size=4, unique=True,
        )
    )  # fmt: skip
    after = nudged(truth, root / "b", sizes[1], changes, formats[1])
    found = compare(root / "a", root / "b", max_memory=data.draw(st.sampled_from([1, 256 << 20])))
    assert {(t.param, t.key) for t in found.differing} == {(name, key) for name, key, _ in changes}
    assert found.equal == (not changes) and not found.only_a and not found.only_b and not found.state
    compared = (*found.tensors, *found.equal_tensors)
    assert {(t.param, t.key) for t in compared} == set(streams)
    for tensor in compared:
        dtype, left = truth[tensor.param][tensor.key]
        right = after[tensor.param][tensor.key][1]
        want = expected(left, right, dtype)
        assert tensor.stats is not None and tensor.stats.num == len(left) // DTYPE_BYTES[dtype]
        for name, value in want.items():
            assert getattr(tensor.stats, name) == pytest.approx(value, rel=1e-9), (tensor.param, tensor.key, name)
    saving = {value.what for value in found.saving}
    assert ("world size" in saving) == (sizes[0] != sizes[1]) and ("format" in saving) == (formats[0] != formats[1])


def test_long_tensors_are_compared_in_pieces_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ((Param("long", (300_000,)), Param("short", (11,)), Param("other", (70_001,))),)
    for side, world_size in (("a", 2), ("b", 3)):
        write_checkpoint(tmp_path / side, world_size=world_size, groups=groups, frozen=None, sub_group_size=None)
    sizes: list[int] = []
    done: list[int] = []
    read = new_files.read_segments
    monkeypatch.setattr(
        new_files,
        "read_segments",
        lambda t, p, b, **o: (sizes.append(sum(x.nbytes for x in b)), read(t, p, b, **o))[1],
    )
    left, right = (open_state(open_checkpoint(tmp_path / side)) for side in "ab")
    found = compare_checkpoints(left, right, max_memory=1 << 20, progress=done.append)
    assert found.equal and found.num_tensors == 9
    assert max(sizes) <= (1 << 20) // 6 + 8 and len(sizes) > 40
    assert sum(done) == found.bytes_read == comparison_nbytes(left, right) == 2 * 3 * 4 * 370_012


def test_shapes_dtypes_and_what_only_one_side_has_are_told_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", world_size=2, states={"m": torch.float32, "x": torch.float32})
    other = ((Param("w", (4, 5)), Param("v", (8,))), (Param("b", (3,)), Param("new", (2,)), Param("scale", ())))
    write_checkpoint(tmp_path / "b", world_size=2, groups=other, states={"m": torch.bfloat16, "y": torch.float32})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert not found.equal
    assert pairs(found.only_a) >= {("w", "x"), ("gain", "fp32"), ("gain", "m")}
    assert pairs(found.only_b) >= {("w", "y"), ("new", "fp32")}
    tensors = named(found)
    assert tensors["w", "fp32"].stats is None and tensors["v", "fp32"].shape.b == [8]
    assert (tensors["b", "m"].dtype.a, tensors["b", "m"].dtype.b) == ("float32", "bfloat16")
    assert not tensors["b", "m"].equal and tensors["b", "m"].stats is not None
    assert {value.what for value in found.state} >= {"group of gain", "group of new"}


def test_a_pattern_chooses_parameters_and_nothing_else_is_compared(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", world_size=2, seed=1)
    write_checkpoint(tmp_path / "b", world_size=3, seed=2, global_steps=9)
    found = compare(tmp_path / "a", tmp_path / "b", params="[wv]")
    assert {param for param, _ in named(found)} == {"w", "v"} and len(found.differing) == 6
    assert [value.what for value in found.state] == ["step of w and 1 more parameters"]
    with pytest.raises(UsageError, match=r"'no\.such\.\*' fits no parameter"):
        compare(tmp_path / "a", tmp_path / "b", params="no.such.*")
    assert GROUPS  # what was written


def test_state_is_kept_apart_from_how_it_was_saved(tmp_path: Path) -> None:
    options = [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.95)}]
    for side, world_size, format in (("a", 2, "elastic"), ("b", 4, "rigid")):
        write_checkpoint(tmp_path / side, world_size=world_size, format=format, options=options, record=True)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.equal and found.content_root.a == found.content_root.b is not None
    assert {value.what for value in found.saving} >= {"world size", "format", "save id", "global batch"}
    (tmp_path / "b" / "zeroelastic.json").unlink()
    write_checkpoint(
        tmp_path / "c", world_size=2, options=[{"lr": 0.1, "betas": (0.9, 0.99)}, options[1]], global_steps=4, seed=0
    )
    state = {(value.what, value.a, value.b) for value in compare(tmp_path / "a", tmp_path / "c").state}
    assert ("group 0: betas", "(0.9, 0.95)", "(0.9, 0.99)") in state
    assert ("step", "3", "4") in state and (
        "step of w and 4 more parameters",
        "3.0 (float32)",
        "4.0 (float32)",
    ) in state
    assert len(state) == 3


def test_counters_client_state_and_buffers_are_state(tmp_path: Path) -> None:
    def first(data: dict[str, Any]) -> None:
        data.update(skipped_steps=0, epoch=1, lr_scheduler={"last": [1, 2.5]}, rng=torch.arange(9), blob="x" * 500)
        data["module"].update(mask=torch.arange(6.0), tail=torch.ones(2), strided=torch.arange(6).reshape(2, 3).t())
        data["module"]["linear._extra_state"] = {"scale": 1}

    def second(data: dict[str, Any]) -> None:
        data.update(skipped_steps=7, lr_scheduler={"last": [1, 2.75]}, rng=-torch.arange(9), blob="x" * 499 + "y")
        data["module"]["mask"][3] += 1
        data["module"]["strided"][2, 1] += 1
        data["module"]["linear._extra_state"] = {"scale": 2}
        data["module"]["head"] = data["module"].pop("tail")

    for side in "ab":
        write_checkpoint(tmp_path / side, world_size=1)
        edit(tmp_path / side / model_name(0), first)
    assert compare(tmp_path / "a", tmp_path / "b").equal
    edit(tmp_path / "b" / model_name(0), second)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert {value.what for value in found.state} == {
        *("skipped_steps", "lr_scheduler.last[1]", "rng", "blob", "linear._extra_state.scale")
    }
    assert all(value.a != value.b for value in found.state)
    mask = named(found)["mask", "buffer"]
    assert found.differing == (mask, named(found)["strided", "buffer"]) and mask.stats is not None
    assert (mask.stats.max_abs, mask.stats.num_different) == (1.0, 1)
    assert (pairs(found.only_a), pairs(found.only_b)) == ({("tail", "buffer")}, {("head", "buffer")})


def deep(value: object) -> object:
    for _ in range(60):
        value = [value]
    return value


def with_client_state(value: object, data: dict[str, Any]) -> None:
    data["client"] = value


def looped(value: object) -> object:
    items: list[object] = [value]
    items.append(items)
    return items


COMPLEX = torch.arange(6.0).to(torch.complex128).reshape(2, 3).t()
PAIRS: dict[str, tuple[object, object]] = {
    "a numpy array": (np.arange(3), np.array([0, 1, 3])),
    "a large tensor": (torch.zeros(300_000), torch.zeros(300_000).index_fill(0, torch.tensor(299_999), 1)),
    "a tensor with strides": (torch.arange(6).reshape(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 6]])),
    "complex numbers with strides": (1j * COMPLEX, 2j * COMPLEX),
    "a conjugate view": (1j * COMPLEX, (1j * COMPLEX).conj()),
    "a negative view": (torch.ones(3), torch.ones(3)._neg_view()),
    "many levels": (deep(1), deep(2)),
    "a list that holds itself": (looped(1), looped(2)),
    "many values": ([*range(90)], [*range(89), 90]),
    "long keys": ({"x" * 300 + end: 1 for end in "ab"}, {"x" * 300 + "a": 2, "x" * 300 + "b": 1}),
    "a class": (Path, int),
    "a frozen set": (frozenset("abcdefgh"), frozenset("abcdefgi")),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_an_object_of_client_state_is_equal_to_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(diff, "_MAX_VALUES", 50)
    for side, value in zip("ab", PAIRS[kind], strict=True):
        write_checkpoint(tmp_path / side, world_size=1)
        edit(tmp_path / side / model_name(0), partial(with_client_state, value))
    assert compare(tmp_path / "a", tmp_path / "a").equal
    found = compare(tmp_path / "a", tmp_path / "b").state
    assert found and all(value.what.startswith("client") and value.a != value.b for value in found)


def test_the_loss_scale_is_state(tmp_path: Path) -> None:
    for side in "ab":
        write_checkpoint(tmp_path / side, world_size=1)
    edit_optim(tmp_path / "b" / optim_name(0), lambda state: state.update(overflow=True, dynamic_loss_scale=True))
    assert compare(tmp_path / "a", tmp_path / "b").equal  # without a scaler these mean nothing
    for side, scale in (("a", 65536.0), ("b", 32768.0)):
        edit_optim(tmp_path / side / optim_name(0), lambda state, scale=scale: state.update(loss_scaler=scaler(scale)))
    what = {value.what: (value.a, value.b) for value in compare(tmp_path / "a", tmp_path / "b").state}
    assert what["loss scaler: cur_scale"] == ("65536.0", "32768.0") and what["loss scaler: overflow"] == (
        "False",
        "True",
    )


def scaler(scale: float) -> object:
    """DeepSpeed's loss scaler as a file holds it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    made = LossScaler(scale=scale)
    return made


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    write_sample(root / "a", world_size=2, layers=1)
    write_sample(root / "b", world_size=3, layers=1, format="rigid", record=False)
    return root


def cli(*arguments: object, **env: str) -> Done:
    return run_command("diff", *arguments, env=env)


def test_equal_state_of_other_ranks_and_format_exits_with_0(samples: Path) -> None:
    done = cli(samples / "a", samples / "b")
    assert done.returncode == 0 and done.stderr == ""
    assert re.match(r"Weights: equal bit for bit \(\d+ parameters\)\n", done.stdout)
    assert "Equal: " in done.stdout and "world size" in done.stdout and "which does not count" in done.stdout


def test_other_state_exits_with_1_and_the_worst_come_first(samples: Path) -> None:
    done = cli(samples / "a" / "global_step2", samples / "b")
    assert done.returncode == 1 and "Different: " in done.stdout
    first = done.stdout.partition("\n")[0]
    assert re.fullmatch(
        r"Weights: different in (\d+) of \1 parameters .*; the norm of the difference is \S+ of that of A", first
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("model.") and "weight" in line]
    assert 5 < len(lines) <= 15 and "--all shows them" in done.stdout
    relative = [float(line[6]) for line in lines]
    assert relative == sorted(relative, reverse=True)
    every = cli(samples / "a" / "global_step2", samples / "b", "--all")
    assert len(every.stdout.splitlines()) > len(done.stdout.splitlines()) and "inv_freq" in every.stdout


def test_the_document_says_whether_the_weights_are_equal(samples: Path, tmp_path: Path) -> None:
    write_sample(tmp_path, world_size=2, layers=2)
    done = cli(samples / "a" / "global_step2", tmp_path, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["ok"] is document["weights_equal"] is False
    assert document["only_b"] and not document["only_a"]
    same = json.loads(cli(samples / "a", samples / "b", "--json").stdout)
    assert same["ok"] is same["weights_equal"] is True


def test_what_is_not_finite_is_null_in_the_document(tmp_path: Path) -> None:
    for side, value in (("a", 1e308), ("b", -1e308)):
        write_checkpoint(tmp_path / side, world_size=1, states={"m": torch.float64}, sub_group_size=None)
        path = tmp_path / side / optim_name(0)
        edit_optim(path, lambda s, value=value: s["base_optimizer_state"][0]["m"][0].fill_(value))
    done = cli(tmp_path / "a", tmp_path / "b", "--json")
    tensor = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))["tensors"][0]
    assert (tensor["max_abs"], tensor["norm"]) == (None, None) and tensor["num_different"] == 20


def test_misuse_and_damage_have_their_exit_codes(samples: Path, tmp_path: Path) -> None:
    assert cli(samples / "a", tmp_path / "nothing").returncode == 2
    assert cli(samples / "a", samples / "b", "--params", "nothing*").returncode == 2
    assert cli(samples / "a", samples / "b", "--max-memory", "1KiB").returncode == 2
    write_sample(tmp_path, world_size=2, layers=1)
    (tmp_path / "global_step4" / optim_name(1)).write_bytes(b"")
    done = cli(samples / "a", tmp_path, "--json")
    assert done.returncode == 3 and no_result(done.stdout) and optim_name(1) in done.stderr
