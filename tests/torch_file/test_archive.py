"""A torch.save file that is read as a tree and written again loads as the same objects; no code of it is run."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import errno
import functools
import os
import pickle
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_files import STORAGE, archive, named, saved, text

from zeroelastic.errors import CheckpointError, UnsafePickleError, UnsupportedError
from zeroelastic.executors.dispatch import CopyTable, move_segments
from zeroelastic.io.paths import local_paths
from zeroelastic.torch_file import archive as writer
from zeroelastic.torch_file.archive import Archive, write_tree
from zeroelastic.torch_file.header import read_torch_file, read_tree
from zeroelastic.torch_file.tree import Dict, Size, Storage, Stub, entry, new_global, new_storage, pairs_of, tensor

GOLDEN = sorted(places.GOLDEN.glob("*/*/*.pt"))


class Colour(enum.Enum):
    RED = 1


@dataclass
class Progress:
    step: int
    best: dict[str, float]


class Outer:
    class Inner:
        """Its name has a dot in it, which protocol 4 writes as it is."""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Outer.Inner)

    @staticmethod
    def make(value: int) -> int:
        return value


class Maker:
    """Pickled as what a call of a partial object gives."""

    def __reduce__(self) -> Any:
        return functools.partial(complex, 1.0), (2.0,)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and (self.a, self.b) == (other.a, other.b)


class ListOf(list):
    pass


def rewrite(path: Path, target: Path) -> None:
    """Read the tree of a file and write it to another, payload and all."""
    made = Archive(target, read_tree(path))
    rows = [(s.extent.offset, made.offsets[s], s.nbytes) for s in made.storages if s.extent and s.nbytes]
    src, dst, nbytes = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)) if rows else (
        np.zeros(0, dtype=np.int64),
    ) * 3  # fmt: skip
    zeros = np.zeros(len(rows), dtype=np.int64)
    move_segments(CopyTable(zeros, src, zeros, dst, nbytes), local_paths([path]), [target])
    data = target.read_bytes()
    made.finish({s: zlib.crc32(data[at : at + s.nbytes]) for s, at in made.offsets.items()})


def same(a: Any, b: Any) -> bool:
    """Deep equality that looks into tensors and arrays bit for bit."""
    if isinstance(a, torch.Tensor):
        raw = [x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x for x in (a, b)]
        return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(*raw)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: "/".join(path.parts[-3:]))
def test_what_deepspeed_wrote_is_the_same_after_being_rewritten(path: Path, tmp_path: Path) -> None:
    rewrite(path, tmp_path / path.name)
    was, now = (torch.load(p, weights_only=False) for p in (path, tmp_path / path.name))
    scaler = was.get("optimizer_state_dict", {}).pop("loss_scaler", None)
    if scaler is not None:
        other = now["optimizer_state_dict"].pop("loss_scaler")
        assert type(other) is type(scaler) and vars(other) == vars(scaler)
    assert same(was, now)


def values() -> dict[str, Any]:
    shared = torch.arange(10.0)
    loop: list[Any] = [1]
    loop.append((2, loop))
    return {
        "views": [shared[2:5], shared[::2], shared.view(2, 5).t(), torch.tensor(3), torch.empty(0, 4)],
        "shared": (shared, shared),
        "kinds": [torch.ones(3).to(d) for d in (torch.bfloat16, torch.half, torch.int8, torch.bool, torch.double)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "numbers": [0, 255, 256, 65536, -1, 2**31, -(2**31), 2**63, -(2**64), 1e300, float("nan"), float("-inf")],
        "text": ["", "a", "ä\n\x00", "a", "x" * 300, "\ud800"],
        "bytes": [b"", b"\x00\xff\n"],
        "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, {1: 2, "a": (None, True, False)}],
        "sets": [{1, 2}, frozenset("ab"), bytearray(b"xy")],
        "many": list(range(2500)),
        "wide": {str(i): i for i in range(2500)},
        "loop": loop,
        "stdlib": [Counter("abb"), deque([1, 2], 5), OrderedDict(a=1), datetime.timedelta(1), decimal.Decimal("1.5")],
        "defaultdict": defaultdict(list, a=[1]),
        "foreign": [
            Colour.RED,
            Progress(3, {"loss": 1.5}),
            Slotted(),
            Outer.Inner(),
            argparse.Namespace(lr=1e-3),
            ListOf([1, 2]),
        ],
        "fraction": Fraction(1, 3),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "numpy": [np.float64(1.5), np.arange(3), np.random.RandomState(1).get_state()],
        "class": Progress,
        "called object": Maker(),
        "function": zlib.crc32,
    }


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(values()))
def test_any_object_that_torch_saves_is_the_same_after_being_rewritten(
    name: str, protocol: int, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.pt", {name: values()[name]}, pickle_protocol=protocol)
    rewrite(path, tmp_path / "b.pt")
    assert list(read_torch_file(path, foreign="inert").root) == [name], "and it is inert for who only reads"
    now = torch.load(tmp_path / "b.pt", weights_only=False)[name]
    if name == "loop":
        assert now[1][1] is now and now[0] == 1
    elif name == "called object":
        assert now == 1 + 2j
    else:
        assert same(now, values()[name])


def test_sharing_is_kept(tmp_path: Path) -> None:
    base, twice = torch.arange(6.0), [1]
    path = saved(tmp_path / "a.pt", {"x": base[:3], "y": base[3:], "l": [twice, twice]})
    rewrite(path, tmp_path / "b.pt")
    now = torch.load(tmp_path / "b.pt")
    assert now["x"].untyped_storage().data_ptr() == now["y"].untyped_storage().data_ptr()
    assert now["l"][0] is now["l"][1]
    assert len([s for s in zipfile.ZipFile(tmp_path / "b.pt").namelist() if "/data/" in s and "serial" not in s]) == 1


class Boom:
    """Whoever loads it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_run_or_imported(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"boom": Boom(tmp_path / "was-run")})
    rewrite(path, tmp_path / "b.pt")
    boom = entry(read_tree(tmp_path / "b.pt"), "boom")
    assert isinstance(boom, Stub) and boom.qualname == "mkdir" and not (tmp_path / "was-run").exists()
    torch.load(tmp_path / "b.pt", weights_only=False)
    assert (tmp_path / "was-run").is_dir()
    made = read_tree(archive(tmp_path / "c.pt", b"\x80\x02" + named("no_such_module", "Thing") + b")R}b."))
    assert isinstance(made, Stub) and made.state == {} and "no_such_module" not in sys.modules


