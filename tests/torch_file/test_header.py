"""Headers: extents that hold exactly a tensor's bytes, payload untouched, and hostile files refused."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import raw

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UnsafePickleError
from zeroelastic.io.storage import LocalFile
from zeroelastic.torch_file import header
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, StorageRef, Stub, TensorRef, read_torch_file, walk_refs


def saved(path: Path, value: object, **kwargs: object) -> Path:
    torch.save(value, path, **kwargs)
    return path


def bytes_at(file, ref: TensorRef) -> bytes:
    extent = file.extent(ref)
    assert extent.offset >= 0 and extent.offset + extent.nbytes <= file.size
    return extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes]


def archive(path: Path, pickled: bytes, *, storages=(), name="archive", compression=zipfile.ZIP_STORED) -> Path:
    """A zip archive laid out as torch.save lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as out:
        out.writestr(f"{name}/data.pkl", pickled)
        out.writestr(f"{name}/byteorder", b"little")
        for key, data in storages:
            out.writestr(f"{name}/data/{key}", data)
        out.writestr(f"{name}/version", b"3\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """Whatever the files of this module claim, reading them takes no memory to speak of."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmHWM")
    yield
    assert memory("VmHWM") - before < 600 << 20


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


# ---- what torch.save writes ----


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
    monkeypatch.setattr(header, "read_range", lambda *_: pytest.fail("the file was opened again"))
    monkeypatch.setattr(header, "LocalFile", lambda path: opened.append(LocalFile(path)) or opened[-1])
    with file.one_open():
        assert not opened
        assert [(file.extent(ref), file.read(ref).tobytes()) for ref in file.root] == expected
    (local,) = opened
    assert local.path == path and local._file.closed and file.header_bytes == counted
    monkeypatch.undo()
    assert file.read(file.root[5]).tobytes() == expected[5][1]
    with pytest.raises(ZeroDivisionError), file.one_open():
        raise ZeroDivisionError
    assert file.read(file.root[6]).tobytes() == expected[6][1]


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
    larger = StorageRef(file.root[0].storage.key, "float32", 5)
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


# ---- files that are not what they should be ----


def test_a_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match=r"nowhere\.pt: no such file"):
        read_torch_file(tmp_path / "nowhere.pt")
    with pytest.raises(FileNotFoundError):
        read_torch_file(tmp_path / "nowhere.pt")


def test_a_directory_is_not_a_file(tmp_path):
    with pytest.raises(UnreadableError, match="cannot be read"):
        read_torch_file(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty. The save did not finish"),
        (b"PK", "is not a torch.save file"),
        (b"\x93NUMPY", "is not a torch.save file"),
        (b"PK\x03\x04", "truncated or damaged"),
        (b"PK\x03\x04" + b"\0" * 500, "truncated or damaged"),
    ],
)
def test_literal_bytes_that_are_no_checkpoint(tmp_path, data, message):
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)


def test_the_old_format_is_refused_with_the_way_out(tmp_path):
    path = saved(tmp_path / "old.pt", {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old format.*checkpoint_serialization.*torch\.save\(torch\.load"):
        read_torch_file(path)


def test_a_file_made_of_literal_bytes(tmp_path):
    """One archive written out by hand: this is the format, whatever torch does."""
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"  # persistent id
    )
    pickled = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00K\x02\x85K\x01\x85\x89}tR."
    payload = struct.pack("<2f", 1.0, -2.0)

    def record(name: bytes, data: bytes, at: int) -> tuple[bytes, bytes]:
        crc = zipfile.crc32(data)
        local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 0, 0, 0, 0, crc, len(data), len(data), len(name), 4)
        entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 0, 0, 0, 0, 0, crc, len(data), len(data),
                            len(name), 0, 0, 0, 0, 0, at)  # fmt: skip
        return local + name + b"FB\0\0" + data, entry + name

    first, first_entry = record(b"a/data.pkl", pickled, 0)
    second, second_entry = record(b"a/data/0", payload, len(first))
    third, third_entry = record(b"a/version", b"3\n", len(first) + len(second))
    directory = first_entry + second_entry + third_entry
    records = first + second + third
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 3, 3, len(directory), len(records), 0)
    path = tmp_path / "literal.pt"
    path.write_bytes(records + directory + end)
    file = read_torch_file(path)
    assert file.root == TensorRef(StorageRef("0", "float32", 2), "float32", 0, (2,), (1,))
    extent = file.extent(file.root)
    assert (extent.offset, extent.nbytes) == (len(first) + 30 + len(b"a/data/0") + 4, 8)
    assert bytes_at(file, file.root) == payload
    assert torch.equal(torch.load(path), torch.tensor([1.0, -2.0])), "and torch reads it so too"


