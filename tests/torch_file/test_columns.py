"""A pickle that the native engine packs says what it said before, and what is refused without the engine is refused
with it, in the same words."""

from __future__ import annotations

import io
import random
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import TESTS

sys.path.insert(0, str(TESTS / "fuzz"))

import readers
from packing import LONG, check_same, content, load

from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.executors.build_info import describe_build
from zeroelastic.torch_file import header
from zeroelastic.torch_file.columns import IntColumn, NamedColumn, TensorColumn, pack_pickle, with_lists
from zeroelastic.torch_file.header import TensorRef, read_torch_file
from zeroelastic.torch_file.safe_unpickler import check_opcodes

pytestmark = pytest.mark.skipif(not describe_build("native").usable, reason="the native engine was not built")

INPUTS = 600


def pickled(value: object) -> bytes:
    """The pickle that torch.save writes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def elastic_state(num_params: int) -> dict[str, object]:
    """What an elastic optimizer file has for each parameter, and other lists."""
    flat, whole = torch.zeros(num_params * 7), torch.zeros(5, dtype=torch.float16)

    def views() -> list[torch.Tensor]:
        return [flat[i * 7 : i * 7 + i % 7] for i in range(num_params)]

    shared = views()[:6]
    return {
        "base_optimizer_state": [{"step": torch.tensor(1.0), "exp_avg": views(), "exp_avg_sq": views()}],
        "zeroelastic": {
            "names": [f"layers.{i}.weight" for i in range(num_params)],
            "shapes": [(4, i % 3) for i in range(num_params)],
            "offsets": [(i % 9 - 4) << i % 58 for i in range(num_params)],
        },
        "param_shapes": OrderedDict((f"w{i}", torch.Size((i % 3, 2))) for i in range(num_params)),
        "mixed": [1, 2, 3, None, 5, 6],
        "two storages": [flat[1:3], flat[3:4], flat[4:5], flat[5:7], whole[1:2], whole[2:3]],
        "whole": [flat, whole, flat.view(num_params, 7)[:, 1], torch.nn.Parameter(flat[:3])],
        "twice": [shared, shared, shared[1:], [shared[0]]],
        "large": [1 << 63, 1 << 64, -(1 << 63), (1 << 63) - 1, 1 << 127],
        "seeds": (1 << 127, [1 << 127] * 5),
        "loss_scaler": scaler(),
    }


def scaler() -> object:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    made = LossScaler(1.0)
    made.history = list(range(10))
    return made


def read_plainly(data: bytes) -> object:
    check_opcodes(data)
    return load(data)


def test_long_lists_are_columns_and_say_what_they_said() -> None:
    data = pickled(elastic_state(2500))
    packed = pack_pickle(data, long_list=LONG)
    assert packed is not None and len(packed[0]) < len(data) / 2
    root: Any = load(*packed)
    plain: Any = read_plainly(data)
    assert content(with_lists(root)) == content(plain)
    state = root["base_optimizer_state"][0]
    assert isinstance(state["exp_avg"], TensorColumn) and state["exp_avg"].numel[:9].tolist() == [*range(7), 0, 1]
    assert isinstance(root["zeroelastic"]["offsets"], IntColumn)
    assert all(type(root[key]) is list for key in ("mixed", "two storages", "whole", "large"))
    assert all(type(value) is TensorRef for value in root["two storages"])
    shapes = root["zeroelastic"]["shapes"]
    assert len({*map(id, shapes)}) == 3, "equal shapes are one object"
    assert pack_pickle(data, long_list=0) is not None
    assert content(load(*pack_pickle(data, long_list=0))) == content(plain)  # type: ignore[misc]


@pytest.mark.parametrize("count", [999, 1000, 1001, 1002, 2000, 2001, 2002])
def test_lists_of_any_number_of_batches(count: int) -> None:
    """A pickle has a thousand items in a batch, and a batch of one item is written in another way."""
    flat = torch.zeros(count)
    for value in ([*range(count)], [flat[i : i + 1] for i in range(count)]):
        data = pickled([value, value, {"a": value}, "end"])
        packed = pack_pickle(data, long_list=999)
        assert packed is not None
        root: Any = load(*packed)
        assert isinstance(root[0], (IntColumn, TensorColumn)) and root[0] is root[1] is root[2]["a"]
        assert content(with_lists(root)) == content(read_plainly(data))


def module_state(count: int) -> OrderedDict[str, Any]:
    """The state of a module with tensors of many kinds, of which DeepSpeed's module states have thousands."""
    dtypes = (torch.bfloat16, torch.float32, torch.int64, torch.bool)
    flat = torch.arange(count * 8, dtype=torch.float32)
    kinds = (
        lambda i: torch.empty(0, dtype=dtypes[i // 9 % 4]),
        lambda i: torch.zeros(i % 5, 2, dtype=dtypes[i // 9 % 4]),
        lambda i: flat[i : i + 4],
        lambda i: flat[i : i + 6].view(2, 3).t(),
        lambda i: flat[i],
        lambda i: flat[i : i + 1].expand(3, 2),
        lambda i: torch.tensor(1.5),
        lambda i: torch.nn.Parameter(flat[i : i + 2], requires_grad=i % 2 == 0),
        lambda i: flat[i : i + 4].view(2, 2),
    )
    state = OrderedDict((f"layers.{i}.weight", kinds[i % 9](i)) for i in range(count))
    state._metadata = OrderedDict((f"layers.{i}", {"version": 1 + i % 2}) for i in range(count))  # type: ignore[attr-defined]
    return state


def model_states(count: int) -> dict[str, object]:
    """What a file of DeepSpeed's module states has of many parameters."""
    names = [f"layers.{i}.weight" for i in range(count)]
    frozen = OrderedDict((f"frozen.{i}", torch.zeros(i % 3)) for i in range(count))
    return {
        "module": module_state(count),
        "param_shapes": [OrderedDict((name, torch.Size((i % 3, 2)[: i % 4])) for i, name in enumerate(names))],
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
        "frozen_param_fragments": frozen,
        "buffer_names": names[:3],
        "again": (names[1], "version", "layers.0"),
    }


def test_long_dictionaries_are_columns_and_say_what_they_said() -> None:
    data = pickled(model_states(2500))
    packed = pack_pickle(data, long_list=LONG)
    assert packed is not None and len(packed[0]) < len(data) / 2
    root: Any = load(*packed)
    plain: Any = read_plainly(data)
    assert content(with_lists(root)) == content(plain)
    columns = (root["module"], *root["param_shapes"], root["frozen_param_shapes"], root["frozen_param_fragments"])
    assert {*map(type, columns)} == {NamedColumn}
    module = root["module"]
    assert len(module.forms) < 100 and [*module] == [*plain["module"]] and dict(module) == plain["module"]
    assert module["layers.12.weight"] == plain["module"]["layers.12.weight"] and "layers.x" not in module
    chosen = {"layers.3.weight", "layers.8.weight", "other"}
    assert module.only(np.flatnonzero(module.is_in(chosen))) == {
        name: module[name] for name in module if name in chosen
    }
    for ref, (contiguous, numel, *_) in zip(module.listed(), module.facts[module.form].tolist(), strict=True):
        assert (ref.is_contiguous, ref.numel) == (bool(contiguous), numel)
    assert "layers.1234" not in bytes(packed[0]).decode("latin1").replace("layers.1234.weight", "")


def test_places_that_every_tensor_names_anew_are_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes the text "cuda:0" for each storage, so that the pickle has it for each storage."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "".join(("cuda", ":0")))
    data = pickled(model_states(50))
    assert data.count(b"cuda:0") > 50
    packed = pack_pickle(data, long_list=LONG)
    assert packed is not None
    root: Any = load(*packed)
    assert isinstance(root["module"], NamedColumn) and len(root["module"].forms) < 50
    assert content(with_lists(root)) == content(read_plainly(data))


@given(
    values=st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
            st.integers(0, 3),
            st.lists(st.integers(0, 4), max_size=4),
            st.permutations(range(4)),
            st.booleans(),
        ),
        min_size=LONG,
        max_size=40,
    ),
    odd=st.sampled_from([None, 7, "text", [1], {"a": [1]}, torch.Size([1]), {}, ()]),
    with_odd=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_tensors_under_any_names(values: list[Any], odd: object, with_odd: bool) -> None:
    flats = {dtype: torch.zeros(4**4 + 3).to(dtype) for dtype in {value[0] for value in values}}
    state: OrderedDict[str, Any] = OrderedDict()
    for i, (dtype, offset, shape, order, is_own) in enumerate(values):
        flat = flats[dtype].clone() if is_own else flats[dtype]
        tensor = flat[offset : offset + int(np.prod(shape, dtype=np.int64))].view(shape)
        state[f"{i}.weight"] = tensor.permute([d for d in order if d < len(shape)])
    if with_odd:
        state["odd"] = odd
    data = pickled({"module": state, "again": state["0.weight"].detach()})
    packed = pack_pickle(data, long_list=LONG)
    assert packed is not None
    try:
        root: Any = load(*packed)
    except UnsafePickleError:
        assert with_odd
    else:
        assert content(with_lists(root)) == content(read_plainly(data))
        assert with_odd or isinstance(root["module"], NamedColumn)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A pickle with some opcodes changed, or with other memo slots."""
    if rng.random() < 0.5:
        return readers.mutate_pickle(data, rng)
    ops = readers._split(data)
    slots = [op for op in ops if op[:1] in b"qrhj"]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = readers._like(ops, rng.randrange(len(ops)), b"qrhj")
        other = rng.choice(slots)
        kind = {b"q": b"qr", b"r": b"qr", b"h": b"hj", b"j": b"hj"}.get(ops[at][:1], b"q")
        ops[at] = kind[len(other) > 2 :][:1] + other[1:]
    return b"".join(ops)


def seeds() -> list[bytes]:
    golden = [readers.pickle_of(path) for path in readers._golden_files()]
    many = [pickled(state(count)) for state in (elastic_state, model_states) for count in (9, 12, 30)]
    return [*golden, *many * 6]


def test_bent_pickles_read_as_they_read_without_the_engine() -> None:
    rng, bases = random.Random(3), seeds()
    ends = {"packed": 0, "left to Python": 0, "read again": 0}
    for number in range(INPUTS):
        data = mutated(bases[number % len(bases)], rng)
        print(f"input {number}")  # shown where it fails
        ends[check_same(data)] += 1
    assert min(ends.values()) > INPUTS // 50, ends


# ---- pickles by hand, in which a list is more than it seems ----


def text(value: str, slot: int) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode() + put(slot)


def put(slot: int) -> bytes:
    return b"q" + bytes([slot])


def first_tensor(slots: tuple[int, ...] = (1, 2, 3, 4, 5, 6), last: bytes = b"") -> bytes:
    """A tensor of storage "0", of 40 elements, with what it is made of in six memo slots."""
    rebuild, storage, kind, key, location, hooks = slots
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n" + put(rebuild) + b"((" + text("storage", storage)
        + b"ctorch\nFloatStorage\n" + put(kind) + text("0", key) + text("cpu", location)
        + b"K\x28tQK\0K\2\x85K\1\x85\x89ccollections\nOrderedDict\n" + put(hooks) + b")RtR" + last
    )  # fmt: skip


def next_tensor(offset: int = 2, numel: bytes = b"K\2", slots: bytes = b"\1\2\3\4\5\6") -> bytes:
    rebuild, storage, kind, key, location, hooks = (b"h" + bytes([slot]) for slot in slots)
    where = b"K" + bytes([offset]) + numel + b"\x85K\1\x85\x89"
    return rebuild + b"((" + storage + kind + key + location + b"K\x28tQ" + where + hooks + b")RtR"


INTS = b"](" + b"K\1K\2K\3K\4K\5" + b"e"
NEXT = b"".join(next_tensor(offset) for offset in range(5))
TENSORS = b"](" + first_tensor() + NEXT + b"e"
MANY = 4096
DICT = b"ccollections\nOrderedDict\nq\x10)Rq\x11"
SIZE = b"ctorch\nSize\nq\x12"


def named(*values: bytes, keys: bytes = b"abcdefgh") -> bytes:
    """Entries of a dictionary, with a name of one letter for each value."""
    return b"".join(b"X\1\0\0\0" + bytes([key]) + value for key, value in zip(keys, values, strict=False))


def size(shape: bytes) -> bytes:
    return b"h\x12" + shape + b"\x85R"


SHAPES = named(SIZE + b"K\4K\1\x86\x85R", *[size(b"K" + bytes([i % 2]) + b"K\1\x86") for i in range(5)])
TABLE = DICT + b"(" + SHAPES + b"u"
TENSOR_ENTRIES = named(first_tensor(), *[next_tensor(offset) for offset in range(5)])
TENSOR_TABLE = DICT + b"(" + TENSOR_ENTRIES + b"u"
VERSION = b"}X\7\0\0\0versionK\1s"
META = b"}X\x09\0\0\0_metadata" + DICT.replace(b"q\x10", b"").replace(b"\x11", b"\x21")
CASES = {
    "shapes by name": TABLE,
    "tensors by name": TENSOR_TABLE,
    "tensors by name, and one more": TENSOR_TABLE + named(next_tensor(7), keys=b"z") + b"s",
    "tensors by name, with a state": TENSOR_TABLE + META + b"(" + named(*[VERSION] * 6) + b"usb",
    "tensors by name, with an empty state": TENSOR_TABLE + META + b"sb",
    "a state that is fetched": TENSOR_TABLE + META + b"(" + named(*[VERSION] * 6) + b"usbh\x21\x86",
    "a state of other things": TENSOR_TABLE + META + b"(" + named(*[b"N"] * 6) + b"usb",
    "a state with a name that is not UTF-8": TENSOR_TABLE + META + b"(" + named(
        *[VERSION] * 6, keys=b"abc\xffde") + b"usb",
    "a state that is no OrderedDict": TENSOR_TABLE + META.replace(b"OrderedDict", b"defaultdict") + b"("
    + named(*[VERSION] * 6) + b"usb",
    "a state that is set twice": TENSOR_TABLE + (META + b"(" + named(*[VERSION] * 6) + b"usb") * 2,
    "a dictionary of another class": TABLE.replace(b"OrderedDict", b"defaultdict"),
    "a dictionary of a function": TABLE.replace(b"collections\nOrderedDict", b"torch\nSize"),
    "a name that is there twice": DICT + b"(" + SHAPES + named(size(b"K\7\x85")) + b"u",
    "a name that is a number": DICT + b"(" + SHAPES + b"K\7" + size(b"K\7\x85") + b"u",
    "a name that is a tuple": b"K\1\x85q\x20" + DICT + b"(" + SHAPES + b"h\x20" + size(b"K\7\x85") + b"u\x86",
    "a name that is not UTF-8": DICT + b"(" + SHAPES + named(size(b"K\7\x85"), keys=b"\xff") + b"u",
    "a name that is fetched": b"X\1\0\0\0zq\x20" + DICT + b"(" + SHAPES + b"h\x20" + size(b"K\7\x85") + b"u\x86",
    "a value that is None": DICT + b"(" + SHAPES + named(b"N", keys=b"z") + b"u",
    "a value that is a list": DICT + b"(" + SHAPES + named(b"]", keys=b"z") + b"u",
    "a value that is a dictionary of itself": DICT + b"(" + SHAPES + named(b"h\x11", keys=b"z") + b"u",
    "a value that is fetched": b"K\1\x85q\x20" + DICT + b"(" + SHAPES + named(*[b"h\x20"] * 3, keys=b"xyz") + b"u\x86",
    "values that are changed": b"}q\x20" + DICT + b"(" + SHAPES + named(
        *[b"h\x20X\1\0\0\0aK\1s"] * 3, keys=b"xyz") + b"u\x86",
    "a dictionary in a dictionary": DICT + b"(" + SHAPES + named(b"h\x10)R(" + named(b"K\1") + b"u", keys=b"z") + b"u",
    "a dictionary in which a dictionary is made": DICT + b"(" + named(*[b"h\x10)R"] * 5) + b"u",
    "an entry without a value": DICT + b"(" + SHAPES + b"X\1\0\0\0zu",
    "a dictionary without its end": DICT + b"(" + SHAPES,
    "a dictionary that is a key": b"}" + TABLE + b"Ns",
    "a dictionary that is called": TABLE + b")R",
    "a dictionary that something is appended to": TABLE + b"K\1a",
    "a dictionary that gets one more, odd entry": TABLE + b"(" + named(b"N", b"](K\1K\2e", keys=b"yz") + b"u",
    "a dictionary twice": TABLE + b"h\x11\x86",
    "a dictionary in a stand-in": b"ctorch\ndevice\n" + TABLE + b"\x85R",
    "a dictionary in place of storage": TABLE + b"((tQ\x86",
    "values that are encoded": DICT + b"(" + named(*[b"c_codecs\nencode\nX\1\0\0\0\xc3\xa9X\6\0\0\0latin1\x86R"] * 5)
    + b"u",
    "sizes with encoded text": DICT + b"("
    + named(*[b"ctorch._utils\n_rebuild_parameter\n(K\1\x85c_codecs\nencode\nX\1\0\0\0aX\6\0\0\0latin1\x86RtR"] * 5)
    + b"u",
    "tensors with encoded text": DICT + b"(" + named(first_tensor(), *[
        next_tensor()[:-2] + b"c_codecs\nencode\nX\1\0\0\0aX\6\0\0\0latin1\x86RtR"] * 5) + b"u",
    "a slot of the dictionary that is filled anew": b"ccollections\nOrderedDict\nq\x10)Rq\5("
    + TENSOR_ENTRIES + b"uh\5\x86",
    "a slot that was filled before": b"K\1q\3" + TENSOR_TABLE + b"h\3\x87",
    "a size that is fetched": DICT + b"(" + SHAPES + named(size(b"K\7\x85q\x20"), keys=b"z") + b"uh\x20\x86",
    "a tensor by name that is fetched": DICT + b"(" + TENSOR_ENTRIES + named(
        next_tensor(4) + b"q\x20", keys=b"z") + b"uh\x20\x86",
    "a tensor by name behind its storage": DICT + b"(" + TENSOR_ENTRIES + named(next_tensor(39), keys=b"z") + b"u",
    "a tensor by name at a negative place": DICT + b"(" + TENSOR_ENTRIES
    + named(next_tensor().replace(b"QK\2", b"QJ\xfe\xff\xff\xff"), keys=b"z") + b"u",
    "a tensor by name at 2^61": DICT + b"(" + TENSOR_ENTRIES
    + named(next_tensor().replace(b"QK\2", b"Q\x8a\x08" + b"\0" * 7 + b"\x20"), keys=b"z") + b"u",
    "a tensor by name of another size": DICT + b"(" + TENSOR_ENTRIES
    + named(*[next_tensor(numel=b"K\3")] * 2, next_tensor(numel=b"K\x1b"), keys=b"xyz") + b"u",
    "a storage by name of -1 elements": DICT + b"(" + TENSOR_ENTRIES
    + named(next_tensor().replace(b"K\x28tQ", b"J\xff\xff\xff\xfftQ"), keys=b"z") + b"u",
    "a storage with the key 07": DICT + b"(" + TENSOR_ENTRIES
    + named(next_tensor().replace(b"h\4", b"X\2\0\0\00007"[:7]), keys=b"z") + b"u",
    "a storage with another key": DICT + b"(" + TENSOR_ENTRIES
    + named(next_tensor().replace(b"h\4", b"X\1\0\0\0009q\x20"), next_tensor(slots=b"\1\2\3\x20\5\6"), keys=b"yz")
    + b"uh\x20\x86",
    "a key that was filled before": b"X\1\0\0\0003q\x09" + DICT + b"(" + TENSOR_ENTRIES
    + named(next_tensor(slots=b"\1\2\3\x09\5\6"), keys=b"z") + b"u\x86",
    "a key's slot that is filled anew": DICT + b"(" + TENSOR_ENTRIES + b"uX\1\0\0\0003q\4" + b"h\x10)R("
    + named(*[next_tensor(offset) for offset in range(5)]) + b"u\x87",
    "a storage that is no first argument": DICT + b"(" + TENSOR_ENTRIES
    + named(*[b"ctorch._utils\n_rebuild_parameter\n(" + next_tensor() + next_tensor(3) + b"tR"] * 2, keys=b"yz") + b"u",
    "parameters by name": DICT + b"("
    + named(*[b"ctorch._utils\n_rebuild_parameter\n(" + (next_tensor() if i else first_tensor()) + b"\x88h\6)RtR"
              for i in range(6)]) + b"u",
    "a persistent id that is a tuple of two": b"(}]\x86K\0tQ" + TABLE + b"\x86",
    "integers": INTS,
    "tensors": TENSORS,
    "integers, and one more": INTS + b"K\6a",
    "tensors, and one more": TENSORS + next_tensor() + b"a",
    "integers, and None": INTS + b"Na",
    "a list that something is appended to": b"]q\x09(K\1K\2K\3K\4eh\x09K\7a0",
    "a list of which an item is set": INTS + b"K\0K\7s",
    "a list with a state": INTS + b"}b",
    "tensors with a state": TENSORS + b"}X\1\0\0\0aK\1sb",
    "a list that is called": INTS + b")R",
    "tensors that are called": TENSORS + first_tensor((7, 8, 9, 10, 11, 12)) + b"\x85R",
    "a list as a key": b"}" + INTS + b"Ns",
    "tensors as a key": b"}" + TENSORS + b"Ns",
    "a set of a list": b"c__builtin__\nset\n" + INTS + b"\x85R",
    "a size of a list": b"ctorch\nSize\n" + INTS + b"\x85R",
    "a dictionary of a list": b"ccollections\nOrderedDict\n" + INTS + b"\x85R",
    "a list that remembers a mark": b"](q\1K\1K\2K\3K\4K\5e",
    "a mark that is remembered": b"N(q\1K\1K\2t\x86",
    "tuples": b"](" + b"(K\1K\2tq\1" * 9 + b"h\1e",
    "tuples that share a slot": b"](" + b"".join(b"K\1K" + bytes([i % 3]) + b"\x86q\1h\1" for i in range(9)) + b"e",
    "a slot that is filled twice": b"](" + first_tensor((1, 2, 3, 2, 5, 6)) + NEXT + b"e",
    "a slot that the tensor itself takes": b"](" + first_tensor(last=put(1)) + NEXT + b"e",
    "a slot of the list": b"]q\5(" + first_tensor() + NEXT + b"eh\5\x86",
    "a tensor in the list's slot": b"]q\7(" + first_tensor(last=put(7)) + NEXT + b"eh\7\x86",
    "the list as a location": b"]q\7(" + first_tensor() + 5 * next_tensor(slots=b"\1\2\3\4\7\6") + b"e",
    "the list in place of hooks": b"(ccollections\nOrderedDict\nq\x08]q\7("
    + first_tensor().replace(b"ccollections\nOrderedDict\nq\6", b"h\7") + 5 * next_tensor(slots=b"\1\2\3\4\5\7")
    + b"eh\x08h\7t",
    "another location": TENSORS + b"](" + 6 * next_tensor(slots=b"\1\2\3\4\3\6") + b"e\x86",
    "a tensor that is fetched again": b"](" + first_tensor() + NEXT + b"q\7" + NEXT + b"eh\7\x86",
    "a tensor behind its storage": b"](" + first_tensor() + NEXT + next_tensor(39) + b"e",
    "no elements behind a storage": b"](" + first_tensor() + NEXT + next_tensor(40, b"K\0")
    + next_tensor(41, b"K\0") + b"e",
    "a tensor of -2 elements": b"](" + first_tensor() + NEXT + next_tensor(2, b"J\xfe\xff\xff\xff") + b"e",
    "a tensor of 2^63 - 1 elements": b"](" + first_tensor() + NEXT
    + next_tensor(2, b"\x8a\x08" + b"\xff" * 7 + b"\x7f") + b"e",
    "a storage of a list": b"](K\1K\2K\3K\4eQ",
    "an integer as a persistent id": b"](K\0Qe" + INTS + b"\x86",
    "a column as a persistent id": INTS + b"](K\0((tQe\x86",
    "parameters in place of tensors": TENSORS.replace(b"_rebuild_tensor_v2", b"_rebuild_parameter"),
    "tensors of an unknown class": TENSORS.replace(b"_rebuild_tensor_v2", b"_rebuild_another"),
    "a storage of an unknown class": TENSORS.replace(b"FloatStorage", b"QuaintStorage"),
    "a stand-in with a list": b"ctorch\ndevice\n" + INTS + b"\x85R}X\1\0\0\0a" + TENSORS + b"sb",
    "a list many times over": b"](" + b"K\1" * MANY + b"eq\1](" + b"h\1" * 200_000 + b"e\x86",
    "a list in lists, many times over": b"](" + b"K\1" * MANY + b"eq\1" + b"](" + b"h\1" * 20 + b"eq\2](" + b"h\2" * 5
    + b"e\x87",
    "integers of any size": b"](" + b"\x8a\0\x8a\1\xff\x8a\3\0\0\x80\x8a\x08" + b"\0" * 7 + b"\x80J\xff\xff\xff\xff"
    + b"M\xff\xffe",
    "an integer that int64 does not hold": b"](K\1K\2K\3K\4\x8a\x09" + b"\0" * 7 + b"\x80\0e",
    "5,000 long integers": b"](" + (b"\x8a\x0a" + b"\1" * 10) * 5000 + b"e",
    "a list without its end": b"](K\1K\2K\3K\4K\5",
    "text that is not UTF-8": b"(X\1\0\0\0\xff" + INTS + b"t",
}  # fmt: skip

PACKED = {
    "integers", "tensors", "integers, and one more", "tensors, and one more", "tuples that share a slot",
    "another location", "integers of any size", "a stand-in with a list", "a list in lists, many times over",
    "shapes by name", "tensors by name", "tensors by name, and one more", "tensors by name, with a state",
    "tensors by name, with an empty state", "a state that is fetched", "a name that is fetched", "a dictionary twice",
    "a size that is fetched", "a tensor by name that is fetched", "a tensor by name of another size",
    "a storage with another key", "a key's slot that is filled anew", "parameters by name",
    "a dictionary in a stand-in",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_pickle_by_hand_is_read_or_refused_as_without_the_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "LONG_LIST", LONG)
    monkeypatch.setattr(header, "LARGE_PICKLE", 0)
    data = b"\x80\x02" + CASES[name] + b"."
    end = check_same(data)
    assert name not in PACKED or end == "packed"
    path = tmp_path / "f.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", data)
    for foreign in ("refuse", "inert"):
        with_engine = outcome(path, foreign)
        with monkeypatch.context() as patch:
            patch.setattr(header, "pack_pickle", lambda data, *, long_list: None)
            assert with_engine == outcome(path, foreign)


def outcome(path: Path, foreign: str) -> str:
    try:
        return content(with_lists(read_torch_file(path, foreign=foreign, columns=True).root))  # type: ignore[arg-type]
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def test_what_is_read_at_once_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickle as it is in the file is needed only to say what is wrong with it."""
    torch.save(elastic_state(9), tmp_path / "f.pt")
    times: list[int] = []
    read = header.read_pickle
    monkeypatch.setattr(header, "LONG_LIST", LONG)
    monkeypatch.setattr(header, "LARGE_PICKLE", 0)
    monkeypatch.setattr(header, "read_pickle", lambda path, **rest: times.append(1) or read(path, **rest))
    root: Any = read_torch_file(tmp_path / "f.pt", columns=True).root
    assert isinstance(root["base_optimizer_state"][0]["exp_avg"], TensorColumn) and len(times) == 1


@pytest.mark.parametrize(("large", "packed"), [(True, 1), (False, 0)])
def test_the_size_of_a_pickle_alone_says_who_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool, packed: int
) -> None:
    """Not what else the process has imported: a file is read in the same way everywhere."""
    import zeroelastic.executors.native_executor  # noqa: F401

    torch.save(elastic_state(2), tmp_path / "f.pt")
    sizes: list[int] = []
    monkeypatch.setattr(header, "pack_pickle", lambda data, **rest: sizes.append(len(data)))
    monkeypatch.setattr(header, "LARGE_PICKLE", 0 if large else 1 << 30)
    read_torch_file(tmp_path / "f.pt")
    assert len(sizes) == packed


def test_a_list_in_a_list_is_one_list_again() -> None:
    column = IntColumn(np.arange(5, dtype=np.int64))
    inner = [column, (column, 1)]
    tree: Any = with_lists({"a": inner, "b": inner})
    assert tree == {"a": [[*range(5)], ([*range(5)], 1)], "b": [[*range(5)], ([*range(5)], 1)]}
    assert tree["a"] is tree["b"] and tree["a"][0] is tree["a"][1][0]