DAMAGED = [
    b"",
    b"\x80\x02",
    b"\x80\x02}q",
    b"\x80\x02(((((.",
    b"\x80\x02cos\nsystem\n}b.",
    b"\x80\x02cos\nsystem\n(K\x01tRK\x01R.",
    b"\x80\x02(" + text("a") + b"k\x00tQ.",
    b"\x80\x02I1\n.",
    b"\x80\x02\x82\x01.",
    b"\x80\x02r\xff\xff\xff\x7f.",
    b"\x80\x02" + STORAGE.replace(b"Float", b"No") + b".",
]


@pytest.mark.parametrize("data", DAMAGED)
def test_damaged_and_hostile_pickles_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        read_tree(archive(tmp_path / "x.pt", data))


@pytest.mark.parametrize("storages", [(), [("0", bytes(8))]], ids=["no record", "a short one"])
def test_a_storage_whose_record_is_not_there_is_refused_when_its_bytes_are_wanted(
    storages: Any, tmp_path: Path
) -> None:
    storage = read_tree(archive(tmp_path / "x.pt", b"\x80\x02" + STORAGE + b".", storages=storages))
    assert isinstance(storage, Storage)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        assert storage.extent


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(UnsupportedError, match="deep"):
        write_tree(deep)
    with pytest.raises(UnsupportedError, match="complex"):
        write_tree({"a": 1j})
    with pytest.raises(UnsupportedError, match="2000 bits"):
        write_tree(1 << 5000)
    with pytest.raises(UnsupportedError, match="qint8"):
        new_storage("qint8", 3)
    with pytest.raises(UnsafePickleError):
        new_global("x", "y")().add(1)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=40,
)


@settings(max_examples=200, deadline=None)
@given(plain)
def test_plain_values_read_back_by_pickle_itself(value: Any) -> None:
    data, storages = write_tree(value)
    assert storages == [] and same(pickle.loads(data), value)