# ---- hostile pickles ----


class Reduce:
    """Pickles as a call."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def gadget(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls ``module.name(argument)``."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X" + struct.pack("<I", len(argument)) + argument.encode() \
        + b"\x85R."  # fmt: skip


def gadgets(marker: Path) -> dict[str, bytes]:
    touch = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w').close()"
    nested = io.BytesIO()
    torch.save(Reduce(os.system, touch), nested)
    return {
        "os.system": pickle.dumps({"a": Reduce(os.system, touch)}, 2),
        "subprocess": pickle.dumps(Reduce(subprocess.call, ["touch", str(marker)]), 2),
        "eval": pickle.dumps(Reduce(eval, code), 2),
        "exec": pickle.dumps([Reduce(exec, code)], 2),
        "python2 eval": gadget("__builtin__", "eval", code),
        "getattr": gadget("builtins", "getattr", "x"),
        "attribute of an enumeration": b"\x80\x02cbuiltins\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\n"
        b"X\x05\x00\x00\x00__mro\x86R.",
        "dotted name": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93X" + struct.pack("<I", len(code)) + code.encode()
        + b"\x85R.",
        "dotted attribute": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93X" + struct.pack("<I", len(touch))
        + touch.encode() + b"\x85R.",
        "attribute of an allowed name": b"\x80\x04\x8c\x0bcollections\x8c\x18OrderedDict.__init__.mro\x93.",
        "torch.load": gadget("torch.serialization", "load", str(marker)),
        "storage from bytes": gadget("torch.storage", "_load_from_bytes", nested.getvalue().hex()),
        "import": gadget("importlib", "import_module", "antigravity"),
        "pty": gadget("pty", "spawn", touch),
        "numpy reconstruct": gadget("numpy.core.multiarray", "_reconstruct", "x"),
        "numpy pickle": gadget("numpy", "load", str(marker)),
        "INST": b"(X" + struct.pack("<I", len(touch)) + touch.encode() + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nX" + struct.pack("<I", len(touch)) + touch.encode() + b"o.",
        "NEWOBJ": b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(touch)) + touch.encode() + b"\x85\x81.",
        "extension code": b"\x80\x02\x82\x01.",
        "functools.partial": gadget("functools", "partial", "x"),
        "own internals": gadget("zeroelastic.torch_file.header", "read_torch_file", str(marker)),
        "a scaler's neighbour": gadget("deepspeed.runtime.fp16.loss_scaler", "to_python_float", "x"),
    }  # fmt: skip


OPCODES = ("INST", "OBJ", "extension code")


@pytest.mark.parametrize("name", gadgets(Path("x")))
def test_malicious_pickles_run_nothing(tmp_path, name):
    marker = tmp_path / "ran"
    path = archive(tmp_path / "evil.pt", gadgets(marker)[name])
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, UnsafePickleError)
    assert ("which torch.save does not write" if name in OPCODES else "not on the allow-list") in str(caught.value)
    try:
        root = read_torch_file(path, foreign="inert").root
    except CheckpointError:
        pass
    else:
        while isinstance(root, (dict, list)):
            root = next(iter(root.values())) if isinstance(root, dict) else root[0]
        assert isinstance(root, Stub) or (isinstance(root, type) and issubclass(root, Stub))
    assert not marker.exists()


def test_a_real_save_of_a_malicious_object(tmp_path):
    marker = tmp_path / "ran"
    path = saved(tmp_path / "evil.pt", {"w": torch.ones(2), "x": Reduce(os.system, f"touch {marker}")})
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        read_torch_file(path)
    file = read_torch_file(path, foreign="inert")
    assert file.root["x"].args == (f"touch {marker}",) and not marker.exists()


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08tQ"


def tensor_pickle(offset=b"K\x00", size=b"K\x08\x85", stride=b"K\x01\x85", storage=STORAGE, build=b"") -> bytes:
    call = b"(" + storage + offset + size + stride + b"\x89}tR"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + call + build + b"."


PAYLOAD = (("0", b"\1" * 32),)


def test_the_handmade_tensor_is_good_before_it_is_bent(tmp_path):
    file = read_torch_file(archive(tmp_path / "f.pt", tensor_pickle(), storages=PAYLOAD))
    assert bytes_at(file, file.root) == b"\1" * 32


def long1(value: int) -> bytes:
    data = value.to_bytes(20, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


BENT_TENSORS = {
    "offset behind the storage": {"offset": b"K\x01"},
    "offset negative": {"offset": b"J\xff\xff\xff\xff"},
    "offset huge": {"offset": long1(1 << 100)},
    "offset a float": {"offset": b"G\x00\x00\x00\x00\x00\x00\x00\x00"},
    "offset True": {"offset": b"\x88"},
    "size huge": {"size": long1(1 << 63) + b"\x85"},
    "size negative": {"size": b"J\xff\xff\xff\xff\x85"},
    "size a list": {"size": b"]"},
    "stride negative": {"stride": b"J\xff\xff\xff\xff\x85"},
    "stride huge": {"stride": long1(1 << 61) + b"\x85"},
    "stride missing": {"stride": b")"},
    "storage None": {"storage": b"N"},
    "storage a string": {"storage": b"X\x01\x00\x00\x00a"},
    "key with a path": {"storage": STORAGE.replace(b"X\x01\x00\x00\x000", b"X\x04\x00\x00\x00../a")},
    "kind not a storage": {"storage": STORAGE.replace(b"FloatStorage", b"float32")},
    "numel negative": {"storage": STORAGE.replace(b"K\x08", b"J\xff\xff\xff\xff")},
    "numel a float": {"storage": STORAGE.replace(b"K\x08", b"G\x00\x00\x00\x00\x00\x00\x00\x00")},
    "not a storage id": {"storage": b"X\x01\x00\x00\x00aQ"},
    "numel larger than the record": {"storage": STORAGE.replace(b"K\x08", b"K\x09")},
    "numel smaller than the record": {"storage": STORAGE.replace(b"K\x08", b"K\x07"), "size": b"K\x07\x85"},
    "no such record": {"storage": STORAGE.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001")},
    "state set afterwards": {"build": b"](ctorch\nfloat32\nX\x03\x00\x00\x00bad\x8a\x01\xf0K\x01\x85K\x01\x85eb"},
}


@pytest.mark.parametrize("name", BENT_TENSORS)
def test_bent_tensors_are_refused(tmp_path, name):
    path = archive(tmp_path / "f.pt", tensor_pickle(**BENT_TENSORS[name]), storages=PAYLOAD)
    with pytest.raises(CheckpointError) as caught:
        file = read_torch_file(path)
        for ref in walk_refs(file.root):
            file.extent(ref)
        pytest.fail(f"accepted {file.root}")
    assert str(path) in str(caught.value)


ALLOWED_NAMES = ("torch FloatStorage", "torch float32", "torch Size", "torch._utils _rebuild_tensor_v2",
                 "numpy dtype", "collections defaultdict", "torch._utils _rebuild_parameter",
                 "deepspeed.runtime.zero.config ZeroStageEnum")  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED_NAMES)
@pytest.mark.parametrize("foreign", ["refuse", "inert"])
def test_a_file_cannot_change_how_the_next_one_is_read(tmp_path, name, foreign):
    """BUILD sets the state of whatever is on the stack: never that of the reader's own objects."""
    good = saved(tmp_path / "good.pt", [torch.ones(3), torch.float32, torch.Size([2]), np.float64(1.5)])
    want = repr(read_torch_file(good).root)
    text = lambda s: b"X" + struct.pack("<I", len(s)) + s  # noqa: E731
    named = b"c" + name.replace(" ", "\n").encode() + b"\n"
    for state in (
        b"}" + text(b"dtype") + text(b"int8") + b"s",
        b"]" + text(b"int8") + b"a",
        b"N}" + text(b"__defaults__") + b"K\x01\x85s\x86",
        b"N}" + text(b"call") + b"Ns\x86",
    ):
        path = archive(tmp_path / "bad.pt", b"\x80\x02" + named + state + b"b.")
        with pytest.raises(CheckpointError):
            read_torch_file(path, foreign=foreign)
    assert repr(read_torch_file(good).root) == want


