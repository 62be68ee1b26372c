"""Headers: extents that hold exactly a tensor's bytes, and payload untouched."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import raw
from torch_files import bytes_at, saved

from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.io import storage
from zeroelastic.io.paths import open_regular
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, Storage, Stub, TensorRef, read_torch_file, walk_refs


def test_extents_of_views_scalars_empties_and_parameters(tmp_path):
    base = torch.randn(100)
    with_attribute = torch.randn(5)
    with_attribute.note = "kept out"
    tensors = {
        "whole": base,
        "view": base[10:30],
        "matrix": base[40:60].view(4, 5),
        "last": base[99:],
        "scalar": torch.tensor(7.5),
        "scalar view": base[3],
        "empty": torch.empty(0),
        "empty view": base[50:50],
        "empty matrix": torch.empty(2, 0, 3),
        "one row": torch.randn(6, 1).t(),
        "grad": torch.randn(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "frozen parameter": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "attribute": with_attribute,
    }
    file = read_torch_file(saved(tmp_path / "f.pt", tensors))
    for name, tensor in tensors.items():
        ref = file.root[name]
        assert isinstance(ref, TensorRef), name
        assert ref.shape == tuple(tensor.shape) and ref.is_contiguous, name
        assert bytes_at(file, ref) == raw(tensor), name
    keys = {file.root[name].storage.key for name in ("whole", "view", "matrix", "last", "scalar view", "empty view")}
    assert len(keys) == 1, "views of one storage are stored once"


def test_what_is_not_contiguous_has_no_extent(tmp_path):
    base = torch.randn(4, 6)
    file = read_torch_file(saved(tmp_path / "f.pt", {"t": base.t(), "s": base[:, ::2], "e": base[0, :1].expand(3)}))
    for name in "tse":
        assert not file.root[name].is_contiguous
        with pytest.raises(CheckpointError, match=r"f\.pt: a tensor of shape .* is not contiguous"):
            file.extent(file.root[name])


@given(
    numel=st.integers(0, 50),
    views=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "uint8", "bool"]),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_views_of_any_storage(tmp_path, numel, views, dtype):
    base = torch.arange(numel).to(getattr(torch, dtype))
    tensors = [base, *(base[min(a, b) : max(a, b)] for a, b in views)]
    file = read_torch_file(saved(tmp_path / "v.pt", tensors))
    refs = list(walk_refs(file.root))
    assert [bytes_at(file, ref) for ref in refs] == [raw(tensor) for tensor in tensors]
    assert [bytes(file.read(ref)) for ref in refs] == [raw(tensor) for tensor in tensors]


class Holder:
    def __init__(self, *held):
        self.held = held


def test_tensors_in_unknown_objects_and_in_what_holds_itself_are_found(tmp_path):
    loop = []
    loop += [loop, Holder(torch.arange(2), loop)]
    value = {"loop": loop, "same": loop, torch.arange(4): "a key"}
    file = read_torch_file(saved(tmp_path / "f.pt", value), foreign="inert")
    assert sorted(ref.numel for ref in walk_refs(file.root)) == [2, 4]
    deep = next(walk_refs(file.root))
    for _ in range(5000):
        deep = [deep]
    assert [ref.numel for ref in walk_refs(deep)] == [2]


def test_containers_and_plain_values_come_back_as_they_were(tmp_path):
    value = {
        "ordered": OrderedDict([("b", 1), ("a", (2.5, None, True))]),
        "size": torch.Size([3, 4]),
        "numpy": [np.float64(1.5), np.float32(0.25), np.int64(-7), np.bool_(True), np.uint8(200)],
        "dtype": torch.bfloat16,
        "set": {1, 2},
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "big": 10**30,
        "text": "ünïcode",
    }
    root = read_torch_file(saved(tmp_path / "f.pt", value)).root
    assert root["ordered"] == value["ordered"] and list(root["ordered"]) == ["b", "a"]
    assert root["size"] == (3, 4)
    assert root["numpy"] == [1.5, 0.25, -7, True, 200]
    assert [type(v) for v in root["numpy"]] == [float, float, int, bool, int]
    assert root["dtype"] == DType("bfloat16")
    for key in ("set", "complex", "bytes", "big", "text"):
        assert root[key] == value[key]


@pytest.mark.parametrize(
    "value",
    [
        {frozenset({1}), ("a", torch.float32)},
        np.str_("a"),
        np.array(["a", None], dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(1, dtype=[("a", "i4")]),
        np.complex64(1j),
    ],
    ids=["set", "text", "objects", "dates", "records", "complex"],
)
def test_a_value_of_a_user_that_is_not_read_is_inert(tmp_path, value):
    """torch.save writes each; a save whose client state has one was refused, and what DeepSpeed saved not loaded."""
    read = read_torch_file(saved(tmp_path / "f.pt", {"value": value, "after": 1}), foreign="inert").root
    assert isinstance(read["value"], Stub) and read["after"] == 1


def test_a_big_endian_number_is_the_number(tmp_path):
    assert read_torch_file(saved(tmp_path / "f.pt", np.array(-5, dtype=">i4")[()])).root == -5


def test_every_dtype_by_name(tmp_path):
    names = [name for name in DTYPE_BYTES if hasattr(torch, name)]
    root = read_torch_file(saved(tmp_path / "f.pt", [getattr(torch, name) for name in names])).root
    assert root == [DType(name) for name in names]
    assert [DTYPE_BYTES[name] for name in names] == [getattr(torch, name).itemsize for name in names]


class ByName:
    """Pickles a member of an enumeration by its name, as Python 3.11.2 (that of Debian 12) does."""

    def __init__(self, member: Any) -> None:
        self.member = member

    def __reduce__(self) -> Any:
        return getattr, (type(self.member), self.member.name)


def test_deepspeed_objects_are_stubs_and_numbers(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    scalers = [
        LossScaler(scale=4.0),
        DynamicLossScaler(
            init_scale=2**10,
            scale_window=100,
            min_scale=1,
            delayed_shift=2,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
            dtype=torch.half,
        ),
    ]
    root = read_torch_file(saved(tmp_path / "f.pt", {"s": scalers, "z": ZeroStageEnum.weights})).root
    assert root["z"] == 3 and type(root["z"]) is int
    by_name = read_torch_file(saved(tmp_path / "n.pt", [ByName(member) for member in ZeroStageEnum])).root
    assert by_name == [int(member) for member in ZeroStageEnum] and {type(number) for number in by_name} == {int}
    for stub, scaler in zip(root["s"], scalers, strict=True):
        assert isinstance(stub, Stub) and not hasattr(stub, "cur_scale")
        assert (stub.module, stub.qualname) == ("deepspeed.runtime.fp16.loss_scaler", type(scaler).__name__)
        want = {k: DType("float16") if v is torch.half else v for k, v in vars(scaler).items()}
        assert stub.attributes == want
        assert "not loaded" in repr(stub)


def test_payload_is_never_read(tmp_path):
    path = saved(tmp_path / "big.pt", {"a": torch.zeros(8 << 20), "b": torch.tensor(3.0)})
    assert path.stat().st_size > 32 << 20
    before = io_counter("rchar")
    file = read_torch_file(path)
    file.extent(file.root["a"])
    file.read(file.root["b"])
    after = io_counter("rchar")
    assert 0 < file.header_bytes < 20_000
    assert after - before < 64 << 10
    assert after - before >= file.header_bytes - 1024, "header_bytes counts what was not read"


def io_counter(name: str) -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        key, _, value = line.partition(": ")
        if key == name:
            return int(value)
    pytest.skip("this kernel does not count I/O")


def test_header_bytes_grow_with_what_is_looked_up(tmp_path):
    file = read_torch_file(saved(tmp_path / "f.pt", [torch.ones(3), torch.ones(4)]))
    counts = [file.header_bytes]
    for ref in (*file.root, file.root[0]):
        file.extent(ref)
        counts.append(file.header_bytes)
    assert counts[0] < counts[1] < counts[2] == counts[3]


def test_a_local_file_is_opened_once_for_many_reads(tmp_path, monkeypatch):
    path = saved(tmp_path / "f.pt", [torch.full((i % 3 + 1,), float(i)) for i in range(100)])
    file = read_torch_file(path)
    expected = [(file.extent(ref), file.read(ref).tobytes()) for ref in file.root]
    counted = file.header_bytes
    file = read_torch_file(path)
    opened = []
    monkeypatch.setattr(storage, "open_regular", lambda path: opened.append(open_regular(path)) or opened[-1])
    with file.one_open():
        assert not opened
        assert [(file.extent(ref), file.read(ref).tobytes()) for ref in file.root] == expected
    (local,) = opened
    assert local.closed and file.header_bytes == counted
    monkeypatch.undo()
    assert file.read(file.root[5]).tobytes() == expected[5][1]
    with pytest.raises(ZeroDivisionError), file.one_open():
        raise ZeroDivisionError
    assert file.read(file.root[6]).tobytes() == expected[6][1]


def test_threads_read_one_file_at_the_same_time(tmp_path):
    path = saved(tmp_path / "f.pt", [torch.full((64,), float(i)) for i in range(40)])
    file = read_torch_file(path)

    def read(ref: TensorRef) -> list[float]:
        return [np.frombuffer(file.read(ref), dtype=np.float32).mean() for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, file.root)) == [[float(i)] * 50 for i in range(40)]


def test_a_storage_that_cannot_be_located_is_refused_where_it_is_needed(tmp_path):
    path = saved(tmp_path / "f.pt", [torch.ones(4) for _ in range(100)])
    data = bytearray(path.read_bytes())
    data[data.index(b"f/data/7") - 30] ^= 1  # the mark of the record's own header
    path.write_bytes(data)
    file = read_torch_file(path)
    file.locate(ref.storage.key for ref in file.root)
    for i, ref in enumerate(file.root):
        if i != 7:
            file.extent(ref)
    with pytest.raises(CheckpointError, match=r"f\.pt: no zip record at byte"):
        file.extent(file.root[7])
    larger = Storage(file.root[0].storage.key, "float32", 5)
    with pytest.raises(CheckpointError, match="has 16 bytes; 5 elements of float32 need 20"):
        file.storage_extent(larger)


def test_user_objects_are_refused_by_name_or_stay_inert(tmp_path):
    path = saved(tmp_path / "f.pt", {"user": UserThing(5), "list": UserList([1, 2]), "lr": 0.5, "t": torch.ones(2)})
    with pytest.raises(UnsafePickleError, match=r"f\.pt: the pickle names .*UserThing, which is not on the allow-list"):
        read_torch_file(path)
    file = read_torch_file(path, foreign="inert")
    user = file.root["user"]
    assert isinstance(user, Stub) and user.qualname == "UserThing" and user.attributes == {"value": 5}
    assert file.root["list"].items == [1, 2]
    assert file.root["lr"] == 0.5 and bytes_at(file, file.root["t"]) == raw(torch.ones(2))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_global_has_the_name_of_today_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"steps": range(3), "error": ValueError("text")}, path, pickle_protocol=protocol)
    root = read_torch_file(path, foreign="inert").root
    assert isinstance(root, dict)
    assert [f"{value.module}.{value.qualname}" for value in root.values()] == [
        "builtins.range",
        "builtins.ValueError",
    ]


class UserThing:
    def __init__(self, value: int) -> None:
        self.value = value


class UserList(list):
    pass


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_kinds_that_are_not_read_stay_inert(tmp_path):
    value = {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "t": torch.ones(2)}
    path = saved(tmp_path / "f.pt", value)
    with pytest.raises(UnsafePickleError, match="_rebuild_qtensor"):
        read_torch_file(path)
    file = read_torch_file(path, foreign="inert")
    assert isinstance(file.root["q"], Stub)
    assert bytes_at(file, file.root["t"]) == raw(torch.ones(2))


def test_a_default_dict_is_a_container_without_its_factory(tmp_path):
    assert read_torch_file(saved(tmp_path / "f.pt", defaultdict(list, a=[1])), foreign="inert").root == {"a": [1]}
