"""Files that are no checkpoint, or claim what is not so, are refused when their header is read, and run nothing."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_files import process_status, reset_peak
from synthetic import raw
from torch_files import STORAGE, archive, bytes_at, integer, named, saved, text

from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UnsafePickleError
from zeroelastic.torch_file.header import Stub, TensorRef, read_torch_file, read_tree, walk_refs


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """Whatever the files of this module claim, reading them takes no memory to speak of."""
    reset_peak()
    before = process_status("VmHWM")
    yield
    assert process_status("VmHWM") - before < 600 << 20


# ---- files that are not what they should be ----


def test_a_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match=r"nowhere\.pt: no such file"):
        read_torch_file(tmp_path / "nowhere.pt")
    with pytest.raises(FileNotFoundError):
        read_tree(tmp_path / "nowhere.pt")


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
    assert file.root == TensorRef(file.root.storage, "float32", 0, (2,), (1,))
    assert (file.root.storage.key, file.root.storage.dtype, file.root.storage.numel) == ("0", "float32", 2)
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


def called(module: str, name: str, argument: str) -> bytes:
    return named(module, name) + text(argument) + b"\x85R."


def gadgets(marker: Path) -> dict[str, bytes]:
    """Pickles that call something, which would leave a file behind where they can."""
    touch = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w').close()"
    nested = io.BytesIO()
    torch.save(Reduce(os.system, touch), nested)
    system = named("os", "system")
    return {
        "os.system": pickle.dumps({"a": Reduce(os.system, touch)}, 2),
        "subprocess": pickle.dumps(Reduce(subprocess.call, ["touch", str(marker)]), 2),
        "eval": pickle.dumps(Reduce(eval, code), 2),
        "exec": pickle.dumps([Reduce(exec, code)], 2),
        "python2 eval": called("__builtin__", "eval", code),
        "getattr": called("builtins", "getattr", "x"),
        "attribute of an enumeration": named("builtins", "getattr")
        + named("deepspeed.runtime.zero.config", "ZeroStageEnum") + text("__mro") + b"\x86R.",
        "attribute of an attribute": named("builtins", "getattr") + named("os", "path") + text("os") + b"\x86R.",
        "attrgetter": named("operator", "attrgetter") + text("system") + b"\x85R" + named("os", "path") + b"\x85R.",
        "dotted name": b"\x8c\x08builtins\x8c\x04eval\x93" + text(code) + b"\x85R.",
        "dotted attribute": b"\x8c\x05torch\x8c\x09os.system\x93" + text(touch) + b"\x85R.",
        "attribute by a dotted name": b"\x8c\x05torch\x8c\x10_utils.os.system\x93.",
        "attribute of an allowed name": b"\x8c\x0bcollections\x8c\x18OrderedDict.__init__.mro\x93.",
        "torch.load": called("torch.serialization", "load", str(marker)),
        "storage from bytes": called("torch.storage", "_load_from_bytes", nested.getvalue().hex()),
        "import": called("importlib", "import_module", "antigravity"),
        "pty": called("pty", "spawn", touch),
        "numpy reconstruct": called("numpy.core.multiarray", "_reconstruct", "x"),
        "numpy pickle": called("numpy", "load", str(marker)),
        "INST": b"(" + text(touch) + b"ios\nsystem\n.",
        "OBJ": b"(" + system + text(touch) + b"o.",
        "NEWOBJ": system + text(touch) + b"\x85\x81.",
        "a function made of code": named("types", "FunctionType") + b")\x81.",
        "extension code": b"\x82\x01.",
        "copyreg": named("copyreg", "_reconstructor") + system + b"\x85R.",
        "functools.partial": called("functools", "partial", "x"),
        "state of a partial": named("functools", "partial") + system + b"\x85R" + b"(" + system + text(touch)
        + b"\x85}Nt" + b"b.",
        "a rebuild that calls": named("torch._tensor", "_rebuild_from_type_v2") + b"(" + system + b"N" + text(touch)
        + b"\x85Nt" + b"R.",
        "own internals": called("zeroelastic.torch_file.header", "read_torch_file", str(marker)),
        "a scaler's neighbour": called("deepspeed.runtime.fp16.loss_scaler", "to_python_float", "x"),
    }  # fmt: skip


OPCODES = ("INST", "OBJ", "extension code")


@pytest.mark.parametrize("name", gadgets(Path("x")))
def test_malicious_pickles_run_nothing(tmp_path, name):
    marker, pickled = tmp_path / "ran", gadgets(tmp_path / "ran")[name]
    path = archive(tmp_path / "evil.pt", pickled if pickled[:1] == b"\x80" else b"\x80\x04" + pickled)
    with pytest.raises(UnsafePickleError) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    assert ("which torch.save does not write" if name in OPCODES else "not on the allow-list") in str(caught.value)
    with contextlib.suppress(CheckpointError):
        read_tree(path)
    with contextlib.suppress(CheckpointError):
        root = read_torch_file(path, foreign="inert").root
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


def tensor_pickle(offset=b"K\x00", size=b"K\x08\x85", stride=b"K\x01\x85", storage=STORAGE, build=b"") -> bytes:
    call = b"(" + storage + offset + size + stride + b"\x89}tR"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + call + build + b"."


PAYLOAD = (("0", b"\1" * 32),)


def test_the_handmade_tensor_is_good_before_it_is_bent(tmp_path):
    file = read_torch_file(archive(tmp_path / "f.pt", tensor_pickle(), storages=PAYLOAD))
    assert bytes_at(file, file.root) == b"\1" * 32


BENT_TENSORS = {
    "offset behind the storage": {"offset": b"K\x01"},
    "offset negative": {"offset": b"J\xff\xff\xff\xff"},
    "offset huge": {"offset": integer(1 << 100)},
    "offset a float": {"offset": b"G\x00\x00\x00\x00\x00\x00\x00\x00"},
    "offset True": {"offset": b"\x88"},
    "size huge": {"size": integer(1 << 63) + b"\x85"},
    "size negative": {"size": b"J\xff\xff\xff\xff\x85"},
    "size a list": {"size": b"]"},
    "stride negative": {"stride": b"J\xff\xff\xff\xff\x85"},
    "stride huge": {"stride": integer(1 << 61) + b"\x85"},
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

    for state in (
        b"}" + text("dtype") + text("int8") + b"s",
        b"]" + text("int8") + b"a",
        b"N}" + text("__defaults__") + b"K\x01\x85s\x86",
        b"N}" + text("call") + b"Ns\x86",
    ):
        path = archive(tmp_path / "bad.pt", b"\x80\x02" + named(*name.split()) + state + b"b.")
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


RECORDS = {
    "twice": ([("a/data.pkl", b"N."), ("a/data/0", b"1"), ("a/data/0", b"2")], "two records are named a/data/0"),
    "two archives": ([("a/data.pkl", b"N."), ("b/data.pkl", b"N.")], "two records"),
    "no pickle": ([("a/model.json", b"{}")], r"without data\.pkl"),
    "big-endian": ([("a/data.pkl", b"N."), ("a/byteorder", b"big")], "big-endian"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", RECORDS)
def test_archives_with_other_records_are_refused(tmp_path, name):
    records, said = RECORDS[name]
    with zipfile.ZipFile(tmp_path / "f.pt", "w") as out:
        for record, data in records:
            out.writestr(record, data)
    with pytest.raises(CheckpointError, match=rf"f\.pt: .*{said}"):
        read_torch_file(tmp_path / "f.pt")


def test_overlapping_records_are_refused(tmp_path):
    """Entries of the directory that point at the same bytes would make a small file claim to be a large one."""
    path = archive(tmp_path / "f.pt", b"\x80\x02N.", storages=(("0", bytes(64)), ("1", bytes(64))))
    with zipfile.ZipFile(path) as file:
        offset = file.getinfo("archive/data/0").header_offset
    rewrite_entry(path, "archive/data/1", header_offset=offset)
    with pytest.raises(CheckpointError, match=r"f\.pt: two records overlap at byte"):
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