def test_a_large_honest_memo_is_read(tmp_path):
    """More objects than one byte counts: slots are named with four."""
    value = [str(i) for i in range(70_000)]
    assert read_torch_file(saved(tmp_path / "f.pt", value)).root == value


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_every_protocol_that_python_writes(tmp_path, protocol):
    value = {"a": [1, -1, 300, 70_000, 1 << 40, -(1 << 80), 1.5, None, True, False, "é" * 300, b"x" * 300, (), (1,)],
             "b": [(1, 2), (1, 2, 3), (1, 2, 3, 4), {1, 2}, {}, [], "x" * 70_000, b"\0" * 70_000, 1 << 3000],
             }  # fmt: skip
    tensors = {"t": torch.ones(2), **value}
    file = read_torch_file(saved(tmp_path / "f.pt", tensors, pickle_protocol=protocol))
    assert {key: file.root[key] for key in value} == value and bytes_at(file, file.root["t"]) == raw(torch.ones(2))


def peak_of(call) -> None:
    """Run with a limit on what Python may allocate: 64 MiB."""
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20


# ---- hostile archives ----


def test_compressed_records_are_refused(tmp_path):
    path = archive(tmp_path / "f.pt", tensor_pickle(), storages=PAYLOAD, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(path)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("a/data.pkl", tensor_pickle())
        out.writestr("a/data/0", b"\1" * 32, compress_type=zipfile.ZIP_DEFLATED)
    file = read_torch_file(path)
    with pytest.raises(CheckpointError, match="The file is damaged"):
        file.extent(file.root)


@pytest.mark.parametrize("record", ["data.pkl", "byteorder"])
def test_zip_bombs_do_not_expand(tmp_path, record):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        with out.open(f"a/{record}", "w") as bomb:
            for _ in range(100):
                bomb.write(b"\0" * (1 << 20))
        if record != "data.pkl":
            out.writestr("a/data.pkl", b"\x80\x02N.")
    assert path.stat().st_size < 1 << 20, "100 MiB in less than one"

    def read() -> None:
        with pytest.raises(CheckpointError, match="is compressed or larger"):
            read_torch_file(path)

    peak_of(read)


def test_two_records_of_one_name_are_refused(tmp_path):
    path = tmp_path / "f.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("a/data.pkl", tensor_pickle())
        out.writestr("a/data/0", b"\1" * 32)
        with pytest.warns(UserWarning, match="Duplicate name"):
            out.writestr("a/data/0", b"\2" * 32)
    with pytest.raises(CheckpointError, match="two records are named a/data/0"):
        read_torch_file(path)


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_archives_in_one_are_refused(tmp_path, first):
    path = tmp_path / "f.pt"
    with zipfile.ZipFile(path, "w") as out:
        for name in sorted("ab", reverse=first == "b"):
            out.writestr(f"{name}/data.pkl", tensor_pickle())
            out.writestr(f"{name}/data/0", name.encode() * 32)
    with pytest.raises(CheckpointError, match="two records"):
        read_torch_file(path)


def test_an_archive_without_a_pickle_is_refused(tmp_path):
    path = tmp_path / "f.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("a/model.json", "{}")
    with pytest.raises(CheckpointError, match=r"without data\.pkl"):
        read_torch_file(path)


def test_a_big_endian_file_is_refused(tmp_path):
    path = tmp_path / "f.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("a/data.pkl", b"\x80\x02N.")
        out.writestr("a/byteorder", b"big")
    with pytest.raises(CheckpointError, match="big-endian"):
        read_torch_file(path)


DIRECTORY = struct.Struct("<4sHHHHHHIIIHHHHHII")


def rewrite_entry(path: Path, name: str, **fields: int) -> None:
    """Change numbers of one entry of the central directory in place."""
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    columns = {"flags": 3, "compress_size": 8, "file_size": 9, "extra": 11, "header_offset": 16}
    while data[at : at + 4] == b"PK\x01\x02":
        entry = list(DIRECTORY.unpack_from(data, at))
        text = data[at + 46 : at + 46 + entry[10]].decode()
        if text == name:
            for field, value in fields.items():
                entry[columns[field]] = value
            DIRECTORY.pack_into(data, at, *entry)
            path.write_bytes(data)
            return
        at += 46 + entry[10] + entry[11] + entry[12]
    raise KeyError(name)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("archive/data/0", {"file_size": 64, "compress_size": 64}),
        ("archive/data/0", {"file_size": 31, "compress_size": 31}),
        ("archive/data/0", {"file_size": 2**31, "compress_size": 2**31}),
        ("archive/data/0", {"compress_size": 2**31}),
        ("archive/data/0", {"header_offset": 5}),
        ("archive/data/0", {"header_offset": 2**31}),
        ("archive/data/0", {"header_offset": 2**32 - 2}),
        ("archive/data.pkl", {"file_size": 2**31, "compress_size": 2**31}),
        ("archive/data.pkl", {"file_size": 2**32 - 2}),
        ("archive/data.pkl", {"compress_size": 2**32 - 2}),
        ("archive/data.pkl", {"header_offset": 2**31}),
        ("archive/data.pkl", {"flags": 1}),
        ("archive/data.pkl", {"flags": 1 << 5}),
        ("archive/data.pkl", {"extra": 60000}),
    ],
)
def test_lying_directories_are_refused(tmp_path, name, fields):
    path = archive(tmp_path / "f.pt", tensor_pickle(), storages=PAYLOAD)
    rewrite_entry(path, name, **fields)

    def read() -> None:
        with pytest.raises(CheckpointError) as caught:
            file = read_torch_file(path)
            file.extent(file.root)
        assert str(path) in str(caught.value)

    peak_of(read)


