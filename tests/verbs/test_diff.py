"""The comparison of two checkpoints: against an oracle, across world sizes, formats and dtypes, in bounded memory."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import Done, no_result, run_command
from sample import write_sample
from saved_files import flip
from synthetic import GROUPS, Truth, edit, edit_optim, model_name, optim_name, write_checkpoint

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.core.layout import Param
from zeroelastic.errors import DigestMismatchError, UsageError
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs import diff as diff_module
from zeroelastic.verbs.diff import ComparedTensor, DiffReport, ParamAndKey, compare_bytes, diff

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")


def named(found: DiffReport) -> dict[tuple[str, str], ComparedTensor]:
    return {(tensor.param, tensor.key): tensor for tensor in found.tensors}


def pairs(only: tuple[ParamAndKey, ...]) -> set[tuple[str, str]]:
    return {(one.param, one.key) for one in only}


# --- elements ---------------------------------------------------------------------------------------------------------


def values_of(data: bytes, dtype: str) -> np.ndarray:
    """The oracle of the dtypes: torch itself."""
    if not data:
        return np.empty(0)
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    return tensor.to(torch.float64).numpy() if dtype not in ("int64",) else tensor.numpy()


def expected(left: bytes, right: bytes, dtype: str) -> tuple[int, float]:
    """How many elements differ and how far at most, element by element."""
    size, num_different, max_abs = DTYPE_BYTES[dtype], 0, 0.0
    x, y = values_of(left, dtype), values_of(right, dtype)
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        if left[i * size : (i + 1) * size] != right[i * size : (i + 1) * size]:
            num_different += 1
            apart = float(abs(float(a) - float(b)))
            max_abs = max(max_abs, apart if math.isfinite(apart) else math.inf)
    return num_different, max_abs


@settings(max_examples=150)
@given(dtype=st.sampled_from(FLOATS + INTEGERS), data=st.data())
def test_the_largest_difference_is_that_of_the_elements_one_by_one(dtype: str, data: st.DataObject) -> None:
    size, numel = DTYPE_BYTES[dtype], data.draw(st.integers(0, 40))
    left = bytearray(data.draw(st.binary(min_size=numel * size, max_size=numel * size)))
    right = bytearray(data.draw(st.sampled_from([left, data.draw(st.binary(min_size=len(left), max_size=len(left)))])))
    if dtype == "bool":
        left, right = bytearray(b & 1 for b in left), bytearray(b & 1 for b in right)
    count, found = compare_bytes(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8), dtype)
    assert (found is None) == (count == 0) == (left == right)
    if found is not None:
        apart, index, a, b = found
        assert (count, apart) == expected(bytes(left), bytes(right), dtype)
        x, y = values_of(bytes(left), dtype)[index], values_of(bytes(right), dtype)[index]
        np.testing.assert_array_equal([a, b], [float(x), float(y)])


def test_bits_are_compared_and_what_is_no_number_is_infinitely_far() -> None:
    nan, other_nan, inf, one = 0x7FC00000, 0x7FC00001, 0x7F800000, 0x3F800000
    x = np.array([nan, inf, one, 0], dtype="<u4")
    count, found = compare_bytes(x.view(np.uint8), x.copy().view(np.uint8), "float32")
    assert (count, found) == (0, None)
    y = np.array([nan, inf, one, 1 << 31], dtype="<u4")  # 0 and -0
    assert compare_bytes(x.view(np.uint8), y.view(np.uint8), "float32") == (1, (0.0, 3, 0.0, -0.0))
    y = np.array([other_nan, inf, one + 1, 0], dtype="<u4")
    count, found = compare_bytes(x.view(np.uint8), y.view(np.uint8), "float32")
    assert count == 2 and found is not None and found[:2] == (math.inf, 0)


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
            path = Path(rows.paths[int(rows.file[row])])
            flip(path, int(rows.file_offset[row]) + (element - int(rows.start[row])) * size)
            edit(path, lambda data: None)
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
        formats.append(data.draw(st.sampled_from(["elastic", "rigid"])) if side == "a" else "rigid")
        truth = write_checkpoint(
            root / side, world_size=sizes[-1], format=formats[-1], states=states, record=formats[-1] == "elastic",
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
    found = diff(root / "a", root / "b")
    assert set(named(found)) == {(name, key) for name, key, _ in changes}
    assert found.equal == (not changes) and not found.only_a and not found.only_b and not found.state
    assert found.num_tensors == len(streams) and found.num_equal == len(streams) - len(found.tensors)
    for tensor in found.tensors:
        dtype, left = truth[tensor.param][tensor.key]
        right = after[tensor.param][tensor.key][1]
        want = expected(left, right, dtype)
        assert tensor.num_elements == len(left) // DTYPE_BYTES[dtype]
        assert (tensor.num_different, tensor.max_abs) == want, (tensor.param, tensor.key)
        assert tensor.index is not None
        at = np.ravel_multi_index(tensor.index, tensor.shape.a) if tensor.index else 0
        np.testing.assert_array_equal(
            [tensor.a, tensor.b], [float(values_of(side, dtype)[at]) for side in (left, right)]
        )


def test_long_tensors_are_read_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ((Param("long", (300_000,)), Param("short", (11,)), Param("other", (70_001,))),)
    for side, world_size in (("a", 2), ("b", 3)):
        write_checkpoint(
            tmp_path / side, world_size=world_size, groups=groups, frozen=None, sub_group_size=None, format="rigid"
        )
    last = 300_000 // 3 - 1
    edit_optim(
        tmp_path / "b" / optim_name(2), lambda s: s["optimizer_state_dict"]["state"][0]["exp_avg"][last].add_(3.5)
    )
    monkeypatch.setattr(diff_module, "_WINDOW", 1 << 16)
    sizes: list[int] = []
    compared = compare_bytes
    monkeypatch.setattr(
        diff_module, "compare_bytes", lambda a, b, dtype: (sizes.append(len(a)), compared(a, b, dtype))[1]
    )
    found = diff(tmp_path / "a", tmp_path / "b")
    assert max(sizes) == 1 << 16 and len(sizes) > 40 and found.bytes_read == 2 * sum(sizes) == 2 * 3 * 4 * 370_012
    (tensor,) = found.tensors
    assert (tensor.param, tensor.index, tensor.num_different) == ("long", [299_999], 1)
    assert float(tensor.b or 0) - float(tensor.a or 0) == pytest.approx(3.5)


def test_equal_digests_are_enough_and_what_is_read_is_compared_with_them(tmp_path: Path) -> None:
    for side, world_size in (("a", 2), ("b", 3)):
        write_checkpoint(tmp_path / side, world_size=world_size, record=True)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.equal and found.bytes_read == 0 and found.num_by_digest == found.num_tensors > 0
    write_checkpoint(tmp_path / "c", world_size=2, record=True, seed=5)
    found = diff(tmp_path / "a", tmp_path / "c")
    assert found.tensors and found.num_by_digest < found.num_tensors and found.bytes_read > 0
    state = open_state(open_checkpoint(tmp_path / "c"))
    rows = state.parts[0].whole_rows([0], keys={"fp32"})[1]
    with open(rows.paths[int(rows.file[0])], "r+b") as file:
        file.seek(int(rows.file_offset[0]))
        file.write(b"\x01\x02\x03\x04")
    with pytest.raises(DigestMismatchError, match="have changed since they were saved"):
        diff(tmp_path / "a", tmp_path / "c")


def test_shapes_dtypes_and_what_only_one_side_has_are_told_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", world_size=2, states={"m": torch.float32, "x": torch.float32}, format="rigid")
    other = ((Param("w", (4, 5)), Param("v", (8,))), (Param("b", (3,)), Param("new", (2,)), Param("scale", ())))
    write_checkpoint(
        tmp_path / "b", world_size=2, groups=other, states={"m": torch.bfloat16, "y": torch.float32}, format="rigid"
    )
    found = diff(tmp_path / "a", tmp_path / "b")
    assert not found.equal
    assert pairs(found.only_a) >= {("w", "x"), ("gain", "fp32"), ("gain", "m")}
    assert pairs(found.only_b) >= {("w", "y"), ("new", "fp32")}
    tensors = named(found)
    assert tensors["w", "fp32"].num_different is None and tensors["v", "fp32"].shape.b == [8]
    assert (tensors["b", "m"].dtype.a, tensors["b", "m"].dtype.b) == ("float32", "bfloat16")
    assert {value.what for value in found.state} >= {"group of gain", "group of new"}


def test_a_pattern_chooses_parameters_and_nothing_else_is_compared(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", world_size=2, seed=1, format="rigid")
    write_checkpoint(tmp_path / "b", world_size=3, seed=2, global_steps=9, format="rigid")
    found = diff(tmp_path / "a", tmp_path / "b", params="[wv]")
    assert {param for param, _ in named(found)} == {"w", "v"} and len(found.tensors) == 6
    assert [value.what for value in found.state] == ["step of w and 1 more parameters"]
    with pytest.raises(UsageError, match=r"'no\.such\.\*' matches no parameter"):
        diff(tmp_path / "a", tmp_path / "b", params="no.such.*")
    assert GROUPS  # what was written


def test_hyper_parameters_and_counters_are_state_and_how_it_was_saved_is_not(tmp_path: Path) -> None:
    options = [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.95)}]
    for side, world_size, format in (("a", 2, "elastic"), ("b", 4, "rigid")):
        write_checkpoint(tmp_path / side, world_size=world_size, format=format, options=options, record=True)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.equal and found.content_root.a == found.content_root.b is not None
    (tmp_path / "b" / "zeroelastic.json").unlink()
    write_checkpoint(
        tmp_path / "c",
        world_size=2,
        options=[{"lr": 0.1, "betas": (0.9, 0.99)}, options[1]],
        global_steps=4,
        seed=0,
        format="rigid",
    )
    state = {(value.what, value.a, value.b) for value in diff(tmp_path / "a", tmp_path / "c").state}
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
        write_checkpoint(tmp_path / side, world_size=1, format="rigid")
        edit(tmp_path / side / model_name(0), first)
    assert diff(tmp_path / "a", tmp_path / "b").equal
    edit(tmp_path / "b" / model_name(0), second)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert {value.what for value in found.state} == {
        *("skipped_steps", "lr_scheduler.last[1]", "rng", "blob", "linear._extra_state.scale")
    }
    assert all(value.a != value.b for value in found.state)
    mask = named(found)["mask", "buffer"]
    assert found.tensors == (mask, named(found)["strided", "buffer"])
    assert (mask.max_abs, mask.num_different, mask.index) == (1.0, 1, [3])
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
def test_an_object_of_client_state_is_equal_to_itself_alone(tmp_path: Path, kind: str) -> None:
    for side, value in zip("ab", PAIRS[kind], strict=True):
        write_checkpoint(tmp_path / side, world_size=1, format="rigid")
        edit(tmp_path / side / model_name(0), partial(with_client_state, value))
    assert diff(tmp_path / "a", tmp_path / "a").equal
    found = diff(tmp_path / "a", tmp_path / "b").state
    assert found and all(value.what.startswith("client") and value.a != value.b for value in found)


def test_the_loss_scale_is_state(tmp_path: Path) -> None:
    for side in "ab":
        write_checkpoint(tmp_path / side, world_size=1, format="rigid")
    edit_optim(tmp_path / "b" / optim_name(0), lambda state: state.update(overflow=True, dynamic_loss_scale=True))
    assert diff(tmp_path / "a", tmp_path / "b").equal  # without a scaler these mean nothing
    for side, scale in (("a", 65536.0), ("b", 32768.0)):
        edit_optim(tmp_path / side / optim_name(0), lambda state, scale=scale: state.update(loss_scaler=scaler(scale)))
    what = {value.what: (value.a, value.b) for value in diff(tmp_path / "a", tmp_path / "b").state}
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
    assert re.search(r"^  weights +equal$", done.stdout, re.MULTILINE)
    assert re.search(r"^Equal: (\d+) of \1 common tensors are equal", done.stdout, re.MULTILINE)


def test_other_state_exits_with_1_and_the_largest_difference_comes_first(samples: Path) -> None:
    done = cli(samples / "a" / "global_step2", samples / "b")
    assert done.returncode == 1 and "Different: " in done.stdout
    table = done.stdout.split("Tensors that differ\n")[1].split("\n\n")[0].splitlines()
    lines = [line.split() for line in table if "weight" in line]
    assert 5 < len(lines) <= 15 and "more; --json lists them all" in table[-1]
    largest = [float(line[4]) for line in lines]
    assert largest == sorted(largest, reverse=True)
    (index, a, b) = re.search(r"(\[[\d, ]+\]) +(\S+) +(\S+)$", table[1]).groups()
    assert abs(float(a) - float(b)) == pytest.approx(largest[0], rel=1e-6) and json.loads(index)


def test_the_document_says_whether_the_weights_are_equal(samples: Path, tmp_path: Path) -> None:
    write_sample(tmp_path, world_size=2, layers=2)
    done = cli(samples / "a" / "global_step2", tmp_path, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["ok"] is document["weights_equal"] is False
    assert document["only_b"] and not document["only_a"]
    same = json.loads(cli(samples / "a", samples / "b", "--json").stdout)
    assert same["ok"] is same["weights_equal"] is True


def test_what_is_not_finite_is_text_in_the_document(tmp_path: Path) -> None:
    for side, value in (("a", 1e308), ("b", -1e308)):
        write_checkpoint(
            tmp_path / side, world_size=1, states={"m": torch.float64}, sub_group_size=None, format="rigid"
        )
        path = tmp_path / side / optim_name(0)
        edit_optim(path, lambda s, value=value: s["optimizer_state_dict"]["state"][0]["m"][:20].fill_(value))
    done = cli(tmp_path / "a", tmp_path / "b", "--json")
    tensor = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))["tensors"][0]
    assert (tensor["max_abs"], tensor["a"], tensor["num_different"]) == ("inf", 1e308, 20)


def test_a_damaged_checkpoint_exits_with_3(samples: Path, tmp_path: Path) -> None:
    write_sample(tmp_path, world_size=2, layers=1)
    (tmp_path / "global_step4" / optim_name(1)).write_bytes(b"")
    done = cli(samples / "a", tmp_path, "--json")
    assert done.returncode == 3 and no_result(done.stdout) and optim_name(1) in done.stderr