def test_new_trees_are_what_torch_makes_of_them(tmp_path: Path) -> None:
    storage, empty = new_storage("float32", 6), new_storage("bfloat16", 0)
    root = {
        "m": Dict([("w", tensor(storage, 0, (2, 2), requires_grad=True)), ("b", tensor(storage, 4, (2,)))]),
        "s": tensor(storage, 5, ()),
        "e": tensor(empty, 0, (0,)),
        "size": Size((2, 0)),
    }
    made = Archive(tmp_path / "x.pt", root)
    payload = np.arange(6, dtype="<f4").tobytes()
    with open(tmp_path / "x.pt", "r+b") as file:
        file.seek(made.offsets[storage])
        file.write(payload)
    made.finish({storage: zlib.crc32(payload)})
    assert (tmp_path / "x.pt").stat().st_size == made.nbytes
    for mmap in (False, True):
        now = torch.load(tmp_path / "x.pt", mmap=mmap)
        assert torch.equal(now["m"]["w"], torch.tensor([[0.0, 1.0], [2.0, 3.0]])) and now["m"]["w"].requires_grad
        assert torch.equal(now["m"]["b"], torch.tensor([4.0, 5.0])) and now["s"].item() == 5.0
        assert now["e"].dtype == torch.bfloat16 and now["size"] == torch.Size([2, 0])
    assert all(offset % 64 == 0 for offset in made.offsets.values())


def test_entries_are_found_in_both_kinds_of_dictionary() -> None:
    tree = {"a": Dict([("b", {"c": 1})])}
    assert entry(tree, "a", "b", "c") == 1
    assert entry(tree, "a", "x") is None and entry(tree, "a", "b", "c", "d") is None
    assert pairs_of(tree["a"]) == {"b": {"c": 1}} and pairs_of(3) == {}
    assert isinstance(new_storage("int64", 1), Storage)


# ---- archives laid out without their payload: what torch and zip tools make of them ----


def test_zip_tools_find_nothing_wrong_and_an_unfinished_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    storages = [new_storage("uint8", n) for n in (0, 1, 63, 64, 65, 1000)]
    made = Archive(path, [tensor(s, 0, (s.numel,)) for s in storages])
    assert not zipfile.is_zipfile(path) and path.stat().st_size == made.nbytes
    data = {s: os.urandom(s.nbytes) for s in storages}
    with open(path, "r+b") as file:
        for storage, payload in data.items():
            file.seek(made.offsets[storage])
            file.write(payload)
    made.finish({s: zlib.crc32(payload) for s, payload in data.items()}, sync=True)
    with zipfile.ZipFile(path) as read:
        assert read.testzip() is None
        assert {name.partition("/")[0] for name in read.namelist()} == {"weights"}
    assert [bytes(t.numpy()) for t in torch.load(path)] == list(data.values())
    refs = read_torch_file(path).root
    assert [r.shape for r in refs] == [(s.numel,) for s in storages]


def test_files_beyond_4_gib_are_archives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse: the space is not really taken."""
    monkeypatch.setattr(writer, "reserve_space", lambda fd, nbytes: None)
    path = tmp_path / "x.pt"
    small, large, last = new_storage("uint8", 5), new_storage("float32", (1 << 30) + 7), new_storage("uint8", 3)
    made = Archive(path, {n: tensor(s, 0, (s.numel,)) for n, s in (("s", small), ("l", large), ("e", last))})
    with open(path, "r+b") as file:
        for storage, payload in ((small, b"abcde"), (last, b"xyz")):
            file.seek(made.offsets[storage])
            file.write(payload)
        file.seek(made.offsets[large] + large.nbytes - 4)
        file.write(b"\x00\x00\x80\x3f")
    made.finish({small: zlib.crc32(b"abcde"), last: zlib.crc32(b"xyz"), large: 0})
    now = torch.load(path, mmap=True)
    assert bytes(now["s"].numpy()) == b"abcde" and bytes(now["e"].numpy()) == b"xyz"
    assert now["l"].numel() == large.numel and now["l"][-1].item() == 1.0
    with zipfile.ZipFile(path) as read:
        assert read.read("x/data/2") == b"xyz"
    assert read_torch_file(path).root["l"].shape == (large.numel,)


@pytest.mark.extended
def test_archives_of_more_than_65535_records(tmp_path: Path) -> None:
    storages = [new_storage("uint8", 0) for _ in range(66_000)]
    made = Archive(tmp_path / "x.pt", [tensor(s, 0, (0,)) for s in storages])
    made.finish({})
    assert len(torch.load(tmp_path / "x.pt")) == 66_000
    assert len(read_torch_file(tmp_path / "x.pt").root) == 66_000


def test_a_full_disk_is_noticed_before_anything_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "reserve_space", full)
    with pytest.raises(OSError, match=r"x\.pt") as error:
        Archive(tmp_path / "x.pt", {})
    assert error.value.errno == errno.ENOSPC