def test_zip64_numbers_beyond_the_file_are_refused(tmp_path):
    """A record whose place and size are given in 64 bits, as far out as they go."""
    for offset in (1 << 62, (1 << 64) - 1, 1 << 63):
        path = archive(tmp_path / "f.pt", tensor_pickle(), storages=PAYLOAD)
        data = path.read_bytes()
        at = data.index(b"archive/data/0", data.index(b"PK\x01\x02")) - 46
        entry = list(DIRECTORY.unpack_from(data, at))
        extra = struct.pack("<HHQ", 1, 8, offset)
        entry[16], entry[11] = 0xFFFFFFFF, len(extra)
        name = data[at + 46 : at + 46 + entry[10]]
        data = data[:at] + DIRECTORY.pack(*entry) + name + extra + data[at + 46 + len(name) :]
        end = data.rindex(b"PK\x05\x06")
        fields = list(struct.unpack_from("<4sHHHHIIH", data, end))
        fields[5] += len(extra)
        path.write_bytes(data[:end] + struct.pack("<4sHHHHIIH", *fields))
        with pytest.raises(CheckpointError):
            file = read_torch_file(path)
            file.extent(file.root)


def optimizer_file() -> bytes:
    out = io.BytesIO()
    flat = torch.arange(40, dtype=torch.float32)
    state = {
        "zero_stage": 3,
        "partition_count": 2,
        "fp32_flat_groups": [flat],
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": flat.clone(), "exp_avg_sq": flat.bfloat16()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
        "size": torch.Size([2, 3]),
        "np": np.float64(1.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save({"optimizer_state_dict": state, "ds_config": {"a": [1, 2]}}, out)
    return out.getvalue()


GOOD = optimizer_file()


@given(cut=st.integers(0, len(GOOD) - 1))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_anywhere_it_is_a_checkpoint_error(tmp_path, cut):
    path = tmp_path / "cut.pt"
    path.write_bytes(GOOD[:cut])
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)


def test_read_notices_a_file_that_shrank(tmp_path):
    path = saved(tmp_path / "f.pt", torch.arange(1000))
    file = read_torch_file(path)
    extent = file.extent(file.root)
    os.truncate(path, extent.offset + 16)
    with pytest.raises(CheckpointError, match=f"ends at byte {extent.offset + 16}. The file is truncated"):
        file.read(file.root)
